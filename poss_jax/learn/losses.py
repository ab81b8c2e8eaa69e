"""Losses of draft and target, without holding the logits of all rows at once.

With p the target's distribution, z = W q the draft's logits for a predicted feature q and W the
head, the soft cross-entropy is

    - sum_v p_v log softmax(z)_v  =  logsumexp(z) - q . (sum_v p_v W_v)

and the top-K term is the same sum over K tokens. So the target's distribution is needed only as one
expected head row per term, computed once per batch and used at every depth.

The LK losses (arXiv 2602.23881) raise the rate at which tokens drawn from q = softmax(z) are
accepted, alpha = sum_v min(p_v, q_v), which is 1 minus the total variation TV of p and q:

    alpha    - log alpha
    lambda   w CE(p, q) + (1 - w) TV(p, q)    with w = exp(-eta alpha), a constant of the gradient

CE stands for the paper's KL, from which the entropy of p, a constant, is left out. alpha counts p
as it is, CE as renormalised over the tokens that the draft can propose (the authors' code in
SpecForge). w is each row's own, as in speculators; the paper's is the mean of a batch, by which a
row's gradient would depend on its neighbours.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.training import ObjectiveConfig
from poss_jax.model.linear import linear
from poss_jax.model.ranking import top_k
from poss_jax.model.sharding import split_batch
from poss_jax.shapes import Array, Bool, Float, Int


class Likely(NamedTuple):
    """The target's distribution at every row, over the tokens that the draft can propose."""

    head: Array  # [V D], the target's head rows for these tokens
    features: Array  # [B T D], the target's features
    log_z: Array  # [B T] float32, log of the softmax's denominator over all of its tokens

    def log_p(self, features: Array, log_z: Array) -> Float[Array, "B T V"]:
        """Log-probabilities at some of the rows."""
        return lax.stop_gradient(_logits(features, self.head) - log_z[..., None])


class TargetRows(struct.PyTreeNode):
    """Targets of the draft's prediction at every row."""

    features: Array  # [B T D], the target's next feature
    expected_head: Array  # [B T D] float32, mean head row under the target's distribution
    # that mean's part from the K most likely tokens; None if the objective has no such term
    top_expected_head: Array | None  # [B T D] float32
    top_mass: Array | None  # [B T] float32, probability of those K tokens; None likewise
    # the target's distribution; None if the objective compares no probabilities by token
    likely: Likely | None
    # the most likely token that the draft can propose, in the draft's numbering
    tokens: Array  # [B T] int32
    is_known: Array  # [B T] bool, whether the draft can propose the target's most likely token


class DraftLosses(struct.PyTreeNode):
    """Loss terms of one depth, averaged over trained rows; `total` weighs them.

    `lk` is None unless the objective has it, `reach`, the mean weight of the rows, unless they are
    weighted.
    """

    feature: Array  # []
    probability: Array  # []
    top_k: Array  # []
    lk: Array | None  # []
    total: Array  # []
    reach: Array | None  # []


