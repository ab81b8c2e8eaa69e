"""The recursive training step as its definition reads: the oracle of the real one.

One product over all T x T scores per version, whole logits, nothing cut in chunks, nothing computed
twice, no documents: rows are texts of one length. Tested with the same recorded numbers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig
from poss_jax.config.training import ObjectiveConfig
from poss_jax.model.families import family_of
from poss_jax.model.layers import merge_heads, rope_frequencies
from poss_jax.shapes import Array, Params


class PlainBatch(NamedTuple):
    features: Array  # [B T D] input
    embedded: Array  # [B T D] of the next tokens
    targets: Array  # [B T D] the next features
    loss_mask: Array  # [B T]


class PlainStep(NamedTuple):
    losses: list[Array]  # R x []
    gradients: Params  # of their sum; specialists stacked
    reach: list[Array]  # R x [], mean weight of the rows


def plain_gradients(
    draft: Params, head: Array, config: DraftConfig, objective: ObjectiveConfig, batch: PlainBatch
) -> PlainStep:
    versions, losses, total = [batch.features], [], jax.tree.map(jnp.zeros_like, draft)
    reach, mean_reach = jnp.ones_like(batch.loss_mask, jnp.float32), []
    for depth in range(config.trained_depth):
        index = config.specialist_at(depth)

        def loss_fn(draft: Params, versions: list[Array], index: int = index, reach=reach):
            specialist = jax.tree.map(lambda leaf: leaf[index], draft["specialists"])
            prediction = _predict(draft, specialist, config, batch.embedded, versions)
            return _loss(prediction, head, objective, batch, reach), prediction

        (loss, prediction), gradients = jax.value_and_grad(loss_fn, has_aux=True)(draft, versions)
        total = jax.tree.map(jnp.add, total, gradients)
        losses.append(loss)
        mean_reach.append(_average(reach, batch))
        if objective.depth_weighting == "reach":
            overlap = jnp.minimum(
                *(jax.nn.softmax(x @ head.T) for x in (batch.targets, prediction))
            )
            reached = reach * overlap.sum(axis=-1)
            reach = jnp.concatenate([jnp.zeros_like(reached[:, :1]), reached[:, :-1]], axis=1)
        shifted = jnp.concatenate([batch.features[:, :1], prediction[:, :-1]], axis=1)
        versions = [*versions, jax.lax.stop_gradient(shifted)]
    return PlainStep(losses, total, mean_reach)


def _predict(
    draft: Params, specialist: Params, config: DraftConfig, embedded: Array, versions: list[Array]
) -> Array:
    family = family_of(config)
    layer = family.layer(config).bind({"params": specialist})
    B, T, _ = embedded.shape
    row = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    frequencies = rope_frequencies(config.layer.rope, config.layer.head_dim, jnp.full(B, T))
    x = [family.join(draft, config, embedded, features) for features in versions]
    q = layer.attention.queries(layer.normed(x[-1]), row, frequencies)
    K, H = config.layer.num_kv_heads, config.layer.head_dim
    q = q.reshape(B, K, -1, T, H)
    both = [layer.attention.keys_values(layer.normed(version), row, frequencies) for version in x]
    behind = jnp.arange(T)[:, None] - jnp.arange(T)[None]
    shown = jnp.maximum(0, len(versions) - 1 - behind)  # version at every row and column
    scores = jnp.full((B, K, q.shape[2], T, T), -jnp.inf)
    for version, (k, _) in enumerate(both):
        of_version = jnp.einsum("BKGTH,BKSH->BKGTS", q, k) * H**-0.5
        can_attend = (shown == version) & (behind >= 0)
        scores = jnp.where(can_attend[None, None, None], of_version, scores)
    weights = jax.nn.softmax(scores, axis=-1)
    attended = sum(
        jnp.einsum(
            "BKGTS,BKSH->BKGTH", jnp.where((shown == version)[None, None, None], weights, 0.0), v
        )
        for version, (_, v) in enumerate(both)
    )
    return layer.finish(x[-1], merge_heads(jnp.asarray(attended).reshape(B, -1, T, H)))


def _loss(
    prediction: Array, head: Array, objective: ObjectiveConfig, batch: PlainBatch, reach: Array
) -> Array:
    target = jax.nn.softmax(batch.targets @ head.T)
    products = target * jax.nn.log_softmax(prediction @ head.T)
    top, ids = jax.lax.top_k(target, min(objective.top_k, len(head)))
    of_top = jnp.take_along_axis(jax.nn.log_softmax(prediction @ head.T), ids, axis=-1) * top
    size = jnp.abs(prediction - batch.targets)
    per_row = (
        objective.feature_weight * jnp.where(size < 1, size**2 / 2, size - 0.5).mean(axis=-1)
        - objective.probability_weight * products.sum(axis=-1)
        - objective.top_k_weight * of_top.sum(axis=-1)
    )
    if objective.lk_weight:
        alpha = jnp.minimum(target, jax.nn.softmax(prediction @ head.T)).sum(axis=-1)
        share = jax.lax.stop_gradient(jnp.exp(-objective.lk_eta * alpha))
        blend = (1 - share) * (1 - alpha) - share * products.sum(axis=-1)
        per_row += objective.lk_weight * (-jnp.log(alpha) if objective.lk == "alpha" else blend)
    return _average(per_row * reach, batch)


def _average(per_row: Array, batch: PlainBatch) -> Array:
    mask = batch.loss_mask.astype(jnp.float32)
    return (per_row * mask).sum() / (mask.sum() + 1e-5)
