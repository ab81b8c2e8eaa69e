"""Locks: one process writes an output at a time.

The lock is the operating system's and ends with its process. The lock file names its holder; only a
kill leaves it behind.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from poss_jax.config.paths import AnyPath, is_uri, local_path
from poss_jax.config.reading import UserError


@contextmanager
def hold_lock(path: Path, if_held: Callable[[str], None]) -> Iterator[None]:
    """Holds a lock.

    Args:
      path: file of the lock.
      if_held: called with the holder before waiting; may raise instead.
    """
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        if_held(_describe_holder(path))
        lock.acquire()
    is_native = not isinstance(lock, SoftFileLock)  # the fallback writes a file itself
    try:
        if is_native:
            path.write_text(f"{os.getpid()}\n{socket.gethostname()}\n")
        yield
    finally:
        if is_native:
            with suppress(OSError):
                path.unlink()  # waiting processes notice and create another
        lock.release()


@contextmanager
def sole_writer(output: str | AnyPath) -> Iterator[None]:
    """Keeps other processes from writing a file or folder; does nothing at a URI.

    Raises:
      UserError: another process writes it, or it cannot be written at all.
    """
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
            for parent in reversed([path for path in real.parents if not path.exists()]):
                held.callback(_remove_empty, parent)
            real.parent.mkdir(parents=True, exist_ok=True)
            is_inside = real.is_dir() and not os.access(real.parent, os.W_OK)
            place = real / ".lock" if is_inside else real.parent / f".{real.name}.lock"
            held.enter_context(hold_lock(place, refuse))
            with hold_folder(output):  # another process may be writing it under an earlier name
                pass
        except OSError as error:
            raise UserError(f"output {output}: {error.strerror}; name another place") from error
        yield


@contextmanager
def hold_folder(output: str | AnyPath) -> Iterator[None]:
    """Keeps other processes from writing a folder, even if it is moved; nothing without one.

    Raises:
      UserError: another process writes it.
    """
    real = None if is_uri(output) else local_path(str(output), "output").resolve()
    if real is None or not real.is_dir():
        yield
        return
    with ExitStack() as held:
        folder = os.open(real, os.O_RDONLY)
        held.callback(os.close, folder)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output {output} is in use by another process, which began before it was moved "
                "here; wait for it, or name another output"
            ) from error
        except OSError:  # the file system may lack such locks
            pass
        yield


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # normally not empty
        folder.rmdir()


def _describe_holder(path: Path) -> str:
    try:
        pid, host = path.read_text().splitlines()
        since = datetime.fromtimestamp(path.stat().st_mtime)
    except (OSError, ValueError):  # released, or not written yet
        return "another process"
    return f"process {pid} on host {host} (since {since:%Y-%m-%d %H:%M:%S})"
