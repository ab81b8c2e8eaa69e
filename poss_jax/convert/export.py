"""Export: a model folder of ours as the PyTorch checkpoint it would have come from."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from poss_jax.checkpoint import torch_io
from poss_jax.checkpoint.folder import copy_tokenizer
from poss_jax.checkpoint.items import describe_item, load_item
from poss_jax.checkpoint.record import ModelRecord, read_record
from poss_jax.checkpoint.sums import write_sums
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.config.models import DraftConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError
from poss_jax.config.version import __version__
from poss_jax.convert.layouts import LAYOUTS, Layout, Outgoing, target_config_json
from poss_jax.convert.names import DRAFT_EMBEDDING, FC, fused_name, stacked_name
from poss_jax.convert.reading import Row
from poss_jax.convert.source import HUB_ID
from poss_jax.model.parameters import flatten_item, item_shapes, table_of, torch_name

ExportDType = Literal["keep", "float32", "bfloat16", "float16"]

MAX_SHARD_BYTES = 5_000_000_000

_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
_TYPES |= {"int64": np.int64, "bool": np.bool_}


@dataclass(frozen=True)
class Model:
    """A model folder and its record."""

    folder: AnyPath
    record: ModelRecord


@dataclass(frozen=True)
class Export:
    """An export that is checked and ready.

    Attributes:
      config: contents of config.json.
      origins: model that each exported item comes from, and the item's name there.
      rows: the table: our path -> key, with the shape and type that are written.
      tokenizer_from: folder whose tokenizer files are copied; None copies none.
      maps: arrays that are not ours, by key; their rows are the last.
      card: contents of README.md; None writes none.
    """

    config: dict[str, Any]
    origins: dict[str, tuple[Model, str]]
    rows: list[Row]
    tokenizer_from: AnyPath | None
    maps: Mapping[str, np.ndarray] = field(default_factory=dict)
    card: str | None = None

    @property
    def dtype(self) -> str:
        """Type of the written arrays; several are joined by a plus."""
        return "+".join(sorted({row.dtype for row in self.rows if row.path not in self.maps}))

    def arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        """Streams (key, array) in the order of the rows, one item in memory at a time."""
        rows = iter(self.rows)
        for model, item in self.origins.values():
            loaded = flatten_item(load_item(model.folder, model.record, item))
            arrays = {"/".join((item, *path)): array for path, array in loaded.items()}
            while arrays:
                row = next(rows)
                parts = [_cast(row, np.asarray(arrays.pop(key))) for key in _split_paths(row.key)]
                # A copy, so that PyTorch takes it as it is, and so that the item can be freed.
                yield row.path, np.concatenate(parts)
        yield from self.maps.items()


def plan_export(
    model: str | AnyPath,
    *,
    form: str | None = None,
    target: str | AnyPath | None = None,
    specialist: int | None = None,
    verifier: str | None = None,
    dtype: ExportDType = "keep",
) -> Export:
    """Plans the export of any model folder.

    Args:
      model: model folder.
      form: name of one of `LAYOUTS`, or hf; by default hf for a target, and for a draft the first
        layout of its family that holds as many specialists.
      target: model folder of a draft's target.
      specialist: number of the one specialist to write.
      verifier: see `Outgoing`, for a layout that names the target's checkpoint.
      dtype: type to write; by default what is stored.

    Raises:
      UserError: options that do not go together, a damaged folder, another target than the draft
        was made for, or a model that the layout cannot hold.
    """
    source = Model(as_path(model), read_record(model))
    if source.record.family == "target":
        if form not in (None, "hf"):
            raise UserError(f"{model} is a target; give --format hf")
        if (target, specialist, verifier) != (None, None, None):
            raise UserError(
                "--target, --specialist and --verifier are for drafts; leave them out for a target"
            )
        if source.record.quantised is not None:
            raise UserError(
                f"{model} is quantised to {source.record.quantised}, which no layout holds; export "
                "the target it was made from"
            )
        return _plan_target(source, dtype)
    layout = _choose_layout(source, form, specialist)
    _check_verifier(layout, verifier)
    if target is None:
        raise UserError(
            "the layout of drafts holds or describes parts of their target, such as its embedding; "
            "give its folder: --target DIR"
        )
    owner = Model(as_path(target), read_record(target))
    return _plan_draft(source, owner, layout, specialist, verifier, dtype)


def _choose_layout(draft: Model, form: str | None, specialist: int | None) -> Layout:
    """Finds the layout to write; by default the first one that holds what is to be written."""
    config, folder = draft.record.draft, draft.folder
    layouts = [layout for layout in LAYOUTS if layout.family == config.family]
    if not layouts:
        raise UserError(
            f"{folder} is a draft of the family {config.family}, which no layout holds; it stays "
            "with poss_jax"
        )
    if config.num_wide:
        raise UserError(
            f"{folder} has a specialist {config.num_wide + 1} times as wide, which no layout "
            "holds; export a draft whose widths_per_specialist are 1"
        )
    if config.num_further:
        layouts = _layouts_of_stacks(draft, form, layouts)
    number = config.num_specialists
    is_single = specialist is not None or number == 1
    if form is None:
        return next(layout for layout in layouts if layout.is_single == is_single)
    named = next((layout for layout in layouts if layout.name == form), None)
    if named is None:
        raise UserError(f"{folder} is a draft; give {_list_formats(layouts)}")
    if named.is_single and not is_single:
        all_of_them = [layout for layout in layouts if not layout.is_single]
        raise UserError(
            f"{folder} has {number} specialists, the layout {form} one layer; give --specialist "
            f"0 to {number - 1}, or {_list_formats(all_of_them)}"
        )
    if specialist is not None and not named.is_single:
        single = [layout for layout in layouts if layout.is_single]
        raise UserError(
            f"--format {form} writes every specialist; give {_list_formats(single)} for one"
        )
    return named


def _layouts_of_stacks(draft: Model, form: str | None, layouts: Sequence[Layout]) -> list[Layout]:
    """Finds the layouts of a draft with a deep specialist, which must be its only one."""
    config, stacks = draft.record.draft, [layout for layout in layouts if layout.is_stack]
    what = f"{draft.folder} has a specialist of {config.num_further + 1} layers"
    if not config.is_looped:
        raise UserError(
            f"{what}, which no layout holds; export a draft whose layers_per_specialist are 1"
        )
    if form not in (None, *(layout.name for layout in stacks)):
        raise UserError(f"{what}, --format {form} holds one; give {_list_formats(stacks)}")
    return stacks


def _check_verifier(layout: Layout, verifier: str | None) -> None:
    if verifier is not None and not layout.names_verifier:
        named = [layout for layout in LAYOUTS if layout.names_verifier]
        raise UserError(
            f"--verifier is for {_list_formats(named)}; --format {layout.name} does not name the "
            "target's checkpoint, leave it out"
        )


def _list_formats(layouts: Sequence[Layout]) -> str:
    return " or ".join(f"--format {layout.name}" for layout in layouts)


def _plan_target(target: Model, dtype: ExportDType) -> Export:
    """Plans a target in the layout of `transformers`."""
    origins = {name: (target, name) for name in target.record.items}
    rows = _rows(origins, dtype)
    if target.record.llama.fused_projections:
        rows = _fuse_rows(rows)
    config = target_config_json(target.record.llama, rows[0].dtype)
    return Export(config, origins, rows, tokenizer_from=target.folder)


def _plan_draft(
    draft: Model,
    target: Model,
    layout: Layout,
    specialist: int | None,
    verifier: str | None,
    dtype: ExportDType,
) -> Export:
    """Plans a draft; a copy of the target's embedding takes fc's type."""
    made_for, given = draft.record.target, target.record.target
    if target.record.family != "target" or not made_for.same_weights(given):
        raise UserError(
            f"{target.folder}: want the target {made_for.name} that draft {draft.folder} was made "
            f"for, got {target.record.family} {given.name} with another embedding or head"
        )
    config = _cut(draft.record.draft, specialist)
    has_copy = layout.has_embedding and not config.has_embedding
    origins = {"embed": (target, "embed")} if has_copy else {}
    for name in item_shapes(config):
        is_chosen = specialist is not None and name.startswith("specialists/")
        origins[name] = (draft, f"specialists/{specialist}" if is_chosen else name)
    rows = [row._replace(path=layout.key(stacked_name(row.path))) for row in _rows(origins, dtype)]
    fc_dtype = next(row.dtype for row in rows if row.path == FC)
    if has_copy:
        rows[0] = rows[0]._replace(path=DRAFT_EMBEDDING, dtype=fc_dtype)
    origin = f"{draft.folder}, --format {layout.name}"
    vocabulary = draft.record.draft_vocabulary
    outgoing = Outgoing(origin, config, vocabulary, target.record, fc_dtype, verifier)
    maps = _vocabulary_maps(outgoing, layout)
    rows += [Row("(draft vocabulary)", key, m.shape, m.dtype.name) for key, m in maps.items()]
    card = model_card(outgoing, layout, specialist)
    return Export(layout.describe(outgoing), origins, rows, None, maps, card)


def _vocabulary_maps(draft: Outgoing, layout: Layout) -> dict[str, np.ndarray]:
    """Makes `d2t`, offsets from a draft's ids to the target's, and `t2d`, which tokens it has."""
    if layout.maps == "never" or (layout.maps == "subset" and draft.vocabulary is None):
        return {}
    size = draft.config.layer.vocab_size
    ids = np.arange(size) if draft.vocabulary is None else np.array(draft.vocabulary, np.int64)
    return {"d2t": ids - np.arange(len(ids)), "t2d": np.isin(np.arange(size), ids)}


def write_export(
    folder: str | AnyPath,
    export: Export,
    arrays: Iterable[tuple[str, np.ndarray]],
    *,
    as_bin: bool = False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes an exported checkpoint with its SHA256SUMS, or nothing at all.

    Args:
      folder: must not exist, or be empty.
      export: what to write.
      arrays: `export.arrays()`, or a progress bar around it; a shard at a time is in memory.
      as_bin: write PyTorch's own format instead of safetensors; needs torch.
      max_shard_bytes: larger models are cut into files of at most this size, with an index.

    Raises:
      UserError: the folder is not empty or cannot be written, or torch is wanted and missing.
    """
    name = "pytorch_model.bin" if as_bin else "model.safetensors"
    shards = _shards(export.rows, max_shard_bytes)
    arrays, weight_map = iter(arrays), {}
    with whole_folder(folder) as partial:
        for number, rows in enumerate(shards, start=1):
            shard = name
            if len(shards) > 1:
                stem, suffix = name.split(".")
                shard = f"{stem}-{number:05}-of-{len(shards):05}.{suffix}"
            _save(partial / shard, dict(islice(arrays, len(rows))))
            weight_map |= dict.fromkeys((row.path for row in rows), shard)
        if len(shards) > 1:
            size = sum(_num_bytes(row) for row in export.rows)
            index = {"metadata": {"total_size": size}, "weight_map": weight_map}
            _write_json(partial / f"{name}.index.json", index)
        _write_json(partial / "config.json", export.config)
        if export.tokenizer_from is not None:
            copy_tokenizer(export.tokenizer_from, partial)
        write_sums(partial, [path.name for path in partial.iterdir()])
        if export.card is not None:  # without a checksum: owners add to it
            (partial / "README.md").write_text(export.card, encoding="utf-8")


