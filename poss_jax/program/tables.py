"""Markdown tables."""

from collections.abc import Iterable, Sequence
from typing import Any


def format_rows(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Formats a Markdown table; returns its lines."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]
