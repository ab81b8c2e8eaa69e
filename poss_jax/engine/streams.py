"""Between the thread that decodes and others: tickets for answers, and counts."""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax

from poss_jax.engine.answers import Chunk, LiveAnswer
from poss_jax.engine.prompts import PreparedPrompt

_LOG = logging.getLogger(__package__)

Chunks = AsyncIterator[tuple[int, Chunk] | None]
"""Index of an answer and its next chunk; None: nothing new for a while."""


class Ticket:
    """The answer to one request, chunk by chunk, to be read once; the last chunk holds all of it.

    The scheduler's thread fills it, any thread or event loop reads it.
    """

    def __init__(
        self,
        prompt: PreparedPrompt,
        answer: LiveAnswer,
        *,
        has_logprobs: bool = False,
        deadline: float = float("inf"),
    ) -> None:
        self.prompt, self.answer = prompt, answer  # only the thread that decodes touches the answer
        self.has_logprobs, self._deadline = has_logprobs, deadline
        self._chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._error: Exception | None = None  # to be raised behind the text before it
        self._wake: Callable[[], None] = lambda: None
        self._quiet_until = 0.0  # until then only the end of the answer wakes the reader
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the answer with the next round; from any thread."""
        self._is_cancelled = True

    def __iter__(self) -> Iterator[Chunk]:
        chunk = None
        while chunk is None or chunk.answer is None:
            chunk = self._chunks.get()
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for item in merge([self]):
            assert item is not None
            yield item[1]

    def put(self, *items: Chunk | Exception) -> None:
        """Adds chunks, or an error, which ends the answer; nothing behind it is read."""
        for item in items:
            self._chunks.put(item)
        last = items[-1]
        is_end = isinstance(last, Exception) or last.answer is not None
        if is_end or time.monotonic() >= self._quiet_until:
            self._wake()

    def take_all(self) -> Iterator[Chunk]:
        """Yields the chunks that have arrived; raises an error among them."""
        while not self._chunks.empty():
            item = self._chunks.get()
            if isinstance(item, Exception):
                raise item
            yield item

    def is_overdue(self) -> bool:
        """Tells whether the answer is to end: cancelled, or past its deadline."""
        return self._is_cancelled or time.monotonic() > self._deadline

    def _take(self) -> Chunk | None:
        """Joins all chunks that have arrived, up to an error; raises that once nothing is left."""
        joined = None
        while self._error is None and not self._chunks.empty():
            item = self._chunks.get()
            if isinstance(item, Exception):
                self._error = item
                self._wake()  # so that it is raised next
            else:
                joined = item if joined is None else joined + item
        if joined is None and self._error is not None:
            raise self._error
        return joined


async def merge(
    tickets: Sequence[Ticket], *, patience: float | None = None, interval: float = 0.0
) -> Chunks:
    """Yields chunks of several answers with their indices; None after a quiet interval.

    Args:
      tickets: the answers; this is their only reader.
      patience: seconds after which None is yielded; None: never.
      interval: seconds over which chunks of an answer are joined into one. The first and the last
        chunk do not wait.

    Raises:
      Closed: decoding failed.
      UserError: the grammar of an answer has become too complex.
    """
    loop, has_more = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            loop.call_soon_threadsafe(has_more.set)

    for ticket in tickets:
        ticket._wake = wake
    num_open = len(tickets)
    while num_open:
        has_more.clear()
        delivered = list[Ticket]()
        for index, ticket in enumerate(tickets):
            if chunk := ticket._take():
                num_open -= chunk.answer is not None
                yield index, chunk
                delivered.append(ticket)
        now = time.monotonic()
        for ticket in delivered:
            ticket._quiet_until = now + interval
        quiet = [ticket._quiet_until - now for ticket in tickets if ticket._quiet_until > now]
        try:
            async with asyncio.timeout(min(quiet, default=patience)):
                if num_open:
                    await has_more.wait()
        except TimeoutError:
            if not quiet:
                yield None


@dataclass
class Stats:
    """Counts since the scheduler was made."""

    rounds: int = 0
    drafts: int = 0  # trees, one per slot and round
    drafted: int = 0  # positions those trees offered along the accepted path
    accepted: Counter[int] = field(default_factory=Counter)  # drafted or copied tokens, by position
    copied: int = 0  # accepted tokens that only lookup proposed
    tokens: int = 0  # delivered
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, copied from earlier ones instead of computed
    finished: Counter[str] = field(default_factory=Counter)  # answers by stop reason
    compilations: int = 0  # programs that requests waited for although there was a `warm_up`
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

    def _count_compilation(self, event: str, duration_secs: float, **details: Any) -> None:
        is_ours = threading.current_thread() is self._thread
        if is_ours and event == "/jax/core/compile/backend_compile_duration":
            self.compilations += 1
            name = details.get("fun_name", "a program")
            _LOG.warning("compiled %s after the warm-up, in %.1f s", name, duration_secs)
