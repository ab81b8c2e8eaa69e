"""Outputs: a folder or a file is written whole or not at all, and by one process at a time.

At a URI a folder is uploaded; the file that identifies it goes last (`paths.py`).
"""

import glob
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from poss_jax.config.paths import AnyPath, as_path, is_uri, local_path, uploaded
from poss_jax.config.reading import UserError

_LOCK = "lock"


@contextmanager
def whole_folder(folder: str | AnyPath) -> Iterator[Path]:
    """Yields a temporary folder to fill, which becomes `folder` at the end, or vanishes.

    Raises:
      UserError: the folder is not empty, cannot be replaced or cannot be written.
    """
    refuse_irreplaceable(folder)
    path = as_path(folder)
    if not isinstance(path, Path):
        with uploaded(path) as partial:
            yield partial
        return
    try:
        with renamed(path) as partial:
            yield partial
    except OSError as error:
        raise UserError(
            f"cannot write folder {folder}: {error}; nothing is kept, give a place that can hold it"
        ) from error


@contextmanager
def renamed(folder: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields a temporary sibling, renamed at the end; of a link, a sibling of where it leads.

    Raises:
      OSError: it cannot be made or renamed, such as to a folder with files without `overwrite`.
    """
    folder = folder.resolve()
    prefix = f".{folder.name}.partial-"
    with made_parents(folder):
        for abandoned in folder.parent.glob(f"{glob.escape(prefix)}*"):  # by killed processes
            with suppress(Timeout, OSError), FileLock(abandoned / _LOCK, timeout=0):  # not held
                shutil.rmtree(abandoned, ignore_errors=True)
        with (
            tempfile.TemporaryDirectory(
                prefix=prefix, dir=folder.parent, ignore_cleanup_errors=True
            ) as temporary,
            FileLock(Path(temporary) / _LOCK),
        ):
            partial = Path(temporary) / "model"
            partial.mkdir()
            yield partial
            if overwrite and folder.exists():
                folder.replace(Path(temporary) / "replaced")
            partial.replace(folder)


@contextmanager
def made_parents(path: Path) -> Iterator[None]:
    """Makes the folders above a path; those that are empty at the end vanish again."""
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for parent in made:
            with suppress(OSError):  # normally not empty
                parent.rmdir()


@contextmanager
def replaced(path: AnyPath) -> Iterator[Path]:
    """Yields a local path to write; it becomes the file at the end, or vanishes.

    Readers find the old file or the new one.
    """
    with uploaded(path.parent) as folder:
        if not isinstance(path, Path):
            yield folder / path.name
            return
        partial = folder / f".{path.name}.partial"
        try:
            with naming(path):
                yield partial
                partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_file(path: AnyPath, text: str) -> None:
    """Writes a text file (see `replaced`)."""
    with replaced(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """Adds the file's name to system errors that lack it, such as a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_output(path: AnyPath, text: str, *, name: str = "output") -> None:
    """Writes a text file and creates its folder.

    Args:
      name: name of the file's option, for the message.

    Raises:
      UserError: it cannot be written; the old file stays.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text)
    except OSError as error:
        raise UserError(f"{name} {path}: {error.strerror}; choose another place") from error


def refuse_irreplaceable(folder: str | AnyPath) -> None:
    """Raises UserError unless `whole_folder` may write here: it can only replace an empty one."""
    refuse_non_empty(folder)
    folder = as_path(folder)
    if isinstance(folder, Path) and folder.resolve().is_mount():
        raise UserError(
            f"output {folder} is a mount point, which cannot be replaced; name a folder below it"
        )


def refuse_non_empty(folder: str | AnyPath) -> None:
    """Raises UserError unless files may be written to this folder."""
    folder = as_path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output {folder} is a file; name a folder that does not exist yet")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"output {folder} is not empty; name another folder or empty this one")


# --------------------------------------------------------------------------------------------------
# One writer at a time: the lock is the operating system's and ends with its process; the lock file
# names its holder, and only a kill leaves it behind.


@contextmanager
def hold_lock(path: Path, if_held: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock.

    Args:
      if_held: called with the holder before waiting; may raise instead.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if_held(_describe_holder(path))
        lock.acquire()
    try:
        path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # waiting processes notice and create another
        lock.release()


@contextmanager
def sole_writer(output: str | AnyPath) -> Iterator[None]:
    """Keeps other processes from writing a file or folder, or refuses; does nothing at a URI."""
    if is_uri(output):  # an object store has no locks
        yield
        return
    real = local_path(str(output), "output").resolve()

    def refuse(holder: str) -> None:
        raise UserError(
            f"output {output} is in use by {holder}; wait for it, or name another output"
        )

    with ExitStack() as held:
        try:
            held.enter_context(made_parents(real))
            is_inside = real.is_dir() and not os.access(real.parent, os.W_OK)
            lock_file = real / ".lock" if is_inside else real.parent / f".{real.name}.lock"
            held.enter_context(hold_lock(lock_file, refuse))
        except OSError as error:
            raise UserError(f"output {output}: {error.strerror}; name another place") from error
        yield


def _describe_holder(path: Path) -> str:
    try:
        pid, host = path.read_text().splitlines()
        since = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, ValueError):  # released, or not written yet
        return "another process"
    return f"process {pid} on host {host} (since {since:%Y-%m-%d %H:%M:%S})"
