"""Outputs: written whole or not at all, also by killed programs, and by one process at a time."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from errno import ENOSPC
from pathlib import Path

import pytest
from convert_sources import run, target_tensors, write_source
from programs import refusal
from self_killing import ROOT, run_until
from test_run_folder import config_for, saved_run

from poss_jax.checkpoint.whole import (
    hold_lock,
    refuse_irreplaceable,
    sole_writer,
    whole_folder,
    write_file,
)
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.reading import UserError
from train.regenerate import main as regenerate_main
from train.run_folder import hold_together
from train.training import train


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
    """A target whose embedding and head are 50 kB each."""
    extra = {"model.embed_tokens.weight": (1600, 8), "lm_head.weight": (1600, 8)}
    folder = tmp_path_factory.mktemp("interrupted") / "source"
    return write_source(folder, target_tensors(**extra), vocab_size=1600)


def arguments(source: Path, output: Path) -> list[str]:
    return ["poss_jax.convert", "target", "--source", str(source), "--output", str(output)]


# --------------------------------------------------------------------------------------------------
# Killed


@pytest.mark.parametrize(
    ("event", "path"),
    [
        # An item is written, but does not count yet.
        pytest.param("os.rename", "weights/head[.]", marks=pytest.mark.slow),
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
        pytest.raises(UserError, match=r"cannot write folder .*made: .*not empty"),
        whole_folder(tmp_path / "made"),
    ):
        (tmp_path / "made").mkdir()
        (tmp_path / "made" / "model.json").write_text("of the other")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "model.json"]


def test_output_that_is_a_mount_point_is_refused(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == tmp_path / "disk")
    with pytest.raises(UserError, match=r"disk is a mount point, which .*; name a folder below it"):
        refuse_irreplaceable(tmp_path / "disk")
    refuse_irreplaceable(tmp_path / "disk" / "model")


# --------------------------------------------------------------------------------------------------
# Out of space


def test_file_that_cannot_grow(tmp_path, source):
    """The limit stops an item's data."""
    output = tmp_path / "made"
    command = " ".join([sys.executable, "-B", "-m", *arguments(source, output)])
    limited = ["sh", "-c", f"ulimit -f 20 && exec {command}"]
    result = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1 and "File too large" in result.stderr
    assert result.stderr.startswith(f"error: cannot write folder {output}: ")
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------------
# One writer at a time


HOLDER = """
import sys
from poss_jax.checkpoint.whole import sole_writer
with sole_writer(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(output: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(output)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_second_process_is_told_who_has_it_until_that_is_killed(tmp_path):
    with other_process(tmp_path / "a") as process:
        message = rf"output .*a is in use by process {process.pid} on host {socket.gethostname()} "
        message += r"\(since 20\d\d-.*\); wait for it, or name another output"
        for _ in range(2):  # the first does not spoil what it reads
            with pytest.raises(UserError, match=message), sole_writer(tmp_path / "a"):
                pass
        with sole_writer(tmp_path / "b"):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert [path.name for path in tmp_path.iterdir()] == [".a.lock"]
    with sole_writer(tmp_path / "a"):
        process, host = (tmp_path / ".a.lock").read_text().split()
        assert (int(process), host) == (os.getpid(), socket.gethostname())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("spelling", ["a", "b/../a", "link", "linked/a"])
def test_every_spelling_is_one_output(tmp_path, spelling):
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "linked").symlink_to(tmp_path)
    refused = pytest.raises(UserError, match="in use by process")
    with sole_writer(tmp_path / "a"), refused, sole_writer(tmp_path / spelling):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "link", "linked"]


def test_folder_in_a_place_that_is_read_only(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with sole_writer(tmp_path / "a"):
        assert [path.name for path in (tmp_path / "a").iterdir()] == [".lock"]
        with pytest.raises(UserError, match="in use by"), sole_writer(tmp_path / "a"):
            pass
    assert list((tmp_path / "a").iterdir()) == []


def test_folders_made_for_a_lock_go_with_it(tmp_path):
    with sole_writer(tmp_path / "new" / "er" / "a"):
        pass
    with sole_writer(tmp_path / "b" / "c"):
        (tmp_path / "b" / "c").write_text("")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "c"]


def test_who_waits_gets_the_lock_after_the_other(tmp_path):
    said, order = [], []
    is_waiting = threading.Event()

    def wait() -> None:
        def note(holder: str) -> None:
            said.append(holder)
            is_waiting.set()

        with hold_lock(tmp_path / ".lock", note):
            order.append("second")

    with hold_lock(tmp_path / ".lock", said.append):
        thread = threading.Thread(target=wait)
        thread.start()
        assert is_waiting.wait(30)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert said[0].startswith(f"process {os.getpid()} on host {socket.gethostname()} (since ")
    assert list(tmp_path.iterdir()) == []


def test_answers_are_not_written_twice(tmp_path):
    arguments = ["--target", "none", "--source", "none", "--output", str(tmp_path / "out.jsonl")]
    with sole_writer(tmp_path / "out.jsonl"):
        message = refusal(regenerate_main, *arguments, "--overwrite")
    assert re.search(r"output .*out\.jsonl is in use by process \d+ on host", message)


def test_run_is_not_started_twice(tmp_path):
    folder = saved_run(tmp_path / "a", [1.0])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    config = config_for(folder)
    with hold_together(config), pytest.raises(UserError, match=r"a is in use by process"):
        train(config, overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
