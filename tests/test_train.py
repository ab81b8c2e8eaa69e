"""The training program end to end: both stages, resuming after crashes, refusals."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from programs import (
    DRAFT,
    POSS2,
    STEPS,
    TARGET,
    Runs,
    config_file,
    copy_model,
    metrics,
    refusal,
    summary,
    weights,
    write_lines,
)

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import read_record
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import batch_at
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.program.running import BRACKETS
from train import loop
from train.main import main
from train.run_folder import RunFolder
from train.training import open_stage


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


def test_depths_that_are_not_trained_can_be_validated(runs: Runs, tmp_path: Path) -> None:
    """The last specialist serves them; the depths that are trained are measured as before."""
    config = config_file(runs, tmp_path, DRAFT, validation_depth=3)
    main(["--config", config])
    deeper, last = metrics(tmp_path / "run")[-1], metrics(runs.root / "eagle")[-1]
    assert {len(deeper[name]) for name in ("agreement", "validation_loss")} == {3}
    assert deeper["agreement"][0] == last["agreement"][0]
    assert deeper["feature_cosine"][0] > deeper["feature_cosine"][2]


def test_every_validation_leaves_samples(runs: Runs) -> None:
    for name in ("target", "poss2"):
        samples = runs.root / name / "samples"
        assert {path.name for path in samples.iterdir()} == {"10.md", "20.md", f"{STEPS}.md"}
        assert "## Row 1" in (samples / f"{STEPS}.md").read_text(encoding="utf-8")


def test_profile_of_some_steps(runs: Runs, tmp_path: Path) -> None:
    config = config_file(runs, tmp_path, POSS2, profile={"start": 2, "steps": 1})
    main(["--config", config, "num_tokens=192", "validate_every=100"])
    traces = [path for path in (tmp_path / "run" / "profile").rglob("*") if path.is_file()]
    assert traces


def test_with_one_depth_acceptance_is_one_plus_agreement(runs: Runs) -> None:
    last = metrics(runs.root / "eagle")[-1]
    assert last["simulated_acceptance_length"] == pytest.approx(1 + last["agreement"][0])


def _quality(validation: dict[str, Any]) -> float:
    """The best checkpoint's measure: acceptance of a draft, likelihood of a target."""
    length = validation.get("simulated_acceptance_length")
    return -validation["validation_loss"] if length is None else length


@pytest.mark.parametrize("name", ["target", "poss2"])
def test_finished_run_is_not_trained_again(runs, name, monkeypatch, capsys) -> None:
    def no_step(*_: Any) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(loop, "batch_at", no_step)
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


class Crash(Exception):
    """Ways to kill a run."""


