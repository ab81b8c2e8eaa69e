"""A policy of tunix (its Llama 3) as parameters of a target."""

from dataclasses import replace
from typing import Any

from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from poss_jax import UserError
from poss_jax.config.models import LlamaConfig, RopeConfig
from poss_jax.shapes import Array, Params

ROPE_THETA = 1_000_000
"""Rope theta of tunix 0.1.7, which ignores `ModelConfig.rope_theta` and scales no frequencies."""

OUTER = {
    "embedder/input_embedding": "embed/weight",
    "final_norm/w": "norm/scale",
    "lm_head/w": "head/weight",
}
LAYER = {
    "input_layernorm/w": "input_norm/scale",
    "attn/q_proj/w": "attention/q/weight",
    "attn/k_proj/w": "attention/k/weight",
    "attn/v_proj/w": "attention/v/weight",
    "attn/o_proj/w": "attention/o/weight",
    "post_attention_layernorm/w": "mlp_norm/scale",
    "mlp/gate_proj/kernel": "mlp/gate/weight",
    "mlp/up_proj/kernel": "mlp/up/weight",
    "mlp/down_proj/kernel": "mlp/down/weight",
}


def rotate_as_tunix(config: LlamaConfig) -> LlamaConfig:
    """Returns the config of a target that computes what tunix computes with the same weights."""
    return replace(config, rope=RopeConfig(theta=ROPE_THETA))


def target_params(state: Any, dtype: Any) -> Params:
    """Converts the state of a policy; layers are in a list, linear weights `[out, in]`.

    Args:
      state: `nnx.state` of a `tunix.models.llama3.model.Llama3`.
      dtype: dtype of the parameters returned.

    Raises:
      UserError: a parameter that such a model does not have.
    """
    leaves = flatten_dict(nnx.to_pure_dict(state))
    named = {_name(path): leaf for path, leaf in leaves.items()}
    params = unflatten_dict(
        {name: _as_linear(name, leaf).astype(dtype) for name, leaf in named.items()}, sep="/"
    )
    layers = params["layers"]
    return params | {"layers": [layers[str(index)] for index in range(len(layers))]}


def _name(path: tuple[Any, ...]) -> str:
    """Name of a parameter of tunix in a target."""
    given = "/".join(map(str, path))
    if path[0] == "layers" and (inner := LAYER.get("/".join(path[2:]))):
        return f"layers/{path[1]}/{inner}"
    if given not in OUTER:
        raise UserError(
            f"policy: want the parameters of tunix's Llama 3, got {given}; "
            "merge adapters into the weights first"
        )
    return OUTER[given]


def _as_linear(name: str, leaf: Array) -> Array:
    """Turns a kernel, input axes first, into a matrix `[out, in]`; other arrays stay."""
    if leaf.ndim == 1 or name == "embed/weight":
        return leaf
    if name.endswith("/o/weight"):  # its input has two axes: heads and their width
        return leaf.reshape(-1, leaf.shape[-1]).T
    return leaf.reshape(len(leaf), -1).T
