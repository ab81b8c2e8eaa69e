"""The training program, interrupted by itself at a named moment of a step.

    python tests/dying_run.py step|twice STEP --config FILE
    python tests/dying_run.py after MILLISECONDS --config FILE

step     killed while the step is computed
twice    told to stop while it is computed, and again before it is saved
after    killed this long after the first step started
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from train.main import cli
from train.run_folder import RunFolder
from train.run_log import RunLog


def main(moment: str, number: int) -> None:
    if moment == "after":
        timer = threading.Timer(number / 1000, send, [signal.SIGKILL])
        timer.daemon = True
        before(RunLog, "record", 1, timer.start)
    else:
        wait_for_every_save()
        sent = signal.SIGKILL if moment == "step" else signal.SIGTERM
        before(RunLog, "record", number, lambda: send(sent))
        before(RunFolder, "save", number, lambda: send(sent))
    sys.argv = ["train.main", *sys.argv[3:]]
    cli()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def before(owner: type, name: str, step: int, act: Callable[..., None]) -> None:
    """Acts before a method is called that takes the step first."""
    method = getattr(owner, name)

    def wrapped(self: Any, at: int, *args: Any, **kwargs: Any) -> Any:
        if at == step:
            act()
        return method(self, at, *args, **kwargs)

    setattr(owner, name, wrapped)


def wait_for_every_save() -> None:
    """So that what was saved before the moment does not depend on the machine's speed."""
    save = RunFolder.save

    def wrapped(self: RunFolder, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        self._manager.wait_until_finished()

    RunFolder.save = wrapped


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
