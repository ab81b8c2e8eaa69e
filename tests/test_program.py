"""What every program does around its own work: one-line errors, exit codes, compilation cache."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from poss_jax.config import UserError
from poss_jax.program import run_program


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("want a, got b;\ndo c"), 2, "error: want a, got b; do c\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_bad_input_and_interruption_are_one_line_and_a_code(
    error: BaseException,
    code: int,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as it is")
    monkeypatch.setattr("atexit.register", lambda *args: None)  # which would end the tests,
    monkeypatch.setattr("poss_jax.program.running._leave", sys.exit)  # as this would
    with pytest.raises(SystemExit) as caught:
        run_program(fail)
    assert caught.value.code == code
    assert capsys.readouterr() == ("", line)


INTERRUPTED = """
import atexit, os, threading, time
from poss_jax.program import run_program

def main():
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ended"))).start()
    print("begun")
    raise KeyboardInterrupt

atexit.register(os.abort)  # as jaxlib does after an interrupted compilation
run_program(main)
"""


def test_nothing_is_closed_after_an_interruption() -> None:
    result = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")
    assert result.stdout == "begun\nthe thread ended\n"


LOST = """
import gc, signal, time
from poss_jax.program import run_program

signal.signal(signal.SIGINT, signal.default_int_handler)  # the shell may have had it ignored

def hook(phase, info):
    if phase == "stop" and gc.callbacks.pop():
        raise KeyboardInterrupt

def main():
    gc.callbacks.append(hook)
    gc.collect()
    print("lost")
    time.sleep(30)

run_program(main)
"""


def test_an_interruption_of_the_garbage_collector_is_not_lost() -> None:
    result = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")
    assert result.stdout == "lost\n"


@pytest.fixture
def restored_settings() -> Iterator[None]:
    """Puts the settings of the compilation cache back."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("restored_settings")
def test_compiled_programs_are_kept_unless_told_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", "as told")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "as told")
    run_program(lambda: None)
    assert jax.config.jax_compilation_cache_dir == "as told"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    run_program(lambda: None)
    kept = tmp_path / ".cache" / "poss_jax" / "xla"
    assert jax.config.jax_compilation_cache_dir == str(kept)
