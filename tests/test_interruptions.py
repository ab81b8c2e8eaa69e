"""Conversions that are killed, or run out of space: nothing that looks complete is left."""

import json
import re
import subprocess
import sys
from errno import ENOSPC
from pathlib import Path

import pytest
from convert_sources import run, target_tensors, write_source
from self_killing import ROOT, run_until

from poss_jax.checkpoint.whole import refuse_irreplaceable, whole_folder, write_file
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.reading import UserError


def test_a_file_is_written_whole_or_left_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "config.yaml"
    write_file(path, "old")

    def break_off(partial, *_):
        assert path.read_text() == "old" and partial.read_text() == "new"
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", break_off)
    with pytest.raises(OSError, match="the disk is gone"):
        write_file(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]
    monkeypatch.undo()

    def fill(partial, *_, **__):
        raise OSError(ENOSPC, "No space left on device")  # as `write` does, without a name

    monkeypatch.setattr(Path, "write_text", fill)
    with pytest.raises(OSError, match=re.escape(f"No space left on device: '{path}'")):
        write_file(path, "new")
    monkeypatch.undo()
    write_file(path, "new")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["new"]


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A target whose conversion takes a while: its head alone is 50 kB."""
    extra = {"model.embed_tokens.weight": (1600, 8), "lm_head.weight": (1600, 8)}
    tensors = target_tensors(**extra)
    for index in range(2, 12):
        layer = {k: v for k, v in tensors.items() if k.startswith("model.layers.0.")}
        tensors |= {key.replace(".0.", f".{index}.", 1): v.copy() for key, v in layer.items()}
    folder = tmp_path_factory.mktemp("interrupted") / "source"
    write_source(folder, tensors, vocab_size=1600, num_hidden_layers=12)
    (folder / "tokenizer.json").write_text(json.dumps({"padding": "x" * 200_000}))
    return folder


def arguments(source: Path, output: Path) -> list[str]:
    return ["poss_jax.convert", "target", "--source", str(source), "--output", str(output)]


def command(source: Path, output: Path) -> str:
    return " ".join([sys.executable, "-m", *arguments(source, output)])


# --------------------------------------------------------------------------------------------------
# Killed

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("event", "path"),
    [
        pytest.param("os.mkdir", "partial-[^/]*/model$", marks=SLOW),  # before anything is written
        # An item is written, but does not count yet.
        pytest.param("os.rename", "weights/layers/0[.]", marks=SLOW),
        pytest.param("os.rename", "weights/head[.]", marks=SLOW),
        ("os.rename", "partial-[^/]*/model$"),  # all is written
    ],
)
def test_killed_conversion_leaves_nothing_complete(tmp_path, source, event, path):
    output = tmp_path / "made"
    run_until(event, path, *arguments(source, output))
    assert not output.exists()
    assert len(list(tmp_path.iterdir())) == 1  # the hidden rest, which the next run removes
    run("target", source=source, output=output)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    verify_model(output)


def test_what_others_write_beside_an_output_is_left_alone(tmp_path):
    for name in ("madeup", "[m]ade"):
        (tmp_path / f".{name}.partial-1").mkdir()
    with whole_folder(tmp_path / "made") as first, whole_folder(tmp_path / "made") as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert (tmp_path / "made").is_dir() and len(list(tmp_path.iterdir())) == 3
    with whole_folder(tmp_path / "[m]ade"):
        pass
    assert not (tmp_path / ".[m]ade.partial-1").exists()


def test_output_that_another_process_wrote_meanwhile_is_kept(tmp_path):
    with (
        pytest.raises(UserError, match=r"made: another process has written it meanwhile"),
        whole_folder(tmp_path / "made"),
    ):
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "model.json").write_text("of the other")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "model.json"]


def test_output_that_is_a_mount_point_or_below_a_file_is_refused(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(UserError, match=r"disk is a mount point, which .*; name a folder below it"):
        refuse_irreplaceable(tmp_path / "disk")
    refuse_irreplaceable(tmp_path / "disk" / "model")
    (tmp_path / "file").write_text("")
    for below in ("made", "new/made"):
        with pytest.raises(UserError, match=r"made: \S*/file is a file; name another folder$"):
            refuse_irreplaceable(tmp_path / "file" / below)


# --------------------------------------------------------------------------------------------------
# Out of space


def assert_no_room(command: list[str], output: Path, reason: str) -> str:
    """Runs a conversion that ends with one line; returns what it printed."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and reason in result.stderr
    assert result.stderr.startswith(f"error: cannot write folder {output}: ")
    return result.stdout


@pytest.mark.parametrize("blocks", [20, *(pytest.param(size, marks=SLOW) for size in (1, 150))])
def test_file_that_cannot_grow(tmp_path, source, blocks):
    """The limit stops an item's small files, its data, or the copy of the tokenizer."""
    limited = f"ulimit -f {blocks} && exec {command(source, tmp_path / 'made')}"
    assert_no_room(["sh", "-c", limited], tmp_path / "made", "File too large")
    assert list(tmp_path.iterdir()) == []
