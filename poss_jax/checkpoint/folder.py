"""Writing a model folder atomically, and loading it to the device item by item."""

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint.record import TOKENIZER_FILES, ModelRecord, check_fit, read_record
from poss_jax.checkpoint.sums import SUMS_FILE, check_file, hash_item, read_sums, write_sums
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.config.json_reading import check_own_file
from poss_jax.config.models import DraftConfig, Quantisation
from poss_jax.config.paths import AnyPath, as_path, is_uri, local_files, real_path
from poss_jax.config.reading import UserError, config_to_dict, is_out_of_memory
from poss_jax.model.parameters import flatten_item, join_items
from poss_jax.model.quantise import KINDS, pack, quantise_items, unpack, weight_path
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


def write_model(
    folder: str | AnyPath,
    record: ModelRecord,
    items: Iterable[tuple[str, Params]],
    *,
    tokenizer_from: AnyPath | None,
) -> ModelRecord:
    """Writes a model folder atomically.

    Items are taken one at a time and written to a temporary sibling, renamed at the end. SHA256SUMS
    covers model.json and the tokenizer's files; model.json covers the weights.

    Args:
      folder: must not exist, or be empty.
      record: contents of `model.json`.
      items: (name, nested dict of arrays) of every item of the model, in any order.
      tokenizer_from: folder whose tokenizer files are copied; None: no tokenizer.

    Returns:
      The record as written, with the checksums of the weights.

    Raises:
      UserError: the folder is not empty or cannot be written, or an item does not fit the config.
    """
    with whole_folder(folder) as partial:
        sums = _write_items(partial, record.items, items)
        record = replace(record, weights_sha256=sums)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, partial)
        (partial / "model.json").write_text(json.dumps(config_to_dict(record), indent=2) + "\n")
        write_sums(partial, [path.name for path in partial.iterdir() if path.is_file()])
    return record


def _write_items(
    partial: Path, shapes: dict[str, Params], items: Iterable[tuple[str, Params]]
) -> dict[str, str]:
    sums: dict[str, str] = {}
    for name, tree in items:
        # NumPy arrays keep this machine's devices out of the item's metadata.
        arrays = jax.tree.map(np.asarray, unpack(tree))
        _check_item(f"item {name}", arrays, shapes.get(name, {}))
        _check_space(partial, arrays)
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), arrays)
        args = ocp.args.PyTreeSave(arrays, save_args=save_args)
        _save_item(partial / "weights" / name, args)
        sums[name] = hash_item(arrays)
        del tree, arrays  # freed before the next item is made
    missing = sorted(shapes.keys() - sums.keys())
    if missing:
        raise UserError(f"model has no items {', '.join(missing)}; give every item")
    return sums


def _check_space(folder: Path, arrays: Params) -> None:
    """Raises OSError if the disk has no room for an item, before Orbax's threads each do."""
    needed = sum(array.nbytes for array in jax.tree.leaves(arrays)) + _ITEM_OVERHEAD_BYTES
    if shutil.disk_usage(folder).free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _save_item(path: Path, args: ocp.args.PyTreeSave) -> None:
    try:
        with _quiet():
            _writer().save(path, args=args)
        (path / "commit_success.txt").unlink(missing_ok=True)  # it names folders of this machine
    except Exception as error:
        raise failed_write(error) from error


def failed_write(error: Exception) -> OSError:
    """Finds the system error behind an Orbax error; a full disk gives a ValueError there."""
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror)
    code = _system_code(error)
    if code is not None:
        return OSError(code, os.strerror(code))
    return OSError(errno.EIO, " ".join(str(error).split())[:200])


