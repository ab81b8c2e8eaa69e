"""Progress bars: shown on a terminal, even of unknown size, and never in a pipe."""

import os
import pty
import subprocess
import sys

PROGRAM = """
from poss_jax.data.progress import progress_bar
list(progress_bar(range(3), desc="work"))
"""


def test_pipe_gets_no_bar() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    assert run.stdout == run.stderr == b""


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
