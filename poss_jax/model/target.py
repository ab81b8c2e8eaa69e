"""The frozen Llama: prefill, one-token decode, tree verification, and plain encoding of text.

A feature is the hidden state after the final norm, `logits = features @ head.T`; or, for drafts
that ask for it, the inputs of some layers side by side (the residual stream, no norm). Parameters
are `{"embed": {"weight"}, "layers": [...], "norm": {"scale"}, "head": {"weight"}}`; a tied model
holds the same array twice. Decoding wants a list of layers, `encode` the same layers stacked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import LlamaConfig
from poss_jax.model.blockwise import attend_documents, group_heads, ungroup_heads
from poss_jax.model.cache import KVCache, commit_rows, scratch_mask, write_layer
from poss_jax.model.documents import positions_in
from poss_jax.model.layers import (
    WIDENS,
    DecoderLayer,
    Parameter,
    attend,
    init_layer,
    layer_rows,
    linear,
    norm_row,
    rms_norm,
    rope_frequencies,
)
from poss_jax.model.sharding import split_batch
from poss_jax.shapes import Array, Bool, Float, Int, Params

TARGET = {
    "embed/weight": Parameter("model.embed_tokens.weight", WIDENS),
    **layer_rows("layers", "model.layers"),
    **norm_row("norm", "model.norm"),
    "head/weight": Parameter("lm_head.weight", WIDENS),
}
"""Every parameter that a target may have."""


class TargetOutput(struct.PyTreeNode):
    """The target's output for some tokens.

    Attributes:
      logits: prefill: of each prompt's last row; else of every row given.
      features: of every row given, F = D, or D for each of the layers asked for.
      cache: the rows given are written; only prefill and decode commit them.
    """

    logits: Array  # [B V] or [B M V]
    features: Array  # [B T F]
    cache: KVCache


def init_target(config: LlamaConfig, key: Array) -> Params:
    """Draws a random target (a list of layers)."""
    keys = jax.random.split(key, config.num_layers + 2)
    shape = (config.vocab_size, config.hidden_size)
    embed = {"weight": jax.random.normal(keys[0], shape) * (0.02 if config.tie_embeddings else 1)}
    head = {"weight": jax.random.normal(keys[1], shape) * 0.02}
    return {
        "embed": embed,
        "layers": [init_layer(DecoderLayer(config), key) for key in keys[2:]],
        "norm": {"scale": jnp.ones(config.hidden_size)},
        "head": embed if config.tie_embeddings else head,
    }


def stack_layers(layers: list[Params]) -> Params:
    """Joins a list of equal layers (or specialists) into one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def compute_dtype(params: Params) -> jnp.dtype:
    """Dtype that a target, its caches and its drafts compute in: the one of its embedding."""
    return params["embed"]["weight"].dtype


