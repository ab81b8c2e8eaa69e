"""Training and inference agree: what the recursion predicts is what a chain drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    jit_predict_depths,
    random_draft,
    random_target,
    random_tokens,
    stacked,
    tiny_llama,
)

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import drafting
from poss_jax.decode.drafting import commit_pairs, join_pairs
from poss_jax.learn.recursion import DraftInputs, first_version, next_reach, unroll
from poss_jax.model.cache import init_cache
from poss_jax.model.documents import encode
from poss_jax.model.families import family_of
from poss_jax.model.specialists import borrow_from_target

# spans, trained depth, fc bias; and what the layers have besides a Llama's
METHODS = {
    "eagle": ((1,), 1, False),
    "hass": ((1,), 3, True),
    "poss1": ((1,) * 6, 6, False),
    "poss2": ((2, 2, 2), 6, False),
    "poss3": ((3, 3), 6, True),
    "poss134": ((1, 3, 4), 8, False),
    "clamped": ((1, 2), 5, False),
    "qwen2": ((1, 2), 4, True),
    "qwen3": ((2, 1), 4, False),
    "deep": ((1, 2), 4, True),
}
DEEP = {"deep": (3,)}  # layers per specialist
LAYERS = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}
LAYERS["deep"] = LAYERS["qwen2"] | LAYERS["qwen3"]
# What the slow ones have, the others have too.
MARKS = dict.fromkeys(("hass", "poss1", "poss2", "poss3", "qwen2", "qwen3"), pytest.mark.slow)
MARKS |= {"poss134": pytest.mark.quick}
T = 14


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=MARKS.get(name, ())) for name in METHODS]
)
def test_recursion_equals_drafting_a_chain(method):
    """Depth d at row s + d is step d of the chain that starts at row s, fed the same tokens."""
    spans, depth, fc_bias = METHODS[method]
    llama = tiny_llama(**LAYERS.get(method, {}))
    config = DraftConfig(
        layer=llama,
        positions_per_specialist=spans,
        layers_per_specialist=DEEP.get(method, (1,)),
        trained_depth=depth,
        fc_bias=fc_bias,
    )
    target, draft = random_target(llama), random_draft(config)
    tokens = random_tokens(llama, 1, T + 1)
    features = jax.jit(encode, static_argnums=1)(stacked(target), llama, tokens)[:, :-1]
    embedded = target["embed"]["weight"][tokens[:, 1:]]
    inputs = DraftInputs(features, embedded, jnp.ones((1, T), jnp.int32))
    predictions = jit_predict_depths(stacked(draft), config, inputs, depth, block=5)
    starts = np.arange(T - depth + 1)
    chain = jax.jit(lambda params: draft_chains(config, params, tokens, features, starts, depth))(
        borrow_from_target(draft, target)
    )
    for d in range(depth):
        np.testing.assert_allclose(chain[d], predictions[d, 0, starts + d], atol=1e-5, rtol=1e-5)


def test_a_pass_through_start_predicts_the_feature_it_reads():
    """At depth d it has added the tokens' parts of `fc` d + 1 times, and nothing else."""
    llama = tiny_llama()
    config = DraftConfig(layer=llama, positions_per_specialist=(1, 2), trained_depth=3)
    draft = random_draft(config)
    started = family_of(config).pass_through(draft)
    features, embedded = (jax.random.normal(jax.random.key(n), (1, T, 32)) for n in range(2))
    inputs = DraftInputs(features, embedded, jnp.ones((1, T), jnp.int32))
    predictions = jit_predict_depths(stacked(started), config, inputs, 3, block=5)
    of_tokens = embedded[0] @ draft["fc"]["weight"][:, :32].T
    for d in range(3):
        rows = range(d, T)
        added = np.stack([of_tokens[row - d : row + 1].sum(axis=0) for row in rows])
        want = features[0, : T - d] + added
        np.testing.assert_allclose(predictions[d, 0, d:], want, atol=1e-5)


def draft_chains(config, params, tokens, features, starts, depth):
    """Features of every step of the chains from all start rows, one chain per batch row.

    The head is the identity, so that the drafting hands its features to the choice of children;
    that choice puts the text's own token.
    """
    batch = len(starts)
    params = params | {"head": {"weight": jnp.eye(config.layer.hidden_size)}}
    x = join_pairs(params, config, tokens[:, 1:], features)
    cache = init_cache(
        config.layer,
        num_layers=config.num_streams(depth),
        size=T + depth,
        rope_length=jnp.full(batch, T),
        dtype=jnp.float32,
    )
    every = jnp.broadcast_to(x, (batch, *x.shape[1:]))
    cache, rows = commit_pairs(params, config, cache, every, jnp.asarray(starts + 1, jnp.int32))
    seen = []

    def follow_the_text(logits, level, top_k):
        seen.append(logits[:, 0])
        ids = jnp.take(tokens[0], jnp.minimum(level.position, T))[:, None, None]
        return ids, jnp.zeros((batch, 1, top_k))

    tree = TreeConfig(depth=depth, top_k=1, total_tokens=2)
    roots = rows[jnp.arange(batch), starts][:, None]
    drafting.draft(params, config, tree, cache, roots, follow_the_text)
    return seen


def test_reach_is_the_product_of_rates_before():
    """A chain is a row further at each depth, and ends with its document."""
    documents = jnp.array([[1, 1, 1, 1, 2, 2]])
    first = next_reach(jnp.ones((1, 6)), jnp.array([[0.5, 0.4, 0.2, 0.1, 0.8, 0.3]]), documents)
    np.testing.assert_allclose(first, [[0.0, 0.5, 0.4, 0.2, 0.0, 0.8]])
    second = next_reach(first, jnp.array([[0.9, 0.5, 0.5, 0.25, 0.7, 0.5]]), documents)
    np.testing.assert_allclose(second, [[0.0, 0.0, 0.25, 0.2, 0.0, 0.0]])


def test_versions_move_one_row_per_depth():
    """Versions as numbers: 10 d + r is what depth d predicts at row r; f is 100 + r.

    documents      1  1  1  2  2
    version 0     f0 f1 f2 f3 f4
    version 1     f0 00 01 f3 03
    version 2     f0 10 11 f3 13
    """
    features = jnp.arange(100.0, 105.0)[None, :, None]
    inputs = DraftInputs(features, features, jnp.array([[1, 1, 1, 2, 2]]))

    def visit(at, carry):
        predicted = 10 * at.index.astype(jnp.float32) + jnp.arange(5.0)[None, :, None]
        return predicted, carry, at.versions

    config = DraftConfig(layer=tiny_llama())
    known = unroll(config, inputs, first_version(features, 3), None, visit, range(3))[2][2]
    rows = [[100, 101, 102, 103, 104], [100, 0, 1, 103, 3], [100, 10, 11, 103, 13]]
    assert known[:, 0, :, 0].tolist() == rows
