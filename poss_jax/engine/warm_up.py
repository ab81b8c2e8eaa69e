"""The warm-up: compiles the steps of slots in the order of use; requests need not wait for all.

    prefill, insert ─┐
    first rounds ────┴─► other rounds of the first size ─► all of the second size ─► ...
                     └─ from here on slots are decoded      the last size ─► rare rounds

Steps of `Slots.shapes` run nothing, so they compile in another thread while slots are decoded. No
answer depends on the size of its batch or on the kind of its rounds, so none depends on what is
compiled.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

import jax

from poss_jax.engine.batch import RoundKind, run_guided_round
from poss_jax.engine.leader import Leader
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.rounds import PackedRounds
from poss_jax.engine.slots import Slots

_ROUND_WEIGHT = 6  # rounds take about six times as long to compile as other steps


class _Task(NamedTuple):
    run: Callable[[], Any]
    kind: RoundKind | None = None  # rounds that it compiles
    size: int | None = None  # batch size that can be used from then on
    guided_size: int | None = None  # batch size of rounds with grammars


class WarmUp:
    """A list of what is compiled and what is to come; iterating over it compiles, task by task."""

    def __init__(self, slots: Slots | Leader) -> None:
        """Compiles nothing yet; steps run, too, unless `slots` are the `Slots.shapes` of others."""
        # Batch sizes that are compiled, ascending; slots can be decoded once there is one.
        self.sizes: tuple[int, ...] = ()
        self.guided_sizes: tuple[int, ...] = ()  # those whose rounds with grammars are compiled
        self.wants_guided = False  # a request waits for such rounds, so they are compiled next
        self._slots, self._first = slots, slots.sizes[0]
        self._rounds: list[RoundKind] = []  # of the first size
        self._left, self._done = list(_list_tasks(slots)), list[_Task]()
        self._begun, self._finished = 0.0, 0.0

    def __len__(self) -> int:
        return len(self._done) + len(self._left)

    def __iter__(self) -> Iterator[None]:
        self._begun = time.monotonic()
        can_choose = isinstance(self._slots, Slots)  # on several hosts all have the same order
        ahead = Thread(target=self._compile_rounds)
        if not self._done and can_choose:
            ahead.start()
        while self._left:
            task = self._left[0]
            if can_choose and self.wants_guided:
                task = next((t for t in self._left if t.guided_size in self.sizes), task)
            if task.kind is not None and ahead.is_alive():
                ahead.join()
            jax.block_until_ready(task.run())
            self._left.remove(task)
            self._done.append(task)
            self._finished = time.monotonic()
            if task.kind is not None and task.size == self._first:
                self._rounds.append(task.kind)
            if task.size is not None and task.size not in self.sizes:
                self.sizes = (*self.sizes, task.size)
            sizes_left = {t.guided_size for t in self._left}
            if task.guided_size is not None and task.guided_size not in sizes_left:
                self.guided_sizes = (*self.guided_sizes, task.guided_size)
            yield

    def _compile_rounds(self) -> None:
        """Compiles the first rounds, which take as long as all that comes before them."""
        with suppress(Exception):  # their own task fails again
            self._slots.shapes().run(self._slots.round_kinds(self._first)[0], ())

    @property
    def is_done(self) -> bool:
        return not self._left

    def __str__(self) -> str:
        done, total, remaining = len(self._done), len(self), ""
        if self.is_done:
            return f"compiled {total} of {total}"
        if done:  # the rest should take as long
            per_weight = (self._finished - self._begun) / _weigh(self._done)
            seconds = per_weight * _weigh(self._left) - (time.monotonic() - self._finished)
            remaining = f", about {max(seconds, per_weight * _weigh(self._left[1:])):.0f} s left"
        return f"compiling {done + 1} of {total}{remaining}"

    def serves(self, size: int, *, has_logprobs: bool, is_guided: bool) -> bool:
        """Tells whether a request can be decoded in a batch, with all that it wants."""
        if is_guided:
            return size in self.guided_sizes
        return any(kind.has_logprobs or not has_logprobs for kind in self._rounds)

    def nearest(self, kind: RoundKind, size: int) -> RoundKind:
        """Rounds that give the same tokens and are compiled, at best those asked for."""
        if size != self._first or kind.is_guided or kind in self._rounds:
            return kind
        return next(
            candidate
            for candidate in self._rounds
            if candidate.is_sampled >= kind.is_sampled
            and candidate.has_logprobs >= kind.has_logprobs
        )


def _weigh(tasks: list[_Task]) -> int:
    return sum(_ROUND_WEIGHT if task.kind else 1 for task in tasks)


def _list_tasks(slots: Slots | Leader) -> Iterator[_Task]:
    """All steps in the order of use; the last one returns to the first size."""
    first = slots.sizes[0]

    def insert() -> PackedRounds:
        _read(slots, slots.samples()[0])
        return slots.insert(0)

    yield from (_Task(partial(_read, slots, prompt)) for prompt in slots.samples())
    for size in slots.sizes:
        if (size, slots.size) != (first, first):
            yield _Task(partial(_resize, slots, size))
        yield _Task(insert)
        for kind in slots.round_kinds(size):
            yield _Task(partial(slots.run, kind, ()), kind, first if size == first else None)
        if size != first:
            yield _Task(partial(_resize, slots, first), size=size)
    # Apart, since these may be run out of order, while the batch has another size.
    apart = copy(slots) if isinstance(slots, Slots) else slots
    for size in slots.sizes:
        for kind in slots.rare_kinds(size):
            run = partial(_run_at, apart, size, kind)
            of_size = {"guided_size" if kind.is_guided else "size": size}
            yield _Task(run, kind, **of_size)


def _read(slots: Slots | Leader, prompt: PreparedPrompt) -> None:
    slots.extend(slots.begin(prompt), slots.num_chunks(prompt))


def _run_at(slots: Slots | Leader, size: int, kind: RoundKind) -> PackedRounds:
    """Runs an empty round in a size, and returns to the first one."""
    _resize(slots, size)
    is_guided = kind.is_guided
    rounds = run_guided_round(slots, kind, (), {}) if is_guided else slots.run(kind, ())
    _resize(slots, slots.sizes[0])
    return rounds


def _resize(slots: Slots | Leader, size: int) -> None:
    """Brings an empty batch to a size, by way of all sizes in between."""
    while (at := slots.sizes.index(slots.size)) != (goal := slots.sizes.index(size)):
        slots.resize(slots.sizes[at + (1 if goal > at else -1)], ())
