"""Training runs that are killed, told to stop or diverge: nothing is lost, nothing bad is kept."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import POSS2, STEPS, Runs, assert_same_run, config_file, metrics, refusal
from self_killing import run_until

from poss_jax.data.rows import rows_at
from poss_jax.learn.step import TrainState
from poss_jax.model.documents import TrainBatch
from train.loop import RunLog
from train.main import main
from train.stages import DraftStage


def checkpoints(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir())


def assert_ends_like_poss2(folder: Path, runs: Runs) -> None:
    """As the run that nothing interrupted, bit for bit; and the same checkpoints are left."""
    assert_same_run(folder, runs.root / "poss2", runs.model("target"))
    assert checkpoints(folder) == checkpoints(runs.root / "poss2")


@pytest.mark.quick
def test_run_killed_while_saving_ends_like_an_uninterrupted_one(runs, tmp_path):
    config = config_file(runs, tmp_path, POSS2)
    run_until("os.rename", r"/checkpoints/20\.", "train.main", "--config", config)
    names = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert [name for name in names if name.isdigit()] == ["10"]
    assert any(name.startswith("20.") for name in names)
    main(["--config", config])
    assert_ends_like_poss2(tmp_path / "run", runs)


FIRST_STEP = "open", r"run/metrics\.jsonl$"  # when its metrics are written


@pytest.fixture(scope="module")
def milliseconds(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Time between the metrics of a run's first step and its last; all programs are compiled."""
    folder = tmp_path_factory.mktemp("timed")
    main(["--config", config_file(runs, folder, POSS2)])
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    first, *_, last = [line["seconds"] for line in lines if "seconds" in line]
    return 1000 * (last - first)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_killed_at_a_random_moment(runs, tmp_path, milliseconds, seed):
    """Each in its own twentieth of the time, at any point of the run."""
    config = config_file(runs, tmp_path, POSS2)
    later = 1 + round((seed + random.Random(seed).random()) / 20 * milliseconds)
    run_until(*FIRST_STEP, "train.main", "--config", config, later=later)
    main(["--config", config])
    assert_ends_like_poss2(tmp_path / "run", runs)


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
    assert_ends_like_poss2(tmp_path / "run", runs)


@pytest.mark.slow
def test_second_sigterm_quits_at_once(runs, tmp_path):
    """One comes as the first step's metrics are written, another as the second's are."""
    config = config_file(runs, tmp_path, POSS2)
    said = run_until(*FIRST_STEP, "train.main", "--config", config, sent=signal.SIGTERM)
    assert "saving and stopping; a second one quits at once" in said
    assert checkpoints(tmp_path / "run") == []


def test_poisoned_batch_stops_the_run_and_is_named(runs, tmp_path, monkeypatch):
    make_step, run, poisoned_step = DraftStage.make_step, tmp_path / "run", 7

    def make_poisoned(stage: DraftStage, *args: Any) -> Any:
        step_fn = make_step(stage, *args)

        def poisoned(state: TrainState, batch: TrainBatch) -> Any:
            state, metrics = step_fn(state, batch)
            factor = np.nan if state.step == poisoned_step else 1.0
            return state, metrics | {"loss": metrics["loss"] * factor}

        return poisoned

    monkeypatch.setattr(DraftStage, "make_step", make_poisoned)
    often = {"checkpoint_every": 1, "validate_every": STEPS, "log_every": 5}
    config = config_file(runs, tmp_path, POSS2, **often)
    message = refusal(main, "--config", config)
    num_rows = len(np.load(run / "data.npz")["train/tokens"])
    rows = sorted(rows_at(num_rows, poisoned_step - 1, 2, seed=0).tolist())
    assert message.startswith(
        f"step 7 diverged: loss nan; the checkpoint of step 6 is kept, "
        f"its batch is rows {rows[0]}, {rows[1]} of the training data (text: "
    )
    assert message.endswith(
        "; raise explosion_factor and run again if such a loss is expected, else fix the data "
        "or lower optimizer.learning_rate and start from scratch (--overwrite, or another output)"
    )
    assert checkpoints(run) == [5, 6]
    batch = (run / "samples" / "diverged-7.md").read_text("utf-8")
    assert all(f"# row {row}\n" in batch for row in rows) and "def area_" in batch
    assert [line["step"] for line in metrics(run)] == [5]
    assert not (run / "model").exists()
    assert refusal(main, "--config", config) == message  # the same again from the checkpoint


def test_validation_that_is_not_finite_is_not_saved(runs, tmp_path, monkeypatch):
    results = {"validation_loss": [np.nan], "simulated_acceptance_length": 1.0}
    monkeypatch.setattr("train.stages.DraftStage.validate", lambda *_: (results, None))
    message = refusal(main, "--config", config_file(runs, tmp_path, POSS2))
    assert "step 10 diverged: validation_loss [nan]; nothing is saved yet" in message
    assert checkpoints(tmp_path / "run") == []
