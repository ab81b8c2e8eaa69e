"""The recursion of HASS and PosS: each draft depth reads the features earlier depths predicted.

Version k of a row is its feature as drafted k steps ahead; version 0 is the target's own. At depth
d the query of row r comes from version d, and column i shows version max(0, d - (r - i)):

    columns  ... r-3  r-2  r-1   r          d = 3
    version  ...  0    1    2    3          versions of one age stand on a diagonal

So a row attends version 0 up to column r - d by ordinary causal attention, plus d diagonal terms of
one product per row each. The softmax over version 0 is kept as a mean and a sum, and one age after
the other is added to it: only the versions themselves grow with the depth.

A deep first specialist serves depth 0 alone, where a row attends version 0 only: its further layers
run as any Llama's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import DraftConfig
from poss_jax.model.blockwise import Attended, attend_documents, group_heads, ungroup_heads
from poss_jax.model.documents import encode_layer, frequencies_in, positions_in
from poss_jax.model.families import family_of
from poss_jax.model.layers import NOTHING, DecoderLayer
from poss_jax.model.sharding import split_batch
from poss_jax.model.specialists import key_value_params
from poss_jax.shapes import Array, Float, Int, Params


class DraftInputs(struct.PyTreeNode):
    """Rows of text as the draft reads them: pairs (feature f_j, token x_{j+1})."""

    # input features, from the target, with noise if configured
    features: Array  # [B T F]; F = D, more where EAGLE-3 reads inner states
    embedded: Array  # [B T D], embeddings of the next tokens
    documents: Array  # [B T] int32, document of a pair within its row


class Versions(NamedTuple):
    """The versions of all rows.

    The newest version is kept apart until the next depth writes it into place before reading: this
    lets the compiler use one buffer for all depths.
    """

    older: Array  # [R B T D], versions 0 to d-1 at depth d
    newest: Array  # [B T D], version d


class Depth(NamedTuple):
    """One depth of the recursion."""

    index: Array  # [] int32, draft depth, 0-based; traced
    specialist: Array  # [] int32, index of the specialist that serves it
    versions: Array  # [R B T D], versions 0 to `index`


Visit = Callable[[Depth, Any], tuple[Array, Any, Any]]
"""(depth, carry) -> (predicted features [B T D], carry, output of this depth)."""


def first_version(features: Float[Array, "B T D"], depth: int) -> Versions:
    """Starts the recursion: the features of depth 0, and space for later depths."""
    older = jnp.zeros((depth, *features.shape), features.dtype)
    return Versions(split_batch(older, axis=1), features)


def unroll(
    config: DraftConfig,
    inputs: DraftInputs,
    versions: Versions,
    carry: Any,
    visit: Visit,
    depths: range,
) -> tuple[Versions, Any, Any]:
    """Visits depths in order; each reads the features predicted at earlier depths, detached.

    Args:
      versions: versions from the depth before, or `first_version`.
      visit: predicts one depth; called once, while tracing.

    Returns:
      Versions for the next depth, the last carry, and outputs stacked by depth.
    """

    def body(state: tuple[Versions, Any], step: tuple[Array, Array]):
        (versions, carry), (index, specialist) = state, step
        older = lax.dynamic_update_index_in_dim(versions.older, versions.newest, index, 0)
        prediction, carry, output = visit(Depth(index, specialist, older), carry)
        return (Versions(older, _next_version(prediction, inputs)), carry), output

    served_by = jnp.array([config.specialist_at(depth) for depth in depths], jnp.int32)
    steps = jnp.array(depths, jnp.int32), served_by
    (versions, carry), outputs = lax.scan(body, (versions, carry), steps)
    return versions, carry, outputs


def shared_params(draft: Params) -> Params:
    """Parameters that all specialists share."""
    return {name: leaves for name, leaves in draft.items() if name != "specialists"}


def take_specialist(draft: Params, index: Int[Array, ""]) -> tuple[Params, Params]:
    """Splits a draft (specialists stacked) into shared parameters and one specialist."""
    return shared_params(draft), jax.tree.map(lambda leaf: leaf[index], draft["specialists"])


def add_gradients(
    total: Params, index: Array, grad_shared: Params, grad_specialist: Params
) -> Params:
    """Adds gradients of the shared parameters and of one specialist to a draft's."""
    specialists = jax.tree.map(
        lambda stack, grad: stack.at[index].add(grad), total["specialists"], grad_specialist
    )
    shared = {name: total[name] for name in grad_shared}
    return jax.tree.map(jnp.add, shared, grad_shared) | {"specialists": specialists}


