"""One writer at a time: of run folders, of answers, of caches."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from programs import refusal
from self_killing import ROOT
from test_run_folder import config_for, saved_run

from poss_jax.checkpoint.whole import hold_lock, sole_writer
from poss_jax.config.reading import UserError
from train.claims import hold_together
from train.regenerate import main as regenerate_main
from train.training import train

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


@pytest.mark.parametrize("overwrite", [False, True])
def test_run_is_not_started_twice(tmp_path, overwrite):
    folder = saved_run(tmp_path / "a", [1.0])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    config = config_for(folder)
    with hold_together(config), pytest.raises(UserError, match=r"a is in use by process"):
        train(config, overwrite=overwrite)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
