"""Finding the highest scores of a vocabulary, in the way that is fast on each backend."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from poss_jax.model.sharding import dividing_axes, whole_rows
from poss_jax.shapes import Array, Float, Int


def choose(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Finds the token of the highest score (logits, or scores with noise); ties: lowest id."""

    def of_blocks(scores: Array) -> Array:  # an argmax on CPU is sequential
        rows = scores.reshape(1, -1, scores.shape[-1])
        # Selecting before the barrier lets XLA see that only one is needed, so it does not sort.
        ids = lax.optimization_barrier(_best_of_devices(_top_k_of_blocks, rows, 1)[1])
        return ids.reshape(scores.shape[:-1])

    def of_rows(scores: Array) -> Array:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(scores, cpu=of_blocks, default=of_rows)


def top_k(
    scores: Float[Array, "B rows Vd"], k: int
) -> tuple[Float[Array, "B rows k"], Int[Array, "B rows k"]]:
    """Like `lax.top_k`, ties included, which is fast for long rows on GPUs only."""
    rows, blocks = (partial(_best_of_devices, find, k=k) for find in (_top_k, _top_k_of_blocks))
    best, ids = lax.platform_dependent(scores, cuda=rows, rocm=rows, default=blocks)
    return best, ids


def _best_of_devices(
    find: Callable[[Array, int], tuple[Array, Array]], scores: Array, k: int
) -> tuple[Array, Array]:
    """Finds the best k; if a mesh shards the vocabulary, the devices exchange their best."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not dividing_axes("tensor", scores.shape[-1], mesh):
        return find(scores, k)

    def best_of_shard(scores: Array) -> tuple[Array, Array]:
        size = scores.shape[-1]
        best, ids = find(scores, min(k, size))
        return best, ids + lax.axis_index("tensor") * size

    cut = PartitionSpec(None, None, "tensor")
    of_all = jax.shard_map(
        best_of_shard, in_specs=cut, out_specs=cut, axis_names={"tensor"}, check_vma=False
    )
    best, ids = map(whole_rows, of_all(scores))
    best, column = _top_k(best, k)
    return best, jnp.take_along_axis(ids, column, axis=-1)


def _top_k(scores: Array, k: int) -> tuple[Array, Array]:
    best, ids = lax.top_k(scores, k)
    return best, ids


def _top_k_of_blocks(scores: Array, k: int) -> tuple[Array, Array]:
    # Long sorts are slow to run and slower to compile. The best k lie in the k blocks with the
    # highest maxima.
    width = scores.shape[-1]
    block = 128 if width > 128 * 128 else 16
    if width <= max(512, 2 * k * block):
        return _top_k(scores, k)
    padding = ((0, 0), (0, 0), (0, -width % block))
    padded = jnp.pad(scores, padding, constant_values=-jnp.inf)
    blocks = padded.reshape(*scores.shape[:2], -1, block)
    kept = jnp.sort(_top_k_of_blocks(blocks.max(axis=-1), k)[1], axis=-1)
    among = jnp.take_along_axis(blocks, kept[..., None], axis=2)
    best, column = _top_k_of_blocks(among.reshape(*scores.shape[:2], -1), k)
    index = jnp.take_along_axis(kept, column // block, axis=-1)
    return best, index * block + column % block
