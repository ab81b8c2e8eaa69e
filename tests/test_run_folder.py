"""Starting, continuing and refusing a run's folder, and what a run saves in it."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from poss_jax.config.reading import UserError, build_config
from poss_jax.config.training import TrainConfig
from poss_jax.learn.state import TrainState
from train.claims import claim_folder
from train.run_folder import RunFolder

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


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a"))
    (tmp_path / "a").rename(tmp_path / "b")
    with claim_folder(config_for(tmp_path / "b")) as place:
        assert place == tmp_path / "b" and (place / "tokenizer").exists()


def test_a_start_that_fails_leaves_the_config_as_it_was(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a"))
    before = files(tmp_path)
    changed = config_for(tmp_path / "a", log_every=7)
    with pytest.raises(UserError, match="no memory"), claim_folder(changed):
        raise UserError("no memory")
    assert files(tmp_path) == before
    start(changed)
    assert "log_every: 7" in files(tmp_path)["a/config.yaml"]


def test_failed_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no text"), claim_folder(config_for(tmp_path / "a")) as it:
        (it / "tokenizer").write_text("prepared")
        raise UserError("no text")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_preparation_left_is_removed(tmp_path: Path) -> None:
    for name in (".a.partial-1", ".ab.partial-1"):
        (tmp_path / name / "a").mkdir(parents=True)
    start(config_for(tmp_path / "a"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".ab.partial-1", "a"]


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    start(config_for(tmp_path / "a"))
    assert (tmp_path / "a" / "config.yaml").is_file()


def test_same_config_continues_in_place(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a"))
    before = files(tmp_path)
    with claim_folder(config_for(tmp_path / "a")) as place:
        assert place == tmp_path / "a"
    assert files(tmp_path) == before


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


def test_overwrite_starts_anew(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a", seed=1))
    (tmp_path / "a" / "metrics.jsonl").write_text("of the earlier run")
    start(config_for(tmp_path / "a"), overwrite=True)
    assert sorted(files(tmp_path)) == ["a/config.yaml", "a/provenance.json", "a/tokenizer"]
    start(config_for(tmp_path / "a"))  # its config is the new one


def test_failed_overwrite_keeps_the_earlier_run(tmp_path: Path) -> None:
    start(config_for(tmp_path / "a", seed=1))
    before = files(tmp_path)
    with pytest.raises(UserError), claim_folder(config_for(tmp_path / "a"), overwrite=True):
        raise UserError("no text")
    assert files(tmp_path) == before


@pytest.mark.parametrize("content", [None, "", "stage: [", "\x00"], ids=repr)
def test_run_without_its_config_is_refused(tmp_path: Path, content: str | None) -> None:
    start(config_for(tmp_path / "a"))
    RunFolder(config_for(tmp_path / "a")).close()
    (tmp_path / "a" / "config.yaml").unlink()
    if content is not None:
        (tmp_path / "a" / "config.yaml").write_text(content)
    with pytest.raises(UserError, match=r"its config\.yaml is missing or damaged; put that back"):
        start(config_for(tmp_path / "a"))


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "content", [None, "learning_rate: 1", "- a list", "stage: [", "\x00"], ids=repr
)
def test_folder_of_something_else_is_refused(tmp_path, content, overwrite) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.txt").write_text("years of work")
    if content is not None:
        (tmp_path / "thesis" / "config.yaml").write_text(content)
    before = files(tmp_path)
    with pytest.raises(UserError, match="thesis is not empty and not a training run; name another"):
        start(config_for(tmp_path / "thesis"), overwrite=overwrite)
    assert files(tmp_path) == before


@pytest.mark.parametrize("output", ["file", "file/a"])
def test_file_in_the_way_is_refused(tmp_path: Path, output: str) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(UserError, match=r"output .*; name another folder"):
        start(config_for(tmp_path / output))
    assert files(tmp_path) == {"file": "text"}


@pytest.mark.parametrize("key", ["target", "init_target", "init_draft"])
def test_run_does_not_overwrite_the_model_it_starts_from(tmp_path: Path, key: str) -> None:
    start(config_for(tmp_path / "a"))
    before = files(tmp_path)
    models = {key: str(tmp_path / "a" / "model")}
    if key != "init_target":
        models = {"stage": "draft", "model": None, "target": str(tmp_path / "t" / "model")} | models
    config = config_for(tmp_path / "a", **models)
    with pytest.raises(UserError, match=r"output .*/a holds .*/a/model, which is needed"):
        start(config, overwrite=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("scores", "kept", "best"),
    [
        ([1.0, 3.0, 2.0, 1.5, 1.0], [2, 4, 5], 2),
        ([1.0, 2.0, 3.0, 2.0, 2.0], [3, 4, 5], 3),
        ([1.0, 2.0, 3.0, 4.0, 5.0], [4, 5], 5),
        ([1.0, 2.0, 1.0, 2.0, None], [4, 5], 4),  # of equals the newest
        ([None, 2.0, None, None, None], [2, 4, 5], 2),
        ([None] * 5, [4, 5], 5),
    ],
)
@pytest.mark.parametrize("resumed_after", [0, 2, 4])
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
    ("raised", "reason"),
    [
        (ValueError("Error writing [.. os_error_code='28' ..."), f"{FULL}; make room there"),
        (OSError(28, FULL), f"{FULL}; make room there"),
        (FileNotFoundError(2, "No such file"), "No such file or directory; mend that"),
        (ValueError("Something\n  else"), "Something else; mend that"),
    ],
)
@pytest.mark.parametrize("when", ["save", "exported", "close"])
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


def test_damaged_lines_of_metrics(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    folder = saved_run(tmp_path / "a", [1.0, 2.0, 3.0])
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (b'{"step": 3, "va', b"\xff\n", b"[3]\n", b"{}\n", b"\n", lines[2].strip()):
        path.write_bytes(b"".join([*lines[:2], damaged]))
        assert resume(folder) == (3, [1, 2])
        assert capfd.readouterr().err == f"{path}: the last line is damaged, and cut off\n"
        path.write_bytes(b"".join([lines[0], damaged.strip() + b"\n", lines[2]]))
        if damaged != lines[2].strip():
            with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is damaged"):
                resume(folder)
    path.unlink()
    run = RunFolder(config_for(folder))
    run.restore(state_at(0))
    assert run.logged_validation(3) == {}
    run.close()


@pytest.mark.parametrize("content", [None, b"", b"{"])
def test_provenance_is_not_needed(tmp_path: Path, content: bytes | None) -> None:
    path = saved_run(tmp_path / "a", [1.0]) / "provenance.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    start(config_for(tmp_path / "a"))
    assert resume(tmp_path / "a") == (1, [1])
