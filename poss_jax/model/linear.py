"""Products of rows with a weight, in the spelling that each backend runs fastest.

`benchmarks/linear.py` times the spellings. A quantised weight goes through the same function.
"""

import math

import jax.numpy as jnp
from jax import lax

from poss_jax.model.quantise import Quantised
from poss_jax.shapes import Array, Float

# XLA on CPU multiplies a few rows by `x @ w.T` 1.1 to 1.7 times slower than as `(w @ x.T).T`
# (benchmarks/linear.py).
_FEW_ROWS = 64

# Numbers of a quantised weight that CPUs convert at a time.
_BLOCK = 1 << 19


def linear(
    x: Float[Array, "*rows in_dim"],
    weight: Float[Array, "*out_dims in_dim"] | Quantised,
    bias: Float[Array, "*out_dims"] | None = None,
) -> Float[Array, "..."]:
    """Multiplies rows by a weight kept `[out, in]`, in the spelling its backend runs fastest."""
    if isinstance(weight, Quantised):
        return _quantised(x, weight, bias)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if len(rows) == 1:
        out = lax.platform_dependent(
            rows, weight, cpu=_one_row_on_cpu, tpu=_one_row_on_tpu, default=_plain
        )
    elif len(rows) <= _FEW_ROWS:
        out = lax.platform_dependent(rows, weight, cpu=_few_rows_on_cpu, default=_plain)
    elif weight.ndim > 2:
        out = lax.platform_dependent(rows, weight, cpu=_flat_on_cpu, default=_plain)
    else:
        out = _plain(rows, weight)
    out = out.reshape(*x.shape[:-1], *weight.shape[:-1])
    return out if bias is None else out + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def _quantised(x: Array, weight: Quantised, bias: Array | None) -> Array:
    # The scale comes after the product, whose operand is then a conversion of 8 bits alone, which
    # compilers for TPU and GPU make part of the product.
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if weight.values.size <= _BLOCK:
        out = _converted(rows, weight.values)
    else:
        out = lax.platform_dependent(rows, weight.values, cpu=_blocks_on_cpu, default=_converted)
    out = (out.astype(jnp.float32) * weight.scale[None]).astype(x.dtype)
    out = out if bias is None else out + bias[None]
    return out.reshape(*x.shape[:-1], *weight.shape[:-1])


def _converted(rows: Array, values: Array) -> Array:
    return linear(rows, values.astype(rows.dtype))


def _blocks_on_cpu(rows: Array, values: Array) -> Array:
    # XLA on CPU writes what it converts to memory. A block at a time stays in the cache.
    def product(output: Array) -> Array:
        return rows @ output.astype(rows.dtype)

    width = values.shape[-1]
    outputs = values.reshape(-1, width)
    out = lax.map(product, outputs, batch_size=max(1, _BLOCK // width)).T
    return out.reshape(-1, *values.shape[:-1])


def _plain(rows: Array, weight: Array) -> Array:
    return lax.dot_general(rows, weight, (((1,), (weight.ndim - 1,)), ((), ())))


def _flat_on_cpu(rows: Array, weight: Array) -> Array:
    # XLA on CPU copies a weight of several output axes to lay it flat.
    return _plain(rows, weight.reshape(-1, weight.shape[-1])).reshape(-1, *weight.shape[:-1])


def _one_row_on_cpu(rows: Array, weight: Array) -> Array:
    return (weight @ rows[0])[None]


def _one_row_on_tpu(rows: Array, weight: Array) -> Array:
    # One row alone would be multiplied and summed on the vector unit. The barrier keeps XLA from
    # seeing that seven rows are zeros.
    padded = lax.optimization_barrier(jnp.pad(rows, ((0, 7), (0, 0))))
    return _plain(padded, weight)[:1]


def _few_rows_on_cpu(rows: Array, weight: Array) -> Array:
    # The number of rows is rounded up to where the library has a fast kernel. The barrier keeps
    # XLA from rewriting the product into the plain form.
    padded = jnp.pad(rows, ((0, -len(rows) % 8), (0, 0)))
    product = lax.optimization_barrier(jnp.tensordot(weight, padded.T, 1))
    return jnp.moveaxis(product, -1, 0)[: len(rows)]
