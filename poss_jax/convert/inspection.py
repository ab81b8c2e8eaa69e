"""Inspection: what a folder or Hub id holds, and what converting it would do."""

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from poss_jax.checkpoint.folder import describe_item
from poss_jax.checkpoint.record import TOKENIZER_FILES, read_record
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
    facts: dict[str, str] = field(default_factory=dict)  # in the order to show them
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
    facts = inspection.facts
    try:
        _describe_reading(inspection, read_checkpoint(opened))
        if inspection.family == "target":
            opened.check_tokenizer()
    except UserError as error:
        inspection.refused = str(error)
        _describe_unknown(inspection, opened)
    facts |= _count_weights(inspection)
    if isinstance(opened, GgufSource):
        facts["stored as"] = _count_types(tensor.dtype for tensor in opened.gguf.tensors.values())
    try:
        folder = opened.tokenizer_folder
        names = [name for name in TOKENIZER_FILES if (folder / name).is_file()]
    except UserError as error:  # a GGUF file's tokenizer that cannot be converted
        names, inspection.refused = [], inspection.refused or str(error)
    facts["tokenizer files"] = ", ".join(names) or "none"
    if opened.revision is not None:
        facts["commit"] = opened.revision
    if inspection.refused is None:
        command = f"poss convert {inspection.family} --source {source}"
        command += f" --revision {revision}" if revision else ""
        command += " --target MODEL_FOLDER" if inspection.family == "draft" else ""
        command += " --positions-per-specialist N,N,..." if inspection.needs else ""
        facts["convert with"] = f"{command} --output DIR"
    return inspection


def _describe_reading(inspection: Inspection, reading: Reading) -> None:
    """Describes a PyTorch checkpoint or GGUF file."""
    config = reading.config
    inspection.rows = reading.rows()
    if isinstance(config, LlamaConfig):
        inspection.family = "target"
        inspection.facts |= _describe_model(config)
        return
    inspection.family, inspection.assumed = "draft", reading.assumed
    try:
        reading = place_specialists(reading)
        inspection.method, inspection.assumed = method_of(reading.draft), reading.assumed
        inspection.facts |= _describe_model(reading.draft)
    except UserError as error:
        inspection.needs = str(error)
        holds = f"a PosS draft of {config.num_specialists} specialists"
        inspection.facts |= {"holds": holds, **_describe_layers(config.layer)}
    if published := find_published(reading.source):
        inspection.facts["for the target"] = PUBLISHED[published[0]].target


def _describe_unknown(inspection: Inspection, source: Source) -> None:
    """Describes what can be read of a model that cannot be converted: format, name and weights."""
    with suppress(UserError):
        form, _ = find_format(source)
        if form is not None and form.read is None:
            inspection.facts["holds"] = str(form)
    with suppress(UserError):
        names = model_names(source.values)
        inspection.facts["config.json says"] = ", ".join(names) or "no name"
    with suppress(UserError):
        inspection.rows = [Row(key, "", t.shape, t.dtype) for key, t in source.tensors.items()]


def _inspect_model(folder: AnyPath, *, verify: bool) -> Inspection:
    """Describes a model folder of ours."""
    record = verify_model(folder) if verify else read_record(folder)
    rows = [
        Row("/".join((item, *path)), "", array.shape, array.dtype.name)
        for item in record.items
        for path, array in flatten_item(describe_item(folder, record, item)).items()
    ]
    inspection = Inspection(str(folder), record.family, record.method, rows=rows)
    facts, target, made = inspection.facts, record.target, record.provenance
    facts |= _describe_model(record.config, "a model folder: ")
    if record.quantised is not None:
        facts["quantised"] = f"{record.quantised}, with a scale per output, except the embedding"
    facts |= _count_weights(inspection)
    owner = "target" if record.family == "target" else "for the target"
    facts[owner] = f"{target.name}, revision {target.revision or 'unknown'}"
    facts["its embedding and head"] = f"{target.embedding_sha256[:12]}, {target.head_sha256[:12]}"
    facts["tokenizer"] = (record.tokenizer_sha256 or "none")[:12]
    if record.draft_vocabulary is not None:
        facts["draft vocabulary"] = f"{len(record.draft_vocabulary)} tokens"
    facts["made by"] = " ".join(made.get("command", []))
    facts["with"] = ", ".join(f"{name} {v}" for name, v in made.get("versions", {}).items())
    if verify:
        facts["checksums"] = "all agree"
    return inspection


# --------------------------------------------------------------------------------------------------
# Words


def _count_weights(inspection: Inspection) -> dict[str, str]:
    types = _count_types(row.dtype for row in inspection.rows)
    return {"parameters": f"{inspection.num_parameters:,}", "types": types}


def _count_types(types: Iterable[str]) -> str:
    counts = Counter(types).most_common()
    return ", ".join(f"{name} ({count} tensors)" for name, count in counts)


def _describe_model(config: LlamaConfig | DraftConfig, kind: str = "") -> dict[str, str]:
    if isinstance(config, LlamaConfig):
        holds = f"{kind}a target of {config.num_layers} layers"
        return {"holds": holds, **_describe_layers(config)}
    number = config.num_specialists
    what = "1 specialist" if number == 1 else f"{number} specialists"
    what += f", the first of {config.num_further + 1} layers" if config.num_further else ""
    method = method_of(config)
    article = "an" if method[0] in "aeiou" else "a"
    holds = (
        f"{kind}{article} {method} draft of {what}, positions per specialist "
        f"{list_counts(config.positions_per_specialist)}, trained depth {config.trained_depth}, "
        f"fc {'with' if config.fc_bias else 'without'} bias"
        + (f", mask token {config.mask_token}" if config.mask_token is not None else "")
        + (f", a sliding window of {config.window}" if config.window else "")
        + (", its own embedding" if config.has_embedding else "")
        + (f", for a target of width {config.target_size}" if config.target_size else "")
        + "".join(f", {field} {value}" for field, value in config.other_norms.items())
    )
    return {"holds": holds, **_describe_layers(config.layer)}


def _describe_layers(config: LlamaConfig) -> dict[str, str]:
    rope, longest = config.rope, config.max_position_embeddings
    scaled = f", factor {rope.factor:g}" if rope.type != "default" else ""
    stops = ", ".join(map(str, config.eos_token_ids)) or "none"
    tied = ", head tied to the embedding" if config.tie_embeddings else ""
    return {
        "layers": f"width {config.hidden_size}, mlp {config.intermediate_size}, "
        f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
        + "".join(f", {name}" for name in config.extras),
        "rope": f"{rope.type}, theta {rope.theta:g}{scaled}; up to {longest} positions",
        "vocabulary": f"{config.vocab_size} tokens, stop tokens {stops}{tied}",
    }