def describe_targets(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    objective: ObjectiveConfig,
    *,
    chunk: int,
    vocabulary: Int[Array, " Vd"] | None = None,
    draft_head: Float[Array, "Vd width"] | None = None,
) -> TargetRows:
    """Reduces the target's distribution at every row to what the loss needs.

    Args:
      head: LM head of the target.
      features: the target's final hidden state one token later, at every row.
      objective: top-K and LK terms of weight 0 are left out.
      chunk: positions per sequence whose logits are in memory at once. Static.
      vocabulary: the tokens that the draft can propose, to which the distribution is restricted;
        None: all.
      draft_head: LM head of the draft, a row per token of `vocabulary`; None: these rows of `head`.
    """
    proposed = head if vocabulary is None else head[vocabulary]
    draft_head = proposed if draft_head is None else draft_head
    needs_likely = objective.lk_weight or objective.depth_weighting == "reach"

    def of_chunk(rows: Array) -> tuple[Array | None, ...]:
        logits, read_by = _logits(rows, head), draft_head.astype(rows.dtype)
        is_known = jnp.ones(rows.shape[:-1], bool)
        log_z = jax.nn.logsumexp(logits, axis=-1) if needs_likely else None
        if vocabulary is not None:
            is_known = jnp.zeros(len(head), bool).at[vocabulary].set(True)[logits.argmax(axis=-1)]
            logits = logits[..., vocabulary]
        probabilities = jax.nn.softmax(logits)
        expected = _mean_head(read_by, probabilities)
        tokens = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        if not objective.top_k_weight:
            return log_z, expected, None, None, tokens, is_known
        best = top_k(probabilities, min(objective.top_k, len(read_by)))
        top, ids = map(split_batch, best)  # `top_k` returns it replicated, as decoding needs
        rows_of_top = read_by[ids].astype(jnp.float32)
        top_expected = jnp.einsum("BTk,BTkD->BTD", top, rows_of_top)
        return log_z, expected, top_expected, top.sum(axis=-1), tokens, is_known

    log_z, *means, tokens, is_known = _by_chunks(jax.checkpoint(of_chunk), chunk, features)
    likely = None if log_z is None else Likely(proposed, features, log_z)
    expected, top_expected, top_mass = means
    return TargetRows(features, expected, top_expected, top_mass, likely, tokens, is_known)


def draft_losses(
    head: Float[Array, "V D"],
    predictions: Float[Array, "B T D"],
    targets: TargetRows,
    loss_mask: Bool[Array, "B T"],
    num_trained: Float[Array, ""],
    objective: ObjectiveConfig,
    *,
    chunk: int,
    trains_head: bool = False,
    deviations: Float[Array, " D"] | None = None,
    reach: Float[Array, "B T"] | None = None,
) -> DraftLosses:
    """Loss of the features predicted at one depth.

    Args:
      head: LM head that the predictions are multiplied by, in their dtype.
      targets: feature and expected head row to compare every prediction with.
      loss_mask: trained rows; a row whose best token the draft cannot propose counts in the
        feature term only.
      num_trained: trained rows in the whole batch, of which this may be a part: the denominator.
      chunk: see `describe_targets`.
      trains_head: whether the head is trained, too. Static.
      deviations: units of the feature term's differences, per dimension; None: 1.
      reach: weights of the rows; None: 1.
    """
    normalise: Any = trained_log_normaliser if trains_head else log_normaliser
    accept: Any = trained_log_acceptance if trains_head else log_acceptance
    dtype, predictions = predictions.dtype, predictions.astype(jnp.float32)
    log_z = normalise(head, predictions, chunk, dtype)
    draftable = loss_mask & targets.is_known

    def averaged(mask: Array, per_row: Array) -> Array:
        weighted = per_row if reach is None else per_row * reach
        return jnp.where(mask, weighted, 0.0).sum() / (num_trained + 1e-5)

    feature = averaged(loss_mask, _feature_loss(predictions, targets.features, deviations))
    cross_entropy = log_z - (predictions * targets.expected_head).sum(axis=-1)
    probability = averaged(draftable, cross_entropy)
    of_top = jnp.zeros(())
    mass, expected = targets.top_mass, targets.top_expected_head
    if mass is not None and expected is not None:
        of_top = averaged(draftable, mass * log_z - (predictions * expected).sum(axis=-1))
    total = (
        objective.feature_weight * feature
        + objective.probability_weight * probability
        + objective.top_k_weight * of_top
    )
    lk = None
    if objective.lk_weight and targets.likely is not None:
        log_alpha = accept(head, predictions, targets.likely, chunk, dtype)
        lk = averaged(draftable, _lk_loss(log_alpha, cross_entropy, objective))
        total += objective.lk_weight * lk
    mean_reach = None if reach is None else averaged(loss_mask, jnp.ones_like(reach))
    return DraftLosses(
        feature=feature, probability=probability, top_k=of_top, lk=lk, total=total, reach=mean_reach
    )