def _system_code(error: Exception) -> int | None:
    """Finds the system's error code; array I/O has it in the message only."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    code = _OS_ERROR.search(str(error))
    return int(code[1]) if code else None


def copy_tokenizer(source: AnyPath, folder: Path) -> None:
    """Copies the tokenizer's files, if there are any.

    Raises:
      UserError: what `check_own_file` refuses.
    """
    with local_files(source, TOKENIZER_FILES) as local:
        for name in TOKENIZER_FILES:
            check_own_file(local / name)
            if (local / name).is_file():
                shutil.copyfile(local / name, folder / name)


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


def read_target(folder: str | AnyPath) -> ModelRecord:
    """Reads the record of a target's folder, without its weights.

    Raises:
      UserError: what `read_record` refuses, or a draft.
    """
    return _read_family(folder, "target")


def read_draft(
    folder: str | AnyPath, *, target: ModelRecord, allow_target_mismatch: bool = False
) -> ModelRecord:
    """Reads the record of a draft's folder, without its weights.

    Args:
      folder: model folder.
      target: record of the target it will draft for.
      allow_target_mismatch: accept a draft made for other weights of the same shape.

    Raises:
      UserError: what `read_record` refuses, a target, or a draft that does not fit this target.
    """
    record = _read_family(folder, "draft")
    assert isinstance(record.config, DraftConfig)
    check_fit(f"draft {folder}", record.config.layer, target)
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
      folder: model folder.
      dtype: dtype of every array; None keeps what is stored.
      with_layers: load the layers; False returns the rest.
      sharding: see `load_item`.
      quantise: type to round the stored matrices to; None keeps them.

    Returns:
      The record, with the requested quantisation, and {"embed", "layers": list, "norm",
      "head"}; a tied head is the embedding's array, unless it is quantised.

    Raises:
      UserError: what `read_record` refuses, a draft, a missing or damaged item, or a quantisation
        that is unknown or of a target that is quantised already.
    """
    record = read_target(folder)
    if quantise is not None:
        check_quantisation(folder, record, quantise)
    names = [name for name in record.items if with_layers or "layers/" not in name]
    params = _load_params(folder, record, dtype, sharding, names, quantise)
    params.setdefault("head", {"weight": params["embed"]["weight"]})
    return replace(record, quantised=record.quantised or quantise), params


def check_quantisation(origin: str | AnyPath, record: ModelRecord, kind: str) -> None:
    """Refuses an unknown quantisation, or quantising a quantised target.

    Args:
      origin: the target, for the message.
      record: its record.
      kind: the quantisation.

    Raises:
      UserError: see above.
    """
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
    """Loads a draft straight to its devices.

    Args:
      folder: model folder.
      dtype: dtype of every array; None keeps what is stored.
      target: record of the target it will draft for.
      allow_target_mismatch: load a draft made for other weights of the same shape.
      sharding: see `load_item`.

    Returns:
      The record, and {"fc", "specialists": list}.

    Raises:
      UserError: what `read_record` refuses, a target, a draft that does not fit this target, or
        a missing or damaged item.
    """
    record = read_draft(folder, target=target, allow_target_mismatch=allow_target_mismatch)
    return record, _load_params(folder, record, dtype, sharding, record.items)


