"""The table of what goes where, short enough to read: alike layers share a line."""

import re
from collections.abc import Iterable, Sequence

from poss_jax.convert.plan import Row

_NUMBER = re.compile(r"(?<=[./])\d+(?=[./])|^\d+(?=[./])")


def format_rows(rows: Sequence[Row]) -> list[str]:
    """Lays rows out in columns: key -> path, shape, type.

    Consecutive layers whose rows differ in their number alone share a line, on which it stands as
    `{0..31}`.
    """
    folded = fold_rows(rows)
    key_width = max((len(row.key) for row in folded), default=0)
    path_width = max((len(row.path) for row in folded), default=0)
    if not path_width:  # nothing goes anywhere
        return [f"{row.key:{key_width}}  {format_shape(row)}" for row in folded]
    return [
        f"{row.key:{key_width}}  ->  {row.path:{path_width}}  {format_shape(row)}" for row in folded
    ]


def format_shape(row: Row) -> str:
    """Shape and type of a row, such as `4096x4096  bfloat16`."""
    return f"{'x'.join(map(str, row.shape)) or 'scalar'}  {row.dtype}"


def fold_rows(rows: Iterable[Row]) -> list[Row]:
    """Joins rows that differ in their layer's number alone, in the order of the first of each."""
    groups: dict[tuple, list[int]] = {}
    for row in rows:
        key, key_index = _split(row.key)
        path, path_index = _split(row.path)
        shift = path_index - key_index if path_index >= 0 <= key_index else None
        # Without a number of its own a row is a group of its own.
        numbers = groups.setdefault((key, path, shift, row.shape, row.dtype), [])
        numbers.append(key_index)
    return [
        Row(_join(key, first, last), _join(path, first + (shift or 0), last + (shift or 0)), *rest)
        for (key, path, shift, *rest), numbers in groups.items()
        for first, last in _runs(numbers)
    ]


def _split(name: str) -> tuple[str, int]:
    """A name with its layer's number cut out, and that number; -1 without one."""
    match = _NUMBER.search(name)
    if match is None:
        return name, -1
    return f"{name[: match.start()]}\0{name[match.end() :]}", int(match[0])


def _join(name: str, first: int, last: int) -> str:
    return name.replace("\0", str(first) if first == last else f"{{{first}..{last}}}")


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    return runs
