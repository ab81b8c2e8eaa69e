"""Lossless: what is decoded speculatively is what the target writes alone, token for token."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from models import decode_all, random_draft, random_target, stacked, tiny_llama
from oracle import Shape, greedy_request

from poss_jax.config.models import DraftConfig, RopeConfig, TreeConfig
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.model.specialists import borrow_from_target, share_keys_values

# (depth, top_k, total_tokens), spans, batch, layers per specialist, which have a window. The fourth
# asks for more nodes than can be drafted.
SHAPES = {
    "default": ((6, 10, 60), (3, 3), 1),
    "wide": ((2, 10, 24), (1,), 3),
    "chain": ((5, 1, 6), (1, 3, 4), 3),
    "clamped": ((2, 2, 64), (1, 1), 3),
    "deep": ((8, 3, 40), (2, 2), 3),
    "tiny": ((1, 4, 2), (1,), 3),
    "first": ((4, 3, 14), (1, 2), 3, (3, 1)),
}
MARKS = dict.fromkeys(("default", "wide", "deep", "tiny", "first"), pytest.mark.slow) | {
    "chain": pytest.mark.quick
}

# Both rotate the keys of texts beyond 24 tokens in another way.
DYNAMIC = RopeConfig(type="dynamic", original_max_position_embeddings=24)
LONGROPE = RopeConfig(
    type="longrope",
    factor=8.0,
    original_max_position_embeddings=24,
    short_factor=(1.0, 1.2, 1.5, 2.0),
    long_factor=(1.5, 3.0, 6.0, 12.0),
)


def check_shape(shape: tuple, *, cases: int, seed: int, is_sampled: bool = False) -> None:
    """Compares both ways of decoding over drawn models, prompts, limits and oracles."""
    (depth, top_k, total_tokens), spans, batch, *layers = shape
    llama = tiny_llama(rope=DYNAMIC if is_sampled else LONGROPE)
    deep = {"layers_per_specialist": layers[0], "window": 5} if layers else {}
    config = DraftConfig(layer=llama, positions_per_specialist=spans, **deep)
    tree = TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)
    Shape(llama, config, tree, batch, is_sampled=is_sampled).check_pairs(cases, seed=seed)


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, ())) for name in SHAPES])
def test_speculative_equals_autoregressive(name):
    """A twelfth of the sequences is greedy; the program of batches that all are comes below."""
    check_shape(SHAPES[name], cases=12, seed=0, is_sampled=True)


@pytest.mark.quick
@pytest.mark.parametrize(
    "name",
    [name if name == "wide" else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES],
)
def test_greedy_speculative_equals_autoregressive(name):
    check_shape(SHAPES[name], cases=12, seed=0)


@pytest.mark.slow
@pytest.mark.optimised
@pytest.mark.parametrize("seed", range(40))
def test_speculative_equals_autoregressive_for_random_trees(seed):
    rng = np.random.default_rng(seed)
    tree = tuple(int(rng.integers(*limits)) for limits in ((1, 9), (1, 11), (2, 65)))
    spans = tuple(rng.integers(1, 5, rng.integers(1, 4)).tolist())
    check_shape(
        (tree, spans, int(rng.integers(1, 5))), cases=50, seed=seed, is_sampled=seed % 4 > 0
    )


def test_shared_keys_and_values_take_one_cache():
    """Specialists with the same projections draft the same trees from one cache as from two."""
    llama = tiny_llama()
    spans = (1, 2)
    own = DraftConfig(layer=llama, positions_per_specialist=spans)
    target, draft = random_target(llama), stacked(random_draft(own))
    draft = share_keys_values(draft, lambda leaf: leaf[:1])
    draft = draft | {
        "specialists": [jax.tree.map(lambda x, i=i: x[i], draft["specialists"]) for i in (0, 1)]
    }
    request = greedy_request([5, 6, 7, 8], [9, 3], limit=24)
    weights = Weights(target, borrow_from_target(draft, target))

    def run(config: DraftConfig):
        decode = StaticShape(llama, config, TreeConfig(depth=3, top_k=2, total_tokens=6), 64)
        state = jax.jit(lambda: decode_all(weights, decode, request))()
        return len(state.draft.cache.k), state.output

    num_own, of_own = run(own)
    num_shared, of_shared = run(replace(own, kv="shared"))
    assert (num_own, num_shared) == (2, 1)
    for a, b in zip(jax.tree.leaves(of_own), jax.tree.leaves(of_shared), strict=True):
        np.testing.assert_array_equal(a, b)
