"""Products of rows with a weight of 8 bits on a CPU.

XLA hands a product of two int8 matrices to YNNPACK, whose integer kernels read 8 bits per weight
and convert none. So a row is written as a sum of int8 limbs with one scale:

    x = scale * (limb 0 + limb 1 / 128 + limb 2 / 128**2)

and the limbs of all rows are the rows of one product. Integer sums are exact in any order, and a
factor of two is exact, fused with the addition or not. So a row's product has the same bits alone
and among other rows, in any tree, batch or prefill chunk, for any number of threads and on any
processor. Three limbs are as exact as float32 (2**-22 of a row's largest element). Drafts have two:
their numbers decide what is proposed, not what is kept. `config.processor` says where float
products take their place.
"""

import jax.numpy as jnp
from jax import lax

from poss_jax.shapes import Array, Float, Int

_BASE = 128  # limbs after the first lie between -64 and 64

# Row counts that `sum_products` pads to; 1 row, or 5 to 7, take longer than the next of these.
_SUMMED_ROWS = (2, 4, 8, 16)

MAX_SUMMED_ROWS = 32
"""Rows up to which float sums are faster than conversions."""

BLOCK_SIZE = 1 << 19
"""Elements of a quantised weight that `convert_blocks` converts at a time."""


def multiply_integers(
    rows: Float[Array, "rows in_dim"], values: Int[Array, "out in_dim"], *, num_limbs: int
) -> Float[Array, "rows out"]:
    """Multiplies float32 rows by int8 values, with int32 sums.

    Args:
      rows: converted to float32; the error is from rounding each to `num_limbs` limbs.
      values: int8.
      num_limbs: int8 numbers per element of a row. Static.
    """
    scale, limbs = split_limbs(rows.astype(jnp.float32), num_limbs)
    stacked = limbs.reshape(-1, limbs.shape[-1])
    if len(stacked) == 1:  # XLA would run one row in a slower loop
        stacked = lax.optimization_barrier(jnp.pad(stacked, ((0, 1), (0, 0))))
    contract_last = ((1,), (1,)), ((), ())
    sums = lax.dot_general(stacked, values, contract_last, preferred_element_type=jnp.int32)
    sums = sums[: num_limbs * len(rows)].reshape(num_limbs, len(rows), -1).astype(jnp.float32)
    total = sums[num_limbs - 1]
    for index in reversed(range(num_limbs - 1)):
        total = sums[index] + total / _BASE
    return total * scale


def split_limbs(
    rows: Float[Array, "rows in_dim"], num_limbs: int
) -> tuple[Float[Array, "rows 1"], Int[Array, "limbs rows in_dim"]]:
    """Writes rows as int8 limbs times a scale per row; each limb holds what the last one left."""
    highest = jnp.abs(rows).max(axis=-1, keepdims=True)
    scale = jnp.where(highest == 0, 1.0, highest / 127)
    remainder = rows / scale
    limbs = []
    for _ in range(num_limbs):
        limbs.append(jnp.round(remainder))
        remainder = (remainder - limbs[-1]) * _BASE
    return scale, jnp.stack(limbs).astype(jnp.int8)


def sum_products(
    rows: Float[Array, "rows in_dim"], values: Int[Array, "out in_dim"]
) -> Float[Array, "rows out"]:
    """Multiplies up to `MAX_SUMMED_ROWS` rows by int8 values in float32."""
    limit = _SUMMED_ROWS[-1]
    chunks = (rows[first : first + limit] for first in range(0, len(rows), limit))
    return jnp.concatenate([_sum_chunk(chunk, values) for chunk in chunks])


def _sum_chunk(rows: Array, values: Array) -> Array:
    # XLA on CPU fuses conversion, product and sum into one loop, which reads the 8 bits once for
    # all rows. The first barrier ties the conversion to the decoding loop: XLA would otherwise
    # hoist it and read 32 bits in every turn. The second keeps the sum from becoming a plain
    # product.
    padding = next(count for count in _SUMMED_ROWS if count >= len(rows)) - len(rows)
    padded = jnp.pad(rows, ((0, padding), (0, 0)))
    values, padded = lax.optimization_barrier((values, padded))
    sums = (values.astype(jnp.float32)[:, None] * padded[None]).sum(-1)
    return lax.optimization_barrier(sums).T[: len(rows)]


def convert_blocks(rows: Float[Array, "rows in_dim"], values: Array) -> Float[Array, "rows out"]:
    """Multiplies rows by values of 8 bits, converted a block at a time, which stays in the cache.

    XLA on CPU would write all converted values to memory.
    """

    def multiply(outputs: Array) -> Array:
        return jnp.matmul(rows, outputs.astype(rows.dtype), preferred_element_type=jnp.float32)

    return lax.map(multiply, values, batch_size=max(1, BLOCK_SIZE // values.shape[-1])).T
