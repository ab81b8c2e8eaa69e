"""The prefix cache: a prompt's caches and text are, bit for bit, what they are without it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import assert_same, certain_pair, make_engine, random_draft, random_target
from test_mesh import DEEP, E3, EIGHT, POSS, TREE, random_engine
from test_scheduler import DRAFT, LLAMA, SETTINGS

from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.engine import device
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.slots import Prefixes, Slots, name_blocks
from poss_jax.model.cache import KeysValues

MUCH = 2**26
LEAST_ROWS = 512
TEXT = np.random.default_rng(0).integers(0, 61, 400).tolist()


@pytest.fixture(scope="module", autouse=True)
def chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("poss_jax.engine.device.CPU_CHUNKS", (64, 16))
        yield


def read(slots: Slots, ids: Sequence[int], limit: int = 8) -> tuple[int, Any]:
    """Reads a prompt; returns how many chunks were cached, and its caches."""
    prompt = PreparedPrompt(list(ids), limit)
    first = slots.begin(prompt)
    slots.extend(first, slots.num_chunks(prompt))
    assert slots._prefilling is not None
    return first, slots._prefilling.prefill


def rounded(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def in_bfloat16(draft: DraftConfig) -> Engine:
    llama = replace(draft.layer, num_layers=2)
    target, own = rounded(random_target(llama)), rounded(random_draft(draft))
    return make_engine(llama, target, draft, own, tree=TREE)


ENGINES = [
    pytest.param(lambda: in_bfloat16(E3), id="bfloat16", marks=pytest.mark.optimised),
    pytest.param(lambda: random_engine(DEEP, None, kind="int8"), id="deep", marks=pytest.mark.slow),
    pytest.param(lambda: make_engine(LLAMA, random_target(LLAMA)), id="no draft"),
    pytest.param(lambda: random_engine(POSS, EIGHT), id="eight devices"),
    pytest.param(lambda: random_engine(E3, EIGHT), id="two heads", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("make", ENGINES)
def test_caches_are_those_of_a_prompt_read_whole(make: Callable[[], Engine]):
    engine = make()
    ours = Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=MUCH)
    plain = Slots(engine, sizes=(1,), max_length=300)
    assert read(ours, TEXT[:200])[0] == 0
    others = [60 - token for token in TEXT]
    for ids, num_cached in [
        (TEXT[:250], 3),
        (TEXT[:150] + others[:20], 2),  # rest of a chunk
        (TEXT[:100] + others[:90], 1),  # three whole chunks
        (TEXT[:100] + others[:95], 2),  # what the one before wrote
        (TEXT[:128] + others[:9], 1),  # the draft pairs token 127 with the next one
        (TEXT[:128], 1),  # the last token is read
        (others[:70], 0),
    ]:
        first, caches = read(ours, ids)
        assert first == num_cached
        assert_same(caches, read(plain, ids)[1])


def test_blocks_of_other_weights_and_rotations_are_not_taken():
    rope = RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=150)
    llama = replace(LLAMA, rope=rope)
    engine = make_engine(llama, random_target(llama))
    slots = Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=MUCH)
    assert [read(slots, TEXT[:n], 10)[0] for n in (100, 120, 160, 165)] == [0, 1, 0, 0]
    assert read(slots, TEXT[:163], 7)[0] == 2  # as long as the third one may become
    slots.update_weights(random_target(llama, seed=5))
    assert read(slots, TEXT[:120], 10)[0] == 0


def test_longer_longropes_share_blocks():
    factors = dict.fromkeys(("short_factor", "long_factor"), (1.0,) * 4)
    rope = RopeConfig(type="longrope", original_max_position_embeddings=150, **factors)
    assert [rope.rotation(length) for length in (100, 150, 151, 170)] == [0, 0, 1, 1]


def names(ids: Sequence[int]) -> list[bytes]:
    return name_blocks(ids, [0], chunk=4)


def keep_all(prefixes: Prefixes, ids: Sequence[int]) -> int:
    """Reads a prompt; returns how many of its blocks were there."""
    num_found = len(prefixes.find(names(ids)))
    new = range(num_found, len(names(ids)))
    prefixes.keep(names(ids), new, lambda index: (KeysValues([], []), None))
    return num_found


def test_the_end_of_the_oldest_prompt_goes_first():
    a, b, c = ([start, *range(12)] for start in (20, 30, 40))  # three blocks each
    prefixes = Prefixes(7)
    assert [keep_all(prefixes, ids) for ids in (a, b, a, c)] == [0, 0, 3, 0]
    assert len(prefixes) == 7
    assert [len(prefixes.find(names(ids))) for ids in (b, a, c)] == [1, 3, 3]


def test_a_prompt_never_loses_its_beginning_to_its_end():
    prefixes = Prefixes(2)
    assert [keep_all(prefixes, list(range(20))) for _ in range(2)] == [0, 2]
    assert len(prefixes) == 2
    assert keep_all(Prefixes(0), list(range(20))) == 0


def test_a_name_stands_for_all_tokens_up_to_the_one_after_the_block():
    ids = list(range(10))
    assert len(names(ids)) == 2 and len(names(ids[:8])) == 1
    for place in range(9):
        other = [*ids[:place], 99, *ids[place + 1 :]]
        assert [a == b for a, b in zip(names(ids), names(other), strict=True)] == [place > 4, False]
    assert name_blocks(ids, [1], chunk=4)[0] != names(ids)[0]


def test_the_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    engine = make_engine(LLAMA, random_target(LLAMA))
    block_bytes = 4 * 2 * LLAMA.num_kv_heads * LLAMA.head_dim * 64  # one layer
    slots = Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=3 * block_bytes + 1)
    assert slots.prefixes.most_bytes == 3 * block_bytes
    for start in range(5):
        read(slots, TEXT[start : start + 200])
    kept = jax.tree.leaves(list(slots.prefixes._blocks.values()))
    assert sum(leaf.nbytes for leaf in kept) == 3 * block_bytes
    needed = device.least_bytes(slots.weights, slots.config, batch_size=2)
    memory = needed + 5 * block_bytes
    monkeypatch.setattr("poss_jax.engine.device.device_memory", lambda: memory)
    monkeypatch.setattr("poss_jax.engine.slots.device_memory", lambda: memory)
    assert Slots(engine, sizes=(1,), max_length=300, max_prefix_bytes=MUCH).prefixes.most == 2


def test_chats_have_the_texts_they_have_without():
    """In bfloat16, which shows every other rounding; test_scheduler.py mixes requests."""
    target, draft = rounded(certain_pair(LLAMA, DRAFT, sharpness=1.5, disorder=0.3))
    engine = make_engine(LLAMA, target, DRAFT, draft, tree=TREE)
    ours = Scheduler(Slots(engine, sizes=(1,), max_length=400, max_prefix_bytes=MUCH))
    plain = Scheduler(Slots(engine, sizes=(1,), max_length=400))
    try:
        for settings in SETTINGS[1:4]:
            history, cached = TEXT[:70], []
            for turn in range(5):
                prompt = PreparedPrompt(history, 30, settings)
                (answer, expected) = ([*one.submit(prompt)][-1].answer for one in (ours, plain))
                assert answer == expected
                cached.append(answer.cached_tokens)
                history = history + answer.output_ids + TEXT[turn : turn + 25]
            assert cached[1:] == [64, 64, 128, 192]  # of 125, 180, 235, 290 tokens
    finally:
        ours.close()
        plain.close()
    assert ours.stats.cached_tokens > plain.stats.cached_tokens == 0