def embed(weight: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Looks tokens up."""
    return jnp.take(weight, tokens, axis=0)


def prefill(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Runs prompts, padded on the right, through an empty cache and commits them.

    Args:
      params: the target.
      config: its shape.
      cache: empty; at least P rows.
      tokens: prompts, padded to P with any token.
      lengths: tokens of each prompt, at least 1.
      aux_layers: layers whose inputs are the features; none: the final hidden state is. Static.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    causal = positions[:, :, None] >= positions[:, None, :]
    start = jnp.zeros_like(cache.length)

    def attention(cache: KVCache, index: int, q: Array, k: Array, v: Array):
        return write_layer(cache, index, k, v, start), attend(q, k, v, causal)

    hidden, features, cache = _run_layers(
        params, config, cache, tokens, positions, attention, aux_layers
    )
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)
    logits = linear(last, params["head"]["weight"])[:, 0]
    return TargetOutput(logits=logits, features=features, cache=cache.replace(length=lengths))


def verify(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    ancestors: Bool[Array, "B M M"],
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Scores all nodes of a tree in one pass; their keys and values become scratch rows.

    Args:
      params: the target.
      config: its shape.
      cache: M rows must be free above `length`.
      tokens: the nodes, root first.
      depths: distance of each node from the root, which is the next token to be committed.
      ancestors: True where the second node is the first one or lies on its path to the root.
      aux_layers: see `prefill`.
    """
    positions = cache.length[:, None] + depths
    can_attend = scratch_mask(cache.length, ancestors, size=cache.size)

    def attention(cache: KVCache, index: int, q: Array, k: Array, v: Array):
        cache = write_layer(cache, index, k, v, cache.length)
        return cache, attend(q, cache.k[index], cache.v[index], can_attend)

    hidden, features, cache = _run_layers(
        params, config, cache, tokens, positions, attention, aux_layers
    )
    logits = linear(hidden, params["head"]["weight"])
    return TargetOutput(logits=logits, features=features, cache=cache)


def decode(
    params: Params, config: LlamaConfig, cache: KVCache, tokens: Int[Array, " B"]
) -> TargetOutput:
    """Runs and commits one token per sequence."""
    batch = len(tokens)
    depths, ancestors = jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch, 1, 1), bool)
    out = verify(params, config, cache, tokens[:, None], depths, ancestors)
    return out.replace(cache=commit_rows(out.cache, depths, jnp.ones_like(tokens)))


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
      config: its shape.
      tokens: rows of text.
      documents: which document of its row a token belongs to; None: one document per row.
      block: rows and columns whose attention scores are held at a time. Static.
      aux_layers: layers whose inputs stand before the final hidden state in every row. Static.
    """
    B, T = tokens.shape
    documents = jnp.ones_like(tokens) if documents is None else documents
    positions = positions_in(documents)
    frequencies = rope_frequencies(config.rope, config.head_dim, jnp.full(B, T))

    kept = sorted(set(aux_layers))
    places = [kept.index(n) if n in kept else len(kept) for n in range(config.num_layers)]

    def body(carry: tuple[Array, Array], step: tuple[Params, Array]) -> tuple[Any, None]:
        (hidden, aux), (layer_params, place) = carry, step
        if kept:
            aux = lax.dynamic_update_index_in_dim(aux, hidden, place, 0)
        layer = DecoderLayer(config).bind({"params": layer_params})
        normed = layer.normed(hidden)
        q = group_heads(layer.queries(normed, positions, frequencies), config.num_kv_heads)
        k, v = layer.keys_values(normed, positions, frequencies)
        mean = attend_documents(q, k, v, documents, jnp.array(0), block=block).mean
        hidden = layer.finish(hidden, ungroup_heads(mean).astype(hidden.dtype))
        return (split_batch(hidden), aux), None

    hidden = split_batch(embed(params["embed"]["weight"], tokens))
    # One place more than layers asked for: the inputs of all others are written there.
    aux = jnp.zeros((len(kept) + 1 if kept else 0, *hidden.shape), hidden.dtype)
    steps = params["layers"], jnp.array(places)
    (hidden, aux), _ = lax.scan(body, (hidden, split_batch(aux, axis=1)), steps)
    final = rms_norm(hidden, params["norm"]["scale"], eps=config.rms_norm_eps)
    return jnp.concatenate([*(aux[kept.index(n)] for n in aux_layers), final], axis=-1)


AttentionFn = Callable[[KVCache, int, Array, Array, Array], tuple[KVCache, Array]]


def _run_layers(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Array,
    positions: Array,
    attention: AttentionFn,
    aux_layers: tuple[int, ...],
) -> tuple[Array, Array, KVCache]:
    """Runs the list of layers; `attention` says what their queries attend and what is cached.

    Returns:
      The hidden state after the final norm, the features, and the cache.
    """
    hidden = embed(params["embed"]["weight"], tokens)
    inputs = []
    for index, layer_params in enumerate(params["layers"]):
        inputs.append(hidden)
        layer = DecoderLayer(config).bind({"params": layer_params})
        normed = layer.normed(hidden)
        q = layer.queries(normed, positions, cache.frequencies)
        k, v = layer.keys_values(normed, positions, cache.frequencies)
        cache, attended = attention(cache, index, q, k, v)
        hidden = layer.finish(hidden, attended)
    final = rms_norm(hidden, params["norm"]["scale"], eps=config.rms_norm_eps)
    aux = [inputs[index] for index in aux_layers]
    return final, jnp.concatenate(aux, axis=-1) if aux else final, cache
