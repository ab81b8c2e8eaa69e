"""The folder and the log of a run: starting, continuing, what is refused, and what is written."""

import json
import math
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.config.reading import UserError, build_config
from poss_jax.config.training import TrainConfig
from poss_jax.learn.step import TrainState
from train.loop import LOGGERS, Diverged, RunLog, check_loggers, next_level
from train.run_folder import RunFolder, claim_folder

MODEL = dict.fromkeys(
    "vocab_size hidden_size intermediate_size num_layers num_heads num_kv_heads".split(), 4
)


def config_for(output: Path, **changes: Any) -> TrainConfig:
    values = {"stage": "target", "output": str(output), "num_tokens": 9}
    values["model"] = MODEL | {"head_dim": 2}
    return build_config(TrainConfig, values | changes, origin="test")


def start(config: TrainConfig, *, overwrite: bool = False) -> None:
    with claim_folder(config, overwrite=overwrite) as place:
        (place / "tokenizer").write_text("prepared")


def files(folder: Path) -> dict[str, str]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def state_at(step: int) -> TrainState:
    weights = {"weight": jnp.arange(6.0).reshape(2, 3) * step}
    return TrainState(jnp.asarray(step, jnp.int32), weights, (jnp.float32(step),))


def test_new_run_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    config = config_for(tmp_path / "runs" / "a")
    with claim_folder(config) as place:
        assert not (tmp_path / "runs" / "a").exists()
        (place / "tokenizer").write_text("prepared")
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a"]
    written = files(tmp_path / "runs" / "a")
    assert sorted(written) == ["config.yaml", "provenance.json", "tokenizer"]
    assert "versions" in json.loads(written["provenance.json"])


def test_a_run_at_a_link_lies_where_the_link_leads(tmp_path: Path) -> None:
    (tmp_path / "large" / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "large" / "run")
    for overwrite in (False, True):
        start(config_for(tmp_path / "link"), overwrite=overwrite)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "large" / "run" / "config.yaml").is_file()
    assert [path.name for path in (tmp_path / "large").iterdir()] == ["run"]


def test_same_config_continues_in_place_even_if_moved(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()  # an empty folder is taken
    start(config_for(tmp_path / "a"))
    before = files(tmp_path / "a")
    with claim_folder(config_for(tmp_path / "a")) as place:
        assert place == tmp_path / "a"
    assert files(tmp_path / "a") == before
    (tmp_path / "a").rename(tmp_path / "b")
    with claim_folder(config_for(tmp_path / "b")) as place:
        assert place == tmp_path / "b" and (place / "tokenizer").exists()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1, "batch_size": 4}, r"\(batch_size: saved 8, asked 4\)"),
        ({"optimizer": {"b1": 0.5}, "seed": 1}, r"\(optimizer\.b1: saved 0\.9, asked 0\.5\)"),
        ({"model": MODEL | {"head_dim": 4}}, r"\(model\.head_dim: saved 2, asked 4\)"),
        ({"data": {"system_prompt": "x" * 9000}}, r"\(data\.system_prompt: .*'x+\.\.\.x+'\)"),
    ],
)
def test_other_config_names_the_first_difference(tmp_path, changes, named) -> None:
    start(config_for(tmp_path / "a"))
    before = files(tmp_path)
    with pytest.raises(UserError, match=f"a run with another config {named}; .*--overwrite"):
        start(config_for(tmp_path / "a", **changes))
    assert files(tmp_path) == before


