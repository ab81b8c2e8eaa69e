"""The training program end to end: both stages, resuming after crashes, options, refusals."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import assert_same
from programs import (
    DRAFT,
    POSS2,
    STEPS,
    TARGET,
    Runs,
    assert_same_run,
    config_file,
    copy_model,
    metrics,
    refusal,
    summary,
    weights,
    write_lines,
)

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import read_record
from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import Rows, batch_at
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.model.documents import encode
from poss_jax.model.families import FAMILIES
from poss_jax.model.target import stack_layers
from poss_jax.program.running import BRACKETS
from train import loop
from train.devices import put_batch
from train.loop import validation_batches
from train.main import main
from train.stages import DraftStage
from train.training import open_stage


def load_run(runs: Runs, folder: Path, values: dict[str, Any], **changes: Any) -> TrainConfig:
    return load_config(TrainConfig, config_file(runs, folder, values, **changes))


class Crash(Exception):
    """Kills a run."""


def die(*_: Any, **__: Any) -> NoReturn:
    raise Crash


def snapshot(folder: Path) -> dict[Path, tuple[int, int]]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in paths}


# --------------------------------------------------------------------------------------------------
# Runs that end well


def test_target_learns_and_is_a_model_with_tokenizer(runs: Runs) -> None:
    folder = runs.root / "target"
    lines = metrics(folder)
    losses = [line["loss"] for line in lines if "loss" in line]
    validations = [(line["step"], *line) for line in lines if "validation_loss" in line]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, STEPS + 1)]
    assert validations == [(step, "step", "validation_loss") for step in (10, 20, STEPS)]
    assert abs(losses[0] - np.log(300)) < 0.1 and losses[-1] < 3
    samples = folder / "samples"
    assert {path.name for path in samples.iterdir()} == {"10.md", "20.md", f"{STEPS}.md"}
    assert "## Row 1" in (samples / f"{STEPS}.md").read_text(encoding="utf-8")
    record = read_record(folder / "model")
    tokenizer = load_tokenizer(folder / "model")
    assert record.tokenizer_sha256 and record.target.name == "target"
    text = "def area(width):\n    return 'ü'"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(
    ("name", "depth", "method"), [("eagle", 1, "eagle2"), ("poss2", 4, "poss2")]
)
def test_draft_reports_every_depth(runs: Runs, name: str, depth: int, method: str) -> None:
    first, *_, last = [line for line in metrics(runs.root / name) if "agreement" in line]
    assert len(last["agreement"]) == len(last["validation_loss"]) == depth
    assert all(0 <= share <= 1 for share in last["agreement"])
    assert sum(last["validation_loss"]) < sum(first["validation_loss"])
    assert first["simulated_acceptance_length"] < last["simulated_acceptance_length"] <= depth + 1
    record = read_record(runs.model(name))
    assert (record.method, record.draft.trained_depth) == (method, depth)
    assert record.target == read_record(runs.model("target")).target


def test_depths_that_are_not_trained_can_be_validated_and_steps_profiled(
    runs: Runs, tmp_path: Path
) -> None:
    """The last specialist serves them; the depths that are trained are measured as before.

    A step is profiled, which changes nothing.
    """
    profile = {"start": 2, "steps": 1}
    main(["--config", config_file(runs, tmp_path, DRAFT, validation_depth=3, profile=profile)])
    assert any(path.is_file() for path in (tmp_path / "run" / "profile").rglob("*"))
    deeper, last = metrics(tmp_path / "run")[-1], metrics(runs.root / "eagle")[-1]
    assert {len(deeper[name]) for name in ("agreement", "validation_loss")} == {3}
    assert deeper["agreement"][0] == last["agreement"][0]
    assert deeper["feature_cosine"][0] > deeper["feature_cosine"][2]


def _quality(validation: dict[str, Any]) -> float:
    """The best checkpoint's measure: acceptance of a draft, likelihood of a target."""
    length = validation.get("simulated_acceptance_length")
    return -validation["validation_loss"] if length is None else length


