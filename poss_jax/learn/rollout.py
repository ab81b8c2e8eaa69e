"""The recursion of HASS and PosS: each draft depth reads the features earlier depths predicted.

Version k of a row is its feature as drafted k steps ahead; version 0 is the target's own. At depth
d the query of row r comes from version d, and column i shows version max(0, d - (r - i)):

    columns  ... r-3  r-2  r-1   r          d = 3
    version  ...  0    1    2    3          versions of one age stand on a diagonal

So a row attends version 0 up to column r - d, by ordinary causal attention, and d diagonal terms,
one product per row each. What the softmax over version 0 gave is kept as a mean and a sum, to which
one age after the other is added: nothing but the versions themselves grows with the depth.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config import DraftConfig
from poss_jax.model.blockwise import NOTHING, Attended, attend_documents, group_heads, ungroup_heads
from poss_jax.model.documents import positions_in
from poss_jax.model.families.eagle import KEY_VALUE, fuse_features, fuse_tokens
from poss_jax.model.layers import DecoderLayer, rope_frequencies
from poss_jax.model.sharding import split_batch
from poss_jax.shapes import Array, Float, Int, Params


class DraftInputs(struct.PyTreeNode):
    """Rows of text as the draft sees them: pairs (feature f_j, token x_{j+1}).

    Attributes:
      features: input features, from the target (perhaps with noise).
      embedded: embeddings of the next tokens.
      documents: which document of its row a pair belongs to.
    """

    features: Array  # [B T D]
    embedded: Array  # [B T D]
    documents: Array  # [B T] int32


class Versions(NamedTuple):
    """The versions of all rows.

    The newest waits apart until the next depth puts it in its place: writing it only then, before
    anything is read, lets the compiler use one buffer for all depths.

    Attributes:
      known: versions 0 to d-1 at depth d.
      newest: version d.
    """

    known: Array  # [R B T D]
    newest: Array  # [B T D]


def first_version(features: Float[Array, "B T D"], depth: int) -> Versions:
    """What depth 0 reads, and room for what `depth` depths read."""
    known = jnp.zeros((depth, *features.shape), features.dtype)
    return Versions(split_batch(known, axis=1), features)


def put_newest(versions: Versions, depth: Int[Array, ""]) -> Float[Array, "R B T D"]:
    """Versions 0 to `depth`."""
    return lax.dynamic_update_index_in_dim(versions.known, versions.newest, depth, 0)


def next_version(prediction: Float[Array, "B T D"], inputs: DraftInputs) -> Float[Array, "B T D"]:
    """The version after a prediction, detached; row 0 of a document keeps the target's feature."""
    is_first = (positions_in(inputs.documents) == 0)[..., None]
    newest = jnp.where(is_first, inputs.features, jnp.roll(prediction, 1, axis=1))
    return lax.stop_gradient(split_batch(newest))


def predict(
    fc: Params,
    specialist: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    versions: Float[Array, "R B T D"],
    depth: Int[Array, ""],
    *,
    block: int,
) -> Float[Array, "B T D"]:
    """Features one depth predicts at every row (row r: of f_{r+1}, drafted `depth` + 1 ahead).

    Args:
      fc: the fusion layer.
      specialist: the layer that serves this depth.
      config: shape of the draft.
      inputs: pairs of the target.
      versions: versions 0 to `depth`.
      depth: 0-based; may be traced.
      block: rows and columns whose scores are held at a time. Static.
    """
    layer = DecoderLayer(config.layer, has_input_norm=False).bind({"params": specialist})
    position = positions_in(inputs.documents)
    B, T = position.shape
    frequencies = rope_frequencies(config.layer.rope, config.layer.head_dim, jnp.full(B, T))
    of_tokens = split_batch(fuse_tokens(fc, inputs.embedded))
    x = split_batch(of_tokens + fuse_features(fc, versions[depth]))
    q = group_heads(layer.queries(x, position, frequencies), config.layer.num_kv_heads)
    attention = {n: p for n, p in specialist["attention"].items() if n in KEY_VALUE}
    weights = {"fc": fc, "attention": attention, "of_tokens": of_tokens}
    # Differs from PosS: forbidden columns are left out of the softmax, as decoding leaves them out;
    # there they count as scores of zero, so that features depend on the padded length.
    k, v = _keys_values(config, weights, versions[0], position, frequencies)
    base = attend_documents(q, k, v, inputs.documents, depth, block=block)
    mean = _add_ages(config, weights, q, base, versions, depth, position, frequencies)
    return layer.finish(x, ungroup_heads(mean).astype(x.dtype))


def unroll(
    draft: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    depth: int,
    visit: Callable[[Array], Any],
    *,
    block: int,
) -> Any:
    """Predicts every depth and returns what `visit` makes of [B T D] predictions, stacked.

    Args:
      draft: `{"fc", "specialists"}`, specialists stacked.
      config: its shape.
      inputs: pairs of the target.
      depth: R.
      visit: called once, while tracing.
      block: see `predict`.
    """

    def body(versions: Versions, step: tuple[Array, Array]) -> tuple[Versions, Any]:
        d, index = step
        known = put_newest(versions, d)
        specialist = jax.tree.map(lambda leaf: leaf[index], draft["specialists"])
        prediction = predict(draft["fc"], specialist, config, inputs, known, d, block=block)
        return Versions(known, next_version(prediction, inputs)), visit(prediction)

    return lax.scan(body, first_version(inputs.features, depth), depths(config, depth))[1]


