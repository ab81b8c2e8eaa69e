"""The frozen Llama: its layers over cached rows, one-token decode, and tree verification.

A feature is the hidden state after the final norm, `logits = features @ head.T`; for drafts that
read inner layers, it is the concatenated inputs of these layers (the residual stream, no norm).
Parameters are `{"embed": {"weight"}, "layers": [...], "norm": {"scale"}, "head": {"weight"}}`; a
tied model holds the same array twice. Decoding takes a list of layers, training (`encode` of
`documents.py`) stacked ones.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

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
from poss_jax.shapes import Array, Bool, Float, Int, Params

TARGET = {
    "embed/weight": Parameter("model.embed_tokens.weight", WIDENS),
    **layer_rows("layers", "model.layers"),
    **norm_row("norm", "model.norm"),
    "head/weight": Parameter("lm_head.weight", WIDENS),
}
"""Every parameter that a target may have."""


class Verified(struct.PyTreeNode):
    """The target's output for the nodes of a tree."""

    logits: Array  # [B M V] float32, logits of every node
    features: Array  # [B M F], features of every node, F = D, or D per requested layer
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
    """Inserts new layers evenly into a target, up to `num_layers`, without changing its output.

    A new layer is a copy of the one before it that adds zero to the residual stream until it is
    trained (block expansion, LLaMA Pro, arXiv 2401.02415).
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

    Empties the list on the way, so that at most one layer is held twice; `put` moves what is fused
    to its devices.
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
      tokens: the nodes, root first, `depths` away from it.
      ancestors: True where the second node is the first one or lies on its path to the root.
      aux_layers: see `run_layers`.
    """
    hidden, features, rows = run_layers(
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


def run_layers(
    params: Params,
    config: LlamaConfig,
    cache: KVCache,
    tokens: Int[Array, "B T"],
    depths: Int[Array, "B T"],
    can_attend: Bool[Array, "B T T"] | None,
    aux_layers: tuple[int, ...] = (),
) -> tuple[Float[Array, "B T D"], Float[Array, "B T F"], KeysValues]:
    """Runs the list of layers over rows at `depths` after the committed ones.

    Args:
      can_attend: which rows attend each other, as in `attend_cached`.
      aux_layers: layers whose inputs are the features; empty: the final hidden state. Static.

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
    q, k, v = layer.attention.queries_keys_values(layer.normed(hidden), positions, frequencies)
    attended = attend_cached(q, stored, length, (k, v), can_attend)
    return layer.finish(hidden, attended), (k, v)
