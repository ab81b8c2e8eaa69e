"""Export: a model folder of ours as the PyTorch checkpoint it would have come from."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from poss_jax.checkpoint import torch_io
from poss_jax.checkpoint.folder import copy_tokenizer, describe_item, load_item
from poss_jax.checkpoint.record import ModelRecord, read_record
from poss_jax.checkpoint.sums import write_sums
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.convert.hf import CONFIG_KEYS, METADATA, DraftMetadata
from poss_jax.convert.names import DRAFT_EMBEDDING, FC, fused_name
from poss_jax.convert.plan import Row
from poss_jax.convert.rope import write_rope
from poss_jax.model.parameters import flatten_item, item_shapes, table_of, torch_name

Form = Literal["hf", "eagle", "poss"]
ExportDType = Literal["keep", "float32", "bfloat16", "float16"]

MAX_SHARD_BYTES = 5_000_000_000

_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Model:
    """A model folder and its record."""

    folder: Path
    record: ModelRecord


@dataclass(frozen=True)
class Export:
    """An export that is checked and ready.

    Attributes:
      config: contents of config.json.
      origins: model that each exported item comes from, and the item's name there.
      rows: the table: our path -> key, with the shape and type that are written.
      tokenizer_from: folder whose tokenizer files are copied; None copies none.
    """

    config: dict[str, Any]
    origins: dict[str, tuple[Model, str]]
    rows: list[Row]
    tokenizer_from: Path | None

    @property
    def dtype(self) -> str:
        """Type of the written arrays; several are joined by a plus."""
        return "+".join(sorted({row.dtype for row in self.rows}))

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


def plan_export(
    model: str | Path,
    *,
    form: Form | None = None,
    target: str | Path | None = None,
    specialist: int | None = None,
    dtype: ExportDType = "keep",
) -> Export:
    """Plans the export of any model folder.

    Args:
      model: model folder.
      form: hf (a target), eagle (a draft of one layer) or poss (any draft); by default hf or poss.
      target: model folder of a draft's target.
      specialist: number of the one specialist to write, as an eagle draft.
      dtype: type to write; by default what is stored.

    Raises:
      UserError: options that do not go together, a damaged folder, another target than the draft
        was made for, or a model that the layout cannot hold.
    """
    source = Model(Path(model), read_record(model))
    if source.record.family == "target":
        if form not in (None, "hf"):
            raise UserError(f"{model} is a target; give --format hf")
        if target is not None or specialist is not None:
            raise UserError("--target and --specialist are for drafts; leave them out for a target")
        return _plan_target(source, dtype)
    number = source.record.draft.num_specialists
    if form == "hf":
        raise UserError(f"{model} is a draft; give --format eagle or --format poss")
    if form == "eagle" and specialist is None and number > 1:
        raise UserError(
            f"{model} has {number} specialists, an eagle draft one layer; give --specialist "
            f"0 to {number - 1}, or --format poss"
        )
    if form == "poss" and specialist is not None:
        raise UserError("--format poss writes every specialist; give --format eagle for one")
    if target is None:
        raise UserError(
            "the layout of drafts holds their target's embedding; give its folder: --target DIR"
        )
    owner = Model(Path(target), read_record(target))
    return _plan_draft(source, owner, specialist, dtype)


def _plan_target(target: Model, dtype: ExportDType) -> Export:
    """Plans a target in the layout of `transformers`."""
    origins = {name: (target, name) for name in item_shapes(target.record.config)}
    rows = _rows(origins, dtype)
    if target.record.llama.fused_projections:
        rows = _fuse_rows(rows)
    config = target_config_json(target.record.llama, rows[0].dtype)
    return Export(config, origins, rows, tokenizer_from=target.folder)


def _plan_draft(draft: Model, target: Model, specialist: int | None, dtype: ExportDType) -> Export:
    """Plans a draft in the layout of EAGLE and PosS; the target's embedding takes fc's type."""
    made_for, given = draft.record.target, target.record.target
    if target.record.family != "target" or not made_for.same_weights(given):
        raise UserError(
            f"{target.folder}: want the target {made_for.name} that draft {draft.folder} was made "
            f"for, got {target.record.family} {given.name} with another embedding or head; its "
            "embedding is part of the layout"
        )
    if draft.record.draft.family != "eagle":
        raise UserError(
            f"{draft.folder}: drafts of the family {draft.record.draft.family} cannot be exported "
            "yet; give an EAGLE-2, HASS or PosS draft"
        )
    config = _cut(draft.record.draft, specialist)
    origins = {"embed": (target, "embed"), "fc": (draft, "fc")}
    for index in range(config.num_specialists):
        origins[f"specialists/{index}"] = (draft, f"specialists/{specialist or index}")
    rows = _rows(origins, dtype)
    fc_dtype = next(row.dtype for row in rows if row.path == FC)
    rows[0] = rows[0]._replace(path=DRAFT_EMBEDDING, dtype=fc_dtype)
    metadata = DraftMetadata(
        positions_per_specialist=config.positions_per_specialist,
        trained_depth=config.trained_depth,
        draft_vocabulary=draft.record.draft_vocabulary,
    )
    return Export(draft_config_json(config, metadata, fc_dtype), origins, rows, None)


def write_export(
    folder: str | Path,
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
        for path, shape in flatten_item(item_shapes(model.record.config)[item]).items():
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
# config.json


def target_config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes a target to `transformers` 4 and 5.

    Args:
      config: shape of the target.
      dtype: type that its weights are written in.

    Raises:
      UserError: no family of Hugging Face has these biases and norms.
    """
    family = _family(config)
    values = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family}
    values |= _shape(config, dtype) | {"tie_word_embeddings": config.tie_embeddings}
    if family == "phi3":  # its own default for padding lies beyond a small vocabulary
        return values | {"sliding_window": None, "pad_token_id": None}
    if family != "llama":
        values |= {"use_sliding_window": False}
    if family != "qwen2":
        values |= {"attention_bias": config.qkv_bias}
    return values | ({"mlp_bias": config.mlp_bias} if family == "llama" else {})


