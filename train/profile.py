"""A window of steps under JAX's profiler."""

from pathlib import Path
from typing import Any

import jax

from poss_jax.config.training import ProfileConfig


class Profiler:
    """Records the steps that the config names, if the run comes through them."""

    def __init__(self, config: ProfileConfig | None, folder: Path) -> None:
        self._folder, self._is_on = folder, False
        self._first = config.start if config else 0
        self._last = config.start + config.steps - 1 if config else 0

    def before(self, step: int) -> None:
        """Starts recording at the window's first step."""
        if step == self._first:
            jax.profiler.start_trace(self._folder)
            self._is_on = True

    def after(self, step: int, arrays: Any) -> None:
        """Stops recording after the window's last step, once its arrays are there."""
        if step == self._last and self._is_on:
            jax.block_until_ready(arrays)
            self.close()

    def close(self) -> None:
        """Stops recording, if it is on."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False
