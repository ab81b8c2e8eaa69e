"""Tiny models with random weights: no scale is 1 and no bias 0, so that none can be left out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config import DraftConfig, LlamaConfig
from poss_jax.draft import init_draft
from poss_jax.shapes import Params
from poss_jax.target import init_target, stack_layers


def tiny_llama(**changes: Any) -> LlamaConfig:
    """Two layers with grouped-query attention."""
    shape = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    return LlamaConfig(**(shape | changes))


def random_target(config: LlamaConfig, seed: int = 0) -> Params:
    """A target with a list of layers."""
    params = _draw(lambda: init_target(config, jax.random.key(0)), seed)
    return params | {"head": params["embed"]} if config.tie_embeddings else params


def random_draft(config: DraftConfig, seed: int = 1) -> Params:
    """A draft with a list of specialists, no two alike."""
    return _draw(lambda: init_draft(config, jax.random.key(0)), seed)


def stacked(params: Params) -> Params:
    """The same target or draft as training holds it, layers or specialists in one tree."""
    name = "layers" if "layers" in params else "specialists"
    return params | {name: jax.jit(stack_layers)(params[name])}


def random_tokens(config: LlamaConfig, *shape: int, seed: int = 2) -> jax.Array:
    """Token ids of the vocabulary."""
    drawn = np.random.default_rng(seed).integers(0, config.vocab_size, shape)
    return jnp.asarray(drawn, jnp.int32)


def _draw(init, seed: int) -> Params:
    """Fills what `init` would make: outputs of variance 1, scales near 1, biases near 0."""
    rng = np.random.default_rng(seed)

    def leaf(path, shape: jax.ShapeDtypeStruct) -> jax.Array:
        normal = rng.standard_normal(shape.shape)
        match path[-1].key:
            case "weight":
                normal *= shape.shape[-1] ** -0.5
            case "scale":
                normal = 1 + 0.2 * normal
            case "bias":
                normal *= 0.2
        return jnp.asarray(normal, shape.dtype)

    return jax.tree_util.tree_map_with_path(leaf, jax.eval_shape(init))