def _cut(config: DraftConfig, specialist: int | None) -> DraftConfig:
    """Returns the config of one specialist alone; without a choice, of all of them."""
    if specialist is None:
        return config
    if not 0 <= specialist < config.num_specialists:
        raise UserError(
            f"specialist {specialist} does not exist; the draft has {config.num_specialists}, "
            f"give 0 to {config.num_specialists - 1}"
        )
    return replace(config, positions_per_specialist=(1,))


def _rows(origins: dict[str, tuple[Model, str]], dtype: ExportDType) -> list[Row]:
    rows = []
    for name, (model, item) in origins.items():
        stored = flatten_item(describe_item(model.folder, model.record, item))
        for path, shape in flatten_item(model.record.items[item]).items():
            written = np.dtype(stored[path].dtype).name if dtype == "keep" else dtype
            rows.append(
                Row(
                    "/".join((item, *path)),
                    torch_name(table_of(model.record.config), name, path),
                    shape,
                    written,
                )
            )
    return rows


def _fuse_rows(rows: list[Row]) -> list[Row]:
    """Joins the rows whose arrays are written as one tensor, one below the other."""
    parts: dict[str, list[Row]] = {}
    for row in rows:
        parts.setdefault(fused_name(row.path), []).append(row)
    return [_fuse(name, group) for name, group in parts.items()]


