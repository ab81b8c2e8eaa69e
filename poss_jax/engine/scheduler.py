"""The scheduler: requests come and go at any time, and one thread decodes them together.

    scheduler = Scheduler(Slots(engine, sizes=(1, 4, 16)))
    scheduler.warm_up()
    ticket = scheduler.submit(engine.prepare("def fibonacci(", 64))
    for chunk in ticket:              # or: async for chunk in ticket
        print(chunk.text, end="")
    scheduler.close()

Answers equal `Engine.generate` with the same settings and seed, regardless of the other requests
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
from poss_jax.engine.rounds import Pace, PackedRounds, count_rounds, read_rounds
from poss_jax.engine.scoring import read_all_scores
from poss_jax.engine.slots import Slots, run_guided_round
from poss_jax.engine.streams import Calls, Stats, Ticket, run_first
from poss_jax.engine.warm_up import WarmUp
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)
_SHRINK_AFTER = 16  # steps for which a batch stays larger than its requests need
_POLL_SECONDS = 0.1
_PAUSE_SECONDS = 30.0  # most that compilation pauses after a program, so that decoding has the CPU


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
      num_slots: most requests decoded at once.
      compilation: what is compiled; None: nothing was compiled beforehand.
      is_closed: True once `close` was called; unfinished requests end as cancelled.
      error: what ended the thread; None while it runs.
    """

    def __init__(self, slots: Slots, *, max_queue: int = 256) -> None:
        """Starts the thread.

        Args:
          slots: where requests are decoded; for the scheduler alone.
          max_queue: most waiting requests; a group submitted to an empty queue may exceed it.
        """
        self.stats = Stats()
        self.max_length, self.num_slots = slots.max_length, slots.sizes[-1]
        self._slots, self._max_queue = slots, max_queue
        self._steps: Any = self._slots if jax.process_count() == 1 else Leader(self._slots)
        self._waiting: deque[Ticket] = deque()
        self._active: list[Ticket | None] = [None] * self._slots.size
        self._prefilling: tuple[Ticket, int] | None = None  # and the number of prefilled chunks
        self._under_way: list[tuple[PackedRounds, dict[int, Ticket], float]] = []  # and its start
        self._num_large = 0  # steps for which the batch was larger than needed
        self._pace = Pace()
        self._changed = threading.Condition()
        self._calls = Calls(self._changed, self._check_thread)
        self._scoring = threading.Lock()
        self._is_draining = self.is_closed = False
        self.compilation: WarmUp | None = None
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
    ) -> Ticket:
        """Puts a request into the queue; see `submit_all`."""
        (ticket,) = self.submit_all([prompt], stop=stop, has_logprobs=has_logprobs, timeout=timeout)
        return ticket

    def submit_all(
        self,
        prompts: Sequence[PreparedPrompt],
        *,
        stop: Sequence[str] = (),
        has_logprobs: bool = False,
        timeout: float = float("inf"),
    ) -> list[Ticket]:
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
        tickets = []
        for prompt in prompts:
            self._slots.check(prompt)
            answer = engine.live_answer(prompt, stop)
            tickets.append(Ticket(prompt, answer, has_logprobs=has_logprobs, deadline=deadline))
        with self._changed:
            if self._is_draining or self.error is not None:
                raise Closed("takes no more requests")
            if self._waiting and len(self._waiting) + len(tickets) > self._max_queue:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            self._waiting += tickets
            self._changed.notify_all()
        return tickets

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests in prefill or decoding."""
        return self._num_active() + (self._prefilling is not None)

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
                self._slots.compile_scoring()  # here, so that decoding need not wait
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
            for ticket in [*self._waiting, *self._tickets()]:
                ticket.cancel()
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
                for ticket in [*self._waiting, *self._tickets()]:
                    ticket.put(Closed("decoding failed"))
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
            is_busy = self._calls or self._under_way or any(self._tickets())
            if self._waiting and not (is_busy or self._following()):
                self._changed.wait(_POLL_SECONDS)  # for the warm-up
            return not (self.is_closed and self._is_idle())

    def _is_idle(self) -> bool:
        return not (self._waiting or self._under_way or any(self._tickets()))

    def _tickets(self) -> Iterator[Ticket]:
        """All requests in prefill or decoding."""
        yield from (ticket for ticket in self._active if ticket is not None)
        if self._prefilling is not None:
            yield self._prefilling[0]

    def _num_active(self) -> int:
        return sum(ticket is not None for ticket in self._active)

    def _turn(self) -> None:
        """Prefills parts of prompts, starts a round, and delivers the round before."""
        if self._failure is not None:
            raise self._failure
        self._drop_cancelled()
        if self._calls.between:
            run_first(self._calls.between)
        if self._calls.alone and not any(self._tickets()):
            while self._under_way:
                self._finish_step()
            run_first(self._calls.alone)
            return
        for _ in range(self._num_parts()):
            if self._calls.alone and self._prefilling is None:
                break  # waiting requests run after the call
            self._admit()
        self._start_round()
        # The device runs one round while the host handles the one before.
        while len(self._under_way) > (1 if any(self._active) else 0):
            self._finish_step()

    def _drop_cancelled(self) -> None:
        """Ends requests that were cancelled or are overdue."""
        with self._changed:
            tickets = [*self._waiting, *self._tickets()]
        for ticket in tickets:
            if ticket.is_overdue():
                last = ticket.answer.cancel()  # if this fails, the ticket still gets the error
                self._end(ticket, last)

    def _num_parts(self) -> int:
        """Parts of prompts to prefill before the next round.

        Prefill delays the requests being decoded; a round delays those that could start.
        """
        num_active = self._num_active()
        num_wanted = len(self._waiting) + (self._prefilling is not None)
        num_free = self._max_active() - num_active
        return max(min(num_wanted, num_free) // max(num_active, 1), 1)

    def _admit(self) -> None:
        """Prefills the next part of a prompt: all of it if nothing is being decoded."""
        following = self._following() if self._prefilling is None else None
        if following is not None and self._ensure_free_slot(following):
            with self._changed:  # `drain` and `close` find the ticket in one list
                ticket = following
                self._waiting.remove(ticket)
                self._prefilling = ticket, 0
            first = self._steps.begin(ticket.prompt._replace(guide=None))  # only its masks are sent
            ticket.answer.cached_tokens = min(first * self._slots.chunk, len(ticket.prompt.ids))
            self._prefilling = ticket, first
        if self._prefilling is None:
            return
        ticket, first = self._prefilling
        num_chunks = self._slots.num_chunks(ticket.prompt)
        last = min(first + 1, num_chunks) if any(self._active) else num_chunks
        if first < last:
            self._steps.extend(first, last)
        self._prefilling = ticket, last
        if last == num_chunks:
            self.stats.prompt_tokens += len(ticket.prompt.ids)
            self.stats.cached_tokens += ticket.answer.cached_tokens
            slot = self._active.index(None)
            with self._changed:
                self._prefilling, self._active[slot] = None, ticket
            masks = ticket.prompt.guide and self._slots.masks({0: ticket.prompt.guide}, 1)
            self._expect(self._steps.insert(slot, masks), {0: ticket})

    def _following(self) -> Ticket | None:
        """The first waiting request that can begin, since what it needs is compiled."""
        with self._changed:
            return next(filter(self._is_served, self._waiting), None)

    def _is_served(self, ticket: Ticket) -> bool:
        if self.compilation is None:
            return True
        is_guided = ticket.prompt.guide is not None
        return self.compilation.serves(
            self._slots.size, has_logprobs=ticket.has_logprobs, is_guided=is_guided
        )

    def _max_active(self) -> int:
        """Most requests that can be decoded at once with what is compiled."""
        return max(self._sizes(), default=0)

    def _sizes(self, *more: Ticket) -> Sequence[int]:
        """Sizes that decode what is decoded now, and more."""
        if self.compilation is None:
            return self._slots.sizes
        is_guided = any(ticket.prompt.guide for ticket in (*self._tickets(), *more))
        return self.compilation.guided_sizes if is_guided else self.compilation.sizes

    def _ensure_free_slot(self, following: Ticket) -> bool:
        """Grows the batch if it is full and can grow; True if there is a free slot."""
        num_active = self._num_active()
        if num_active < self._slots.size:
            return True
        larger = [size for size in self._sizes(following) if size > self._slots.size]
        num_wanted = num_active + len(self._waiting)
        for size in larger:  # one after the other: these are compiled
            if self._slots.size < num_wanted:
                self._resize(size)
        return bool(larger)

    def _resize(self, size: int) -> None:
        order = [slot for slot, ticket in enumerate(self._active) if ticket is not None]
        self._steps.resize(size, order)
        kept = [self._active[slot] for slot in order]
        self._active = [*kept, *[None] * (size - len(kept))]
        self._num_large = 0

    def _shrink(self) -> None:
        """Shrinks the batch once it has been too large for some rounds."""
        smaller = [s for s in self._slots.sizes if self.num_running <= s < self._slots.size]
        self._num_large = self._num_large + 1 if smaller and not self._waiting else 0
        if self._num_large > _SHRINK_AFTER:
            self._resize(smaller[-1])

    def _start_round(self) -> None:
        if any(ticket is not None and ticket.answer.guide for ticket in self._active):
            while self._under_way:  # which tokens may follow depends on all of them
                self._finish_step()
        if not any(self._active):
            return
        self._shrink()
        active = {slot: ticket for slot, ticket in enumerate(self._active) if ticket is not None}
        kind = self._slots.choose_kind(
            [ticket.prompt for ticket in active.values()],
            has_logprobs=any(ticket.has_logprobs for ticket in active.values()),
        )
        if self.compilation is not None:
            kind = self.compilation.nearest(kind, self._slots.size)
        is_awaited = self._prefilling or (self._waiting and len(active) < self._max_active())
        num_rounds = 1 if is_awaited else self._pace.num_rounds
        if len(active) < self._slots.size:  # keep steps short for the next request
            num_rounds = max(num_rounds // 4, 1)
        guides = {
            slot: ticket.answer.guide for slot, ticket in active.items() if ticket.answer.guide
        }
        if guides:
            rounds = run_guided_round(self._steps, kind, tuple(active), guides)
        else:
            rounds = self._steps.run(kind, tuple(active), num_rounds)
        self._expect(rounds, active)

    def _expect(self, rounds: PackedRounds, active: dict[int, Ticket]) -> None:
        self._under_way.append((rounds, active, time.monotonic()))

    def _finish_step(self) -> None:
        """Delivers the rounds of the step that began first."""
        rounds, active, begun = self._under_way.pop(0)
        slots = read_rounds(rounds)
        num_rounds = count_rounds(slots)
        self.stats.rounds += num_rounds
        self._pace.record(num_rounds, begun)
        for slot, ticket in active.items():
            if slots[slot] and not ticket.answer.is_ended:
                self._deliver(ticket, slots[slot])

    def _deliver(self, ticket: Ticket, rounds: Sequence[Round]) -> None:
        """Adds rounds to an answer."""
        chunk, failure = Chunk([], [], []), None
        for new in rounds:
            if chunk.answer is None:
                try:
                    chunk += ticket.answer.add(new)
                except UserError as error:  # of a grammar
                    failure = error
                    chunk += ticket.answer.cancel()
                self.stats.drafts += bool(new.num_offered)
                self.stats.drafted += new.num_offered or 0
        if not ticket.has_logprobs:
            chunk = replace(chunk, logprobs=())
        self.stats.tokens += len(chunk.output_ids)
        self.stats.accepted.update(abs(depth) for depth in chunk.depths if depth)
        self.stats.copied += sum(depth < 0 for depth in chunk.depths)
        if chunk.answer is None:
            ticket.put(chunk)
            return
        self._end(ticket, chunk, failure)

    def _end(self, ticket: Ticket, chunk: Chunk, failure: UserError | None = None) -> None:
        """Removes a request and gives it its last chunk, or the last text and its error."""
        assert chunk.answer is not None
        with self._changed:
            if ticket in self._active:
                self._active[self._active.index(ticket)] = None
            elif ticket in self._waiting:
                self._waiting.remove(ticket)
            else:
                self._prefilling = None
        self.stats.finished[chunk.answer.stop_reason] += 1
        if failure is None:
            ticket.put(chunk)
            return
        ticket.put(replace(chunk, answer=None))
        ticket.put(failure)

    # ----------------------------------------------------------------------------------------------
    # Compilation

    def _begin_warm_up(self) -> None:
        if isinstance(self._steps, Leader):
            self.compilation = WarmUp(self._steps)
            self._compile()
            self._active = [None] * self._slots.size
        else:
            self.compilation = WarmUp(self._slots.shapes())
        self.stats.watch_compilations(self._thread)

    def _compile(self) -> None:
        """Compiles what is left to compile."""
        assert self.compilation is not None
        for _ in self.compilation:
            with self._changed:
                self._changed.notify_all()
                if self._steps is self._slots:
                    self._changed.wait_for(lambda: not self._is_enough(), _PAUSE_SECONDS)
                waiting = (ticket for ticket in self._waiting if not self._is_served(ticket))
                self.compilation.wants_guided = any(ticket.prompt.guide for ticket in waiting)
            if self._steps is not self._slots:  # this is the scheduler's thread
                self._drop_cancelled()
            if self.is_closed:
                return

    def _is_enough(self) -> bool:
        """True if requests are decoded, and what is compiled serves all that wait."""
        is_served = all(map(self._is_served, self._waiting))
        is_busy = any(self._tickets()) or bool(self._waiting)
        num_active = self.num_running + self.num_waiting
        return is_busy and is_served and num_active <= self._max_active()
