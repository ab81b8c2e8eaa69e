"""Rows that hold several documents: the batch of a step, and what is derived from it."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import RopeConfig
from poss_jax.model.layers import rope_frequencies
from poss_jax.model.sharding import split_batch
from poss_jax.shapes import Array, Bool, Float, Int


class TrainBatch(struct.PyTreeNode):
    """Rows of text for one step.

    Attributes:
      tokens: the text.
      loss_mask: True for trained tokens.
      documents: document of a token within its row; 0: padding.
      features: the target's features for every token, if already computed.
    """

    tokens: Any  # [B T] int32; or a shape or sharding in its place, as in the others
    loss_mask: Any  # [B T] bool
    documents: Any  # [B T] int32
    features: Any = None  # [B T F]; F = D per inner layer that is read, and for the last


def positions_in(documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of every token in its document, from 0.

    documents  1 1 1 2 2 0 0
    positions  0 1 2 0 1 0 1
    """
    row = jnp.arange(documents.shape[1])[None]
    before = jnp.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return row - lax.cummax(jnp.where(documents != before, row, 0), axis=1)


def lengths_in(documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Length of every token's document."""
    return positions_in(documents) + positions_in(documents[:, ::-1])[:, ::-1] + 1


def frequencies_in(
    documents: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> Float[Array, "B *rows half"]:
    """Rotary frequencies per token by its document's length; per row if length does not matter."""
    frequencies, lengths = partial(rope_frequencies, rope, head_dim), lengths_in(documents)
    return jax.vmap(frequencies)(lengths) if rope.follows_length else frequencies(lengths[:, 0])


def is_last_in(documents: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Marks the last token of every document."""
    return positions_in(documents[:, ::-1])[:, ::-1] == 0


def trained_rows(batch: TrainBatch, by: Literal["label", "token"] = "label") -> Bool[Array, "B T"]:
    """Marks the trained rows of a draft: row j reads feature j and token j + 1.

    answer         . . a b c d . .
    rows by label  . 1 1 1 . . . .   row j reads j + 1 and predicts j + 2, both of the answer
    rows by token  . . 1 1 1 1 . .   token j is of the answer, and not its document's last

    Args:
      batch: rows of text.
      by: `label`: rows that decoding an answer runs; `token`: the reference's rows.
    """
    if by == "token":
        return batch.loss_mask & ~is_last_in(batch.documents) & (batch.documents > 0)
    num_behind = positions_in(batch.documents[:, ::-1])[:, ::-1]
    read, predicted = (jnp.roll(batch.loss_mask, -ahead, axis=1) for ahead in (1, 2))
    return read & predicted & (num_behind > 1) & (batch.documents > 0)


def cut_batch(tree: Any, num_parts: int) -> Any:
    """Cuts [B ...] arrays into [parts B/parts ...].

    A part takes every n-th row, so that each device cuts its own rows.
    """

    def cut(x: Array) -> Array:
        return split_batch(jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1), axis=1)

    return jax.tree.map(cut, tree)


def count(mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Counts True values, as a denominator."""
    return mask.sum(dtype=jnp.float32)
