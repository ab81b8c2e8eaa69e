"""Inspection: what a folder or Hub id holds, and what converting it would do."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from poss_jax.checkpoint.folder import describe_item
from poss_jax.checkpoint.record import TOKENIZER_FILES, ModelRecord, read_record
from poss_jax.checkpoint.writing import verify_model
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
from poss_jax.model.families import method_of
from poss_jax.model.parameters import flatten_item


@dataclass
class Inspection:
    """The findings about a source."""

    source: str  # folder or Hub id, as given
    family: str | None = None  # target or draft; None for what cannot be converted
    method: str | None = None  # method of a draft, as far as its files tell
    # (name, text), in the order to show them.
    facts: list[tuple[str, str]] = field(default_factory=list)
    # The weights, and where they would go; nowhere for what cannot be converted.
    rows: list[Row] = field(default_factory=list)
    assumed: tuple[str, ...] = ()  # see `Conversion`
    needs: str | None = None  # what the user would have to say for it to be converted
    refused: str | None = None  # reason why it cannot be converted

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
    inspection = Inspection(source)
    try:
        reading = read_checkpoint(opened)
        _describe_reading(inspection, reading)
        if inspection.family == "target":
            inspection.assumed = opened.check_tokenizer(reading.llama.vocab_size)
    except UserError as error:
        inspection.refused = str(error)
        _list_unknown(inspection, opened)
    _count_weights(inspection)
    if isinstance(opened, GgufSource):
        inspection.add(
            "stored as", _count_types(tensor.dtype for tensor in opened.gguf.tensors.values())
        )
    inspection.add(
        "tokenizer files", ", ".join(_list_tokenizer_files(inspection, opened)) or "none"
    )
    if opened.revision is not None:
        inspection.add("commit", opened.revision)
    if inspection.refused is None:
        inspection.add("convert with", _command(inspection, revision))
    return inspection


def _list_tokenizer_files(inspection: Inspection, source: Source) -> list[str]:
    """Lists the tokenizer's files; a GGUF file may hold a tokenizer that they cannot be made of."""
    try:
        folder = source.tokenizer_folder
    except UserError as error:
        inspection.refused = inspection.refused or str(error)
        return []
    return [name for name in TOKENIZER_FILES if (folder / name).is_file()]


def _command(inspection: Inspection, revision: str | None) -> str:
    command = f"poss convert {inspection.family} --source {inspection.source}"
    command += f" --revision {revision}" if revision else ""
    command += " --target MODEL_FOLDER" if inspection.family == "draft" else ""
    command += " --positions-per-specialist N,N,..." if inspection.needs else ""
    return f"{command} --output DIR"


# --------------------------------------------------------------------------------------------------
# PyTorch checkpoints


def _describe_reading(inspection: Inspection, reading: Reading) -> None:
    config = reading.config
    if isinstance(config, LlamaConfig):
        inspection.family = "target"
        _describe_model(inspection, config)
    else:
        inspection.family, inspection.assumed = "draft", reading.assumed
        try:
            reading = place_specialists(reading)
            inspection.method, inspection.assumed = method_of(reading.draft), reading.assumed
            _describe_model(inspection, reading.draft)
        except UserError as error:
            inspection.needs = str(error)
            inspection.add("holds", f"a PosS draft of {config.num_specialists} specialists")
            _describe_layers(inspection, config.layer)
        if published := find_published(reading.source):
            inspection.add("for the target", PUBLISHED[published[0]].target)
    inspection.rows = reading.rows()


def _list_unknown(inspection: Inspection, source: Source) -> None:
    """Shows what can be read of a model that cannot be converted: format, name and weights."""
    with suppress(UserError):
        form, _ = find_format(source)
        if form is not None and form.read is None:
            inspection.add("holds", str(form))
    with suppress(UserError):
        inspection.add("config.json says", ", ".join(model_names(source.values)) or "no name")
    with suppress(UserError):
        inspection.rows = [Row(key, "", t.shape, t.dtype) for key, t in source.tensors.items()]


def _count_weights(inspection: Inspection) -> None:
    inspection.add("parameters", f"{inspection.num_parameters:,}")
    inspection.add("types", _count_types(row.dtype for row in inspection.rows))