def _fuse(name: str, parts: list[Row]) -> Row:
    """Joins rows to one, whose path has a plus between their names: `mlp/gate+up/weight`."""
    if len(parts) == 1:
        return parts[0]
    paths = [part.key.split("/") for part in parts]
    joined = "+".join(path[-2] for path in paths)
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    types = {part.dtype for part in parts}
    dtype = types.pop() if len(types) == 1 else "float32"
    return Row("/".join((*paths[0][:-2], joined, paths[0][-1])), name, shape, dtype)


def _split_paths(joined: str) -> list[str]:
    """Lists the paths that `_fuse` joined."""
    *outer, names, leaf = joined.split("/")
    return ["/".join((*outer, name, leaf)) for name in names.split("+")]


def _cast(row: Row, array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = array.astype(_TYPES[row.dtype], copy=False)
    if cast.dtype != array.dtype and np.isinf(cast).any() and not np.isinf(array).any():
        raise UserError(f"{row.path} holds numbers beyond {row.dtype}; give another --dtype")
    return cast


def _num_bytes(row: Row) -> int:
    return int(np.prod(row.shape)) * np.dtype(_TYPES[row.dtype]).itemsize


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


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    if path.suffix == ".bin":
        torch_io.write_bin(path, arrays)
        return
    try:
        save_file(arrays, path, metadata={"format": "pt"})  # transformers insists on it
    except SafetensorError as error:
        raise UserError(f"{path.name} cannot be written: {error}; nothing is kept") from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


# --------------------------------------------------------------------------------------------------
# The model card of a draft


def model_card(draft: Outgoing, layout: Layout, specialist: int | None) -> str:
    """Writes README.md of an exported draft.

    Args:
      draft: what is exported.
      layout: layout of the files.
      specialist: number of the one specialist that is exported; None: all of them.
    """
    name, config = draft.target.target.name, draft.config
    facts = [f"| {what} | {said} |" for what, said in _facts(draft).items()]
    chosen = [] if specialist is None else ["", f"It is specialist {specialist} of a PosS draft."]
    lines = [
        "---",
        *([f"base_model: {json.dumps(name)}"] if HUB_ID.fullmatch(name) else []),
        "tags: [speculative-decoding]",
        "---",
        "",
        f"# Draft model for {name}",
        "",
        f"A draft ({config.method}) for speculative decoding with {name}, and with no other model. "
        f"poss_jax {__version__} exported it in the layout `{layout.name}`, which is read "
        f"by {layout.readers}.",
        *chosen,
        *(["", layout.note] if layout.note else []),
        "",
        "| | |",
        "|---|---|",
        *facts,
        "",
        "poss_jax converts it back with",
        "",
        "    python -m poss_jax.convert draft --source THIS_FOLDER --target TARGET --output DIR",
    ]
    return "\n".join(lines) + "\n"


def _facts(draft: Outgoing) -> dict[str, str]:
    config, rope = draft.config, draft.config.layer.rope
    size = config.layer.vocab_size
    known = f"{len(draft.vocabulary)} of {size}" if draft.vocabulary else f"all {size}"
    features = "its last hidden state, normed"
    if config.aux_layers:
        features = f"the inputs of its layers {', '.join(map(str, config.aux_layers))} (from 0)"
    return {
        "specialists": _show_specialists(config),
        "trained depth": str(config.trained_depth),
        "tokens it can propose": known,
        "reads of the target": features,
        "rope": f"{rope.type}, theta {rope.theta:g}",
        "weights": draft.dtype,
    }


def _show_specialists(config: DraftConfig) -> str:
    """Says which positions each specialist drafts, such as "3: positions 1-3, 4-6, 7 on"."""
    if config.num_specialists == 1:
        return "1, for all positions"
    shown, first = [], 1
    for count in config.positions_per_specialist[:-1]:
        last = first + count - 1
        shown.append(str(first) if count == 1 else f"{first}-{last}")
        first = last + 1
    return f"{config.num_specialists}: positions {', '.join(shown)}, {first} on"
