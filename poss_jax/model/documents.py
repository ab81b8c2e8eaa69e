"""Rows that hold several documents: what a step is fed, and what follows from it."""

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
      loss_mask: True where a token is trained on.
      documents: which document of its row a token belongs to; 0: padding.
      features: features of the target for every token, where they are known already.
    """

    tokens: Any  # [B T] int32; or in its place, as in the others, a shape or a sharding
    loss_mask: Any  # [B T] bool
    documents: Any  # [B T] int32
    features: Any = None  # [B T F]; F = D for every inner layer that is read, and for the last


def positions_in(documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of every token in its own document, from 0.

    documents  1 1 1 2 2 0 0
    positions  0 1 2 0 1 0 1
    """
    row = jnp.arange(documents.shape[1])[None]
    before = jnp.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return row - lax.cummax(jnp.where(documents != before, row, 0), axis=1)


def lengths_in(documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Number of tokens of the document every token belongs to."""
    return positions_in(documents) + positions_in(documents[:, ::-1])[:, ::-1] + 1


def frequencies_in(
    documents: Int[Array, "B T"], rope: RopeConfig, head_dim: int
) -> Float[Array, "B *rows half"]:
    """Rotary frequencies of every token by the length of its document, of a row if none matters."""
    frequencies, lengths = partial(rope_frequencies, rope, head_dim), lengths_in(documents)
    return jax.vmap(frequencies)(lengths) if rope.follows_length else frequencies(lengths[:, 0])


def is_last_in(documents: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Marks the last token of every document."""
    return positions_in(documents[:, ::-1])[:, ::-1] == 0


def trained_rows(batch: TrainBatch, by: Literal["label", "token"] = "label") -> Bool[Array, "B T"]:
    """Marks rows of a draft that are trained: row j reads feature j and token j + 1.

    answer         . . a b c d . .
    rows by label  . 1 1 1 . . . .   row j reads j + 1 and predicts j + 2, both of the answer
    rows by token  . . 1 1 1 1 . .   token j is of the answer, and not its document's last

    Args:
      batch: rows of text.
      by: `label`: rows that decoding an answer runs; `token`: those of the reference.
    """
    if by == "token":
        return batch.loss_mask & ~is_last_in(batch.documents) & (batch.documents > 0)
    num_behind = positions_in(batch.documents[:, ::-1])[:, ::-1]
    read, predicted = (jnp.roll(batch.loss_mask, -ahead, axis=1) for ahead in (1, 2))
    return read & predicted & (num_behind > 1) & (batch.documents > 0)


def cut_batch(tree: Any, num_parts: int) -> Any:
    """Cuts [B ...] arrays into [parts B/parts ...].

    A part takes every n-th row, so that each device cuts the rows it has.
    """

    def cut(x: Array) -> Array:
        return split_batch(jnp.swapaxes(x.reshape(-1, num_parts, *x.shape[1:]), 0, 1), axis=1)

    return jax.tree.map(cut, tree)


def count(mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Number of True, as what sums are divided by."""
    return mask.sum(dtype=jnp.float32)
