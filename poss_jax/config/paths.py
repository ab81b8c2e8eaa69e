"""Paths of this machine, and URIs of object stores such as gs://bucket/folder.

`pathlib` merges the two slashes of a URI, so users' paths are parsed here. An object store replaces
objects as a whole. It has no locks and no renames, and its folders are only common prefixes of
names.
"""

import io
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from etils import epath

from poss_jax.config.reading import UserError, one_line

AnyPath = Path | epath.Path
"""A local path or a URI; both have the same methods."""

_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_CUT_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # a URI after pathlib

# In upload order, last: readers look for these, so a folder without them does not count.
_LAST = ("tokenizer.json", "config.json", "model.json", "config.yaml")


def is_uri(path: str | AnyPath) -> bool:
    """True if a path is a URI."""
    return _URI.match(str(path)) is not None


def as_path(path: str | AnyPath) -> AnyPath:
    """Turns a user's text into a path; `~` is the home folder.

    Raises:
      UserError: an empty text, a URI of an unknown kind, or of a store that cannot be reached.
    """
    return _reach(str(path)) if is_uri(path) else _expand(path)


def absolute(path: str | AnyPath) -> AnyPath:
    """`as_path`, made absolute; epath would prefix a URI with the working directory."""
    converted = as_path(path)
    return converted.absolute() if isinstance(converted, Path) else converted


def real_path(path: str | AnyPath) -> AnyPath:
    """`absolute`, with links resolved."""
    converted = as_path(path)
    return converted.resolve() if isinstance(converted, Path) else converted


def local_path(path: str | Path, name: str) -> Path:
    """Turns a user's text into a local path; refuses URIs.

    Args:
      name: name of the setting, for the message.

    Raises:
      UserError: an empty text, or a URI.
    """
    if _CUT_URI.match(str(path)):
        raise UserError(f"{name} {path}: want a path of this machine, got a URI; name a local path")
    return _expand(path)


def _expand(path: str | AnyPath) -> Path:
    if not str(path):  # pathlib reads it as the working folder
        raise UserError("want a path, got an empty text; name one, or leave the setting out")
    return Path(os.path.expanduser(path))


@cache
def _reach(uri: str) -> epath.Path:
    try:
        path = epath.Path(uri)
        path.exists()
    except KeyError as error:
        raise UserError(f"{uri}: want a local path, or a URI of gs://, s3:// or az://") from error
    except Exception as error:  # the store's client raises many kinds
        raise UserError(
            f"{uri}: its store cannot be reached ({one_line(error)}); for gs:// install gcsfs (pip "
            "install 'poss-jax[gcs]'), and check credentials and bucket"
        ) from error
    return path


def cache_folder() -> Path:
    """Folder of caches that can be rebuilt: compiled programs, the default model.

    The environment variable POSS_JAX_CACHE names it; the default is `poss_jax` in XDG_CACHE_HOME or
    `~/.cache`.

    Raises:
      UserError: the home folder is unknown.
    """
    if named := os.environ.get("POSS_JAX_CACHE"):
        return local_path(named, "POSS_JAX_CACHE").absolute()
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:  # a container may have neither HOME nor the user
        raise UserError("the home folder is unknown; set HOME or POSS_JAX_CACHE") from error
    return Path(base) / "poss_jax"


def child_python(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a Python process that imports what this process imports.

    `-P` keeps the working folder out of its import path: a `numpy.py` there would be run.
    """
    import_path = os.pathsep.join(filter(None, sys.path))
    return [sys.executable, "-P", *arguments], os.environ | {"PYTHONPATH": import_path}


# --------------------------------------------------------------------------------------------------
# Files


def file_size(path: AnyPath) -> int:
    """Size of a file in bytes."""
    return path.stat().st_size if isinstance(path, Path) else path.stat().length


def read_text(path: AnyPath, encoding: str = "utf-8") -> str:
    """Reads a whole file; epath's version does not take every encoding."""
    if isinstance(path, Path):
        return path.read_text(encoding=encoding)
    with path.open("rb") as file, io.TextIOWrapper(file, encoding) as text:  # type: ignore[arg-type]
        return text.read()


@contextmanager
def local_files(folder: AnyPath, names: Iterable[str]) -> Iterator[Path]:
    """Yields a local folder: itself, or for a URI a temporary copy of some files.

    Args:
      folder: path or URI.
      names: files to copy, if they exist.
    """
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            if (folder / name).is_file():
                _copy_file(folder / name, Path(scratch) / name)
        yield Path(scratch)


@contextmanager
def uploaded(folder: AnyPath) -> Iterator[Path]:
    """Yields a local folder to fill: itself, or for a URI a temporary one to upload."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)
        copy_files(Path(scratch), folder)


def copy_files(folder: AnyPath, to: epath.Path) -> None:
    """Copies all files below a folder to a URI, with the files that mark it complete last."""
    ranks = {name: rank for rank, name in enumerate(_LAST)}
    for file in sorted(_list_files(folder), key=lambda file: ranks.get(file.name, -1)):
        _copy_file(file, to / str(file.relative_to(folder)))


def _list_files(folder: AnyPath) -> Iterator[AnyPath]:
    for path in folder.iterdir():
        if path.is_dir():
            yield from _list_files(path)
        else:
            yield path


def _copy_file(source: AnyPath, to: AnyPath) -> None:
    with source.open("rb") as read, to.open("wb") as written:
        shutil.copyfileobj(read, written, 2**24)  # type: ignore[arg-type]