def draft_config_json(config: DraftConfig, metadata: DraftMetadata, dtype: str) -> dict[str, Any]:
    """Describes a draft to the original code, and to our own converter.

    Args:
      config: shape of the draft.
      metadata: what the layout has no key for.
      dtype: type that its weights are written in.

    Raises:
      UserError: the original code has no such layers.
    """
    layer = config.layer
    wrong = [field for field in ("o_bias", "qk_norm", "mlp_bias") if getattr(layer, field)]
    if layer.num_heads * layer.head_dim != layer.hidden_size:
        wrong.append(
            f"{layer.num_heads} heads of {layer.head_dim} for a width of {layer.hidden_size}"
        )
    if wrong:
        raise UserError(
            f"the original code has no draft layers with {', '.join(wrong)}; such a draft stays "
            "with poss_jax"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_shape(layer, dtype),
        "num_hidden_layers": 1,  # whatever the number of specialists: so do the published ones
        "tie_word_embeddings": layer.tie_embeddings,
        "pad_token_id": 0,
        "qkv_bias": layer.qkv_bias,
        "bias": config.fc_bias,
        METADATA: {k: v for k, v in config_to_dict(metadata).items() if v is not None},
    }


def _family(config: LlamaConfig) -> str:
    """Finds the family whose own code has these projections, biases and norms."""
    if config.fused_projections:
        return _check_phi3(config)
    if config.qk_norm and config.qkv_bias == config.o_bias and not config.mlp_bias:
        return "qwen3"
    if not config.qk_norm and config.qkv_bias == config.o_bias:
        return "llama"
    if not config.qk_norm and config.qkv_bias and not config.mlp_bias:
        return "qwen2"
    raise UserError(
        f"no family of transformers has qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, "
        f"qk_norm {config.qk_norm} and mlp_bias {config.mlp_bias} together; such a target stays "
        "with poss_jax"
    )


def _check_phi3(config: LlamaConfig) -> str:
    """Names the family of fused projections, which has no biases and few types of rope."""
    fields = ("qkv_bias", "o_bias", "qk_norm", "mlp_bias")
    wrong = [field for field in fields if getattr(config, field)]
    if config.rope.type not in ("default", "longrope"):
        wrong.append(f"rope type {config.rope.type}")
    if wrong:
        raise UserError(
            f"Phi-3, which has fused projections, has no {', '.join(wrong)}; such a target stays "
            "with poss_jax"
        )
    return "phi3"


def _shape(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    stop_ids = list(config.eos_token_ids)
    return {
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
