"""The frozen Llama: prefill in chunks, one-token decode, and tree verification.

A feature is the hidden state after the final norm, `logits = features @ head.T`; for drafts that
read inner layers, it is the concatenated inputs of these layers (the residual stream, no norm).
Parameters are `{"embed": {"weight"}, "layers": [...], "norm": {"scale"}, "head": {"weight"}}`; a
tied model holds the same array twice. Decoding takes a list of layers, training (`encode` of
`documents.py`) stacked ones.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import LlamaConfig
from poss_jax.model.cache import KeysValues, KVCache, attend_cached, commit_rows
from poss_jax.model.layers import (
    WIDENS,
    DecoderLayer,
    Parameter,
    fuse_layer,
    init_layer,
    layer_rows,
    norm_row,
    rms_norm,
    zero_outputs,
)
from poss_jax.model.linear import linear
from poss_jax.model.sharding import highest_of_groups
from poss_jax.shapes import Array, Bool, Float, Int, Params

TARGET = {
    "embed/weight": Parameter("model.embed_tokens.weight", WIDENS),
    **layer_rows("layers", "model.layers"),
    **norm_row("norm", "model.norm"),
    "head/weight": Parameter("lm_head.weight", WIDENS),
}
"""Every parameter that a target may have."""


class Prefilled(NamedTuple):
    """Prompts in the cache."""

    logits: Array  # [B V] float32, logits of each prompt's last row
    features: Array  # [B 1 F], features of each prompt's last row, F = D, or D per requested layer
    cache: KVCache  # holds all prompts, committed
    visited: Any  # last return value of `visit`


class Prefill(struct.PyTreeNode):
    """Prompts on their way into the cache, chunk by chunk."""

    cache: KVCache  # the chunks so far
    hidden: Array  # [B 1 D], final hidden state of each prompt's last row, once its chunk has run
    features: Array  # [B 1 F], features of that row, F as in `Prefilled`
    carry: Any  # last return value of `visit`


class Verified(struct.PyTreeNode):
    """The target's output for the nodes of a tree."""

    logits: Array  # [B M V] float32, logits of every node
    features: Array  # [B M F], features of every node, F as in `Prefilled`
    rows: KeysValues  # their keys and values, not yet in the cache


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


def without_tied_head(params: Params, config: LlamaConfig) -> Params:
    """Drops a head that is the embedding, which trains it."""
    return {name: x for name, x in params.items() if name != "head" or not config.tie_embeddings}


def stack_layers(layers: list[Params]) -> Params:
    """Joins a list of equal layers (or specialists) into one tree with a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def insert_layers(layers: list[Params], num_layers: int) -> list[Params]:
    """Inserts new layers evenly into a target without changing its output.

    A new layer is a copy of the one before it that adds zero to the residual stream until it is
    trained (block expansion, LLaMA Pro, arXiv 2401.02415).

    Args:
      num_layers: number to return, at least the present number.
    """
    sources = [index * len(layers) // num_layers for index in range(num_layers)]
    return [
        zero_outputs(layers[source]) if source in sources[:index] else layers[source]
        for index, source in enumerate(sources)
    ]


def fuse_target(
    params: Params, config: LlamaConfig, put: Callable[[Params], Params] = lambda item: item
) -> Params:
    """Fuses the projections of every layer of a list (`fuse_layer`), one layer after the other.

    Empties the list on the way, so that at most one layer is held twice.

    Args:
      put: moves fused parameters to their devices.
    """
    layers, remaining = [], params["layers"]
    while remaining:
        layer = fuse_layer(remaining.pop(0), config, parts="qkv")
        layers += put({"layers": [layer]})["layers"]
    return put({name: item for name, item in params.items() if name != "layers"}) | {
        "layers": layers
    }


def compute_dtype(params: Params) -> jnp.dtype:
    """Dtype that a target, its caches and its drafts compute in: its embedding's."""
    return params["embed"]["weight"].dtype


