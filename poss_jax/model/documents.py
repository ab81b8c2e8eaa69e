"""Rows that hold several documents: the batch of a step, and the target's pass over it."""

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import LlamaConfig, RopeConfig
from poss_jax.model.blockwise import attend_documents, group_heads, ungroup_heads
from poss_jax.model.layers import DecoderLayer, rms_norm, rope_frequencies
from poss_jax.model.sharding import split_batch
from poss_jax.model.target import embed
from poss_jax.shapes import Array, Bool, Float, Int, Params


class TrainBatch(struct.PyTreeNode):
    """Rows of text for one step."""

    tokens: Any  # [B T] int32, the text; or a shape or sharding in its place, as in the others
    loss_mask: Any  # [B T] bool, True for trained tokens
    documents: Any  # [B T] int32, document of a token within its row; 0: padding
    # the target's features for every token, if already computed
    features: Any = None  # [B T F]; F = D per inner layer that is read, and for the last


def positions_in(documents: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Position of every token in its document, from 0.

    documents  1 1 1 2 2 0 0
    positions  0 1 2 0 1 0 1
    """
    row = jnp.arange(documents.shape[1])[None]
    previous = jnp.pad(documents, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return row - lax.cummax(jnp.where(documents != previous, row, 0), axis=1)


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

    Decoding an answer runs the rows by label; the reference trains those by token.
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


def encode(
    params: Params,
    config: LlamaConfig,
    tokens: Int[Array, "B T"],
    documents: Int[Array, "B T"] | None = None,
    *,
    block: int = 256,
    aux_layers: tuple[int, ...] = (),
) -> Float[Array, "B T F"]:
    """Final hidden states of whole rows of text, without a cache; `params["layers"]` is stacked.

    Args:
      params: the target, its layers in one tree with a leading axis (one compiled layer).
      documents: document of a token within its row; None: one document per row.
      block: rows and columns whose scores are in memory at once. Static.
      aux_layers: layers whose inputs precede the final hidden state in every row. Static.
    """
    documents = jnp.ones_like(tokens) if documents is None else documents
    positions = positions_in(documents)
    frequencies = frequencies_in(documents, config.rope, config.head_dim)

    kept = sorted(set(aux_layers))
    rows = [kept.index(n) if n in kept else len(kept) for n in range(config.num_layers)]

    def body(carry: tuple[Array, Array], step: tuple[Params, Array]) -> tuple[Any, None]:
        (hidden, aux), (layer_params, row) = carry, step
        if kept:
            aux = lax.dynamic_update_index_in_dim(aux, hidden, row, 0)
        layer = DecoderLayer(config).bind({"params": layer_params})
        hidden = encode_layer(layer, hidden, documents, positions, frequencies, block=block)
        return (hidden, aux), None

    dtype = params["norm"]["scale"].dtype  # in training the embedding may be wider
    hidden = split_batch(embed(params["embed"]["weight"], tokens).astype(dtype))
    # One slot more than requested layers: all other layers' inputs go there.
    aux = jnp.zeros((len(kept) + 1 if kept else 0, *hidden.shape), hidden.dtype)
    steps = params["layers"], jnp.array(rows)
    (hidden, aux), _ = lax.scan(body, (hidden, split_batch(aux, axis=1)), steps)
    final = rms_norm(hidden, params["norm"]["scale"], eps=config.rms_norm_eps)
    return jnp.concatenate([*(aux[kept.index(n)] for n in aux_layers), final], axis=-1)


def encode_layer(
    layer: DecoderLayer,
    hidden: Float[Array, "B T D"],
    documents: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, "B *rows half"],
    *,
    block: int,
    window: int | None = None,
) -> Float[Array, "B T D"]:
    """Runs one layer, with its parameters, over whole rows of text; see `encode`.

    Each row attends the newest `window` ones up to itself; None: all.
    """
    normed = layer.normed(hidden)
    q = layer.attention.queries(normed, positions, frequencies)
    q = group_heads(q, layer.config.num_kv_heads)
    k, v = layer.attention.keys_values(normed, positions, frequencies)
    mean = attend_documents(q, k, v, documents, jnp.array(0), block=block, window=window).mean
    return split_batch(layer.finish(hidden, ungroup_heads(mean).astype(hidden.dtype)))