def test_what_does_not_change_the_result_may_change(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a"))
    changes = {"keep_checkpoints": 5, "mesh": {"fsdp": 2}, "step": {"accumulation_steps": 2}}
    changes |= {"explosion_factor": None, "profile": {"start": 3}, "loggers": ["wandb"]}
    with claim_folder(config_for(tmp_path / "a", **changes)) as place:
        assert place == tmp_path / "a"
    assert sorted(files(tmp_path / "a")) == ["config.yaml", "provenance.json", "tokenizer"]
    assert "keep_checkpoints: 5" in (tmp_path / "a" / "config.yaml").read_text()
    with pytest.raises(UserError, match=r"\(validate_every: saved 500, asked 7\)"):
        start(config_for(tmp_path / "a", validate_every=7, log_every=1))


@pytest.mark.parametrize(("change", "overwrite"), [({"log_every": 7}, False), ({"seed": 1}, True)])
def test_a_start_that_fails_changes_nothing(tmp_path, change, overwrite) -> None:
    start(config_for(tmp_path / "a"))
    (tmp_path / "a" / "metrics.jsonl").write_text("of the earlier run")
    before, changed = files(tmp_path), config_for(tmp_path / "a", **change)
    with pytest.raises(UserError), claim_folder(changed, overwrite=overwrite):
        raise UserError("no memory")
    assert files(tmp_path) == before
    start(changed, overwrite=overwrite)
    assert ("a/metrics.jsonl" in files(tmp_path)) != overwrite
    [(key, value)] = change.items()
    assert f"{key}: {value}" in files(tmp_path)["a/config.yaml"]


@pytest.mark.parametrize(
    ("content", "overwrite"),
    [(None, True), ("learning_rate: 1", True), ("- a list", False), ("stage: [", False)],
    ids=repr,
)
def test_folder_of_something_else_is_refused(tmp_path, content, overwrite) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    if content is not None:
        (tmp_path / "thesis" / "config.yaml").write_text(content)
    before = files(tmp_path)
    with pytest.raises(UserError, match=r"thesis is not empty, and no training run by"):
        start(config_for(tmp_path / "thesis"), overwrite=overwrite)
    assert files(tmp_path) == before


def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"output .* name another folder"):
        start(config_for(tmp_path / "file"))
    assert files(tmp_path) == {"file": "text"}


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "{}/model"},
        {"init_draft": "{}/model"},
        {"stage": "target", "init_target": "{}/model"},
        {"features": {"cache": "{}/cache"}},
        {"data": {"source": "{}/a.jsonl"}},
        {"data": {"template": "{}/a.jinja"}},
    ],
)
def test_run_does_not_overwrite_what_it_reads(tmp_path: Path, changes) -> None:
    start(config_for(tmp_path / "a"))
    before = files(tmp_path)
    at = json.loads(json.dumps(changes).replace("{}", str(tmp_path / "a")))
    draft = {"stage": "draft", "model": None, "target": "t"} if "stage" not in at else {}
    with pytest.raises(UserError, match=r"output .*/a holds .*/a/.*, which is needed"):
        start(config_for(tmp_path / "a", **draft | at), overwrite=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("scores", "kept", "best", "resumed_after"),
    [
        ([1.0, 3.0, 2.0, 1.5, 1.0], [2, 4, 5], 2, 2),
        ([1.0, 2.0, 3.0, 2.0, 2.0], [3, 4, 5], 3, 4),
        ([1.0, 2.0, 1.0, 2.0, None], [4, 5], 4, 2),  # of equals the newest
        ([None, 2.0, None, None, None], [2, 4, 5], 2, 4),
        ([None] * 5, [4, 5], 5, 0),
    ],
)
def test_keeps_the_newest_and_the_best(tmp_path, scores, kept, best, resumed_after) -> None:
    start(config_for(tmp_path / "a"))
    folder = RunFolder(config_for(tmp_path / "a"))
    for step, score in enumerate(scores, start=1):
        folder.save(step, state_at(step), score=score, loss_level=step / 2)
        if step == resumed_after:
            folder.close()
            folder = RunFolder(config_for(tmp_path / "a"))
            assert folder.loss_level == step / 2
    exported = folder.exported("best", state_at(5))
    assert (folder.exported_step("best"), folder.exported_step("last")) == (best, 5)
    assert (int(exported.step), float(exported.params["weight"][0, 1])) == (best, best)
    assert int(folder.exported("last", state_at(5)).step) == 5
    folder.close()
    assert sorted(int(path.name) for path in (tmp_path / "a" / "checkpoints").iterdir()) == kept


FULL = "No space left on device"


@pytest.mark.parametrize(
    ("when", "raised", "reason"),
    [
        (
            "save",
            ValueError("Error writing [.. os_error_code='28' ..."),
            f"{FULL}; make room there",
        ),
        ("save", OSError(28, FULL), f"{FULL}; make room there"),
        ("exported", FileNotFoundError(2, "No such file"), "No such file or directory; mend that"),
        ("close", ValueError("Something\n  else"), "Something else; mend that"),
    ],
)
def test_failed_save_is_one_line(tmp_path, monkeypatch, when, raised, reason) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    start(config_for(tmp_path / "a"))
    folder = RunFolder(config_for(tmp_path / "a"))
    for name in ("save", "wait_until_finished", "close"):
        monkeypatch.setattr(folder._manager, name, fail)
    act = {
        "save": lambda: folder.save(1, state_at(1), score=None, loss_level=None),
        "exported": lambda: folder.exported("best", state_at(1)),
        "close": folder.close,
    }
    with pytest.raises(UserError, match=rf"cannot save to .*checkpoints: {reason}, and the same"):
        act[when]()


