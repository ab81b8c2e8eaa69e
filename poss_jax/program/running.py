"""The frame of every program: one-line errors, exit codes, compilation cache."""

import argparse
import atexit
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
from functools import partial
from importlib.metadata import version
from typing import Any, NoReturn

from poss_jax.config import __version__
from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import (
    UserError,
    cut,
    is_out_of_memory,
    printable,
    printable_lines,
    suggest,
)
from poss_jax.program.commands import started_as

COLOUR = ("\x1b[32m", "\x1b[0m")
COLOUR_OF_COPIES = ("\x1b[36m", "\x1b[0m")
DIM = ("\x1b[2m", "\x1b[0m")
BRACKETS = ("\u27e6", "\u27e7")  # white square brackets
BRACKETS_OF_COPIES = ("\u27ea", "\u27eb")  # double angle brackets

BAD_INPUT = 2
UNEXPECTED = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 128 + signal.SIGINT
CLOSED_PIPE = 128 + signal.SIGPIPE
PARSER_ONLY = "\0parser"  # a first word that nobody can type: asks for the parser

_LONGEST_LINE = 1000
_LOG = logging.getLogger(__name__)

# Set by launchers of several processes: a process count, or a list of hosts.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


class ParserOnly(Exception):
    """Brings a parser to a caller who wants nothing else of a program."""


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line; the usage shows how the program `module` was started."""

    def __init__(self, *, module: str | None = None, **settings: Any) -> None:
        if module is not None:
            settings["prog"] = started_as(module)
        formatter = partial(argparse.RawDescriptionHelpFormatter, max_help_position=27)
        settings.setdefault("formatter_class", formatter)
        super().__init__(**settings)
        if module is not None and self.add_help:
            add_version(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses arguments, unless the parser alone is asked for."""
        if args and args[0] == PARSER_ONLY:
            raise ParserOnly(self)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raises instead of printing the usage; suggests the nearest option for an unknown one."""
        unknown = message.removeprefix("unrecognized arguments: ").split("=")[0].split()
        if message.startswith("unrecognized") and unknown[0].startswith("--"):
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = suggest(unknown[0], flags, otherwise="see --help")
            raise UserError(f"unknown option {cut(unknown[0])}; {hint}")
        raise UserError(f"{' '.join(message.splitlines())}; see --help")


def add_version(parser: Any) -> None:
    """Adds `--version` to a parser or a group."""
    shown = f"poss_jax {__version__}"
    parser.add_argument("--version", action="version", version=shown, help="Show the version.")


def run_program(main: Callable[[], None]) -> None:
    """Runs a program and exits.

    Exit codes: 0 done, 2 bad input or too little memory, 70 internal error, 130 interrupted, 141
    output closed (`| head`). Each but the last prints one line on stderr; 70 also names a file with
    the traceback.

    Compiled programs are kept in `JAX_COMPILATION_CACHE_DIR` (default: `xla` in `cache_folder()`),
    so only the first run of a shape waits for the compiler.
    """
    sys.stdout, sys.stderr = sys.stdout or io.StringIO(), sys.stderr or io.StringIO()  # or closed
    logging.basicConfig()
    for handler in logging.getLogger().handlers:  # importing Orbax may have added one
        handler.setFormatter(_Printable())
    _keep_compiled()
    try:
        with _interruptible():
            try:
                main()
            except SystemExit:  # after --help
                sys.stdout.flush()  # a closed pipe or full disk fails here, not at exit
                raise
            sys.stdout.flush()
    except KeyboardInterrupt:
        # Exit handlers run after all threads have ended, last registered first.
        atexit.register(_leave, INTERRUPTED)
        sys.exit(_failed("interrupted", INTERRUPTED))
    except BrokenPipeError:
        _leave(CLOSED_PIPE)
    except Exception as error:
        _leave(_failed(*_explain(error)))


def text_marks(*, is_copied: bool = False) -> tuple[str, str]:
    """Marks before and after a text: a colour if output is coloured, else brackets."""
    if is_copied:
        return COLOUR_OF_COPIES if has_colours() else BRACKETS_OF_COPIES
    return COLOUR if has_colours() else BRACKETS


def has_colours() -> bool:
    """True if output is coloured: on a terminal or with FORCE_COLOR, never with NO_COLOR."""
    is_wanted = bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()
    return is_wanted and not os.environ.get("NO_COLOR")


class _Printable(logging.Formatter):
    """Formats a record as its message alone, and a traceback below it."""

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


def _failed(message: str, code: int) -> int:
    line = printable(" ".join(message.splitlines()))
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    with suppress(OSError):  # stderr may be closed
        sys.stderr.write(f"error: {line}\n")
    return code


def _explain(error: Exception) -> tuple[str, int]:
    """Returns the message for the user and the exit code."""
    if isinstance(error, UserError):
        return str(error), BAD_INPUT
    if is_out_of_memory(error):
        return (
            f"out of memory: {_first_line(error)}; lower the batch size, the lengths or the tree, "
            "in training data.sequence_length, batch_size or what a step holds (step.*), or spread "
            "the model over more devices (mesh.*)"
        ), BAD_INPUT
    if isinstance(error, OSError):  # such as a path without permission
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room there" if is_full else "check the path, and that you may use it"
        return f"{error}; {advice}", BAD_INPUT
    # A file keeps the details that a bug report needs.
    names = ("jax", "jaxlib", "flax", "orbax-checkpoint", "transformers")
    program = f"poss_jax {__version__}, Python {platform.python_version()}"
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    trace = "".join(traceback.format_exception(error))
    settings: Any = {"prefix": "poss_jax-traceback-", "suffix": ".txt", "errors": "replace"}
    with tempfile.NamedTemporaryFile("w", delete=False, **settings) as file:
        file.write(f"arguments: {sys.argv}\n{program}\n{versions}\n\n{trace}")
    message = f"unexpected: {_first_line(error)}; the traceback is in {file.name}"
    return f"{message}; please report it", UNEXPECTED


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


def _keep_compiled() -> None:
    """Sets the folder of compiled programs, unless the environment names it."""
    # Keep small programs too: a hundred of them take seconds to compile.
    settings: dict[str, Any] = {"jax_persistent_cache_min_compile_time_secs": 0.0}
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            settings["jax_compilation_cache_dir"] = str(cache_folder() / "xla")
        except UserError as error:
            _LOG.warning("compiled programs are not kept: %s", error)
            return
    for name, value in settings.items():
        if name.upper() not in os.environ:
            os.environ[name.upper()] = str(value)  # for a program that imports JAX later, or never
            if "jax" in sys.modules:
                sys.modules["jax"].config.update(name, value)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Restores Ctrl-C if it was lost.

    Python drops exceptions raised in hooks and destructors. After a long call the first code to run
    is often JAX's garbage-collector hook, which would swallow Ctrl-C.
    """
    hook = sys.unraisablehook

    def report(dropped: Any) -> None:
        if dropped.exc_type is KeyboardInterrupt:
            main = threading.main_thread().ident
            threading.Timer(0.05, signal.pthread_kill, [main, signal.SIGINT]).start()
        else:
            hook(dropped)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _leave(code: int) -> NoReturn:
    """Exits without closing the interpreter.

    Closing crashes in jaxlib after an interrupted compilation, and after a failed write it may wait
    forever for Orbax, or let asyncio repeat a reported error.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def start_processes() -> None:
    """Joins the other processes of the run, if the environment names any.

    Reads `JAX_COORDINATOR_ADDRESS` (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, unless the
    cluster provides them), SLURM, Open MPI, or a TPU pod. Call it before anything uses devices.

    Raises:
      UserError: the others cannot be joined.
    """
    try:
        if not expects_processes(os.environ):
            return
        import jax  # not for `--help`

        if jax.distributed.is_initialized():
            return
        names = {"num_processes": "JAX_NUM_PROCESSES", "process_id": "JAX_PROCESS_ID"}
        overrides = {key: name for key, name in names.items() if name in os.environ}
        numbers: Any = {key: int(os.environ[name]) for key, name in overrides.items()}
        jax.distributed.initialize(**numbers)
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot join the other processes: {' '.join(str(error).split())[:300]}; set "
            "JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each"
        ) from error
    if jax.default_backend() == "cpu":
        # Cached programs run a step's collectives in any order, and deadlock.
        jax.config.update("jax_enable_compilation_cache", False)


def expects_processes(environment: Any) -> bool:
    """True if the environment says that there are several processes."""
    return (
        "JAX_COORDINATOR_ADDRESS" in environment
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
        or any(int(environment.get(name) or 1) > 1 for name in _COUNTS)
        or any("," in environment.get(name, "") for name in _LISTS)
    )
