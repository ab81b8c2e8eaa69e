"""Tiny models with random weights: no scale is 1 and no bias 0, so that none can be left out."""

import os
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.checkpoint.record import TargetIdentity, new_record
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, LlamaConfig, MeshConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.engine.engine import Engine
from poss_jax.learn.recursion import DraftInputs, first_version, predict, take_specialist, unroll
from poss_jax.model.families import init_draft
from poss_jax.model.target import init_target, stack_layers
from poss_jax.shapes import Array, Params


def _converts_float16() -> bool:
    """Whether this processor, or the one that XLA is to compile for, has F16C or is no x86."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    about = Path("/proc/cpuinfo")
    has_f16c = not about.exists() or "f16c" in about.read_text().split()
    return has_f16c and "xla_cpu_max_isa=SSE4_2" not in os.environ.get("XLA_FLAGS", "")


needs_f16c = pytest.mark.skipif(
    not _converts_float16(),
    reason="no F16C: LLVM calls functions for float16 that XLA lacks; fp8 is read through float16",
)
IDENTITY = TargetIdentity(name="tiny", embedding_sha256="e", head_sha256="h")


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
    params = _draw(_shapes(init_target, config), seed)
    return params | {"head": params["embed"]} if config.tie_embeddings else params


def random_draft(config: DraftConfig, seed: int = 1) -> Params:
    """A draft with a list of specialists, no two alike."""
    return _draw(_shapes(init_draft, config), seed)


def certain_pair(
    llama: LlamaConfig, config: DraftConfig, *, sharpness: float, disorder: float, seed: int = 0
) -> tuple[Params, Params]:
    """A target that nearly always knows the next token, and a draft that nearly agrees with it.

    The next token follows from the last one only, plus what attention and MLP add.

    Args:
      llama: shape of the target.
      config: shape of the draft.
      sharpness: factor of the logits; from 3 on a probability of 1 is usual.
      disorder: factor of what attention and MLP add, where target and draft differ.
      seed: seed of all weights.
    """
    D = llama.hidden_size

    def calm(layer: Params) -> Params:
        attention, mlp = layer["attention"], layer["mlp"]
        o, down = (linear["weight"] * disorder for linear in (attention["o"], mlp["down"]))
        attention = attention | {"o": {"weight": o}}
        return layer | {"attention": attention, "mlp": mlp | {"down": {"weight": down}}}

    target, draft = random_target(llama, seed), random_draft(config, seed + 1)
    embed = target["embed"]["weight"]
    embed = embed / jnp.sqrt(jnp.square(embed).mean(axis=1, keepdims=True))
    target |= {
        "embed": {"weight": embed},
        "layers": [calm(layer) for layer in target["layers"]],
        "norm": {"scale": jnp.ones(D)},
        "head": {"weight": target["head"]["weight"] * sharpness},
    }
    fc = jnp.concatenate([jnp.eye(D), jnp.zeros((D, D))], axis=1)  # the token, not the feature
    specialists = [calm(layer) for layer in draft["specialists"]]
    return target, draft | {"fc": {"weight": fc}, "specialists": specialists}


def exact_pair(
    llama: LlamaConfig, config: DraftConfig, *, sharpness: float, num_flipped: int, seed: int
) -> tuple[Params, Params]:
    """A target whose logits are whole numbers times a power of two, and a draft.

    They depend on the last token alone; no order of summation rounds them, so that a forward of any
    shape gives the same. Wants `rms_norm_eps` 0.

    Args:
      llama: shape of the target.
      config: shape of the draft.
      sharpness: factor of the logits, a power of two.
      num_flipped: dimensions that the draft sees with another sign; 0: it knows the target.
      seed: seed of all weights.
    """
    rng = np.random.default_rng(seed)
    target, draft = certain_pair(llama, config, sharpness=1.0, disorder=0.0)
    V, D = target["head"]["weight"].shape
    embed = rng.choice(np.float32([-1, 1]), (V, D))  # of RMS 1
    head = rng.integers(-4, 5, (V, D)).astype(np.float32) * sharpness
    signs = np.where(rng.permutation(D) < num_flipped, -1, 1).astype(np.float32)
    fc = np.concatenate([np.diag(signs), np.zeros((D, D), np.float32)], axis=1)
    target |= {"embed": {"weight": jnp.asarray(embed)}, "head": {"weight": jnp.asarray(head)}}
    return target, draft | {"fc": {"weight": jnp.asarray(fc)}}


def decode_all(weights: Weights, config: StaticShape, request: Request) -> DecodeState:
    """Decodes until every sequence is done, without the host in between."""
    return speculate.run_rounds(weights, config, request, speculate.start(weights, config, request))


def stacked(params: Params) -> Params:
    """The same target or draft as training holds it, layers or specialists in one tree."""
    name = "layers" if "layers" in params else "specialists"
    return params | {name: jax.jit(stack_layers)(params[name])}


def make_engine(
    llama: LlamaConfig,
    target: Params,
    config: DraftConfig | None = None,
    draft: Params | None = None,
    *,
    vocabulary: Sequence[int] | None = None,
    mesh: MeshConfig | None = None,
    **settings: Any,
) -> Engine:
    """An engine without a tokenizer; of a draft that is to be drawn, its shape is enough."""
    record = new_record(llama, IDENTITY, tokenizer_from=None)
    engine = Engine(record, target, EngineConfig(**settings), mesh=mesh)
    if config is None:
        return engine
    record = new_record(config, IDENTITY, tokenizer_from=None, draft_vocabulary=vocabulary)
    return engine.with_draft(record, random_draft(config) if draft is None else draft)


def assert_same(got: Any, want: Any) -> None:
    """Compares trees of arrays: their structure, types and every bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def rounding(added: int) -> float:
    """Bound of how far two orders of a float32 sum lie apart, in sizes of its largest part.

    Each addition rounds, and processors differ in their order and in whether products round first.

    Args:
      added: terms of the longest sum.
    """
    return added * float(np.finfo(np.float32).eps)


def random_tokens(config: LlamaConfig, *shape: int, seed: int = 2) -> jax.Array:
    """Token ids of the vocabulary."""
    drawn = np.random.default_rng(seed).integers(0, config.vocab_size, shape)
    return jnp.asarray(drawn, jnp.int32)


@cache
def _shapes(init: Callable[..., Params], config: Any) -> Params:
    return jax.eval_shape(lambda: init(config, jax.random.key(0)))


def _draw(shapes: Params, seed: int) -> Params:
    """Fills the shapes of a model: outputs of variance 1, scales near 1, biases near 0."""
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

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def predict_depths(
    draft: Params, config: DraftConfig, inputs: DraftInputs, depth: int, *, block: int
) -> Array:
    """Predictions [R B T D] of every depth; specialists stacked."""

    def visit(at, carry):
        parts = take_specialist(draft, at.specialist)
        prediction = predict(*parts, config, inputs, at, block=block)
        return prediction, carry, prediction

    versions = first_version(inputs.features, depth)
    return unroll(config, inputs, versions, None, visit, range(depth))[2]


jit_predict_depths = jax.jit(predict_depths, static_argnames=("config", "depth", "block"))
