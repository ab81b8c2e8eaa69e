"""What a folder or Hub id holds, and what converting it would do, without converting it."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.checkpoint import (
    TOKENIZER_FILES,
    ModelRecord,
    describe_item,
    read_record,
    verify_model,
)
from poss_jax.config import DraftConfig, LlamaConfig, UserError, read_json
from poss_jax.convert.draft import check_draft
from poss_jax.convert.draft_config import read_draft_config, read_layer
from poss_jax.convert.draft_source import recognise_draft
from poss_jax.convert.hf_config import read_llama_config
from poss_jax.convert.names import FC_BIAS, plain_name, slots_by_key
from poss_jax.convert.plan import Row
from poss_jax.convert.published import PUBLISHED, find_published
from poss_jax.convert.refusals import model_names, refuse_adapter
from poss_jax.convert.source import LazyTensor, Source, list_tensors, open_source
from poss_jax.convert.target import check_target
from poss_jax.model.parameters import flatten_item, item_shapes


@dataclass
class Inspection:
    """What was found.

    Attributes:
      source: folder or Hub id, as given.
      family: target or draft; None for what we cannot name or convert.
      method: of a draft, as far as its files tell.
      facts: (name, text), in the order to show them.
      rows: the weights, and where they would go: nowhere for what we do not know.
      assumed: as in `Conversion`.
      needs: what the user would have to say for it to be converted.
      refused: why it cannot be converted.
    """

    source: str
    family: str | None = None
    method: str | None = None
    facts: list[tuple[str, str]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    assumed: tuple[str, ...] = ()
    needs: str | None = None
    refused: str | None = None

    @property
    def summary(self) -> dict[str, Any]:
        """The same for programs."""
        return {
            "source": self.source,
            "family": self.family,
            "method": self.method,
            "parameters": sum(_size(row) for row in self.rows),
            "dtypes": sorted({row.dtype for row in self.rows}),
            "assumed": list(self.assumed),
            "needs": self.needs,
            "refused": self.refused,
        }

    def add(self, name: str, text: str) -> None:
        """Adds a fact."""
        self.facts.append((name, text))


def inspect(source: str, revision: str | None = None, *, verify: bool = False) -> Inspection:
    """Looks at a PyTorch checkpoint or at a model folder of ours.

    Args:
      source: folder or Hub id.
      revision: on the Hub.
      verify: compare a model folder with its checksums.

    Raises:
      UserError: there is nothing to look at, or a checksum differs. What could not be converted
        raises nothing: that is what was to be found out.
    """
    if revision is None and (Path(source) / "model.json").is_file():
        return _inspect_model(Path(source), verify=verify)
    if verify:
        raise UserError(
            f"{source} is no model folder, whose checksums --verify compares; leave it out"
        )
    opened = open_source(source, revision, weights=False)
    found = Inspection(source)
    tensors: dict[str, LazyTensor] = {}
    try:
        refuse_adapter(opened.folder)
        tensors = list_tensors(opened)
        if _is_draft(tensors):
            _read_draft(found, opened, tensors)
        else:
            _read_target(found, opened, tensors)
    except UserError as error:
        found.refused = str(error)
        _name_config(found, opened)
        found.rows = [Row(key, "", t.shape, t.dtype) for key, t in tensors.items()]
    _count_weights(found)
    files = [name for name in TOKENIZER_FILES if (opened.folder / name).is_file()]
    found.add("tokenizer files", ", ".join(files) or "none")
    if opened.revision is not None:
        found.add("commit", opened.revision)
    if found.refused is None:
        found.add("convert with", _command(found, revision))
    return found


def _is_draft(tensors: Mapping[str, LazyTensor]) -> bool:
    """Whether the draft command is the one to name it: a fusion layer, or EAGLE-3's names."""
    signs = ("fc.", "midlayer", "fusion_fc.", "d2t")
    return any(plain_name(key).startswith(signs) for key in tensors)


def _command(found: Inspection, revision: str | None) -> str:
    command = f"python -m poss_jax.convert {found.family} --source {found.source}"
    command += f" --revision {revision}" if revision else ""
    command += " --target MODEL_FOLDER" if found.family == "draft" else ""
    command += " --positions-per-specialist N,N,..." if found.needs else ""
    return f"{command} --output DIR"


# --------------------------------------------------------------------------------------------------
# PyTorch checkpoints


def _read_target(found: Inspection, source: Source, tensors: Mapping[str, LazyTensor]) -> None:
    config = read_llama_config(source.folder)
    dropped = check_target(config, tensors, str(source.folder))
    slots = slots_by_key(item_shapes(config))
    found.family = "target"
    found.rows = [
        Row(key, str(slots.get(key) or f"(not stored: {dropped.get(key)})"), t.shape, t.dtype)
        for key, t in tensors.items()
    ]
    found.add("holds", f"a target of {config.num_layers} layers")
    _describe_layers(found, config)


