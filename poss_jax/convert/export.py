"""Export: a model folder of ours as the PyTorch checkpoint it would have come from."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, islice, pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from poss_jax.checkpoint import torch_io
from poss_jax.checkpoint.folder import describe_item, load_item
from poss_jax.checkpoint.record import ModelRecord, read_record
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.checkpoint.writing import copy_tokenizer, write_sums
from poss_jax.config import __version__
from poss_jax.config.models import DraftConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.convert.layouts import LAYOUTS, Layout, Outgoing, target_config_json
from poss_jax.convert.reading import DRAFT_EMBEDDING, FC, DType, Row, Slot, slots_by_key, split_rows
from poss_jax.convert.source import HUB_ID
from poss_jax.model.families import method_of
from poss_jax.model.parameters import flatten_item


class Tensor(NamedTuple):
    """A tensor to write, made of one array of a model folder or, if fused, of several."""

    row: Row  # our paths -> key, with the shape and type that are written
    folder: AnyPath  # the model folder
    record: ModelRecord
    item: str
    paths: list[tuple[str, ...]]  # its arrays in the item


@dataclass(frozen=True)
class Export:
    """An export that is checked and ready."""

    config: dict[str, Any]  # contents of config.json
    tensors: list[Tensor]  # item by item
    # Folder whose tokenizer files are copied; None copies none.
    tokenizer_from: AnyPath | None = None
    # Arrays that are not ours, by key; their rows are the last.
    maps: Mapping[str, np.ndarray] = field(default_factory=dict)
    card: str | None = None  # contents of README.md; None writes none

    @property
    def rows(self) -> list[Row]:
        """The table of what is written."""
        maps = self.maps.items()
        return [tensor.row for tensor in self.tensors] + [
            Row("(draft vocabulary)", key, array.shape, array.dtype.name) for key, array in maps
        ]

    @property
    def dtype(self) -> str:
        """Type of the written arrays; several are joined by a plus."""
        return "+".join(sorted({tensor.row.dtype for tensor in self.tensors}))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Streams (key, array) in the order of the rows, one item in memory at a time."""
        for (folder, item), group in groupby(self.tensors, attrgetter("folder", "item")):
            first, *further = group
            arrays = flatten_item(load_item(folder, first.record, item))
            for row, *_, paths in (first, *further):
                cast = [_cast(row, np.asarray(arrays.pop(path))) for path in paths]
                # A copy, so that PyTorch takes it as it is, and so that the item can be freed.
                yield row.path, np.concatenate(cast)
        yield from self.maps.items()


def plan_export(
    model: str | AnyPath,
    *,
    form: str | None = None,
    target: str | AnyPath | None = None,
    specialist: int | None = None,
    verifier: str | None = None,
    dtype: DType = "keep",
) -> Export:
    """Plans the export of any model folder.

    Args:
      form: name of one of `LAYOUTS`, or hf; by default hf for a target, and for a draft the first
        layout of its family that holds as many specialists.
      verifier: see `Outgoing`, for a layout that names the target's checkpoint.
      dtype: type to write; by default what is stored.

    Raises:
      UserError: options that do not go together, a damaged folder, another target than the draft
        was made for, or a model that the layout cannot hold.
    """
    folder, record = as_path(model), read_record(model)
    if record.family == "target":
        if form not in (None, "hf"):
            raise UserError(f"{model} is a target; give --format hf")
        if (target, specialist, verifier) != (None, None, None):
            raise UserError(
                "--target, --specialist and --verifier are for drafts; leave them out for a target"
            )
        if record.quantised is not None:
            raise UserError(
                f"{folder} is quantised to {record.quantised}, which no layout holds; export the "
                "target it was made from"
            )
        tensors = _plan_tensors(folder, record, slots_by_key(record.llama), dtype)
        return Export(target_config_json(record.llama, tensors[0].row.dtype), tensors, folder)
    layout = _choose_layout(folder, record.draft, form, specialist)
    if verifier is not None and not layout.names_verifier:
        named = _list_formats([layout for layout in LAYOUTS if layout.names_verifier])
        raise UserError(
            f"--verifier is for {named}; --format {layout.name} does not name the target's "
            "checkpoint, leave it out"
        )
    if target is None:
        raise UserError(
            "the layout of drafts holds or describes parts of their target, such as its embedding; "
            "give its folder: --target DIR"
        )
    return _plan_draft(folder, record, as_path(target), layout, specialist, verifier, dtype)