def _count_types(types: Iterable[str]) -> str:
    counts = Counter(types).most_common()
    return ", ".join(f"{name} ({count} tensors)" for name, count in counts)


# --------------------------------------------------------------------------------------------------
# Our own folders


def _inspect_model(folder: AnyPath, *, verify: bool) -> Inspection:
    record = verify_model(folder) if verify else read_record(folder)
    inspection = Inspection(str(folder), record.family, record.method)
    _describe_model(inspection, record.config, "a model folder: ")
    inspection.rows = [
        Row("/".join((item, *path)), "", array.shape, array.dtype.name)
        for item in record.items
        for path, array in flatten_item(describe_item(folder, record, item)).items()
    ]
    if record.quantised is not None:
        inspection.add(
            "quantised", f"{record.quantised}, with a scale per output, except the embedding"
        )
    _count_weights(inspection)
    _describe_record(inspection, record)
    if verify:
        inspection.add("checksums", "all agree")
    return inspection


def _describe_record(inspection: Inspection, record: ModelRecord) -> None:
    target = record.target
    owner = "target" if record.family == "target" else "for the target"
    inspection.add(owner, f"{target.name}, revision {target.revision or 'unknown'}")
    inspection.add(
        "its embedding and head", f"{target.embedding_sha256[:12]}, {target.head_sha256[:12]}"
    )
    inspection.add("tokenizer", (record.tokenizer_sha256 or "none")[:12])
    if record.draft_vocabulary is not None:
        inspection.add("draft vocabulary", f"{len(record.draft_vocabulary)} tokens")
    made = record.provenance
    inspection.add("made by", " ".join(made.get("command", [])))
    versions = made.get("versions", {}).items()
    inspection.add("with", ", ".join(f"{name} {version}" for name, version in versions))


# --------------------------------------------------------------------------------------------------
# Words


def _show_draft(config: DraftConfig) -> str:
    number = config.num_specialists
    what = "1 specialist" if number == 1 else f"{number} specialists"
    what += f", the first of {config.num_further + 1} layers" if config.num_further else ""
    method = method_of(config)
    article = "an" if method[0] in "aeiou" else "a"
    return (
        f"{article} {method} draft of {what}, positions per specialist "
        f"{list_counts(config.positions_per_specialist)}, trained depth {config.trained_depth}, "
        f"fc {'with' if config.fc_bias else 'without'} bias"
        + (f", mask token {config.mask_token}" if config.mask_token is not None else "")
        + (f", a sliding window of {config.window}" if config.window else "")
        + (", its own embedding" if config.has_embedding else "")
        + (f", for a target of width {config.target_size}" if config.target_size else "")
        + "".join(f", {field} {value}" for field, value in config.other_norms.items())
    )


def _describe_model(
    inspection: Inspection, config: LlamaConfig | DraftConfig, kind: str = ""
) -> None:
    if isinstance(config, DraftConfig):
        inspection.add("holds", f"{kind}{_show_draft(config)}")
        _describe_layers(inspection, config.layer)
    else:
        inspection.add("holds", f"{kind}a target of {config.num_layers} layers")
        _describe_layers(inspection, config)


def _describe_layers(inspection: Inspection, config: LlamaConfig) -> None:
    inspection.add(
        "layers",
        f"width {config.hidden_size}, mlp {config.intermediate_size}, {config.num_heads} heads of "
        f"{config.head_dim}, {config.num_kv_heads} for keys and values"
        + "".join(f", {name}" for name in config.extras),
    )
    rope = config.rope
    scaled = f", factor {rope.factor:g}" if rope.type != "default" else ""
    inspection.add(
        "rope",
        f"{rope.type}, theta {rope.theta:g}{scaled}; "
        f"up to {config.max_position_embeddings} positions",
    )
    stops = ", ".join(map(str, config.eos_token_ids)) or "none"
    tied = ", head tied to the embedding" if config.tie_embeddings else ""
    inspection.add("vocabulary", f"{config.vocab_size} tokens, stop tokens {stops}{tied}")
