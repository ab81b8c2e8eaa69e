"""Losses of draft and target, without ever holding the logits of all rows at once.

With p the target's distribution, z = W q the draft's logits for a predicted feature q and W the
head, the soft cross-entropy is

    - sum_v p_v log softmax(z)_v  =  logsumexp(z) - q . (sum_v p_v W_v)

and the top-K term is the same sum over K tokens. All that is needed of the target's distribution
is therefore one expected head row per term: computed once per batch, used at every depth.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config import ObjectiveConfig
from poss_jax.layers import linear
from poss_jax.shapes import Array, Bool, Float, Int


class TargetRows(struct.PyTreeNode):
    """What the draft is to predict at every row.

    Attributes:
      features: the target's next feature.
      expected_head: mean head row under the target's distribution.
      top_expected_head: the part of that mean due to the K most likely tokens.
      top_mass: probability of those K tokens.
      tokens: the target's most likely token.
    """

    features: Array  # [B T D]
    expected_head: Array  # [B T D] float32
    top_expected_head: Array  # [B T D] float32
    top_mass: Array  # [B T] float32
    tokens: Array  # [B T] int32


class DraftLosses(struct.PyTreeNode):
    """Loss terms of one depth, averaged over trained rows; `total` weighs them."""

    feature: Array  # []
    probability: Array  # []
    top_k: Array  # []
    total: Array  # []


def describe_targets(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], objective: ObjectiveConfig
) -> TargetRows:
    """Takes from the target's distribution at every row what the loss needs of it."""

    def of_chunk(rows: Array) -> tuple[Array, ...]:
        logits = linear(rows, head).astype(jnp.float32)
        probabilities = jax.nn.softmax(logits)
        top, ids = lax.top_k(probabilities, min(objective.top_k, len(head)))
        wide_head = head.astype(jnp.float32)
        expected = probabilities @ wide_head
        top_expected = jnp.einsum("nk,nkd->nd", top, wide_head[ids])
        return expected, top_expected, top.sum(axis=-1), ids[:, 0]

    parts = _by_chunks(of_chunk, features, objective.rows_per_chunk)
    return TargetRows(features, *parts)


def draft_losses(
    head: Float[Array, "V D"],
    predictions: Float[Array, "B T D"],
    targets: TargetRows,
    loss_mask: Bool[Array, "B T"],
    objective: ObjectiveConfig,
) -> DraftLosses:
    """Loss of the features predicted at one depth (fixtures' README, section 4.4)."""
    predictions = predictions.astype(jnp.float32)
    targets_wide = targets.features.astype(jnp.float32)
    normaliser = loss_mask.sum(dtype=jnp.float32) + 1e-5

    def averaged(per_row: Array) -> Array:
        return jnp.where(loss_mask, per_row, 0.0).sum() / normaliser

    log_z = logsumexp_rows(head, predictions.astype(head.dtype), objective.rows_per_chunk)
    feature = averaged(_smooth_l1(predictions - targets_wide).mean(axis=-1))
    probability = averaged(log_z - (predictions * targets.expected_head).sum(axis=-1))
    top_k = averaged(
        targets.top_mass * log_z - (predictions * targets.top_expected_head).sum(axis=-1)
    )
    total = (
        objective.feature_weight * feature
        + objective.probability_weight * probability
        + objective.top_k_weight * top_k
    )
    return DraftLosses(feature=feature, probability=probability, top_k=top_k, total=total)


def language_model_loss(
    head: Float[Array, "V D"],
    features: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    rows_per_chunk: int,
) -> Float[Array, ""]:
    """Mean cross-entropy, in nats per token, of the labels under the model."""
    log_z = logsumexp_rows(head, features, rows_per_chunk)
    label_logits = (features * jnp.take(head, labels, axis=0)).sum(axis=-1).astype(jnp.float32)
    per_row = jnp.where(loss_mask, log_z - label_logits, 0.0)
    return per_row.sum() / jnp.maximum(loss_mask.sum(dtype=jnp.float32), 1.0)


def logsumexp_rows(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], rows_per_chunk: int
) -> Float[Array, "B T"]:
    """Logarithm of the softmax denominator of every row.

    Where there are several chunks, their logits are computed again for gradients.
    """

    def of_chunk(rows: Array) -> tuple[Array]:
        return (jax.nn.logsumexp(linear(rows, head).astype(jnp.float32), axis=-1),)

    is_one_chunk = features.shape[0] * features.shape[1] <= rows_per_chunk
    function = of_chunk if is_one_chunk else jax.checkpoint(of_chunk)
    return _by_chunks(function, features, rows_per_chunk)[0]


def most_likely_tokens(
    head: Float[Array, "V D"], features: Float[Array, "B T D"], rows_per_chunk: int
) -> Int[Array, "B T"]:
    """Most likely token at every row."""

    def of_chunk(rows: Array) -> tuple[Array]:
        return (jnp.argmax(linear(rows, head), axis=-1).astype(jnp.int32),)

    return _by_chunks(of_chunk, features, rows_per_chunk)[0]


def _smooth_l1(difference: Array) -> Array:
    size = jnp.abs(difference)
    return jnp.where(size < 1.0, 0.5 * difference**2, size - 0.5)


def _by_chunks(
    function: Callable[[Array], tuple[Array, ...]], rows: Array, rows_per_chunk: int
) -> tuple[Array, ...]:
    """Maps [n D] -> tuple of [n ...] over all rows of [B T D], so many rows at a time."""
    B, T, D = rows.shape
    flat = rows.reshape(B * T, D)
    if len(flat) > rows_per_chunk:
        padded = jnp.pad(flat, ((0, -len(flat) % rows_per_chunk), (0, 0)))
        parts = lax.map(function, padded.reshape(-1, rows_per_chunk, D))
        parts = tuple(part.reshape(-1, *part.shape[2:])[: len(flat)] for part in parts)
    else:
        parts = function(flat)
    return tuple(part.reshape(B, T, *part.shape[1:]) for part in parts)
