"""The decoding loop: requests wait, are prefilled, decoded round by round, and delivered.

    waiting ─► admit (prefill, into a slot) ─► start a step of rounds ─► finish it ─► deliver
                                                    │                        │
                                         the device runs this step while the host reads the last

No threads: whoever calls `Loop.turn` decodes. `Engine` does over a `FixedBatch`, the server over
`Slots`, on the thread of `scheduler.py`.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import jax

from poss_jax.config.reading import UserError
from poss_jax.engine.answers import Chunk, LiveAnswer, Round
from poss_jax.engine.batch import FixedBatch, run_guided_round
from poss_jax.engine.rounds import Pace, PackedRounds, read_rounds
from poss_jax.engine.streams import Stats, Ticket

_SHRINK_AFTER = 16  # steps for which a batch stays larger than its requests need


class Loop:
    """Decodes requests together in slots (see `Scheduler`)."""

    def __init__(
        self,
        slots: Any,
        *,
        lock: AbstractContextManager[Any] | None = None,
        num_rounds: int | None = None,
    ) -> None:
        """Decodes nothing yet.

        Args:
          slots: `Slots`, a `Leader` of them, or a `FixedBatch`; for this loop alone.
          lock: held while a request goes from one list to another; None: one thread has them all.
          num_rounds: rounds of a step; None: as many as take a step's time (see `Pace`), and fewer
            if a request may come.
        """
        self.slots = slots
        self.waiting: deque[Ticket] = deque()
        self.compilation: Any = None  # a `WarmUp`; None: nothing was compiled beforehand
        self.stats = Stats()
        self._lock = lock or nullcontext()
        self._active: dict[int, Ticket] = {}  # by slot
        self._prefilling: tuple[Ticket, int] | None = None  # and the number of prefilled chunks
        self._under_way: list[tuple[PackedRounds, dict[int, Ticket], float]] = []  # and its start
        self._num_large = 0  # steps for which the batch was larger than needed
        self._pace, self._num_rounds = Pace(), num_rounds

    # ----------------------------------------------------------------------------------------------
    # What there is to do

    @property
    def is_idle(self) -> bool:
        """True if nothing waits and nothing is decoded."""
        return not (self.waiting or self.is_busy)

    @property
    def is_busy(self) -> bool:
        """True if there are requests in prefill or decoding, or steps to finish."""
        return bool(self._under_way) or any(self.tickets())

    @property
    def num_running(self) -> int:
        """Requests in prefill or decoding."""
        return len(self._active) + (self._prefilling is not None)

    @property
    def max_active(self) -> int:
        """Most requests that can be decoded at once with what is compiled."""
        return max(self._sizes(), default=0)

    def tickets(self) -> Iterator[Ticket]:
        """All requests in prefill or decoding."""
        yield from self._active.values()
        if self._prefilling is not None:
            yield self._prefilling[0]

    def following(self) -> Ticket | None:
        """The first waiting request that can begin, since what it needs is compiled."""
        with self._lock:
            return next(filter(self.is_served, self.waiting), None)

    def is_served(self, ticket: Ticket) -> bool:
        """True if what a request needs is compiled."""
        if self.compilation is None:
            return True
        is_guided = ticket.prompt.guide is not None
        return self.compilation.serves(
            self.slots.size, has_logprobs=ticket.has_logprobs, is_guided=is_guided
        )

    def _sizes(self, *more: Ticket) -> Sequence[int]:
        """Sizes that decode what is decoded now, and more."""
        if self.compilation is None:
            return self.slots.sizes
        is_guided = any(ticket.prompt.guide for ticket in (*self.tickets(), *more))
        return self.compilation.guided_sizes if is_guided else self.compilation.sizes

    # ----------------------------------------------------------------------------------------------
    # A turn

    def turn(self, *, admits: bool = True) -> None:
        """Prefills parts of prompts, starts a step of rounds, and delivers the step before.

        Unless it `admits` waiting requests, only a prefill under way continues.
        """
        # Prefill delays the requests being decoded; a round delays those that could start.
        num_active = len(self._active)
        num_wanted = len(self.waiting) + (self._prefilling is not None)
        num_parts = min(num_wanted, self.max_active - num_active) // max(num_active, 1)
        for _ in range(max(num_parts, 1)):
            if not admits and self._prefilling is None:
                break
            self._admit()
        self._start_step()
        self.finish_steps(but_last=True)

    def start(self, stop: Sequence[str]) -> list[Ticket]:
        """Prefills all prompts of a `FixedBatch` together; returns their tickets."""
        prompts, tokenizer = self.slots.prompts, self.slots.models.tokenizer
        tickets = [Ticket(prompt, LiveAnswer(prompt, tokenizer, stop)) for prompt in prompts]
        guides = {row: prompt.guide for row, prompt in enumerate(prompts) if prompt.guide}
        masks = self.slots.masks(guides, self.slots.size) if guides else None
        self.stats.prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
        self._active = dict(enumerate(tickets))
        self._under_way.append((self.slots.start(masks), dict(self._active), time.monotonic()))
        return tickets

    def finish_steps(self, *, but_last: bool = False) -> None:
        """Delivers what has been started; `but_last`: not the last step, if requests continue."""
        while len(self._under_way) > (1 if but_last and self._active else 0):
            rounds, active, begun = self._under_way.pop(0)
            slots = read_rounds(rounds)
            num_rounds = max(sum(new.num_accepted is not None for new in row) for row in slots)
            self.stats.rounds += num_rounds
            self._pace.record(num_rounds, begun)
            for slot, ticket in active.items():
                if slots[slot] and not ticket.answer.is_ended:
                    self._deliver(ticket, slots[slot])

    def drop_cancelled(self) -> None:
        """Ends requests that were cancelled or are overdue."""
        with self._lock:
            tickets = [*self.waiting, *self.tickets()]
        for ticket in tickets:
            if ticket.is_overdue():
                last = ticket.answer.cancel()  # if this fails, the ticket still gets the error
                self._end(ticket, last)

    # ----------------------------------------------------------------------------------------------
    # Admission

    def _admit(self) -> None:
        """Prefills the next part of a prompt: all of it if nothing is being decoded."""
        following = self.following() if self._prefilling is None else None
        if following is not None and self._ensure_free_slot(following):
            with self._lock:  # other threads find the ticket in one list
                self.waiting.remove(following)
                self._prefilling = following, 0
            prompt = following.prompt._replace(guide=None)  # only its masks are sent
            first = self.slots.begin(prompt)
            following.answer.cached_tokens = min(first * self.slots.chunk, len(prompt.ids))
            self._prefilling = following, first
        if self._prefilling is None:
            return
        ticket, first = self._prefilling
        num_chunks = self.slots.num_chunks(ticket.prompt)
        last = min(first + 1, num_chunks) if self._active else num_chunks
        if first < last:
            self.slots.extend(first, last)
        self._prefilling = ticket, last
        if last == num_chunks:
            self.stats.prompt_tokens += len(ticket.prompt.ids)
            self.stats.cached_tokens += ticket.answer.cached_tokens
            slot = next(slot for slot in range(self.slots.size) if slot not in self._active)
            with self._lock:
                self._prefilling, self._active[slot] = None, ticket
            masks = ticket.prompt.guide and self.slots.masks({0: ticket.prompt.guide}, 1)
            self._under_way.append((self.slots.insert(slot, masks), {0: ticket}, time.monotonic()))

    def _ensure_free_slot(self, following: Ticket) -> bool:
        """Grows the batch if it is full and can grow; True if there is a free slot."""
        if len(self._active) < self.slots.size:
            return True
        larger = [size for size in self._sizes(following) if size > self.slots.size]
        num_wanted = len(self._active) + len(self.waiting)
        for size in larger:  # one after the other: these are compiled
            if self.slots.size < num_wanted:
                self._resize(size)
        return bool(larger)

    def _resize(self, size: int) -> None:
        order = sorted(self._active)
        self.slots.resize(size, order)
        self._active = {index: self._active[slot] for index, slot in enumerate(order)}
        self._num_large = 0

    # ----------------------------------------------------------------------------------------------
    # Rounds

    def _start_step(self) -> None:
        if any(ticket.answer.guide for ticket in self._active.values()):
            self.finish_steps()  # which tokens may follow depends on all of them
        if not self._active:
            return
        smaller = [s for s in self.slots.sizes if self.num_running <= s < self.slots.size]
        self._num_large = self._num_large + 1 if smaller and not self.waiting else 0
        if self._num_large > _SHRINK_AFTER:
            self._resize(smaller[-1])
        active = dict(self._active)
        kind = self.slots.choose_kind(
            [ticket.prompt for ticket in active.values()],
            has_logprobs=any(ticket.has_logprobs for ticket in active.values()),
        )
        if self.compilation is not None:
            kind = self.compilation.nearest(kind, self.slots.size)
        guides = {slot: ticket.answer.guide for slot, ticket in active.items()}
        guides = {slot: guide for slot, guide in guides.items() if guide is not None}
        if guides:
            rounds = run_guided_round(self.slots, kind, tuple(active), guides)
        else:
            num_rounds = self._num_rounds or self._choose_num_rounds(len(active))
            rounds = self.slots.run(kind, tuple(active), num_rounds)
        self._under_way.append((rounds, active, time.monotonic()))

    def _choose_num_rounds(self, num_active: int) -> int:
        """Rounds of the next step; few if a request waits for it, or may come."""
        if self._prefilling or (self.waiting and num_active < self.max_active):
            return 1
        is_full = num_active == self.slots.size
        return self._pace.num_rounds if is_full else max(self._pace.num_rounds // 4, 1)

    def _deliver(self, ticket: Ticket, rounds: Sequence[Round]) -> None:
        """Adds rounds to an answer."""
        chunks, failure = list[Chunk](), None
        for new in rounds:
            if ticket.answer.is_ended:
                break
            try:
                chunks.append(ticket.answer.add(new))
            except UserError as error:  # of a grammar
                failure = error
                chunks.append(ticket.answer.cancel())
            num_offered = (new.num_offered or 0) - new.num_certain
            self.stats.drafts += num_offered > 0
            self.stats.drafted += num_offered
        if not ticket.has_logprobs:
            chunks = [replace(chunk, logprobs=()) for chunk in chunks]
        for chunk in chunks:
            self.stats.tokens += len(chunk.output_ids)
            self.stats.accepted.update(abs(depth) for depth in chunk.depths if depth)
            self.stats.copied += sum(depth < 0 for depth in chunk.depths)
        if chunks[-1].answer is None:
            ticket.put(*chunks)
        else:
            self._end(ticket, *chunks, failure=failure)

    def _end(self, ticket: Ticket, *chunks: Chunk, failure: UserError | None = None) -> None:
        """Removes a request and gives it its last chunks, or the last text and its error."""
        *earlier, last = chunks
        assert last.answer is not None
        with self._lock:
            if ticket in self.waiting:
                self.waiting.remove(ticket)
            elif self._prefilling is not None and self._prefilling[0] is ticket:
                self._prefilling = None
            else:
                self._active = {s: t for s, t in self._active.items() if t is not ticket}
        self.stats.finished[last.answer.stop_reason] += 1
        if failure is None:
            ticket.put(*earlier, last)
        else:
            ticket.put(*earlier, replace(last, answer=None), failure)


def stream_batch(batch: FixedBatch, stop: Sequence[str] = ()) -> Iterator[Chunk]:
    """Answers the only prompt of a batch; yields what `Engine.stream` does."""
    # On several hosts every process must run the same number of rounds.
    loop = Loop(batch, num_rounds=None if jax.process_count() == 1 else 1)
    (ticket,) = loop.start(stop)
    loop.finish_steps()  # the first token does not wait for a round to be compiled
    while not loop.is_idle:
        yield from ticket.take_all()
        loop.turn()
    yield from ticket.take_all()
