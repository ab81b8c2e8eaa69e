"""Drafts of the EAGLE-2 layout: EAGLE, HASS and PosS."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from poss_jax.checkpoint import ModelRecord, check_fit, load_item, new_record, read_record
from poss_jax.config import DraftConfig, LlamaConfig, UserError
from poss_jax.convert.draft_config import read_draft_config
from poss_jax.convert.draft_source import DraftSource, open_draft
from poss_jax.convert.names import DRAFT_EMBEDDING, DRAFT_HEAD, Slot, slots_by_key
from poss_jax.convert.plan import Conversion, DType, Reader, check_keys, same_up_to_rounding
from poss_jax.convert.source import open_source
from poss_jax.model.parameters import item_shapes

# What some layouts hold although it is the target's: key -> item of the target.
_COPIES = {DRAFT_EMBEDDING: "embed", DRAFT_HEAD: "head"}


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
        is one we know, or was exported by us.
      trained_depth: see `DraftConfig`; by default 1 for one specialist, else the sum of the spans.
      revision: on the Hub.
      dtype: what to store.

    Raises:
      UserError: anything in the source that we do not know, or that does not fit its config or the
        target.
    """
    target = Path(target)
    target_record = read_record(target)
    draft = open_draft(open_source(source, revision))
    reading = read_draft_config(
        draft, positions_per_specialist=positions_per_specialist, trained_depth=trained_depth
    )
    config = reading.config
    check_fit(f"draft {draft.origin}", config.layer, target_record)
    slots = check_draft(config, draft)
    dropped = _drop_copies(draft, target, target_record)
    reader = Reader(draft.tensors, dtype)
    return Conversion(
        record=new_record(
            config,
            target_record.target,
            tokenizer_from=target,
            draft_vocabulary=reading.draft_vocabulary,
        ),
        rows=[replace(row, key=draft.keys[row.key]) for row in reader.rows(slots, dropped)],
        items=reader.items(slots),
        num_items=len(item_shapes(config)),
        tokenizer_from=target,
        assumed=(*reading.assumed, *_compare_rope(config.layer, target_record.llama)),
    )


def check_draft(config: DraftConfig, draft: DraftSource) -> dict[str, Slot]:
    """Compares the names, shapes and types of the weights with the config; reads none of them.

    Returns:
      Where each plain key goes.

    Raises:
      UserError: every key that does not fit.
    """
    slots = slots_by_key(item_shapes(config))
    copy = (config.layer.vocab_size, config.layer.hidden_size)
    check_keys(
        draft.origin,
        draft.tensors,
        wanted={key: slot.shape for key, slot in slots.items()},
        optional=dict.fromkeys(_COPIES, copy),
    )
    return slots


def _drop_copies(draft: DraftSource, target: Path, record: ModelRecord) -> dict[str, str]:
    """What of the source is not stored and why: copies of the target's weights, if equal."""
    dropped = {}
    for key, item in _COPIES.items():
        if key not in draft.tensors:
            continue
        item = "embed" if record.llama.tie_embeddings else item
        want = np.asarray(load_item(target, record, item)["weight"])
        if not same_up_to_rounding(draft.tensors[key].read(), want):
            raise UserError(
                f"{draft.origin}: {draft.keys[key]} differs from the {_words(item)} of the target "
                f"{record.target.name}; give the target it was trained for"
            )
        dropped[key] = "equals the target's"
    return dropped


def _words(item: str) -> str:
    return {"embed": "embedding"}.get(item, item)


def _compare_rope(layer: LlamaConfig, target: LlamaConfig) -> tuple[str, ...]:
    """A draft keeps the rope it was trained with; where that is not the target's, we say so."""
    if layer.rope == target.rope:
        return ()
    ours, theirs = (
        f"rope {rope.type} with theta {rope.theta:g}" for rope in (layer.rope, target.rope)
    )
    return (f"{ours}, because the draft's config.json says so, although the target has {theirs}",)
