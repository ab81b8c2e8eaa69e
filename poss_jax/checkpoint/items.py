"""Items of a model, in Orbax: a part of the weights, written and loaded on its own."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.sums import hash_item
from poss_jax.config.paths import AnyPath, is_uri, real_path
from poss_jax.config.reading import UserError, is_out_of_memory, one_line
from poss_jax.model.parameters import flatten_item
from poss_jax.model.quantise import unpack, weight_path
from poss_jax.shapes import Params

# Most bytes of a piece of a stored array: a device that holds part of an array reads the pieces
# with that part.
_CHUNK_BYTES = 64 * 2**20

_ITEM_OVERHEAD_BYTES = 32 * 1024  # metadata of an item

_OS_ERROR = re.compile(r"os_error_code='(\d+)'")

# Errors that say nothing about the data: no permission, or a failing disk or server.
_NOT_DAMAGE = (errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE)

ShardingFor = Callable[[str, tuple[int, ...]], jax.sharding.Sharding]
"""(key path such as `layers/0/attention/q/weight`, shape) -> sharding of the array."""


def write_item(folder: Path, name: str, item: Params, shapes: Params) -> str:
    """Writes one item of a model; returns its checksum.

    Raises:
      UserError: it does not have these shapes.
      OSError: it cannot be written.
    """
    import orbax.checkpoint as ocp

    # NumPy arrays keep this machine's devices out of the item's metadata.
    arrays = jax.tree.map(np.asarray, unpack(item))
    _check_item(f"item {name}", arrays, shapes)
    needed = sum(array.nbytes for array in jax.tree.leaves(arrays)) + _ITEM_OVERHEAD_BYTES
    if shutil.disk_usage(folder).free < needed:  # before each of Orbax's threads fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), arrays)
    args = ocp.args.PyTreeSave(arrays, save_args=save_args)
    path = folder / "weights" / name
    try:
        with _quiet():
            _writer().save(path, args=args)
        (path / "commit_success.txt").unlink(missing_ok=True)  # it names folders of this machine
    except Exception as error:
        raise failed_write(error) from error
    return hash_item(arrays)


def failed_write(error: Exception) -> OSError:
    """Finds the system error behind an Orbax error; a full disk gives a ValueError there."""
    code = _system_code(error)
    reason = one_line(error) if code is None else os.strerror(code)
    return OSError(code or errno.EIO, reason)


def _system_code(error: Exception) -> int | None:
    """Finds the system's error code; array I/O has it in the message only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    code = _OS_ERROR.search(str(error))
    return int(code[1]) if code else None


def _check_item(origin: str, arrays: Params, shapes: Params) -> None:
    """Compares arrays (or anything with a shape) with the table."""
    got = {"/".join(path): tuple(array.shape) for path, array in flatten_item(arrays).items()}
    want = {"/".join(path): shape for path, shape in flatten_item(shapes).items()}
    wrong = sorted(key for key in got.keys() | want.keys() if got.get(key) != want.get(key))
    if wrong:
        listed = ", ".join(f"{key} want {want.get(key)} got {got.get(key)}" for key in wrong)
        raise UserError(f"{origin} does not fit the config: {listed}; convert the model again")


# --------------------------------------------------------------------------------------------------
# Reading


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
    layouts = {
        path: _layout("/".join((name, *path)), array, dtype, sharding)
        for path, array in arrays.items()
    }
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


def _layout(
    path: str, array: Any, dtype: Any, sharding: jax.sharding.Sharding | ShardingFor
) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array in memory."""
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = sharding(path, array.shape)
    try:
        sharding.shard_shape(array.shape)
    except ValueError as error:
        reason = one_line(error)
        raise UserError(f"{path} {list(array.shape)} cannot be sharded: {reason}") from error
    is_quantised = weight_path(path) != path
    kept = array.dtype.numpy_dtype if is_quantised or dtype is None else dtype
    return jax.ShapeDtypeStruct(array.shape, kept, sharding=sharding)


def describe_item(folder: str | AnyPath, record: ModelRecord, name: str) -> Params:
    """Reads one item's shapes and types, as `jax.ShapeDtypeStruct`, without its weights.

    Raises:
      UserError: the item is missing, damaged, or does not match the config.
    """
    return jax.tree.map(
        lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype),
        _open_item(folder, record, name),
    )


def _open_item(folder: str | AnyPath, record: ModelRecord, name: str) -> Params:
    """Opens the stored arrays of an item, and compares their shapes with the table."""
    path = _item_path(folder, name)
    if not path.is_dir():
        raise UserError(f"{folder} has no weights item {name}; copy or convert the model again")
    with _explained(path):
        item = _open_arrays(path)
    _check_item(str(path), item, record.items[name])
    return item


def _open_arrays(path: AnyPath) -> Params:
    """Opens the arrays of an item without Orbax, whose work per array takes longer than reading."""
    store = {"driver": "ocdbt", "base": f"{path if is_uri(path) else f'file://{path}'}/"}
    keys = ts.KvStore.open(store).result().list().result()
    names = [key.decode().removesuffix("/.zarray") for key in keys if key.endswith(b"/.zarray")]
    if not names:
        raise ValueError("it has no arrays")
    settings = {"driver": "zarr", "fill_missing_data_reads": False}
    opened = [ts.open(settings | {"kvstore": store | {"path": f"{name}/"}}) for name in names]
    return unflatten_dict(
        {tuple(name.split(".")): array.result() for name, array in zip(names, opened, strict=True)}
    )


def _item_path(folder: str | AnyPath, name: str) -> AnyPath:
    path = real_path(folder) / "weights" / name
    if is_uri(path) and not str(path).startswith("gs://"):
        raise UserError(f"{folder}: weights are read from gs:// or from this machine; copy it here")
    return path


@contextmanager
def _explained(path: AnyPath) -> Iterator[None]:
    """Turns errors about a damaged item into a UserError.

    Errors not about the item are raised unchanged, or as the system's error.
    """
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        code = _system_code(error)
        if code in _NOT_DAMAGE:
            raise OSError(code, os.strerror(code), str(path)) from error
        reason = one_line(str(error).partition(". See full")[0])
        if is_uri(path):
            raise UserError(
                f"{path} cannot be read ({reason}); check network and credentials, or copy it again"
            ) from error
        raise UserError(f"{path} is damaged ({reason}); convert the model again") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax from logging an error that it also raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@cache
def _writer() -> Any:
    """Checkpointer for writing, in this process only."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix="model"
    )
    # Weights barely compress, and trying would double the memory.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
