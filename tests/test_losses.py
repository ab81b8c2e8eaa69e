"""The chunked losses against formulas over whole logits, in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from poss_jax.config.training import ObjectiveConfig
from poss_jax.learn.losses import (
    describe_targets,
    draft_losses,
    language_model_loss,
    most_likely_tokens,
    trained_log_normaliser,
)

B, T, D, V = 2, 11, 8, 23
WEIGHTS = {"feature_weight": 0.7, "probability_weight": 0.3, "top_k_weight": 1.3}


def draw(*shape, seed) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


HEAD, FEATURES, PREDICTIONS = draw(V, D, seed=0), draw(B, T, D, seed=1), draw(B, T, D, seed=2)
LABELS = jnp.asarray(np.random.default_rng(3).integers(0, V, (B, T)), jnp.int32)
MASK = jnp.asarray(np.random.default_rng(4).random((B, T)) < 0.7)


def assert_near_in_norm(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert np.linalg.norm(got - want) <= 1e-6 * np.linalg.norm(want)


def ours(predictions, mask, objective, chunk):
    targets = describe_targets(HEAD, FEATURES, objective, chunk=chunk)
    count = mask.sum(dtype=jnp.float32)
    losses = draft_losses(HEAD, predictions, targets, mask, count, objective, chunk=chunk)
    return losses.total, losses


def plain(predictions, own, head, features, mask, top_k, ids=None):
    """(total, ((feature, probability, top-K), tokens)), with whole logits, of some ids or all."""
    difference = jnp.abs(predictions - features)
    smooth_l1 = jnp.where(difference < 1, difference**2 / 2, difference - 1 / 2).mean(axis=-1)
    logits, known = features @ head.T, mask
    if ids is not None:
        logits, known = logits[..., ids], mask & jnp.isin(logits.argmax(axis=-1), ids)
    target = jax.nn.softmax(logits)
    products = target * jax.nn.log_softmax(predictions @ own.T)
    smallest = jnp.sort(target, axis=-1)[..., -min(top_k, V)][..., None]
    of_best = jnp.where(target >= smallest, products, 0.0)
    rows = (mask, smooth_l1), (known, -products.sum(-1)), (known, -of_best.sum(-1))
    terms = tuple((trained * row).sum() / (mask.sum() + 1e-5) for trained, row in rows)
    return 0.7 * terms[0] + 0.3 * terms[1] + 1.3 * terms[2], (terms, target.argmax(axis=-1))


def restricted(predictions, own, objective, vocabulary, *, has_own_head):
    """Losses and targets over some ids, with the target's rows or a head of the draft's own."""
    targets = describe_targets(
        HEAD,
        FEATURES,
        objective,
        chunk=4,
        vocabulary=vocabulary,
        draft_head=own if has_own_head else None,
    )
    head = own if has_own_head else HEAD if vocabulary is None else HEAD[vocabulary]
    count, trains = MASK.sum(dtype=jnp.float32), {"chunk": 4, "trains_head": has_own_head}
    return draft_losses(head, predictions, targets, MASK, count, objective, **trains), targets


@pytest.mark.parametrize("has_own_head", [False, True])
def test_losses_restricted_to_a_vocabulary(has_own_head):
    """Targets are renormalised; rows whose best token is unknown count in the feature term only."""
    ids = jnp.asarray([1, 2, 5, 8, 11, 14, 20], jnp.int32)
    objective = ObjectiveConfig(**WEIGHTS, top_k=3)
    own = draw(len(ids), D, seed=5)

    def ours(predictions, own):
        losses, targets = restricted(predictions, own, objective, ids, has_own_head=has_own_head)
        return losses.total, targets

    def wanted(predictions, own):
        own = own if has_own_head else HEAD[ids]
        total, (_, tokens) = plain(predictions, own, HEAD, FEATURES, MASK, 3, ids)
        return total, tokens

    with jax.numpy_dtype_promotion("standard"):
        got, want = (
            jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(PREDICTIONS, own)
            for run in (ours, wanted)
        )
    targets = got[0][1]
    np.testing.assert_array_equal(targets.tokens, want[0][1])
    assert 0 < targets.is_known.sum() < targets.is_known.size
    np.testing.assert_allclose(got[0][0], want[0][0], rtol=1e-5)
    for gradient, wanted_gradient in zip(got[1], want[1], strict=True):
        np.testing.assert_allclose(gradient, wanted_gradient, atol=1e-6)


def test_the_feature_loss_in_deviations_of_the_target():
    deviations = jnp.linspace(0.1, 20.0, D)
    targets = describe_targets(HEAD, FEATURES, ObjectiveConfig(), chunk=4)
    count = MASK.sum(dtype=jnp.float32)
    run = partial(draft_losses, HEAD, PREDICTIONS, targets, MASK, count, ObjectiveConfig(), chunk=4)
    got, as_it_was = run(deviations=deviations), run()
    size = np.abs(PREDICTIONS - FEATURES) / np.asarray(deviations)
    smooth_l1 = np.where(size < 1, size**2 / 2, size - 0.5).mean(axis=-1)
    want = smooth_l1[np.asarray(MASK)].sum() / (count + 1e-5)
    np.testing.assert_allclose(got.feature, want, rtol=1e-6)
    assert abs(got.feature - as_it_was.feature) > 0.1
    np.testing.assert_allclose(got.total - got.feature, as_it_was.total - as_it_was.feature)


@pytest.mark.parametrize("lk", ["lambda", "alpha"])
@pytest.mark.parametrize("has_own_head", [False, True])
@pytest.mark.parametrize("ids", [None, (1, 2, 5, 8, 11, 14, 20)])
def test_lk_losses_and_their_gradient(lk, has_own_head, ids):
    """The rate counts the target's probabilities as they are, the cross-entropy renormalised."""
    zeros = {"feature_weight": 0.0, "probability_weight": 0.0, "top_k_weight": 0.0}
    objective = ObjectiveConfig(**zeros, lk_weight=0.6, lk=lk, lk_eta=2.0)
    vocabulary = None if ids is None else jnp.asarray(ids, jnp.int32)
    of_target = HEAD if ids is None else HEAD[vocabulary]
    own = draw(len(of_target), D, seed=5)

    def ours(predictions, own):
        losses, _ = restricted(predictions, own, objective, vocabulary, has_own_head=has_own_head)
        return losses.total, losses.lk

    def plain(predictions, own, head, features, mask):
        logits = features @ head.T
        known, chosen = mask, jnp.arange(len(head)) if ids is None else vocabulary
        known = mask & jnp.isin(logits.argmax(axis=-1), chosen)
        p = jax.nn.softmax(logits)[..., chosen]
        log_q = jax.nn.log_softmax(predictions @ (own if has_own_head else head[chosen]).T)
        alpha = jnp.minimum(p, jnp.exp(log_q)).sum(axis=-1)
        w = jax.lax.stop_gradient(jnp.exp(-2.0 * alpha))
        cross_entropy = -(p / p.sum(axis=-1, keepdims=True) * log_q).sum(axis=-1)
        blend = w * cross_entropy + (1 - w) * (1 - alpha)
        rows = -jnp.log(alpha) if lk == "alpha" else blend
        return jnp.where(known, rows, 0.0).sum() / (mask.sum() + 1e-5)

    run = jax.jit(jax.value_and_grad(ours, argnums=(0, 1), has_aux=True))
    (total, loss), gradients = run(PREDICTIONS, own)
    np.testing.assert_allclose(total, 0.6 * loss, rtol=1e-6)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = [jnp.asarray(x, jnp.float64) for x in (PREDICTIONS, own, HEAD, FEATURES)]
        want, wanted = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(*wide, MASK)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    wanted = [0.6 * np.asarray(gradient) for gradient in wanted]
    assert_near_in_norm(gradients[0], wanted[0])
    assert_near_in_norm(gradients[1], wanted[1])