def predict(
    shared: Params,
    specialist: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    depth: Depth,
    *,
    block: int,
) -> Float[Array, "B T D"]:
    """Predicts the features of one depth at every row (row r: f_{r+1}, drafted depth + 1 ahead).

    Args:
      specialist: the one that serves this depth; `shared` has the parameters of all.
      block: rows and columns whose scores are in memory at once. Static.
    """
    family = family_of(config)
    layer = family.layer(config).bind({"params": specialist})
    position = positions_in(inputs.documents)
    frequencies = frequencies_in(inputs.documents, config.layer.rope, config.layer.head_dim)
    of_tokens = split_batch(family.join_tokens(shared, inputs.embedded))
    x = split_batch(family.join_features(shared, of_tokens, depth.versions[depth.index]))
    q = group_heads(
        layer.attention.queries(layer.normed(x), position, frequencies), config.layer.num_kv_heads
    )
    weights = {"shared": shared, "layer": key_value_params(specialist), "of_tokens": of_tokens}
    rows = Diagonals(depth.versions, depth.index, position, frequencies)
    k, v = _keys_values(config, weights, rows, age=depth.index)
    base = attend_documents(
        q, k, v, inputs.documents, depth.index, block=block, window=config.trained_window
    )
    mean: Any = _add_ages(config, rows, Terms(weights, q, base))  # custom_vjp loses its type
    hidden = layer.finish(x, ungroup_heads(mean).astype(x.dtype))
    return run_further(shared, config, inputs, hidden, depth.index, block=block)


def run_further(
    shared: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    hidden: Float[Array, "B T D"],
    index: Int[Array, ""],
    *,
    block: int,
) -> Float[Array, "B T D"]:
    """Runs rows through the further layers of the first specialist, if the depth is its own.

    Arguments: see `predict`; `index` is the depth, traced.
    """
    if not config.num_further:
        return hidden
    position = positions_in(inputs.documents)
    frequencies = frequencies_in(inputs.documents, config.layer.rope, config.layer.head_dim)
    rows, window = (inputs.documents, position, frequencies), config.trained_window

    def run(hidden: Array) -> Array:
        for params in shared["further"]:
            layer = DecoderLayer(config.layer).bind({"params": params})
            hidden = encode_layer(layer, hidden, *rows, block=block, window=window)
        return hidden

    return lax.cond(index == 0, run, lambda hidden: hidden, hidden)


class Diagonals(NamedTuple):
    """Rows attended at later ages; no gradient flows into them."""

    versions: Array  # [R B T D], versions 0 to `depth`
    depth: Array  # [] int32, number of diagonals
    position: Array  # [B T] int32, position of a row in its document
    frequencies: Array  # [B H/2] or [B T H/2], rotary angle per position


class Terms(NamedTuple):
    """Arrays for which the softmax over version 0 and all diagonals has gradients."""

    weights: Params  # `{"shared", "layer", "of_tokens"}`, parameters of keys and values
    queries: Array  # [B K G T H], rotated queries, in groups that share keys
    base: Attended  # softmax over version 0


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _add_ages(config: DraftConfig, rows: Diagonals, terms: Terms) -> Float[Array, "B K G T H"]:
    """Adds the diagonals of every age below `rows.depth` to a softmax over version 0."""
    return _sum_ages(config, rows, terms).mean


def _sum_ages(config: DraftConfig, rows: Diagonals, terms: Terms) -> Attended:
    queries = terms.queries.astype(jnp.float32)

    def add(age: Array, so_far: Attended) -> Attended:
        k, v = _keys_values(config, terms.weights, rows, age)
        score = _diagonal_scores(queries, k, age, rows.position)
        log_sum = jnp.logaddexp(so_far.log_sum, score)
        kept, share = jnp.exp(so_far.log_sum - log_sum), jnp.exp(score - log_sum)
        return Attended(so_far.mean * kept[..., None] + share[..., None] * _moved(v, age), log_sum)

    return lax.fori_loop(0, rows.depth, add, terms.base)


