"""Training of EAGLE-3 drafts: the program, and what its chains promise."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import random_draft, random_target, random_tokens, stacked, tiny_llama
from programs import DRAFT, Runs, assert_same_run, config_file, metrics

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.config.training import ObjectiveConfig, StepConfig
from poss_jax.learn.chains import has_prediction, place_predictions, unroll_chains
from poss_jax.learn.step import draft_gradients
from poss_jax.learn.task import DraftTask, own_head, prepare_draft_data
from poss_jax.learn.validation import make_draft_validation
from poss_jax.model.documents import TrainBatch, encode
from poss_jax.model.parameters import split_items
from train.main import main

OBJECTIVE = {"feature_weight": 0.0, "probability_weight": 1.0, "top_k_weight": 0.0}
E3 = {
    **DRAFT,
    "objective": {**OBJECTIVE, "feature_noise": 0.0, "depth_weights": [1.0, 0.9, 0.81]},
    "specialists": {"family": "eagle3", "positions_per_specialist": [1, 2], "depth": 3},
}


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thirds of the tokens."""
    path = tmp_path_factory.mktemp("vocabulary") / "vocabulary.json"
    tokens = [token for token in range(300) if token % 3]
    path.write_text(json.dumps({"vocab_size": 300, "tokens": tokens}))
    return path