def crash_when(function: Callable[..., Any], dies: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if dies(*args):
            raise Crash
        return function(*args, **kwargs)

    return wrapped


def at_batch(step: int) -> tuple[Any, str, Callable[..., Any]]:
    """Dies when the batch of a step is taken."""
    return loop, "batch_at", crash_when(batch_at, lambda _rows, at, *_: at == step)


def at_save(step: int) -> tuple[Any, str, Callable[..., Any]]:
    """Dies after a step's metrics were logged, before its checkpoint is saved."""
    return RunFolder, "save", crash_when(RunFolder.save, lambda _self, at, _state: at == step)


def at_model() -> tuple[Any, str, Callable[..., Any]]:
    """Dies after the last checkpoint, before the model is written."""
    return "train.devices", "write_model", crash_when(lambda: None, lambda *_: True)


@pytest.mark.parametrize(
    ("name", "values", "crashes", "starts"),
    [
        ("target", TARGET, [at_batch(12), at_model()], [0, 10, None]),
        pytest.param(
            "poss2", POSS2, [at_save(10), at_save(20)], [0, 0, 10], marks=pytest.mark.slow
        ),
    ],
)
def test_crashed_run_ends_like_an_uninterrupted_one(
    runs, tmp_path, name, values, crashes, starts, monkeypatch
):
    """Bit for bit: weights and metrics, killed at any point, with a metrics line half written."""
    folder = tmp_path / "run"
    config = config_file(runs, tmp_path, values)
    for where, attribute, function in crashes:
        with monkeypatch.context() as patch, pytest.raises(Crash):
            module = sys.modules[where] if isinstance(where, str) else where
            patch.setattr(module, attribute, function)
            main(["--config", config])
        assert not (folder / "model").exists()
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 1, "lo')

    steps: list[int] = []
    monkeypatch.setattr(loop, "batch_at", lambda *args: (steps.append(args[1]), batch_at(*args))[1])
    main(["--config", config])
    assert steps == ([] if starts[-1] is None else [*range(starts[-1], STEPS)])
    assert metrics(folder) == metrics(runs.root / name)
    expected = weights(runs.root / name, runs.model("target"))
    for got, want in zip(weights(folder, runs.model("target")), expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_model_is_of_the_best_checkpoint(runs, tmp_path, monkeypatch, capsys) -> None:
    """The first of three validations is called the best; the model is written by a second run."""
    config = config_file(runs, tmp_path, POSS2, keep_checkpoints=1)
    scores = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr("train.draft_stage.DraftStage.score", lambda *_: next(scores))
    with monkeypatch.context() as patch, pytest.raises(Crash):
        patch.setattr("train.devices.write_model", crash_when(lambda: None, lambda *_: True))
        main(["--config", config])
    main(["--config", config])
    folder = tmp_path / "run"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"10", str(STEPS)}
    (logged,) = [line for line in metrics(folder) if line["step"] == 10 and "agreement" in line]
    del logged["step"]
    assert summary(capsys) == logged | {
        "model": str(folder / "model"),
        "model_step": 10,
        "steps": STEPS,
    }
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
    config = load_config(
        TrainConfig, config_file(runs, tmp_path, POSS2, init_draft=runs.model("eagle"))
    )
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params = stage.init_params()
    _, eagle = load_draft(runs.model("eagle"), target=read_record(runs.model("target")))
    for copies, original in zip(
        jax.tree.leaves(params["specialists"]),
        jax.tree.leaves(eagle["specialists"][0]),
        strict=True,
    ):
        np.testing.assert_array_equal(copies, np.stack([original, original]))
    np.testing.assert_array_equal(params["fc"]["weight"], eagle["fc"]["weight"])


def test_a_draft_keeps_the_vocabulary_of_the_one_it_starts_from(runs: Runs, tmp_path: Path) -> None:
    own = copy_model(runs.model("eagle"), tmp_path / "own", draft_vocabulary=[5, 7, 11])
    config = load_config(TrainConfig, config_file(runs, tmp_path, POSS2, init_draft=own))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    stage.save_model(stage.init_params(), tmp_path / "saved")
    assert read_record(tmp_path / "saved").draft_vocabulary == (5, 7, 11)


def test_starting_from_another_targets_draft_needs_permission(runs: Runs, tmp_path: Path) -> None:
    other = {"name": "another", "head_sha256": "0" * 64}
    own = copy_model(runs.model("eagle"), tmp_path / "own", target=other)
    values = DRAFT | {"init_draft": own}
    with pytest.raises(UserError, match="was made for another"):
        open_stage(load_config(TrainConfig, config_file(runs, tmp_path, values)), tmp_path)
    values["allow_target_mismatch"] = True
    open_stage(load_config(TrainConfig, config_file(runs, tmp_path, values)), tmp_path)


def test_overwrite_starts_anew(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(runs.root / "target", tmp_path / "run")
    config = config_file(runs, tmp_path, TARGET, seed=1)
    monkeypatch.setattr(loop, "batch_at", crash_when(batch_at, lambda *_: True))
    with pytest.raises(Crash):
        main(["--config", config, "--overwrite"])
    left = {path.name for path in (tmp_path / "run").iterdir()}
    assert left == {"config.yaml", "provenance.json", "tokenizer", "data.npz", "checkpoints"}
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    assert "seed: 1" in (tmp_path / "run" / "config.yaml").read_text()


# --------------------------------------------------------------------------------------------------
# Bad input


def test_dry_run_shows_the_sample_before_it_refuses_the_batch(runs, tmp_path, capsys) -> None:
    config = config_file(runs, tmp_path / "in", TARGET, output=str(tmp_path / "out" / "run"))
    error = refusal(main, "--config", config, "batch_size=1000", "--dry-run")
    assert error.endswith("or lower batch_size (batch_size=1)")
    assert f"\n{BRACKETS[0]}<s>def area_" in capsys.readouterr().out


def test_names_of_data_files_are_printed_without_control_characters(runs, tmp_path, capsys) -> None:
    texts = [{"text": f"def area_{number}(): return {number}"} for number in range(60)]
    write_lines(tmp_path / "bad\x1b[31m.jsonl", "junk", *texts)
    config = config_file(runs, tmp_path / "in", TARGET, output=str(tmp_path / "run"))
    main(["--config", config, f"data.source={tmp_path}/*.jsonl", "--dry-run"])
    printed = capsys.readouterr().out
    assert "bad\\x1b[31m.jsonl:1" in printed and "\x1b" not in printed


@pytest.mark.parametrize(
    ("folder", "advice"),
    [
        ("nowhere", "write it first: poss convert target --source CHECKPOINT --output nowhere"),
        ("runs/t/model", "train it first: poss train --config FILE, where FILE has output: runs/t"),
    ],
)
def test_missing_target_names_the_command_that_makes_it(runs, tmp_path, folder, advice) -> None:
    config = config_file(runs, tmp_path, DRAFT)
    assert refusal(main, "--config", config, f"target={folder}", "--dry-run").endswith(advice)


def test_quantised_target_names_what_it_was_made_from(runs: Runs, tmp_path: Path) -> None:
    command = ["python", "-m", "poss_jax.convert", "target", "--source", "it.gguf"]
    made = {"quantised": "int8", "provenance": {"command": command}}
    target = copy_model(runs.model("target"), tmp_path / "int8", **made)
    error = refusal(main, "--config", config_file(runs, tmp_path, DRAFT), f"target={target}")
    assert "quantised to int8" in error
    assert error.endswith("poss convert target --source it.gguf --output DIR")


@pytest.mark.parametrize(
    ("values", "override", "error"),
    [
        (TARGET, "optimizer.learning_rat=1", "unknown key 'optimizer.learning_rat'; did you mean "),
        (TARGET, "batch_size=0", "batch_size=0': Input should be greater than 0, got 0"),
        (TARGET, "batch_size", "override 'batch_size': want section.key=value"),
        (TARGET, "model=null", "stage target needs the key 'model'"),
        (TARGET, "model.vocab_size=100", "vocab_size wants at least 259"),
        (TARGET, "data.source=nowhere/*.txt", "no such file; give a path or a glob"),
        (
            TARGET,
            "batch_size=1000",
            "a batch needs 1000; give more documents, raise data.validation_fraction, or lower",
        ),
        (DRAFT, "target=nowhere", "model folder nowhere does not exist"),
        (DRAFT, "target=null", "stage draft needs the key 'target'"),
        (DRAFT, "target={eagle}", "eagle/model: want a target, got a draft"),
        (DRAFT, "target={text}", "text holds no model.json, so it is not a model folder"),
        (DRAFT, "init_draft={target}", "target/model: want a draft, got a target"),
        (DRAFT, "init_draft={poss2}", "specialists.positions_per_specialist: want 2 or more"),
        (DRAFT, "specialists.depth=32", "specialists.depth 32 does not fit rows of 32 tokens"),
        (DRAFT, "validation_depth=40", "validation_depth 40 does not fit rows of 32 tokens"),
    ],
)
def test_bad_config_is_refused_and_leaves_nothing(runs, tmp_path, values, override, error) -> None:
    names = {name: runs.model(name) for name in ("target", "eagle", "poss2")}
    override = override.format(**names, text=runs.root / "text")
    config = config_file(runs, tmp_path / "in", values, output=str(tmp_path / "out" / "run"))
    assert error in refusal(main, "--config", config, override)
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_a_step_that_cannot_fit_is_refused_and_leaves_nothing(runs, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("train.memory.device_memory", lambda: 1000)
    config = config_file(runs, tmp_path / "in", DRAFT, output=str(tmp_path / "out" / "run"))
    assert "a step needs at least" in refusal(main, "--config", config)
    assert not list((tmp_path / "out").glob("*"))


def test_changed_config_is_refused_and_touches_nothing(runs: Runs) -> None:
    before = snapshot(runs.root / "eagle")
    config = str(runs.root / "eagle" / "config.yaml")
    message = refusal(main, "--config", config, "seed=1", "data.sequence_length=16")
    assert "(data.sequence_length: saved 32, asked 16)" in message and "--overwrite" in message
    assert snapshot(runs.root / "eagle") == before


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ([], "want --stage target|draft, or the key stage in the file that --config names"),
        (["--config", "nowhere.yaml"], "config nowhere.yaml: No such file or directory"),
        (
            ["--config", "x.yaml", "--overwite"],
            "unknown option --overwite; did you mean --overwrite?",
        ),
    ],
)
def test_bad_arguments(arguments: list[str], error: str) -> None:
    assert error in refusal(main, *arguments)
