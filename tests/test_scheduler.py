"""The scheduler: every text equals `generate`'s, regardless of the other requests."""

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest
from models import certain_pair, make_engine, tiny_llama
from serving import decode_each, until

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine import models, slots, steps
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer
from poss_jax.engine.batch import RoundKind
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, PromptTooLong
from poss_jax.engine.rounds import read_rounds
from poss_jax.engine.scheduler import Closed, QueueFull, Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.engine.streams import Ticket, merge
from poss_jax.shapes import Params

LEAST_ROWS = 512  # `alone` compiles one program for all lengths of prompts
TREES = {1: TreeConfig(depth=2, top_k=2, total_tokens=6), 3: None}
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


def make_slots(engine: Engine, *sizes: int) -> Slots:
    """Slots of the same shapes, so that all tests share their programs; they keep five blocks."""
    block_bytes = 4 * 2 * 64 * LLAMA.num_kv_heads * LLAMA.head_dim * 3  # the target's, two streams
    settings = {"max_length": 300, "max_logprobs": 3, "max_prefix_bytes": 5 * block_bytes}
    return Slots(engine, sizes=sizes, **settings)


@pytest.fixture(scope="module")
def warm(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler that compiles nothing after its warm-up, whatever is asked of it."""
    scheduler = Scheduler(make_slots(engine, 3, 4))
    scheduler.warm_up()
    yield scheduler
    assert scheduler.error is None and scheduler.stats.compilations == 0
    scheduler.close()


@pytest.fixture
def cold(engine: Engine) -> Iterator[Scheduler]:
    """A scheduler of three slots that compiles as it goes."""
    scheduler = Scheduler(make_slots(engine, 3), max_queue=4)
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
    return decode_each(engine, [prompt])[0]


# --------------------------------------------------------------------------------------------------
# Steps


def test_a_step_ends_with_a_text_and_the_next_one_waits_for_the_host(engine: Engine):
    slots, kind = make_slots(engine, 4), RoundKind(tree=None)
    for slot, limit in enumerate((3, 60)):
        slots.begin(PreparedPrompt([1, 2, 3], limit))
        slots.extend(0, 1)
        slots.insert(slot)

    def run(texts: Sequence[int]) -> tuple[int, int]:
        short, long, *_ = read_rounds(slots.run(kind, texts, num_rounds=20))
        return len(short), len(long)

    assert run((0, 1)) == (2, 2)
    assert run((0, 1)) == (0, 1)  # asked for before the host could know
    assert run((1,)) == (0, 20)


# --------------------------------------------------------------------------------------------------
# Compilation


def test_choices_of_a_prompt_read_it_once(engine, warm, monkeypatch):
    extend = MagicMock(side_effect=steps.extend)
    monkeypatch.setattr(steps, "extend", extend)
    prompt = engine.prepare([1 + i % 60 for i in range(30)], 9)
    choices = [prompt._replace(sampling=SamplingConfig(temperature=1, seed=i)) for i in range(5)]
    check_texts(engine, warm, choices)
    assert extend.call_count == 1 + len(choices)  # `alone` reads each
    extend.reset_mock()
    mixed = [prompt, prompt._replace(max_new_tokens=8), engine.prepare([7], 9), prompt]
    check_texts(engine, warm, mixed)
    assert extend.call_count == 3 + len(mixed)


def check_texts(engine: Engine, scheduler: Scheduler, prompts: Sequence[PreparedPrompt]) -> None:
    """Compares texts with those that the engine writes alone."""
    streams = scheduler.submit_all(prompts)
    for prompt, stream in zip(prompts, streams, strict=True):
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids


def test_what_is_compiled_after_the_warm_up_is_counted(warm: Scheduler, caplog) -> None:
    def compile_another() -> None:
        jax.jit(lambda x: x + 1).lower(1.0).compile()

    warm._call(compile_another, alone=True)
    assert warm.stats.compilations == 1 and "after the warm-up" in caplog.text
    warm.stats.compilations = 0


# --------------------------------------------------------------------------------------------------
# Texts


def test_every_text_is_that_of_generate(engine: Engine, warm: Scheduler):
    prompts = draw_prompts(engine, 24)
    streams = [[*warm.submit(prompt)] for prompt in prompts[:4]]  # drafted, as none is beside them
    assert sum(warm.stats.accepted.values()) > 0
    for prompt, stream in zip(prompts, [*streams, *map(warm.submit, prompts[4:])], strict=True):
        chunks = list(stream)
        answer, expected = chunks[-1].answer, alone(engine, prompt)
        assert answer is not None
        assert answer.output_ids == expected.output_ids
        assert answer.stop_reason == expected.stop_reason
        assert [token for chunk in chunks for token in chunk.output_ids] == expected.output_ids
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


def test_shared_beginnings_of_prompts_change_no_text(engine: Engine, warm: Scheduler):
    """Blocks of some are dropped while others are read; some requests are cancelled."""
    rng = np.random.default_rng(1)
    text = rng.integers(0, 61, 230).tolist()
    begins = [text[:150], text[:80], text[100:230], text[7:8]]
    prompts = [
        PreparedPrompt(begin + rng.integers(0, 61, 20).tolist(), 20, replace(settings, seed=seed))
        for seed, (settings, begin) in enumerate(product(SETTINGS[2:5], begins))
    ]
    drawn = [SamplingConfig(temperature=1, seed=i) for i in range(3)]
    prompts += [prompts[0]._replace(sampling=sampling) for sampling in drawn]
    prompts = [prompts[i] for i in rng.permutation(len(prompts))]
    num_cached = warm.stats.cached_tokens
    streams = [warm.submit(prompt) for prompt in prompts]
    for stream in streams[::5]:
        stream.cancel()
    for index, (prompt, stream) in enumerate(zip(prompts, streams, strict=True)):
        answer = [*stream][-1].answer
        assert index % 5 == 0 or answer.output_ids == alone(engine, prompt).output_ids
    assert warm.stats.cached_tokens > num_cached
    assert 0 < len(warm._slots.prefixes) <= warm._slots.prefixes.most == 5


def test_the_draft_rests_if_nobody_wants_it(engine: Engine):
    slots, prompt = make_slots(engine, 3, 4), PreparedPrompt([1], 5, drafts=False)
    others = [prompt._replace(drafts=True), prompt._replace(guide=MagicMock())]
    kinds = [slots.choose_kind([item], has_logprobs=False) for item in (prompt, *others)]
    assert [kind.is_draftless for kind in kinds] == [True, False, False]
    slots.resize(4, ())
    assert not slots.choose_kind([prompt, prompt], has_logprobs=False).is_draftless


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_text_is_continued_anywhere(engine: Engine, warm: Scheduler, settings: SamplingConfig):
    whole = engine.prepare([7, 8, 9], 40, settings)
    text = alone(engine, whole).output_ids
    for count in (1, 17, 39):
        rest = PreparedPrompt([7, 8, 9, *text[:count]], 40 - count, settings, num_continued=count)
        assert [*warm.submit(rest)][-1].answer.output_ids == text[count:]
        assert alone(engine, rest).output_ids == text[count:]


@pytest.mark.parametrize("interval", [0.0, 60.0])
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

        threading.Thread(target=warm._call, args=[hold_up]).start()
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


@pytest.mark.parametrize("num_parts", [0, 3])
@pytest.mark.parametrize("behind", [[], [PART, END], [Closed("later")]])
@pytest.mark.parametrize("interval", [0.0, 0.02])
@pytest.mark.parametrize("is_late", [False, True])
def test_text_comes_before_the_error_that_ended_it(engine, num_parts, behind, interval, is_late):
    """However readers are timed: nothing behind an error is read, and the error always is."""
    prompt = engine.prepare([1, 2], 40)

    def open_stream() -> Ticket:
        return Ticket(prompt, LiveAnswer(prompt, engine.tokenizer))

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


# --------------------------------------------------------------------------------------------------
# Comings and goings


def test_a_cancelled_text_frees_its_slot(engine: Engine, cold: Scheduler):
    prompts = [engine.prepare([5, i], 250) for i in range(4)]
    first, *others = (cold.submit(prompt) for prompt in prompts)
    next(iter(first))
    first.cancel()
    *_, last = first
    tokens = last.answer.output_ids
    assert last.answer.stop_reason == "cancelled"
    assert tokens == alone(engine, prompts[0]).output_ids[: len(tokens)]
    for stream, prompt in zip(others, prompts[1:], strict=True):
        assert [*stream][-1].answer.output_ids == alone(engine, prompt).output_ids
    assert cold.stats.finished == {"cancelled": 1, "length": 3}


def test_a_request_ends_at_its_deadline(engine: Engine, cold: Scheduler):
    *_, last = cold.submit(engine.prepare([1], 250), timeout=0.0)
    assert last.answer.stop_reason == "cancelled" and last.answer.output_ids == []


def test_a_full_queue_takes_all_of_a_request_or_nothing(engine: Engine, cold: Scheduler):
    many = [engine.prepare([i], 8) for i in range(1, 6)]
    streams = cold.submit_all(many)  # more than may wait, but nobody waits
    with pytest.raises(QueueFull):
        cold.submit_all(many)
    with pytest.raises(QueueFull, match="requests are waiting"):
        for _ in range(20):
            streams.append(cold.submit(many[0]._replace(max_new_tokens=250)))
    answers = [[*stream][-1].answer for stream in streams]
    assert cold.stats.finished == {"length": len(streams)}
    for prompt, answer in zip(many, answers, strict=False):
        assert answer.output_ids == alone(engine, prompt).output_ids


def test_what_a_slot_cannot_hold_is_refused_at_once(engine: Engine, cold: Scheduler):
    with pytest.raises(PromptTooLong, match="prompt of 100 tokens and 201 new ones do not fit"):
        cold.submit(engine.prepare([1] * 100, 201))
    prompt = engine.prepare([1, 2, 3], 4)
    biased = SamplingConfig(logit_bias=dict.fromkeys(range(301), 1.0))
    with pytest.raises(UserError, match=r"^logit_bias: want at most 300 tokens, got 301$"):
        cold.submit(prompt._replace(sampling=biased))
    with pytest.raises(UserError, match=r"^stop_ids: want at most 16 tokens, got 17$"):
        cold.submit(prompt._replace(stop_ids=range(17)))
    assert len(list(cold.submit(prompt._replace(stop_ids=range(16))))) >= 1


def test_memory_is_counted_while_a_batch_grows(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(UserError, match="lower batch_size or max_length, or raise cache_gib"):
        Slots(engine, sizes=(4,), max_cache_bytes=1000)
    monkeypatch.setattr(slots, "cache_bytes", lambda *_: 1)
    Slots(engine, sizes=(4,), max_length=300, max_cache_bytes=4 + 1)
    Slots(engine, sizes=(2, 4), max_length=300, max_cache_bytes=2 + 4 + 1)
    with pytest.raises(UserError, match="batches of 2, 4 answers of 300 tokens need"):
        Slots(engine, sizes=(2, 4), max_length=300, max_cache_bytes=2 + 4)


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


class Panic(BaseException):
    pass


@pytest.mark.parametrize(
    ("owner", "method", "error"),
    [(Slots, "run", MemoryError), (Slots, "begin", Panic), (LiveAnswer, "cancel", ValueError)],
)
def test_a_failure_ends_the_thread_and_is_told(engine, monkeypatch, owner, method, error):
    monkeypatch.setattr(owner, method, MagicMock(side_effect=error))
    scheduler = Scheduler(make_slots(engine, 3))
    prompt, timeout = engine.prepare([1, 2], 30), 0 if method == "cancel" else 60
    with pytest.raises(Closed):
        list(scheduler.submit(prompt, timeout=timeout))
    assert isinstance(scheduler.error, error)
    with pytest.raises(Closed):
        scheduler.submit(prompt)
    assert not scheduler.drain()
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
            while not warm._calls_alone:
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


def test_other_weights_after_what_runs_has_ended(engine: Engine, warm: Scheduler):
    expected, other = engine.with_tree(TREES), draw_engine(seed=4)
    prompt = engine.prepare([1, 2, 3], 40)
    before = warm.submit(prompt)
    first = next(iter(before)).output_ids
    warm.update_weights(draw_pair(seed=4)[0])
    warm.stats.compilations = 0  # fusing layers took some
    try:
        after = warm.submit(prompt)
        rest = [token for chunk in before for token in chunk.output_ids]
        assert first + rest == alone(expected, prompt).output_ids
        assert [*after][-1].answer.output_ids == alone(other, prompt).output_ids
        assert warm.stats.compilations == 0
        with pytest.raises(UserError):
            warm.update_weights({})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(models, "fuse_target", MagicMock(side_effect=MemoryError("full")))
            with pytest.raises(UserError, match="update_weights: full; the old weights stay"):
                warm.update_weights(draw_pair(seed=5)[0])
        assert [*warm.submit(prompt)][-1].answer.output_ids == alone(other, prompt).output_ids
    finally:
        warm.update_weights(draw_pair(seed=0)[0])
        warm.stats.compilations = 0
    assert [*warm.submit(prompt)][-1].answer.output_ids == alone(expected, prompt).output_ids
