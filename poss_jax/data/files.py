"""Files of text and of JSON lines: finding and reading them, with one-line errors."""

import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from poss_jax.config.json_reading import JsonError, parse_json
from poss_jax.config.paths import AnyPath, as_path, is_uri, read_text
from poss_jax.config.reading import UserError


def matching_files(pattern: str) -> list[AnyPath]:
    """Lists the files that a path, a URI or a glob names, in order."""
    if is_uri(pattern):
        return _matching_objects(pattern)
    path = as_path(pattern)
    names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    return [Path(name) for name in names if Path(name).is_file()]


def existing_files(pattern: str) -> list[AnyPath]:
    """As `matching_files`, but raises UserError if there are none."""
    paths = matching_files(pattern)
    if not paths:
        raise UserError(
            f"data.source {pattern!r}: no such file; give a path or a glob that matches"
        )
    return paths


def _matching_objects(pattern: str) -> list[AnyPath]:
    path = as_path(pattern)
    if path.is_file():
        return [path]
    if "**" in pattern:
        raise UserError(f"data.source {pattern!r}: URIs take * but not **; name one folder")
    root = next(parent for parent in path.parents if not set("*?[") & set(str(parent)))
    return sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())


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