def acceptance_rate(
    head: Float[Array, "V D"],
    predictions: Float[Array, "B T D"],
    targets: TargetRows,
    *,
    chunk: int,
) -> Float[Array, "B T"]:
    """Probability that the token drafted at a row is accepted at temperature 1; has no gradient.

    Arguments: see `draft_losses`; the targets have `likely`.
    """
    assert targets.likely is not None, "see describe_targets"
    head, rows = lax.stop_gradient((head, predictions.astype(jnp.float32)))
    dtype = predictions.dtype
    return jnp.exp(trained_log_acceptance(head, rows, targets.likely, chunk, dtype))


def language_model_loss(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    chunk: int,
) -> Float[Array, ""]:
    """Sums the cross-entropies, in nats, of trained rows' labels under the model."""

    def of_chunk(rows: Array, labels: Array, loss_mask: Array) -> Array:
        logits = _trained_logits(rows, head)
        label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        return jnp.where(loss_mask, jax.nn.logsumexp(logits, axis=-1) - label_logits, 0.0)

    return _by_chunks(jax.checkpoint(of_chunk), chunk, features, labels, loss_mask).sum()


def most_likely_tokens(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], chunk: int
) -> Int[Array, "B T"]:
    """Most likely token at every row."""

    def of_chunk(rows: Array) -> Array:
        return jnp.argmax(_logits(rows, head), axis=-1).astype(jnp.int32)

    return _by_chunks(of_chunk, chunk, features)


def trained_log_normaliser(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], chunk: int, dtype: Any
) -> Float[Array, "B T"]:
    """Log of every row's softmax denominator, under a trained head.

    The product's operands have `dtype`. Gradients are summed in the arguments' dtype.
    """

    def of_chunk(rows: Array) -> Array:
        return jax.nn.logsumexp(_trained_logits(rows.astype(dtype), head), axis=-1)

    return _by_chunks(jax.checkpoint(of_chunk), chunk, features)


def log_normaliser(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], chunk: int, dtype: Any
) -> Float[Array, "B T"]:
    """Log of every row's softmax denominator, under a frozen head.

    Its gradient is the head's mean row under the softmax. If needed, it is computed while the
    logits are in memory instead of computing them again. Arguments: see `trained_log_normaliser`.
    """
    head = lax.stop_gradient(head)

    def of_chunk(rows: Array) -> tuple[Array, Array]:
        logits = _logits(rows.astype(dtype), head)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return log_z, _mean_head(head, jnp.exp(logits - log_z[..., None]))

    return _with_gradient(partial(_by_chunks, of_chunk, chunk), features)


def trained_log_acceptance(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    likely: Likely,
    chunk: int,
    dtype: Any,
) -> Float[Array, "B T"]:
    """Log of alpha, the rate at which drafted tokens are accepted, under a trained head.

    Arguments: see `trained_log_normaliser`; `likely` is the target's distribution.
    """

    def of_chunk(rows: Array, *of_target: Array) -> Array:
        log_q = jax.nn.log_softmax(_trained_logits(rows.astype(dtype), head))
        return jax.nn.logsumexp(jnp.minimum(likely.log_p(*of_target), log_q), axis=-1)

    return _by_chunks(jax.checkpoint(of_chunk), chunk, features, likely.features, likely.log_z)


def log_acceptance(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    likely: Likely,
    chunk: int,
    dtype: Any,
) -> Float[Array, "B T"]:
    """Log of alpha under a frozen head, whose gradient is computed like `log_normaliser`'s.

    With the tokens B that the draft finds less likely than the target, and s their share of alpha,
    the gradient is s times (mean head row under q over B - mean head row under q).
    """
    head, of_target = lax.stop_gradient((head, (likely.features, likely.log_z)))

    def of_chunk(rows: Array, *of_target: Array) -> tuple[Array, Array]:
        log_q = jax.nn.log_softmax(_logits(rows.astype(dtype), head))
        log_p = likely.log_p(*of_target)
        log_alpha = jax.nn.logsumexp(jnp.minimum(log_p, log_q), axis=-1)
        shares = jnp.where(log_q < log_p, jnp.exp(log_q - log_alpha[..., None]), 0.0)
        share = shares.sum(axis=-1, keepdims=True)
        towards = _mean_head(head, shares) - _mean_head(head, jnp.exp(log_q))
        return log_alpha, jnp.where(share > 0, share * towards, 0.0)

    return _with_gradient(lambda rows: _by_chunks(of_chunk, chunk, rows, *of_target), features)


