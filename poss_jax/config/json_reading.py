"""Reading untrusted files: JSON within limits, and no links that lead out of a folder."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from poss_jax.config.paths import AnyPath, file_size, read_text
from poss_jax.config.reading import UserError

MAX_BYTES = 1 << 28  # of a JSON file
MAX_DEPTH = 100

Pairs = list[tuple[str, Any]]

_HALF = re.compile(r"\\u[dD][89abABcdefCDEF]")  # an escape of half a character


class JsonError(ValueError):
    """A text cannot be read as JSON; the message is one line."""


def parse_json(
    content: bytes | str,
    *,
    checks_text: bool = True,
    object_hook: Callable[[Pairs], Any] | None = None,
) -> Any:
    """Reads a JSON value.

    NaN and Infinity are accepted, since Python writes them; the caller checks numbers.

    Args:
      content: the text, or its UTF-8.
      checks_text: refuse half characters, see `check_text`.
      object_hook: makes an object's value; by default a dict, in which a key's last value wins.

    Raises:
      JsonError: not UTF-8, not JSON, lists in lists deeper than `MAX_DEPTH`, or a whole number of
        more digits than Python reads.
    """
    too_deep = f"nested more than {MAX_DEPTH} deep"
    try:
        text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=object_hook)
    except ValueError as error:  # the part behind a semicolon is for programmers
        raise JsonError(str(error).partition(";")[0]) from error
    except RecursionError as error:
        raise JsonError(too_deep) from error
    if _is_deep(value, MAX_DEPTH):
        raise JsonError(too_deep)
    if checks_text and _HALF.search(text):
        check_text(value)
    return value


def check_text(value: Any) -> None:
    """Raises JsonError if a string of a value cannot be written as UTF-8."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise JsonError(f"half a character ({error.reason})") from error


def parse_object(content: bytes, origin: str) -> dict[str, Any]:
    """Reads a JSON object without repeated keys.

    Args:
      content: the text as UTF-8.
      origin: its source, for messages.

    Raises:
      UserError: not an object, a repeated key, or what `parse_json` refuses.
    """

    def unique_keys(pairs: Pairs) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise UserError(f"{origin}: {twice[:80]} is given twice; fetch the file again")
        return values

    try:
        values = parse_json(content, object_hook=unique_keys)
    except JsonError as error:
        raise UserError(f"{origin}: not valid JSON: {error}; fetch the file again") from error
    if not isinstance(values, dict):
        raise UserError(f"{origin}: want a JSON object, got {type(values).__name__}")
    return values


def read_json(path: AnyPath) -> dict[str, Any]:
    """Reads a JSON file that holds an object.

    Raises:
      UserError: missing, unreadable, not a regular file, larger than `MAX_BYTES`, or what
        `parse_object` refuses.
    """
    try:
        size = file_size(path)
        if not path.is_file():  # a pipe would block, a device may never end
            raise UserError(f"{path}: want a regular file; put the file itself there")
        if size > MAX_BYTES:
            raise UserError(f"{path}: want at most {MAX_BYTES:,} bytes of JSON, got {size:,}")
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; the file is needed") from error
    return parse_object(content, str(path))


def check_own_file(path: Path) -> None:
    """Checks that a file, if it exists, is a regular one inside its folder, even through links.

    A link in someone else's folder could expose any file of this machine. Links from the Hub
    cache's `snapshots/COMMIT` to its `blobs` folder are allowed.

    Raises:
      UserError: a link to outside, or something that is not a regular file.
    """
    _check_link(path, path.parent)
    if path.exists() and not path.is_file():
        raise UserError(f"{path}: want a regular file; put the file itself there")


def check_own_tree(root: Path, folder: Path) -> None:
    """Refuses links at or below a path that lead out of a folder, as `check_own_file` does."""
    _check_link(root, folder)
    for parent, folders, files in os.walk(root):
        for name in (*folders, *files):
            _check_link(Path(parent, name), folder)


def _check_link(path: Path, folder: Path) -> None:
    home, real = folder.resolve(), Path(os.path.realpath(path))
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    if not any(real.is_relative_to(home) for home in homes):
        raise UserError(f"{path}: a link that leads out of its folder; put the file itself there")


def json_lines(path: AnyPath) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, object) for every non-blank line."""
    try:
        lines = read_text(path, "utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: want UTF-8 text, got {error.reason}; convert the file") from error
    except OSError as error:
        raise UserError(f"{path}: want a readable file, got: {error.strerror}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = parse_json(line)
        except JsonError as error:
            raise UserError(f"{where}: want a JSON object, got bad JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: want a JSON object, got {type(record).__name__}")
        yield where, record


def _is_deep(value: Any, depth: int) -> bool:
    if not isinstance(value, dict | list):
        return False
    children = value.values() if isinstance(value, dict) else value
    nested = (child for child in children if isinstance(child, dict | list))
    return depth == 0 or any(_is_deep(child, depth - 1) for child in nested)
