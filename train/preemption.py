"""SIGTERM, by which clusters announce that they take a machine away."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import multihost_utils


@contextmanager
def preemption_notice() -> Iterator[Callable[[int], bool]]:
    """Gives a function to call after every step: whether the run is to save and stop there.

    Once SIGTERM was noticed, another one, or Ctrl-C, ends the process at once. Of several
    processes any may be told; JAX then finds a step that all of them have still ahead.
    """
    if jax.distributed.is_initialized():
        yield _all_processes_stop
        return
    told = threading.Event()

    def note(*_: Any) -> None:
        told.set()
        _quit_at_the_next_signal()

    before = None
    if threading.current_thread() is threading.main_thread():  # no other may set handlers
        before = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGTERM, note)
    try:
        yield lambda step: told.is_set()
    finally:
        for name, handler in (before or {}).items():
            signal.signal(name, handler)


def _all_processes_stop(step: int) -> bool:
    is_reached = multihost_utils.reached_preemption_sync_point(step)
    if is_reached:
        _quit_at_the_next_signal()
    return is_reached


def _quit_at_the_next_signal() -> None:
    os.write(2, b"\nSIGTERM: saving and stopping; a second one quits at once\n")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
