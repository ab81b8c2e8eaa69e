"""The training steps: schedule, gradients per depth, noise, and what validation reports."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import random_draft, random_target, random_tokens, stacked, tiny_llama

from poss_jax.config import DraftConfig, ObjectiveConfig, OptimizerConfig
from poss_jax.losses import draft_losses
from poss_jax.packing import TrainBatch
from poss_jax.rollout import advance_history, init_history, predict, rollout
from poss_jax.target import encode, unstack_layers
from poss_jax.train_step import (
    DraftTask,
    draft_gradients,
    init_state,
    make_draft_step,
    make_draft_validation,
    make_optimizer,
    make_target_step,
    prepare_draft_data,
    simulated_acceptance_length,
    target_loss,
)

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


def test_learning_rate_of_every_step():
    # Of an unchanging gradient Adam makes steps of exactly the learning rate.
    config = OptimizerConfig(learning_rate=0.8, warmup_fraction=0.2, weight_decay=0.0, eps=0.0)
    params = apply(make_optimizer(config, 10), jnp.array(0.0), jnp.full(11, 0.3))
    steps = -np.diff(np.asarray(params), prepend=0.0)
    want = [0.0, 0.4, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0]
    np.testing.assert_allclose(steps, want, atol=2e-6)


def test_adamw_with_clipping_by_value():
    config = OptimizerConfig(learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.1)
    gradients = np.array([[0.4, -3.0], [0.7, 0.2], [-0.1, 9.0], [0.3, 0.0]])
    out = apply(make_optimizer(config, 4), jnp.array([1.0, -2.0]), jnp.array(gradients))
    params, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for step, gradient in enumerate(np.clip(gradients, -0.5, 0.5)):
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        m_hat, v_hat = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
        learning_rate = [0.0, 0.1, 0.1 * 2 / 3, 0.1 / 3][step]  # warm-up takes one step at least
        params = params - learning_rate * (m_hat / (np.sqrt(v_hat) + 1e-8) + 0.1 * params)
        np.testing.assert_allclose(out[step], params, rtol=1e-5)


def test_without_clipping():
    config = OptimizerConfig(
        learning_rate=0.1, warmup_fraction=0.0, b1=0.0, weight_decay=0.0, clip_value=None
    )
    out = apply(make_optimizer(config, 2), jnp.array(0.0), jnp.array([1.0, 2.0]))
    # v_hat after the gradients 1, 2 is (0.95 * 1 + 4) / (0.95 + 1).
    np.testing.assert_allclose(out[1], -0.1 * 2 / np.sqrt(4.95 / 1.95), rtol=1e-5)


# --------------------------------------------------------------------------------------------------
# The draft's step

LLAMA = tiny_llama(num_layers=1, vocab_size=7)  # so few tokens that random drafts hit some
B, T, R = 2, 12, 3
OBJECTIVE = ObjectiveConfig(top_k=3, feature_noise=0.01, rows_per_chunk=16)
TASK = DraftTask(
    target=LLAMA,
    draft=DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=R),
    objective=OBJECTIVE,
)
TOKENS = random_tokens(LLAMA, B, T)
MASK = jnp.asarray(np.random.default_rng(3).random((B, T)) < 0.8).at[:, -1].set(True)
BATCH = TrainBatch(TOKENS, MASK, jnp.ones_like(TOKENS))
KEY = jax.random.key(4)
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
    """Every leaf took one step of `SGD`."""
    moved = jax.tree.map(lambda a, b: (np.asarray(a) - np.asarray(b)) / 64, before, after)
    for got, want in zip(jax.tree.leaves(moved), jax.tree.leaves(gradients), strict=True):
        assert norm(got - np.asarray(want)) <= 1e-6 * norm(want)


def test_rows_are_paired_with_what_follows_them(target):
    data = prepare(target, TASK, TOKENS, MASK)
    features = jax.jit(encode, static_argnums=1)(target, LLAMA, TOKENS)
    np.testing.assert_allclose(data.inputs.features, features, atol=1e-6)
    np.testing.assert_array_equal(data.targets.features[:, :-1], data.inputs.features[:, 1:])
    embedded = np.asarray(target["embed"]["weight"])[np.asarray(TOKENS)]
    np.testing.assert_array_equal(data.inputs.embedded[:, :-1], embedded[:, 1:])
    np.testing.assert_array_equal(data.loss_mask[:, :-1], MASK[:, :-1])
    assert MASK[:, -1].all() and not data.loss_mask[:, -1].any()


def test_feature_noise(target):
    clean, noisy = prepare(target, TASK, TOKENS, MASK), prepare(target, TASK, TOKENS, MASK, KEY)
    width = 0.01 * 512 / T
    noise = np.asarray(noisy.inputs.features) - np.asarray(clean.inputs.features)
    assert 0.98 * width < noise.max() <= width * 1.00001
    assert 0.98 * width < -noise.min() <= width * 1.00001
    assert abs(noise.mean()) < 3 * width / np.sqrt(3 * noise.size)  # three standard deviations
    for got, want in zip(
        jax.tree.leaves(noisy.targets), jax.tree.leaves(clean.targets), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    again = prepare(target, TASK, TOKENS, MASK, KEY)
    np.testing.assert_array_equal(again.inputs.features, noisy.inputs.features)


@jax.jit
def depth_gradient(fc, specialist, head, data, history, depth):
    """(loss, next history) of one depth, and the gradient of fc and of its specialist."""

    def loss_fn(fc, specialist):
        prediction = predict(fc, specialist, TASK.draft, data.inputs, history, depth)
        losses = draft_losses(head, prediction, data.targets, data.loss_mask, OBJECTIVE)
        return losses.total, advance_history(history, prediction, data.inputs.features)

    return jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True)(fc, specialist)


def unrolled_gradients(draft, head, data):
    """Loss of every depth and the gradient of their sum, by a plain loop."""
    specialists = unstack_layers(draft["specialists"])
    history, losses, of_fc, of_specialist = init_history(data.inputs.features, R), [], [], []
    for depth, index in enumerate([0, 1, 1]):
        args = draft["fc"], specialists[index], head, data, history, jnp.array(depth)
        (loss, history), gradients = depth_gradient(*args)
        losses.append(loss)
        of_fc.append(gradients[0])
        of_specialist.append(jax.tree.map(np.asarray, gradients[1]))
    first, second, third = of_specialist
    return losses, {
        "fc": jax.tree.map(lambda *leaves: sum(map(np.asarray, leaves)), *of_fc),
        "specialists": jax.tree.map(lambda a, b, c: np.stack([a, b + c]), first, second, third),
    }


def test_scanned_step_equals_a_plain_loop(target, draft):
    step = make_draft_step(TASK, SGD)

    def run(step_index):
        state = init_state(jax.tree.map(jnp.copy, draft), SGD)
        state = state.replace(step=jnp.array(step_index, jnp.int32))
        return step(state, target, BATCH, KEY)

    losses = []
    for step_index in (5, 6):
        state, got = run(step_index)
        data = prepare(target, TASK, TOKENS, MASK, jax.random.fold_in(KEY, step_index))
        want, gradient = unrolled_gradients(draft, target["head"]["weight"], data)
        np.testing.assert_allclose(got.total, want, rtol=1e-6)
        assert state.step == step_index + 1
        assert_moved_by(gradient, draft, state.params)
        losses.append(got.total)
    assert (losses[0] != losses[1]).all()  # every step draws its own noise


def test_untrained_specialists_get_no_gradient(target, draft):
    task = TASK._replace(draft=dataclasses.replace(TASK.draft, trained_depth=1))
    data = prepare(target, task, TOKENS, MASK)
    run = jax.jit(draft_gradients, static_argnums=2)
    gradients, losses = run(draft, target["head"]["weight"], task, data)
    assert losses.total.shape == (1,)
    for leaf in jax.tree.leaves(gradients["specialists"]):
        assert norm(leaf[0]) > 0
        np.testing.assert_array_equal(leaf[1], 0.0)


# --------------------------------------------------------------------------------------------------
# Validation


def chain_length(hits, mask) -> float:
    """By its definition: 1 + the mean over starts of tokens accepted in sequence."""
    lengths = []
    depth, batch, size = hits.shape
    for row, start in np.ndindex(batch, size - depth + 1):
        if mask[row, start : start + depth].all():
            chain = [hits[d, row, start + d] for d in range(depth)]
            lengths.append(chain.index(False) if False in chain else depth)
    return 1 + np.mean(lengths)


def test_simulated_acceptance_length_drawn():
    #   row            0  1  2  3      chains: 0 accepts both, 1 the first, 2 none
    hits = jnp.array([[[1, 1, 0, 0]], [[0, 1, 0, 1]]], bool)
    mask = jnp.ones((1, 4), bool)
    measure = jax.jit(simulated_acceptance_length)
    assert measure(hits, mask) == 1 + 3 / 3
    # A row that is not trained ends no chain: those it belongs to are left out.
    assert measure(hits, mask.at[0, 2].set(False)) == 1 + 2 / 1


def test_simulated_acceptance_length_of_any_hits():
    rng = np.random.default_rng(0)
    hits, mask = rng.random((4, 3, 40)) < 0.7, rng.random((3, 40)) < 0.9
    out = jax.jit(simulated_acceptance_length)(jnp.asarray(hits), jnp.asarray(mask))
    np.testing.assert_allclose(out, chain_length(hits, mask), rtol=1e-6)


def test_validation(target, draft):
    out = make_draft_validation(TASK)(draft, target, BATCH)
    data = prepare(target, TASK, TOKENS, MASK)
    predictions = jax.jit(rollout, static_argnums=(1, 3))(draft, TASK.draft, data.inputs, R)
    head, mask = np.asarray(target["head"]["weight"]), np.asarray(data.loss_mask)
    drafted = np.argmax(np.asarray(predictions) @ head.T, axis=-1)
    hits = (drafted == np.argmax(np.asarray(data.targets.features) @ head.T, axis=-1)) & mask
    assert hits.any(axis=(1, 2)).all()
    np.testing.assert_allclose(out.agreement, [hit[mask].mean() for hit in hits], rtol=1e-6)
    np.testing.assert_allclose(out.acceptance_length, chain_length(hits, mask), rtol=1e-6)
    want, _ = unrolled_gradients(draft, target["head"]["weight"], data)
    np.testing.assert_allclose(out.loss, want, rtol=1e-6)


# --------------------------------------------------------------------------------------------------
# The target's step


def test_target_step():
    params = stacked(random_target(LLAMA))

    def plain(params):
        logits = encode(params, LLAMA, TOKENS)[:, :-1] @ params["head"]["weight"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:]).mean()

    loss, gradient = jax.jit(jax.value_and_grad(plain))(params)
    state = init_state(jax.tree.map(jnp.copy, params), SGD)
    state, got = make_target_step(LLAMA, SGD, rows_per_chunk=10)(state, BATCH)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    assert state.step == 1
    assert_moved_by(gradient, params, state.params)


def test_a_tied_target_is_trained_through_its_embedding(target):
    config = dataclasses.replace(LLAMA, tie_embeddings=True)
    other_head = target | {"head": {"weight": target["embed"]["weight"]}}
    loss = jax.jit(target_loss, static_argnames=("config", "rows_per_chunk"))
    want = loss(other_head, TOKENS, config=LLAMA, rows_per_chunk=64)
    got = loss(target, TOKENS, config=config, rows_per_chunk=64)
    assert got == want != loss(target, TOKENS, config=LLAMA, rows_per_chunk=64)
