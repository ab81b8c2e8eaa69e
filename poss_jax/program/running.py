"""What every program does around its own work: one-line errors, exit codes, compilation cache."""

import argparse
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import jax

from poss_jax.config import UserError

COLOUR = ("\x1b[32m", "\x1b[0m")
BRACKETS = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like any other bad input, in one line."""

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage."""
        raise UserError(f"{message}; see --help")


def run_program(main: Callable[[], None]) -> None:
    """Runs a program and exits: 0 done, 2 bad input (one line on stderr), 130 interrupted.

    Compiled programs are kept in `JAX_COMPILATION_CACHE_DIR` (default: `~/.cache/poss_jax/xla`),
    so that only the first run of a shape waits for the compiler.
    """
    logging.basicConfig()
    for handler in logging.getLogger().handlers:  # one of which importing Orbax may have set up
        handler.setFormatter(logging.Formatter("%(message)s"))
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path.home() / ".cache" / "poss_jax" / "xla"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        # Small programs too: a hundred of them compile for seconds.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    try:
        with _interruptible():
            main()
    except UserError as error:
        _leave(_failed(str(error), 2))
    except OSError as error:  # such as a path that may not be looked at
        _leave(_failed(f"{error}; check the path, and that you may use it", 2))
    except KeyboardInterrupt:
        # Exit handlers run after all threads ended, the last registered first.
        atexit.register(_leave, 130)
        sys.exit(_failed("interrupted", 130))


def text_marks() -> tuple[str, str]:
    """What is written before and after a marked text: a colour on terminals, else brackets."""
    is_wanted = os.environ.get("FORCE_COLOR") or sys.stdout.isatty()
    return COLOUR if is_wanted and not os.environ.get("NO_COLOR") else BRACKETS


def _failed(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.splitlines())}\n")
    return code


@contextmanager
def _interruptible() -> Iterator[None]:
    """Brings Ctrl-C back where it was lost.

    Python drops what is raised in hooks and destructors. After a long call the first code to run is
    often JAX's hook of the garbage collector, and Ctrl-C would do nothing.
    """
    before = sys.unraisablehook

    def report(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            main = threading.main_thread().ident
            threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            before(dropped)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _leave(code: int) -> NoReturn:
    """Exits without closing the interpreter.

    Closing it crashes in jaxlib after an interrupted compilation, and after a failed write it may
    wait for ever for Orbax, or let asyncio report what was reported already.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
