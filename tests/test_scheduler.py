"""The scheduler: every text equals `generate`'s, regardless of the other requests."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from models import certain_pair, make_engine, tiny_llama
from serving import until

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine import models, slots, steps
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer, Round
from poss_jax.engine.batch import RoundKind
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, PromptTooLong
from poss_jax.engine.rounds import read_rounds
from poss_jax.engine.scheduler import Closed, QueueFull, Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.engine.streams import Ticket, merge
from poss_jax.shapes import Params

LEAST_ROWS = 512  # `alone` compiles one program for all lengths of prompts
TREES = {1: TreeConfig(depth=2, top_k=2, total_tokens=6), 4: None}
SETTINGS = [
    SamplingConfig(),
    SamplingConfig(temperature=1.0, seed=1),
    SamplingConfig(temperature=0.8, top_p=0.9, top_k=20, seed=2),
    SamplingConfig(frequency_penalty=1.5, presence_penalty=-0.5),
    SamplingConfig(temperature=1.0, frequency_penalty=0.7, min_p=0.01, seed=3),
    SamplingConfig(repetition_penalty=1.3, logit_bias={5: 1.0, 60: -3.0}),
]


LLAMA = tiny_llama(num_layers=1, max_position_embeddings=400)
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))


def draw_pair(seed: int) -> tuple[Params, Params]:
    return certain_pair(LLAMA, DRAFT, sharpness=1.5, disorder=0.3, seed=seed)


def draw_engine(seed: int = 0) -> Engine:
    target, draft = draw_pair(seed)
    return make_engine(LLAMA, target, DRAFT, draft, tree=TREES)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return draw_engine()


@pytest.fixture(scope="module")
def warm(engine: Engine) -> Iterator[Scheduler]:
    scheduler = Scheduler(Slots(engine, sizes=(1, 2, 4), max_length=300))
    scheduler.warm_up()
    yield scheduler
    assert scheduler.error is None
    scheduler.close()


@pytest.fixture
def cold(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler of two slots that compiles as it goes."""
    scheduler = Scheduler(Slots(engine, sizes=(2,), max_length=300), max_queue=3)
    yield scheduler
    scheduler.close()


def draw_prompts(engine: Engine, count: int, seed: int = 0) -> list[PreparedPrompt]:
    rng = np.random.default_rng(seed)
    sizes = [*rng.integers(1, 40, count - 1), 150]  # the last takes three chunks
    return [
        engine.prepare(
            rng.integers(0, 61, size).tolist(),
            int(rng.integers(1, 60)),
            replace(SETTINGS[i % len(SETTINGS)], seed=i),
        )
        for i, size in enumerate(sizes)
    ]


def alone(engine: Engine, prompt: PreparedPrompt) -> Generation:
    return engine.decode([prompt])[0]


# --------------------------------------------------------------------------------------------------
# Steps


def test_a_step_ends_with_a_text_and_the_next_one_waits_for_the_host(engine: Engine):
    slots = Slots(engine, sizes=(2,), max_length=100)
    program = RoundKind(tree=None)
    for slot, limit in enumerate((3, 60)):
        slots.begin(PreparedPrompt([1, 2, 3], limit, stop_ids=()))
        slots.extend(0, 1)
        slots.insert(slot)

    def run(texts: Sequence[int]) -> tuple[int, int]:
        short, long = read_rounds(slots.run(program, texts, num_rounds=20))
        return len(short), len(long)

    assert run((0, 1)) == (2, 2)
    assert run((0, 1)) == (0, 1)  # asked for before the host could know
    assert run((1,)) == (0, 20)


# --------------------------------------------------------------------------------------------------
# Compilation


def test_choices_of_a_prompt_read_it_once(engine, warm, monkeypatch):
    extend = MagicMock(side_effect=steps.extend)
    monkeypatch.setattr(steps, "extend", extend)
    one = engine.prepare([1 + i % 60 for i in range(30)], 9)
    choices = [one._replace(sampling=SamplingConfig(temperature=1, seed=i)) for i in range(5)]
    compiled = warm.stats.compilations
    check_texts(engine, warm, choices)
    assert extend.call_count == 1 + len(choices)  # `alone` reads each
    extend.reset_mock()
    mixed = [one, one._replace(max_new_tokens=8), engine.prepare([7], 9), one]
    check_texts(engine, warm, mixed)
    assert extend.call_count == 3 + len(mixed)
    assert warm.stats.compilations == compiled


