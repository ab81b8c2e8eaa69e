"""What a scheduler counts; `/metrics` shows it."""

import logging
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import jax

_LOG = logging.getLogger(__package__)


@dataclass
class Stats:
    """Counts since the scheduler was made.

    Attributes:
      rounds: rounds that were run.
      drafts: trees drafted, one per text and round.
      drafted: positions those trees offered along the accepted path.
      accepted: how often a draft was accepted, by position from 1.
      tokens: tokens delivered.
      prompt_tokens: tokens of prompts.
      cached_tokens: prompt tokens copied from earlier prompts instead of read.
      finished: answers by stop reason.
      compilations: programs that texts waited for although there was a `warm_up`.
    """

    rounds: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    compilations: int = 0
    _thread: threading.Thread | None = None

    def watch_compilations(self, thread: threading.Thread) -> None:
        """Counts what a thread compiles from now on."""
        self.stop_watching()
        self._thread = thread
        jax.monitoring.register_event_duration_secs_listener(self._count_compilation)

    def stop_watching(self) -> None:
        """Counts no more compilations."""
        if self._thread is not None:
            jax.monitoring.unregister_event_duration_listener(self._count_compilation)
        self._thread = None

    def _count_compilation(self, event: str, duration_secs: float, **about: Any) -> None:
        is_ours = threading.current_thread() is self._thread
        if is_ours and event == "/jax/core/compile/backend_compile_duration":
            self.compilations += 1
            name = about.get("fun_name", "a program")
            _LOG.warning("compiled %s after the warm-up, in %.1f s", name, duration_secs)
