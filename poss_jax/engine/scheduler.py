"""The scheduler: requests come and go at any time, and one thread decodes them together.

    scheduler = Scheduler(Slots(engine, sizes=(1, 4, 16)))
    scheduler.warm_up()
    stream = scheduler.submit(engine.prepare("def fibonacci(", 64))
    for chunk in stream:              # or: async for chunk in stream
        print(chunk.text, end="")
    scheduler.close()

Texts equal `Engine.generate` with the same settings and seed, regardless of the other requests
(with sampled drafts: in distribution).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from poss_jax.config.reading import UserError
from poss_jax.engine.answers import Chunk, Round, TokenLogprobs
from poss_jax.engine.leader import Leader
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.rounds import Pace, Rounds, count_rounds, read_rounds
from poss_jax.engine.scoring import read_all_scores
from poss_jax.engine.slots import Slots, run_guided_round
from poss_jax.engine.streams import Calls, Stats, Stream, run_first
from poss_jax.engine.warm_up import WarmUp
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)
_PATIENCE = 16  # steps for which a batch stays larger than its texts need
_POLL_SECONDS = 0.1
_REST_SECONDS = 30.0  # that compiling leaves the processor to texts, after each program


class QueueFull(Exception):
    """The queue is full."""


class Closed(Exception):
    """The scheduler takes no more requests."""


class Scheduler:
    """Decodes requests together in slots, on its own thread; all methods are thread-safe.

    Requests run in the order of arrival; one whose rounds are still compiled lets others pass. A
    prompt is read in chunks between rounds.

    Attributes:
      stats: counts since it was made.
      max_length: most tokens of prompt and answer together.
      num_slots: most texts decoded at once.
      warmth: what is compiled; None: nothing was compiled beforehand.
      is_closed: True once `close` was called; unfinished requests end as cancelled.
      error: what ended the thread; None while it runs.
    """

    def __init__(self, slots: Slots, *, max_queue: int = 256) -> None:
        """Starts the thread.

        Args:
          slots: where texts are decoded; for the scheduler alone.
          max_queue: most waiting requests; a group submitted to an empty queue may exceed it.
        """
        self.stats = Stats()
        self.max_length, self.num_slots = slots.max_length, slots.sizes[-1]
        self._slots, self._max_queue = slots, max_queue
        self._steps: Any = self._slots if jax.process_count() == 1 else Leader(self._slots)
        self._waiting: deque[Stream] = deque()
        self._active: list[Stream | None] = [None] * self._slots.size
        self._reading: tuple[Stream, int] | None = None  # and the number of chunks read
        self._under_way: list[tuple[Rounds, dict[int, Stream], float]] = []  # and the start time
        self._num_large = 0  # steps for which the batch was larger than needed
        self._pace = Pace()
        self._changed = threading.Condition()
        self._calls = Calls(self._changed, self._check_thread)
        self._scoring = threading.Lock()
        self._is_draining = self.is_closed = False
        self.warmth: WarmUp | None = None
        self._failure: BaseException | None = None  # of another thread
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poss-scheduler", daemon=True)
        self._thread.start()

    # ----------------------------------------------------------------------------------------------
    # From any thread

    def submit(
        self,
        prompt: PreparedPrompt,
        *,
        stop: Sequence[str] = (),
        has_logprobs: bool = False,
        timeout: float = float("inf"),
    ) -> Stream:
        """Puts a request into the queue; see `submit_all`."""
        (stream,) = self.submit_all([prompt], stop=stop, has_logprobs=has_logprobs, timeout=timeout)
        return stream

    def submit_all(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        stop: Sequence[str] = (),
        has_logprobs: bool = False,
        timeout: float = float("inf"),
    ) -> list[Stream]:
        """Puts requests into the queue, all or none; an empty queue takes any number of them.

        Args:
          prompts: made by `Engine.prepare`.
          stop: strings that `Engine.check_stop` accepts.
          has_logprobs: whether chunks hold log-probabilities.
          timeout: seconds after which the answer ends where it is.

        Raises:
          UserError: what `Slots.check` refuses.
          QueueFull: too many requests would wait.
          Closed: the scheduler is draining or closed, or its thread failed.
        """
        engine, deadline = self._slots.engine, time.monotonic() + timeout
        streams = []
        for prompt in prompts:
            self._slots.check(prompt)
            answer = engine.live_answer(prompt, stop)
            streams.append(Stream(prompt, answer, has_logprobs=has_logprobs, deadline=deadline))
        with self._changed:
            if self._is_draining or self.error is not None:
                raise Closed("takes no more requests")
            if self._waiting and len(self._waiting) + len(streams) > self._max_queue:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            self._waiting += streams
            self._changed.notify_all()
        return streams

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests being read or decoded."""
        return self._num_texts() + (self._reading is not None)

    def warm_up(self) -> None:
        """Compiles all programs in the order of use; afterwards requests compile nothing.

        Requests are answered meanwhile, with what is compiled. On several hosts they wait, since
        all processes must run the same steps in the same order.
        """
        self._calls.run(self._begin_warm_up, alone=True)
        try:
            self._compile()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise Closed("compiling failed") from error

    def update_weights(self, params: Params) -> None:
        """Replaces the target's parameters, once all running requests have ended.

        Requests in the queue get the new ones.

        Args:
          params: as for `Engine.update_weights`.

        Raises:
          UserError: what `Engine.update_weights` refuses; the update failed, for example for lack
            of memory (the old parameters stay); or there are several processes.
        """
        if isinstance(self._steps, Leader):
            raise UserError(
                "update_weights: want a server of one process, this one has several; start it "
                "again with the new weights"
            )
        with self._scoring:  # no prompt is scored half with the old ones
            self._calls.run(partial(self._slots.update_weights, params), alone=True)

    def score(self, ids: Sequence[int]) -> list[TokenLogprobs]:
        """Scores every token of a prompt but the first (see `score_prompt`), between rounds.

        Args:
          ids: token ids that `Engine.prepare` accepts, at most `max_length`.
        """
        with self._scoring:
            if self._steps is self._slots:
                self._slots.compile_scoring()  # here, so that texts need not wait
            self._calls.run(partial(self._steps.begin_scores, ids))
            return read_all_scores(partial(self._calls.run, self._steps.score_next), len(ids))

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests and waits for the rest; False if time ran out or it failed."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_idle() or self.error, timeout)
            return self._is_idle() and self.error is None

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        with self._changed:
            self._is_draining = self.is_closed = True
            for stream in [*self._waiting, *self._streams()]:
                stream.cancel()
            self._changed.notify_all()
        self._thread.join()
        self.stats.stop_watching()

    def _check_thread(self) -> None:
        if self.error is not None or not self._thread.is_alive():
            raise Closed("the scheduler's thread has ended") from self.error

    # ----------------------------------------------------------------------------------------------
    # On the scheduler's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
        except BaseException as error:  # such as a tokenizer's panic
            _LOG.exception("decoding failed")
            with self._changed:
                self.error = error
                for stream in [*self._waiting, *self._streams()]:
                    stream.put(Closed("decoding failed"))
                self._changed.notify_all()
        finally:
            if isinstance(self._steps, Leader):
                self._steps.dismiss()

    def _wait_for_work(self) -> bool:
        """Waits until there is something to do; False once closed."""
        with self._changed:
            if self._is_idle():
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.is_closed or self._calls or self._failure or not self._is_idle()
            )
            is_busy = self._calls or self._under_way or any(self._streams())
            if self._waiting and not (is_busy or self._following()):
                self._changed.wait(_POLL_SECONDS)  # for the warm-up
            return not (self.is_closed and self._is_idle())

    def _is_idle(self) -> bool:
        return not (self._waiting or self._under_way or any(self._streams()))

    def _streams(self) -> Iterator[Stream]:
        """All requests being read or decoded."""
        yield from (stream for stream in self._active if stream is not None)
        if self._reading is not None:
            yield self._reading[0]

    def _num_texts(self) -> int:
        return sum(one is not None for one in self._active)

    def _turn(self) -> None:
        """Reads parts of prompts, starts a round, and delivers the round before."""
        if self._failure is not None:
            raise self._failure
        self._drop_cancelled()
        if self._calls.between:
            run_first(self._calls.between)
        if self._calls.alone and not any(self._streams()):
            while self._under_way:
                self._finish_step()
            run_first(self._calls.alone)
            return
        for _ in range(self._num_parts()):
            if self._calls.alone and self._reading is None:
                break  # waiting requests run after the call
            self._admit()
        self._start_round()
        # The device runs one round while the host handles the one before.
        while len(self._under_way) > (1 if any(self._active) else 0):
            self._finish_step()

    def _drop_cancelled(self) -> None:
        """Ends requests that were cancelled or are overdue."""
        with self._changed:
            streams = [*self._waiting, *self._streams()]
        for stream in streams:
            if stream.is_overdue():
                last = stream.answer.cancel()  # if this fails, the stream still gets the error
                self._end(stream, last)

    def _num_parts(self) -> int:
        """Parts of prompts to read before the next round.

        Reading a part delays the texts being decoded; a round delays those that could start.
        """
        num_texts = self._num_texts()
        num_wanted = len(self._waiting) + (self._reading is not None)
        num_places = self._most_texts() - num_texts
        return max(min(num_wanted, num_places) // max(num_texts, 1), 1)

    def _admit(self) -> None:
        """Reads the next part of a prompt: all of it if no text is being decoded."""
        following = self._following() if self._reading is None else None
        if following is not None and self._has_room(following):
            with self._changed:  # `drain` and `close` find the stream in one place
                stream = following
                self._waiting.remove(stream)
                self._reading = stream, 0
            first = self._steps.begin(stream.prompt._replace(guide=None))  # only its masks are sent
            stream.answer.cached_tokens = min(first * self._slots.chunk, len(stream.prompt.ids))
            self._reading = stream, first
        if self._reading is None:
            return
        stream, first = self._reading
        num_chunks = self._slots.num_chunks(stream.prompt)
        last = min(first + 1, num_chunks) if any(self._active) else num_chunks
        if first < last:
            self._steps.extend(first, last)
        self._reading = stream, last
        if last == num_chunks:
            self.stats.prompt_tokens += len(stream.prompt.ids)
            self.stats.cached_tokens += stream.answer.cached_tokens
            slot = self._active.index(None)
            with self._changed:
                self._reading, self._active[slot] = None, stream
            masks = stream.prompt.guide and self._slots.masks({0: stream.prompt.guide}, 1)
            self._expect(self._steps.insert(slot, masks), {0: stream})

    def _following(self) -> Stream | None:
        """The first waiting request that can begin, since what it needs is compiled."""
        with self._changed:
            return next(filter(self._is_served, self._waiting), None)

    def _is_served(self, stream: Stream) -> bool:
        if self.warmth is None:
            return True
        is_guided = stream.prompt.guide is not None
        return self.warmth.serves(
            self._slots.size, has_logprobs=stream.has_logprobs, is_guided=is_guided
        )

    def _most_texts(self) -> int:
        """Most texts that can be decoded at once with what is compiled."""
        return max(self._sizes(), default=0)

    def _sizes(self, *more: Stream) -> Sequence[int]:
        """Sizes that decode what is decoded now, and more."""
        if self.warmth is None:
            return self._slots.sizes
        is_guided = any(stream.prompt.guide for stream in (*self._streams(), *more))
        return self.warmth.guided_sizes if is_guided else self.warmth.sizes

    def _has_room(self, following: Stream) -> bool:
        """Makes room for one more text if there is any."""
        num_texts = self._num_texts()
        if num_texts < self._slots.size:
            return True
        larger = [size for size in self._sizes(following) if size > self._slots.size]
        num_wanted = num_texts + len(self._waiting)
        for size in larger:  # one after the other: these are compiled
            if self._slots.size < num_wanted:
                self._resize(size)
        return bool(larger)

    def _resize(self, size: int) -> None:
        order = [slot for slot, stream in enumerate(self._active) if stream is not None]
        self._steps.resize(size, order)
        kept = [self._active[slot] for slot in order]
        self._active = [*kept, *[None] * (size - len(kept))]
        self._num_large = 0

    def _shrink(self) -> None:
        """Shrinks the batch once it has been too large for some rounds."""
        smaller = [s for s in self._slots.sizes if self.num_running <= s < self._slots.size]
        self._num_large = self._num_large + 1 if smaller and not self._waiting else 0
        if self._num_large > _PATIENCE:
            self._resize(smaller[-1])

    def _start_round(self) -> None:
        if any(stream is not None and stream.answer.guide for stream in self._active):
            while self._under_way:  # which tokens may follow depends on all of them
                self._finish_step()
        if not any(self._active):
            return
        self._shrink()
        texts = {slot: stream for slot, stream in enumerate(self._active) if stream is not None}
        program = self._slots.choose_program(
            [stream.prompt for stream in texts.values()],
            has_logprobs=any(stream.has_logprobs for stream in texts.values()),
        )
        if self.warmth is not None:
            program = self.warmth.nearest(program, self._slots.size)
        is_awaited = self._reading or (self._waiting and len(texts) < self._most_texts())
        num_rounds = 1 if is_awaited else self._pace.num_rounds
        if len(texts) < self._slots.size:  # keep steps short for the next request
            num_rounds = max(num_rounds // 4, 1)
        guides = {slot: one.answer.guide for slot, one in texts.items() if one.answer.guide}
        if guides:
            rounds = run_guided_round(self._steps, program, tuple(texts), guides)
        else:
            rounds = self._steps.run(program, tuple(texts), num_rounds)
        self._expect(rounds, texts)

    def _expect(self, rounds: Rounds, texts: dict[int, Stream]) -> None:
        self._under_way.append((rounds, texts, time.monotonic()))

    def _finish_step(self) -> None:
        """Delivers the rounds of the step that began first."""
        rounds, texts, begun = self._under_way.pop(0)
        slots = read_rounds(rounds)
        num_rounds = count_rounds(slots)
        self.stats.rounds += num_rounds
        self._pace.record(num_rounds, begun)
        for slot, stream in texts.items():
            if slots[slot] and not stream.answer.is_ended:
                self._deliver(stream, slots[slot])

    def _deliver(self, stream: Stream, rounds: Sequence[Round]) -> None:
        """Adds rounds to a text."""
        chunk, failure = Chunk([], [], []), None
        for one in rounds:
            if chunk.answer is None:
                try:
                    chunk += stream.answer.add(one)
                except UserError as error:  # of a grammar
                    failure = error
                    chunk += stream.answer.cancel()
                self.stats.drafts += bool(one.num_offered)
                self.stats.drafted += one.num_offered or 0
        if not stream.has_logprobs:
            chunk = replace(chunk, logprobs=())
        self.stats.tokens += len(chunk.output_ids)
        self.stats.accepted.update(depth for depth in chunk.depths if depth)
        if chunk.answer is None:
            stream.put(chunk)
            return
        self._end(stream, chunk, failure)

    def _end(self, stream: Stream, chunk: Chunk, failure: UserError | None = None) -> None:
        """Removes a request and gives it its last chunk, or the last text and its error."""
        assert chunk.answer is not None
        with self._changed:
            if stream in self._active:
                self._active[self._active.index(stream)] = None
            elif stream in self._waiting:
                self._waiting.remove(stream)
            else:
                self._reading = None
        self.stats.finished[chunk.answer.stop_reason] += 1
        if failure is None:
            stream.put(chunk)
            return
        stream.put(replace(chunk, answer=None))
        stream.put(failure)

    # ----------------------------------------------------------------------------------------------
    # Compilation

    def _begin_warm_up(self) -> None:
        if isinstance(self._steps, Leader):
            self.warmth = WarmUp(self._steps)
            self._compile()
            self._active = [None] * self._slots.size
        else:
            self.warmth = WarmUp(self._slots.shapes())
        self.stats.watch_compilations(self._thread)

    def _compile(self) -> None:
        """Compiles what is left to compile."""
        assert self.warmth is not None
        for _ in self.warmth:
            with self._changed:
                self._changed.notify_all()
                if self._steps is self._slots:
                    self._changed.wait_for(lambda: not self._is_enough(), _REST_SECONDS)
                waiting = (one for one in self._waiting if not self._is_served(one))
                self.warmth.wants_guided = any(one.prompt.guide for one in waiting)
            if self._steps is not self._slots:  # this is the scheduler's thread
                self._drop_cancelled()
            if self.is_closed:
                return

    def _is_enough(self) -> bool:
        """True if texts are decoded, and what is compiled decodes all that were asked for."""
        is_served = all(map(self._is_served, self._waiting))
        is_busy = any(self._streams()) or bool(self._waiting)
        num_texts = self.num_running + self.num_waiting
        return is_busy and is_served and num_texts <= self._most_texts()
