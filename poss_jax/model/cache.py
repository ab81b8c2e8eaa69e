"""Key/value caches of static shape, every sequence with its own length, and attention over them.

During a forward a cache is only read. The keys and values of the forward's own rows (a chunk of a
prompt, the nodes of a tree, the levels of a draft) are kept next to it, and the accepted ones are
written afterwards:

    [ committed ........ | not used yet ]      [ own rows ]
                         ^ length   <── commit ──┘
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from poss_jax.config.models import LlamaConfig
from poss_jax.model.kernel import attend, cpu_branch
from poss_jax.model.layers import NOTHING, merge_heads, rope_frequencies
from poss_jax.model.sharding import highest_of_groups
from poss_jax.model.used_rows import Softmax, add_used_rows, attend_in_order, has_blocks, has_kernel
from poss_jax.shapes import Array, Bool, Float, Int


class KVCache(struct.PyTreeNode):
    """Keys and values of every layer (in a draft, of every stream: see `DraftConfig`)."""

    k: list[Array]  # L × [B K S H], rotated keys, one array per layer
    v: list[Array]  # L × [B K S H], values, likewise
    length: Array  # [B] int32, committed rows of each sequence
    frequencies: Array  # [B H/2] float32, rotary angle per position of its keys


def init_cache(
    config: LlamaConfig,
    *,
    num_layers: int,
    size: int,
    rope_length: Int[Array, " B"],
    dtype: DTypeLike,
) -> KVCache:
    """Makes an empty cache of S = `size` rows per sequence.

    `num_layers` may be a draft's streams; a sequence has at most `rope_length` positions.
    """
    shape = (len(rope_length), config.num_kv_heads, size, config.head_dim)
    return KVCache(
        k=[jnp.zeros(shape, dtype) for _ in range(num_layers)],
        v=[jnp.zeros(shape, dtype) for _ in range(num_layers)],
        length=jnp.zeros(len(rope_length), jnp.int32),
        frequencies=rope_frequencies(config.rope, config.head_dim, rope_length),
    )


class KeysValues(NamedTuple):
    """Keys and values of some rows, layer by layer."""

    k: list[Array]  # L × [B K T H], rotated keys
    v: list[Array]  # L × [B K T H], values


def write_rows(stored: Array, new: Array, start: Int[Array, " B"], *, axis: int) -> Array:
    """Writes `new` into `stored` at each sequence's row `start`.

    Args:
      stored: [B ... S ...].
      new: [B ... T ...], T <= S. `start + T` must not exceed S: the write would slide
        down onto committed rows.
      axis: axis of the rows.
    """
    if len(start) == 1:
        return lax.dynamic_update_slice_in_dim(stored, new, start[0], axis)

    def scatter(stored: Array, new: Array, start: Array) -> Array:
        return jax.vmap(lambda s, n, at: lax.dynamic_update_slice_in_dim(s, n, at, axis - 1))(
            stored, new, start
        )

    def one_by_one(stored: Array, new: Array, start: Array) -> Array:
        # In place; a scatter becomes a loop on TPU and copies the whole array.
        def write(row: Array | int, stored: Array) -> Array:
            at = {0: row, axis: start[row]}
            x = lax.dynamic_slice_in_dim(new, row, 1, 0)
            return lax.dynamic_update_slice(stored, x, [at.get(i, 0) for i in range(stored.ndim)])

        return lax.fori_loop(0, len(start), write, stored, unroll=min(len(start), _UNROLLED))

    return lax.platform_dependent(
        stored, new, start, cuda=scatter, rocm=scatter, default=one_by_one
    )


def commit_rows(cache: KVCache, rows: KeysValues, num_kept: Int[Array, " B"]) -> KVCache:
    """Writes rows after the committed ones; the cache has capacity for all of them above `length`.

    The first `num_kept` are valid; the others are overwritten later.
    """
    write = partial(write_rows, start=cache.length, axis=2)
    k, v = jax.tree.map(write, cache.k, rows.k), jax.tree.map(write, cache.v, rows.v)
    return cache.replace(k=k, v=v, length=cache.length + num_kept)


def cut_rows(cache: KVCache, first: Int[Array, ""], *, count: int) -> KeysValues:
    """Cuts some rows of all sequences out, from row `first` on; the reverse of `commit_rows`."""

    def cut(stored: Array) -> Array:
        return lax.dynamic_slice_in_dim(stored, first, count, axis=2)

    return KeysValues([*map(cut, cache.k)], [*map(cut, cache.v)])


def take_rows(rows: KeysValues, index: Int[Array, "B A"]) -> KeysValues:
    """Picks rows, in the order of `index`."""

    def taken(stored: Array) -> Array:
        if len(index) == 1:
            return jnp.take(stored, index[0], axis=2)
        return jnp.take_along_axis(stored, index[:, None, :, None], axis=2)

    return KeysValues([taken(k) for k in rows.k], [taken(v) for v in rows.v])


def newest_rows(
    stored: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    length: Int[Array, " B"],
    window: int,
    num_sinks: int,
) -> tuple[tuple[Array, Array], Int[Array, " B"]]:
    """Takes the first `num_sinks` and the newest committed rows of a layer, and counts them.

    Models attend their first rows whatever they hold (sinks, arXiv 2309.17453):

        [ 0 1 2 3 | ............ | newest ] not used yet
    """
    size = stored[0].shape[2]
    if size <= num_sinks + window:
        return stored, length
    first = jnp.clip(length - window, num_sinks, size - window)
    newest = jax.vmap(lambda rows, first: lax.dynamic_slice_in_dim(rows, first, window, 1))
    k, v = (jnp.concatenate([x[:, :, :num_sinks], newest(x, first)], axis=2) for x in stored)
    return (k, v), jnp.minimum(length, num_sinks + window)


def attend_cached(
    q: Float[Array, "B N T H"],
    stored: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    length: Int[Array, " B"],
    new: tuple[Float[Array, "B K M H"], Float[Array, "B K M H"]],
    can_attend: Bool[Array, "B T M"] | None,
) -> Float[Array, "B T N*H"]:
    """Grouped-query attention over the committed rows of a layer and the forward's own ones.

    A running softmax goes over blocks of the cache up to the longest sequence, so time follows the
    rows in use, not the allocated ones. A small cache is one block. On a GPU, where a loop of
    unknown length asks the host, any cache is one block, unless many queries attend a long one,
    whose scores would take gigabytes; kernels that stop at the used rows can take its place
    (`used_rows`).

    Args:
      q: rotated queries.
      stored: keys and values of the cache; each query attends the committed rows, below `length`.
      new: keys and values of the forward's rows; M may be 0 if `length` is not.
      can_attend: which own rows each query attends; it must attend at least one row in all. None:
        its own row and the ones before.
    """
    size = stored[0].shape[2]
    args = q, stored, length, new, can_attend
    in_one_block = _by_blocks(size)
    on_cpu = cpu_branch(attend, in_one_block, q, stored[0])
    if block_rows(size) == size:
        choose = partial(lax.platform_dependent, **on_cpu, default=in_one_block)
        return choose(*args) if on_cpu else in_one_block(*args)
    blocks, tpu = (_by_blocks(block_rows(size, min_rows)) for min_rows in (128, 512))
    gpu = tpu if q.shape[2] > _FEW_QUERIES and size > _LONG else in_one_block
    cuda = by_kernels if has_kernel(q, stored[0]) else gpu
    return lax.platform_dependent(*args, cuda=cuda, rocm=gpu, tpu=tpu, **on_cpu, default=blocks)


_FEW_QUERIES = 64  # as in a round; a prompt's chunk has more
_LONG = 4096


def block_rows(size: int, min_rows: int = 128) -> int:
    """Rows per block: few enough to stop near the used length, but not too many blocks.

    A loop turn costs a TPU more than a CPU, so TPUs use more rows as `min_rows`. A cache of two
    blocks becomes one: a loop that stops halfway saves less than it takes to compile.
    """
    block = max(min_rows, size // 1024 * 128)
    return size if size <= 2 * block else block


def by_kernels(
    q: Array,
    stored: tuple[Array, Array],
    length: Array,
    new: tuple[Array, Array],
    can_attend: Array | None,
    *,
    interpret: bool = False,
) -> Array:
    """`attend_cached` by the kernels for GPUs."""

    def attend_own(rows: Array, k: Array, v: Array, can_attend: Array | None) -> Softmax:
        if can_attend is None and has_blocks(rows.shape[3]):
            return attend_in_order(rows, k, v, interpret=interpret)
        return _attend_own(rows, k, v, can_attend)

    add_stored = partial(add_used_rows, interpret=interpret)
    # Without the barrier XLA computes the queries once for each of their users.
    args = lax.optimization_barrier(q), stored, length, new, can_attend
    return _attend_by(attend_own, add_stored, *args)


def _by_blocks(block: int) -> Callable[..., Array]:
    return partial(_attend_by, _attend_own, partial(_add_blocks, block))


def _attend_by(
    attend_own: Callable[[Array, Array, Array, Array | None], Softmax],
    add_stored: Callable[[Softmax, Array, tuple[Array, Array], Array], Softmax],
    q: Array,
    stored: tuple[Array, Array],
    length: Array,
    new: tuple[Array, Array],
    can_attend: Array | None,
) -> Array:
    """`attend_cached` with one way of attending the own rows and one of adding the committed."""
    B, N, T, H = q.shape
    K = stored[0].shape[1]
    rows = q.reshape(B, K, N // K, T, H)  # the queries of a group are rows of one product
    softmax = attend_own(rows, *new, can_attend)
    _, total, mean = add_stored(softmax, rows, stored, length)
    return merge_heads((mean / total).astype(q.dtype).reshape(B, N, T, H))


def _attend_own(rows: Array, k: Array, v: Array, can_attend: Array | None) -> Softmax:
    T = rows.shape[3]
    softmax = Softmax(
        jnp.full((*rows.shape[:4], 1), NOTHING),
        jnp.zeros((*rows.shape[:4], 1)),
        jnp.zeros(rows.shape, jnp.float32),
    )
    if not k.shape[2]:
        return softmax
    if can_attend is None:
        can_attend = jnp.tril(jnp.ones((1, T, T), bool))
    # The barrier keeps XLA on GPU from fusing this product with the cache's, for which it would
    # copy the cache.
    return _add_rows(softmax, lax.optimization_barrier(rows), k, v, can_attend)


def _add_rows(softmax: Softmax, rows: Array, k: Array, v: Array, allowed: Array) -> Softmax:
    highest, total, mean = softmax
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", rows, k, preferred_element_type=jnp.float32)
    scores = jnp.where(allowed[:, None, None], scores * rows.shape[-1] ** -0.5, NOTHING)
    new_highest = jnp.maximum(highest, scores.max(axis=-1, keepdims=True))
    weights = jnp.exp(scores - new_highest)
    shrink = jnp.exp(highest - new_highest)
    added = jnp.einsum(
        "BKGTS,BKSH->BKGTH", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    total = total * shrink + weights.sum(axis=-1, keepdims=True)
    return Softmax(new_highest, total, mean * shrink + added)


def _add_blocks(
    block: int, softmax: Softmax, rows: Array, stored: tuple[Array, Array], length: Array
) -> Softmax:
    """Adds block after block, up to the longest sequence."""
    S = stored[0].shape[2]

    def add_block(j: Array | int, softmax: Softmax) -> Softmax:
        first = jnp.minimum(j * block, S - block)  # the last block overlaps the one before
        k, v = (lax.dynamic_slice_in_dim(x, first, block, 2) for x in stored)
        column = first + jnp.arange(block)[None]
        is_new = (column < length[:, None]) & (column >= j * block)
        return _add_rows(softmax, rows, k, v, is_new[:, None])

    if block == S:
        return add_block(0, softmax)
    num_blocks = (highest_of_groups(length.max()) + block - 1) // block
    return lax.fori_loop(0, num_blocks, add_block, softmax)


_UNROLLED = 8  # sequences written without a loop
