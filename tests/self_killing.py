"""Runs a program that sends itself a signal at a named moment: when it touches a certain file.

    python tests/self_killing.py EVENT PATTERN SIGNAL MILLISECONDS MODULE [argument ...]

EVENT is one of Python's audit events with a path, such as `os.rename`, PATTERN is searched in that
path. The signal comes just before the event takes place, so the moment is always the same; or so
much later.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_until(
    event: str,
    pattern: str,
    module: str,
    *arguments: str,
    sent: signal.Signals = signal.SIGKILL,
    later: int = 0,
) -> str:
    """Runs a module in a new process, which must reach the moment and die of the signal.

    Args:
      later: milliseconds between the moment and the signal.

    Returns:
      What it printed to stderr.
    """
    command = [sys.executable, __file__, event, pattern, str(int(sent)), str(later), module]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    result = subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == -sent, result.stderr
    return result.stderr


def main(event: str, pattern: str, sent: str, later: str, module: str, *arguments: str) -> None:
    def send() -> None:
        os.kill(os.getpid(), int(sent))

    def watch(name: str, args: tuple) -> None:
        if name == event and re.search(pattern, str(args[0])):
            threading.Timer(int(later) / 1000, send).start() if int(later) else send()

    sys.addaudithook(watch)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
