"""Results and tables, for people on a terminal and for programs elsewhere; what takes a while."""

import gc
import json
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeVar

from poss_jax.config.paths import local_path
from poss_jax.config.reading import UserError, printable

T = TypeVar("T")

_LONGEST_FIELD = 100
# Controls but newline and tab, and what reorders the letters around it.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_TERMINAL = 80  # columns


def add_json(parser: Any) -> None:
    """Adds `--json`, which `wants_json` looks for, to a parser or a group."""
    parser.add_argument(
        "--json",
        action="store_true",
        help="Print the whole result as JSON, in the last line. Without it that is so where no "
        "terminal is, but of a long result it is a summary.",
    )


def wants_json() -> bool:
    """Tells whether results are for other programs: no terminal shows them, or --json is given."""
    return "--json" in sys.argv or not sys.stdout.isatty()


def print_summary(
    value: dict[str, Any], text: str | None = None, *, brief: dict[str, Any] | None = None
) -> None:
    """Writes the last line of a program: for people a text, else one JSON object.

    Args:
      text: the same for people; "": they have seen it, None: a line for each name and number.
      brief: stands for a long value unless --json asks for all of it.
    """
    if wants_json():
        shown = json.dumps(value if brief is None or "--json" in sys.argv else brief)
    elif text is not None:
        shown = text
    else:
        fields = [(name.replace("_", " "), _show(field)) for name, field in value.items()]
        width = max((len(name) for name, _ in fields), default=0)
        lines = [f"{name:{width}}  {field}" for name, field in fields if field]
        shown = "\n".join(line for line in lines if len(line) <= _LONGEST_FIELD)
    if shown:
        sys.stdout.write(f"{shown}\n")


def model_text(text: str) -> str:
    """A model's text for standard output: a terminal obeys nothing in it, so shows it escaped."""
    return _CONTROL.sub(lambda c: printable(c[0]), text) if sys.stdout.isatty() else text


def _show(value: Any) -> str:
    """A value with as many digits as people read; empty for what takes more than a line."""
    match value:
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.2f}" if abs(value) >= 1 else f"{value:.3g}"
        case str():
            return "" if "\n" in value else printable(value)
        case list() if all(isinstance(item, int | float) for item in value):
            return " ".join(map(_show, value))
        case dict() if all(isinstance(item, int) for item in value.values()):
            return ", ".join(f"{name.replace('_', ' ')} {item:,}" for name, item in value.items())
    return ""


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Shows a text on a terminal for as long as the block, or a decorated function, takes.

    Garbage stays meanwhile: what imports and models leave is little, and looking for it takes long.
    """
    is_shown, collects = sys.stderr.isatty(), gc.isenabled()
    gc.disable()
    if is_shown:
        sys.stderr.write(f"{text}\r")
        sys.stderr.flush()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        if is_shown:
            sys.stderr.write(f"{' ' * len(text)}\r")
            sys.stderr.flush()


def announce(steps: Iterator[T], text: str) -> Iterator[T]:
    """Yields steps, the first of which takes long; until it is there a terminal shows a text."""
    with waiting(text):
        first = list(islice(steps, 1))
    yield from chain(first, steps)


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Raises UserError if no output can be made at a path, before any work is spent on it."""
    local_path(path, "output")
    if path.exists() and path.is_dir() != is_folder:
        is_what = "a file" if is_folder else "a folder"
        raise UserError(f"output {path} is {is_what}; choose another place")
    places = [path.absolute()] * is_folder + [*path.absolute().parents]
    existing = next(existing for existing in places if existing.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"output {path}: {existing} is not a writable folder; choose another place")


def check_new_file(path: Path) -> None:
    """Raises UserError if an output file exists already, or cannot be made."""
    if path.exists():
        raise UserError(f"output {path} exists; name another file or remove it")
    check_writable(path)


def format_rows(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Formats a Markdown table; returns its lines."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def fold(title: str, lines: Sequence[str]) -> list[str]:
    """Folds lines of Markdown away under a title."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>"]


def show_rows(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Formats a table for standard output: columns on a terminal, Markdown elsewhere."""
    return format_rows(head, rows) if wants_json() else align(head, rows)


def align(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lays cells out in columns, the first to the left and the others to the right.

    Empty columns are left out. If lines are wider than a terminal, heads take several lines.
    """
    table = [[str(cell) for cell in row] for row in (head, *rows)]
    columns = [column for column in zip(*table, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    if sum(widths) + 2 * (len(widths) - 1) > _TERMINAL:
        widths = [max(map(len, cells)) for _, *cells in columns]
        heads = [
            textwrap.wrap(name, width, break_long_words=False)
            for (name, *_), width in zip(columns, widths, strict=True)
        ]
        height = max(map(len, heads))
        columns = [
            (*[""] * (height - len(head)), *head, *cells)
            for head, (_, *cells) in zip(heads, columns, strict=True)
        ]
    padded = []
    for index, column in enumerate(columns):
        width = max(map(len, column))
        padded.append([cell.rjust(width) if index else cell.ljust(width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
