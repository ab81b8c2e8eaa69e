"""Variants of EAGLE-3's layer: norms in other places, against a forward written out plainly."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import ROOT_E3, load_golden, read_npz
from models import random_draft, random_target, random_tokens, stacked, tiny_llama
from plain_chain import rotated, run_mlp

from poss_jax.config.models import DraftConfig, RopeConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.decode import drafting
from poss_jax.decode.drafting import commit_pairs, join_pairs
from poss_jax.learn.chains import unroll_chains
from poss_jax.learn.recursion import DraftInputs
from poss_jax.model.cache import init_cache
from poss_jax.model.families import init_draft
from poss_jax.model.families.eagle3 import read
from poss_jax.model.specialists import borrow_from_target

MASKED = {"mask_token": 7, "positions_per_specialist": (1,)}  # which training does not know
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"fc_norm": "whole"},
    "fc_norm": {"fc_norm": "each"},
    "norm_output": {"output_norm": "fed_back"},
    "raw_output": {"output_norm": None},
    "deep": {"layers_per_specialist": (3,)},
    "looped": {"layers_per_specialist": (3,), "positions_per_specialist": (1,)},
    "window": {"window": 3, "num_sinks": 0},
    "deep_window": {"window": 3, "num_sinks": 0, "layers_per_specialist": (3,)},
    "looped_window": {
        "window": 2,
        "num_sinks": 0,
        "layers_per_specialist": (3,),
        "positions_per_specialist": (1,),
    },
    "embedding": {"has_embedding": True},
    "narrow": {
        "layer": tiny_llama(num_layers=1, hidden_size=24, rope=RopeConfig(theta=500.0)),
        "target_size": 32,
        "has_embedding": True,
        "fc_norm": "each",
    },
    "all": {"norm_before_residual": True, "fc_norm": "each", "output_norm": "fed_back"},
    "masked": {**MASKED, "fc_norm": "whole"},
    "masked_stack": {**MASKED, "layers_per_specialist": (3,), "has_embedding": True},
    "masked_window": {**MASKED, "layers_per_specialist": (2,), "window": 3, "num_sinks": 0},
}
# Parts of "all" and of the other variants; test_golden_e3 holds the plain one.
PARTS_OF_OTHERS = """plain norm_before_residual norm_before_fc fc_norm norm_output deep looped
window embedding""".split()
T, STEPS = 9, 4
LLAMA = tiny_llama()
CONFIG = DraftConfig(
    layer=dataclasses.replace(LLAMA, num_layers=1),
    positions_per_specialist=(1, 2, 1),
    family="eagle3",
    kv="shared",
    aux_layers=(0, 1, 1),
)

# --------------------------------------------------------------------------------------------------
# The forward of a chain from every row, in float64 and without caches


def rms(x: Any, norm: Any, config: DraftConfig) -> Any:
    eps = config.layer.rms_norm_eps
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * norm["scale"]


def fused(config: DraftConfig, params: Any, features: Any) -> Any:
    if config.fc_norm == "whole":
        features = rms(features, params["fc_norm"], config)
    elif config.fc_norm == "each":
        parts = zip(np.split(features, 3, axis=-1), ("low", "middle", "high"), strict=True)
        features = np.concatenate([rms(x, params["fc_norm"][n], config) for x, n in parts], axis=-1)
    return features @ params["fc"]["weight"].T


def attended(config: DraftConfig, q: Any, keys: list[Any], values: list[Any]) -> Any:
    """Row r looks at the context up to itself, and at its own row in later steps."""
    rows, window, masked = [], config.window or 99, config.mask_token is not None
    for r, query in enumerate(q):
        first = max(0, r + 1 + (len(keys) - 1) * masked - window)  # speculators slides it for masks
        k, v = (
            np.concatenate([a[0][first : r + 1], *(b[r : r + 1] for b in a[1:])])
            for a in (keys, values)
        )
        k, v = (np.repeat(a, len(query) // a.shape[1], axis=1) for a in (k, v))
        scores = np.einsum("nh,snh->ns", query, k) / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        rows.append(np.einsum("ns,snh->nh", weights / weights.sum(-1, keepdims=True), v).ravel())
    return np.stack(rows)


def run_further(config: DraftConfig, layer: Any, hidden: Any, keys: Any, values: Any) -> Any:
    """A layer of any Llama; `keys` and `values` of earlier steps grow by this one's."""
    z, weights = rms(hidden, layer["input_norm"], config), layer["attention"]
    q, k, v = (
        (z @ weights[n]["weight"].T).reshape(len(z), -1, config.layer.head_dim) for n in "qkv"
    )
    position, theta = len(keys) + np.arange(len(z)), config.layer.rope.theta
    keys.append(rotated(k, position, theta))
    values.append(v)
    mixed = attended(config, rotated(q, position, theta), keys, values)
    hidden = hidden + mixed @ weights["o"]["weight"].T
    return hidden + run_mlp(layer["mlp"], rms(hidden, layer["mlp_norm"], config))


