"""Answers on their way: filled by the scheduler's thread, read by any thread or event loop."""

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress

from poss_jax.engine.answers import Chunk, LiveAnswer
from poss_jax.engine.prompts import PreparedPrompt

Chunks = AsyncIterator[tuple[int, Chunk] | None]
"""Index of an answer and its next chunk; None: nothing new for a while."""


class Stream:
    """The answer to one request, chunk by chunk, to be read once; the last chunk holds all of it.

    Attributes:
      prompt: the request.
      answer: the text so far; only the thread that decodes touches it.
      has_logprobs: whether chunks hold log-probabilities.
    """

    def __init__(
        self, prompt: PreparedPrompt, answer: LiveAnswer, *, has_logprobs: bool, deadline: float
    ) -> None:
        self.prompt = prompt
        self.answer = answer
        self.has_logprobs = has_logprobs
        self._deadline = deadline
        self._chunks: queue.SimpleQueue[Chunk | Exception] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None
        self._quiet_until = 0.0  # until then only the end of the answer wakes the reader
        self._is_cancelled = False

    def cancel(self) -> None:
        """Ends the answer with the next round; from any thread."""
        self._is_cancelled = True

    def __iter__(self) -> Iterator[Chunk]:
        chunk = None
        while chunk is None or chunk.answer is None:
            chunk = _unwrap(self._chunks.get())
            yield chunk

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        async for item in merge([self]):
            assert item is not None
            yield item[1]

    def put(self, chunk: Chunk | Exception) -> None:
        """Adds a chunk, or the error that decoding failed with."""
        self._chunks.put(chunk)
        is_end = isinstance(chunk, Exception) or chunk.answer is not None
        if is_end or time.monotonic() >= self._quiet_until:
            self._wake()

    def is_overdue(self) -> bool:
        """Tells whether the answer is to end: cancelled, or past its deadline."""
        return self._is_cancelled or time.monotonic() > self._deadline

    def _take(self) -> Chunk | None:
        """Joins all chunks that have arrived."""
        whole = None
        while not self._chunks.empty():
            chunk = self._chunks.get()
            if whole is not None and isinstance(chunk, Exception):
                self.put(chunk)  # raised once the text before it is delivered
                return whole
            chunk = _unwrap(chunk)
            whole = chunk if whole is None else whole + chunk
        return whole


async def merge(
    streams: Sequence[Stream], *, patience: float | None = None, interval: float = 0.0
) -> Chunks:
    """Yields chunks of several answers with their indices; None after a quiet interval.

    Args:
      streams: the answers; this is their only reader.
      patience: seconds after which None is yielded; None: never.
      interval: seconds over which chunks of an answer are joined into one. The first and the last
        chunk do not wait.

    Raises:
      Closed: decoding failed.
    """
    loop, has_more = asyncio.get_running_loop(), asyncio.Event()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            loop.call_soon_threadsafe(has_more.set)

    for stream in streams:
        stream._wake = wake
    num_open = len(streams)
    while num_open:
        has_more.clear()
        chunks = [(index, chunk) for index, one in enumerate(streams) if (chunk := one._take())]
        for index, chunk in chunks:
            num_open -= chunk.answer is not None
            yield index, chunk
        now = time.monotonic()
        for index, _ in chunks:
            streams[index]._quiet_until = now + interval
        quiet = [stream._quiet_until - now for stream in streams if stream._quiet_until > now]
        try:
            async with asyncio.timeout(min(quiet, default=patience)):
                if num_open:
                    await has_more.wait()
        except TimeoutError:
            if not quiet:
                yield None


def _unwrap(chunk: Chunk | Exception) -> Chunk:
    if isinstance(chunk, Exception):
        raise chunk
    return chunk
