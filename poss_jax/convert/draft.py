"""Drafts of the EAGLE-2 layout: EAGLE, HASS and PosS."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from poss_jax.checkpoint import (
    ModelRecord,
    check_fit,
    item_shapes,
    load_item,
    new_record,
    read_record,
)
from poss_jax.config import DraftConfig, UserError
from poss_jax.convert.hf_config import read_llama_config
from poss_jax.convert.names import DRAFT_EMBEDDING, slots_by_key, source_key
from poss_jax.convert.plan import Conversion, DType, Reader, check_keys, same_up_to_rounding
from poss_jax.convert.source import LazyTensor, Source, open_source, open_tensors

_FC_BIAS = source_key("fc", ("bias",))
_LAYER = re.compile(r"layers\.(\d+)\.")

# Hub id -> (positions per specialist, trained depth), which these checkpoints do not store.
PUBLISHED: dict[str, tuple[tuple[int, ...], int]] = {
    "HINT-lab/PosS1-Llama3-8B-Instruct": ((1,) * 7, 7),
    "HINT-lab/PosS2-Llama3-8B-Instruct": ((2,) * 4, 8),
    "HINT-lab/PosS3-Llama3-8B-Instruct": ((3,) * 4, 12),
    "HINT-lab/PosS1-Llama2-13B-Chat": ((1,) * 6, 6),
    "HINT-lab/PosS2-Llama2-13B-Chat": ((2,) * 3, 6),
    "HINT-lab/PosS3-Llama2-13B-Chat": ((3,) * 2, 6),
    "HINT-lab/HASS-Llama3-8B-Instruct-Reproduce": ((1,), 3),
    "HArmonizedSS/HASS-LLaMA2-Chat-13B": ((1,), 3),
}


def plan_draft(
    source: str,
    target: str | Path,
    *,
    positions_per_specialist: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
    revision: str | None = None,
    dtype: DType = "keep",
) -> Conversion:
    """Opens and checks a draft against its target; nothing is written yet.

    Args:
      source: folder or Hub id.
      target: model folder of the converted target.
      positions_per_specialist: see `DraftConfig`; needed for several specialists unless the source
        is a Hub id we know.
      trained_depth: see `DraftConfig`; by default 1 for one specialist, else the sum of the spans.
      revision: on the Hub.
      dtype: what to store.

    Raises:
      UserError: anything in the source that we do not know, or that does not fit its config or the
        target.
    """
    target = Path(target)
    target_record = read_record(target)
    opened = open_source(source, revision)
    layer = read_llama_config(opened.folder)
    check_fit(f"draft {opened.folder}", layer, target_record)
    tensors = open_tensors(opened.folder)
    spans, depth = _spans(opened, _count_layers(tensors), positions_per_specialist)
    config = DraftConfig(
        layer=layer,
        positions_per_specialist=spans,
        trained_depth=trained_depth or depth,
        fc_bias=_FC_BIAS in tensors,
    )
    slots = slots_by_key(item_shapes(config))
    wanted = {key: slot.shape for key, slot in slots.items()}
    optional = {DRAFT_EMBEDDING: (layer.vocab_size, layer.hidden_size)}
    check_keys(str(opened.folder), tensors, wanted, optional)
    dropped = _drop_embedding(opened.folder, tensors, target, target_record)
    reader = Reader(tensors, dtype)
    return Conversion(
        record=new_record(config, target_record.target, tokenizer_from=target),
        rows=reader.rows(slots, dropped),
        items=reader.items(slots),
        num_items=len(item_shapes(config)),
        tokenizer_from=target,
    )


def _count_layers(keys: Iterable[str]) -> int:
    """Number of specialists; at least 1, so that a draft without any is told what is missing."""
    matches = map(_LAYER.match, keys)
    return max(1, len({match[1] for match in matches if match}))


def _spans(
    source: Source, num_layers: int, given: tuple[int, ...] | None
) -> tuple[tuple[int, ...], int]:
    """Positions per specialist and trained depth, by flag, by Hub id, or because one is alone."""
    known = PUBLISHED.get(source.name) if source.revision else None
    spans = given or (known[0] if known else (1,) if num_layers == 1 else None)
    example = ",".join(["3"] * num_layers)
    if spans is None:
        raise UserError(
            f"{source.name} has {num_layers} specialists and does not say which positions each "
            f"drafts; give {num_layers} counts, such as --positions-per-specialist {example}"
        )
    if len(spans) != num_layers:
        raise UserError(
            f"{source.name} has {num_layers} specialists, got {len(spans)} positions per "
            f"specialist; give {num_layers} counts, such as --positions-per-specialist {example}"
        )
    if known and known[0] == spans:
        return known
    return spans, 1 if num_layers == 1 else sum(spans)


def _drop_embedding(
    folder: Path, tensors: Mapping[str, LazyTensor], target: Path, record: ModelRecord
) -> dict[str, str]:
    """What of the source is not stored and why: the copy of the target's embedding, if equal."""
    if DRAFT_EMBEDDING not in tensors:
        return {}
    want = np.asarray(load_item(target, record, "embed")["weight"])
    if not same_up_to_rounding(tensors[DRAFT_EMBEDDING].read(), want):
        raise UserError(
            f"{folder}: {DRAFT_EMBEDDING} differs from the embedding of the target "
            f"{record.target.name}; give the target it was trained for"
        )
    return {DRAFT_EMBEDDING: "equals the target's"}