def check_texts(engine: Engine, scheduler: Scheduler, prompts: Sequence[PreparedPrompt]) -> None:
    """Compares texts with those that the engine writes alone."""
    streams = scheduler.submit_all(prompts)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids


def test_many_kinds_of_requests_compile_nothing(engine: Engine, warm: Scheduler, caplog):
    for burst in range(14):  # twice each number of prompts
        prompts = draw_prompts(engine, 1 + burst % 7, seed=burst)
        streams = [warm.submit(prompt) for prompt in prompts]
        for stream in streams:
            list(stream)
    assert warm.stats.compilations == 0

    def compile_another() -> None:
        jax.jit(lambda x: x + 1).lower(1.0).compile()

    warm._calls.run(compile_another, alone=True)
    assert warm.stats.compilations == 1 and "after the warm-up" in caplog.text
    warm.stats.compilations = 0


# --------------------------------------------------------------------------------------------------
# Texts


def test_every_text_is_that_of_generate(engine: Engine, warm: Scheduler):
    prompts = draw_prompts(engine, 24)
    streams = [warm.submit(prompt) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        chunks = list(stream)
        answer, expected = chunks[-1].answer, alone(engine, prompt)
        assert answer is not None
        assert answer.output_ids == expected.output_ids
        assert answer.stop_reason == expected.stop_reason
        assert [token for chunk in chunks for token in chunk.output_ids] == expected.output_ids
    assert sum(warm.stats.accepted.values()) > 0
    until(lambda: warm.num_running == 0)


def test_texts_are_the_same_without_drafts(engine: Engine, warm: Scheduler):
    prompts = [one._replace(drafts=i % 3 > 0) for i, one in enumerate(draw_prompts(engine, 12))]
    first = warm.submit(prompts[0])
    next(iter(first))  # the draft rests until others come
    for prompt, stream in zip(prompts, [first, *warm.submit_all(prompts[1:])], strict=True):
        answer, expected = [*stream][-1].answer, alone(engine, prompt._replace(drafts=True))
        assert answer.output_ids == expected.output_ids
        assert prompt.drafts or not any(answer.accepted_per_round)
    (answer,) = engine.decode(prompts[:1])
    assert not any(answer.accepted_per_round)
    assert warm.stats.compilations == 0


def test_the_draft_rests_if_nobody_wants_it(engine: Engine):
    slots = Slots(engine, sizes=(1, 2), max_length=100)
    one = PreparedPrompt([1], 5, drafts=False)
    others = [one._replace(drafts=True), one._replace(guide=MagicMock())]
    chosen = [slots.choose_kind([it], has_logprobs=False) for it in (one, *others)]
    assert [program.is_draftless for program in chosen] == [True, False, False]
    slots.resize(2, ())
    assert not slots.choose_kind([one, one], has_logprobs=False).is_draftless


def test_stop_ids_are_those_of_the_request(engine: Engine, warm: Scheduler):
    prompt = engine.prepare([3, 4, 5], 30)
    text = alone(engine, prompt).output_ids
    stop = text[9]
    prompts = [prompt._replace(stop_ids=ids) for ids in ([stop], [], [60, stop])]
    streams = [warm.submit(one) for one in prompts]
    first, whole, also = ([*stream][-1].answer for stream in streams)
    cut = text[: text.index(stop) + 1]
    assert first.output_ids == also.output_ids == cut and first.stop_reason == "stop"
    assert whole.output_ids == text and whole.stop_reason == "length"


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_text_is_continued_anywhere(engine: Engine, warm: Scheduler, settings: SamplingConfig):
    whole = engine.prepare([7, 8, 9], 40, settings)
    text = alone(engine, whole).output_ids
    for count in (1, 17, 39):
        rest = PreparedPrompt([7, 8, 9, *text[:count]], 40 - count, settings, num_continued=count)
        assert [*warm.submit(rest)][-1].answer.output_ids == text[count:]
        assert alone(engine, rest).output_ids == text[count:]


def test_penalties_count_the_continued_tokens(engine: Engine):
    settings = SamplingConfig(frequency_penalty=2.0)
    text = alone(engine, engine.prepare([7, 8, 9], 30, settings)).output_ids
    forgetful = PreparedPrompt([7, 8, 9, *text[:15]], 15, settings)
    assert alone(engine, forgetful).output_ids != text[15:]


@pytest.mark.parametrize("interval", [0.0, 0.002, 60.0])
def test_chunks_are_gathered(engine: Engine, warm: Scheduler, interval: float):
    prompts = draw_prompts(engine, 3, seed=4)
    answers = [alone(engine, prompt) for prompt in prompts]

    async def read() -> list[list[Chunk]]:
        chunks: list[list[Chunk]] = [[] for _ in prompts]
        async for item in merge([*map(warm.submit, prompts)], interval=interval):
            assert item is not None
            chunks[item[0]].append(item[1])
        return chunks

    began = time.monotonic()
    chunks = asyncio.run(read())
    for few, answer in zip(chunks, answers, strict=True):
        assert [token for chunk in few for token in chunk.output_ids] == answer.output_ids
        assert few[-1].answer is not None and few[-1].answer.output_ids == answer.output_ids
        # Beginnings and ends of the others wake their reader, too.
        assert len(few) <= 2 * len(prompts) or interval < 60
    assert time.monotonic() - began < 60  # neither the first tokens nor the ends have waited


def test_readers_hear_when_nothing_comes(engine: Engine, warm: Scheduler):
    prompt = engine.prepare([1, 2], 40)

    async def read() -> tuple[int, list[int]]:
        held, goes_on, num_quiet, tokens = threading.Event(), threading.Event(), 0, []

        def hold_up() -> None:
            held.set()
            goes_on.wait()

        threading.Thread(target=warm._calls.run, args=[hold_up]).start()
        held.wait()  # now nothing is decoded
        async for item in merge([warm.submit(prompt)], patience=0.05):
            if item is None:
                num_quiet += 1
                goes_on.set()
            else:
                tokens += item[1].output_ids
        return num_quiet, tokens

    num_quiet, tokens = asyncio.run(read())
    assert num_quiet > 0 and tokens == alone(engine, prompt).output_ids


PART = Chunk([], [3], [0])
END = Chunk([], [], [], answer=Generation([1, 2], [3], None, [], [], "cancelled"))


async def read_all(*streams: Ticket, tokens: list[int], interval: float = 0.0) -> None:
    async for item in merge(streams, interval=interval):
        assert item is not None
        tokens.extend(item[1].output_ids)


@pytest.mark.parametrize("num_parts", [0, 1, 3])
@pytest.mark.parametrize("behind", [[], [END], [PART, END], [Closed("later")]])
@pytest.mark.parametrize("interval", [0.0, 0.02])
@pytest.mark.parametrize("is_late", [False, True])
def test_text_comes_before_the_error_that_ended_it(engine, num_parts, behind, interval, is_late):
    """However readers are timed: nothing behind an error is read, and the error always is."""
    prompt = engine.prepare([1, 2], 40)

    def open_stream() -> Ticket:
        return Ticket(prompt, engine.live_answer(prompt))

    items = [*[PART] * num_parts, UserError("too complex"), *behind]
    stream, other, tokens = open_stream(), open_stream(), list[int]()

    def fill() -> None:
        for item in items:
            stream.put(item)
            time.sleep(0.001 * is_late)

    async def read() -> None:
        filling = asyncio.get_running_loop().run_in_executor(None, fill)
        if not is_late:
            await filling
        await read_all(other, stream, tokens=tokens, interval=interval)

    with pytest.raises(UserError):
        asyncio.run(read())
    assert tokens == [3] * num_parts
    stream, tokens = open_stream(), []
    fill()
    with pytest.raises(UserError):
        for chunk in stream:
            tokens += chunk.output_ids
    assert tokens == [3] * num_parts


def test_an_answer_whose_grammar_fails_ends_with_its_error(engine, cold, monkeypatch):
    add, num_rounds = LiveAnswer.add, 0

    def failing(answer: LiveAnswer, new: Round) -> Chunk:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds == 4:
            raise UserError("structured_outputs: too complex")
        return add(answer, new)

    prompt, tokens = engine.prepare([1, 2], 200), list[int]()
    whole = alone(engine, prompt).output_ids
    monkeypatch.setattr(LiveAnswer, "add", failing)
    with pytest.raises(UserError, match="too complex"):
        asyncio.run(read_all(cold.submit(prompt), tokens=tokens))
    assert len(tokens) >= 3 and tokens == whole[: len(tokens)]
    assert cold.stats.finished == {"cancelled": 1} and cold.num_running == 0


# --------------------------------------------------------------------------------------------------
# Comings and goings


def test_a_cancelled_text_frees_its_slot(engine: Engine, cold: Scheduler):
    prompts = [engine.prepare([5, i], 250) for i in range(3)]
    first, second, third = (cold.submit(prompt) for prompt in prompts)
    next(iter(first))
    first.cancel()
    *_, last = first
    tokens = last.answer.output_ids
    assert last.answer.stop_reason == "cancelled"
    assert tokens == alone(engine, prompts[0]).output_ids[: len(tokens)]
    for stream, prompt in ((second, prompts[1]), (third, prompts[2])):
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids
    assert cold.stats.finished == {"cancelled": 1, "length": 2}


def test_a_request_ends_at_its_deadline(engine: Engine, cold: Scheduler):
    *_, last = cold.submit(engine.prepare([1], 250), timeout=0.0)
    assert last.answer.stop_reason == "cancelled" and last.answer.output_ids == []


def test_a_full_queue_refuses(engine: Engine, cold: Scheduler):
    prompt = engine.prepare([1, 2], 250)
    streams = []
    with pytest.raises(QueueFull, match="3 requests are waiting"):
        for _ in range(20):
            streams.append(cold.submit(prompt))
    for stream in streams:
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids


def test_what_cannot_fit_is_refused_at_once(engine: Engine, cold: Scheduler):
    with pytest.raises(PromptTooLong, match="prompt of 100 tokens and 201 new ones do not fit"):
        cold.submit(engine.prepare([1] * 100, 201))
    with pytest.raises(UserError, match="lower batch_size or max_length, or raise cache_gib"):
        Slots(engine, sizes=(4,), max_cache_bytes=1000)


def test_memory_is_counted_while_a_batch_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(slots, "cache_bytes", lambda *_: 1)
    Slots(engine, sizes=(4,), max_length=64, max_cache_bytes=4 + 1)
    Slots(engine, sizes=(1, 4), max_length=64, max_cache_bytes=1 + 4 + 1)
    with pytest.raises(UserError, match="batches of 1, 4 answers of 64 tokens need"):
        Slots(engine, sizes=(1, 4), max_length=64, max_cache_bytes=1 + 4)


def test_draining_finishes_what_was_taken(engine: Engine, cold: Scheduler):
    prompts = draw_prompts(engine, 3, seed=5)
    streams = [cold.submit(prompt) for prompt in prompts]
    assert cold.drain(60)
    with pytest.raises(Closed):
        cold.submit(prompts[0])
    for prompt, stream in zip(prompts, streams, strict=True):
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids


def test_closing_cancels(engine: Engine, cold: Scheduler):
    streams = [cold.submit(engine.prepare([i], 250)) for i in range(3)]
    next(iter(streams[0]))
    cold.close()
    assert {[*stream][-1].answer.stop_reason for stream in streams} == {"cancelled"}


def test_an_error_reaches_those_who_wait(engine: Engine, cold: Scheduler, monkeypatch):
    def fail(*args: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(cold._slots, "run", fail)
    with pytest.raises(Closed):
        list(cold.submit(engine.prepare([1, 2], 30)))
    assert isinstance(cold.error, MemoryError)
    with pytest.raises(Closed):
        cold.submit(engine.prepare([1, 2], 30))
    assert not cold.drain()


def test_more_biases_and_stop_ids_than_slots_have_room_for_are_refused(engine, warm):
    biases = dict.fromkeys(range(301), 1.0)
    prompt = engine.prepare([1, 2, 3], 4)
    with pytest.raises(UserError, match=r"^logit_bias: want at most 300 tokens, got 301$"):
        warm.submit(prompt._replace(sampling=SamplingConfig(logit_bias=biases)))
    with pytest.raises(UserError, match=r"^stop_ids: want at most 16 tokens, got 17$"):
        warm.submit(prompt._replace(stop_ids=range(17)))
    assert len(list(warm.submit(prompt._replace(stop_ids=range(16))))) >= 1
    assert warm.error is None


def test_a_text_whose_cancelling_fails_is_told_too(engine, cold, monkeypatch):
    def fail(self: LiveAnswer) -> None:
        raise ValueError("a tokenizer's own")

    monkeypatch.setattr(LiveAnswer, "cancel", fail)
    stream = cold.submit(engine.prepare([1, 2, 3], 200), timeout=0)
    with pytest.raises(Closed):
        list(stream)


def test_a_panic_ends_the_thread_and_is_told(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    class Panic(BaseException):
        pass

    def begin(self: Slots, prompt: PreparedPrompt) -> None:
        raise Panic

    monkeypatch.setattr(Slots, "begin", begin)
    scheduler = Scheduler(Slots(engine, sizes=(1,)))
    stream = scheduler.submit(engine.prepare([1, 2, 3], 4))
    with pytest.raises(Closed):
        list(stream)
    assert isinstance(scheduler.error, Panic)
    scheduler.close()


def test_other_weights_while_a_prompt_is_half_read(engine, warm, monkeypatch):
    extend, updates = Slots.extend, []

    def ask(slots: Slots, first: int, last: int) -> None:
        extend(slots, first, last)
        if first == 1:  # the second of four parts
            updates.append(
                threading.Thread(target=warm.update_weights, args=[draw_pair(seed=0)[0]])
            )
            updates[0].start()
            while not warm._calls:
                time.sleep(0.001)

    monkeypatch.setattr(Slots, "extend", ask)
    prompts = engine.prepare([1, 2, 3], 250), engine.prepare([5] * 250, 20)
    streams = [warm.submit(prompt, timeout=60) for prompt in prompts]
    for prompt, stream in zip(prompts, streams, strict=True):
        expected = alone(engine.with_tree(TREES), prompt)
        assert [*stream][-1].answer.output_ids == expected.output_ids
    (update,) = updates
    update.join(60)
    assert not update.is_alive()


def test_requests_that_are_submitted_together_are_taken_or_refused_together(engine, cold):
    many = [engine.prepare([i], 8) for i in range(1, 6)]
    streams = cold.submit_all(many)  # more than may wait, but nobody waits
    with pytest.raises(QueueFull):
        cold.submit_all(many)
    assert all([*stream][-1].answer.stop_reason == "length" for stream in streams)
    assert cold.stats.finished == {"length": len(many)}


def test_other_weights_after_what_runs_has_ended(engine: Engine, warm: Scheduler):
    expected, other = engine.with_tree(TREES), draw_engine(seed=4)
    prompt = engine.prepare([1, 2, 3], 40)
    before = warm.submit(prompt)
    first = next(iter(before)).output_ids
    warm.update_weights(draw_pair(seed=4)[0])
    compiled = warm.stats.compilations  # fusing layers took some
    try:
        after = warm.submit(prompt)
        rest = [token for chunk in before for token in chunk.output_ids]
        assert first + rest == alone(expected, prompt).output_ids
        assert [*after][-1].answer.output_ids == alone(other, prompt).output_ids
        assert warm.stats.compilations == compiled
        with pytest.raises(UserError):
            warm.update_weights({})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "fuse_target", MagicMock(side_effect=MemoryError("full")))
            with pytest.raises(UserError, match="update_weights: full; the old weights stay"):
                warm.update_weights(draw_pair(seed=5)[0])
        assert [*warm.submit(prompt)][-1].answer.output_ids == alone(other, prompt).output_ids
    finally:
        warm.update_weights(draw_pair(seed=0)[0])
    assert [*warm.submit(prompt)][-1].answer.output_ids == alone(expected, prompt).output_ids
