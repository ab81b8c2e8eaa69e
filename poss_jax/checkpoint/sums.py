"""Checksums: of arrays, and of whole files in a SHA256SUMS file (`sha256sum -c` reads it too)."""

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import flatten_item
from poss_jax.shapes import Params

SUMS_FILE = "SHA256SUMS"

_SUMS_LINE = re.compile(r"([0-9a-f]{64}) [ *](.+)")

_CHUNK = 1 << 22


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
    return (values[start : start + _CHUNK] for start in range(0, values.size, _CHUNK))


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
    """Compares a file with its SHA-256.

    Raises:
      UserError: it differs.
    """
    got = hash_file(path)
    if got != want:
        raise UserError(
            f"{path}: {SUMS_FILE} says SHA-256 {want}, got {got}; the file is damaged or was "
            "changed, fetch it again"
        )
