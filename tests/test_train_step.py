"""The training steps: schedule, gradients per depth, and noise."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import random_draft, random_target, random_tokens, rounding, stacked, tiny_llama
from plain_step import PlainBatch, plain_gradients

from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.learn.step import (
    draft_gradients,
    init_state,
    make_draft_step,
    make_optimizer,
    make_target_step,
    target_loss,
)
from poss_jax.learn.task import DraftTask, prepare_draft_data
from poss_jax.model.documents import TrainBatch, encode

# --------------------------------------------------------------------------------------------------
# Optimizer


def apply(optimizer, params, gradients):
    """Parameters after each of some gradients, all numbers."""

    def body(carry, gradient):
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    with jax.numpy_dtype_promotion("standard"):
        return jax.lax.scan(body, (params, optimizer.init(params)), gradients)[1]


@pytest.mark.parametrize(
    ("changes", "num_steps", "peak_at"),
    [
        ({"warmup_fraction": 0.2}, 10, 2),
        ({}, 10_000, 100),  # 1 %
        ({}, 1000, 40),  # 2 / (1 - b2)
        ({"b2": 0.98}, 1000, 100),
        ({}, 100, 20),  # a fifth of the run
        ({"warmup_steps": 7}, 100, 7),
        ({"warmup_steps": 0}, 100, 1),
        ({"warmup_steps": 500}, 100, 99),
    ],
)
def test_learning_rate_rises_and_falls(changes, num_steps: int, peak_at: int):
    # Of an unchanging gradient Adam makes steps of exactly the learning rate.
    config = OptimizerConfig(learning_rate=0.5, weight_decay=0.0, eps=1e-30, **changes)
    params = apply(make_optimizer(config, num_steps), jnp.array(0.0), jnp.full(num_steps + 1, 0.3))
    steps = -np.diff(np.asarray(params), prepend=0.0)
    rises, falls = np.linspace(0, 0.5, peak_at + 1), np.linspace(0.5, 0, num_steps - peak_at + 1)
    np.testing.assert_allclose(steps[: peak_at + 1], rises, atol=2e-5)
    np.testing.assert_allclose(steps[peak_at : 2 * peak_at], falls[:peak_at], atol=2e-5)
    assert steps[-1] == 0


def test_clipping_by_norm():
    """Gradients that are too long together are scaled, and keep their direction."""
    config = OptimizerConfig(clip_norm=2.0, clip_value=None, eps=1.0)  # not scale-free
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    adam = make_optimizer(dataclasses.replace(config, clip_norm=None, warmup_steps=0), 9)
    for factor, kept in [(1.0, 0.4), (0.2, 0.2)]:
        given, wanted = (jax.tree.map(lambda x, f=f: x * f, gradients) for f in (factor, kept))
        optimizer = make_optimizer(dataclasses.replace(config, warmup_steps=0), 9)
        with jax.numpy_dtype_promotion("standard"):
            _, got = optimizer.update(given, optimizer.init(gradients), gradients)
            _, want = adam.update(wanted, adam.init(gradients), gradients)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_adamw_with_clipping_by_value():
    config = OptimizerConfig(learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.1)
    gradients = np.array([[0.4, -3.0], [0.7, 0.2], [-0.1, 9.0], [0.3, 0.0]])
    out = apply(make_optimizer(config, 4), jnp.array([1.0, -2.0]), jnp.array(gradients))
    params, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(np.clip(gradients, -0.5, 0.5)):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        learning_rate = [0.1, 0.075, 0.05, 0.025][step]
        params = params - learning_rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.1 * params)
        np.testing.assert_allclose(out[step], params, rtol=1e-5)


@pytest.mark.parametrize("warmup_fraction", [0.0, 0.01, 0.9])
def test_run_of_one_step_trains(warmup_fraction: float):
    config = OptimizerConfig(learning_rate=0.1, warmup_fraction=warmup_fraction, weight_decay=0.0)
    (param,) = apply(make_optimizer(config, 1), jnp.array(0.0), jnp.array([0.3]))
    assert param == pytest.approx(-0.1, rel=1e-5)


# --------------------------------------------------------------------------------------------------
# The draft's step

LLAMA = tiny_llama(num_layers=1, vocab_size=7)  # so few tokens that random drafts hit some
B, T, R = 2, 12, 3
OBJECTIVE = ObjectiveConfig(top_k=3, feature_noise=0.01)
REACH = {"depth_weighting": "reach"}
STEP = StepConfig(vocabulary_chunk=5, attention_block=7)
TASK = DraftTask(
    target=LLAMA,
    draft=DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=R),
    objective=OBJECTIVE,
    step=STEP,
)
TOKENS = random_tokens(LLAMA, B, T)
MASK = jnp.asarray(np.random.default_rng(3).random((B, T)) < 0.8).at[:, -1].set(True)
BATCH = TrainBatch(TOKENS, MASK, jnp.ones_like(TOKENS))
KEY = jax.random.key(4)
KEYS = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(B))
# Documents of more than 3 tokens are rotated by their length.
ROPE_BY_LENGTH = RopeConfig(type="dynamic", factor=4.0, original_max_position_embeddings=3)
ROUNDING = rounding(LLAMA.intermediate_size)  # no sum of a forward or a gradient is longer
SGD = optax.sgd(64.0)  # a large rate shows the gradient without the rounding of the parameters
prepare = jax.jit(prepare_draft_data, static_argnums=1)


@pytest.fixture(scope="module")
def target():
    return stacked(random_target(LLAMA))


@pytest.fixture(scope="module")
def draft():
    return stacked(random_draft(TASK.draft))


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


def assert_moved_by(gradients, before, after):
    moved = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / 64, before, after)
    for got, want in zip(jax.tree.leaves(moved), jax.tree.leaves(gradients), strict=True):
        assert norm(got - np.asarray(want)) <= ROUNDING * norm(want)


def assert_features_near(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=ROUNDING * np.abs(want).max())


@pytest.mark.optimised
def test_rows_are_paired_with_what_follows_them(target):
    data = prepare(target, TASK, BATCH)
    features = jax.jit(encode, static_argnums=1)(target, LLAMA, TOKENS)
    assert_features_near(data.inputs.features, features)
    np.testing.assert_array_equal(data.targets.features[:, :-1], data.inputs.features[:, 1:])
    embedded = np.asarray(target["embed"]["weight"])[np.asarray(TOKENS)]
    np.testing.assert_array_equal(data.inputs.embedded[:, :-1], embedded[:, 1:])
    np.testing.assert_array_equal(data.loss_mask[:, :-2], MASK[:, 1:-1] & MASK[:, 2:])
    assert not data.loss_mask[:, -2:].any()
    as_reference = TASK._replace(objective=dataclasses.replace(OBJECTIVE, trained_rows="token"))
    by_token = prepare(target, as_reference, BATCH).loss_mask
    np.testing.assert_array_equal(by_token[:, :-1], MASK[:, :-1])
    assert MASK[:, -1].all() and not by_token[:, -1].any()


def test_noise_is_as_wide_as_the_document_is_short(target):
    documents = jnp.asarray([[1] * 8 + [2] * 4, [1] * 12], jnp.int32)
    batch = TrainBatch(TOKENS, MASK, documents)
    clean, noisy, again = (prepare(target, TASK, batch, *keys) for keys in ([], [KEYS], [KEYS]))
    noise = np.asarray(noisy.inputs.features) - np.asarray(clean.inputs.features)
    for part, length in [((0, slice(0, 8)), 8), ((0, slice(8, 12)), 4), ((1, slice(0, 12)), 12)]:
        width, of_part = 0.01 * 512 / length, noise[part]
        assert 0.97 * width < of_part.max() <= width * 1.00001
        assert 0.97 * width < -of_part.min() <= width * 1.00001
        deviation = width / np.sqrt(3 * of_part.size)
        assert abs(of_part.mean()) < 3 * deviation
    for got, want in zip(
        jax.tree.leaves(noisy.targets), jax.tree.leaves(clean.targets), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(again.inputs.features, noisy.inputs.features)


def plain(draft, head, task, data):
    """Losses by depth, the gradient of their sum, and reach, from whole scores and logits."""
    batch = PlainBatch(
        data.inputs.features, data.inputs.embedded, data.targets.features, data.loss_mask
    )
    run = jax.jit(plain_gradients, static_argnums=(2, 3))
    losses, gradients, reach = run(draft, head, task.draft, task.objective, batch)
    return np.array(losses), gradients, np.array(reach)


def assert_near(got, want, tolerance):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert norm(np.asarray(a) - np.asarray(b)) <= tolerance * norm(b)


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (STEP, {"lk_weight": 0.7, "lk": "alpha"}),
        (StepConfig(), REACH),
        (dataclasses.replace(STEP, accumulation_steps=2), {"lk_weight": 0.7}),
        (dataclasses.replace(STEP, accumulation_steps=2), REACH | {"average_over": "all"}),
    ],
)
def test_step_equals_a_plain_one(target, draft, step, changes):
    """Chunks, blocks and parts of a batch change nothing; every step draws its own noise."""
    task = TASK._replace(step=step, objective=dataclasses.replace(OBJECTIVE, **changes))
    run = make_draft_step(task, SGD)
    losses = []
    for step_index in (5, 6):
        state = init_state(jax.tree.map(jnp.copy, draft), SGD)
        state = state.replace(step=jnp.array(step_index, jnp.int32))
        state, got = run(state, target, BATCH, KEY)
        key = jax.random.fold_in(KEY, step_index)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(B))
        data = prepare(target, task, BATCH, keys)
        want, gradient, reach = plain(draft, target["head"]["weight"], task, data)
        # Rows weigh 1 on average.
        share = data.num_trained / B / T if task.objective.average_over == "all" else 1.0
        gradient = jax.tree.map(partial(jnp.multiply, share / reach.mean()), gradient)
        np.testing.assert_allclose(got["loss_per_depth"], share * want / reach, rtol=2e-6)
        np.testing.assert_allclose(got["gradient_norm"], norm(gradient), rtol=2e-6)
        assert state.step == step_index + 1
        assert_moved_by(gradient, draft, state.params)
        losses.append(got["loss_per_depth"])
    assert (losses[0] != losses[1]).all()


def test_packed_documents_equal_rows_of_their_own(target, draft):
    """Positions, kept row 0, diagonals, zero target, noise, reach and loss are each document's."""
    llama, lengths = dataclasses.replace(LLAMA, rope=ROPE_BY_LENGTH), [5, 2, 2]
    layer = dataclasses.replace(TASK.draft.layer, rope=ROPE_BY_LENGTH)
    task = TASK._replace(
        target=llama,
        draft=dataclasses.replace(TASK.draft, layer=layer),
        objective=dataclasses.replace(OBJECTIVE, feature_noise=0, lk_weight=0.7, **REACH),
    )
    documents = np.array([[1] * 5 + [2] * 2 + [3] * 2 + [0] * 3])
    packed = TrainBatch(TOKENS[:1], MASK[:1], jnp.asarray(documents, jnp.int32))
    data = prepare(target, task, packed)
    gradients, losses = jax.jit(draft_gradients, static_argnums=2)(
        draft, target["head"]["weight"], task, data
    )
    total, want = jax.tree.map(jnp.zeros_like, draft), np.zeros(R)
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        part = slice(start, start + length)
        alone = TrainBatch(TOKENS[:1, part], MASK[:1, part], jnp.ones((1, length), jnp.int32))
        data_alone = prepare(target, task, alone)
        assert_features_near(data.inputs.features[:, part], data_alone.inputs.features)
        share = float(data_alone.num_trained / data.num_trained)
        of_part, gradient, _ = plain(draft, target["head"]["weight"], task, data_alone)
        want += share * of_part
        total = jax.tree.map(lambda a, b, s=share: a + s * b, total, gradient)
    np.testing.assert_allclose(losses.total, want, rtol=1e-5)
    assert_near(gradients, total, 1e-5)


