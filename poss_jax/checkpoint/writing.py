"""Writing model folders: atomically, with checksums, which `verify_model` compares.

Files have theirs in a SHA256SUMS file (`sha256sum -c` reads it too), arrays in `model.json`.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from poss_jax.checkpoint.folder import check_item, load_item
from poss_jax.checkpoint.record import TOKENIZER_FILES, ModelRecord, TargetIdentity, read_record
from poss_jax.checkpoint.whole import whole_folder
from poss_jax.config.json_reading import check_own_file
from poss_jax.config.paths import AnyPath, as_path, local_files
from poss_jax.config.reading import UserError, config_to_dict, one_line
from poss_jax.model.parameters import flatten_item
from poss_jax.model.quantise import unpack
from poss_jax.shapes import Params

SUMS_FILE = "SHA256SUMS"

_SUMS_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")

_CHUNK_VALUES = 1 << 22  # of an array, hashed or compared at a time

# Most bytes of a piece of a stored array: a device that holds part of an array reads the pieces
# with that part.
_CHUNK_BYTES = 64 * 2**20

_ITEM_OVERHEAD_BYTES = 32 * 1024  # metadata of an item


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
      items: (name, nested dict of arrays) of every item of the model, in any order.
      tokenizer_from: folder whose tokenizer files are copied; None: no tokenizer.

    Returns:
      The record as written, with the checksums of the weights.

    Raises:
      UserError: the folder is not empty or cannot be written, or an item does not fit the config.
    """
    shapes, sums = record.items, {}
    with whole_folder(folder) as partial:
        for name, tree in items:
            sums[name] = write_item(partial, name, tree, shapes.get(name, {}))
            del tree  # freed before the next item is made
        if missing := sorted(shapes.keys() - sums.keys()):
            raise UserError(f"model has no items {', '.join(missing)}; give every item")
        record = replace(record, weights_sha256=sums)
        if tokenizer_from is not None:
            copy_tokenizer(tokenizer_from, partial)
        (partial / "model.json").write_text(json.dumps(config_to_dict(record), indent=2) + "\n")
        write_sums(partial, [path.name for path in partial.iterdir() if path.is_file()])
    return record


def copy_tokenizer(source: AnyPath, folder: Path) -> None:
    """Copies the tokenizer's files, if there are any; refuses what `check_own_file` does."""
    with local_files(source, TOKENIZER_FILES) as local:
        for name in TOKENIZER_FILES:
            check_own_file(local / name)
            if (local / name).is_file():
                shutil.copyfile(local / name, folder / name)


def target_identity(name: str, revision: str | None, embedding: Any, head: Any) -> TargetIdentity:
    """Identifies a target by embedding and head [V, D], in any float type; one array if tied."""
    embedding_sha256 = hash_values(embedding)
    return TargetIdentity(
        name=name,
        revision=revision,
        embedding_sha256=embedding_sha256,
        head_sha256=embedding_sha256 if head is embedding else hash_values(head),
    )


def verify_model(folder: str | AnyPath) -> ModelRecord:
    """Compares every file and array of a model folder with its checksum; returns its record.

    Loading does not, since it would read a large model twice.

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


# --------------------------------------------------------------------------------------------------
# Items, through Orbax


def write_item(folder: Path, name: str, item: Params, shapes: Params) -> str:
    """Writes one item of a model, which must have these shapes; returns its checksum."""
    import orbax.checkpoint as ocp

    # NumPy arrays keep this machine's devices out of the item's metadata.
    arrays = jax.tree.map(np.asarray, unpack(item))
    check_item(f"item {name}", arrays, shapes)
    needed = sum(array.nbytes for array in jax.tree.leaves(arrays)) + _ITEM_OVERHEAD_BYTES
    if shutil.disk_usage(folder).free < needed:  # before each of Orbax's threads fails
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), arrays)
    args = ocp.args.PyTreeSave(arrays, save_args=save_args)
    path = folder / "weights" / name
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    for logger in loggers:
        logger.disabled = True  # Orbax also logs the error that it raises
    try:
        _writer().save(path, args=args)
        (path / "commit_success.txt").unlink(missing_ok=True)  # it names folders of this machine
    except Exception as error:
        raise failed_write(error) from error
    finally:
        for logger in loggers:
            logger.disabled = False
    return hash_item(arrays)


def failed_write(error: Exception) -> OSError:
    """Finds the system error behind an Orbax error; a full disk gives a ValueError there."""
    match = re.search(r"os_error_code='(\d+)'", str(error))  # of array I/O
    code = getattr(error, "errno", None) or (int(match[1]) if match else None)
    reason = one_line(error) if code is None else os.strerror(code)
    return OSError(code or errno.EIO, reason)


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


# --------------------------------------------------------------------------------------------------
# Checksums


def hash_values(array: Any) -> str:
    """SHA-256 of shape and values as bfloat16, independent of the stored type.

    A float32 array, its bfloat16 cast, and that cast as float32 again have one hash. (Rounding to
    float16 on the way may give another bfloat16, and so another hash.)
    """
    array = np.ascontiguousarray(array)
    digest = hashlib.sha256(f"bfloat16 {array.shape}".encode())
    for values in cut_values(array):
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = values.astype(ml_dtypes.bfloat16)
        digest.update(rounded.view(np.uint8).data)
    return digest.hexdigest()


def cut_values(array: np.ndarray) -> Iterator[np.ndarray]:
    """Cuts an array's values into pieces, so that what is made of them is not as long."""
    values = array.reshape(-1)
    return (values[start : start + _CHUNK_VALUES] for start in range(0, values.size, _CHUNK_VALUES))


def hash_item(item: Params) -> str:
    """SHA-256 of the paths, types, shapes and bytes of an item's arrays."""
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten_item(item).items()):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{'/'.join(path)} {array.dtype.name} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def hash_file(path: AnyPath) -> str:
    """SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Writes SHA256SUMS for files of a folder (paths relative to it)."""
    lines = [f"{hash_file(folder / name)}  {name}\n" for name in sorted(names)]
    (folder / SUMS_FILE).write_text("".join(lines))


def read_sums(folder: AnyPath) -> dict[str, str]:
    """SHA-256 by file name, from the folder's SHA256SUMS; empty without that file.

    Raises:
      UserError: a line that sha256sum would not write.
    """
    path = folder / SUMS_FILE
    if not path.is_file():
        return {}
    sums: dict[str, str] = {}
    lines = path.read_bytes().decode(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        match = _SUMS_LINE.fullmatch(line)
        if match is None:
            raise UserError(
                f"{path}: line {number}: want a SHA-256 and a file name, got {line[:80]!r}; "
                "fetch the file again"
            )
        sums[match[2].removeprefix("./")] = match[1]
    return sums


def check_file(path: AnyPath, want: str) -> None:
    """Raises UserError if a file differs from its SHA-256."""
    got = hash_file(path)
    if got != want:
        raise UserError(
            f"{path}: {SUMS_FILE} says SHA-256 {want}, got {got}; the file is damaged or was "
            "changed, fetch it again"
        )
