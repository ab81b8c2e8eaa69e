"""Key/value caches as explicit structs of static shape, every row (sequence) with its own length.

The rows below `length` are committed. What lies above is scratch: a draft tree is written there,
attended while its round lasts, and overwritten by the next one.

    [ committed ........ | tree nodes or draft levels | not used yet ]
                         ^ length
"""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from poss_jax.config.models import LlamaConfig
from poss_jax.model.layers import rope_frequencies
from poss_jax.shapes import Array, Bool, Int


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer (of every specialist, in a draft).

    Attributes:
      k: rotated keys, one array per layer.
      v: values, likewise.
      length: committed rows of each sequence.
      frequencies: rotary angle per position its keys are rotated with.
    """

    k: list[Array]  # L × [B K S H]
    v: list[Array]  # L × [B K S H]
    length: Array  # [B] int32
    frequencies: Array  # [B H/2] float32

    @property
    def size(self) -> int:
        """S, committed and scratch rows together."""
        return self.k[0].shape[2]


def init_cache(
    config: LlamaConfig,
    *,
    num_layers: int,
    size: int,
    rope_length: Int[Array, " B"],
    dtype: DTypeLike,
) -> KVCache:
    """Makes an empty cache.

    Args:
      config: gives the heads and the rotary embedding.
      num_layers: layers, or specialists.
      size: S, rows per sequence; room for the prompt, the new tokens, and one tree.
      rope_length: how many positions each sequence will hold at most.
      dtype: dtype of keys and values.
    """
    shape = (len(rope_length), config.num_kv_heads, size, config.head_dim)
    return KVCache(
        k=[jnp.zeros(shape, dtype) for _ in range(num_layers)],
        v=[jnp.zeros(shape, dtype) for _ in range(num_layers)],
        length=jnp.zeros(len(rope_length), jnp.int32),
        frequencies=rope_frequencies(config.rope, config.head_dim, rope_length),
    )


def write_rows(stored: Array, new: Array, start: Int[Array, " B"], *, axis: int) -> Array:
    """Writes `new` into `stored` at each sequence's own row `start`.

    Args:
      stored: [B ... S ...].
      new: [B ... T ...], of no more rows. `start + T` must not exceed S: the write would slide
        down onto committed rows.
      start: first row written, per sequence.
      axis: where the rows are.
    """
    if len(start) == 1:  # in place, where the general form is a scatter
        return lax.dynamic_update_slice_in_dim(stored, new, start[0], axis)
    return jax.vmap(lambda s, n, at: lax.dynamic_update_slice_in_dim(s, n, at, axis - 1))(
        stored, new, start
    )


def write_layer(cache: KVCache, index: int, k: Array, v: Array, start: Int[Array, " B"]) -> KVCache:
    """Writes one layer's keys and values [B K T H] at row `start` of each sequence."""
    keys, values = list(cache.k), list(cache.v)
    keys[index] = write_rows(keys[index], k, start, axis=2)
    values[index] = write_rows(values[index], v, start, axis=2)
    return cache.replace(k=keys, v=values)


def commit_rows(cache: KVCache, rows: Int[Array, "B A"], num_kept: Int[Array, " B"]) -> KVCache:
    """Moves scratch rows down to the end of the committed ones and counts them in.

    Args:
      cache: holds the tree's nodes from row `length` on.
      rows: scratch rows to keep, relative to `length`, in order; those from `num_kept` on are
        moved too, but stay scratch.
      num_kept: how many of `rows` are committed.
    """
    if rows.shape[1] > 1:
        source = (cache.length[:, None] + rows)[:, None, :, None]

        def moved(stored: Array) -> Array:
            kept = jnp.take_along_axis(stored, source, axis=2)
            return write_rows(stored, kept, cache.length, axis=2)

        cache = cache.replace(k=[moved(k) for k in cache.k], v=[moved(v) for v in cache.v])
    return cache.replace(length=cache.length + num_kept)


def scratch_mask(
    length: Int[Array, " B"], among_scratch: Bool[Array, "B T M"], *, size: int
) -> Bool[Array, "B T S"]:
    """Lets every query attend all committed rows, and the scratch rows its own mask names.

    Args:
      length: committed rows of each sequence.
      among_scratch: True where a query attends the scratch row that lies so far above `length`.
      size: S.
    """
    column = jnp.arange(size)[None] - length[:, None]
    M = among_scratch.shape[-1]
    named = jnp.take_along_axis(among_scratch, jnp.clip(column, 0, M - 1)[:, None], axis=2)
    is_scratch = (column >= 0) & (column < M)
    return (column < 0)[:, None] | (is_scratch[:, None] & named)