def test_depths_can_be_weighted(target, draft):
    task = TASK._replace(objective=dataclasses.replace(OBJECTIVE, depth_weights=(1.0, 0.0, 0.5)))
    data = prepare(target, TASK, BATCH)
    run = jax.jit(draft_gradients, static_argnums=2)
    head = target["head"]["weight"]
    gradients, losses = run(draft, head, task, data)
    _, whole = run(draft, head, TASK, data)
    np.testing.assert_allclose(losses.total, whole.total, rtol=1e-6)  # reported without weights
    first, _ = run(draft, head, TASK._replace(draft=with_depth(1)), data)
    two, _ = run(draft, head, TASK._replace(draft=with_depth(2)), data)
    three, _ = run(draft, head, TASK, data)
    want = jax.tree.map(lambda a, b, c: a + 0.5 * (c - b), first, two, three)
    assert_near(gradients, want, 2e-5)


def with_depth(depth):
    return dataclasses.replace(TASK.draft, trained_depth=depth)


def test_shared_keys_and_values_stay_shared(target, draft):
    attention = draft["specialists"]["attention"]
    tied = {n: jax.tree.map(lambda x: jnp.stack([x[0], x[0]]), attention[n]) for n in ("k", "v")}
    start = draft | {"specialists": draft["specialists"] | {"attention": attention | tied}}
    task = TASK._replace(draft=dataclasses.replace(TASK.draft, kv="shared"))
    step = make_draft_step(task, SGD)
    state, _ = step(init_state(jax.tree.map(jnp.copy, start), SGD), target, BATCH, KEY)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.fold_in(KEY, 0), jnp.arange(B))
    data = prepare(target, TASK, BATCH, keys)
    _, gradients, _ = plain(start, target["head"]["weight"], TASK, data)
    after = state.params["specialists"]["attention"]
    for name in ("k", "v"):
        weight, of_weight = after[name]["weight"], gradients["specialists"]["attention"][name]
        np.testing.assert_array_equal(weight[0], weight[1])
        moved = (np.asarray(tied[name]["weight"][0]) - np.asarray(weight[0])) / 64
        want = np.asarray(of_weight["weight"]).sum(axis=0)
        assert norm(moved - want) <= 2e-6 * norm(want)
    assert norm(after["q"]["weight"][0] - after["q"]["weight"][1]) > 0