def test_lk_losses_far_from_the_target_and_at_it():
    """Where probabilities underflow the rate keeps a finite log, and at the target it is 1."""
    objective = ObjectiveConfig(lk_weight=1.0, lk="alpha")

    def of(scale, predictions):
        features = scale * FEATURES
        targets = describe_targets(HEAD, features, objective, chunk=4)
        count = MASK.sum(dtype=jnp.float32)
        run = partial(draft_losses, HEAD, targets=targets, loss_mask=MASK, num_trained=count)
        return jax.value_and_grad(lambda x: run(x, objective=objective, chunk=4).lk)(predictions)

    loss, gradient = jax.jit(of)(200.0, -200.0 * FEATURES)
    assert loss > 500 and np.isfinite(loss) and np.isfinite(gradient).all()
    loss, _ = jax.jit(of)(1.0, FEATURES)
    assert abs(loss) < 1e-6


# 11 positions in chunks that hold them all, or do not divide them.
@pytest.mark.parametrize(("chunk", "top_k"), [(1024, 4), (11, 1), (4, V + 1)])
def test_draft_losses_and_their_gradient(chunk, top_k):
    objective = ObjectiveConfig(**WEIGHTS, top_k=top_k)
    run = jax.jit(jax.value_and_grad(partial(ours, objective=objective, chunk=chunk), has_aux=True))
    (total, losses), gradient = run(PREDICTIONS, MASK)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x, jnp.float64) for x in (PREDICTIONS, HEAD, HEAD, FEATURES, MASK)]
        run = jax.jit(jax.value_and_grad(plain, has_aux=True), static_argnums=5)
        (want_total, (terms, _)), want_gradient = run(*arrays, top_k)
    got = [losses.feature, losses.probability, losses.top_k, total, losses.total]
    np.testing.assert_allclose(got, [*terms, want_total, want_total], rtol=1e-6)
    assert_near_in_norm(gradient, want_gradient)
    np.testing.assert_array_equal(gradient[~MASK], 0.0)


