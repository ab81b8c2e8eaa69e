"""The recursion of HASS and PosS: each draft depth reads the features earlier depths predicted.

Version k of a row is its feature as drafted k steps ahead; version 0 is the target's own. At depth
d the query of row r comes from version d, and column i shows version max(0, d - (r - i)):

    columns  ... r-3  r-2  r-1   r          d = 3
    version  ...  0    1    2    3          versions of one age stand on a diagonal

So a row attends version 0 up to column r - d, by ordinary causal attention, and d diagonal terms,
one product per row each. `history[j]` holds what the diagonal of age j shows at every row: version
d - j moved j rows to the right. One depth on, everything moves one row and one place further.
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config import DraftConfig
from poss_jax.draft import fuse_features, fuse_tokens
from poss_jax.layers import DecoderLayer, merge_heads, rope_frequencies
from poss_jax.shapes import Array, Float, Int, Params


class DraftBatch(struct.PyTreeNode):
    """Rows of text as the draft sees them: pairs (feature f_j, token x_{j+1}).

    Attributes:
      features: input features, from the target (perhaps with noise).
      embedded: embeddings of the next tokens.
    """

    features: Array  # [B T D]
    embedded: Array  # [B T D]


def init_history(features: Float[Array, "B T D"], depth: int) -> Float[Array, "R B T D"]:
    """What the diagonals show before anything is predicted (ages from 1 on are not read yet)."""
    return jnp.broadcast_to(features[None], (depth, *features.shape))


def advance_history(
    history: Float[Array, "R B T D"],
    prediction: Float[Array, "B T D"],
    features: Float[Array, "B T D"],
) -> Float[Array, "R B T D"]:
    """Takes in the prediction of a depth, detached; row 0 keeps the target's own feature."""
    newest = jnp.concatenate([features[:, :1], prediction[:, :-1]], axis=1)
    older = _moved(history[:-1], 1)
    return lax.stop_gradient(jnp.concatenate([newest[None], older]))


def predict(
    fc: Params,
    specialist: Params,
    config: DraftConfig,
    batch: DraftBatch,
    history: Float[Array, "R B T D"],
    depth: Int[Array, ""],
) -> Float[Array, "B T D"]:
    """Features one depth predicts at every row (row r: of f_{r+1}, drafted `depth` + 1 ahead).

    Args:
      fc: the fusion layer.
      specialist: the layer that serves this depth.
      config: shape of the draft.
      batch: pairs of the target.
      history: what the diagonals show at this depth.
      depth: 0-based; may be traced.
    """
    layer = DecoderLayer(config.layer, has_input_norm=False).bind({"params": specialist})
    B, T, _ = batch.features.shape
    ages = len(history) - 1  # at depth d the diagonals of ages 0 .. d-1 are attended
    row = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    frequencies = rope_frequencies(config.layer.rope, config.layer.head_dim, jnp.full(B, T))

    of_tokens = fuse_tokens(fc, batch.embedded)

    def version(features: Array, age: Array) -> tuple[Array, Array, Array]:
        """Draft input, keys and values of the rows that stand on the diagonal of an age."""
        x = jnp.roll(of_tokens, age, axis=1) + fuse_features(fc, features)
        return x, *layer.keys_values(x, row - age, frequencies)

    def version_if_attended(step: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        features, age = step
        shapes = jax.eval_shape(version, features, age)
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return lax.cond(age < jnp.maximum(depth, 1), version, lambda *_: nothing, features, age)

    x, k, v = version(batch.features, jnp.int32(0))
    x_ages, k_ages, v_ages = lax.map(version_if_attended, (history[:ages], jnp.arange(ages)))
    x = x_ages[0] if ages else x
    q = layer.queries(x, row, frequencies)
    return layer.finish(x, _attend_versions(q, (k, v), (k_ages, v_ages), depth))


def _attend_versions(
    q: Float[Array, "B N T H"],
    base: tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]],
    ages: tuple[Float[Array, "J B K T H"], Float[Array, "J B K T H"]],
    depth: Int[Array, ""],
) -> Float[Array, "B T N*H"]:
    """One softmax over the columns of version 0 and the diagonals of every age."""
    B, N, T, H = q.shape
    (k_base, v_base), (k_ages, v_ages) = base, ages
    K = k_base.shape[1]
    grouped = q.reshape(B, K, N // K, T, H) * H**-0.5
    row, age = jnp.arange(T), jnp.arange(len(k_ages))
    on_base = row[None] <= row[:, None] - depth
    on_ages = (age[None] < depth) & (age[None] <= row[:, None])
    to_base = jnp.einsum("BKGTH,BKSH->BKGTS", grouped, k_base, preferred_element_type=jnp.float32)
    to_ages = (grouped[None] * k_ages[:, :, :, None]).sum(axis=-1, dtype=jnp.float32)
    # Differs from PosS: forbidden columns are left out of the softmax, as decoding leaves them out;
    # there they count as scores of zero, so that features depend on the padded length.
    scores = jnp.concatenate(
        [
            jnp.where(on_base[None, None, None], to_base, -jnp.inf),
            jnp.where(on_ages[None, None, None], jnp.moveaxis(to_ages, 0, -1), -jnp.inf),
        ],
        axis=-1,
    )
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    from_base = jnp.einsum("BKGTS,BKSH->BKGTH", weights[..., :T], v_base)
    on_diagonals = jnp.moveaxis(weights[..., T:], -1, 0)
    from_ages = (on_diagonals[..., None] * v_ages[:, :, :, None]).sum(axis=0)
    return merge_heads((from_base + from_ages).reshape(B, N, T, H))


def rollout(
    draft: Params, config: DraftConfig, batch: DraftBatch, depth: int
) -> Float[Array, "R B T D"]:
    """Predictions of every depth; `draft["specialists"]` is stacked."""

    def body(history: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
        d, index = step
        specialist = jax.tree.map(lambda leaf: leaf[index], draft["specialists"])
        prediction = predict(draft["fc"], specialist, config, batch, history, d)
        return advance_history(history, prediction, batch.features), prediction

    _, predictions = lax.scan(body, init_history(batch.features, depth), depths(config, depth))
    return predictions


def depths(config: DraftConfig, depth: int) -> tuple[Int[Array, " R"], Int[Array, " R"]]:
    """Every depth and the specialist that serves it, to scan over."""
    return jnp.arange(depth), jnp.array([config.specialist_at(d) for d in range(depth)])


def _moved(x: Array, rows: int) -> Array:
    """Moves [... T D] right by so many rows; what moves in is never attended."""
    padding = ((0, 0),) * (x.ndim - 2) + ((rows, 0), (0, 0))
    return jnp.pad(x, padding)[..., : x.shape[-2], :]
