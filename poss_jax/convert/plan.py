"""A conversion that is checked and ready: the model to write, and the stream of its items."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import (
    ModelRecord,
    check_fit,
    new_record,
    read_draft_vocabulary,
    read_record,
    with_vocabulary,
)
from poss_jax.checkpoint.sums import cut_values, hash_values
from poss_jax.checkpoint.writing import target_identity
from poss_jax.config.models import LlamaConfig, Quantisation
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.convert.formats import read_checkpoint
from poss_jax.convert.reading import (
    EMBEDDING,
    HEAD,
    DType,
    Reading,
    Row,
    cut_tensors,
    list_counts,
    place_specialists,
)
from poss_jax.convert.source import LazyTensor, open_source
from poss_jax.model.parameters import table_of
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
