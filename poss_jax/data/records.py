"""Records of a data set, one after the other: nothing is held whole, what is broken is named."""

import json
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from poss_jax.config import DataConfig, UserError
from poss_jax.data.files import existing_files, matching_files, one_line

LONGEST_RECORD = 1 << 26  # characters; what is longer is no conversation

_STDLIB_SKIPPED = re.compile(  # other people's code, tests, and files that are tables
    r"(^|/)((site-packages|dist-packages|tests?|idlelib|turtledemo|lib2to3|ensurepip|_bundled|"
    r"encodings|pydoc_data|__pycache__)/|_sysconfigdata|"
    r"(_casefix|entities|locale|stringprep|token)\.py)"
)
_STDLIB_MIN_BYTES = 1024
_SUFFIXES = (".txt", ".json", ".jsonl")
_SPACE = re.compile(r"\s*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_PIECE = 1 << 20  # characters of a JSON list read at a time


@dataclass(frozen=True)
class Broken:
    """A record that cannot be used.

    Attributes:
      reason: what is counted.
      detail: what is special about this one.
    """

    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


Record = dict[str, Any] | Broken


def read_records(config: DataConfig) -> Iterator[tuple[str, Record]]:
    """Yields where a record lies, and the record.

    A file's content decides whether it is a JSON list or JSON lines, not its name.

    Raises:
      UserError: no such file or data set, or a JSON list that breaks off.
    """
    source = config.source
    if source == "stdlib":
        yield from _read_stdlib()
    elif source.endswith(_SUFFIXES) or matching_files(source):
        for path in existing_files(source):
            yield from _read_text(path) if path.suffix == ".txt" else _read_json(path)
    else:
        yield from _read_hub(config)


def _read_stdlib() -> Iterator[tuple[str, Record]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _STDLIB_SKIPPED.search(name) or path.stat().st_size < _STDLIB_MIN_BYTES:
            continue
        with tokenize.open(path) as file:
            yield name, {"text": file.read()}


def _read_text(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        yield str(path), {"text": path.read_text(encoding="utf-8-sig")}
    except UnicodeDecodeError as error:
        yield str(path), Broken("not UTF-8", error.reason)


def _read_json(path: Path) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        while (start := file.read(1)).isspace() or start in (b"\xef", b"\xbb", b"\xbf"):
            pass  # blanks and a byte-order mark
    if start == b"[":
        with path.open(encoding="utf-8-sig") as file:
            for number, value in enumerate(_list_items(file, path), start=1):
                yield f"{path}: item {number}", _check_object(value)
    else:
        yield from _read_lines(path)


def _read_lines(path: Path) -> Iterator[tuple[str, Record]]:
    number = 0
    with path.open("rb") as file:
        while line := file.readline(LONGEST_RECORD):
            number += 1
            if len(line) == LONGEST_RECORD and not line.endswith(b"\n"):
                while (rest := file.readline(LONGEST_RECORD)) and not rest.endswith(b"\n"):
                    pass
                yield f"{path}:{number}", Broken("line too long", f"above {LONGEST_RECORD} bytes")
            elif line.strip():
                yield f"{path}:{number}", _parse_line(line)


def _parse_line(line: bytes) -> Record:
    try:
        text = line.decode("utf-8-sig")
        return _check_object(json.loads(text), may_hold_halves="\\ud" in text.lower())
    except UnicodeDecodeError as error:
        return Broken("not UTF-8", error.reason)
    except (ValueError, RecursionError) as error:
        return Broken("bad JSON", one_line(error).partition(": line ")[0])


def _check_object(value: Any, *, may_hold_halves: bool = True) -> Record:
    if not isinstance(value, dict):
        return Broken("not a JSON object", type(value).__name__)
    if may_hold_halves:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:  # an escape is half a character, which is no text
            return Broken("bad JSON", error.reason)
    return value


def _list_items(file: TextIO, path: Path) -> Iterator[Any]:
    """Yields the items of a JSON list, of which little more than one is held at a time."""
    decoder, number = json.JSONDecoder(), 1
    text, at = "", 0
    while file.read(1) != "[":
        pass
    while True:
        at = _skip_space(text, at)
        try:
            if text[at] == "]":
                break
            value, end = decoder.raw_decode(text, at)
            end = _skip_space(text, end)
            if text[end] not in ",]":  # no more text may mean that a number goes on
                raise UserError(f"{path}: item {number}: want a comma after it, got {text[end]!r}")
        except (ValueError, IndexError, RecursionError) as error:
            held = len(text) - at
            piece = file.read(max(held, _PIECE)) if held < LONGEST_RECORD else ""
            if not piece:
                what = one_line(error).partition(": line ")[0] if held else "the list breaks off"
                raise UserError(
                    f"{path}: item {number}: bad JSON: {what}; mend the file"
                ) from error
            text, at = text[at:] + piece, 0
            continue
        yield value
        number, at = number + 1, end + (text[end] == ",")
    if (text[at + 1 :] + file.read(_PIECE)).strip():
        raise UserError(f"{path}: want nothing after the list, got more; mend the file")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _read_hub(config: DataConfig) -> Iterator[tuple[str, Record]]:
    name = config.source
    wanted = (
        f"data.source {name!r}: want stdlib, a .txt, .json or .jsonl path or glob, "
        "or a Hub data set"
    )
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"{wanted}; it is none of them")
    try:
        import datasets

        streaming = config.max_documents is not None
        rows: Any = datasets.load_dataset(
            name, config.subset, split=config.split, streaming=streaming
        )
        for number, row in enumerate(rows):
            yield f"{name} row {number}", _check_object(row, may_hold_halves=False)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{wanted}; as a data set it fails: {one_line(error)}") from error
