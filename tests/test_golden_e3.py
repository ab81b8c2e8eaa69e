"""Equality with the original EAGLE-3 and PosS on EAGLE-3: inner states, rounds, generations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import METHODS_E3, ROOT_E3, TREES_E3, Golden, load_golden, read_npz
from test_golden import by_source_key, check_generations, check_rounds, check_stops

from poss_jax.config.training import ObjectiveConfig, StepConfig
from poss_jax.learn.chains import unroll_chains
from poss_jax.learn.step import draft_gradients
from poss_jax.learn.task import DraftData, DraftTask, own_head, prepare_draft_data
from poss_jax.model.cache import init_cache
from poss_jax.model.documents import TrainBatch
from poss_jax.model.target import read_logits, run_layers, stack_layers


@pytest.fixture(scope="module", params=METHODS_E3)
def golden(request, tmp_path_factory) -> Golden:
    """One recorded draft, converted once for all tests of a worker."""
    return load_golden(tmp_path_factory.getbasetemp() / "golden", request.param)


def test_inner_states_and_logits_of_the_target(tmp_path_factory):
    golden = load_golden(tmp_path_factory.getbasetemp() / "golden", METHODS_E3[0])
    recorded = read_npz("target_forward", ROOT_E3)
    tokens = jnp.asarray(recorded["input_ids"])
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    aux_layers = golden.draft_config.aux_layers
    assert list(aux_layers) == recorded["aux_layers"].tolist()

    @jax.jit
    def run(params):
        size = {"num_layers": golden.llama.num_layers, "size": tokens.shape[1]}
        cache = init_cache(golden.llama, **size, rope_length=lengths, dtype=jnp.float32)
        depths = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        rows = tokens, depths, None, aux_layers
        hidden, features, _ = run_layers(params, golden.llama, cache, *rows)
        return features, read_logits(params, hidden)

    features, logits = run(golden.target)
    np.testing.assert_allclose(features, recorded["aux_hidden"], atol=3e-5)
    np.testing.assert_allclose(logits, recorded["logits"], atol=3e-5)


@pytest.mark.parametrize(
    "suffix",
    ["_small", *(pytest.param(one, marks=pytest.mark.slow) for one in TREES_E3 if one != "_small")],
)
def test_rounds(golden, suffix):
    check_rounds(golden, suffix)


@pytest.mark.parametrize(
    ("part", "suffix"), [pytest.param("cases", "", marks=pytest.mark.slow), ("small", "_small")]
)
def test_generations(golden, part, suffix):
    check_generations(golden, part, suffix)


def test_generations_end_at_the_first_stop_token(golden):
    check_stops(golden, "_small")


TRAINED = [name for name in METHODS_E3 if (ROOT_E3 / f"train_{name}.npz").exists()]


@pytest.fixture(scope="module", params=TRAINED)
def trained(request, tmp_path_factory):
    """Our states, losses and gradients on the recorded batch, and the recorded ones."""
    golden = load_golden(tmp_path_factory.getbasetemp() / "golden", request.param)
    recorded = read_npz(f"train_{golden.method}", ROOT_E3)
    task = recorded_task(golden, recorded["weights"])
    data = recorded_data(golden, task)
    draft = golden.draft | {"specialists": stack_layers(golden.draft["specialists"])}
    R, head = task.draft.trained_depth, golden.target["head"]["weight"]

    @jax.jit
    def run(draft):
        _, _, predictions = unroll_chains(
            draft, task.draft, data.inputs, R, lambda _, prediction: prediction, block=32
        )
        return predictions, *draft_gradients(draft, head, task, data)

    predictions, gradients, losses = run(draft)
    return predictions, by_source_key(golden, gradients), losses, recorded, golden


def recorded_task(golden: Golden, weights: np.ndarray) -> DraftTask:
    """Chunks and blocks that divide nothing."""
    objective = ObjectiveConfig(
        trained_rows="token",
        feature_weight=0.0,
        probability_weight=1.0,
        top_k_weight=0.0,
        depth_weights=tuple(weights.tolist()),
    )
    step = StepConfig(vocabulary_chunk=20, attention_block=32)
    vocabulary = golden.draft_record.draft_vocabulary
    return DraftTask(golden.llama, golden.draft_config, objective, step, vocabulary=vocabulary)


def recorded_data(golden: Golden, task: DraftTask) -> DraftData:
    """The recorded batch, averaged over all rows as in the original."""
    recorded = read_npz("train_batch", ROOT_E3)
    attended = jnp.asarray(recorded["attention_mask"], jnp.int32)
    batch = TrainBatch(
        tokens=jnp.asarray(recorded["input_ids"], jnp.int32),
        loss_mask=jnp.asarray(recorded["loss_mask"], bool),
        documents=attended,
    )
    target = golden.target | {"layers": stack_layers(golden.target["layers"])}
    num_trained = jnp.asarray(attended.size, jnp.float32)
    data = jax.jit(
        lambda target, draft: prepare_draft_data(
            target, task, batch, num_trained=num_trained, own_head=own_head(draft)
        )
    )(target, golden.draft)
    real = np.asarray(attended, bool)
    np.testing.assert_allclose(data.inputs.features[real], recorded["aux_hidden"][real], atol=3e-5)
    return data


def test_states_of_every_step(trained):
    predictions, _, _, recorded, _ = trained
    valid = recorded["valid"].astype(bool)
    np.testing.assert_allclose(predictions[valid], recorded["hidden"][valid], atol=2e-4, rtol=0)


def test_losses_of_every_step(trained):
    _, _, losses, recorded, _ = trained
    np.testing.assert_allclose(losses.probability, recorded["loss"], atol=1e-5, rtol=0)
    total = (losses.total * recorded["weights"]).sum()
    np.testing.assert_allclose(total, recorded["total"], atol=1e-5)


def test_gradients(trained):
    _, ours, _, recorded, _ = trained
    norms = {key: value for key, value in recorded.items() if key.startswith("gradnorm/")}
    assert {f"gradnorm/{key}" for key in ours} == norms.keys()
    for name, norm in norms.items():
        key = name.removeprefix("gradnorm/")
        assert abs(np.linalg.norm(ours[key]) - norm) <= 2e-5 * norm, key
        if f"grad/{key}" in recorded:
            want = recorded[f"grad/{key}"]
            np.testing.assert_allclose(ours[key], want, atol=1e-5 * np.abs(want).max(), err_msg=key)