def _read_draft(found: Inspection, source: Source, tensors: Mapping[str, LazyTensor]) -> None:
    draft = recognise_draft(source, tensors)
    layer, assumed = read_layer(draft)
    found.assumed = tuple(assumed)
    config = DraftConfig(
        layer=layer,
        positions_per_specialist=(1,) * draft.num_layers,
        fc_bias=FC_BIAS in draft.tensors,
    )
    slots = check_draft(config, draft)
    found.family = "draft"
    try:
        reading = read_draft_config(draft)
        found.method, found.assumed = reading.config.method, reading.assumed
        found.add("holds", _describe_draft(reading.config))
    except UserError as error:
        found.needs = str(error)
        found.add("holds", f"a PosS draft of {draft.num_layers} specialists")
    _describe_layers(found, layer)
    found.rows = [
        Row(draft.keys[key], str(slots.get(key) or "(a copy of the target's)"), t.shape, t.dtype)
        for key, t in draft.tensors.items()
    ]
    published = find_published(source)
    if published:
        found.add("for the target", PUBLISHED[published[0]].target)


def _name_config(found: Inspection, source: Source) -> None:
    """What config.json calls a model that we do not convert, if there is one that can be read."""
    try:
        values = read_json(source.folder / "config.json")
    except UserError:
        return
    found.add("config.json says", ", ".join(model_names(values)) or "no name")


def _count_weights(found: Inspection) -> None:
    counts = Counter(row.dtype for row in found.rows)
    found.add("parameters", f"{sum(_size(row) for row in found.rows):,}")
    found.add("types", ", ".join(f"{name} ({count} tensors)" for name, count in counts.items()))


def _size(row: Row) -> int:
    return int(np.prod(row.shape))


# --------------------------------------------------------------------------------------------------
# Our own folders


def _inspect_model(folder: Path, *, verify: bool) -> Inspection:
    record = verify_model(folder) if verify else read_record(folder)
    found = Inspection(str(folder), record.family, record.method)
    if isinstance(record.config, DraftConfig):
        found.add("holds", f"a model folder: {_describe_draft(record.config)}")
        _describe_layers(found, record.config.layer)
    else:
        found.add("holds", f"a model folder: a target of {record.config.num_layers} layers")
        _describe_layers(found, record.config)
    found.rows = [
        Row("/".join((item, *path)), "", array.shape, array.dtype.name)
        for item in item_shapes(record.config)
        for path, array in flatten_item(describe_item(folder, record, item)).items()
    ]
    _count_weights(found)
    _describe_record(found, record)
    if verify:
        found.add("checksums", "all agree")
    return found


def _describe_record(found: Inspection, record: ModelRecord) -> None:
    target = record.target
    owner = "target" if record.family == "target" else "for the target"
    found.add(owner, f"{target.name}, revision {target.revision or 'unknown'}")
    found.add(
        "its embedding and head", f"{target.embedding_sha256[:12]}, {target.head_sha256[:12]}"
    )
    found.add("tokenizer", (record.tokenizer_sha256 or "none")[:12])
    if record.draft_vocabulary is not None:
        found.add("draft vocabulary", f"{len(record.draft_vocabulary)} tokens")
    made = record.provenance
    found.add("made by", " ".join(made.get("command", [])))
    versions = made.get("versions", {}).items()
    found.add("with", ", ".join(f"{name} {version}" for name, version in versions))


# --------------------------------------------------------------------------------------------------
# Words


def _describe_draft(config: DraftConfig) -> str:
    spans = ",".join(map(str, config.positions_per_specialist))
    number = config.num_specialists
    what = "1 specialist" if number == 1 else f"{number} specialists"
    return (
        f"a {config.method} draft of {what}, positions per specialist {spans}, trained depth "
        f"{config.trained_depth}, fc {'with' if config.fc_bias else 'without'} bias"
    )


def _describe_layers(found: Inspection, config: LlamaConfig) -> None:
    extras = [
        name for name in ("qkv_bias", "o_bias", "qk_norm", "mlp_bias") if getattr(config, name)
    ]
    found.add(
        "layers",
        f"width {config.hidden_size}, mlp {config.intermediate_size}, {config.num_heads} heads of "
        f"{config.head_dim}, {config.num_kv_heads} for keys and values"
        + "".join(f", {name}" for name in extras),
    )
    rope = config.rope
    scaled = f", factor {rope.factor:g}" if rope.type != "default" else ""
    found.add(
        "rope",
        f"{rope.type}, theta {rope.theta:g}{scaled}; "
        f"up to {config.max_position_embeddings} positions",
    )
    stops = ", ".join(map(str, config.eos_token_ids)) or "none"
    tied = ", head tied to the embedding" if config.tie_embeddings else ""
    found.add("vocabulary", f"{config.vocab_size} tokens, stop tokens {stops}{tied}")
