"""Model folders: their records are read, and their weights loaded to the device item by item."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint.record import ModelRecord, check_fit, read_record
from poss_jax.config.models import DraftConfig, Quantisation
from poss_jax.config.paths import AnyPath, is_uri, real_path
from poss_jax.config.reading import UserError, is_out_of_memory, one_line
from poss_jax.model.parameters import flatten_item, join_items
from poss_jax.model.quantise import KINDS, pack, quantise_items, weight_path
from poss_jax.shapes import Params

ShardingFor = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""(key path such as `layers/0/attention/q/weight`, shape) -> sharding of the array."""


def read_dense(folder: str | AnyPath) -> ModelRecord:
    """Reads the record of a target to train or analyse with; refuses a quantised one."""
    record = read_record(folder, "target")
    if record.quantised is None:
        return record
    raise UserError(
        f"target {folder} is quantised to {record.quantised}, which no model is trained with; give "
        "the target it was made from, converted without --quantise"
    )


def read_draft(
    folder: str | AnyPath, *, target: ModelRecord, allow_target_mismatch: bool = False
) -> ModelRecord:
    """Reads the record of a draft's folder, without its weights.

    Args:
      allow_target_mismatch: accept a draft made for other weights of the same shape.

    Raises:
      UserError: what `read_record` refuses, a target, or a draft that does not fit this target.
    """
    record = read_record(folder, "draft")
    assert isinstance(record.config, DraftConfig)
    check_fit(f"draft {folder}", record.config, target)
    if max(record.config.aux_layers, default=0) >= (num_layers := target.llama.num_layers):
        raise UserError(
            f"draft {folder} reads the inputs of layers {list(record.config.aux_layers)}, from 0, "
            f"the target {target.target.name} has {num_layers}; use the target it was trained for"
        )
    if not allow_target_mismatch and not record.target.same_weights(target.target):
        raise UserError(
            f"draft {folder} was made for {record.target.name}, got the target "
            f"{target.target.name} with another embedding or head; use its own target, or set "
            "allow_target_mismatch (--allow-target-mismatch)"
        )
    return record


def load_target(
    folder: str | AnyPath,
    dtype: Any = None,
    *,
    with_layers: bool = True,
    sharding: jax.sharding.Sharding | ShardingFor | None = None,
    quantise: Quantisation | None = None,
) -> tuple[ModelRecord, Params]:
    """Loads a target straight to its devices.

    Args:
      dtype: dtype of every array; None keeps what is stored.
      with_layers: load the layers; False returns the rest.
      quantise: type to round the stored matrices to; None keeps them.

    Returns:
      The record, with the requested quantisation, and {"embed", "layers": list, "norm",
      "head"}; a tied head is the embedding's array, unless it is quantised.

    Raises:
      UserError: what `read_record` refuses, a draft, a missing or damaged item, or a quantisation
        that is unknown or of a target that is quantised already.
    """
    record = read_record(folder, "target")
    if quantise is not None:
        check_quantisation(folder, record, quantise)
    names = [name for name in record.items if with_layers or "layers/" not in name]
    params = _load_params(folder, record, dtype, sharding, names, quantise)
    params.setdefault("head", {"weight": params["embed"]["weight"]})
    return replace(record, quantised=record.quantised or quantise), params


def check_quantisation(origin: str | AnyPath, record: ModelRecord, kind: str) -> None:
    """Raises UserError for an unknown quantisation, or one of a quantised target."""
    if kind not in KINDS:
        raise UserError(f"quantise: want {' or '.join(KINDS)}, got {kind!r}")
    if record.quantised is not None:
        raise UserError(
            f"target {origin} is quantised to {record.quantised} already; leave out quantise, or "
            "give the target it was made from"
        )


def load_draft(
    folder: str | AnyPath,
    dtype: Any = None,
    *,
    target: ModelRecord,
    allow_target_mismatch: bool = False,
    sharding: jax.sharding.Sharding | ShardingFor | None = None,
) -> tuple[ModelRecord, Params]:
    """Loads a draft straight to its devices, with the arguments of `read_draft` and `load_target`.

    Returns:
      The record, and {"fc", "specialists": list}.

    Raises:
      UserError: what `read_record` refuses, a target, a draft that does not fit this target, or
        a missing or damaged item.
    """
    record = read_draft(folder, target=target, allow_target_mismatch=allow_target_mismatch)
    return record, _load_params(folder, record, dtype, sharding, record.items)


def _load_params(
    folder: str | AnyPath,
    record: ModelRecord,
    dtype: Any,
    sharding: jax.sharding.Sharding | ShardingFor | None,
    names: Iterable[str],
    quantise: Quantisation | None = None,
) -> Params:
    stored = None if quantise else dtype
    items = ((name, load_item(folder, record, name, stored, sharding=sharding)) for name in names)
    if quantise is not None:
        is_tied = record.llama.tie_embeddings
        items = quantise_items(items, quantise, dtype=dtype, is_tied=is_tied)
    return join_items((name, pack(item)) for name, item in items)


