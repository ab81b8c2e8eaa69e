"""Attention over the rows in use of a cache on NVIDIA GPUs, by kernels that come with JAX.

A loop of unknown length makes a GPU ask the host at every turn, so XLA's own attention reads a
cache to its end. A kernel knows itself where to stop. Several programs share a cache:

    [ committed .............. | not used yet ............ ]
    [ split 0     | split 1    |        | split 2          ]

Each keeps a running softmax over its split, for a block of queries; without rows it returns at
once. A second kernel attends a prompt's chunk to itself, without its scores in memory.

No GPU has timed them yet, so they are off unless the environment says POSS_JAX_USED_ROWS=1 when
programs are traced. docs/results/accelerator.md says when they become the default or leave.
"""

import logging
import math
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.shapes import Array, Float, Int

_BLOCK = 64  # queries of a program at most, and cache rows per turn of its loop
_PROGRAMS = 128  # about the processors of a large GPU
_MOST_SPLITS = 16
SWITCH = "POSS_JAX_USED_ROWS"
"""Environment variable that turns the kernels on."""
_LOG = logging.getLogger(__name__)


class Softmax(NamedTuple):
    """A running softmax."""

    highest: Array  # [B K G T 1] float32, highest score so far
    total: Array  # [B K G T 1] float32, sum of the weights, relative to `highest`
    mean: Array  # [B K G T H] float32, values under these weights, not yet divided by `total`


def has_kernel(q: Float[Array, "B N T H"], k: Float[Array, "B K S H"]) -> bool:
    """Tells whether the kernels are on and serve these arrays: two bytes wide, on one device."""
    if os.environ.get(SWITCH) != "1":
        return False
    fits = q.dtype.itemsize == k.dtype.itemsize == 2 and q.shape[-1] in (64, 128)
    is_alone = jax.sharding.get_abstract_mesh().empty
    return fits and k.shape[2] % _BLOCK == 0 and is_alone and _runs() and kernels() is not None


@cache
def _runs() -> bool:
    """Tells whether the GPU at hand runs the kernels; without one, whether JAX compiles ahead."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        return jax.__version_info__ < (0, 11)  # later ones ask the GPU at hand
    is_new = re.match(r"[89]\.|\d\d\.", getattr(device, "compute_capability", ""))
    return bool(is_new) and agrees()


def agrees(*, interpret: bool = False) -> bool:
    """Tries the kernels on a small cache; logs why if one fails, or differs from a softmax."""
    try:
        with ThreadPoolExecutor(1) as pool:  # this thread may be tracing a program
            error = pool.submit(_measure_error, interpret=interpret).result()
        reason = "" if error < 0.05 else f"it is off by {error:.2g}"
    except Exception as failure:  # of any part of the compiler
        reason = f"{type(failure).__name__}: {failure}".partition("\n")[0]
    if reason:
        _LOG.warning("attention reads caches to their end; the kernel for used rows: %s", reason)
    return not reason


def _measure_error(*, interpret: bool) -> float:
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1, 2 * _BLOCK, 128), jnp.bfloat16)
    used = _BLOCK + 6

    @jax.jit
    def attend(q: Array, k: Array, v: Array) -> Array:
        softmax = attend_in_order(q[None], k, v, interpret=interpret)
        out = add_used_rows(softmax, q[None], (k, v), jnp.array([used]), interpret=interpret)
        return (out.mean / out.total)[0, 0, 0]

    computed = attend(q, k, v)
    q, k, v = (array[0, 0].astype(jnp.float32) for array in (q, k, v))
    in_order = jnp.tril(jnp.ones((len(q), len(q)), bool))
    scores = jnp.concatenate([q @ k[:used].T, jnp.where(in_order, q @ k.T, -1e9)], axis=1)
    want = jax.nn.softmax(scores * 128**-0.5) @ jnp.concatenate([v[:used], v])
    return float(jnp.abs(computed - want).max())


@cache
def kernels() -> Any:
    """Loads JAX's modules of the kernels; None if this version lacks them."""
    try:
        with warnings.catch_warnings():  # deprecated since JAX 0.11
            warnings.simplefilter("ignore", DeprecationWarning)
            from jax.experimental.pallas.ops.gpu import attention, decode_attention
    except ImportError:
        return None
    return attention, decode_attention


