"""A run whose folder is damaged goes on from the last intact checkpoint."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_run_folder import config_for, saved_run, start, state_at

from poss_jax.config.reading import UserError
from train.run_folder import RunFolder

DAMAGES = {
    "removed": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: flip(path, 4 * path.stat().st_size),
}


NOT_NEEDED = {"_CHECKPOINT_METADATA", "commit_success.txt"}


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def resume(folder: Path) -> tuple[int, list[int]]:
    """The step from which a run continues, which must be intact, and the logged steps."""
    run = RunFolder(config_for(folder))
    state = run.restore(state_at(0))
    run.close()
    assert state.params["weight"].tolist() == state_at(int(state.step)).params["weight"].tolist()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return int(state.step), [json.loads(line)["step"] for line in lines]


def damage_every_file(tmp_path: Path, damages: list[str], capfd: pytest.CaptureFixture) -> int:
    """Damages each file of the newest checkpoint in turn, and continues."""
    source = saved_run(tmp_path / "source", [1.0, 2.0])
    newest = source / "checkpoints" / "2"
    names = [str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file()]
    for name, damage in itertools.product(names, damages):
        shutil.copytree(source, tmp_path / "a")
        DAMAGES[damage](tmp_path / "a" / "checkpoints" / "2" / name)
        harmless = name in NOT_NEEDED or (name, damage) == ("SHA256SUMS", "removed")
        assert resume(tmp_path / "a") == ((2, [1, 2]) if harmless else (1, [1])), (name, damage)
        said = capfd.readouterr().err
        assert ("checkpoint 2 is damaged (" in said) == (not harmless)
        assert said.count("\n") == (not harmless)
        assert (tmp_path / "a" / "damaged" / "2").is_dir() == (not harmless)
        shutil.rmtree(tmp_path / "a")
    return len(names)


def test_damaged_checkpoint_is_left_for_the_one_before(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert damage_every_file(tmp_path, ["removed", "flipped"], capfd) > 10


def test_a_checkpoint_whose_removal_is_cut_short_does_not_count(
    tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(folder: Path, **_: Any) -> None:
        for path in Path(folder).rglob("SHA256SUMS"):
            path.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", cut_short)
        folder = saved_run(tmp_path / "a", [None] * 4)
    left = {path.name for path in (folder / "checkpoints").iterdir()}
    assert left == {"3", "4", ".removed"}
    assert resume(folder) == (4, [1, 2, 3, 4])
    assert capfd.readouterr().err == "" and not (folder / "damaged").exists()
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"3", "4"}


@pytest.mark.slow
def test_every_damage_of_every_file(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert damage_every_file(tmp_path, list(DAMAGES), capfd) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NOT_NEEDED))
def test_every_bit_of_what_has_no_checksum(tmp_path: Path, name: str) -> None:
    path = saved_run(tmp_path / "a", [1.0, 2.0]) / "checkpoints" / "2" / name
    for bit in range(8 * path.stat().st_size):
        flip(path, bit)
        assert resume(tmp_path / "a") == (2, [1, 2])
        flip(path, bit)


def test_run_goes_on_from_before_the_damage(tmp_path: Path) -> None:
    folder = saved_run(tmp_path / "a", [1.0, 2.0, 3.0])
    flip(folder / "checkpoints" / "3" / "metrics" / "metrics", 10)
    assert resume(folder) == (2, [1, 2])
    run = RunFolder(config_for(folder))
    run.log({"step": 3, "validation_loss": 5.0})
    run.save(3, state_at(3), score=5.0, loss_level=None)
    run.close()
    assert resume(folder) == (3, [1, 2, 3])
    run = RunFolder(config_for(folder))
    assert run.exported_step("best") == 3
    assert run.logged_validation(3) == {"validation_loss": 5.0}
    run.close()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["2", "3"]


def test_of_best_checkpoints_that_are_damaged_the_next_is_exported(tmp_path: Path) -> None:
    folder = saved_run(tmp_path / "a", [3.0, 1.0, 2.0])
    run = RunFolder(config_for(folder))
    flip(folder / "checkpoints" / "1" / "default" / "_METADATA", 0)
    assert int(run.exported("best", state_at(3)).step) == 3
    assert run.exported_step("best") == 3
    run.close()
    assert (folder / "damaged" / "1").is_dir()


def test_no_intact_checkpoint_is_one_line_and_touches_nothing(tmp_path: Path) -> None:
    folder = saved_run(tmp_path / "a", [1.0, 2.0])
    for step in (1, 2):
        (folder / "checkpoints" / str(step) / "default" / "manifest.ocdbt").unlink()
    wanted = r"checkpoint 1 of .* is damaged \(default/manifest.ocdbt is missing\), and no other is"
    with pytest.raises(UserError, match=wanted):
        RunFolder(config_for(folder))
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["1", "2"]


def without_sums(folder: Path) -> Path:
    """As runs were saved before there were checksums."""
    for path in folder.glob("checkpoints/*/SHA256SUMS"):
        path.unlink()
    return folder


@pytest.mark.parametrize("item", ["default", "metrics"])
@pytest.mark.parametrize("damage", ["removed", "empty"])
def test_checkpoints_without_checksums(
    tmp_path: Path, capfd: pytest.CaptureFixture, item: str, damage: str
) -> None:
    folder = without_sums(saved_run(tmp_path / "a", [1.0, 2.0]))
    assert resume(folder) == (2, [1, 2])
    assert capfd.readouterr().err == ""
    for path in [p for p in (folder / "checkpoints" / "2" / item).rglob("*") if p.is_file()]:
        DAMAGES[damage](path)
    try:
        assert resume(folder) == (2, [1, 2])  # such as without a score
    except UserError as error:
        assert re.search(r"of .* cannot be read \(.*\); move a damaged checkpoint away", str(error))
    shutil.rmtree(folder / "checkpoints" / "2")
    assert resume(folder)[0] == 1


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


@pytest.mark.parametrize("damage", DAMAGES)
def test_provenance_is_not_needed(tmp_path: Path, damage: str) -> None:
    folder = saved_run(tmp_path / "a", [1.0])
    DAMAGES[damage](folder / "provenance.json")
    start(config_for(folder))
    assert resume(folder) == (1, [1])