def read_logits(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits under a head, float32: rounded to bfloat16, the best two would often be equal."""
    return linear(hidden, params["head"]["weight"], dtype=jnp.float32)


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
    chunk: int,
    aux_layers: tuple[int, ...] = (),
    visit: Callable[[Any, Array, Array], Any] = lambda carry, first, features: carry,
    carry: Any = None,
) -> Prefilled:
    """Runs whole prompts through an empty cache; see `begin_prefill` and `run_chunks`."""
    begun = begin_prefill(params, config, cache, aux_layers=aux_layers, carry=carry)
    num_chunks = (highest_of_groups(lengths.max()) + chunk - 1) // chunk
    settings: Any = {"chunk": chunk, "aux_layers": aux_layers, "visit": visit}
    state = run_chunks(params, config, begun, tokens, lengths, (0, num_chunks), **settings)
    return end_prefill(params, state, lengths)


def begin_prefill(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
    carry: Any = None,
) -> Prefill:
    """Makes the state before the first chunk.

    Args:
      cache: empty.
      aux_layers: layers whose inputs are the features; empty: the final hidden state. Static.
      carry: first carry of `visit`.
    """
    hidden = jnp.zeros((len(cache.length), 1, config.hidden_size), compute_dtype(params))
    features = jnp.concatenate([hidden] * max(len(aux_layers), 1), axis=-1)
    return Prefill(cache=cache, hidden=hidden, features=features, carry=carry)


def run_chunks(
    params: Params,
    config: LlamaConfig,
    prefill: Prefill,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    chunks: tuple[Array | int, Array | int],
    *,
    chunk: int,
    aux_layers: tuple[int, ...] = (),
    visit: Callable[[Any, Array, Array], Any] = lambda carry, first, features: carry,
) -> Prefill:
    """Runs some chunks of prompts, padded on the right, through the target and commits them.

    Args:
      prefill: all chunks before; its cache has at least P rows, rounded up to chunks.
      tokens: prompts, padded with any token.
      lengths: tokens of each prompt, at least 1.
      chunks: index of the first chunk to run, and one past the last.
      chunk: tokens of each prompt per forward. Static.
      aux_layers: see `begin_prefill`.
      visit: (carry, first row of a chunk, its features [B chunk F]) -> carry.
    """
    tokens = jnp.pad(tokens, ((0, 0), (0, -tokens.shape[1] % chunk)))
    depths = jnp.broadcast_to(jnp.arange(chunk)[None], (len(tokens), chunk))

    def run(index: Array, state: Prefill) -> Prefill:
        first = index * chunk
        new = lax.dynamic_slice_in_dim(tokens, first, chunk, axis=1)
        hidden, features, rows = _run_layers(
            params, config, state.cache, new, depths, None, aux_layers
        )
        return Prefill(
            cache=commit_rows(state.cache, rows, jnp.full_like(lengths, chunk)),
            hidden=_last_row(state.hidden, hidden, lengths - 1 - first),
            features=_last_row(state.features, features, lengths - 1 - first),
            carry=visit(state.carry, first, features),
        )

    return lax.fori_loop(*chunks, run, prefill)


def end_prefill(params: Params, prefill: Prefill, lengths: Int[Array, " B"]) -> Prefilled:
    """Finishes prompts whose chunks have all run: logits and caches."""
    logits = read_logits(params, prefill.hidden)[:, 0]
    cache = prefill.cache.replace(length=lengths)
    return Prefilled(logits, prefill.features, cache, prefill.carry)


def verify(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Int[Array, "B M"],
    depths: Int[Array, "B M"],
    ancestors: Bool[Array, "B M M"],
    *,
    aux_layers: tuple[int, ...] = (),
) -> Verified:
    """Scores all nodes of a tree in one pass.

    Args:
      cache: everything before the root, the next token to be committed.
      tokens: the nodes, root first.
      depths: distance of each node from the root.
      ancestors: True where the second node is the first one or lies on its path to the root.
      aux_layers: see `begin_prefill`.
    """
    hidden, features, rows = _run_layers(
        params, config, cache, tokens, depths, ancestors, aux_layers
    )
    return Verified(read_logits(params, hidden), features, rows)


def decode(
    params: Params, config: LlamaConfig, cache: KVCache, tokens: Int[Array, " B"]
) -> tuple[Float[Array, "B V"], KVCache]:
    """Runs and commits one token per sequence; returns the logits of the next one."""
    batch = len(tokens)
    depths, ancestors = jnp.zeros((batch, 1), jnp.int32), jnp.ones((batch, 1, 1), bool)
    out = verify(params, config, cache, tokens[:, None], depths, ancestors)
    return out.logits[:, 0], commit_rows(cache, out.rows, jnp.ones_like(tokens))


def _run_layers(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    depths: Int[Array, "B T"],
    can_attend: Bool[Array, "B T T"] | None,
    aux_layers: tuple[int, ...],
) -> tuple[Array, Array, KeysValues]:
    """Runs the list of layers over rows at `depths` after the committed ones.

    The rows attend each other as in `attend_cached`.

    Returns:
      Their hidden states after the final norm, their features, their keys and values.
    """
    positions = cache.length[:, None] + depths
    hidden = embed(params["embed"]["weight"], tokens)
    inputs, rows = [], KeysValues([], [])
    for index, layer_params in enumerate(params["layers"]):
        inputs.append(hidden)
        stored = cache.k[index], cache.v[index]
        at = cache.length, positions, cache.frequencies
        hidden, (k, v) = _run_layer(layer_params, config, hidden, stored, *at, can_attend)
        rows = KeysValues([*rows.k, k], [*rows.v, v])
    final = rms_norm(hidden, params["norm"]["scale"], eps=config.rms_norm_eps)
    aux = [inputs[index] for index in aux_layers]
    return final, jnp.concatenate(aux, axis=-1) if aux else final, rows


@partial(jax.jit, static_argnums=1)  # traces one layer for all
def _run_layer(
    params: Params,
    config: LlamaConfig,
    hidden: Array,
    stored: tuple[Array, Array],
    length: Array,
    positions: Array,
    frequencies: Array,
    can_attend: Array | None,
) -> tuple[Array, tuple[Array, Array]]:
    layer = DecoderLayer(config).bind({"params": params})
    q, k, v = layer.queries_keys_values(layer.normed(hidden), positions, frequencies)
    attended = attend_cached(q, stored, length, (k, v), can_attend)
    return layer.finish(hidden, attended), (k, v)


def _last_row(
    last: Float[Array, "B 1 F"], rows: Float[Array, "B T F"], index: Int[Array, " B"]
) -> Float[Array, "B 1 F"]:
    """Picks each sequence's row if this chunk has it; else keeps the old one."""
    T = rows.shape[1]
    taken = jnp.take_along_axis(rows, jnp.clip(index, 0, T - 1)[:, None, None], axis=1)
    return jnp.where(((index >= 0) & (index < T))[:, None, None], taken, last)