def depths(config: DraftConfig, depth: int) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Every depth and the specialist that serves it, to scan over."""
    return jnp.arange(depth), jnp.array([config.specialist_at(d) for d in range(depth)])


def _keys_values(
    config: DraftConfig, weights: Params, features: Array, position: Array, frequencies: Array
) -> tuple[Array, Array]:
    """Keys and values [B K T H] of the rows of one version."""
    params = {"params": {"attention": weights["attention"]}}
    layer = DecoderLayer(config.layer, has_input_norm=False).bind(params)
    x = weights["of_tokens"] + fuse_features(weights["fc"], features)
    return layer.keys_values(x, position, frequencies)


def _sum_ages_mean(
    config: DraftConfig,
    weights: Params,
    q: Float[Array, "B K G T H"],
    base: Attended,
    versions: Float[Array, "R B T D"],
    depth: Int[Array, ""],
    position: Int[Array, "B T"],
    frequencies: Float[Array, "B half"],
) -> Float[Array, "B K G T H"]:
    """Adds the diagonals of every age below `depth` to a softmax over version 0."""
    return _sum_ages(config, weights, q, base, versions, depth, position, frequencies).mean


def _sum_ages(
    config: DraftConfig,
    weights: Params,
    q: Array,
    base: Attended,
    versions: Array,
    depth: Array,
    position: Array,
    frequencies: Array,
) -> Attended:
    wide_q = q.astype(jnp.float32)

    def add(age: Array, so_far: Attended) -> Attended:
        k, v = _keys_values(config, weights, versions[depth - age], position, frequencies)
        score = _diagonal_scores(wide_q, k, age, position)
        log_sum = jnp.logaddexp(so_far.log_sum, score)
        kept, share = jnp.exp(so_far.log_sum - log_sum), jnp.exp(score - log_sum)
        return Attended(so_far.mean * kept[..., None] + share[..., None] * _moved(v, age), log_sum)

    return lax.fori_loop(0, depth, add, base)


def _add_ages_forward(config: DraftConfig, *args: Any) -> tuple[Array, Any]:
    total = _sum_ages(config, *args)
    return total.mean, (args, total)


def _add_ages_backward(config: DraftConfig, residuals: Any, of_mean: Array) -> tuple[Any, ...]:
    (weights, q, base, versions, depth, position, frequencies), total = residuals
    # Each score's gradient is its share times (what its value adds) - (what the mean had).
    had = (of_mean * total.mean).sum(axis=-1)
    wide_q = q.astype(jnp.float32)

    def add(age: Array, gradients: tuple[Params, Array]) -> tuple[Params, Array]:
        features = versions[depth - age]
        (k, v), pull = jax.vjp(
            lambda weights: _keys_values(config, weights, features, position, frequencies), weights
        )
        share = jnp.exp(_diagonal_scores(wide_q, k, age, position) - total.log_sum)
        added = (of_mean * _moved(v, age)).sum(axis=-1)
        of_score = (share * (added - had) * q.shape[-1] ** -0.5)[..., None]
        of_k = jnp.roll((of_score * wide_q).sum(axis=2), -age, axis=2).astype(k.dtype)
        of_v = jnp.roll((share[..., None] * of_mean).sum(axis=2), -age, axis=2).astype(v.dtype)
        (of_weights,) = pull((of_k, of_v))
        of_weights = jax.tree.map(lambda a, b: a + b.astype(a.dtype), gradients[0], of_weights)
        return of_weights, gradients[1] + of_score * _moved(k, age)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), weights)
    of_weights, of_q = lax.fori_loop(0, depth, add, (zeros, jnp.zeros_like(wide_q)))
    of_weights = jax.tree.map(lambda a, b: a.astype(b.dtype), of_weights, weights)
    kept = jnp.exp(base.log_sum - total.log_sum)
    of_log_sum = kept * ((of_mean * base.mean).sum(axis=-1) - had)
    of_base = Attended(kept[..., None] * of_mean, of_log_sum)
    return of_weights, of_q.astype(q.dtype), of_base, None, None, None, None


_add_ages: Any = jax.custom_vjp(_sum_ages_mean, nondiff_argnums=(0,))
_add_ages.defvjp(_add_ages_forward, _add_ages_backward)


def _diagonal_scores(q: Array, k: Array, age: Array, position: Array) -> Array:
    """Score [B K G T] of every row for the row of its document that stands `age` before it."""
    scores = (q * _moved(k, age)).sum(axis=-1) * q.shape[-1] ** -0.5
    return jnp.where((position >= age)[:, None, None], scores, NOTHING)


def _moved(x: Array, age: Array) -> Array:
    """Moves [B K T H] right by so many rows, and makes room for the heads of a group."""
    return jnp.roll(x, age, axis=2)[:, :, None].astype(jnp.float32)
