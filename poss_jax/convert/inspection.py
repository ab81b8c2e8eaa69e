"""Inspection: what a folder or Hub id holds, and what converting it would do."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from poss_jax.checkpoint.folder import verify_model
from poss_jax.checkpoint.items import describe_item
from poss_jax.checkpoint.record import TOKENIZER_FILES, ModelRecord, read_record
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.convert.formats import find_format, read_checkpoint
from poss_jax.convert.gguf_source import GgufSource
from poss_jax.convert.reading import (
    PUBLISHED,
    Reading,
    Row,
    find_published,
    list_counts,
    model_names,
    place_specialists,
)
from poss_jax.convert.source import Source, open_source
from poss_jax.model.parameters import flatten_item


@dataclass
class Inspection:
    """The findings about a source.

    Attributes:
      source: folder or Hub id, as given.
      family: target or draft; None for what cannot be converted.
      method: method of a draft, as far as its files tell.
      facts: (name, text), in the order to show them.
      rows: the weights, and where they would go; nowhere for what cannot be converted.
      assumed: see `Conversion`.
      needs: what the user would have to say for it to be converted.
      refused: reason why it cannot be converted.
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
    def num_parameters(self) -> int:
        """Number of weights."""
        return sum(int(np.prod(row.shape)) for row in self.rows)

    @property
    def summary(self) -> dict[str, Any]:
        """The findings for programs, without the facts."""
        return {
            "source": self.source,
            "family": self.family,
            "method": self.method,
            "parameters": self.num_parameters,
            "dtypes": sorted({row.dtype for row in self.rows}),
            "assumed": list(self.assumed),
            "needs": self.needs,
            "refused": self.refused,
        }

    def add(self, name: str, text: str) -> None:
        """Adds a fact."""
        self.facts.append((name, text))


def inspect(source: str, revision: str | None = None, *, verify: bool = False) -> Inspection:
    """Looks at a checkpoint of another program or at a model folder of ours.

    Raises:
      UserError: the source does not exist, or a checksum differs. A checkpoint that cannot be
        converted raises nothing: that is a finding.
    """
    if revision is None and (as_path(source) / "model.json").is_file():
        return _inspect_model(as_path(source), verify=verify)
    if verify:
        raise UserError(
            f"--verify: want a model folder, whose checksums are compared, got {source}; name one, "
            "or leave out --verify"
        )
    opened = open_source(source, revision, weights=False)
    found = Inspection(source)
    try:
        reading = read_checkpoint(opened)
        _describe_reading(found, reading)
        if found.family == "target":
            found.assumed = opened.check_tokenizer(reading.llama.vocab_size)
    except UserError as error:
        found.refused = str(error)
        _list_unknown(found, opened)
    _count_weights(found)
    if isinstance(opened, GgufSource):
        found.add("stored as", _count_types(one.type.name for one in opened.gguf.tensors.values()))
    found.add("tokenizer files", ", ".join(_list_tokenizer_files(found, opened)) or "none")
    if opened.revision is not None:
        found.add("commit", opened.revision)
    if found.refused is None:
        found.add("convert with", _command(found, revision))
    return found


def _list_tokenizer_files(found: Inspection, source: Source) -> list[str]:
    """Lists the tokenizer's files; a GGUF file may hold a tokenizer that they cannot be made of."""
    try:
        folder = source.tokenizer_folder
    except UserError as error:
        found.refused = found.refused or str(error)
        return []
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _command(found: Inspection, revision: str | None) -> str:
    command = f"poss convert {found.family} --source {found.source}"
    command += f" --revision {revision}" if revision else ""
    command += " --target MODEL_FOLDER" if found.family == "draft" else ""
    command += " --positions-per-specialist N,N,..." if found.needs else ""
    return f"{command} --output DIR"


# --------------------------------------------------------------------------------------------------
# PyTorch checkpoints


def _describe_reading(found: Inspection, reading: Reading) -> None:
    config = reading.config
    if isinstance(config, LlamaConfig):
        found.family = "target"
        _describe_model(found, config)
    else:
        found.family, found.assumed = "draft", reading.assumed
        try:
            reading = place_specialists(reading)
            found.method, found.assumed = reading.draft.method, reading.assumed
            _describe_model(found, reading.draft)
        except UserError as error:
            found.needs = str(error)
            found.add("holds", f"a PosS draft of {config.num_specialists} specialists")
            _describe_layers(found, config.layer)
        if published := find_published(reading.source):
            found.add("for the target", PUBLISHED[published[0]].target)
    found.rows = reading.rows()


def _list_unknown(found: Inspection, source: Source) -> None:
    """Shows what can be read of a model that cannot be converted: format, name and weights."""
    with suppress(UserError):
        form, _ = find_format(source)
        if form is not None and form.read is None:
            found.add("holds", str(form))
    with suppress(UserError):
        found.add("config.json says", ", ".join(model_names(source.values)) or "no name")
    with suppress(UserError):
        found.rows = [Row(key, "", t.shape, t.dtype) for key, t in source.tensors.items()]


def _count_weights(found: Inspection) -> None:
    found.add("parameters", f"{found.num_parameters:,}")
    found.add("types", _count_types(row.dtype for row in found.rows))


def _count_types(types: Iterable[str]) -> str:
    counts = Counter(types).most_common()
    return ", ".join(f"{name} ({count} tensors)" for name, count in counts)


# --------------------------------------------------------------------------------------------------
# Our own folders


def _inspect_model(folder: AnyPath, *, verify: bool) -> Inspection:
    record = verify_model(folder) if verify else read_record(folder)
    found = Inspection(str(folder), record.family, record.method)
    _describe_model(found, record.config, "a model folder: ")
    found.rows = [
        Row("/".join((item, *path)), "", array.shape, array.dtype.name)
        for item in record.items
        for path, array in flatten_item(describe_item(folder, record, item)).items()
    ]
    if record.quantised is not None:
        found.add("quantised", f"{record.quantised}, with a scale per output, except the embedding")
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


def _show_draft(config: DraftConfig) -> str:
    number = config.num_specialists
    what = "1 specialist" if number == 1 else f"{number} specialists"
    what += f", the first of {config.num_further + 1} layers" if config.num_further else ""
    article = "an" if config.method[0] in "aeiou" else "a"
    return (
        f"{article} {config.method} draft of {what}, positions per specialist "
        f"{list_counts(config.positions_per_specialist)}, trained depth {config.trained_depth}, "
        f"fc {'with' if config.fc_bias else 'without'} bias"
        + (f", mask token {config.mask_token}" if config.mask_token is not None else "")
        + (f", a sliding window of {config.window}" if config.window else "")
        + (", its own embedding" if config.has_embedding else "")
        + (f", for a target of width {config.target_size}" if config.target_size else "")
        + "".join(f", {field} {value}" for field, value in config.other_norms.items())
    )


def _describe_model(found: Inspection, config: LlamaConfig | DraftConfig, kind: str = "") -> None:
    if isinstance(config, DraftConfig):
        found.add("holds", f"{kind}{_show_draft(config)}")
        _describe_layers(found, config.layer)
    else:
        found.add("holds", f"{kind}a target of {config.num_layers} layers")
        _describe_layers(found, config)


def _describe_layers(found: Inspection, config: LlamaConfig) -> None:
    found.add(
        "layers",
        f"width {config.hidden_size}, mlp {config.intermediate_size}, {config.num_heads} heads of "
        f"{config.head_dim}, {config.num_kv_heads} for keys and values"
        + "".join(f", {name}" for name in config.extras),
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