def verify_model(folder: str | AnyPath) -> ModelRecord:
    """Compares every file and every array of a model folder with its checksum.

    Loading does not, since it would read a large model twice.

    Returns:
      The record in `model.json`.

    Raises:
      UserError: names the first file or item that is missing, unreadable or changed, or says that
        the folder is too old to have checksums.
    """
    folder = as_path(folder)
    record = read_record(folder)
    names = record.items
    sums, weights = read_sums(folder), record.weights_sha256 or {}
    if "model.json" not in sums or weights.keys() != names.keys():
        raise UserError(
            f"{folder} has no complete checksums ({SUMS_FILE} about model.json, and there "
            "weights_sha256 about every item); convert the model again"
        )
    for name, want in sums.items():
        check_file(folder / name, want)
    for name in names:
        if hash_item(load_item(folder, record, name)) != weights[name]:
            raise UserError(
                f"{folder}: the weights of item {name} are not those that were written; "
                "copy or convert the model again"
            )
    return record


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
      folder: model folder.
      record: contents of its model.json.
      name: name of the item.
      dtype: dtype of every array except quantised weights; None keeps the stored one.
      sharding: sharding of every array, or a function that gives it; None: the default device.

    Raises:
      UserError: the item is missing, damaged, or does not match the config, or an array cannot be
        sharded as requested.
    """
    sharding = sharding or jnp.zeros(()).sharding  # not the device that wrote the item
    abstract = unflatten_dict(
        {
            path: _place("/".join((name, *path)), array, dtype, sharding)
            for path, array in flatten_item(describe_item(folder, record, name)).items()
        }
    )
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    path = _item_path(folder, name)
    with _explained(path):
        return _checkpointer().restore(
            path, args=ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args)
        )


def _place(
    path: str,
    array: jax.ShapeDtypeStruct,
    dtype: Any,
    sharding: jax.sharding.Sharding | ShardingFor,
) -> jax.ShapeDtypeStruct:
    """Restore arguments of one array."""
    if not isinstance(sharding, jax.sharding.Sharding):
        sharding = sharding(path, array.shape)
    try:
        sharding.shard_shape(array.shape)
    except ValueError as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path} {list(array.shape)} cannot be sharded: {reason}") from error
    is_quantised = weight_path(path) != path
    kept = array.dtype if is_quantised or dtype is None else dtype
    return jax.ShapeDtypeStruct(array.shape, kept, sharding=sharding)


def describe_item(folder: str | AnyPath, record: ModelRecord, name: str) -> Params:
    """Reads one item's shapes and types, as `jax.ShapeDtypeStruct`, without its weights.

    Raises:
      UserError: the item is missing, damaged, or does not match the config.
    """
    path = _item_path(folder, name)
    if not path.is_dir():
        raise UserError(f"{folder} has no weights item {name}; copy or convert the model again")
    with _explained(path):
        _check_store(path)
        metadata = _checkpointer().metadata(path).item_metadata
        if metadata is None:
            raise ValueError("it has no metadata")
        item = jax.tree.map(
            lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), metadata.tree
        )
    _check_item(str(path), item, record.items[name])
    return item


def _read_family(folder: str | AnyPath, family: str) -> ModelRecord:
    record = read_record(folder)
    if record.family != family:
        raise UserError(f"{folder}: want a {family}, got a {record.family}; give the other folder")
    return record


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


def _item_path(folder: str | AnyPath, name: str) -> AnyPath:
    path = real_path(folder) / "weights" / name
    if is_uri(path) and not str(path).startswith("gs://"):
        raise UserError(f"{folder}: weights are read from gs:// or from this machine; copy it here")
    return path


@contextmanager
def _explained(path: AnyPath) -> Iterator[None]:
    """Turns Orbax's logs and errors about a damaged item into one UserError.

    Errors not about the item are raised unchanged, or as the system's error.
    """
    try:
        with _quiet():
            yield
    except Exception as error:  # Orbax raises plain Exception on unreadable data
        if is_out_of_memory(error):
            raise
        code = _system_code(error)
        if code in _NOT_DAMAGE:
            raise OSError(code, os.strerror(code), str(path)) from error
        reason = " ".join(str(error).partition(". See full")[0].split())[:200]
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


def _check_store(path: AnyPath) -> None:
    """Reads an item's table of contents, whose checksums show damage.

    Orbax would find the same damage, but its other reads would then print their errors.
    """
    spec = {"driver": "ocdbt", "base": f"{path if is_uri(path) else f'file://{path}'}/"}
    ts.KvStore.open(spec).result().list().result()


@cache
def _checkpointer() -> ocp.Checkpointer:
    """Checkpointer for reading, by all processes together."""
    # On gs:// Orbax expects a file next to each item that copies of a folder lack.
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(),
        temporary_path_class=ocp.path.atomicity.AtomicRenameTemporaryPath,
    )


@cache
def _writer() -> ocp.Checkpointer:
    """Checkpointer for writing, in this process only."""
    index = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index}, barrier_sync_key_prefix="model"
    )
    # Weights barely compress, and trying would double the memory.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)