# --------------------------------------------------------------------------------------------------
# Items: a part of the weights, read on its own


def check_item(origin: str, arrays: Params, shapes: Params) -> None:
    """Compares arrays (or anything with a shape) with the table."""
    got = {"/".join(path): tuple(array.shape) for path, array in flatten_item(arrays).items()}
    want = {"/".join(path): shape for path, shape in flatten_item(shapes).items()}
    wrong = sorted(key for key in got.keys() | want.keys() if got.get(key) != want.get(key))
    if wrong:
        listed = ", ".join(f"{key} want {want.get(key)} got {got.get(key)}" for key in wrong)
        raise UserError(f"{origin} does not fit the config: {listed}; convert the model again")


def load_item(
    folder: str | AnyPath,
    record: ModelRecord,
    name: str,
    dtype: Any = None,
    *,
    sharding: jax.sharding.Sharding | ShardingFor | None = None,
) -> Params:
    """Loads one item of a model as it is stored; `parameters.py` lists names and key paths.

    Each device reads and casts its own part of an array; the host holds about one item more than
    the result.

    Args:
      dtype: dtype of every array except quantised weights; None keeps the stored one.
      sharding: sharding of every array, or a function that gives it; None: the default device.

    Raises:
      UserError: the item is missing, damaged, or does not match the config, or an array cannot be
        sharded as requested.
    """
    sharding = sharding or jnp.zeros(()).sharding
    arrays = flatten_item(_open_item(folder, record, name))
    layouts = {}
    for path, array in arrays.items():
        key = "/".join((name, *path))
        devices = sharding(key, array.shape) if callable(sharding) else sharding
        try:
            devices.shard_shape(array.shape)
        except ValueError as error:
            reason = one_line(error)
            raise UserError(f"{key} {list(array.shape)} cannot be sharded: {reason}") from error
        is_quantised = weight_path(key) != key
        kept = array.dtype.numpy_dtype if is_quantised or dtype is None else dtype
        layouts[path] = jax.ShapeDtypeStruct(array.shape, kept, sharding=devices)
    with _explained(_item_path(folder, name)):
        finish = {path: _begin_read(array, layouts[path]) for path, array in arrays.items()}
        return unflatten_dict({path: done() for path, done in finish.items()})


def _begin_read(stored: ts.TensorStore, layout: jax.ShapeDtypeStruct) -> Callable[[], jax.Array]:
    """Begins to read the parts of an array that this process holds; the result waits for them."""
    indices = layout.sharding.addressable_devices_indices_map(layout.shape).values()
    cast = ts.cast(stored, layout.dtype)
    parts = {key: cast[index].read() for key, index in {str(i): i for i in indices}.items()}

    def finish() -> jax.Array:
        return jax.make_array_from_callback(
            layout.shape, layout.sharding, lambda index: parts[str(index)].result()
        )

    return finish


def describe_item(folder: str | AnyPath, record: ModelRecord, name: str) -> Params:
    """Reads one item's shapes and types, as `jax.ShapeDtypeStruct`, without its weights."""
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype),
        _open_item(folder, record, name),
    )


def _open_item(folder: str | AnyPath, record: ModelRecord, name: str) -> Params:
    """Opens the stored arrays of an item, and compares their shapes with the table."""
    path = _item_path(folder, name)
    if not path.is_dir():
        raise UserError(f"{folder} has no weights item {name}; copy or convert the model again")
    # Without Orbax, whose work per array takes longer than reading.
    store = {"driver": "ocdbt", "base": f"{path if is_uri(path) else f'file://{path}'}/"}
    settings = {"driver": "zarr", "fill_missing_data_reads": False}
    with _explained(path):
        keys = [key.decode() for key in ts.KvStore.open(store).result().list().result()]
        paths = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
        opened = [ts.open(settings | {"kvstore": store | {"path": f"{key}/"}}) for key in paths]
        pairs = zip(paths, opened, strict=True)
        item = unflatten_dict({tuple(key.split(".")): array.result() for key, array in pairs})
    check_item(str(path), item, record.items[name])
    return item


def _item_path(folder: str | AnyPath, name: str) -> AnyPath:
    path = real_path(folder) / "weights" / name
    if is_uri(path) and not str(path).startswith("gs://"):
        raise UserError(f"{folder}: weights are read from gs:// or from this machine; copy it here")
    return path


@contextmanager
def _explained(path: AnyPath) -> Iterator[None]:
    """Turns errors about a damaged or unreadable item into a UserError."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = one_line(str(error).partition(". See full")[0])
        advice = "check network and credentials, or copy" if is_uri(path) else "convert"
        raise UserError(f"{path} cannot be read ({reason}); {advice} the model again") from error