@pytest.mark.parametrize("name", ["target", "poss2"])
def test_finished_run_is_not_trained_again(runs, name, monkeypatch, capsys) -> None:
    """Its checkpoints are not read either."""
    monkeypatch.setattr("train.loop.batch_at", die)
    monkeypatch.setattr("train.run_folder.RunFolder._read", die)
    logged = metrics(runs.root / name)
    before = snapshot(runs.root / name / "model")
    main(["--config", str(runs.root / name / "config.yaml")])
    best = max((line for line in logged if "validation_loss" in line), key=_quality)
    results = {key: value for key, value in best.items() if key != "step"}
    expected = {"model": runs.model(name), "model_step": best["step"], "steps": STEPS, **results}
    assert summary(capsys) == expected
    assert metrics(runs.root / name) == logged
    assert snapshot(runs.root / name / "model") == before


def test_dry_run_prints_sizes_and_writes_nothing(runs, tmp_path, capsys) -> None:
    config = config_file(runs, tmp_path / "in", TARGET, output=str(tmp_path / "out" / "run"))
    main(["--config", config, "num_tokens=65", "--dry-run"])
    layer = 32 + 32 * 32 + 2 * 32 * 16 + 32 * 32 + 32 + 3 * 32 * 48
    *lines, last = capsys.readouterr().out.splitlines()
    printed = json.loads(last)
    assert lines[0].endswith("60 records of text, 0 of them dropped")
    assert any(line.startswith(f"{BRACKETS[0]}<s>def area_") for line in lines)
    assert printed.pop("data")["records"] == 60
    assert printed.pop("memory")["parameters"] == 4 * printed["parameters"]
    sample, tokens = printed.pop("sample"), printed.pop("train_tokens_available")
    held_out = printed.pop("validation_tokens_available")
    assert printed == {
        "stage": "target",
        "output": str(tmp_path / "out" / "run"),
        "parameters": 2 * layer + 2 * 300 * 32 + 32,
        "tokens": 65,
        "epochs": round(65 / tokens, 3),
        "steps": 2,
    }
    assert tokens % 32 == held_out % 32 == 0 and 0.05 < held_out / tokens < 0.5
    assert "def area_" in sample
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# --------------------------------------------------------------------------------------------------
# Resuming


def test_crashed_target_ends_like_an_uninterrupted_one(runs, tmp_path, monkeypatch) -> None:
    """Bit for bit: weights and metrics, a line of which was half written when it died."""
    folder = tmp_path / "run"
    config = config_file(runs, tmp_path, TARGET)

    def die_at_step_12(rows: Rows, step: int, *args: Any) -> Rows:
        return batch_at(rows, step, *args) if step != 12 else die()

    for name, function in (("loop.batch_at", die_at_step_12), ("devices.write_model", die)):
        with monkeypatch.context() as patch, pytest.raises(Crash):
            patch.setattr(f"train.{name}", function)
            main(["--config", config])
        assert not (folder / "model").exists()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "lo')

    monkeypatch.setattr("train.loop.batch_at", die)
    main(["--config", config])  # takes no further step
    assert_same_run(folder, runs.root / "target", runs.model("target"))


def test_model_is_of_the_best_checkpoint(runs, tmp_path, monkeypatch, capsys) -> None:
    """The first of three validations is called the best; the model is written by a second run."""
    config = config_file(runs, tmp_path, POSS2, keep_checkpoints=1)
    scores = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr("train.stages.DraftStage.score", lambda *_: next(scores))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("train.devices.write_model", die)
        main(["--config", config])
    main(["--config", config])
    folder = tmp_path / "run"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"10", str(STEPS)}
    (logged,) = [line for line in metrics(folder) if line["step"] == 10 and "agreement" in line]
    del logged["step"]
    logged |= {"model": str(folder / "model"), "model_step": 10, "steps": STEPS}
    assert summary(capsys) == logged
    best, last = (
        ocp.StandardCheckpointer().restore(folder / "checkpoints" / step / "default")
        for step in ("10", str(STEPS))
    )
    got = weights(folder, runs.model("target"))[0]
    np.testing.assert_array_equal(got, best["params"]["fc"]["weight"])
    assert (got != last["params"]["fc"]["weight"]).any()


