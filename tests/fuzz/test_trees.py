"""Trees and acceptance: closed, distinct, and lossless for any scores a draft may come up with."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_tree import BATCH, grow_in_jax
from toy import Round, check_round, draw_world, program
from watch import acceptance_faults, tree_faults

from poss_jax.config.models import TreeConfig
from poss_jax.decode.verify import accept

# depth, top_k, total_tokens; few, since each is compiled
SHAPES = [(1, 3, 3), (4, 2, 8), (6, 1, 5), (3, 4, 16)]
SHARP = [0.0, -0.0, -1e-7, 1e-7, 1e-5, -1e-30, 3.0, -np.inf, np.nan, -np.nan, -0.5]


@cache
def programs(shape: tuple[int, int, int]):
    depth, top_k, total_tokens = shape
    config = TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)

    @jax.jit
    def grow(log_probs, salt):
        # Siblings differ, and nodes of several parents are often alike.
        tokens = (jnp.arange(top_k) * 7 + salt) % 50
        levels = [(jnp.broadcast_to(tokens, values.shape), values) for values in log_probs]
        candidates, tree, _ = grow_in_jax(jnp.zeros(BATCH, jnp.int32), levels, config)
        chosen = jnp.roll(tree.tokens, -1, axis=1)
        acceptance = accept(tree, chosen, max_accepted=config.max_accepted)
        faults = tree_faults(tree, candidates, depth) | acceptance_faults(acceptance, tree, chosen)
        above = jnp.pad(candidates.scores, ((0, 0), (0, 1)))
        parents = jnp.take_along_axis(above, candidates.parents, axis=1)
        return faults | {"a child scores above its parent": (candidates.scores > parents).any(1)}

    return config, grow


@cache
def toy_round(shape: tuple[int, int, int]) -> Round:
    depth, top_k, total_tokens = shape
    return program(TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens))


@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.5, 1.0]))
def test_any_scores(shape, seed, sharp):
    config, grow = programs(shape)
    rng = np.random.default_rng(seed)
    log_probs = []
    for depth in range(config.depth):
        size = (BATCH, config.top_k if depth else 1, config.top_k)
        some = rng.choice(SHARP, int(rng.integers(1, 4)))
        values = np.where(rng.random(size) < sharp, rng.choice(some, size), rng.normal(size=size))
        log_probs.append(jnp.asarray(values, jnp.float32))
    faults = grow(log_probs, jnp.int32(rng.integers(50)))
    assert not [name for name, rows in faults.items() if rows.any()]


@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1.0, 30.0, 1e4, 1e30]),
    st.sampled_from([0.0, 1e-7, 1e-5, 1e-2]),
)
def test_rounds_are_lossless(shape, seed, sharpness, rounding):
    rng = np.random.default_rng(seed)
    world = draw_world(rng, BATCH, sharpness=sharpness, disagreement=rng.random())
    assert not check_round(toy_round(shape), *world, rounding=rounding)
