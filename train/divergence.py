"""Tells a run that goes wrong from one that learns."""

from typing import Any

import numpy as np

_DECAY = 0.98  # the running mean looks back some fifty steps
_MARGIN = 1.0  # a loss near zero may jump by several times its size


class Diverged(Exception):
    """A step went wrong; nothing after it is worth saving."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class LossWatch:
    """Compares the loss of every step with the running mean of those before.

    Attributes:
      level: the running mean; None before the first step.
    """

    def __init__(self, factor: float | None, level: float | None) -> None:
        self._factor, self.level = factor, level

    def check(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes in a step's metrics, or raises `Diverged`."""
        loss, level = metrics["loss"], self.level
        check_finite(step, {"loss": loss, **metrics})
        if level is None:
            self.level = loss
            return
        if self._factor is not None and loss > max(self._factor * level, level + _MARGIN):
            raise Diverged(step, f"loss {loss:.4g}, its running mean {level:.4g}")
        self.level = _DECAY * level + (1 - _DECAY) * loss


def check_finite(step: int, metrics: dict[str, Any]) -> None:
    """Raises `Diverged` where a metric holds an infinity or no number."""
    for name, value in metrics.items():
        if not np.isfinite(value).all():
            raise Diverged(step, f"{name} {value}")