def has_blocks(num_rows: int) -> bool:
    """Tells whether `attend_in_order` serves this number of rows."""
    return num_rows % _BLOCK == 0


def attend_in_order(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    *,
    interpret: bool = False,
) -> Softmax:
    """Attends rows to themselves and the ones before them; T is a multiple of 64."""
    (B, K, G, T, H), library = q.shape, kernels()[0]
    attend = partial(
        library.mha,
        segment_ids=None,
        sm_scale=H**-0.5,
        causal=True,
        block_sizes=library.BlockSizes(_BLOCK, _BLOCK),
        num_warps=4,
        interpret=interpret,
        return_residuals=True,
    )
    k, v = (x.reshape(B * K, T, 1, H) for x in (k, v))
    with jax.numpy_dtype_promotion("standard"):
        mean, log2_sum = jax.vmap(attend, (1, None, None), 1)(q.reshape(B * K, G, T, 1, H), k, v)
    log_sum = log2_sum.reshape(B, K, G, T, 1) * math.log(2)
    return Softmax(log_sum, jnp.ones_like(log_sum), mean.reshape(q.shape).astype(jnp.float32))


def add_used_rows(
    softmax: Softmax,
    q: Float[Array, "B K G T H"],
    stored: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    length: Int[Array, " B"],
    *,
    interpret: bool = False,
) -> Softmax:
    """Adds the first rows of a cache to a softmax.

    Args:
      softmax: over other rows.
      q: rotated queries, in groups that share keys.
      stored: keys and values.
      length: rows that each sequence's queries attend.
      interpret: run without a GPU.
    """
    B, K, G, T, H = q.shape
    splits = _attend_splits(q.reshape(B, K, G * T, H), *stored, length, interpret=interpret)
    parts = Softmax(*(array.reshape(-1, B, K, G, T, array.shape[-1]) for array in splits))
    # Without the barrier XLA may compute invalid values, says JAX's own caller of the kernel.
    highest = lax.optimization_barrier(jnp.maximum(softmax.highest, parts.highest.max(axis=0)))
    shrink, shrinks = jnp.exp(softmax.highest - highest), jnp.exp(parts.highest - highest[None])
    return Softmax(
        highest,
        softmax.total * shrink + (parts.total * shrinks).sum(axis=0),
        softmax.mean * shrink + (parts.mean * shrinks).sum(axis=0),
    )


def _attend_splits(
    q: Array, k: Array, v: Array, length: Array, *, interpret: bool
) -> tuple[Array, Array, Array]:
    """Highest scores and sums [P B K R 1], and weighted values [P B K R H], of P splits."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    (B, K, R, H), S, kernel = q.shape, k.shape[2], kernels()[1].attn_forward_kernel
    queries = min(max(16, pl.next_power_of_2(R)), _BLOCK)
    num_blocks = pl.cdiv(R, queries)
    num_splits = min(max(1, _PROGRAMS // (B * K * num_blocks)), _MOST_SPLITS)
    rows = pl.cdiv(S, num_splits * _BLOCK) * _BLOCK
    num_splits = pl.cdiv(S, rows)
    query = pl.BlockSpec((None, None, queries, H), lambda i, j, n: (n // K, n % K, i, 0))
    split = pl.BlockSpec((None, None, rows, H), lambda i, j, n: (n // K, n % K, j, 0))
    used = pl.BlockSpec((None,), lambda i, j, n: (n // K,))
    mean = pl.BlockSpec((None, None, None, queries, H), lambda i, j, n: (j, n // K, n % K, i, 0))
    sums = pl.BlockSpec((None, None, None, queries), lambda i, j, n: (j, n // K, n % K, i))
    shapes = [
        jax.ShapeDtypeStruct((num_splits, B, K, R, *last), jnp.float32) for last in ((H,), (), ())
    ]
    call = pl.pallas_call(
        partial(kernel, sm_scale=H**-0.5, block_k=_BLOCK, block_h=queries, num_heads=R),
        grid=(num_blocks, num_splits, B * K),
        in_specs=[query, split, split, None, used],
        out_specs=[mean, sums, sums],
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attend_used_rows",
    )
    with jax.numpy_dtype_promotion("standard"):  # the kernel multiplies flags
        values, totals, highest = call(q, k, v, None, length)
    return highest[..., None], totals[..., None], values
