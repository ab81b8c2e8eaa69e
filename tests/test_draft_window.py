"""Drafts that attend the newest rows only: what they see, and texts that stay the target's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny_llama
from oracle import Shape
from programs import refusal
from test_used_rows import arrays

from benchmarks.python_models import python_model
from infer.generate import main
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.engine.engine import Engine
from poss_jax.model.cache import attend_cached, newest_rows

LLAMA = tiny_llama()


@pytest.mark.parametrize("window", [1, 59, 60])
def test_a_window_leaves_out_the_rows_between(window):
    """Rows that the window leaves out become own rows that no query attends."""
    q, (k, v), length, own, among = arrays((4, 2), 64, 6, 6, [3, 40, 64])
    stored, used = newest_rows((k, v), length, window, 4)
    got = jax.jit(attend_cached)(q, stored, used, own, among)
    row = jnp.arange(64)[None]
    is_seen = (row < length[:, None]) & ((row < 4) | (row >= length[:, None] - window))
    is_seen = jnp.broadcast_to(is_seen[:, None], (3, 6, 64))
    joined = tuple(jnp.concatenate(pair, axis=2) for pair in zip((k, v), own, strict=True))
    both = jnp.concatenate([is_seen, among], axis=2)
    want = jax.jit(attend_cached)(q, (k, v), jnp.zeros_like(length), joined, both)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)


def test_speculative_equals_autoregressive():
    """EAGLE-3 has a window in test_eagle3.py."""
    draft = DraftConfig(
        layer=LLAMA, positions_per_specialist=(1, 2), layers_per_specialist=(3, 1), window=5
    )
    tree = TreeConfig(depth=3, top_k=3, total_tokens=12)
    Shape(LLAMA, draft, tree, 3, is_sampled=True).check_pairs(10)


def test_an_engine_with_a_window_writes_the_same_text():
    target, draft = python_model("target"), python_model("eagle")
    tree = TreeConfig(depth=2, top_k=2, total_tokens=5)
    texts = []
    for window in (None, 2):
        engine = Engine.load(target, draft, EngineConfig(tree=tree, draft_window=window))
        assert engine.draft_config is not None and engine.draft_config.window == window
        texts += engine.generate(["def read_lines(path):\n"], max_new_tokens=24)
    assert texts[0].output_ids == texts[1].output_ids
    assert texts[0].mean_acceptance_length != texts[1].mean_acceptance_length


def test_a_window_wants_a_draft():
    words = ["--target", "models/x", "--prompt", "y", "--draft-window", "64"]
    assert "draft_window limits a draft; give draft, too" in refusal(main, *words)
