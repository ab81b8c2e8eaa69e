"""Training runs that are killed, told to stop or diverge: nothing is lost, nothing bad is kept."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from programs import POSS2, STEPS, Runs, config_file, metrics, refusal, weights
from self_killing import ROOT, run_until

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.reading import load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import rows_at
from poss_jax.model.parameters import split_items
from train.main import main
from train.run_log import RunLog
from train.training import open_stage


def interrupt(moment: str, step: int, config: str) -> subprocess.CompletedProcess[str]:
    """In another process, which finds its programs compiled."""
    command = [sys.executable, str(ROOT / "tests" / "dying_run.py"), moment, str(step)]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
    }
    command += ["--config", config]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def assert_ends_like(folder: Path, uninterrupted: Path, runs: Runs) -> None:
    """Bit for bit: metrics and weights; and the same checkpoints are left."""
    assert metrics(folder) == metrics(uninterrupted)
    assert checkpoints(folder) == checkpoints(uninterrupted)
    expected = weights(uninterrupted, runs.model("target"))
    for got, want in zip(weights(folder, runs.model("target")), expected, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.quick
def test_run_killed_while_saving_ends_like_an_uninterrupted_one(runs, tmp_path):
    config = config_file(runs, tmp_path, POSS2)
    run_until("os.rename", r"/checkpoints/20\.", "train.main", "--config", config)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert [name for name in names if name.isdigit()] == ["10"]
    assert any(name.startswith("20.") for name in names)
    main(["--config", config])
    assert_ends_like(tmp_path / "run", runs.root / "poss2", runs)


@pytest.fixture(scope="module")
def milliseconds(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds between the metrics of a run's first step and its last."""
    folder = tmp_path_factory.mktemp("timed")
    assert interrupt("after", 10**6, config_file(runs, folder, POSS2)).returncode == 0
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    first, *_, last = [line["seconds"] for line in lines if "seconds" in line]
    return 1000 * (last - first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment(runs, tmp_path, milliseconds, seed):
    """Each in its own twentieth of the time, at any point of the run."""
    config = config_file(runs, tmp_path, POSS2)
    share = (seed + random.Random(seed).random()) / 20
    result = interrupt("after", round(share * milliseconds), config)
    assert result.returncode in (-signal.SIGKILL, 0), result.stderr  # 0: it was faster
    main(["--config", config])
    assert_ends_like(tmp_path / "run", runs.root / "poss2", runs)


def test_sigterm_saves_and_says_how_to_go_on(runs, tmp_path, monkeypatch, capfd):
    config, record = config_file(runs, tmp_path, POSS2), RunLog.record

    def told_to_stop(log: RunLog, step: int, *args: Any, **kwargs: Any) -> Any:
        if step == 13:
            os.kill(os.getpid(), signal.SIGTERM)
        return record(log, step, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "record", told_to_stop)
        main(["--config", config])
    printed, told = capfd.readouterr()
    assert printed == f'{{"stopped_at": 13, "steps": {STEPS}}}\n'
    assert "stopped after step 13 of 24, which is saved; run the same command" in told
    assert checkpoints(tmp_path / "run") == [10, 13]
    assert not (tmp_path / "run" / "model").exists()
    main(["--config", config])
    assert_ends_like(tmp_path / "run", runs.root / "poss2", runs)


@pytest.mark.slow
def test_second_sigterm_quits_at_once(runs, tmp_path):
    result = interrupt("twice", 13, config_file(runs, tmp_path, POSS2))
    assert result.returncode == -signal.SIGTERM, result.stderr
    assert "saving and stopping; a second one quits at once" in result.stderr
    assert checkpoints(tmp_path / "run") == [10]


def copied_run(runs: Runs, folder: Path) -> Path:
    run = folder / "run"
    shutil.copytree(runs.root / "poss2", run)
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"output": str(run)}))
    return run


def flip_a_weight(checkpoint: Path) -> None:
    """Flips a bit of the largest file, in which the arrays lie."""
    path = max(checkpoint.rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 64
    path.write_bytes(content)


def test_complete_run_does_not_need_its_checkpoints(runs, tmp_path, capsys):
    folder = copied_run(runs, tmp_path)
    for checkpoint in (folder / "checkpoints").iterdir():
        flip_a_weight(checkpoint)
    before = sorted(folder.rglob("*"))
    main(["--config", config_file(runs, tmp_path, POSS2)])
    assert json.loads(capsys.readouterr().out)["model"] == str(folder / "model")
    assert sorted(folder.rglob("*")) == before


def poisoned_target(source: str, folder: Path, token: int) -> str:
    """A copy of a target that gives NaN for a certain token."""
    record, params = load_target(source)
    weight = params["embed"]["weight"]
    params |= {"embed": {"weight": weight.at[token].set(np.nan)}}
    items = split_items(record.config, params)
    write_model(folder, record, items, tokenizer_from=Path(source))
    return str(folder)


def rare_text(folder: Path, text: Path) -> str:
    """The training text, and one document with an extra letter."""
    folder.mkdir()
    for path in text.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "rare.txt").write_text("é" * 8, encoding="utf-8")
    return str(folder / "*.txt")


def test_poisoned_batch_stops_the_run_and_is_named(runs, tmp_path):
    source = {"source": rare_text(tmp_path / "text", runs.root / "text")}
    values: dict[str, Any] = {"data": runs.data | source, "checkpoint_every": 1}
    values |= {"validate_every": STEPS, "log_every": 5}
    config = config_file(runs, tmp_path, POSS2, **values)
    stage = open_stage(load_config(TrainConfig, config), tmp_path)
    token = stage.tokenizer("é", add_special_tokens=False)["input_ids"][0]
    assert not (stage.validation_rows.tokens == token).any()
    (row,) = {int(row) for row, _ in np.argwhere(stage.rows.tokens == token)}
    at = product(range(100), range(5, 9))
    batches = {(seed, step): rows_at(len(stage.rows), step - 1, 2, seed) for seed, step in at}
    seed, step = next(at for at, rows in batches.items() if row in rows)

    target = poisoned_target(runs.model("target"), tmp_path / "target", token)
    config = config_file(runs, tmp_path, POSS2, **values, seed=seed, target=target)
    message = refusal(main, "--config", config)
    rows = ", ".join(map(str, sorted(batches[seed, step])))
    assert message.startswith(
        f"step {step} diverged: loss nan; the checkpoint of step {step - 1} is kept, "
        f"its batch is rows {rows} of the training data (text: "
    )
    assert message.endswith(
        "; raise explosion_factor and run again if such a loss is expected, else fix the data "
        "or lower optimizer.learning_rate and start from scratch (--overwrite, or another output)"
    )
    assert checkpoints(tmp_path / "run") == [step - 2, step - 1]
    assert "éé" in (tmp_path / "run" / "samples" / f"diverged-{step}.md").read_text("utf-8")
    assert [line["step"] for line in metrics(tmp_path / "run")] == [5][: step - 5]
    assert not (tmp_path / "run" / "model").exists()
    assert refusal(main, "--config", config) == message  # the same again from the checkpoint


def test_validation_that_is_not_finite_is_not_saved(runs, tmp_path, monkeypatch):
    results = {"validation_loss": [np.nan], "simulated_acceptance_length": 1.0}
    monkeypatch.setattr("train.draft_stage.DraftStage.validate", lambda *_: (results, None))
    message = refusal(main, "--config", config_file(runs, tmp_path, POSS2))
    assert "step 10 diverged: validation_loss [nan]; nothing is saved yet" in message
    assert checkpoints(tmp_path / "run") == []
