"""The draft of EAGLE-3, and PosS on it: inner states of the target, normed inputs, an own head.

A feature is either the inputs of several target layers, concatenated, or a specialist's prediction
before its output norm. A row holds the embedding e of token x_{j+1} and a state g: `fc` of the
target's feature, or the predicted feature as it is. The layer attends with `[norm(e); norm(g)]`,
adds to g, and its normed output meets the draft's own head. All specialists read one stream of keys
and values: specialist 0 writes the context's, and a drafted row keeps the ones of the specialist
that drafted it (EAGLE-3, arXiv 2503.01840). Variants norm in other places:
`norm_before_residual`, `fc_norm` and `output_norm` of the config. A draft may have its own width
and embedding.

P-EAGLE drafts all positions in one pass: rows after the first hold a mask token
and a learned feature in place of what is not known yet.
"""

from typing import Any

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.model.layers import (
    WIDENS,
    DecoderLayer,
    Parameter,
    RMSNorm,
    layer_rows,
    linear_rows,
    norm_row,
    rms_norm,
)
from poss_jax.model.linear import linear
from poss_jax.model.specialists import Family, add_layers, draw_specialists, side_by_side
from poss_jax.shapes import Array, Float, Params

_PARTS = ("low", "middle", "high")
"""The parts of a target's feature whose norms `fc_norm: each` has."""


class Specialist(DecoderLayer):
    """One layer over rows [e; g] of two halves."""

    norm_before_residual: bool = False  # whether it adds to the normed g rather than to g

    def setup(self) -> None:
        super().setup()
        self.feature_norm = RMSNorm(self.config.rms_norm_eps)

    def normed(self, hidden: Float[Array, "B T both"]) -> Float[Array, "B T both"]:
        """Norms both halves."""
        embedded, state = jnp.split(hidden, 2, axis=-1)
        return jnp.concatenate([self.input_norm(embedded), self.feature_norm(state)], axis=-1)

    def finish(
        self, hidden: Float[Array, "B T both"], attended: Float[Array, "B T NH"]
    ) -> Float[Array, "B T D"]:
        """Adds the attention output and the MLP to the state."""
        state = jnp.split(hidden, 2, axis=-1)[1]
        return super().finish(
            self.feature_norm(state) if self.norm_before_residual else state, attended
        )


def init(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft: `{"embed"?, "fc", "fc_norm"?, "specialists": [...], "norm", "head"}`.

    With several layers in the first specialist also `"further"`.
    """
    if len(config.aux_layers) < 2:
        raise UserError(
            "aux_layers: an EAGLE-3 draft reads at least two layers of the target, got "
            f"{len(config.aux_layers)}"
        )
    if config.fc_norm == "each" and len(config.aux_layers) != len(_PARTS):
        raise UserError(
            f"fc_norm each: want {len(_PARTS)} layers of the target, got {len(config.aux_layers)}; "
            "give three aux_layers"
        )
    D, width = config.layer.hidden_size, len(config.aux_layers) * config.feature_size
    if width == D:  # `join` tells features apart by their width
        raise UserError(f"hidden_size {D}: want another width than the target's features together")
    fc_key, head_key, *keys = jax.random.split(key, config.num_specialists + 2)
    num_tokens = config.head_size or config.layer.vocab_size
    fc = {"weight": jax.random.normal(fc_key, (D, width)) * 0.02}
    if config.fc_bias:
        fc["bias"] = jnp.zeros(D)
    draft = {
        "fc": fc,
        "specialists": draw_specialists(layer, config, keys, width=2 * D),
        "norm": {"scale": jnp.ones(D)},
        "head": {"weight": jax.random.normal(head_key, (num_tokens, D)) * 0.02},
    }
    if config.fc_norm == "whole":
        draft["fc_norm"] = {"scale": jnp.ones(width)}
    elif config.fc_norm == "each":
        draft["fc_norm"] = {name: {"scale": jnp.ones(config.feature_size)} for name in _PARTS}
    if config.has_embedding:
        embedding = jax.random.normal(jax.random.fold_in(key, 0), (config.layer.vocab_size, D))
        draft["embed"] = {"weight": embedding * 0.02}
    if config.mask_token is not None:
        draft["mask"] = {"weight": jax.random.normal(jax.random.fold_in(key, 9), (1, 1, width))}
    return add_layers(draft, config, key)


def layer(config: DraftConfig) -> Specialist:
    """Describes the layer of one specialist."""
    return Specialist(config.layer, norm_before_residual=config.norm_before_residual)


def join(
    params: Params,
    config: DraftConfig,
    embedded: Float[Array, "*rows D"],
    features: Float[Array, "*rows F"],
) -> Float[Array, "*rows both"]:
    """Joins the embedding of token j+1 and the state made from the feature of token j.

    As in the original, the width distinguishes target features from predicted ones.
    """
    is_predicted = features.shape[-1] == embedded.shape[-1]
    state = feed_back if is_predicted else fuse
    return side_by_side(params, embedded, state(params, config, features))


def fuse(
    params: Params, config: DraftConfig, features: Float[Array, "*rows F"]
) -> Float[Array, "*rows D"]:
    """Projects the target's features, normed first if the draft has norms before `fc`."""
    eps = config.layer.rms_norm_eps
    if config.fc_norm == "whole":
        features = rms_norm(features, params["fc_norm"]["scale"], eps=eps)
    elif config.fc_norm == "each":
        scales = [params["fc_norm"][name]["scale"] for name in _PARTS]
        parts = jnp.split(features, len(_PARTS), axis=-1)
        normed = [rms_norm(*pair, eps=eps) for pair in zip(parts, scales, strict=True)]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params["fc"]["weight"], params["fc"].get("bias"))


