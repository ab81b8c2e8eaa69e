"""The highest scores of a vocabulary, found the way each backend is fast at."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from poss_jax.model.sharding import dividing_axes, whole_rows
from poss_jax.shapes import Array, Float, Int


def choose(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The token of the highest score (logits, or scores with noise), the lowest id among equals."""

    def of_blocks(scores: Array) -> Array:  # on CPU an argmax compares one number after the other
        rows = scores.reshape(1, -1, scores.shape[-1])
        # Before the barrier XLA sees that one is wanted, and does not sort whole rows.
        ids = lax.optimization_barrier(_best_of_devices(_top_k_of_blocks, rows, 1)[1])
        return ids.reshape(scores.shape[:-1])

    def whole(scores: Array) -> Array:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(scores, cpu=of_blocks, default=whole)


def top_k(
    scores: Float[Array, "B rows Vd"], k: int
) -> tuple[Float[Array, "B rows k"], Int[Array, "B rows k"]]:
    """Finds what `lax.top_k` finds, ties included; only GPUs have a kernel for long rows."""
    whole, blocks = (partial(_best_of_devices, find, k=k) for find in (_top_k, _top_k_of_blocks))
    best, ids = lax.platform_dependent(scores, cuda=whole, rocm=whole, default=blocks)
    return best, ids


def _best_of_devices(
    find: Callable[[Array, int], tuple[Array, Array]], scores: Array, k: int
) -> tuple[Array, Array]:
    """Finds the best k; where a mesh cuts the vocabulary, each device shows the others its best."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not dividing_axes("tensor", scores.shape[-1], mesh):
        return find(scores, k)

    def own(scores: Array) -> tuple[Array, Array]:
        size = scores.shape[-1]
        best, ids = find(scores, min(k, size))
        return best, ids + lax.axis_index("tensor") * size

    cut = PartitionSpec(None, None, "tensor")
    of_all = jax.shard_map(own, in_specs=cut, out_specs=cut, axis_names={"tensor"}, check_vma=False)
    best, ids = map(whole_rows, of_all(scores))
    best, place = _top_k(best, k)
    return best, jnp.take_along_axis(ids, place, axis=-1)


def _top_k(scores: Array, k: int) -> tuple[Array, Array]:
    best, ids = lax.top_k(scores, k)
    return best, ids


def _top_k_of_blocks(scores: Array, k: int) -> tuple[Array, Array]:
    # Long sorts take long to run and longer to compile. The best k lie in the k blocks of the
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
    best, place = _top_k_of_blocks(among.reshape(*scores.shape[:2], -1), k)
    index = jnp.take_along_axis(kept, place // block, axis=-1)
    return best, index * block + place % block
