"""The draft of EAGLE-2, HASS and PosS: one projection `fc`, and a layer for every specialist.

The draft reads pairs (feature f_j, token x_{j+1}) at position j: `x_j = fc([embed(x_{j+1}); f_j])`,
one decoder layer without input and final norm, the target's head.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from poss_jax.config import DraftConfig, UserError
from poss_jax.model.layers import DecoderLayer, init_layer, linear
from poss_jax.shapes import Array, Float, Int, Params

KEY_VALUE = ("k", "v", "k_norm")
"""Parameters of attention that keys and values depend on."""


# A specialist is drawn like one layer of so many: what it adds to its input starts small.
_DRAWN_AMONG = 16


def init_draft(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft: `{"fc": {"weight", "bias"?}, "specialists": [...]}`."""
    D = config.layer.hidden_size
    fc_key, *keys = jax.random.split(key, config.num_specialists + 1)
    fc = {"weight": jax.random.normal(fc_key, (D, 2 * D)) * 0.02}
    if config.fc_bias:
        fc["bias"] = jnp.zeros(D)
    layer = DecoderLayer(replace(config.layer, num_layers=_DRAWN_AMONG), has_input_norm=False)
    return {"fc": fc, "specialists": [init_layer(layer, key) for key in keys]}


def specialist(params: Params, config: DraftConfig, index: int) -> DecoderLayer:
    """Binds the layer of one specialist to its parameters."""
    layer = DecoderLayer(config.layer, has_input_norm=False)
    return layer.bind({"params": params["specialists"][index]})


def extend_specialists(draft: Params, num_specialists: int) -> Params:
    """Fills a list of specialists up with copies of its last one: how PosS starts from EAGLE.

    Raises:
      UserError: the draft has more specialists than wanted.
    """
    have = draft["specialists"]
    if len(have) > num_specialists:
        raise UserError(
            f"want {num_specialists} specialists, got a draft with {len(have)}; "
            "start from one with no more than wanted"
        )
    return draft | {"specialists": have + [have[-1]] * (num_specialists - len(have))}


def share_keys_values(draft: Params, reduce: Callable[[Array], Array]) -> Params:
    """Gives all specialists the same key and value parameters (or gradients of them).

    Args:
      draft: specialists stacked.
      reduce: [E ...] -> [1 ...], what becomes of those there are.
    """

    def share(path: tuple[Any, ...], leaf: Array) -> Array:
        is_shared = path[0].key == "attention" and path[1].key in KEY_VALUE
        return jnp.broadcast_to(reduce(leaf), leaf.shape) if is_shared else leaf

    return draft | {"specialists": jax.tree.map_with_path(share, draft["specialists"])}


def has_shared_keys_values(draft: Params) -> bool:
    """Whether a list of specialists has one key and one value projection."""

    def of(specialist: Params) -> list[Array]:
        attention = specialist["attention"]
        return jax.tree.leaves({name: attention[name] for name in KEY_VALUE if name in attention})

    first, *others = map(of, draft["specialists"])
    return all(bool((a == b).all()) for other in others for a, b in zip(first, other, strict=True))


def attach(draft: Params, target: Params, vocabulary: Int[Array, " Vd"] | None = None) -> Params:
    """Lends a draft the target's embedding and head.

    Args:
      draft: `{"fc", "specialists"}`.
      target: the target's parameters.
      vocabulary: target ids the draft may propose; None: all of them.
    """
    head = target["head"]["weight"]
    if vocabulary is None:
        vocabulary = jnp.arange(len(head), dtype=jnp.int32)
    else:
        head = head[vocabulary]
    shared = {"embed": target["embed"], "head": {"weight": head}, "vocabulary": vocabulary}
    return {**draft, **shared}


def fuse(
    fc: Params, embedded: Float[Array, "*rows D"], features: Float[Array, "*rows D"]
) -> Float[Array, "*rows D"]:
    """Joins the embedding of token j+1 and the feature of token j into the draft's input x_j."""
    return linear(jnp.concatenate([embedded, features], axis=-1), fc["weight"], fc.get("bias"))


def fuse_tokens(fc: Params, embedded: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """The part of `fuse` that depends on the token; the bias belongs to it."""
    return linear(embedded, fc["weight"][:, : embedded.shape[-1]], fc.get("bias"))


def fuse_features(fc: Params, features: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """The part of `fuse` that depends on the feature."""
    return linear(features, fc["weight"][:, features.shape[-1] :])


def fuse_pairs(
    params: Params, tokens: Int[Array, "B T"], features: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Draft inputs of (feature, token) pairs."""
    return fuse(params["fc"], jnp.take(params["embed"]["weight"], tokens, axis=0), features)
