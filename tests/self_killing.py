"""Runs a program that kills itself at a named moment: the first time it touches a certain file.

    python tests/self_killing.py EVENT PATTERN MODULE [argument ...]

EVENT is one of Python's audit events with a path, such as `os.rename`, PATTERN is searched in that
path. The process is killed just before the event takes place, so the moment is always the same.
"""

import os
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_until(event: str, pattern: str, module: str, *arguments: str) -> None:
    """Runs a module in a new process, which must reach the moment and die there."""
    command = [sys.executable, __file__, event, pattern, module, *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr


def main(event: str, pattern: str, module: str, *arguments: str) -> None:
    def watch(name: str, args: tuple) -> None:
        if name == event and re.search(pattern, str(args[0])):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
