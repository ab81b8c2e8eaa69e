"""The training program, interrupted by itself at a named moment of a step.

    python tests/dying_run.py MOMENT STEP --config FILE
    python tests/dying_run.py after MILLISECONDS --config FILE

step     killed while the step is computed
log      killed when half of the step's line in metrics.jsonl is written
save     killed when the step's state is written, before that counts as a checkpoint
sigterm  told to stop while the step is computed
twice    told to stop, and again before the step is saved
after    killed this many seconds after the first step started
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from train.main import cli
from train.run_folder import RunFolder
from train.run_log import RunLog


def main(moment: str, step: int) -> None:
    if moment == "after":
        die_after(step / 1000)
    else:
        wait_for_every_save()
        MOMENTS[moment](step)
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


def die_after(seconds: float) -> None:
    timer = threading.Timer(seconds, send, [signal.SIGKILL])
    timer.daemon = True
    before(RunLog, "record", 1, timer.start)


def wait_for_every_save() -> None:
    """So that what was saved before the moment does not depend on the machine's speed."""
    save = RunFolder.save

    def wrapped(self: RunFolder, *args: Any, **kwargs: Any) -> None:
        save(self, *args, **kwargs)
        self._manager.wait_until_finished()

    RunFolder.save = wrapped


def while_computing(number: int) -> Callable[[int], None]:
    return lambda step: before(RunLog, "record", step, lambda: send(number))


def while_logging(step: int) -> None:
    log = RunFolder.log

    def wrapped(self: RunFolder, metrics: dict[str, Any]) -> None:
        if metrics["step"] == step:
            with (self.path / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics)[:20])
            send(signal.SIGKILL)
        log(self, metrics)

    RunFolder.log = wrapped


def while_saving(step: int) -> None:
    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.rename" and f"/checkpoints/{step}." in str(args[0]):
            send(signal.SIGKILL)

    sys.addaudithook(watch)


def told_twice(step: int) -> None:
    while_computing(signal.SIGTERM)(step)
    before(RunFolder, "save", step, lambda: send(signal.SIGTERM))


MOMENTS: dict[str, Callable[[int], None]] = {
    "step": while_computing(signal.SIGKILL),
    "log": while_logging,
    "save": while_saving,
    "sigterm": while_computing(signal.SIGTERM),
    "twice": told_twice,
}

if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
