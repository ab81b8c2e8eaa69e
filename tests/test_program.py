"""The frame of every program: one-line errors, exit codes, compilation cache."""

import errno
import fnmatch
import json
import os
import pty
import pwd
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import poss_jax
from poss_jax.config.reading import UserError
from poss_jax.data.progress import progress_bar
from poss_jax.program.output import announce, print_summary
from poss_jax.program.running import run_program

MEMORY = "lower the batch size, the lengths or the tree, in training data.sequence_length, batch_"
EXHAUSTED = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory: 9 bytes.\nx")
FULL = OSError(errno.ENOSPC, "No space left on device", "x")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("want a, got b;\ndo c"), 2, "error: want a, got b; do c\n"),
        (UserError("a \x1b[2Jb"), 2, r"error: a \x1b[[]2Jb" + "\n"),
        (UserError("a" * 9000), 2, f"error: {'a' * 500} ... {'a' * 500}\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, ""),
        (MemoryError("Unable"), 2, f"error: out of memory: MemoryError: Unable; {MEMORY}*"),
        (EXHAUSTED, 2, f"error: out of memory: JaxRuntimeError: RESOURCE_*bytes.; {MEMORY}*"),
        (FileNotFoundError(errno.ENOENT, "No such", "x"), 2, "error: *; check the path, and that*"),
        (FULL, 2, "error: [[]Errno 28] No space left on device: 'x'; make room there\n"),
        (TypeError("a\nb"), 70, "error: unexpected: TypeError: a; the traceback is in *.txt; *"),
        (AssertionError(), 70, "error: unexpected: AssertionError; the traceback is in *.txt; *"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_bad_input_and_interruption_are_one_line_and_a_code(
    error, code, line, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert exit_code(lambda: fail_with(error), monkeypatch) == code
    out, err = capsys.readouterr()
    assert out == "" and fnmatch.fnmatchcase(err, line) and err.count("\n") == bool(line)
    assert len(list(tmp_path.iterdir())) == (code == 70)


def fail_with(error: BaseException) -> None:
    def fail() -> None:
        raise error

    run_program(fail)


def exit_code(program: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as it is")
    monkeypatch.setattr("atexit.register", lambda *args: None)  # which would end the tests,
    monkeypatch.setattr("poss_jax.program.running._leave", sys.exit)  # as this would
    with pytest.raises(SystemExit) as caught:
        program()
    return caught.value.code  # type: ignore[return-value]


def test_a_traceback_is_kept_with_what_a_report_needs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["infer.generate", "--prompt", "caf\udce9"])
    exit_code(lambda: fail_with(ZeroDivisionError("by zero")), monkeypatch)
    (path,) = tmp_path.iterdir()
    assert f"; the traceback is in {path}; " in capsys.readouterr().err
    text = path.read_text()
    assert text.startswith("arguments: ['infer.generate', '--prompt', ")
    assert f"jax {jax.__version__}" in text and f"poss_jax {poss_jax.__version__}, Python" in text
    assert text.endswith("ZeroDivisionError: by zero\n") and "in exit_code" not in text


NOWHERE = (
    "error: model folder nowhere does not exist; write it first: poss convert target --source "
    "CHECKPOINT --output nowhere\n"
)
NO_FILE = "error: config nowhere.yaml: No such file or directory; give the path of a YAML file\n"


@pytest.mark.quick
@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # by other tests
@pytest.mark.parametrize(
    ("program", "arguments", "error"),
    [
        ("infer.generate", ["--target", "nowhere", "--prompt", "x"], NOWHERE),
        ("infer.serve", ["--target", "nowhere", "--port", "0"], NOWHERE),
        ("train.main", ["--config", "nowhere.yaml"], NO_FILE),
    ],
)
def test_bad_input_of_a_program(program, arguments, error, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    monkeypatch.setattr("signal.signal", lambda *args: None)
    monkeypatch.setattr("logging.Logger.setLevel", lambda *args: None)  # would outlast the test
    assert exit_code(lambda: runpy.run_module(program, run_name="__main__"), monkeypatch) == 2
    assert capsys.readouterr() == ("", error)


RESULT = {
    "model_step": 24_000,
    "loss": 4.654545454545454,
    "share": 0.04654545,
    "by_depth": [0.5, 2],
    "not_answered": {"too_long": 3, "refused": 1},
    "is_done": True,
    "data": {"nested": {}},
    "none": None,
}


def show_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)


def test_results_are_json_for_programs_and_few_digits_for_people(monkeypatch, capsys):
    print_summary(RESULT, "some text")
    assert json.loads(capsys.readouterr().out) == RESULT
    show_on_a_terminal(monkeypatch)
    for text in ("some text", "", None):
        print_summary(RESULT, text)
    assert capsys.readouterr().out.splitlines() == [
        "some text",
        "model step    24,000",
        "loss          4.65",
        "share         0.0465",
        "by depth      0.5 2",
        "not answered  too long 3, refused 1",
        "is done       yes",
    ]
    monkeypatch.setattr(sys, "argv", ["poss-train", "--json"])
    print_summary(RESULT, "some text")
    assert json.loads(capsys.readouterr().out) == RESULT


def test_long_work_is_announced_on_a_terminal(monkeypatch, capsys):
    seen: list[str] = []

    def work() -> Iterator[int]:
        for number in range(3):
            seen.append(capsys.readouterr().err)
            yield number

    assert list(announce(work(), "working")) == [0, 1, 2] and not any(seen)
    seen.clear()
    show_on_a_terminal(monkeypatch)
    assert list(announce(work(), "working")) == [0, 1, 2]
    assert seen == ["working\r", "       \r", ""]


PIPED = """
from poss_jax.program.running import run_program

run_program(lambda: print("printed"))
"""


def test_closed_outputs_end_a_program_quietly():
    reader, writer = os.pipe()
    os.close(reader)
    command, buffered = [sys.executable, "-c", PIPED], os.environ | {"PYTHONUNBUFFERED": ""}
    pipe = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=buffered)
    os.close(writer)
    assert (pipe.returncode, pipe.stderr) == (141, b"")
    closed = ["bash", "-c", 'exec "$@" >&-', "bash", *command]
    result = subprocess.run(closed, capture_output=True, env=buffered)
    assert (result.returncode, result.stderr) == (0, b"")


INTERRUPTED = """
import atexit, os, threading, time
from poss_jax.program.running import run_program

def main():
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ended"))).start()
    print("begun")
    raise KeyboardInterrupt

atexit.register(os.abort)  # as jaxlib does after an interrupted compilation
run_program(main)
"""


def test_nothing_is_closed_after_an_interruption():
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")
    assert result.stdout == "begun\nthe thread ended\n"


def test_compiled_programs_are_kept_in_the_home_folder_if_there_is_one(
    tmp_path, monkeypatch, caplog
):
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    try:
        monkeypatch.delenv("HOME")
        run_program(lambda: None)
        (record,) = caplog.records
        assert "set HOME or POSS_JAX_CACHE" in record.getMessage()
        assert jax.config.jax_compilation_cache_dir == before[names[0]]
        monkeypatch.setenv("HOME", str(tmp_path))
        run_program(lambda: None)
        kept = str(tmp_path / ".cache" / "poss_jax" / "xla")
        assert jax.config.jax_compilation_cache_dir == kept
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as told")
        jax.config.update("jax_compilation_cache_dir", "as told")
        run_program(lambda: None)
        assert jax.config.jax_compilation_cache_dir == "as told"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_pipe_gets_no_bar(capfd):
    assert list(progress_bar(range(3), desc="work")) == [0, 1, 2]
    assert capfd.readouterr() == ("", "")


PROGRAM = """
from poss_jax.data.progress import progress_bar
list(progress_bar(range(3), desc="work"))
"""


def test_terminal_of_unknown_size_shows_the_bar() -> None:
    ours, theirs = pty.openpty()  # of 0 lines
    environment = {key: os.environ[key] for key in os.environ if key not in ("LINES", "COLUMNS")}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=theirs, stderr=theirs, env=environment
    ) as run:
        os.close(theirs)
        shown = b""
        try:
            while part := os.read(ours, 4096):
                shown += part
        except OSError:  # Linux's end of a terminal
            pass
    os.close(ours)
    assert run.returncode == 0
    assert b"work: 100%" in shown and b"hidden" not in shown
