"""What a source holds, and what converting it gives: findings, or a checked plan with its items."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint.folder import describe_item, load_item
from poss_jax.checkpoint.record import (
    TOKENIZER_FILES,
    ModelRecord,
    check_fit,
    new_record,
    read_draft_vocabulary,
    read_record,
    with_vocabulary,
)
from poss_jax.checkpoint.writing import cut_values, hash_values, target_identity, verify_model
from poss_jax.config.models import DraftConfig, LlamaConfig, Quantisation
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.convert.formats import find_format, read_checkpoint
from poss_jax.convert.gguf_source import GgufSource
from poss_jax.convert.reading import (
    EMBEDDING,
    HEAD,
    PUBLISHED,
    DType,
    Reading,
    Row,
    cut_tensors,
    find_published,
    list_counts,
    model_names,
    place_specialists,
)
from poss_jax.convert.source import LazyTensor, Source, open_source
from poss_jax.model.families import method_of
from poss_jax.model.parameters import flatten_item, table_of
from poss_jax.model.quantise import is_quantisable, quantise_items
from poss_jax.shapes import Params


@dataclass(frozen=True)
class Conversion:
    """Everything `write_model` wants, and what to tell the user."""

    record: ModelRecord  # the model to be written
    rows: list[Row]  # the table of what goes where
    items: Iterator[tuple[str, Params]]  # streams (name, arrays); can be run through once
    tokenizer_from: AnyPath  # folder the tokenizer's files are copied from
    # What the source does not say and what is assumed for it, one line each.
    assumed: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Type of the stored arrays; several are joined by a plus."""
        return "+".join(sorted({row.dtype for row in self.rows if not row.path.startswith("(")}))


def plan_target(
    source: str,
    *,
    revision: str | None = None,
    dtype: DType = "keep",
    quantise: Quantisation | None = None,
) -> Conversion:
    """Opens and checks a target; nothing is written yet.

    Args:
      source: folder, GGUF file or Hub id.
      revision: branch, tag or commit on the Hub.
      dtype: type to store, of all that is not quantised.
      quantise: type to round the matrices to, from what the source holds; None keeps them.

    Raises:
      UserError: anything in the source that is unknown or does not fit its config.
    """
    reading = read_checkpoint(open_source(source, revision), "target")
    config, opened, tensors = reading.config, reading.source, reading.source.tensors
    assert isinstance(config, LlamaConfig)
    opened.check_tokenizer()
    tokenizer = opened.tokenizer_folder
    embedding = tensors[EMBEDDING].read()
    head = embedding if config.tie_embeddings else tensors[HEAD].read()
    is_twice = config.tie_embeddings and HEAD in tensors
    if is_twice and not same_up_to_rounding(embedding, tensors[HEAD].read()):
        raise UserError(
            f"{opened.folder}: config.json ties the embeddings, got another {HEAD}; "
            "set tie_word_embeddings to what the model was trained with"
        )
    identity = target_identity(*opened.identity, embedding, head)
    record = new_record(config, identity, tokenizer_from=tokenizer, quantised=quantise)
    return _convert(reading, record, dtype, tokenizer)


def plan_draft(
    source: str,
    target: str | AnyPath,
    *,
    positions_per_specialist: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
    draft_vocabulary: str | AnyPath | None = None,
    revision: str | None = None,
    dtype: DType = "keep",
) -> Conversion:
    """Opens and checks a draft against its target; nothing is written yet.

    `place_specialists` finds positions and depth that are not given.

    Args:
      draft_vocabulary: file of the tokens that it may propose; None: what the source says.

    Raises:
      UserError: anything in the source that is unknown, or that does not fit its config or the
        target; a draft vocabulary of another target, or for a draft with its own head.
    """
    target = as_path(target)
    target_record = read_record(target)
    reading = read_checkpoint(open_source(source, revision), "draft")
    reading = place_specialists(reading, positions_per_specialist, trained_depth)
    check_fit(f"draft {reading.source.folder}", reading.draft, target_record)
    reading = _place_aux_layers(reading, target_record.llama.num_layers)
    config = reading.draft
    _compare_copies(reading, target, target_record)
    vocabulary = reading.read_vocabulary()
    if vocabulary is None and reading.metadata:
        vocabulary = reading.metadata.draft_vocabulary
    record = new_record(
        config, target_record.target, tokenizer_from=target, draft_vocabulary=vocabulary
    )
    if draft_vocabulary is not None:
        tokens = read_draft_vocabulary(draft_vocabulary, target_record.llama.vocab_size)
        record = with_vocabulary(record, tokens.tolist(), origin=source)
    ropes = config.layer.rope, target_record.llama.rope
    if ropes[0] != ropes[1]:  # a draft keeps the rope it was trained with
        ours, theirs = (f"rope {rope.type} with theta {rope.theta:g}" for rope in ropes)
        line = f"{ours}, because the draft's config.json says so, although the target has {theirs}"
        reading = replace(reading, assumed=(*reading.assumed, line))
    return _convert(reading, record, dtype, target)


