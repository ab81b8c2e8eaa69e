"""The scheduler: requests come and go at any time, and one thread decodes them together.

    scheduler = Scheduler(Slots(engine, sizes=(1, 4, 16)))
    scheduler.warm_up()
    ticket = scheduler.submit(engine.prepare("def fibonacci(", 64))
    for chunk in ticket:              # or: async for chunk in ticket
        print(chunk.text, end="")
    scheduler.close()

Threads and queues:

    any thread ── submit ──► Loop.waiting ──► scheduler's thread ── put ──► Ticket ──► a reader
               └─ score, update_weights ──► _calls ─┘   └─ starts and reads the device's steps
    the warm-up's thread ── compiles what the scheduler's thread will run

The scheduler's thread alone touches slots and answers. It sleeps on one condition, whose lock
guards the queue and what moves out of it; whoever adds a request or a call notifies it. A ticket
is the queue of one answer: the thread puts chunks into it, and one thread or event loop reads
them, so a slow reader delays nobody. Compilation takes place in the thread that called `warm_up`,
which runs no step, and pauses while the requests at hand need no more than is compiled. On several
hosts the thread's steps go through a `Leader`, and the warm-up runs on it too.

Answers equal `Engine.generate` with the same settings and seed, regardless of the other requests
(with sampled drafts: in distribution).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import jax

from poss_jax.config.reading import UserError
from poss_jax.engine.answers import LiveAnswer, TokenLogprobs
from poss_jax.engine.leader import Leader
from poss_jax.engine.loop import Loop
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.rounds import read_scores
from poss_jax.engine.slots import Slots
from poss_jax.engine.streams import Ticket
from poss_jax.engine.warm_up import WarmUp
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)
_POLL_SECONDS = 0.1
_PAUSE_SECONDS = 30.0  # most that compilation pauses after a program, so that decoding has the CPU

ResultT = TypeVar("ResultT")
_Calls = deque[tuple[Callable[[], Any], Future[Any]]]


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
      is_closed: True once `close` was called; unfinished requests end as cancelled.
      error: what ended the thread; None while it runs.
    """

    def __init__(self, slots: Slots, *, max_queue: int = 256) -> None:
        """Starts the thread.

        Args:
          slots: where requests are decoded; for the scheduler alone.
          max_queue: most waiting requests; a group submitted to an empty queue may exceed it.
        """
        self.max_length, self.num_slots = slots.max_length, slots.sizes[-1]
        self._slots, self._max_queue = slots, max_queue
        self._steps: Any = self._slots if jax.process_count() == 1 else Leader(self._slots)
        self._changed = threading.Condition()
        self._loop = Loop(self._steps, lock=self._changed)
        self.stats = self._loop.stats
        self._calls: _Calls = deque()  # functions that run between rounds
        self._calls_alone: _Calls = deque()  # those that run while nothing is decoded
        self._scoring = threading.Lock()
        self._is_draining = self.is_closed = False
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
        tickets, deadline = [], time.monotonic() + timeout
        for prompt in prompts:
            self._slots.check(prompt)
            answer = LiveAnswer(prompt, self._slots.engine.tokenizer, stop)
            tickets.append(Ticket(prompt, answer, has_logprobs=has_logprobs, deadline=deadline))
        with self._changed:
            if self._is_draining or self.error is not None:
                raise Closed("takes no more requests")
            waiting = self._loop.waiting
            if waiting and len(waiting) + len(tickets) > self._max_queue:
                raise QueueFull(f"{len(waiting)} requests are waiting")
            waiting += tickets
            self._changed.notify_all()
        return tickets

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._loop.waiting)

    @property
    def num_running(self) -> int:
        """Requests in prefill or decoding."""
        return self._loop.num_running

    @property
    def compilation(self) -> WarmUp | None:
        """What is compiled; None: nothing was compiled beforehand."""
        return self._loop.compilation

    def warm_up(self) -> None:
        """Compiles all programs in the order of use; afterwards requests compile nothing.

        Requests are answered meanwhile, with what is compiled. On several hosts they wait, since
        all processes must run the same steps in the same order.
        """

        def begin() -> None:
            is_leader = isinstance(self._steps, Leader)
            self._loop.compilation = WarmUp(self._steps if is_leader else self._slots.shapes())
            if is_leader:
                self._compile()
            self.stats.watch_compilations(self._thread)

        self._call(begin, alone=True)
        try:
            self._compile()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            raise Closed("compiling failed") from error

    def update_weights(self, params: Params) -> None:
        """Replaces the target's parameters, as `Engine.update_weights`, after all running requests.

        Requests in the queue get the new ones.

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
            self._call(partial(self._slots.update_weights, params), alone=True)

    def score(self, ids: Sequence[int]) -> list[TokenLogprobs]:
        """Scores a prompt of at most `max_length` tokens between rounds (see `score_prompt`)."""
        with self._scoring:
            if self._steps is self._slots:
                self._slots.compile_scoring()  # here, so that decoding need not wait
            self._call(partial(self._steps.begin_scores, ids))
            return read_scores(partial(self._call, self._steps.score_next), len(ids))

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more requests and waits for the rest; False if time ran out or it failed."""
        with self._changed:
            self._is_draining = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._loop.is_idle or self.error, timeout)
            return self._loop.is_idle and self.error is None

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        with self._changed:
            self._is_draining = self.is_closed = True
            for ticket in [*self._loop.waiting, *self._loop.tickets()]:
                ticket.cancel()
            self._changed.notify_all()
        self._thread.join()
        self.stats.stop_watching()

    def _call(self, function: Callable[[], ResultT], *, alone: bool = False) -> ResultT:
        """Waits until a function has run on the scheduler's thread."""
        done: Future[ResultT] = Future()
        with self._changed:
            (self._calls_alone if alone else self._calls).append((function, done))
            self._changed.notify()
        while True:
            with suppress(TimeoutError):
                return done.result(_POLL_SECONDS)
            if self.error is not None or not self._thread.is_alive():
                raise Closed("the scheduler's thread has ended") from self.error

    # ----------------------------------------------------------------------------------------------
    # On the scheduler's thread

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                if self._failure is not None:
                    raise self._failure
                self._loop.drop_cancelled()
                if self._calls:
                    _run_first(self._calls)
                if self._calls_alone and not any(self._loop.tickets()):
                    self._loop.finish_steps()
                    _run_first(self._calls_alone)
                else:  # requests that wait run after the call
                    self._loop.turn(admits=not self._calls_alone)
        except BaseException as error:  # such as a tokenizer's panic
            _LOG.exception("decoding failed")
            with self._changed:
                self.error = error
                for ticket in [*self._loop.waiting, *self._loop.tickets()]:
                    ticket.put(Closed("decoding failed"))
                self._changed.notify_all()
        finally:
            if isinstance(self._steps, Leader):
                self._steps.dismiss()

    def _wait_for_work(self) -> bool:
        """Waits until there is something to do; False once closed."""
        loop = self._loop

        def has_calls() -> bool:
            return bool(self._calls or self._calls_alone)

        with self._changed:
            if loop.is_idle:
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self.is_closed or has_calls() or self._failure or not loop.is_idle
            )
            if loop.waiting and not (has_calls() or loop.is_busy or loop.following()):
                self._changed.wait(_POLL_SECONDS)  # for the warm-up
            return not (self.is_closed and loop.is_idle)

    # ----------------------------------------------------------------------------------------------
    # Compilation

    def _compile(self) -> None:
        """Compiles what is left to compile."""
        loop = self._loop
        assert loop.compilation is not None
        for _ in loop.compilation:
            with self._changed:
                self._changed.notify_all()
                if self._steps is self._slots:
                    self._changed.wait_for(lambda: not self._is_enough(), _PAUSE_SECONDS)
                waiting = (ticket for ticket in loop.waiting if not loop.is_served(ticket))
                loop.compilation.wants_guided = any(ticket.prompt.guide for ticket in waiting)
            if self._steps is not self._slots:  # this is the scheduler's thread
                loop.drop_cancelled()
            if self.is_closed:
                return

    def _is_enough(self) -> bool:
        """True if requests are decoded, and what is compiled serves all that wait."""
        loop = self._loop
        is_served = all(map(loop.is_served, loop.waiting))
        num_requests = loop.num_running + len(loop.waiting)
        return num_requests > 0 and is_served and num_requests <= loop.max_active


def _run_first(calls: _Calls) -> None:
    """Runs the function that waits longest; a `UserError` is its caller's."""
    function, done = calls.popleft()
    try:
        done.set_result(function())
    except UserError as error:
        done.set_exception(error)
