"""Files -> the records of a data set -> its documents, some of them held out.

What cannot be used is counted by reason, and the first ones are named.
"""

import glob
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from poss_jax.config.data import DataConfig
from poss_jax.config.json_reading import JsonError, check_text, parse_json
from poss_jax.config.paths import AnyPath, as_path, is_uri, local_path, read_text
from poss_jax.config.reading import UserError, one_line
from poss_jax.data.conversations import (
    Broken,
    Document,
    content_key,
    detect_format,
    read_document,
)
from poss_jax.data.progress import progress_bar

_SKIPPED = re.compile(  # other people's code, tests, and files that are tables
    r"(^|/)((site-packages|dist-packages|tests?|idlelib|turtledemo|lib2to3|ensurepip|_bundled|"
    r"_?vendor|_?vendored|encodings|pydoc_data|__pycache__)/|_sysconfigdata|"
    r"(_casefix|entities|locale|stringprep|token)\.py|\w+_pb2\.py)"
)
_SMALLEST, _LARGEST = 1024, 1 << 18  # bytes of a module; larger ones are tables
_STDLIB = "python"  # as a package
_SUFFIXES = (".txt", ".json", ".jsonl")
_SAVED = ("state.json", "dataset_dict.json")  # in a folder that `datasets` has saved
_STATES = (".ckpt", ".ckpt.gz", ".safetensors")  # that other programs stored
_NAMED = 3  # of the dropped records
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

Record = dict[str, Any] | Broken


@dataclass
class Tally:
    """Counts of a data set's records: read, dropped, cut."""

    source: str
    records: int = 0  # how many were read
    dropped: Counter[str] = field(default_factory=Counter)  # reason -> how many could not be used
    cut: Counter[str] = field(default_factory=Counter)  # reason -> how many chats were cut
    first_dropped: list[str] = field(default_factory=list)  # with their sources and reasons

    def drop(self, where: str, broken: Broken) -> None:
        """Counts a dropped record."""
        self.dropped[broken.reason] += 1
        if len(self.first_dropped) < _NAMED:
            self.first_dropped.append(f"{where}: {broken}")

    def check(self, max_share: float) -> None:
        """Raises UserError if nothing is left, or more than a share `max_share` was dropped."""
        dropped = self.dropped.total()
        if dropped and (dropped == self.records or dropped > max_share * self.records):
            reasons = ", ".join(f"{reason} {n}" for reason, n in self.dropped.most_common())
            raise UserError(
                f"data.source {self.source!r}: {dropped} of {self.records} records cannot be used "
                f"({reasons}; first {self.first_dropped[0]}); mend them or raise data.max_dropped"
            )


@dataclass(frozen=True)
class Documents:
    """A data set, split."""

    train: list[Document]
    validation: list[Document]  # held out
    tally: Tally


