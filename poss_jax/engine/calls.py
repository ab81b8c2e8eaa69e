"""Functions that other threads want to run on the scheduler's thread."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

from poss_jax.config.reading import UserError

ResultT = TypeVar("ResultT")


class Calls:
    """Functions that wait, and their results; false if none waits.

    Attributes:
      alone: those that run while no text is decoded.
      between: those that run between rounds.
    """

    def __init__(self, changed: threading.Condition, check: Callable[[], None]) -> None:
        """Nothing waits.

        Args:
          changed: notified of new functions.
          check: raises an error once nobody runs functions any more.
        """
        self._changed, self._check = changed, check
        self.alone: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self.between = self.alone.copy()

    def __bool__(self) -> bool:
        return bool(self.alone or self.between)

    def run(self, function: Callable[[], ResultT], *, alone: bool = False) -> ResultT:
        """Waits until the function has run on the scheduler's thread."""
        done: Future[ResultT] = Future()
        with self._changed:
            (self.alone if alone else self.between).append((function, done))
            self._changed.notify()
        while True:
            with suppress(TimeoutError):
                return done.result(0.1)
            self._check()


def run_first(waiting: deque[tuple[Callable[[], Any], Future[Any]]]) -> None:
    """Runs the function that waits longest; a `UserError` is its caller's."""
    function, done = waiting.popleft()
    try:
        done.set_result(function())
    except UserError as error:
        done.set_exception(error)