@pytest.fixture(scope="module")
def run(runs: Runs, vocabulary: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run over a part of the vocabulary."""
    folder = tmp_path_factory.mktemp("eagle3")
    config = config_file(runs, folder, E3)
    main(["--config", config, f"specialists.draft_vocabulary={vocabulary}"])
    return folder / "run"


# --------------------------------------------------------------------------------------------------
# The program


def test_it_learns_and_says_what_it_is(runs: Runs, run: Path) -> None:
    first, *_, last = [line for line in metrics(run) if "agreement" in line]
    assert len(last["agreement"]) == len(last["validation_loss"]) == 3
    assert sum(last["validation_loss"]) < sum(first["validation_loss"])
    assert first["simulated_acceptance_length"] < last["simulated_acceptance_length"]
    assert not {"feature_cosine", "feature_distance"} & set(last)
    record = read_record(run / "model")
    assert record.method == "poss12-eagle3"
    assert record.draft_vocabulary is not None and len(record.draft_vocabulary) == 200
    assert (record.draft.head_size, record.draft.aux_layers) == (200, (0, 1))


def test_a_vocabulary_for_the_target_s_head(runs: Runs, vocabulary: Path, tmp_path: Path) -> None:
    """EAGLE-2 learns over a part of the vocabulary, and keeps it."""
    config = config_file(runs, tmp_path, DRAFT)
    main(["--config", config, f"specialists.draft_vocabulary={vocabulary}"])
    first, *_, last = [line for line in metrics(tmp_path / "run") if "agreement" in line]
    assert first["validation_loss"][0] > last["validation_loss"][0]
    record = read_record(tmp_path / "run/model")
    assert record.method == "eagle2" and len(record.draft_vocabulary or ()) == 200


@pytest.mark.slow
def test_features_on_disk_are_those_of_the_step(runs, run, vocabulary, tmp_path) -> None:
    wanted = E3["specialists"] | {"draft_vocabulary": str(vocabulary)}
    cache = {"cache": str(tmp_path / "cache")}
    config = config_file(runs, tmp_path, E3, specialists=wanted, features=cache, dtype="bfloat16")
    plain = config_file(runs, tmp_path / "plain", E3, specialists=wanted, dtype="bfloat16")
    for path in (config, plain):
        main(["--config", path, "num_tokens=192", "validate_every=100"])
    assert_same_run(tmp_path / "run", tmp_path / "plain" / "run", runs.model("target"))


@pytest.mark.slow
def test_a_draft_of_another_width_is_continued(runs: Runs, tmp_path: Path) -> None:
    """It learns, and keeps its own embedding bit for bit."""
    target = read_record(runs.model("target"))
    layer = dataclasses.replace(target.llama, num_layers=1, hidden_size=24)
    own = {"target_size": target.llama.hidden_size, "has_embedding": True}
    config = DraftConfig(
        layer=layer, family="eagle3", kv="shared", aux_layers=(0, 1), head_size=300, **own
    )
    draft, start = random_draft(config), tmp_path / "start"
    write_model(
        start,
        new_record(config, target.target, tokenizer_from=None),
        split_items(config, draft),
        tokenizer_from=None,
    )
    wanted = {"depth": 3}
    main(["--config", config_file(runs, tmp_path, E3, specialists=wanted, init_draft=str(start))])
    first, *_, last = [line for line in metrics(tmp_path / "run") if "agreement" in line]
    assert sum(last["validation_loss"]) < sum(first["validation_loss"])
    record, trained = load_draft(tmp_path / "run/model", target=target)
    assert record.draft == dataclasses.replace(config, trained_depth=3)
    np.testing.assert_array_equal(trained["embed"]["weight"], draft["embed"]["weight"])


# --------------------------------------------------------------------------------------------------
# Chains

LLAMA = tiny_llama(num_layers=3, vocab_size=23)
B, T, R = 2, 14, 4
TASK = DraftTask(
    target=LLAMA,
    draft=DraftConfig(
        layer=dataclasses.replace(LLAMA, num_layers=1),
        positions_per_specialist=(1, 2, 1),
        trained_depth=R,
        family="eagle3",
        kv="shared",
        aux_layers=(0, 2),
        head_size=9,
    ),
    objective=ObjectiveConfig(**OBJECTIVE, depth_weights=(1.0, 0.9, 0.8, 0.7)),
    step=StepConfig(vocabulary_chunk=5, attention_block=6),
    vocabulary=tuple(range(1, 19, 2)),
)
# Documents of more than 5 tokens are rotated by their length.
ROPE_BY_LENGTH = RopeConfig(type="dynamic", factor=4.0, original_max_position_embeddings=5)
TOKENS = random_tokens(LLAMA, B, T)
BATCH = TrainBatch(TOKENS, jnp.ones((B, T), bool), jnp.ones_like(TOKENS))


@pytest.fixture(scope="module")
def target() -> Any:
    return stacked(random_target(LLAMA))


@pytest.fixture(scope="module")
def draft() -> Any:
    return stacked(random_draft(TASK.draft))


@partial(jax.jit, static_argnames="task")
def gradients_of(draft: Any, target: Any, batch: TrainBatch, task: DraftTask = TASK) -> Any:
    """(gradients, losses) of a batch; sums, not means."""
    own, one = own_head(draft), jnp.ones(())
    data = prepare_draft_data(target, task, batch, num_trained=one, own_head=own)
    return draft_gradients(draft, target["head"]["weight"], task, data)


def assert_close(got: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5 * np.abs(b).max())


def test_documents_of_a_row_do_not_see_each_other(draft: Any, target: Any) -> None:
    """A row of two documents trains as two rows of one, even if chains read past their ends."""
    cut, layer = 6, dataclasses.replace(TASK.draft.layer, rope=ROPE_BY_LENGTH)
    task = TASK._replace(
        target=dataclasses.replace(LLAMA, rope=ROPE_BY_LENGTH),
        draft=dataclasses.replace(TASK.draft, layer=layer),
        objective=dataclasses.replace(TASK.objective, lk_weight=0.7, depth_weighting="reach"),
    )
    documents = jnp.where(jnp.arange(T) < cut, 1, 2)
    together = BATCH.replace(documents=jnp.broadcast_to(documents[None], (B, T)))
    parts = [
        TrainBatch(jnp.roll(TOKENS, -start, axis=1), is_real, is_real.astype(jnp.int32))
        for start, length in ((0, cut), (cut, T - cut))
        for is_real in [jnp.broadcast_to(jnp.arange(T)[None] < length, (B, T))]
    ]
    apart = [gradients_of(draft, target, part, task) for part in parts]
    assert_close(gradients_of(draft, target, together, task), jax.tree.map(jnp.add, *apart))


def test_rows_weigh_what_verification_reaches(draft: Any, target: Any) -> None:
    """A row's weight is the product of its chain's overlaps, a constant of the gradient."""
    objective = dataclasses.replace(TASK.objective, depth_weighting="reach")
    task, ids = TASK._replace(objective=objective), TASK.vocabulary_ids
    one = jnp.ones(())
    data = prepare_draft_data(target, task, BATCH, num_trained=one, own_head=own_head(draft))
    p = jax.nn.softmax(data.targets.features @ target["head"]["weight"].T)[..., ids]
    renormalised = p / p.sum(axis=-1, keepdims=True)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def plain(draft: Any) -> Any:
        def visit(index: jax.Array, prediction: jax.Array) -> jax.Array:
            return place_predictions(draft, task.draft, prediction, index)

        *_, rows = unroll_chains(draft, task.draft, data.inputs, R, visit, block=T)
        log_q = jax.nn.log_softmax(rows @ draft["head"]["weight"].T)
        overlaps = jnp.minimum(jnp.exp(log_q), p[None]).sum(axis=-1)
        of_rows = -(renormalised[None] * log_q).sum(axis=-1)
        reach, losses = jnp.ones((B, T)), []
        for depth in range(R):
            counts = has_prediction(data, jnp.array(depth)) & data.targets.is_known
            losses.append(jnp.where(counts, of_rows[depth] * reach, 0.0).sum())
            reached = jax.lax.stop_gradient(reach * overlaps[depth])
            reach = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))
        return (task.depth_weights() * jnp.stack(losses)).sum(), jnp.stack(losses)

    (_, want), gradients = plain(draft)
    got, losses = gradients_of(draft, target, BATCH, task)
    assert_close(losses.total, want)
    assert_close(got, gradients)


def test_gradients_of_a_looped_draft(target: Any) -> None:
    """Every step passes all layers; the slope of the loss along a direction is the gradient's."""
    config = dataclasses.replace(
        TASK.draft, positions_per_specialist=(1,), layers_per_specialist=(2,)
    )
    task, draft = TASK._replace(draft=config), stacked(random_draft(config))
    gradients, _ = gradients_of(draft, target, BATCH, task)
    keys = iter(jax.random.split(jax.random.key(0), 99))
    along = jax.tree.map(lambda leaf: jax.random.normal(next(keys), leaf.shape), draft["further"])

    def loss(size: float) -> float:
        moved = jax.tree.map(lambda a, b: a + size * b, draft["further"], along)
        _, losses = gradients_of(draft | {"further": moved}, target, BATCH, task)
        return float((losses.total * task.depth_weights()).sum())

    slope = sum(
        float((a * b).sum())
        for a, b in zip(*map(jax.tree.leaves, (gradients["further"], along)), strict=True)
    )
    assert slope == pytest.approx((loss(5e-4) - loss(-5e-4)) / 1e-3, rel=5e-3)


def test_frozen_specialists_and_what_all_share_stay(draft: Any, target: Any) -> None:
    """Their depths are drafted and measured, and have no part in the others' gradients."""
    frozen, losses = gradients_of(draft, target, BATCH, TASK._replace(num_frozen=1))
    weights = dataclasses.replace(TASK.objective, depth_weights=(0.0, 0.9, 0.8, 0.7))
    free, want = gradients_of(draft, target, BATCH, TASK._replace(objective=weights))
    assert_close(losses, want)
    others = (jax.tree.map(lambda leaf: leaf[1:], g["specialists"]) for g in (frozen, free))
    assert_close(*others)
    first = jax.tree.map(lambda leaf: leaf[:1], frozen["specialists"])
    shared = {name: leaves for name, leaves in frozen.items() if name != "specialists"}
    assert all((leaf == 0).all() for leaf in jax.tree.leaves((first, shared)))


def test_validation_counts_a_chain_from_every_row(draft: Any, target: Any) -> None:
    sums, shown = jax.jit(make_draft_validation(TASK, R))(draft, target, BATCH)
    assert np.asarray(sums.num_trained).tolist() == [B * (T - 2 - depth) for depth in range(R)]
    logits = np.asarray(encode(target, LLAMA, TOKENS)) @ np.asarray(target["head"]["weight"]).T
    wanted = logits[:, 1:].argmax(axis=-1)
    hits = [
        (np.asarray(shown.tokens)[depth, :, depth:-2] == wanted[:, depth:-1]).sum()
        for depth in range(R)
    ]
    assert np.asarray(sums.agreement).tolist() == hits
    assert set(np.unique(shown.tokens)) <= set(TASK.vocabulary or ())
