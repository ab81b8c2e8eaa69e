"""The frame of every program: one-line errors, exit codes, compilation cache."""

import argparse
import atexit
import difflib
import errno
import io
import logging
import os
import platform
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import jax

from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import UserError, cut, is_out_of_memory, shorten
from poss_jax.config.yaml_text import lone_surrogates
from poss_jax.version import __version__

COLOUR = ("\x1b[32m", "\x1b[0m")
DIM = ("\x1b[2m", "\x1b[0m")
BRACKETS = (
    "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}",
    "\N{MATHEMATICAL RIGHT WHITE SQUARE BRACKET}",
)


BAD_INPUT = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE

_LONGEST_LINE = 1000
_LOG = logging.getLogger(__name__)


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments like any other bad input, in one line.

    Args:
      module: name of the program's module; its usage names what it was started as.
      settings: those of argparse.
    """

    def __init__(self, *, module: str | None = None, **settings: Any) -> None:
        if module is not None:
            started_as = Path(sys.argv[0]).name
            is_script = started_as.startswith("poss-")
            settings["prog"] = started_as if is_script else f"python -m {module}"
        super().__init__(**settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses arguments that are not UTF-8: no prompt, config or report can hold them."""
        for text in sys.argv[1:] if args is None else args:
            if lone_surrogates(text):
                raise UserError(f"argument {shorten(text)}: want UTF-8; write it in UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage; names the option nearest to an unknown one."""
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        if message.startswith("unrecognized") and unknown[0].startswith("--"):
            known = [flag for flag in self._option_string_actions if flag.startswith("--")]
            near = difflib.get_close_matches(unknown[0], known, n=1, cutoff=0.0)
            raise UserError(f"unknown option {cut(unknown[0])}; did you mean {near[0]}?")
        raise UserError(f"{' '.join(message.splitlines())}; see --help")


def run_program(main: Callable[[], None]) -> None:
    """Runs a program and exits.

    Exit codes: 0 done, 2 bad input or too little memory, 70 an error of ours, 130 interrupted, 141
    nobody reads the output (`| head`). Each but the last comes with one line on stderr; that of 70
    names a file with the traceback.

    Compiled programs are kept in `JAX_COMPILATION_CACHE_DIR` (default: `xla` in `cache_folder()`),
    so that only the first run of a shape waits for the compiler.
    """
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # closed
    logging.basicConfig()
    for handler in logging.getLogger().handlers:  # one of which importing Orbax may have set up
        handler.setFormatter(logging.Formatter("%(message)s"))
    _keep_compiled()
    try:
        with _interruptible(), _flushed():
            main()
    except KeyboardInterrupt:
        # Exit handlers run after all threads ended, the last registered first.
        atexit.register(_leave, INTERRUPTED)
        sys.exit(_failed("interrupted", INTERRUPTED))
    except BrokenPipeError:
        _leave(CLOSED_PIPE)
    except Exception as error:
        _leave(_failed(*_explain(error)))


def text_marks() -> tuple[str, str]:
    """Marks before and after a text: a colour where there are colours, else brackets."""
    return COLOUR if has_colours() else BRACKETS


def has_colours() -> bool:
    """Tells whether output is coloured: on a terminal or with FORCE_COLOR, never with NO_COLOR."""
    is_wanted = bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
    return is_wanted and not os.environ.get("NO_COLOR")


def _failed(message: str, code: int) -> int:
    line = " ".join(message.splitlines())
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    with suppress(OSError):  # nobody may read it
        sys.stderr.write(f"error: {line}\n")
    return code


def _explain(error: Exception) -> tuple[str, int]:
    """Message for the user, and the exit code."""
    if isinstance(error, UserError):
        return str(error), BAD_INPUT
    if is_out_of_memory(error):
        return (
            f"out of memory: {_first_line(error)}; lower the batch size, the lengths or the tree, "
            "in training data.sequence_length, batch_size or what a step holds (step.*), or spread "
            "the model over more devices (mesh.*)"
        ), BAD_INPUT
    if isinstance(error, OSError):  # such as a path that may not be looked at
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room there" if is_full else "check the path, and that you may use it"
        return f"{error}; {advice}", BAD_INPUT
    kept = _keep_traceback(error)
    return f"unexpected: {_first_line(error)}; {kept}; please report it", UNEXPECTED


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _keep_traceback(error: Exception) -> str:
    """Writes what a report needs; returns where it is."""
    names = ("jax", "jaxlib", "flax", "orbax-checkpoint", "transformers")
    versions = [f"{name} {version(name)}" for name in names]
    text = "\n".join(
        [
            f"arguments: {sys.argv}",
            f"poss_jax {__version__}, Python {platform.python_version()}",
            ", ".join(versions),
            "",
            "".join(traceback.format_exception(error)),
        ]
    )
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="poss_jax-traceback-", suffix=".txt", delete=False, errors="replace"
        ) as file:
            file.write(text)
    except OSError:
        with suppress(OSError):
            sys.stderr.write(text)
        return "the traceback is above, since it could not be written to a file"
    return f"the traceback is in {file.name}"


def _keep_compiled() -> None:
    """Sets the folder of compiled programs, unless the environment has named one."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    try:
        cache = cache_folder()
    except UserError as error:
        _LOG.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(cache / "xla"))
    # Small programs too: a hundred of them compile for seconds.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


@contextmanager
def _flushed() -> Iterator[None]:
    """Lets a closed pipe or a full disk be seen here, not when the interpreter closes."""
    try:
        yield
    except SystemExit:  # after --help
        sys.stdout.flush()
        raise
    sys.stdout.flush()


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
    wait forever for Orbax, or let asyncio report what was reported already.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)