Saved = tuple[Diagonals, Terms, Attended]


def _add_ages_forward(config: DraftConfig, rows: Diagonals, terms: Terms) -> tuple[Array, Saved]:
    total = _sum_ages(config, rows, terms)
    return total.mean, (rows, terms, total)


def _add_ages_backward(config: DraftConfig, saved: Saved, grad_mean: Array) -> tuple[None, Terms]:
    rows, terms, total = saved
    # Each score's gradient is its share times (gradient . value - gradient . mean).
    had = (grad_mean * total.mean).sum(axis=-1)
    queries = terms.queries.astype(jnp.float32)
    scale = queries.shape[-1] ** -0.5

    def add(age: Array, grads: tuple[Params, Array]) -> tuple[Params, Array]:
        (k, v), pull = jax.vjp(lambda w: _keys_values(config, w, rows, age), terms.weights)
        share = jnp.exp(_diagonal_scores(queries, k, age, rows.position) - total.log_sum)
        added = (grad_mean * _moved(v, age)).sum(axis=-1)
        grad_score = (share * (added - had) * scale)[..., None]
        grad_k = jnp.roll((grad_score * queries).sum(axis=2), -age, axis=2).astype(k.dtype)
        grad_v = jnp.roll((share[..., None] * grad_mean).sum(axis=2), -age, axis=2).astype(v.dtype)
        (grad_weights,) = pull((grad_k, grad_v))
        grad_weights = jax.tree.map(lambda a, b: a + b.astype(a.dtype), grads[0], grad_weights)
        return grad_weights, grads[1] + grad_score * _moved(k, age)

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), terms.weights)
    grad_weights, grad_q = lax.fori_loop(0, rows.depth, add, (zeros, jnp.zeros_like(queries)))
    grad_weights = jax.tree.map(lambda a, b: a.astype(b.dtype), grad_weights, terms.weights)
    kept = jnp.exp(terms.base.log_sum - total.log_sum)
    grad_log_sum = kept * ((grad_mean * terms.base.mean).sum(axis=-1) - had)
    grad_base = Attended(kept[..., None] * grad_mean, grad_log_sum)
    return None, Terms(grad_weights, grad_q.astype(terms.queries.dtype), grad_base)


_add_ages.defvjp(_add_ages_forward, _add_ages_backward)


def _next_version(prediction: Float[Array, "B T D"], inputs: DraftInputs) -> Float[Array, "B T D"]:
    """Moves predictions to their rows; row 0 of a document keeps the target's feature."""
    is_first = (positions_in(inputs.documents) == 0)[..., None]
    newest = jnp.where(is_first, inputs.features, jnp.roll(prediction, 1, axis=1))
    return lax.stop_gradient(split_batch(newest))


def next_reach(
    reach: Float[Array, "B T"], acceptance: Float[Array, "B T"], documents: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Probability that verification gets to every row at the next depth.

    The chain that is at row r at depth d was at row r - 1 at depth d - 1, and began d rows before.
    A row with less text before it has no such chain.
    """
    return jnp.where(positions_in(documents) == 0, 0.0, jnp.roll(reach * acceptance, 1, axis=1))


def _keys_values(
    config: DraftConfig, weights: Params, rows: Diagonals, age: Int[Array, ""]
) -> tuple[Array, Array]:
    """Keys and values [B K T H] of the version of an age (0: the newest)."""
    family = family_of(config)
    layer = family.layer(config).bind({"params": weights["layer"]})
    features = rows.versions[rows.depth - age]
    x = family.join_features(weights["shared"], weights["of_tokens"], features)
    return layer.attention.keys_values(layer.normed(x), rows.position, rows.frequencies)


def _diagonal_scores(q: Array, k: Array, age: Array, position: Array) -> Array:
    """Scores [B K G T] of every row for the row `age` before it in its document."""
    scores = (q * _moved(k, age)).sum(axis=-1) * q.shape[-1] ** -0.5
    return jnp.where((position >= age)[:, None, None], scores, NOTHING)


def _moved(x: Array, age: Array) -> Array:
    """Moves [B K T H] right by `age` rows, and adds an axis for the heads of a group."""
    return jnp.roll(x, age, axis=2)[:, :, None].astype(jnp.float32)