def forward(
    config: DraftConfig, params: Any, embedded: Any, features: Any, steps: int
) -> tuple[Any, Any]:
    """Hidden states and logits of every step at every row; `embedded` holds steps - 1 rows more."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    num_rows, state = len(features), fused(config, params, np.asarray(features, np.float64))
    keys, values, hidden, logits = [], [], [], []
    of_further: Any = [([], []) for _ in params.get("further", [])]
    for step in range(steps):
        layer = params["specialists"][config.specialist_at(step)]
        tokens = np.asarray(embedded, np.float64)[step : step + num_rows]
        if step and config.mask_token is not None:
            tokens = np.repeat(params["embed"]["weight"][[config.mask_token]], num_rows, axis=0)
            state = np.repeat(fused(config, params, params["mask"]["weight"][0]), num_rows, axis=0)
        e = rms(tokens, layer["input_norm"], config)
        c = rms(state, layer["feature_norm"], config)
        z, weights = np.concatenate([e, c], axis=-1), layer["attention"]
        q, k, v = (
            (z @ weights[n]["weight"].T).reshape(num_rows, -1, config.layer.head_dim) for n in "qkv"
        )
        position, theta = step + np.arange(num_rows), config.layer.rope.theta
        keys.append(rotated(k, position, theta))
        values.append(v)
        mixed = (
            attended(config, rotated(q, position, theta), keys, values) @ weights["o"]["weight"].T
        )
        a = (c if config.norm_before_residual else state) + mixed
        h = a + run_mlp(layer["mlp"], rms(a, layer["mlp_norm"], config))
        if step == 0 or config.is_looped:
            for further, kept in zip(params.get("further", []), of_further, strict=True):
                h = run_further(config, further, h, *kept)
        normed = rms(h, params["norm"], config)
        logits.append((h if config.output_norm is None else normed) @ params["head"]["weight"].T)
        state = normed if config.output_norm == "fed_back" else h
        hidden.append(h)
    return np.stack(hidden), np.stack(logits)


# --------------------------------------------------------------------------------------------------
# Tests


@pytest.mark.skipif(
    not (ROOT_E3 / "draft/eagle3").is_dir(), reason="only in the larger set of fixtures"
)
@pytest.mark.parametrize("name", list(VARIANTS)[:5])
def test_the_forward_equals_the_recorded_one(name: str, tmp_path: Path) -> None:
    golden = load_golden(tmp_path, "eagle3")
    config = dataclasses.replace(golden.draft_config, **VARIANTS[name])
    recorded, batch = read_npz("variants", ROOT_E3), read_npz("train_batch", ROOT_E3)
    parts = {"low": "0", "middle": "1", "high": "2"}
    scales = {part: f"fc_norm/fc_norm.{number}.weight" for part, number in parts.items()}
    params = golden.draft | {
        "fc_norm": {"scale": recorded["norm_before_fc/input_norm.weight"]}
        if config.fc_norm == "whole"
        else {part: {"scale": recorded[key]} for part, key in scales.items()}
    }
    rows, steps = recorded["plain/hidden"].shape[1], len(recorded["plain/hidden"])
    tokens = np.zeros(rows + steps, np.int64)
    tokens[: rows - 1] = batch["input_ids"][0, 1:rows]
    embedded = np.asarray(golden.target["embed"]["weight"])[tokens[: rows + steps - 1]]
    got = forward(config, params, embedded, batch["aux_hidden"][0, :rows], steps)
    for what, array in zip(("hidden", "logits"), got, strict=True):
        for step in range(steps):
            known = rows - 1 - step
            want = recorded[f"{name}/{what}"][step, :known]
            np.testing.assert_allclose(array[step, :known], want, atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in PARTS_OF_OTHERS else name
        for name in VARIANTS
    ],
)
def test_chains_of_drafting_and_training_equal_the_forward(name: str) -> None:
    config = dataclasses.replace(CONFIG, **VARIANTS[name])
    target, draft = random_target(LLAMA), random_draft(config)
    tokens = random_tokens(LLAMA, 1, T + STEPS)
    drawn = np.random.default_rng(0).normal(size=(1, T, 3 * LLAMA.hidden_size))
    features, borrowed = jnp.asarray(drawn, jnp.float32), borrow_from_target(draft, target)
    chain = jax.jit(lambda params: draft_chains(config, params, tokens, features))(borrowed)
    embedded = borrowed["embed"]["weight"][tokens[0, 1:]]
    whole = {key: borrowed[key] for key in borrowed if key != "vocabulary"}
    logits = forward(config, whole, embedded, features[0], STEPS)[1]
    for step, got in enumerate(chain):
        np.testing.assert_allclose(got, logits[step], atol=2e-4, rtol=1e-4)
    if config.mask_token is None:
        params = borrow_from_target(stacked(draft), target)
        trained = train_chains(config, params, embedded[:T], features)
        for step, (got, want) in enumerate(zip(trained, logits, strict=True)):
            known = T - step
            np.testing.assert_allclose(got[:known], want[:known], atol=2e-4, rtol=1e-4)


def draft_chains(config: DraftConfig, params: Any, tokens: Any, features: Any) -> list[Any]:
    """Logits of every step of the chains from all rows, each a row of a batch, fed the text."""
    x = join_pairs(params, config, tokens[:, 1 : T + 1], features)
    length = jnp.full(T, T)
    size = {"num_layers": config.num_streams(STEPS), "size": T + STEPS}
    size |= {"rope_length": length, "dtype": jnp.float32}
    rows, starts = jnp.broadcast_to(x, (T, *x.shape[1:])), jnp.arange(T, dtype=jnp.int32)
    cache, rows = commit_pairs(params, config, init_cache(config.layer, **size), rows, 1 + starts)
    seen = []

    def follow_the_text(logits: Any, level: Any, top_k: int) -> Any:
        seen.append(logits[:, 0])
        return tokens[0][level.position][:, None, None], jnp.zeros((T, 1, top_k))

    tree = TreeConfig(depth=STEPS, top_k=1, total_tokens=2)
    drafting.draft(params, config, tree, cache, rows[starts, starts][:, None], follow_the_text)
    return seen


def train_chains(config: DraftConfig, params: Any, embedded: Any, features: Any) -> Any:
    """Logits of every step and row, as training computes them."""
    inputs = DraftInputs(features, embedded[None], jnp.ones((1, T), jnp.int32))

    @jax.jit
    def run(params: Any) -> Any:
        *_, predictions = unroll_chains(params, config, inputs, STEPS, lambda _, h: h, block=4)
        return read(params, config, predictions[:, 0]) @ params["head"]["weight"].T

    return run(params)


WIDE = {"layer": tiny_llama(num_layers=1, hidden_size=96), "target_size": 32}
WIDE |= {"has_embedding": True}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (WIDE, "hidden_size 96: want another width than the target's"),
        ({"aux_layers": (1,)}, "at least two layers of the target, got 1"),
        ({"fc_norm": "each", "aux_layers": (0, 1)}, "fc_norm each: want 3 layers of the target,"),
    ],
)
def test_features_that_are_not_told_apart(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError, match=error):
        init_draft(dataclasses.replace(CONFIG, **changes), jax.random.key(0))