def _with_gradient(function: Callable[[Array], tuple[Array, Array]], features: Array) -> Array:
    """Calls a function of rows that returns values [B T] and their gradients [B T D]."""

    def values(features: Array) -> tuple[Array, Callable[[Array], Array]]:
        value, gradient = function(features)
        return value, lambda grad_value: gradient * grad_value[..., None]

    run: Any = jax.custom_gradient(values)  # has the type of `values`
    return run(features)


def _feature_loss(predictions: Array, features: Array, deviations: Array | None) -> Array:
    """Feature loss of every row [B T]; 0 if the draft has another width than its target."""
    if predictions.shape != features.shape:
        return jnp.zeros(predictions.shape[:-1])
    difference = predictions - features.astype(jnp.float32)
    difference = difference if deviations is None else difference / deviations[None, None]
    size = jnp.abs(difference)
    return jnp.where(size < 1.0, 0.5 * difference**2, size - 0.5).mean(axis=-1)


def _lk_loss(log_alpha: Array, cross_entropy: Array, objective: ObjectiveConfig) -> Array:
    """LK loss of every row [B T]; see the head of this file."""
    if objective.lk == "alpha":
        return -log_alpha
    alpha = jnp.exp(log_alpha)
    w = lax.stop_gradient(jnp.exp(-objective.lk_eta * alpha))
    return w * cross_entropy + (1.0 - w) * (1.0 - alpha)


def _logits(rows: Array, head: Array) -> Array:
    """Logits of a product in the rows' dtype, kept in float32; no gradients."""
    head = head.astype(rows.dtype)
    return jnp.einsum("...D,VD->...V", rows, head, preferred_element_type=jnp.float32)


def _trained_logits(rows: Array, head: Array) -> Array:
    """Logits of a product in the rows' dtype, rounded to it like its gradients.

    A wider head is rounded inside the loop over chunks, so its gradient is summed over the chunks
    in its own dtype.
    """
    return linear(rows, head.astype(rows.dtype)).astype(jnp.float32)


def _mean_head(head: Array, probabilities: Array) -> Array:
    """Averages head rows under probabilities [... V], float32."""
    weights = probabilities.astype(head.dtype)
    mean = jnp.einsum("...V,VD->...D", weights, head, preferred_element_type=jnp.float32)
    return mean / weights.sum(axis=-1, keepdims=True, dtype=jnp.float32)  # rounded: not exactly 1


def _by_chunks(function: Callable[..., Any], chunk: int, *arrays: Array) -> Any:
    """Applies a function of [B t ...] arrays to `chunk` of the T positions at a time.

    Every sequence is cut the same way, so sequences stay on their devices.
    """
    B, T = arrays[0].shape[:2]
    if chunk >= T:
        return function(*arrays)

    def cut(x: Array) -> Array:
        widths = [(0, -T % chunk if axis == 1 else 0) for axis in range(x.ndim)]
        parts = jnp.pad(x, widths).reshape(B, -1, chunk, *x.shape[2:])
        return split_batch(jnp.moveaxis(parts, 1, 0), axis=1)

    def joined(parts: Array) -> Array:
        return jnp.moveaxis(parts, 0, 1).reshape(B, -1, *parts.shape[3:])[:, :T]

    return jax.tree.map(joined, lax.map(lambda parts: function(*parts), tuple(map(cut, arrays))))
