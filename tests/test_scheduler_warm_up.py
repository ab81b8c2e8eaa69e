"""The warm-up: texts are decoded while programs are compiled, and do not depend on which are."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from serving import until
from test_scheduler import SETTINGS, alone, draw_engine, make_slots

from poss_jax.config.decoding import SamplingConfig
from poss_jax.engine.answers import Generation
from poss_jax.engine.batch import RoundKind, score_prompt
from poss_jax.engine.engine import Engine
from poss_jax.engine.scheduler import Closed, Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.engine.streams import Ticket
from poss_jax.engine.warm_up import WarmUp, _Task

SAMPLED = SamplingConfig(temperature=1.0, seed=7)
LEAST_ROWS = 512


@pytest.fixture(scope="module")
def engine() -> Engine:
    return draw_engine()


class Gate:
    """Lets a warm-up run task by task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._allowed = threading.Semaphore(0)
        ahead = WarmUp.__iter__

        def one_by_one(warm: WarmUp) -> Iterator[None]:
            tasks = ahead(warm)
            while self._allowed.acquire() and next(tasks, self) is not self:
                yield

        monkeypatch.setattr(WarmUp, "__iter__", one_by_one)

    def open(self, num_tasks: int = 1000) -> None:
        self._allowed.release(num_tasks)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@contextmanager
def compiling(slots: Slots, gate: Gate) -> Iterator[Scheduler]:
    """A scheduler whose warm-up waits for the gate."""
    scheduler = Scheduler(slots)
    thread = threading.Thread(target=scheduler.warm_up)
    thread.start()
    try:
        yield scheduler
    finally:
        scheduler.close()  # what is not compiled by now is left
        gate.open()
        thread.join()


@pytest.fixture
def warming(engine: Engine, gate: Gate) -> Iterator[Scheduler]:
    with compiling(make_slots(engine, 3, 4), gate) as scheduler:
        yield scheduler


def answer_of(stream: Ticket) -> Generation:
    answer = [*stream][-1].answer
    assert answer is not None
    return answer


def until_sizes(scheduler: Scheduler, gate: Gate, sizes: tuple[int, ...]) -> None:
    """Compiles until the batch may have these sizes."""
    until(lambda: scheduler.compilation is not None)
    warm = scheduler.compilation
    assert warm is not None
    while warm.sizes != sizes:
        num_done = len(warm._done)
        gate.open(1)
        until(lambda before=num_done: len(warm._done) > before or scheduler.error)
        assert scheduler.error is None


def test_texts_are_the_same_while_it_compiles(engine, warming, gate) -> None:
    prompts = [engine.prepare([5, i], 6, one) for i, one in enumerate(SETTINGS)]
    scored = {"num_logprobs": 3, "max_length": 300}
    for sizes in ((3,), (3, 4)):
        until_sizes(warming, gate, sizes)
        streams = [warming.submit(prompt) for prompt in prompts]
        for stream, prompt in zip(streams, prompts, strict=True):
            assert answer_of(stream).output_ids == alone(engine, prompt).output_ids
        assert warming.score([5, 6, 7]) == score_prompt(engine, [5, 6, 7], **scored)
    assert warming.stats.compilations == 0


def test_a_request_waits_for_what_it_needs(engine: Engine, warming: Scheduler, gate: Gate) -> None:
    """Rounds with log-probabilities come from those with drafts: no others are compiled."""
    prompt = engine.prepare([1, 2], 5, SAMPLED, drafts=False)
    given_up = warming.submit(prompt)
    given_up.cancel()
    assert answer_of(given_up).stop_reason == "cancelled"
    until_sizes(warming, gate, (3,))
    wants_logprobs = warming.submit(prompt, has_logprobs=True)
    time.sleep(0.2)
    assert warming.num_waiting == 1 and warming.num_running == 0
    gate.open()
    chunks = [*wants_logprobs]
    assert chunks[-1].answer is not None
    assert chunks[-1].answer.output_ids == alone(engine, prompt).output_ids
    assert sum(len(chunk.logprobs) for chunk in chunks) == 5


def test_a_text_that_runs_changes_its_program(engine, warming, gate, monkeypatch) -> None:
    """A greedy text begins with sampled rounds, the only ones there are."""
    monkeypatch.setattr("poss_jax.engine.scheduler._PAUSE_SECONDS", 0)
    until_sizes(warming, gate, (3,))
    used: list[RoundKind] = []
    choose = WarmUp.nearest

    def record(warm: WarmUp, program: RoundKind, size: int) -> RoundKind:
        used.append(choose(warm, program, size))
        return used[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WarmUp, "nearest", record)
        prompt = engine.prepare([3], 200)
        stream = warming.submit(prompt)
        next(iter(stream))
        gate.open()
        assert answer_of(stream).output_ids == alone(engine, prompt).output_ids
    assert used[0].is_sampled


def test_compiling_rests_if_what_is_compiled_serves_all_texts(engine, warming, gate) -> None:
    until_sizes(warming, gate, (3,))
    prompt = engine.prepare([3], 5)
    with warming._changed:  # nothing begins or ends meanwhile
        rests = [warming._is_enough()]
        for has_logprobs in (False, True):
            warming.submit(prompt, has_logprobs=has_logprobs)
            rests.append(warming._is_enough())
    assert rests == [False, True, False]


def test_it_fails_with_the_compiler(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = Scheduler(make_slots(engine, 2))
    waiting: list[Ticket] = []

    def fail(self: Slots, *_: Any) -> None:
        waiting.append(scheduler.submit(engine.prepare([1], 9)))
        raise MemoryError("no room for a program")

    monkeypatch.setattr(Slots, "insert", fail)
    with pytest.raises(Closed):
        scheduler.warm_up()
    with pytest.raises(Closed):
        list(waiting[0])
    assert isinstance(scheduler.error, MemoryError)
    scheduler.close()


def test_it_says_how_far_it_is(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One task took a second; two more, `insert` and five rounds weigh 2 + 1 + 5 x 6."""
    warm = WarmUp(make_slots(engine, 2).shapes())
    clock = SimpleNamespace(monotonic=iter((100.0, 101.0, 101.2, 999.0)).__next__)
    monkeypatch.setattr("poss_jax.engine.warm_up.time", clock)
    monkeypatch.setattr("poss_jax.engine.warm_up._read", lambda *_: None)
    next(iter(warm))
    assert str(warm) == "compiling 2 of 9, about 33 s left"
    assert str(warm) == "compiling 2 of 9, about 32 s left"  # one takes longer than it should


def test_nothing_is_compiled_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    tasks = [_Task(partial(ran.append, index)) for index in range(3)]
    monkeypatch.setattr("poss_jax.engine.warm_up._list_tasks", lambda slots: tasks)
    warm = WarmUp(make_slots(engine, 2))
    next(iter(warm))
    assert (ran, warm.is_done) == ([0], False)
    assert (len([*warm]), len([*warm]), ran, warm.is_done) == (2, 0, [0, 1, 2], True)
