"""Products of rows with a weight, in the spelling that each backend runs fastest.

docs/LOG.md has their times. A quantised weight goes through the same function.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.config.processor import int8_products
from poss_jax.model.products_on_cpu import (
    BLOCK_SIZE,
    MAX_SUMMED_ROWS,
    convert_blocks,
    multiply_integers,
    sum_products,
)
from poss_jax.model.quantise import Quantised
from poss_jax.shapes import Array, Float

# For a few rows XLA on CPU runs `x @ w.T` 1.1 to 1.7 times slower than `(w @ x.T).T`.
_FEW_ROWS = 64


def linear(
    x: Float[Array, "*rows in_dim"],
    weight: Float[Array, "*out_dims in_dim"] | Quantised,
    bias: Float[Array, "*out_dims"] | None = None,
    *,
    dtype: Any = None,
) -> Float[Array, "..."]:
    """Multiplies rows by a weight kept `[out, in]`, in the spelling its backend runs fastest.

    Args:
      x: rows.
      weight: weight of the same dtype, or a quantised one.
      bias: added to every row.
      dtype: dtype of the result, also of the sums; None: `x`'s.
    """
    dtype = x.dtype if dtype is None else dtype
    if isinstance(weight, Quantised):
        return _quantised(x, weight, bias, dtype)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    out = _product(rows, weight, dtype=dtype).reshape(*x.shape[:-1], *weight.shape[:-1])
    return out if bias is None else out + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


@partial(jax.jit, static_argnames="dtype")  # traces equal shapes once
def _product(rows: Array, weight: Array, *, dtype: Any) -> Array:
    one_on_cpu, one_on_tpu, few_on_cpu, flat_on_cpu, plain = (
        partial(spelling, dtype=dtype)
        for spelling in (_one_row_on_cpu, _one_row_on_tpu, _few_rows_on_cpu, _flat_on_cpu, _plain)
    )
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
    on_cpu, converted = (
        partial(spelling, dtype=dtype) for spelling in (_spelling_on_cpu(rows, weight), _converted)
    )
    out = lax.platform_dependent(rows, weight.values, cpu=on_cpu, default=converted)
    out = (out.astype(jnp.float32) * weight.scale[None]).astype(dtype)
    out = out if bias is None else out + bias[None]
    return out.reshape(*x.shape[:-1], *weight.shape[:-1])


def _spelling_on_cpu(rows: Array, weight: Quantised) -> Callable[..., Array]:
    kind = int8_products() if weight.values.dtype == jnp.int8 else None
    if kind == "integer":
        return partial(_flat, partial(multiply_integers, num_limbs=weight.num_limbs))
    if kind == "float" and rows.dtype == jnp.float32 and len(rows) <= MAX_SUMMED_ROWS:
        return partial(_flat, sum_products)
    return _converted if weight.values.size <= BLOCK_SIZE else partial(_flat, convert_blocks)


def _converted(rows: Array, values: Array, *, dtype: Any) -> Array:
    return linear(rows, values.astype(rows.dtype), dtype=dtype)


def _flat(multiply: Callable[..., Array], rows: Array, values: Array, *, dtype: Any) -> Array:
    out = multiply(rows, values.reshape(-1, values.shape[-1]))
    return out.astype(dtype).reshape(-1, *values.shape[:-1])


def _plain(rows: Array, weight: Array, *, dtype: Any = None) -> Array:
    axes = ((1,), (weight.ndim - 1,)), ((), ())
    return lax.dot_general(rows, weight, axes, preferred_element_type=dtype)


def _flat_on_cpu(rows: Array, weight: Array, *, dtype: Any) -> Array:
    # XLA on CPU copies a weight of several output axes to lay it flat.
    flat = _plain(rows, weight.reshape(-1, weight.shape[-1]), dtype=dtype)
    return flat.reshape(-1, *weight.shape[:-1])


def _one_row_on_cpu(rows: Array, weight: Array, *, dtype: Any) -> Array:
    return jnp.matmul(weight, rows[0], preferred_element_type=dtype)[None]


def _one_row_on_tpu(rows: Array, weight: Array, *, dtype: Any) -> Array:
    # One row alone would run on the vector unit. The barrier hides from XLA that seven rows are
    # zeros.
    padded = lax.optimization_barrier(jnp.pad(rows, ((0, 7), (0, 0))))
    return _plain(padded, weight, dtype=dtype)[:1]


def _few_rows_on_cpu(rows: Array, weight: Array, *, dtype: Any = None) -> Array:
    # The number of rows is rounded up to one with a fast kernel. The barrier keeps XLA from
    # rewriting the product into the plain form.
    padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
    product = jnp.tensordot(weight, padded.T, 1, preferred_element_type=dtype)
    product = lax.optimization_barrier(product)
    return jnp.moveaxis(product, -1, 0)[: len(rows)]