# --------------------------------------------------------------------------------------------------
# Starting from an earlier draft, and starting over


def test_specialists_start_as_copies_of_an_earlier_drafts_last(runs: Runs, tmp_path: Path) -> None:
    config = load_run(runs, tmp_path, POSS2, init_draft=runs.model("eagle"))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params = stage.init_params()
    _, eagle = load_draft(runs.model("eagle"), target=read_record(runs.model("target")))
    twice = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), eagle["specialists"][0])
    assert_same(params["specialists"], twice)
    assert_same(params["fc"], eagle["fc"])


def test_a_draft_keeps_the_vocabulary_of_the_one_it_starts_from(runs: Runs, tmp_path: Path) -> None:
    """That of another target needs permission."""
    other = {"name": "another", "head_sha256": "0" * 64}
    own = {"draft_vocabulary": [5, 7, 11], "target": other}
    start = {"init_draft": copy_model(runs.model("eagle"), tmp_path / "own", **own)}
    with pytest.raises(UserError, match="was made for another"):
        open_stage(load_run(runs, tmp_path, POSS2, **start), tmp_path)
    start |= {"allow_target_mismatch": True}
    config = load_run(runs, tmp_path, POSS2, **start)
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    stage.save_model(stage.init_params(), tmp_path / "saved")
    assert read_record(tmp_path / "saved").draft_vocabulary == (5, 7, 11)


# --------------------------------------------------------------------------------------------------
# Bad input


def test_dry_run_shows_the_data_without_control_characters_before_it_refuses(
    runs, tmp_path, capsys
) -> None:
    texts = [{"text": f"def area_{number}(): return {number}"} for number in range(60)]
    write_lines(tmp_path / "bad\x1b[31m.jsonl", "junk", *texts)
    config = config_file(runs, tmp_path / "in", TARGET, output=str(tmp_path / "run"))
    data = f"data.source={tmp_path}/*.jsonl"
    error = refusal(main, "--config", config, data, "batch_size=1000", "--dry-run")
    assert error.endswith("or lower batch_size (batch_size=1)")
    printed = capsys.readouterr().out
    assert "bad\\x1b[31m.jsonl:1" in printed and "\x1b" not in printed
    assert f"\n{BRACKETS[0]}<s>def area_" in printed  # before the batch is refused


E3 = DRAFT | {
    "objective": {"feature_weight": 0.0, "probability_weight": 1.0, "top_k_weight": 0.0},
    "specialists": {"family": "eagle3", "positions_per_specialist": [1, 2], "depth": 3},
}
EAGLE = "specialists.family=eagle specialists.positions_per_specialist=[1]"
NO_WEIGHTS = "objective.feature_weight=0 objective.probability_weight=0 objective.top_k_weight=0"
FROZEN = "specialists.num_frozen=1 init_draft=x"
FROZEN_UNTRAINED = (
    "specialists.positions_per_specialist=[1,1,2] specialists.num_frozen=2 init_draft={eagle}"
)
NO_DEPTH = "want one above 0 at a depth that is trained, got [{}, 0.0, 0.0, 0.0]"