def saved_run(folder: Path, scores: list[float | None]) -> Path:
    """A run with a checkpoint and a line of metrics for every score."""
    start(config_for(folder))
    run = RunFolder(config_for(folder))
    for step, score in enumerate(scores, start=1):
        run.log({"step": step, "validation_loss": score})
        run.save(step, state_at(step), score=score, loss_level=step / 2)
    run.close()
    return folder


# --------------------------------------------------------------------------------------------------
# Damage


def resume(folder: Path) -> tuple[int, list[int]]:
    """The step from which a run continues, and the logged steps."""
    run = RunFolder(config_for(folder))
    step = int(run.restore(state_at(0)).step)
    run.close()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return step, [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("item", ["default", "metrics"])
def test_unreadable_checkpoint_is_one_line(tmp_path: Path, item: str) -> None:
    folder = saved_run(tmp_path / "a", [1.0, 2.0])
    for path in (folder / "checkpoints" / "2" / item).rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with pytest.raises(UserError, match=r"cannot be read \(.*\); move a damaged checkpoint away"):
        resume(folder)
    shutil.rmtree(folder / "checkpoints" / "2")
    assert resume(folder) == (1, [1])


def test_checkpoint_whose_removal_is_cut_short_does_not_count(tmp_path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        folder = saved_run(tmp_path / "a", [None] * 4)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"3", "4", ".removed"}
    assert resume(folder) == (4, [1, 2, 3, 4])
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"3", "4"}


def test_damaged_lines_of_metrics(tmp_path: Path) -> None:
    folder = saved_run(tmp_path / "a", [1.0, 2.0, 3.0])
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for cut in (b'{"step": 3, "va', lines[2].strip()):
        path.write_bytes(b"".join([*lines[:2], cut]))
        assert resume(folder) == (3, [1, 2])
    for damaged in (b'{"step": 3, "va\n', b"\xff\n", b"[3]\n", b"{}\n", b"\n"):
        path.write_bytes(b"".join([lines[0], damaged, lines[2]]))
        with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is damaged"):
            resume(folder)
    path.unlink()
    run = RunFolder(config_for(folder))
    run.restore(state_at(0))
    assert run.logged_validation(3) == {}
    run.close()


# --------------------------------------------------------------------------------------------------
# The log: when a step's metrics are looked at, and what is written of them


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


def test_running_mean_goes_on_from_the_checkpoint(folder: RunFolder) -> None:
    folder.save(2, state_at(2), score=None, loss_level=2.0)
    folder.close()
    folder = RunFolder(config_for(folder.path))
    with log_of(folder, 2, explosion_factor=3.0) as log:
        assert log.loss_level == 2.0
        log.record(3, {"loss": np.float32(7)})
        with pytest.raises(Diverged, match="loss 7, its running mean 2"):
            log.flush()


def test_loggers_get_the_same_numbers_after_the_checkpoint(folder, monkeypatch) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    with log_of(folder, 2, loggers=["tensorboard"]) as log:
        log.record(4, {"loss": np.float32(2)})
        log.flush()
        log.validated(4, {"validation_loss": [1.0, 2.0], "simulated_acceptance_length": 1.5})
    opened, *numbers, closed = calls
    assert opened == ((str(folder.path / "tensorboard"),), {"purge_step": 3})
    values = {name: value for name, value, _ in numbers}
    assert {step for _, _, step in numbers} == {4} and values["loss"] == 2.0
    assert "tokens_per_second" in values and closed == "closed"
    validation = {"validation_loss/depth_0": 1.0, "validation_loss/depth_1": 2.0}
    assert values.items() >= (validation | {"simulated_acceptance_length": 1.5}).items()


def level_after(losses: list[float], factor: float | None) -> float | None:
    level = None
    for step, loss in enumerate(losses, start=1):
        level = next_level(level, step, {"loss": loss}, factor)
    return level


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
    assert level_after(losses, factor) == pytest.approx(level)


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
        level_after(losses, factor)
    assert caught.value.step == len(losses)


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_said_in_one_line(tmp_path, name, package, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(UserError, match=rf"needs the package {package}, .*poss-jax\[{name}\]"):
        check_loggers(config_for(tmp_path, loggers=[name]))


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **kwargs: (opened.append(kwargs), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = config_for(tmp_path, loggers=["wandb"])
    for command in ("a", "a", "b"):
        (tmp_path / "provenance.json").write_text(json.dumps({"command": command}))
        LOGGERS["wandb"](config, tmp_path, first_step=10).log(11, {"loss": 2.0})
    first, again, anew = (call["id"] for call in opened)
    assert first == again != anew
    assert opened[0]["name"] == tmp_path.name and opened[0]["resume"] == "allow"
    assert opened[0]["config"]["loggers"] == ["wandb"]
    assert logged == [{"step": 11, "loss": 2.0}] * 3