def _place_aux_layers(reading: Reading, num_layers: int) -> Reading:
    """Gives a draft the target layers that it reads; refuses a target without them."""
    layers, assumed = reading.draft.aux_layers, reading.assumed
    if reading.usual_aux_layers is not None:
        layers = reading.usual_aux_layers(num_layers)
        listed = list_counts(layers)
        assumed = (*assumed, f"inputs of the target's layers {listed}, the usual ones")
    if layers and (max(layers) >= num_layers or sorted({*layers}) != list(layers)):
        raise UserError(
            f"{reading.source.folder}: want inputs of different layers of the target, in order, "
            f"got {list_counts(layers)} of {num_layers}; give the target it was trained for"
        )
    return replace(reading, config=replace(reading.draft, aux_layers=layers), assumed=assumed)


def _compare_copies(reading: Reading, target: AnyPath, record: ModelRecord) -> None:
    """Checks that a draft's copies of the target's weights are equal: they are not stored."""
    for key, item in reading.copies.items():
        item = "embed" if record.llama.tie_embeddings else item
        copy = reading.source.tensors[key].read()
        if item == "head" and record.quantised:
            is_equal = hash_values(copy) == record.target.head_sha256
        else:
            want = np.asarray(load_item(target, record, item)["weight"])
            is_equal = same_up_to_rounding(copy, want)
        if not is_equal:
            advice = "give the target it was trained for"
            if "embed/weight" in table_of(reading.draft):
                advice += f", or keep {key} by embed_requires_grad true in config.json if trained"
            word = "embedding" if item == "embed" else item
            raise UserError(
                f"{reading.source.folder}: {key} differs from the {word} of the target "
                f"{record.target.name}; {advice}"
            )


def _convert(
    reading: Reading, record: ModelRecord, dtype: DType, tokenizer_from: AnyPath
) -> Conversion:
    slots, rows = reading.slots, reading.rows(dtype)
    tensors = cut_tensors(reading.source.tensors, slots)
    cast = None if dtype == "keep" else np.dtype(dtype)
    kept = None if record.quantised else cast  # what is quantised is rounded once
    items = (
        (item, unflatten_dict({slot.path: _read(tensors[key], key, kept) for key, slot in group}))
        for item, group in groupby(slots.items(), key=lambda pair: pair[1].item)
    )
    if record.quantised:
        kind, is_tied = record.quantised, record.llama.tie_embeddings
        tied = [row._replace(path="head/weight") for row in rows if row.path == "embed/weight"]
        rows = [
            row._replace(dtype=kind) if is_quantisable(row.path) else row
            for row in (*rows, *(tied if is_tied else ()))
        ]
        items = quantise_items(items, kind, dtype=cast, is_tied=is_tied)
    return Conversion(record, rows, items, tokenizer_from, reading.assumed)


def _read(tensor: LazyTensor, key: str, cast: Any) -> np.ndarray:
    array = tensor.read()
    if cast is not None:
        array = array.astype(cast, copy=False)
    if not is_finite(array):
        kind = "" if cast is None else f" as {cast}"
        raise UserError(
            f"{tensor.file}: {key} holds NaN or infinity{kind}; fetch the file again, or ask its "
            "author"
        )
    return array


def is_finite(array: np.ndarray) -> bool:
    """Tells whether an array holds neither NaN nor infinity."""
    return all(np.isfinite(values).all() for values in cut_values(array))


def same_up_to_rounding(a: np.ndarray, b: np.ndarray) -> bool:
    """Tells whether two arrays of one shape hold the same numbers, kept in different types."""
    return _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(wide: np.ndarray, narrow: np.ndarray) -> bool:
    parts = zip(cut_values(wide), cut_values(narrow), strict=True)
    with np.errstate(over="ignore"):
        return all(np.array_equal(a.astype(b.dtype), b, equal_nan=True) for a, b in parts)


# --------------------------------------------------------------------------------------------------
# Inspecting


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
# Its words


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
