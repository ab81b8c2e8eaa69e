"""What chains of a draft predict, in float64 and with nothing kept from step to step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models import (
    jit_predict_depths,
    random_draft,
    random_target,
    random_tokens,
    stacked,
    tiny_llama,
)
from test_recursion import draft_chains

from poss_jax.config.models import DraftConfig
from poss_jax.learn.recursion import DraftInputs
from poss_jax.model.specialists import borrow_from_target

LLAMA = tiny_llama()
T = 14

Predict = Callable[[Any, int, np.ndarray, np.ndarray], np.ndarray]
"""(draft, specialist, embeddings, features) -> what it predicts at these rows, which begin at 0."""


def check_chains(config: DraftConfig, predict: Predict, **near: Any) -> None:
    """Compares what training predicts, and what drafting does, with chains from every row.

    Args:
      config: shape of a draft of the tiny target, trained to depth 3.
      predict: the specialists' arithmetic in NumPy.
      near: tolerances.
    """
    target, draft = random_target(LLAMA), random_draft(config)
    tokens = random_tokens(LLAMA, 1, T + 1)
    features = jax.random.normal(jax.random.key(3), (1, T, LLAMA.hidden_size))
    embedded = target["embed"]["weight"][tokens[:, 1:]]
    starts = np.arange(T - 2)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (draft, embedded, features))
    wanted = np.array(
        [_follow(config, predict, wide[0], wide[1][0], wide[2][0], int(s)) for s in starts]
    )
    inputs = DraftInputs(features, embedded, jnp.ones((1, T), jnp.int32))
    trained = jit_predict_depths(stacked(draft), config, inputs, 3, block=4)
    chains = partial(draft_chains, tokens=tokens, features=features, starts=starts, depth=3)
    drafted = jax.jit(chains, static_argnums=0)(config, borrow_from_target(draft, target))
    for depth in range(3):
        of_rows = trained[depth, 0, starts + depth]
        np.testing.assert_allclose(of_rows, wanted[:, depth], **near)
        np.testing.assert_allclose(drafted[depth], wanted[:, depth], **near)


def _follow(
    config: DraftConfig,
    predict: Predict,
    draft: Any,
    embedded: np.ndarray,
    features: np.ndarray,
    start: int,
) -> list[np.ndarray]:
    """Predictions of the chain that starts at a row."""
    known = list(features[: start + 1])
    for step in range(config.trained_depth):
        rows = embedded[: len(known)], np.stack(known)
        known.append(predict(draft, config.specialist_at(step), *rows)[-1])
    return known[start + 1 :]


def predict_eagle(draft: Any, index: int, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Predicts as EAGLE-2's family does; the first specialist may be deep."""
    rows = np.concatenate([embedded, features], axis=1) @ draft["fc"]["weight"].T
    further = draft.get("further", []) if index == 0 else []
    for layer in (draft["specialists"][index], *further):
        rows = run_layer(layer, rows)
    return rows


def run_layer(layer: Any, rows: np.ndarray) -> np.ndarray:
    """One layer over rows 0, 1, ... in float64; each row attends itself and the rows before it."""
    of = layer["attention"]
    normed = norm(rows, layer["input_norm"]["scale"]) if "input_norm" in layer else rows
    at = np.arange(len(rows))
    q, k, v = (
        (normed @ of[name]["weight"].T).reshape(len(rows), -1, LLAMA.head_dim) for name in "qkv"
    )
    q, k = rotated(q, at, LLAMA.rope.theta), rotated(k, at, LLAMA.rope.theta)
    heads = []
    for head in range(LLAMA.num_heads):
        group = head * LLAMA.num_kv_heads // LLAMA.num_heads
        scores = q[:, head] @ k[:, group].T / np.sqrt(LLAMA.head_dim)
        shares = np.exp(np.where(at[:, None] >= at, scores, -np.inf))
        heads.append(shares @ v[:, group] / shares.sum(axis=1, keepdims=True))
    rows = rows + np.concatenate(heads, axis=1) @ of["o"]["weight"].T
    return rows + run_mlp(layer["mlp"], norm(rows, layer["mlp_norm"]["scale"]))


def run_mlp(mlp: Any, rows: np.ndarray) -> np.ndarray:
    gate, up = (rows @ mlp[name]["weight"].T for name in ("gate", "up"))
    return (gate / (1 + np.exp(-gate)) * up) @ mlp["down"]["weight"].T


def norm(x: np.ndarray, scale: Any) -> np.ndarray:
    """RMS norm with a scale."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + LLAMA.rms_norm_eps) * scale


def rotated(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
    """Heads [rows heads H] as complex numbers, each turned by its angle."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)
