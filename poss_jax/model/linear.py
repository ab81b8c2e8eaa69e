"""Products of rows with a weight, in the spelling that each backend runs fastest.

docs/LOG.md has their times. A quantised weight goes through the same function.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poss_jax.config.processor import int8_products
from poss_jax.model.kernel import multiply_tiles
from poss_jax.model.quantise import Quantised
from poss_jax.shapes import Array, Float, UInt

# For a few rows XLA on CPU runs `x @ w.T` 1.1 to 1.7 times slower than `(w @ x.T).T`.
_FEW_ROWS = 64

# Row counts that `_sum_products` pads to; 1 row, or 5 to 7, take longer than the next of these.
_SUMMED_ROWS = (2, 4, 8, 16)

_MAX_SUMMED_ROWS = 32
"""Rows up to which float sums are faster than conversions."""

_BLOCK_SIZE = 1 << 19
"""Elements of a quantised weight that `_convert_blocks` converts at a time."""


def linear(
    x: Float[Array, "*rows in_dim"],
    weight: Float[Array, "*out_dims in_dim"] | Quantised,
    bias: Float[Array, "*out_dims"] | None = None,
    *,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """Multiplies rows by a weight kept `[out, in]`, in the spelling its backend runs fastest.

    A weight has the dtype of `x`, or is quantised; `dtype` is of result and sums; None: `x`'s.
    """
    dtype = x.dtype if dtype is None else dtype
    if isinstance(weight, Quantised):
        return _quantised(x, weight, bias, dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _product(rows, weight, dtype=dtype).reshape(*x.shape[:-1], *weight.shape[:-1])
    return out if bias is None else out + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


@partial(jax.jit, static_argnames="dtype")  # traces equal shapes once
def _product(rows: Array, weight: Array, *, dtype: Any) -> Array:
    def plain(rows: Array, weight: Array) -> Array:
        axes = ((1,), (weight.ndim - 1,)), ((), ())
        return lax.dot_general(rows, weight, axes, preferred_element_type=dtype)

    def one_on_cpu(rows: Array, weight: Array) -> Array:
        return jnp.matmul(weight, rows[0], preferred_element_type=dtype)[None]

    def one_on_tpu(rows: Array, weight: Array) -> Array:
        # One row alone would run on the vector unit. The barrier hides from XLA that seven rows are
        # zeros.
        padded = lax.optimization_barrier(jnp.pad(rows, ((0, 7), (0, 0))))
        return plain(padded, weight)[:1]

    def few_on_cpu(rows: Array, weight: Array) -> Array:
        # The number of rows is rounded up to one with a fast kernel. The barrier keeps XLA from
        # rewriting the product into the plain form.
        padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
        product = jnp.tensordot(weight, padded.T, 1, preferred_element_type=dtype)
        product = lax.optimization_barrier(product)
        return jnp.moveaxis(product, -1, 0)[: len(rows)]

    def flat_on_cpu(rows: Array, weight: Array) -> Array:
        # XLA on CPU copies a weight of several output axes to lay it flat.
        flat = plain(rows, weight.reshape(-1, weight.shape[-1]))
        return flat.reshape(-1, *weight.shape[:-1])

    if len(rows) == 1:
        return lax.platform_dependent(rows, weight, cpu=one_on_cpu, tpu=one_on_tpu, default=plain)
    if len(rows) <= _FEW_ROWS:
        return lax.platform_dependent(rows, weight, cpu=few_on_cpu, default=plain)
    if weight.ndim > 2:
        return lax.platform_dependent(rows, weight, cpu=flat_on_cpu, default=plain)
    return plain(rows, weight)


def _quantised(x: Array, weight: Quantised, bias: Array | None, dtype: Any) -> Array:
    # The scale comes after the product, so that the operand is a pure conversion of 8 bits, which
    # compilers for TPU and GPU fuse into the product.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    *out_dims, in_dim = weight.shape

    def converted(rows: Array, weight: Quantised) -> Array:
        return linear(rows, weight.values.astype(rows.dtype), dtype=dtype)

    def on_cpu(rows: Array, weight: Quantised) -> Array:
        kind = int8_products() if weight.values.dtype == jnp.int8 else None
        if kind == "kernel" or kind == "integer":
            multiply = multiply_integers
        elif kind == "float" and rows.dtype == jnp.float32 and len(rows) <= _MAX_SUMMED_ROWS:
            multiply = _sum_products
        elif weight.values.size <= _BLOCK_SIZE:
            return converted(rows, weight)
        else:
            multiply = _convert_blocks
        sums = None if weight.sums is None else weight.sums.reshape(-1)
        flat = weight.replace(values=weight.values.reshape(-1, in_dim), sums=sums)
        return multiply(rows, flat).astype(dtype).reshape(-1, *out_dims)

    if weight.is_tiled:
        flat = weight.values.reshape(-1, in_dim), weight.sums.reshape(-1), weight.scale.reshape(-1)
        out = multiply_tiles(rows.astype(jnp.float32), *flat, num_limbs=weight.num_limbs)
        out = out.reshape(-1, *out_dims).astype(dtype)
    else:
        out = lax.platform_dependent(rows, weight, cpu=on_cpu, default=converted)
        out = (out.astype(jnp.float32) * weight.scale[None]).astype(dtype)
    out = out if bias is None else out + bias[None]
    return out.reshape(*x.shape[:-1], *out_dims)


# --------------------------------------------------------------------------------------------------
# Products with a weight of 8 bits on a CPU
#
# Our kernel, and YNNPACK's, which XLA hands a product of two matrices of 8 bits, read 8 bits per
# weight and convert none. So a row is written as a sum of int8 limbs with one scale:
#
#     x = scale * (limb 0 + limb 1 / 256 + limb 2 / 256**2)
#
# and the limbs of all rows are the rows of one product. Integer sums are exact in any order, and a
# factor of two is exact, fused with the addition or not. So a row's product has the same bits alone
# and among other rows, in any tree, batch or prefill chunk, for any number of threads and on any
# processor. Three limbs are as exact as float32 (2**-24 of a row's largest element). Drafts have
# two: their numbers decide what is proposed, not what is kept. `config.processor` says where float
# products take their place, and which processors want uint8 limbs.


def multiply_integers(
    rows: Float[Array, "rows in_dim"], weight: Quantised
) -> Float[Array, "rows out"]:
    """Multiplies float32 rows by the int8 values of a weight [out, in], with int32 sums.

    Args:
      rows: converted to float32; the error is from rounding each to `weight.num_limbs` limbs.
      weight: its scale is not applied. If it has sums, the limbs are multiplied as uint8.
    """
    num_limbs = weight.num_limbs
    scale, limbs = split_limbs(rows.astype(jnp.float32), num_limbs)
    stacked = limbs.reshape(-1, limbs.shape[-1])
    if weight.sums is not None:
        sums = _sum_integers(stacked, weight.values) - 128 * weight.sums[None]
    elif len(stacked) > 1:
        sums = _sum_integers((stacked ^ 128).astype(jnp.int8), weight.values)
    else:  # XLA would run one row in a slower loop
        signed = (stacked ^ 128).astype(jnp.int8)
        padded = lax.optimization_barrier(jnp.pad(signed, ((0, 1), (0, 0))))
        sums = _sum_integers(padded, weight.values)[:1]
    sums = sums.reshape(num_limbs, len(rows), -1).astype(jnp.float32)
    total = sums[num_limbs - 1]
    for index in reversed(range(num_limbs - 1)):
        total = sums[index] + total / 256
    return total * scale


def split_limbs(
    rows: Float[Array, "rows in_dim"], num_limbs: int
) -> tuple[Float[Array, "rows 1"], UInt[Array, "limbs rows in_dim"]]:
    """Writes rows as limbs times a scale per row.

    Returns:
      The scales, and the limbs plus 128 as uint8.
    """
    highest = jnp.abs(rows).max(axis=-1, keepdims=True)
    scale = jnp.where(highest == 0, 1.0, highest * np.float32(1 / 127))
    shifts = np.arange(num_limbs, dtype=np.int32)[::-1, None, None] * 8
    offset = int((128 << shifts).sum())
    fixed_point = (
        jnp.round(rows * (1 / scale) * 256.0 ** (num_limbs - 1)).astype(jnp.int32) + offset
    )
    return scale, (fixed_point[None] >> shifts).astype(jnp.uint8)


def _sum_integers(rows: Array, values: Array) -> Array:
    # With this precision JAX does not convert operands of two types.
    return lax.dot_general(
        rows,
        values,
        (((1,), (1,)), ((), ())),
        precision=lax.DotAlgorithmPreset.DEFAULT,
        preferred_element_type=jnp.int32,
    )


def _sum_products(rows: Float[Array, "rows in_dim"], weight: Quantised) -> Array:
    """Multiplies up to `_MAX_SUMMED_ROWS` rows by int8 values in float32."""
    # XLA on CPU fuses conversion, product and sum into one loop, which reads the 8 bits once for
    # all rows. The first barrier ties the conversion to the decoding loop: XLA would otherwise
    # hoist it and read 32 bits in every turn. The second keeps the sum from becoming a plain
    # product.
    limit, products = _SUMMED_ROWS[-1], []
    for first in range(0, len(rows), limit):
        chunk = rows[first : first + limit]
        padding = next(count for count in _SUMMED_ROWS if count >= len(chunk)) - len(chunk)
        padded = jnp.pad(chunk, ((0, padding), (0, 0)))
        values, padded = lax.optimization_barrier((weight.values, padded))
        sums = (values.astype(jnp.float32)[:, None] * padded[None]).sum(-1)
        products.append(lax.optimization_barrier(sums).T[: len(chunk)])
    return jnp.concatenate(products)


def _convert_blocks(rows: Float[Array, "rows in_dim"], weight: Quantised) -> Array:
    """Multiplies rows by values of 8 bits, converted a block at a time, which stays in the cache.

    XLA on CPU would write all converted values to memory.
    """

    def multiply(outputs: Array) -> Array:
        return jnp.matmul(rows, outputs.astype(rows.dtype), preferred_element_type=jnp.float32)

    values, size = weight.values, max(1, _BLOCK_SIZE // weight.shape[-1])
    return lax.map(multiply, values, batch_size=size).T
