"""When a step's metrics are looked at, and what is written of them."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_run_folder import config_for, start, state_at

from poss_jax.config.reading import UserError
from train.run_folder import RunFolder
from train.run_log import Diverged, LossWatch, RunLog, check_finite, check_loggers, open_loggers


class Fetched:
    """A loss that notes when the host asks for it."""

    def __init__(self, loss: float, step: int, events: list[str]) -> None:
        self._loss, self._step, self._events = loss, step, events

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._events.append(f"fetched {self._step}")
        return np.asarray(self._loss, dtype)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    config = config_for(tmp_path / "run", log_every=2, num_tokens=5 * 256 * 8)
    start(config)
    return RunFolder(config)


def log_of(folder: RunFolder, first_step: int = 0, **changes: Any) -> RunLog:
    config = config_for(folder.path, log_every=2, num_tokens=5 * 256 * 8, **changes)
    return RunLog(config, folder, first_step)


def lines(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def test_a_step_is_looked_at_once_the_next_is_under_way(folder: RunFolder) -> None:
    events: list[str] = []
    with log_of(folder) as log:
        for step in (1, 2, 3):
            events.append(f"started {step}")
            log.record(step, {"loss": Fetched(2.0, step, events)})
        log.flush()
        log.flush()
    assert events == ["started 1", "started 2", "fetched 1", "started 3", "fetched 2", "fetched 3"]


def test_every_second_line_and_the_last(folder: RunFolder) -> None:
    with log_of(folder) as log:
        for step in range(1, 6):
            log.record(step, {"loss": np.float32(step), "loss_per_depth": np.ones(2)})
        log.flush()
    logged = lines(folder)
    assert [line["step"] for line in logged] == [2, 4, 5]
    assert logged[0]["tokens"] == 2 * 256 * 8
    assert (logged[0]["loss"], logged[0]["loss_per_depth"]) == (2.0, [1.0, 1.0])
    assert all(line["tokens_per_second"] > 0 and line["peak_gib"] > 0 for line in logged)


def test_nothing_of_a_step_that_went_wrong_is_written(folder: RunFolder) -> None:
    with log_of(folder) as log:
        log.record(1, {"loss": np.float32(1)})
        log.record(2, {"loss": np.float32(np.nan)})
        with pytest.raises(Diverged) as caught:
            log.record(3, {"loss": np.float32(1)})
    assert caught.value.step == 2
    assert not (folder.path / "metrics.jsonl").exists()


@pytest.mark.parametrize("factor", [None, 3.0])
def test_running_mean_goes_on_from_the_checkpoint(folder: RunFolder, factor: float | None) -> None:
    folder.save(2, state_at(2), score=None, loss_level=2.0)
    folder.close()
    folder = RunFolder(config_for(folder.path))
    with log_of(folder, 2, explosion_factor=factor) as log:
        assert log.loss_level == 2.0
        log.record(3, {"loss": np.float32(7)})
        if factor is None:
            log.flush()
        else:
            with pytest.raises(Diverged, match="loss 7, its running mean 2"):
                log.flush()


def test_loggers_get_the_same_numbers(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Logger:
        def log(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setattr("train.run_log.open_loggers", lambda *_: [Logger()])
    with log_of(folder) as log:
        log.record(2, {"loss": np.float32(2)})
        log.flush()
        log.validated(2, {"validation_loss": [1.0, 2.0], "simulated_acceptance_length": 1.5})
    (step, values), validation, closed = calls
    assert step == 2 and values["loss"] == 2.0 and "tokens_per_second" in values
    names = ("validation_loss/depth_0", "validation_loss/depth_1", "simulated_acceptance_length")
    assert validation == (2, dict(zip(names, (1.0, 2.0, 1.5), strict=True)))
    assert closed == "closed"


def watch(*losses: float, factor: float | None = 5.0, level: float | None = None) -> LossWatch:
    watched = LossWatch(factor, level)
    for step, loss in enumerate(losses, start=1):
        watched.check(step, {"loss": loss})
    return watched


def test_level_is_a_running_mean():
    assert watch().level is None
    assert watch(2.0).level == 2.0
    assert watch(2.0, 3.0).level == pytest.approx(0.98 * 2 + 0.02 * 3)
    assert watch(3.0, level=watch(2.0).level).level == watch(2.0, 3.0).level


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ([2.0, 10.0], 5.0),  # not above
        ([0.01, 1.0], 5.0),  # a hundredfold, but a jump of less than 1
        ([2.0, 1e6, 1e9], None),
        ([1e6, 2.0, 1.0], 5.0),  # falls
        ([0.0, 5.0, 0.0, 5.0], 2.0),
    ],
)
def test_goes_on(losses, factor):
    level, *others = filter(None, losses)  # batches with nothing to learn do not count
    for loss in others:
        level = 0.98 * level + 0.02 * loss
    assert watch(*losses, factor=factor).level == pytest.approx(level)


@pytest.mark.parametrize(
    ("losses", "factor", "reason"),
    [
        ([2.0, 10.1], 5.0, "loss 10.1, its running mean 2"),
        ([0.01, 1.1], 5.0, "loss 1.1, its running mean 0.01"),
        ([2.0, 4.1], 2.0, "loss 4.1"),
        ([2.0, math.nan], None, "loss nan"),
        ([math.inf], 5.0, "loss inf"),
    ],
)
def test_stops(losses, factor, reason):
    with pytest.raises(Diverged, match=reason) as caught:
        watch(*losses, factor=factor)
    assert caught.value.step == len(losses)


def test_a_list_is_finite_where_all_its_numbers_are():
    check_finite(3, {"loss": 1.0, "loss_per_depth": [1.0, 2.0]})
    with pytest.raises(Diverged, match=r"loss_per_depth \[1.0, inf\]"):
        check_finite(3, {"loss": 1.0, "loss_per_depth": [1.0, math.inf]})


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_said_in_one_line(tmp_path, name, package, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(UserError, match=rf"needs the package {package}, .*poss-jax\[{name}\]"):
        check_loggers(config_for(tmp_path, loggers=[name]))


def test_tensorboard_takes_up_after_the_checkpoint(tmp_path, monkeypatch) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    config = config_for(tmp_path, loggers=["tensorboard"])
    (logger,) = open_loggers(config, tmp_path, first_step=10)
    logger.log(11, {"loss": 2.0})
    logger.close()
    opened = ((str(tmp_path / "tensorboard"),), {"purge_step": 11})
    assert calls == [opened, ("loss", 2.0, 11), "closed"]


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **kwargs: (opened.append(kwargs), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = config_for(tmp_path, loggers=["wandb"])
    for command in ("a", "a", "b"):
        (tmp_path / "provenance.json").write_text(json.dumps({"command": command}))
        (logger,) = open_loggers(config, tmp_path, first_step=10)
        logger.log(11, {"loss": 2.0})
    first, again, anew = (call["id"] for call in opened)
    assert first == again != anew
    assert opened[0]["name"] == tmp_path.name and opened[0]["resume"] == "allow"
    assert opened[0]["config"]["loggers"] == ["wandb"]
    assert logged == [{"step": 11, "loss": 2.0}] * 3
