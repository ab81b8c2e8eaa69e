"""Causal attention over long rows of documents, a block of scores at a time.

A block of rows meets one block of columns after the other and keeps a running softmax, so the [T T]
scores never exist (FlashAttention, arXiv 2205.14135); the backward pass recomputes each block's
weights from the kept sums. Columns left out of a softmax can be added later: a part of the columns
is described by its mean value and the log of its sum.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.model.layers import NOTHING, merge_heads
from poss_jax.shapes import Array, Float, Int


class Attended(NamedTuple):
    """A softmax over some columns."""

    mean: Array  # [B K G T H] float32, values averaged under it; zeros if no column may be attended
    log_sum: Array  # [B K G T] float32, logarithm of its denominator


def attend_documents(
    q: Float[Array, "B K G T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    documents: Int[Array, "B T"],
    lag: Int[Array, ""],
    *,
    block: int,
    window: int | None = None,
) -> Attended:
    """Attends, for every row, the columns of its document at least `lag` before it.

    Args:
      q: queries, in groups that share keys.
      lag: 0 includes the row itself; may be traced.
      block: rows and columns whose scores are in memory at once. Static.
      window: how many of the newest of these columns are attended; None: all. Static.
    """
    T = q.shape[3]
    block = min(block, T)
    padding = -T % block

    def padded(x: Array, axis: int) -> Array:
        widths = [(0, padding if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths) if padding else x

    args = padded(q, 3), padded(k, 2), padded(v, 2), padded(documents, 1)
    mean, log_sum = _attend(block, window, *args, lag)
    return Attended(mean[..., :T, :], log_sum[..., :T])


def group_heads(q: Float[Array, "B N T H"], num_groups: int) -> Float[Array, "B K G T H"]:
    """Groups the heads that share keys."""
    B, N, T, H = q.shape
    return q.reshape(B, num_groups, N // num_groups, T, H)


def ungroup_heads(mean: Float[Array, "B K G T H"]) -> Float[Array, "B T NH"]:
    """Concatenates the heads of every row."""
    B, K, G, T, H = mean.shape
    return merge_heads(mean.reshape(B, K * G, T, H))


def _attend_blocks(
    block: int, window: int | None, q: Array, k: Array, v: Array, documents: Array, lag: Array
) -> tuple[Array, Array]:
    scores_of = partial(_scores, lag, window, documents)

    def of_rows(step: tuple[Array, ...]) -> tuple[Array, Array]:
        i, q_rows, document_rows = step

        def add_columns(j: Array, carry: tuple[Array, Array, Array]):
            highest, total, mean = carry
            k_columns, v_columns = _slice(k, j, block, 2), _slice(v, j, block, 2)
            scores, can_attend = scores_of(q_rows, k_columns, i, j, document_rows)
            new_highest = jnp.maximum(highest, scores.max(axis=-1))
            weights = jnp.where(can_attend, jnp.exp(scores - new_highest[..., None]), 0.0)
            shrink = jnp.exp(highest - new_highest)
            return (
                new_highest,
                total * shrink + weights.sum(axis=-1),
                mean * shrink[..., None] + _weighted(weights, v_columns),
            )

        rows = q_rows.shape[:-1]
        start = jnp.full(rows, NOTHING), jnp.zeros(rows), jnp.zeros(q_rows.shape, jnp.float32)
        highest, total, mean = lax.fori_loop(0, i + 1, add_columns, start)
        safe = jnp.where(total > 0, total, 1.0)
        return mean / safe[..., None], highest + jnp.log(safe)

    mean, log_sum = lax.map(of_rows, _row_blocks(block, (q, 3), (documents, 1)))
    return _joined(mean), _joined(log_sum)


def _attend_forward(block: int, window: int | None, *args: Array):
    out = _attend_blocks(block, window, *args)
    return out, (args, out)


def _attend_backward(
    block: int, window: int | None, residuals: tuple, gradients: tuple[Array, Array]
):
    (q, k, v, documents, lag), (mean, log_sum) = residuals
    scores_of = partial(_scores, lag, window, documents)
    grad_mean, grad_log_sum = gradients
    # Each score's gradient is its weight times (gradient . value - gradient . mean).
    had = (grad_mean * mean).sum(axis=-1) - grad_log_sum

    def of_rows(carry: tuple[Array, Array], step: tuple[Array, ...]):
        i, q_rows, document_rows, log_sum_rows, grad_mean_rows, had_rows = step

        def add_columns(j: Array, carry: tuple[Array, Array, Array]):
            grad_q, grad_k, grad_v = carry
            k_columns, v_columns = _slice(k, j, block, 2), _slice(v, j, block, 2)
            scores, can_attend = scores_of(q_rows, k_columns, i, j, document_rows)
            weights = jnp.where(can_attend, jnp.exp(scores - log_sum_rows[..., None]), 0.0)
            grad_weights = jnp.einsum(
                "BKGTH,BKSH->BKGTS", grad_mean_rows, v_columns.astype(jnp.float32)
            )
            grad_scores = weights * (grad_weights - had_rows[..., None]) * q.shape[-1] ** -0.5
            grad_q = grad_q + _weighted(grad_scores, k_columns)
            grad_k = _add(grad_k, j, _spread(grad_scores, q_rows))
            return grad_q, grad_k, _add(grad_v, j, _spread(weights, grad_mean_rows))

        start = jnp.zeros(q_rows.shape, jnp.float32), *carry
        grad_q, grad_k, grad_v = lax.fori_loop(0, i + 1, add_columns, start)
        return (grad_k, grad_v), grad_q

    zeros = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = _row_blocks(block, (q, 3), (documents, 1), (log_sum, 3), (grad_mean, 3), (had, 3))
    (grad_k, grad_v), grad_q = lax.scan(of_rows, zeros, blocks)
    grad_q = _joined(grad_q).astype(q.dtype)
    return grad_q, grad_k.astype(k.dtype), grad_v.astype(v.dtype), None, None


_attend: Any = jax.custom_vjp(_attend_blocks, nondiff_argnums=(0, 1))
_attend.defvjp(_attend_forward, _attend_backward)


def _scores(
    lag: Any,  # a constant arrives as a number
    window: int | None,
    documents: Array,
    q_rows: Array,
    k_columns: Array,
    i: Array,
    j: Array,
    document_rows: Array,
) -> tuple[Array, Array]:
    """Scores of a block of rows against a block of columns, and which columns count."""
    block = q_rows.shape[-2]
    document_columns = _slice(documents, j, block, 1)
    row, column = i * block + jnp.arange(block), j * block + jnp.arange(block)
    age = row[:, None] - lag - column[None]
    is_known = age >= 0 if window is None else (age >= 0) & (age < window)
    can_attend = is_known[None] & (document_rows[:, :, None] == document_columns[:, None])
    can_attend = can_attend[:, None, None]
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_rows, k_columns, preferred_element_type=jnp.float32)
    return jnp.where(can_attend, scores * q_rows.shape[-1] ** -0.5, NOTHING), can_attend


def _weighted(weights: Array, values: Array) -> Array:
    return jnp.einsum(
        "BKGTS,BKSH->BKGTH",
        weights.astype(values.dtype),
        values,
        preferred_element_type=jnp.float32,
    )


def _spread(weights: Array, rows: Array) -> Array:
    return jnp.einsum("BKGTS,BKGTH->BKSH", weights, rows.astype(jnp.float32))


def _slice(x: Array, index: Array, block: int, axis: int) -> Array:
    return lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _add(total: Array, index: Array, block: Array) -> Array:
    start = index * block.shape[2]
    now = lax.dynamic_slice_in_dim(total, start, block.shape[2], 2)
    return lax.dynamic_update_slice_in_dim(total, now + block, start, 2)


def _row_blocks(block: int, *arrays: tuple[Array, int]) -> tuple[Array, ...]:
    """Cuts arrays along their row axis with the block's number as the first axis."""
    parts = []
    for x, axis in arrays:
        cut = x.reshape(*x.shape[:axis], -1, block, *x.shape[axis + 1 :])
        parts.append(jnp.moveaxis(cut, axis, 0))
    return jnp.arange(len(parts[0])), *parts


def _joined(blocks: Array) -> Array:
    """The reverse of `_row_blocks`: [blocks B K G T ...] -> [B K G T ...]."""
    x = jnp.moveaxis(blocks, 0, 3)
    return x.reshape(*x.shape[:3], -1, *x.shape[5:])