@pytest.mark.parametrize(
    ("values", "overrides", "error"),
    [
        (TARGET, "model.vocab_size=100", "vocab_size wants at least 259"),
        (TARGET, "batch_size=1000", "a batch needs 1000; give more documents, raise data.valid"),
        (TARGET, "init_target={poss2}", "poss2/model: want a target, got a draft"),
        (TARGET, "init_target={int8}", "is quantised to int8, which no model is trained with"),
        (TARGET, "target={poss2}", "stage target has no use for the key 'target'; leave it out"),
        (TARGET, "init_target={target} model.num_layers=1", "model.num_layers: want 2 as init_tar"),
        (TARGET, "init_target={target} model.hidden_size=64", "hidden_size: want 32 as init"),
        (DRAFT, "target=nowhere", "poss convert target --source CHECKPOINT --output nowhere"),
        (DRAFT, "target=a/model", "poss train --config FILE, where FILE has output: a"),
        (DRAFT, "target={int8}", "give the target it was made from, converted without --quantise"),
        (DRAFT, "target={eagle}", "eagle/model: want a target, got a draft"),
        (DRAFT, "init_draft={target}", "target/model: want a draft, got a target"),
        (DRAFT, "init_draft={poss2}", "specialists.positions_per_specialist: want 2 or more"),
        (DRAFT, "specialists.depth=32", "specialists.depth 32 does not fit rows of 32 tokens"),
        (DRAFT, "validation_depth=40", "validation_depth 40 does not fit rows of 32 tokens"),
        (DRAFT, "--compile-for here", "--compile-for describes a run; add --dry-run"),
        (DRAFT, "--dry-run --compile-for v5p:none", "cannot compile for v5p:none"),
        (POSS2, "step.accumulation_steps=3", "batch_size 2 does not divide into step.accumulation"),
        (POSS2, "specialists.num_frozen=1", "specialists.num_frozen wants init_draft"),
        (POSS2, "objective.depth_weights=[1,2]", "wants specialists.depth = 4 numbers"),
        (POSS2, FROZEN_UNTRAINED, "num_frozen: want at most 1, as init_draft"),
        (POSS2, "specialists.num_frozen=2", "num_frozen 2 leaves none of 2 to be trained"),
        (POSS2, "specialists.num_frozen=1 specialists.kv=shared", "num_frozen wants kv per_spec"),
        (POSS2, "specialists.kv=shared init_draft={poss2}", "with the same keys and values"),
        (
            POSS2,
            "specialists.fc_bias=true init_draft={poss2}",
            "specialists.fc_bias: want the same",
        ),
        (POSS2, "specialists.depth=2", "depth 2 does not reach the last specialist of"),
        (POSS2, NO_WEIGHTS, "want a weight above 0, got none"),
        (POSS2, "objective.feature_weight=0 objective.normalised_features=true", "feature_weight"),
        (POSS2, "objective.depth_weights=[0,0,0,0]", NO_DEPTH.format(0.0)),
        (POSS2, f"{FROZEN} objective.depth_weights=[1,0,0,0]", NO_DEPTH.format(1.0)),
        (E3, "objective.feature_weight=1", "predict no feature of the target; set it to 0"),
        (E3, "specialists.aux_layers=[1]", "want two or more"),
        (E3, "specialists.start=pass_through", "start at random"),
        (E3, f"{EAGLE} specialists.aux_layers=[0,1]", "reads none of the target's layers"),
        (E3, "specialists.aux_layers=[1,2]", "got 2"),
        (E3, "specialists.kv=shared", "leave it out"),
        (E3, f"{EAGLE} specialists.layers_per_specialist=[2]", "the family eagle has no such"),
        (E3, "specialists.family=mtp specialists.kv=shared", "have separate projections"),
    ],
)
def test_bad_config_is_refused_and_leaves_nothing(runs, tmp_path, values, overrides, error) -> None:
    names = {name: runs.model(name) for name in ("target", "eagle", "poss2")}
    names["int8"] = str(tmp_path / "int8")
    if "int8" in overrides:
        copy_model(runs.model("target"), tmp_path / "int8", quantised="int8")
    config = config_file(runs, tmp_path / "in", values, output=str(tmp_path / "out" / "run"))
    assert error in refusal(main, "--config", config, *overrides.format(**names).split())
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_options_of_training_are_refused() -> None:
    assert "want --stage, or stage in the file that --config names" in refusal(main)


# --------------------------------------------------------------------------------------------------
# Options: what of a draft is shared, frozen or cut, and what a target starts from


FEW_STEPS = {"num_tokens": 3 * 64, "validate_every": 3}


def specialists(runs: Runs, model: Path | str) -> list[dict[str, Any]]:
    _, draft = load_draft(str(model), target=read_record(runs.model("target")))
    return [dict(_named(tree)) for tree in (*draft["specialists"], draft["fc"])]


