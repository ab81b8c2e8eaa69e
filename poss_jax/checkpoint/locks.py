"""Locks: one process writes an output at a time.

The lock is the operating system's and ends with its process. The lock file names its holder; only a
kill leaves it behind.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from poss_jax.checkpoint.whole import made_parents
from poss_jax.config.paths import AnyPath, is_uri, local_path
from poss_jax.config.reading import UserError


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
