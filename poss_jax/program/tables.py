"""Tables: Markdown for files and pipes, columns on a terminal."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from poss_jax.program.output import wants_json

_TERMINAL = 80  # columns


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
    lines = _join_columns(columns)
    if max(map(len, lines)) <= _TERMINAL:
        return lines
    widths = [max(map(len, cells)) for _, *cells in columns]
    heads = [
        textwrap.wrap(name, width, break_long_words=False)
        for (name, *_), width in zip(columns, widths, strict=True)
    ]
    height = max(map(len, heads))
    return _join_columns(
        [
            [*[""] * (height - len(head)), *head, *cells]
            for head, (_, *cells) in zip(heads, columns, strict=True)
        ]
    )


def _join_columns(columns: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, cells)) for cells in columns]
    return [
        "  ".join(
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in zip(*columns, strict=True)
    ]
