"""The draft of EAGLE-2, HASS and PosS: one projection `fc`, and a layer for every specialist.

The draft reads pairs (feature f_j, token x_{j+1}) at position j: `x_j = fc([embed(x_{j+1}); f_j])`,
one decoder layer without input and final norm, the target's head. A first specialist of several
layers has Llama's after it, which read hidden states alone.
"""

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig
from poss_jax.model.layers import DecoderLayer, layer_rows, linear_rows, zero_outputs
from poss_jax.model.linear import linear
from poss_jax.model.specialists import Family, add_layers, draw_specialists
from poss_jax.shapes import Array, Float, Params


def init(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft: `{"fc": {"weight", "bias"?}, "specialists": [...], "further"?}`."""
    D = config.layer.hidden_size
    fc_key, *keys = jax.random.split(key, config.num_specialists + 1)
    fc = {"weight": jax.random.normal(fc_key, (D, 2 * D)) * 0.02}
    if config.fc_bias:
        fc["bias"] = jnp.zeros(D)
    draft = {"fc": fc, "specialists": draw_specialists(layer, config, keys, width=D)}
    return add_layers(draft, config, key)


def pass_through(draft: Params) -> Params:
    """Makes the draft pass features on: `fc` is [unchanged | identity], specialists add nothing."""
    weight = draft["fc"]["weight"]
    of_tokens = weight[:, : len(weight)]
    fc = draft["fc"] | {"weight": jnp.concatenate([of_tokens, jnp.eye(len(weight))], axis=1)}
    return draft | {
        "fc": fc,
        "specialists": [zero_outputs(layer) for layer in draft["specialists"]],
    }


def layer(config: DraftConfig) -> DecoderLayer:
    """Describes the layer of one specialist."""
    return DecoderLayer(config.layer, has_input_norm=False)


def join(
    params: Params,
    config: DraftConfig,
    embedded: Float[Array, "*rows D"],
    features: Float[Array, "*rows D"],
) -> Float[Array, "*rows D"]:
    """Joins the embedding of token j+1 and the feature of token j into the draft's input x_j."""
    del config
    fc = params["fc"]
    return linear(jnp.concatenate([embedded, features], axis=-1), fc["weight"], fc.get("bias"))


def join_tokens(params: Params, embedded: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Computes the part of `join` that depends on the token; the bias belongs to it."""
    fc = params["fc"]
    return linear(embedded, fc["weight"][:, : embedded.shape[-1]], fc.get("bias"))


def join_features(
    params: Params, of_tokens: Float[Array, "*rows D"], features: Float[Array, "*rows D"]
) -> Float[Array, "*rows D"]:
    """Adds the part of `join` that depends on the feature."""
    return of_tokens + linear(features, params["fc"]["weight"][:, features.shape[-1] :])


EAGLE = Family(
    parameters={
        # Its input is split in two (embedding, feature), so only its output is sharded.
        **linear_rows("fc", "fc", (("tensor", "fsdp"), None)),
        **layer_rows("specialists", "layers"),
        **layer_rows("further", "further_layers"),
    },
    init=init,
    layer=layer,
    join=join,
    join_tokens=join_tokens,
    join_features=join_features,
    method=lambda config: "eagle2" if config.trained_depth == 1 else "hass",
    pass_through=pass_through,
    may_share_kv=True,
)
