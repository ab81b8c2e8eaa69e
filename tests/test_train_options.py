"""Options of training: what of a draft is shared, frozen or cut, and what a target starts from."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import (
    DRAFT,
    POSS2,
    TARGET,
    Runs,
    config_file,
    copy_model,
    metrics,
    refusal,
    write_lines,
)

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import read_record
from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.model.documents import encode
from poss_jax.model.families import FAMILIES
from poss_jax.model.target import stack_layers
from train import loop, preparation
from train.devices import put_batch
from train.draft_stage import DraftStage
from train.loop import validation_batches
from train.main import main
from train.preparation import prepare_rows
from train.training import open_stage

FEW_STEPS = {"num_tokens": 3 * 64, "validate_every": 3}


def train(runs: Runs, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    """Parameters of the specialists after three steps, as lists of arrays by name."""
    main(["--config", config_file(runs, folder, POSS2, **FEW_STEPS, **changes)])
    return specialists(runs, folder / "run" / "model")


@pytest.fixture(scope="module")
def plain(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    train(runs, folder)
    return folder / "run"


def specialists(runs: Runs, model: Path | str) -> list[dict[str, Any]]:
    _, draft = load_draft(str(model), target=read_record(runs.model("target")))
    return [dict(_named(tree)) for tree in (*draft["specialists"], draft["fc"])]


def _named(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf)


def test_shared_keys_and_values(runs: Runs, tmp_path: Path) -> None:
    spans = {"positions_per_specialist": [2, 2], "depth": 4, "kv": "shared"}
    first, second, _ = train(runs, tmp_path, specialists=spans)
    equal = {name for name in first if (first[name] == second[name]).all()}
    assert equal == {"attention/k/weight", "attention/v/weight"}
    assert read_record(tmp_path / "run" / "model").kv == "shared"


def test_frozen_specialists(runs: Runs, tmp_path: Path) -> None:
    spans = {"positions_per_specialist": [2, 2], "depth": 4, "num_frozen": 1}
    start = runs.model("poss2")
    trained = train(runs, tmp_path, specialists=spans, init_draft=start)
    for is_trained, after, before in zip(
        [False, True, False], trained, specialists(runs, start), strict=True
    ):
        for name in before:
            assert (after[name] != before[name]).any() == is_trained, name


def test_a_draft_is_continued_in_its_own_family(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(FAMILIES, "other", FAMILIES["eagle"])
    draft = shutil.copytree(runs.model("eagle"), tmp_path / "draft")
    record = json.loads((draft / "model.json").read_text())
    record["config"]["family"] = "other"
    (draft / "model.json").write_text(json.dumps(record))
    config = load_config(TrainConfig, config_file(runs, tmp_path, POSS2, init_draft=str(draft)))
    stage = open_stage(config, tmp_path, plan_for="here")
    assert isinstance(stage.config, DraftConfig) and stage.config.family == "other"
    assert stage.config.positions_per_specialist == (2, 2)
    specialists = {**POSS2["specialists"], "family": "eagle"}
    changes = {"specialists": specialists, "init_draft": str(draft)}
    config = load_config(TrainConfig, config_file(runs, tmp_path, POSS2, **changes))
    with pytest.raises(UserError, match=r"specialists\.family: init_draft .* has another"):
        open_stage(config, tmp_path, plan_for="here")


@pytest.mark.parametrize("has_cache", [False, True])
def test_features_are_normalised_by_their_deviations(runs, tmp_path, has_cache) -> None:
    """Online and from a cache; the oracle encodes every row by itself."""
    features = {"cache": str(tmp_path / "cache")} if has_cache else {}
    objective = {"normalised_features": True}
    values = POSS2 | {"features": features, "objective": objective}
    config = load_config(TrainConfig, config_file(runs, tmp_path, values))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    stage.write_features()
    assert isinstance(stage, DraftStage)
    record, target = load_target(runs.model("target"))
    target |= {"layers": stack_layers(target["layers"])}
    encoded = jax.jit(encode, static_argnums=1)(target, record.llama, stage.rows.tokens[:64])
    encoded = encoded.astype(jnp.bfloat16)  # as a cache keeps them
    wanted = np.asarray(encoded, np.float64).reshape(-1, 32).std(axis=0)
    np.testing.assert_allclose(stage._measured_task.deviations, wanted, rtol=1e-4)


def test_a_start_that_passes_features_through(runs: Runs, tmp_path: Path) -> None:
    started = {"positions_per_specialist": [2, 2], "depth": 4, "start": "pass_through"}
    config = load_config(TrainConfig, config_file(runs, tmp_path, POSS2, specialists=started))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params = stage.init_params()
    np.testing.assert_array_equal(params["fc"]["weight"][:, 32:], np.eye(32))
    assert np.any(params["fc"]["weight"][:, :32])
    for _, leaf in _named({"o": params["specialists"]["attention"]["o"]}):
        assert not leaf.any()


def test_narrow_computation(runs: Runs, plain: Path, tmp_path: Path) -> None:
    trained = train(runs, tmp_path, dtype="bfloat16")
    assert {leaf.dtype.name for tree in trained for leaf in tree.values()} == {"float32"}
    narrow, wide = (
        [line["loss"] for line in metrics(run) if "loss" in line]
        for run in (tmp_path / "run", plain)
    )
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert narrow != wide


@pytest.mark.parametrize(
    ("batch_size", "wanted", "validated"), [(1, 4, 4), (2, 4, 4), (4, 4, 4), (4, 5, 8), (4, 1, 4)]
)
def test_validation_has_the_same_rows_in_batches_of_any_size(
    runs, tmp_path, batch_size, wanted, validated
):
    values = TARGET | {"batch_size": batch_size, "validation_rows": wanted}
    config = load_config(TrainConfig, config_file(runs, tmp_path, values))
    stage = open_stage(config, tmp_path / "stage")
    batches = list(validation_batches(config, stage))
    assert {len(batch.tokens) for batch in batches} == {batch_size}
    rows = np.concatenate([batch.tokens for batch in batches])
    np.testing.assert_array_equal(rows, stage.validation_rows.tokens[:validated])


def test_validation_takes_no_more_rows_at_once_than_a_step(runs: Runs, tmp_path: Path) -> None:
    values = TARGET | {"batch_size": 4, "validation_rows": 4, "step": {"accumulation_steps": 2}}
    config = load_config(TrainConfig, config_file(runs, tmp_path, values))
    stage = open_stage(config, tmp_path / "stage")
    assert [len(batch.tokens) for batch in validation_batches(config, stage)] == [2, 2]


def test_processes_after_the_first_read_its_rows(runs, tmp_path, monkeypatch) -> None:
    config = load_config(TrainConfig, config_file(runs, tmp_path, TARGET))
    stage = open_stage(config, tmp_path / "first")
    monkeypatch.setattr(
        preparation,
        "broadcast_from_first",
        lambda _: shutil.copytree(tmp_path / "first", tmp_path / "shared"),
    )
    load = MagicMock(side_effect=AssertionError("read the data"))
    rows = prepare_rows(tmp_path / "shared", config, stage.tokenizer, stage.config, load).train
    np.testing.assert_array_equal(rows.tokens, stage.rows.tokens)


def test_a_resumed_run_asks_for_preemption_by_the_steps_of_its_process(monkeypatch) -> None:
    asked = []
    for name in ("RunLog", "Profiler", "put_batch", "batch_at", "_check_in"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "preemption_notice", lambda: nullcontext(asked.append))
    config = MagicMock(num_steps=8, checkpoint_every=100, validate_every=100)
    state = SimpleNamespace(step=5)
    loop.run_steps(config, MagicMock(), MagicMock(), lambda state, batch: (state, {}), state)
    assert asked == [1, 2, 3]


def test_validation_stops_where_the_held_out_rows_end(runs: Runs, tmp_path: Path) -> None:
    values = TARGET | {"batch_size": 4, "validation_rows": 10**6}
    config = load_config(TrainConfig, config_file(runs, tmp_path, values))
    stage = open_stage(config, tmp_path / "stage")
    assert len(list(validation_batches(config, stage))) == len(stage.validation_rows) // 4


def test_specialists_that_were_never_trained_are_not_frozen(runs: Runs, tmp_path: Path) -> None:
    spans = {"positions_per_specialist": [1, 1, 1], "depth": 3, "num_frozen": 2}
    config = config_file(runs, tmp_path, DRAFT, specialists=spans, init_draft=runs.model("eagle"))
    assert "specialists.num_frozen: want at most 1, which init_draft" in refusal(
        main, "--config", config
    )


@pytest.mark.parametrize(
    ("key", "name", "item"), [("target", "target", "layers/1"), ("init_draft", "eagle", "fc")]
)
def test_a_run_does_not_go_on_with_another_model(runs, tmp_path, key, name, item) -> None:
    model = Path(copy_model(runs.model(name), tmp_path / "start"))
    config = config_file(runs, tmp_path, POSS2, **FEW_STEPS | {key: str(model)})
    main(["--config", config])
    metrics_before = (tmp_path / "run" / "metrics.jsonl").read_text()
    changed = json.loads((model / "model.json").read_text())
    changed["weights_sha256"] |= {item: "0" * 64}
    (model / "model.json").write_text(json.dumps(changed))
    shutil.rmtree(tmp_path / "run" / "model")
    assert f"{key}: its file has changed since this run" in refusal(main, "--config", config)
    (tmp_path / "run" / "made_with.json").write_text("[")
    assert "made_with.json: not valid JSON" in refusal(main, "--config", config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics_before


def test_validations_say_if_no_answer_is_long_enough(runs, tmp_path, caplog) -> None:
    config = load_config(TrainConfig, config_file(runs, tmp_path, POSS2))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params, batch = stage.init_params(), put_batch(stage.validation_rows[:2], stage.mesh)
    is_even = np.arange(batch.tokens.shape[1])[None] % 2 == 0
    gaps = batch.replace(loss_mask=batch.loss_mask & is_even)
    for given, is_said in ((batch, False), (gaps, True)):
        caplog.clear()
        stage.validate(params, [given])
        assert ("tokens long, so that acceptance is not measured" in caplog.text) == is_said


@pytest.mark.parametrize("key", ["features.cache", "data.source", "data.template"])
def test_overwriting_spares_what_is_read(runs: Runs, tmp_path: Path, key: str) -> None:
    needed = tmp_path / "run" / "needed"
    needed.mkdir(parents=True)
    (needed / "file").write_text("x")
    config = config_file(runs, tmp_path, DRAFT)
    error = refusal(main, "--config", config, "--overwrite", f"{key}={needed}")
    assert "which --overwrite would remove; move it" in error
    assert (needed / "file").exists()


# --------------------------------------------------------------------------------------------------
# Targets that start from another


def test_a_tied_target_has_no_head_of_its_own(runs: Runs, tmp_path: Path) -> None:
    tied = TARGET["model"] | {"tie_embeddings": True}
    config = load_config(TrainConfig, config_file(runs, tmp_path, TARGET, model=tied))
    stage = open_stage(config, tmp_path / "stage")
    params = stage.init_params()
    assert "head" not in params
    planned = stage.plan_step().state.params
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, planned)
    main(["--config", config_file(runs, tmp_path, TARGET | FEW_STEPS, model=tied)])
    continued = config_file(runs, tmp_path, TARGET, model=tied)
    start = f"init_target={tmp_path}/run/model"
    stage = open_stage(load_config(TrainConfig, continued, [start]), tmp_path / "continued")
    assert "head" not in stage.init_params()


def test_token_ids_train_no_tokenizer(runs: Runs, tmp_path: Path) -> None:
    lines = [{"input_ids": [n % 50, 5, 7, 9], "loss_mask": [0, 1, 1, 1]} for n in range(200)]
    data = {"source": write_lines(tmp_path / "ids.jsonl", *lines), "sequence_length": 8}
    config = config_file(runs, tmp_path, TARGET, data=data)
    assert "want text to train a tokenizer on, got token ids" in refusal(main, "--config", config)


def test_a_target_continues_another_with_more_layers(runs: Runs, tmp_path: Path) -> None:
    start, model = runs.model("target"), TARGET["model"] | {"num_layers": 3}
    values = TARGET | FEW_STEPS | {"init_target": start, "model": model}
    config = load_config(TrainConfig, config_file(runs, tmp_path, values))
    stage = open_stage(config, tmp_path / "stage")
    batches = [put_batch(stage.validation_rows[:2], stage.mesh)]
    metrics, _ = stage.validate(stage.init_params(), batches)
    same = load_config(TrainConfig, config_file(runs, tmp_path, TARGET, init_target=start))
    shorter = open_stage(same, tmp_path / "shorter")
    assert metrics == shorter.validate(shorter.init_params(), batches)[0]

    main(["--config", config_file(runs, tmp_path, values)])
    record, trained = load_target(str(tmp_path / "run" / "model"))
    _, before = load_target(start)
    assert record.llama.num_layers == 3
    assert record.tokenizer_sha256 == read_record(start).tokenizer_sha256
    new = trained["layers"][1]
    assert np.any(new["attention"]["o"]["weight"]) and np.any(new["mlp"]["down"]["weight"])
    names = [("embed", "weight"), ("norm", "scale"), ("head", "weight")]
    assert all((trained[part][name] != before[part][name]).any() for part, name in names)
