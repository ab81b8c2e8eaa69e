"""Losses of draft and target, without holding the logits of all rows at once.

With p the target's distribution, z = W q the draft's logits for a predicted feature q and W the
head, the soft cross-entropy is

    - sum_v p_v log softmax(z)_v  =  logsumexp(z) - q . (sum_v p_v W_v)

and the top-K term is the same sum over K tokens. So the target's distribution is needed only as one
expected head row per term, computed once per batch and used at every depth.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.training import ObjectiveConfig
from poss_jax.model.linear import linear
from poss_jax.model.ranking import top_k
from poss_jax.model.sharding import split_batch
from poss_jax.shapes import Array, Bool, Float, Int


class TargetRows(struct.PyTreeNode):
    """Targets of the draft's prediction at every row.

    Attributes:
      features: the target's next feature.
      expected_head: mean head row under the target's distribution.
      top_expected_head: that mean's part from the K most likely tokens; None if the
        objective has no such term.
      top_mass: probability of those K tokens; None likewise.
      tokens: the most likely token that the draft can propose, in the draft's numbering.
      is_known: whether the draft can propose the target's most likely token.
    """

    features: Array  # [B T D]
    expected_head: Array  # [B T D] float32
    top_expected_head: Array | None  # [B T D] float32
    top_mass: Array | None  # [B T] float32
    tokens: Array  # [B T] int32
    is_known: Array  # [B T] bool


class DraftLosses(struct.PyTreeNode):
    """Loss terms of one depth, averaged over trained rows; `total` weighs them."""

    feature: Array  # []
    probability: Array  # []
    top_k: Array  # []
    total: Array  # []


def describe_targets(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    objective: ObjectiveConfig,
    *,
    chunk: int,
    vocabulary: Int[Array, " Vd"] | None = None,
    draft_head: Float[Array, "Vd D"] | None = None,
) -> TargetRows:
    """Reduces the target's distribution at every row to what the loss needs.

    Args:
      head: LM head of the target.
      features: the target's final hidden state one token later, at every row.
      objective: a top-K term of weight 0 is left out.
      chunk: positions per sequence whose logits are in memory at once. Static.
      vocabulary: the tokens that the draft can propose, to which the distribution is restricted;
        None: all.
      draft_head: LM head of the draft, a row per token of `vocabulary`; None: these rows of `head`.
    """
    if draft_head is None:
        draft_head = head if vocabulary is None else head[vocabulary]

    def of_chunk(rows: Array) -> tuple[Array | None, ...]:
        logits, read_by = _logits(rows, head), draft_head.astype(rows.dtype)
        is_known = jnp.ones(rows.shape[:-1], bool)
        if vocabulary is not None:
            is_known = jnp.zeros(len(head), bool).at[vocabulary].set(True)[logits.argmax(axis=-1)]
            logits = logits[..., vocabulary]
        probabilities = jax.nn.softmax(logits)
        expected = _mean_head(read_by, probabilities)
        tokens = jnp.argmax(probabilities, axis=-1).astype(jnp.int32)
        if not objective.top_k_weight:
            return expected, None, None, tokens, is_known
        best = top_k(probabilities, min(objective.top_k, len(read_by)))
        top, ids = map(split_batch, best)  # `top_k` returns it replicated, as decoding needs
        rows_of_top = read_by[ids].astype(jnp.float32)
        top_expected = jnp.einsum("BTk,BTkD->BTD", top, rows_of_top)
        return expected, top_expected, top.sum(axis=-1), tokens, is_known

    return TargetRows(features, *_by_chunks(jax.checkpoint(of_chunk), chunk, features))


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
) -> DraftLosses:
    """Loss of the features predicted at one depth.

    Args:
      head: LM head that the predictions are multiplied by, in their dtype.
      predictions: features.
      targets: feature and expected head row to compare every prediction with.
      loss_mask: trained rows; a row whose best token the draft cannot propose counts in the
        feature term only.
      num_trained: trained rows in the whole batch, of which this may be a part: the denominator.
      objective: weights of the terms.
      chunk: see `describe_targets`.
      trains_head: whether the head is trained, too. Static.
      deviations: units of the feature term's differences, per dimension; None: 1.
    """
    normaliser: Any = trained_log_normaliser if trains_head else log_normaliser
    dtype, predictions = predictions.dtype, predictions.astype(jnp.float32)
    log_z = normaliser(head, predictions, chunk, dtype)
    difference = predictions - targets.features.astype(jnp.float32)
    difference = difference if deviations is None else difference / deviations[None, None]
    known = loss_mask & targets.is_known

    def averaged(mask: Array, per_row: Array) -> Array:
        return jnp.where(mask, per_row, 0.0).sum() / (num_trained + 1e-5)

    feature = averaged(loss_mask, _smooth_l1(difference).mean(axis=-1))
    probability = averaged(known, log_z - (predictions * targets.expected_head).sum(axis=-1))
    of_top = jnp.zeros(())
    mass, expected = targets.top_mass, targets.top_expected_head
    if mass is not None and expected is not None:
        of_top = averaged(known, mass * log_z - (predictions * expected).sum(axis=-1))
    total = (
        objective.feature_weight * feature
        + objective.probability_weight * probability
        + objective.top_k_weight * of_top
    )
    return DraftLosses(feature=feature, probability=probability, top_k=of_top, total=total)


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

    Args:
      head: LM head.
      features: rows that it is multiplied by.
      chunk: see `describe_targets`.
      dtype: dtype of the product's operands. Gradients are summed in the arguments' dtype.
    """

    def of_chunk(rows: Array) -> Array:
        return jax.nn.logsumexp(_trained_logits(rows.astype(dtype), head), axis=-1)

    return _by_chunks(jax.checkpoint(of_chunk), chunk, features)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def log_normaliser(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], chunk: int, dtype: Any
) -> Float[Array, "B T"]:
    """Log of every row's softmax denominator, under a frozen head.

    Its gradient is the head's mean row under the softmax. If needed, it is computed while the
    logits are in memory instead of computing them again. Arguments: see `trained_log_normaliser`.
    """

    def of_chunk(rows: Array) -> Array:
        return jax.nn.logsumexp(_logits(rows.astype(dtype), head), axis=-1)

    return _by_chunks(of_chunk, chunk, features)


def _log_normaliser_forward(head: Array, features: Array, chunk: int, dtype: Any):
    def of_chunk(rows: Array) -> tuple[Array, Array]:
        logits = _logits(rows.astype(dtype), head)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return log_z, _mean_head(head, jnp.exp(logits - log_z[..., None]))

    return _by_chunks(of_chunk, chunk, features)


def _log_normaliser_backward(chunk: int, dtype: Any, expected_head: Array, grad_log_z: Array):
    del chunk, dtype
    return None, expected_head * grad_log_z[..., None]


log_normaliser.defvjp(_log_normaliser_forward, _log_normaliser_backward)


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


def _smooth_l1(difference: Array) -> Array:
    size = jnp.abs(difference)
    return jnp.where(size < 1.0, 0.5 * difference**2, size - 0.5)


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