# --------------------------------------------------------------------------------------------------
# The target's step


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_target_step(accumulation_steps):
    """Trained tokens are predicted from the row before, within their document."""
    params = stacked(random_target(LLAMA))
    documents = jnp.asarray([[1] * 5 + [2] * 6 + [0], [1] * 12], jnp.int32)

    def plain(params):
        total, count = 0.0, 0
        for row, part in [(0, slice(0, 5)), (0, slice(5, 11)), (1, slice(0, 12))]:
            tokens, mask = TOKENS[row : row + 1, part], MASK[row, part][1:]
            logits = encode(params, LLAMA, tokens)[0, :-1] @ params["head"]["weight"].T
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[0, 1:])
            total, count = total + losses.sum(where=mask), count + mask.sum(dtype=jnp.float32)
        return total / count

    loss, gradient = jax.jit(jax.value_and_grad(plain))(params)
    state = init_state(jax.tree.map(jnp.copy, params), SGD)
    step = dataclasses.replace(STEP, accumulation_steps=accumulation_steps)
    run = make_target_step(LLAMA, SGD, step, jnp.float32)
    state, got = run(state, TrainBatch(TOKENS, MASK, documents))
    np.testing.assert_allclose(got["loss"], loss, rtol=2e-6)
    np.testing.assert_allclose(got["gradient_norm"], norm(gradient), rtol=2e-6)
    assert state.step == 1
    assert_moved_by(gradient, params, state.params)


def test_a_tied_target_is_trained_through_its_embedding(target):
    config = dataclasses.replace(LLAMA, tie_embeddings=True)
    other_head = target | {"head": {"weight": target["embed"]["weight"]}}
    loss = jax.jit(target_loss, static_argnums=(2, 3))
    want = loss(other_head, BATCH, LLAMA, STEP)
    got = loss(target, BATCH, config, STEP)
    assert got == want != loss(target, BATCH, LLAMA, STEP)