def test_bfloat16_keeps_small_differences_of_large_logits():
    """A part that all head rows share, which makes logits of 500, changes no loss or gradient."""
    objective = ObjectiveConfig(**WEIGHTS | {"feature_weight": 0.0}, top_k=4)
    shifted = (HEAD + 64.0).astype(jnp.bfloat16)
    heads = (shifted - 64.0).astype(jnp.bfloat16), shifted  # the difference is exact
    features, predictions = (x.astype(jnp.bfloat16) for x in (FEATURES, PREDICTIONS + 1.0))

    def run(head):
        def loss(predictions):
            targets = describe_targets(head, features, objective, chunk=4)
            count = MASK.sum(dtype=jnp.float32)
            return draft_losses(head, predictions, targets, MASK, count, objective, chunk=4).total

        value, gradient = jax.jit(jax.value_and_grad(loss))(predictions)
        np.testing.assert_allclose(jax.jit(loss)(predictions), value, rtol=1e-5)
        return value, gradient

    (loss, gradient), (shifted_loss, shifted_gradient) = map(run, heads)
    np.testing.assert_allclose(shifted_loss, loss, rtol=2e-3)
    gap = np.asarray(shifted_gradient - gradient, float)
    assert np.linalg.norm(gap) < 0.01 * np.linalg.norm(np.asarray(gradient, float))


def test_gradients_of_a_trained_head_are_summed_in_its_own_dtype():
    """In bfloat16 what the last of 128 chunks adds would be rounded to the size of the sum."""
    rows = 1.0 + draw(1, 512, D, seed=6)

    @jax.jit
    @jax.grad
    def gradient(head, dtype=jnp.bfloat16):
        return trained_log_normaliser(head, rows.astype(dtype), 4, dtype).sum()

    wide = np.asarray(rows[0].astype(jnp.bfloat16), float)
    logits = wide @ np.asarray(HEAD.astype(jnp.bfloat16), float).T
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    want = shares.T @ wide
    got = np.asarray(gradient(HEAD), float)
    assert np.linalg.norm(got - want) < 2e-3 * np.linalg.norm(want)


def test_most_likely_tokens():
    want = np.argmax(np.asarray(FEATURES, float) @ np.asarray(HEAD, float).T, axis=-1)
    np.testing.assert_array_equal(most_likely_tokens(HEAD, FEATURES, 5), want)
    narrow = FEATURES.astype(jnp.bfloat16)  # as pre-training validates: the head is wide
    agreement = most_likely_tokens(HEAD, narrow, 5) == want
    assert agreement.mean() > 0.8
    targets = describe_targets(HEAD, FEATURES, ObjectiveConfig(), chunk=5)
    np.testing.assert_array_equal(targets.tokens, want)


@pytest.mark.parametrize("chunk", [1024, 4])
def test_language_model_loss_and_its_gradient(chunk):
    def plain(head, features):
        losses = optax.softmax_cross_entropy_with_integer_labels(features @ head.T, LABELS)
        return losses.sum(where=MASK)

    def ours(head, features):
        return language_model_loss(head, features, LABELS, MASK, chunk=chunk)

    loss, gradients = jax.jit(jax.value_and_grad(ours, argnums=(0, 1)))(HEAD, FEATURES)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jnp.asarray(HEAD, jnp.float64), jnp.asarray(FEATURES, jnp.float64)
        want, want_gradients = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(*wide)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for gradient, want_gradient in zip(gradients, want_gradients, strict=True):
        assert_near_in_norm(gradient, want_gradient)


def test_nothing_trained_costs_nothing():
    none = jnp.zeros_like(MASK)

    def language_loss(features):
        return language_model_loss(HEAD, features, LABELS, none, chunk=8)

    for loss_fn in (language_loss, lambda rows: ours(rows, none, ObjectiveConfig(), 4)[0]):
        loss, gradient = jax.jit(jax.value_and_grad(loss_fn))(PREDICTIONS)
        assert loss == 0.0
        np.testing.assert_array_equal(gradient, 0.0)


def test_terms_of_weight_zero_are_not_computed():
    objective = ObjectiveConfig(top_k_weight=0.0)
    (total, losses), _ = jax.jit(
        jax.value_and_grad(partial(ours, objective=objective, chunk=4), has_aux=True)
    )(PREDICTIONS, MASK)
    assert losses.top_k == 0.0
    np.testing.assert_allclose(total, losses.feature + 0.1 * losses.probability, rtol=1e-6)
    program = jax.jit(partial(describe_targets, objective=objective, chunk=4))
    assert "top_k" not in program.lower(HEAD, FEATURES).as_text()