def _named(tree: Any) -> Iterator[tuple[str, np.ndarray]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        yield jax.tree_util.keystr(path, simple=True, separator="/"), np.asarray(leaf)


def test_shared_keys_and_values(runs: Runs, tmp_path: Path) -> None:
    """As a run begins; its steps keep them (`test_train_step.py`)."""
    spans = {"positions_per_specialist": [2, 2], "depth": 4, "kv": "shared"}
    stage = open_stage(load_run(runs, tmp_path, POSS2, specialists=spans), tmp_path)
    stage.load_weights()
    pairs = [(name, leaf) for name, leaf in _named(stage.init_params()["specialists"])]
    equal = {name for name, leaf in pairs if (leaf[0] == leaf[1]).all() and "norm" not in name}
    assert equal == {"attention/k/weight", "attention/v/weight"}
    assert isinstance(stage.config, DraftConfig) and stage.config.kv == "shared"


def test_frozen_specialists(runs: Runs, tmp_path: Path) -> None:
    spans = {"positions_per_specialist": [2, 2], "depth": 4, "num_frozen": 1}
    start = runs.model("poss2")
    changes = FEW_STEPS | {"specialists": spans, "init_draft": start}
    main(["--config", config_file(runs, tmp_path, POSS2, **changes)])
    trained = specialists(runs, tmp_path / "run" / "model")
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
    stage = open_stage(load_run(runs, tmp_path, POSS2, init_draft=str(draft)), tmp_path)
    assert isinstance(stage.config, DraftConfig) and stage.config.family == "other"
    assert stage.config.positions_per_specialist == (2, 2)
    specialists = {**POSS2["specialists"], "family": "eagle"}
    changes = {"specialists": specialists, "init_draft": str(draft)}
    config = load_run(runs, tmp_path, POSS2, **changes)
    with pytest.raises(UserError, match=r"specialists\.family: want the same, as init_draft "):
        open_stage(config, tmp_path)


@pytest.mark.parametrize("has_cache", [False, True])
def test_features_are_normalised_by_their_deviations(runs, tmp_path, has_cache) -> None:
    """Online and from a cache; the oracle encodes every row by itself."""
    features = {"cache": str(tmp_path / "cache")} if has_cache else {}
    objective = {"normalised_features": True}
    values = POSS2 | {"features": features, "objective": objective}
    config = load_run(runs, tmp_path, values)
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
    config = load_run(runs, tmp_path, POSS2, specialists=started)
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params = stage.init_params()
    np.testing.assert_array_equal(params["fc"]["weight"][:, 32:], np.eye(32))
    assert np.any(params["fc"]["weight"][:, :32])
    for _, leaf in _named({"o": params["specialists"]["attention"]["o"]}):
        assert not leaf.any()


def test_narrow_computation(runs: Runs, tmp_path: Path) -> None:
    main(["--config", config_file(runs, tmp_path, DRAFT, **FEW_STEPS, dtype="bfloat16")])
    trained = specialists(runs, tmp_path / "run" / "model")
    assert {leaf.dtype.name for tree in trained for leaf in tree.values()} == {"float32"}
    narrow, wide = (metrics(run)[0]["loss"] for run in (tmp_path / "run", runs.root / "eagle"))
    np.testing.assert_allclose(narrow, wide, rtol=0.02)
    assert narrow != wide


@pytest.mark.parametrize(
    ("batch_size", "accumulation_steps", "wanted", "sizes"),
    [
        (1, 1, 4, [1] * 4),
        (4, 1, 4, [4]),
        (4, 1, 5, [4, 4]),
        (4, 1, 1, [4]),
        (4, 2, 4, [2, 2]),  # no more rows at once than a step takes
        (4, 1, 10**6, None),  # all that are held out and fill a batch
    ],
)
def test_validation_has_the_same_rows_in_batches_of_any_size(
    runs, tmp_path, batch_size, accumulation_steps, wanted, sizes
):
    values = TARGET | {"batch_size": batch_size, "validation_rows": wanted}
    values |= {"step": {"accumulation_steps": accumulation_steps}}
    config = load_run(runs, tmp_path, values)
    stage = open_stage(config, tmp_path / "stage")
    batches = list(validation_batches(config, stage))
    sizes = sizes or [batch_size] * (len(stage.validation_rows) // batch_size)
    assert [len(batch.tokens) for batch in batches] == sizes
    rows = np.concatenate([batch.tokens for batch in batches])
    np.testing.assert_array_equal(rows, stage.validation_rows.tokens[: sum(sizes)])


def test_a_resumed_run_asks_for_preemption_by_the_steps_of_its_process(monkeypatch) -> None:
    asked = []
    for name in ("RunLog", "put_batch", "batch_at", "_validate"):
        monkeypatch.setattr(loop, name, MagicMock())
    monkeypatch.setattr(loop, "preemption_notice", lambda: nullcontext(asked.append))
    config = MagicMock(num_steps=8, checkpoint_every=100, validate_every=100, profile=None)
    state = SimpleNamespace(step=5)
    loop.run_steps(config, MagicMock(), MagicMock(), lambda state, batch: (state, {}), state)
    assert asked == [1, 2, 3]


def test_a_run_does_not_go_on_with_another_model(runs, tmp_path) -> None:
    start = {"target": "target", "init_draft": "eagle"}
    models = {key: copy_model(runs.model(name), tmp_path / key) for key, name in start.items()}
    config = config_file(runs, tmp_path, POSS2, **FEW_STEPS | models)
    main(["--config", config])
    metrics_before = (tmp_path / "run" / "metrics.jsonl").read_text()
    shutil.rmtree(tmp_path / "run" / "model")
    for key, item in (("init_draft", "fc"), ("target", "layers/1")):
        record = Path(models[key]) / "model.json"
        changed = json.loads(record.read_text())
        changed["weights_sha256"] |= {item: "0" * 64}
        record.write_text(json.dumps(changed))
        assert f"{key}: its file has changed since this run" in refusal(main, "--config", config)
    (tmp_path / "run" / "made_with.json").write_text("[")
    assert "made_with.json: not valid JSON" in refusal(main, "--config", config)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == metrics_before


def test_validations_say_if_no_answer_is_long_enough(runs, tmp_path, caplog) -> None:
    config = load_run(runs, tmp_path, POSS2)
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params, batch = stage.init_params(), put_batch(stage.validation_rows[:2], stage.mesh)
    is_even = np.arange(batch.tokens.shape[1])[None] % 2 == 0
    gaps = batch.replace(loss_mask=batch.loss_mask & is_even)
    for given, is_said in ((batch, False), (gaps, True)):
        caplog.clear()
        stage.validate(params, [given])
        assert ("tokens long, so that acceptance is not measured" in caplog.text) == is_said


# --------------------------------------------------------------------------------------------------
# Targets that start from another


def test_a_tied_target_has_no_head_of_its_own(runs: Runs, tmp_path: Path) -> None:
    tied = {"model": TARGET["model"] | {"tie_embeddings": True}}
    stage = open_stage(load_run(runs, tmp_path, TARGET, **tied), tmp_path / "stage")
    params = stage.init_params()
    assert "head" not in params
    planned = stage.plan_step().state.params
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, planned)
    start = tmp_path / "stage" / "model"
    stage.save_model(params, start)
    continued = load_run(runs, tmp_path, TARGET, init_target=str(start), **tied)
    assert "head" not in open_stage(continued, tmp_path / "continued").init_params()


def test_token_ids_train_no_tokenizer(runs: Runs, tmp_path: Path) -> None:
    lines = [{"input_ids": [n % 50, 5, 7, 9], "loss_mask": [0, 1, 1, 1]} for n in range(200)]
    data = {"source": write_lines(tmp_path / "ids.jsonl", *lines), "sequence_length": 8}
    config = config_file(runs, tmp_path, TARGET, data=data)
    assert "want text to train a tokenizer on, got token ids" in refusal(main, "--config", config)


def test_a_target_continues_another_with_more_layers(runs: Runs, tmp_path: Path) -> None:
    start, model = runs.model("target"), TARGET["model"] | {"num_layers": 3}
    values = TARGET | FEW_STEPS | {"init_target": start, "model": model}
    config = load_run(runs, tmp_path, values)
    stage = open_stage(config, tmp_path / "stage")
    batches = [put_batch(stage.validation_rows[:2], stage.mesh)]
    metrics, _ = stage.validate(stage.init_params(), batches)
    same = load_run(runs, tmp_path, TARGET, init_target=start)
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
