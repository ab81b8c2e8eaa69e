"""The highest scores of a vocabulary, found the way each backend is fast at."""

from functools import partial

import jax.numpy as jnp
from jax import lax

from poss_jax.shapes import Array, Float, Int


def choose(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The token of the highest score (logits, or scores with noise), the lowest id among equals."""

    def of_blocks(scores: Array) -> Array:  # on CPU an argmax compares one number after the other
        return _top_k_of_blocks(scores.reshape(1, -1, scores.shape[-1]), 1)[1].reshape(
            scores.shape[:-1]
        )

    def whole(scores: Array) -> Array:
        return jnp.argmax(scores, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(scores, cpu=of_blocks, default=whole)


def top_k(
    scores: Float[Array, "B rows Vd"], k: int
) -> tuple[Float[Array, "B rows k"], Int[Array, "B rows k"]]:
    """Finds what `lax.top_k` finds, ties included; only GPUs have a kernel for long rows."""
    whole, blocks = partial(_top_k, k=k), partial(_top_k_of_blocks, k=k)
    best, ids = lax.platform_dependent(scores, cuda=whole, rocm=whole, default=blocks)
    return best, ids


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
