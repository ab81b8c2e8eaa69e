"""Corpora: where documents come from, and which of them are held out."""

import hashlib
import itertools
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from poss_jax.config import DataConfig, UserError
from poss_jax.data.files import json_lines, matching_files, one_line, read_text, text_field

_STDLIB_SKIPPED = re.compile(  # other people's code, tests, and files that are tables
    r"(^|/)((site-packages|dist-packages|tests?|idlelib|turtledemo|lib2to3|ensurepip|_bundled|"
    r"encodings|pydoc_data|__pycache__)/|_sysconfigdata|"
    r"(_casefix|entities|locale|stringprep|token)\.py)"
)
_STDLIB_MIN_BYTES = 1024


@dataclass(frozen=True)
class Documents:
    """A corpus, split; each document is one string."""

    train: list[str]
    validation: list[str]


def load_documents(config: DataConfig) -> Documents:
    """Reads the documents of `config.source` and holds some of them out.

    A document's side depends on nothing but a hash of its name (`stdlib`) or of its text (all other
    sources), so the split survives added documents, and duplicates never lie on both sides.

    Raises:
      UserError: nothing to read, malformed input, or one side of the split is empty.
    """
    kept = (document for document in _read_source(config) if document[1].strip())
    documents = Documents([], [])
    for key, text in itertools.islice(kept, config.max_documents):
        held_out = _hash_fraction(key) < config.validation_fraction
        (documents.validation if held_out else documents.train).append(text)
    if not (documents.train and documents.validation):
        raise UserError(
            f"data.source {config.source!r}: want at least one training and one validation "
            f"document, got {len(documents.train)} and {len(documents.validation)}; give more "
            "documents (or shorter ones) or change data.validation_fraction"
        )
    return documents


def _read_source(config: DataConfig) -> Iterator[tuple[str, str]]:
    """Yields (what decides a document's side of the split, its text)."""
    source = config.source
    if source == "stdlib":
        return _read_stdlib()
    if source.endswith(".jsonl"):
        records = (item for path in matching_files(source) for item in json_lines(path))
        texts = (text_field(where, record) for where, record in records)
    elif source.endswith(".txt"):
        texts = (read_text(path) for path in matching_files(source))
    else:
        texts = _read_hub(source, streaming=config.max_documents is not None)
    return ((text, text) for text in texts)


def _read_stdlib() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _STDLIB_SKIPPED.search(name) or path.stat().st_size < _STDLIB_MIN_BYTES:
            continue
        with tokenize.open(path) as file:
            yield name, file.read()


def _read_hub(name: str, *, streaming: bool) -> Iterator[str]:
    wanted = f"data.source {name!r}: want stdlib, a .txt or .jsonl path or glob, or a Hub data set"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"{wanted}; it is none of them")
    try:
        import datasets

        rows: Any = datasets.load_dataset(name, split="train", streaming=streaming)
        for row in rows:
            yield text_field(f"data set {name!r}", row)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{wanted}; as a data set it fails: {one_line(error)}") from error


def _hash_fraction(key: str) -> float:
    """Maps a string to [0, 1), the same on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