def load_documents(config: DataConfig) -> Documents:
    """Reads the documents of `config.source` and holds some of them out.

    A document's side depends only on its name (`stdlib`), its package (`packages`) or its content
    (other sources), so the split survives added documents, and duplicates are on one side.

    Raises:
      UserError: nothing to read, too many unusable records, or an empty side of the split.
    """
    tally = Tally(config.source)
    documents = Documents([], [], tally)
    kind = None if config.format == "auto" else config.format
    for where, record in progress_bar(read_records(config), desc="read", unit="rec", delay=2):
        tally.records += 1
        document, left_out = record, ""
        if isinstance(record, dict):
            kind = kind or detect_format(record)
            document, left_out = read_document(record, kind)
        if isinstance(document, Broken):
            tally.drop(where, document)
            continue
        tally.cut.update([left_out] if left_out else [])
        key = where if config.is_code else content_key(document)  # decides the side
        package = key.partition("/")[0]
        if config.held_out:
            is_held_out = package in config.held_out
        else:
            decides = key if config.packages is None else package
            digest = blake2b(decides.encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(digest, "big") / 2**64 < config.validation_fraction
        (documents.validation if is_held_out else documents.train).append(document)
        if len(documents.train) + len(documents.validation) == config.max_documents:
            break
    tally.check(config.max_dropped)
    if not tally.records:
        raise UserError(f"data.source {config.source!r}: want documents, got empty files")
    if not (documents.train and documents.validation):
        raise UserError(
            f"data.source {config.source!r}: want at least one training and one validation "
            f"document, got {len(documents.train)} and {len(documents.validation)}: a hash of each "
            "decides its side; give more documents, or change data.validation_fraction"
        )
    return documents


def read_records(config: DataConfig) -> Iterator[tuple[str, Record]]:
    """Yields every record, after the name of its source (file and line, or row).

    A file's content decides whether it is a JSON list or JSON lines, not its name.

    Raises:
      UserError: no such file or data set, or a JSON list that breaks off.
    """
    source = config.source
    if source.endswith(_STATES):
        raise UserError(
            f"data.source {source!r}: stored hidden states are not read; give the texts or tokens "
            "that they were made of, and features.cache for states of our own"
        )
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        yield from ((name, _read_module(path)) for name, path in _list_modules(root))
    elif config.packages is not None:
        yield from _read_packages(config.packages, config.held_out)
    elif (paths := matching_files(source)) or source.endswith(_SUFFIXES):
        if not paths:
            raise UserError(
                f"data.source {source!r}: no such file; give a path or a glob that matches"
            )
        for path in paths:
            if path.suffix != ".txt":
                yield from _read_json(path)
                continue
            try:
                yield str(path), {"text": read_text(path, "utf-8-sig")}
            except UnicodeDecodeError as error:
                yield str(path), Broken("not UTF-8", error.reason)
    elif any((as_path(source) / name).is_file() for name in _SAVED):
        yield from _read_saved(config)
    else:
        yield from _read_hub(config)


def _list_modules(root: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not _SKIPPED.search(name) and _SMALLEST <= path.stat().st_size <= _LARGEST:
            yield name, path


def _read_module(path: Path) -> Record:
    try:
        with tokenize.open(path) as file:
            return {"text": file.read()}
    except (SyntaxError, UnicodeDecodeError) as error:
        return Broken("not Python", str(error))


def _read_packages(
    names: tuple[str, ...], held_out: tuple[str, ...]
) -> Iterator[tuple[str, Record]]:
    """Reads modules of installed packages, mixed; of all packages but this one if none is named."""
    installed = Path(sysconfig.get_path("purelib"))
    folders = {folder.name: folder for folder in installed.iterdir() if folder.is_dir()}
    folders = {name: f for name, f in folders.items() if name.isidentifier() and name != "poss_jax"}
    folders[_STDLIB] = Path(sysconfig.get_path("stdlib"))
    if missing := [name for name in (*names, *held_out) if name not in folders]:
        raise UserError(f"data: want installed packages, got {missing}; install or leave them out")
    modules = {
        f"{name}/{module}": path
        for name in (dict.fromkeys((*names, *held_out)) if names else folders)
        for module, path in _list_modules(folders[name])
    }
    for name in sorted(modules, key=lambda name: blake2b(name.encode()).digest()):
        yield name, _read_module(modules[name])


def _read_json(path: AnyPath) -> Iterator[tuple[str, Record]]:
    with path.open("rb") as file:
        while (start := file.read(1)).isspace() or start in (b"\xef", b"\xbb", b"\xbf"):
            pass  # blanks and a byte-order mark
    if start == b"[":
        try:
            values = parse_json(path.read_bytes(), checks_text=False)
        except JsonError as error:
            raise UserError(f"{path}: bad JSON: {error}; mend the file") from error
        for number, value in enumerate(values, start=1):
            yield f"{path}: item {number}", _read_object(value)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", _read_object(line)


def _read_object(value: Any) -> Record:
    """Reads a line, or checks the item of a list."""
    try:
        if isinstance(value, bytes):
            value = parse_json(value.decode("utf-8-sig"))
        else:
            check_text(value)
    except UnicodeDecodeError as error:
        return Broken("not UTF-8", error.reason)
    except JsonError as error:
        return Broken("bad JSON", str(error))
    return value if isinstance(value, dict) else Broken("not a JSON object", type(value).__name__)


def _read_saved(config: DataConfig) -> Iterator[tuple[str, Record]]:
    """Reads a folder that `datasets` has saved, as speculators prepares its data."""
    folder = str(local_path(config.source, "data.source"))
    try:
        import datasets

        saved: Any = datasets.load_from_disk(folder)
        rows: Any = saved if isinstance(saved, datasets.Dataset) else saved[config.split]
        for number, row in enumerate(rows.with_format(None)):  # it may ask for torch
            yield f"{folder} row {number}", row
    except Exception as error:  # Arrow and the system raise many kinds
        raise UserError(
            f"data.source {folder!r}: want a folder with a data set that `datasets` has saved (and "
            f"with data.split {config.split!r}, if it has several); it fails: {one_line(error)}"
        ) from error


def _read_hub(config: DataConfig) -> Iterator[tuple[str, Record]]:
    name = config.source
    requirement = (
        f"data.source {name!r}: want stdlib, a .txt, .json or .jsonl path or glob, "
        "or a Hub data set"
    )
    if not _HUB_ID.fullmatch(name):
        raise UserError(f"{requirement}; it is none of them")
    try:
        import datasets  # 4.0 and later run no script of a data set

        streaming = config.max_documents is not None
        rows: Any = datasets.load_dataset(
            name, config.subset, split=config.split, streaming=streaming
        )
        for number, row in enumerate(rows):
            yield f"{name} row {number}", row
    except Exception as error:  # the Hub, Arrow, the client and the system raise many kinds
        raise UserError(f"{requirement}; as a data set it fails: {one_line(error)}") from error


def matching_files(pattern: str) -> list[AnyPath]:
    """Lists the files that a path, a URI or a glob names, in order."""
    path = as_path(pattern)
    if path.is_file():
        return [path]
    if not is_uri(pattern):
        names = sorted(glob.glob(str(path), recursive=True))
        return [Path(name) for name in names if Path(name).is_file()]
    if "**" in pattern:
        raise UserError(f"data.source {pattern!r}: URIs take * but not **; name one folder")
    root = next(parent for parent in path.parents if not set("*?[") & set(str(parent)))
    return sorted(file for file in root.glob(str(path.relative_to(root))) if file.is_file())