def feed_back(
    params: Params, config: DraftConfig, features: Float[Array, "*rows D"]
) -> Float[Array, "*rows D"]:
    """Returns predicted features as the next specialist reads them."""
    return read(params, config, features) if config.output_norm == "fed_back" else features


def read(
    params: Params, config: DraftConfig, features: Float[Array, "*rows D"]
) -> Float[Array, "*rows D"]:
    """Norms predicted features, unless the draft's head reads them raw."""
    if config.output_norm is None:
        return features
    return rms_norm(features, params["norm"]["scale"], eps=config.layer.rms_norm_eps)


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs EAGLE-3 reads of a target with this many, at least 7."""
    return (2, num_layers // 2, num_layers - 3)


def default_fields(target: LlamaConfig, num_tokens: int) -> dict[str, Any]:
    """Sets the layers a new draft for a target reads, and the size of its head.

    Takes EAGLE-3's layers, or the last three if the target has fewer than 7.
    """
    n = target.num_layers
    if n < 2:
        raise UserError("an EAGLE-3 draft wants a target of two layers or more, got one layer")
    layers = default_aux_layers(n) if n >= 7 else tuple(range(max(0, n - 3), n))
    return {"kv": "shared", "aux_layers": layers, "head_size": num_tokens}


EAGLE3 = Family(
    parameters={
        "embed/weight": Parameter("embed_tokens.weight", WIDENS),
        # Its input is several inner states, so only its output is sharded.
        **linear_rows("fc", "fc", (("tensor", "fsdp"), None)),
        "mask/weight": Parameter("mask_hidden", (None, None, None)),
        **norm_row("fc_norm", "input_norm"),
        **norm_row("fc_norm/low", "fc_norm.0"),
        **norm_row("fc_norm/middle", "fc_norm.1"),
        **norm_row("fc_norm/high", "fc_norm.2"),
        **layer_rows("specialists", "layers"),
        **layer_rows("further", "further_layers"),
        **norm_row("specialists/*/feature_norm", "layers.*.hidden_norm"),
        **norm_row("norm", "norm"),
        "head/weight": Parameter("lm_head.weight", WIDENS),
    },
    init=init,
    layer=layer,
    join=join,
    read=read,
    default_fields=default_fields,
    fuse=fuse,
    feed_back=feed_back,
    method=lambda config: config.family if config.mask_token is None else "p-eagle",
    is_trained_in_chains=True,
)
