"""Specialists like multi-token-prediction modules: arithmetic, training, decoding, files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import random_draft, random_target, random_tokens, stacked, tiny_llama
from oracle import Shape
from plain_chain import check_chains, norm, run_layer
from plain_step import PlainBatch, plain_gradients
from programs import DRAFT, Runs, config_file, generate, refusal

from infer.bench import costs
from infer.bench.costs import Workload
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import read_record
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.training import ObjectiveConfig, StepConfig
from poss_jax.convert.__main__ import main as convert
from poss_jax.learn.step import draft_gradients
from poss_jax.learn.task import DraftTask, prepare_draft_data
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from train.main import main

LLAMA = tiny_llama()
CONFIG = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=3, family="mtp")
RUN = DRAFT | {
    "specialists": {"family": "mtp", "positions_per_specialist": [1, 1], "depth": 2},
    "objective": {"feature_weight": 0.0, "probability_weight": 1.0, "top_k_weight": 0.0},
}


def predict_mtp(draft: Any, index: int, embedded: np.ndarray, features: np.ndarray) -> np.ndarray:
    one = draft["specialists"][index]
    tokens = norm(embedded, one["token_norm"]["scale"])
    states = norm(features, one["feature_norm"]["scale"])
    rows = np.concatenate([tokens, states], axis=1) @ one["project"]["weight"].T
    return norm(run_layer(one, rows), one["output_norm"]["scale"])


def test_training_and_drafting_equal_a_float64_forward() -> None:
    check_chains(CONFIG, predict_mtp, atol=2e-5)


def test_gradients_equal_a_plain_step() -> None:
    """Gradients reach all that keys and values of earlier versions depend on."""
    llama = tiny_llama(num_layers=1, vocab_size=7)
    draft = stacked(random_draft(replace(CONFIG, layer=llama)))
    task = DraftTask(
        target=llama,
        draft=replace(CONFIG, layer=llama),
        objective=ObjectiveConfig(top_k=3, feature_noise=0.0),
        step=StepConfig(vocabulary_chunk=5, attention_block=7),
    )
    tokens, target = random_tokens(llama, 2, 10), stacked(random_target(llama))
    batch = TrainBatch(tokens, jnp.ones_like(tokens, bool), jnp.ones_like(tokens))
    data = jax.jit(prepare_draft_data, static_argnums=1)(target, task, batch)
    head = target["head"]["weight"]
    got, losses = jax.jit(draft_gradients, static_argnums=2)(draft, head, task, data)
    rows = data.inputs.features, data.inputs.embedded, data.targets.features, data.loss_mask
    plain = jax.jit(plain_gradients, static_argnums=(2, 3))
    of_depths, want, _ = plain(draft, head, task.draft, task.objective, PlainBatch(*rows))
    np.testing.assert_allclose(losses.total, of_depths, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(a - b)) <= 1e-5 * np.linalg.norm(np.asarray(b))


def test_speculative_equals_autoregressive() -> None:
    tree = TreeConfig(depth=3, top_k=3, total_tokens=10)
    Shape(LLAMA, CONFIG, tree, 3, is_sampled=True).check_pairs()


def test_a_round_reads_every_projection() -> None:
    """A drafted position reads a specialist whole; a commit reads what keys depend on."""
    work = Workload(
        target=LLAMA,
        draft=replace(CONFIG, positions_per_specialist=(1, 1)),
        tree=TreeConfig(depth=2, top_k=1, total_tokens=3),
        cache_bytes=0,
    )
    shapes = random_draft(CONFIG)["specialists"][0]
    size = sum(leaf.size for leaf in jax.tree.leaves(shapes) if leaf.ndim > 1)
    head = LLAMA.vocab_size * LLAMA.hidden_size
    assert costs.draft_level(work, 1).bytes == 4 * (size + head)
    read = [shapes["project"], shapes["attention"]["k"], shapes["attention"]["v"]]
    assert costs.commit(work).bytes == 4 * 2 * sum(leaf.size for leaf in jax.tree.leaves(read))


@pytest.mark.slow
def test_a_run_trains_every_parameter_and_the_texts_stay(runs: Runs, tmp_path: Path) -> None:
    main(["--config", config_file(runs, tmp_path, RUN)])
    model, target = tmp_path / "run/model", runs.model("target")
    record, draft = load_draft(model, target=read_record(target))
    assert (record.method, record.draft.family) == ("poss1-mtp", "mtp")
    start = init_draft(record.draft, jax.random.key(0))
    for norms in ("token_norm", "feature_norm", "output_norm"):
        moved = draft["specialists"][1][norms]["scale"] != start["specialists"][1][norms]["scale"]
        assert np.asarray(moved).any()
    prompts = ["--prompt", "def area_7", "--tree", "2/2/5"]
    alone = generate(target, None, tmp_path, *prompts)
    drafted = generate(target, str(model), tmp_path, *prompts)
    assert [one["text"] for one in drafted] == [one["text"] for one in alone]
    arguments = ["--model", str(model), "--target", target, "--output", str(tmp_path / "out")]
    assert "no layout holds the family mtp" in refusal(convert, "export", *arguments)