def _choose_layout(
    folder: AnyPath, config: DraftConfig, form: str | None, specialist: int | None
) -> Layout:
    """Finds the layout to write; by default the first one that holds what is to be written."""
    number, is_single = config.num_specialists, specialist is not None
    layouts = [layout for layout in LAYOUTS if layout.family == config.family]
    what = f"the family {config.family}"
    if config.num_further:
        layouts = [layout for layout in layouts if layout.is_stack and config.is_looped]
        what = f"a specialist of {config.num_further + 1} layers"
    if not layouts:
        raise UserError(f"{folder}: no layout holds {what}; the draft stays with poss_jax")
    if is_single or number > 1:
        layouts = [layout for layout in layouts if layout.is_single == is_single]
    chosen = next((layout for layout in layouts if form in (None, layout.name)), None)
    if chosen is None:
        what, advice = "one specialist", ""
        if number > 1 and not is_single:
            what = f"all {number} specialists"
            advice = f"; --specialist 0 to {number - 1} writes one of them"
        raise UserError(
            f"{folder}: want {_list_formats(layouts)} for {what}, got --format {form}{advice}"
        )
    return chosen


def _list_formats(layouts: Sequence[Layout]) -> str:
    return " or ".join(f"--format {layout.name}" for layout in layouts)


def _plan_draft(
    folder: AnyPath,
    record: ModelRecord,
    target_folder: AnyPath,
    layout: Layout,
    specialist: int | None,
    verifier: str | None,
    dtype: DType,
) -> Export:
    """Plans a draft; a copy of the target's embedding takes fc's type."""
    target = read_record(target_folder)
    if target.family != "target" or not record.target.same_weights(target.target):
        raise UserError(
            f"{target_folder}: want the target {record.target.name} that draft {folder} was made "
            f"for, got {target.family} {target.target.name} with another embedding or head"
        )
    config, number = record.draft, record.draft.num_specialists
    if specialist is not None:
        if not 0 <= specialist < number:
            raise UserError(
                f"specialist {specialist} does not exist; the draft has {number}, give 0 to "
                f"{number - 1}"
            )
        config = replace(config, positions_per_specialist=(1,))
    slots = {}
    for key, slot in slots_by_key(config).items():
        if specialist is not None and slot.item.startswith("specialists/"):
            slot = replace(slot, item=f"specialists/{specialist}")
        slots[layout.key(key)] = slot
    tensors = _plan_tensors(folder, record, slots, dtype)
    fc_dtype = next(tensor.row.dtype for tensor in tensors if tensor.row.path == FC)
    if layout.has_embedding and not config.has_embedding:
        shape = (config.layer.vocab_size, config.feature_size)
        copy = {DRAFT_EMBEDDING: Slot("embed", ("weight",), shape)}
        tensors = _plan_tensors(target_folder, target, copy, fc_dtype) + tensors
    origin = f"{folder}, --format {layout.name}"
    outgoing = Outgoing(origin, config, record.draft_vocabulary, target, fc_dtype, verifier)
    maps = _vocabulary_maps(outgoing, layout)
    card = model_card(outgoing, layout, specialist)
    return Export(layout.describe(outgoing), tensors, maps=maps, card=card)


def _vocabulary_maps(draft: Outgoing, layout: Layout) -> dict[str, np.ndarray]:
    """Makes `d2t`, offsets from a draft's ids to the target's, and `t2d`, which tokens it has."""
    if layout.maps == "never" or (layout.maps == "subset" and draft.vocabulary is None):
        return {}
    size = draft.config.layer.vocab_size
    ids = np.arange(size) if draft.vocabulary is None else np.array(draft.vocabulary, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(size), ids)}


# --------------------------------------------------------------------------------------------------
# Tensors


def _plan_tensors(
    folder: AnyPath, record: ModelRecord, slots: Mapping[str, Slot], dtype: str
) -> list[Tensor]:
    """Plans the tensors of slots by their keys; parts of several types are joined in float32."""
    items = dict.fromkeys(slot.item for slot in slots.values())
    stored = {item: flatten_item(describe_item(folder, record, item)) for item in items}
    tensors = []
    for key, group in groupby(slots.items(), key=lambda pair: split_rows(pair[0])[0]):
        first, *further = parts = [slot for _, slot in group]
        types = {np.dtype(stored[slot.item][slot.path].dtype).name for slot in parts}
        kept = types.pop() if len(types) == 1 else "float32"
        path = "+".join([str(first), *(slot.path[-2] for slot in further)])
        shape = (sum(slot.shape[0] for slot in parts), *first.shape[1:])
        row = Row(path, key, shape, kept if dtype == "keep" else dtype)
        tensors.append(Tensor(row, folder, record, first.item, [slot.path for slot in parts]))
    return tensors


def _cast(row: Row, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(row.dtype, copy=False)
    if cast.dtype != array.dtype and np.isinf(cast).any() and not np.isinf(array).any():
        raise UserError(f"{row.path} holds numbers beyond {row.dtype}; give another --dtype")
    return cast


# --------------------------------------------------------------------------------------------------
# Files


def write_export(
    folder: str | AnyPath,
    export: Export,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    as_bin: bool = False,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes an exported checkpoint with its SHA256SUMS, or nothing at all.

    Args:
      arrays: `export.arrays()`, or a progress bar around it; a shard at a time is in memory.
      as_bin: write PyTorch's own format instead of safetensors; needs torch.
      max_shard_bytes: larger models are cut into files of at most this size, with an index.

    Raises:
      UserError: the folder is not empty or cannot be written, or torch is wanted and missing.
    """
    stem, suffix = ("pytorch_model", "bin") if as_bin else ("model", "safetensors")
    shards = _shards(export.rows, max_shard_bytes)
    arrays, weight_map = iter(arrays), {}
    with whole_folder(folder) as partial:
        for number, rows in enumerate(shards, start=1):
            end = f"-{number:05}-of-{len(shards):05}" if len(shards) > 1 else ""
            shard = f"{stem}{end}.{suffix}"
            tensors = dict(islice(arrays, len(rows)))
            try:
                if as_bin:
                    torch_io.write_bin(partial / shard, tensors)
                else:  # transformers insists on the metadata
                    save_file(tensors, partial / shard, metadata={"format": "pt"})
            except SafetensorError as error:
                raise UserError(f"{shard} cannot be written: {error}; nothing is kept") from error
            weight_map |= dict.fromkeys((row.path for row in rows), shard)
        if len(shards) > 1:
            size = sum(map(_num_bytes, export.rows))
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            _write_json(partial / f"{stem}.{suffix}.index.json", index)
        _write_json(partial / "config.json", export.config)
        if export.tokenizer_from is not None:
            copy_tokenizer(export.tokenizer_from, partial)
        write_sums(partial, [path.name for path in partial.iterdir()])
        if export.card is not None:  # without a checksum: owners add to it
            (partial / "README.md").write_text(export.card, encoding="utf-8")


def _num_bytes(row: Row) -> int:
    return int(np.prod(row.shape)) * np.dtype(row.dtype).itemsize


def _shards(rows: list[Row], max_bytes: int) -> list[list[Row]]:
    """Cuts the rows, in order, into parts of at most `max_bytes` (or of a single row)."""
    shards: list[list[Row]] = []
    size = max_bytes
    for row in rows:
        size += _num_bytes(row)
        if size > max_bytes or not shards:
            shards.append([])
            size = _num_bytes(row)
        shards[-1].append(row)
    return shards


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------
# The model card of a draft


_CARD = """---
{base}tags: [speculative-decoding]
---

# Draft model for {name}

A draft ({method}) for speculative decoding with {name}, and with no other model.
poss_jax {version} exported it in the layout `{layout.name}`, which is read by {layout.readers}.
{notes}
| | |
|---|---|
{facts}

poss_jax converts it back with

    poss convert draft --source THIS_FOLDER --target TARGET --output DIR
"""


def model_card(draft: Outgoing, layout: Layout, specialist: int | None) -> str:
    """Writes README.md of an exported draft; of one specialist, or with None of all."""
    config, name = draft.config, draft.target.target.name
    rope, size, number = config.layer.rope, config.layer.vocab_size, config.num_specialists
    notes = [] if specialist is None else [f"It is specialist {specialist} of a PosS draft."]
    notes += [layout.note] if layout.note else []
    specialists = "1, for all positions"
    if number > 1:  # such as "3: positions 1-3, 4-6, 7 on"
        starts = [*accumulate(config.positions_per_specialist[:-1], initial=1)]
        spans = [
            str(start) if end == start + 1 else f"{start}-{end - 1}"
            for start, end in pairwise(starts)
        ]
        specialists = f"{number}: positions {', '.join(spans)}, {starts[-1]} on"
    tokens = f"{len(draft.vocabulary)} of {size}" if draft.vocabulary else f"all {size}"
    features = "its last hidden state, normed"
    if config.aux_layers:
        features = f"the inputs of its layers {', '.join(map(str, config.aux_layers))} (from 0)"
    facts = {
        "specialists": specialists,
        "trained depth": config.trained_depth,
        "tokens it can propose": tokens,
        "reads of the target": features,
        "rope": f"{rope.type}, theta {rope.theta:g}",
        "weights": draft.dtype,
    }
    return _CARD.format(
        base=f"base_model: {json.dumps(name)}\n" if HUB_ID.fullmatch(name) else "",
        name=name,
        method=method_of(config),
        version=__version__,
        layout=layout,
        notes="".join(f"\n{note}\n" for note in notes),
        facts="\n".join(f"| {what} | {value} |" for what, value in facts.items()),
    )
