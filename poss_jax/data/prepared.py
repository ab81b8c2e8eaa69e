"""The rows of a run: made once, kept in its folder, the same on resume."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from poss_jax.checkpoint.whole import replaced
from poss_jax.config.data import DataConfig
from poss_jax.config.paths import AnyPath, as_path, read_text
from poss_jax.config.reading import UserError, config_to_dict, one_line
from poss_jax.data.conversations import Chat, Document, Rendered, Tokens, content_key
from poss_jax.data.records import Broken
from poss_jax.data.rows import Rows, encode_documents, make_rows
from poss_jax.data.sources import Documents, Tally, load_documents
from poss_jax.data.templates import ChatTemplate, fit_chat
from poss_jax.data.tokenizer import special_pattern

_FILE = "data.npz"
_PARTS = ("train", "validation")
_LOOKED_AT = 100  # texts inspected to see whether they are chats


@dataclass(frozen=True)
class Prepared:
    """Rows of a run.

    Attributes:
      train: rows to train on.
      validation: rows held out.
      report: used and dropped records; lengths, packing and trained share of the documents.
    """

    train: Rows
    validation: Rows
    report: dict[str, Any]


def prepare(
    folder: AnyPath,
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    load: Callable[[], Documents] | None = None,
    stop_ids: Sequence[int] = (),
) -> Prepared:
    """Makes the rows of a run, or reads the ones it made before.

    Args:
      load: returns the documents; None reads them as `config` says.
      stop_ids: tokens that end a text of the target, besides the tokenizer's eos.

    Raises:
      UserError: what `load_documents` refuses; an unusable chat template; token ids outside the
        vocabulary; a loss mask of nothing or everything; a folder prepared with other settings.
    """
    path = folder / _FILE
    made_from = _fingerprint(config, tokenizer, vocab_size, stop_ids)
    if path.exists():
        return _read(path, made_from)
    documents = load() if load else load_documents(config)
    prepared = make_prepared(documents, config, tokenizer, vocab_size, stop_ids)
    _write(path, prepared, made_from)
    return prepared


def make_prepared(
    documents: Documents,
    config: DataConfig,
    tokenizer: Any,
    vocab_size: int,
    stop_ids: Sequence[int] = (),
) -> Prepared:
    """Tokenises documents and lays them into rows (see `prepare`)."""
    first, tally = documents.train[0], documents.tally
    template = None
    if isinstance(first, Chat | Rendered):
        template = ChatTemplate(tokenizer, config.template, config.system_prompt, stop_ids)
        documents = _fit_chats(documents, template)
    elif isinstance(first, str):
        _refuse_spelled_out(documents.train, config, tokenizer)
    packing = config.packing or ("stream" if isinstance(first, str) else "documents")
    parts = {name: _Part(config, packing, vocab_size, tally) for name in _PARTS}
    for name, split in parts.items():
        split_documents = getattr(documents, name)
        encoded = encode_documents(split_documents, tokenizer, template)
        for document, sequences in zip(split_documents, encoded, strict=True):
            split.add(document, sequences)
    tally.check(config.max_dropped)
    rows = {name: split.rows() for name, split in parts.items()}
    if not isinstance(first, str) and config.train_on == "assistant":
        _check_share(config, rows["train"])
    report = {
        "source": config.source,
        "kind": type(first).__name__.lower().replace("str", "text"),
        "template": template and template.name,
        "ends_turns": template is None or template.ends_turns,
        "packing": packing,
        "records": tally.records,
        "dropped": dict(tally.dropped.most_common()),
        "first_dropped": tally.first_dropped,
        "used_in_part": dict(tally.cut.most_common()),
        **{name: split.statistics(rows[name]) for name, split in parts.items()},
    }
    return Prepared(**rows, report=report)


def _fit_chats(documents: Documents, template: ChatTemplate) -> Documents:
    """Cuts chats where the template leaves something out, and counts them."""
    tally, parts = documents.tally, {name: list[Document]() for name in _PARTS}
    for name, kept in parts.items():
        for document in getattr(documents, name):
            fitted, left_out = document, ""
            if isinstance(document, Chat):
                fitted, left_out = fit_chat(document, template)
            tally.cut.update([left_out] if left_out else [])
            if isinstance(fitted, Broken):
                tally.drop(_excerpt(document), fitted)
            else:
                kept.append(fitted)
    return Documents(**parts, tally=tally)


class _Part:
    """The sequences of one side of the split."""

    def __init__(self, config: DataConfig, packing: str, vocab_size: int, tally: Tally) -> None:
        self._config, self._packing = config, packing
        self._vocab_size, self._tally = vocab_size, tally
        self._most = None if packing == "stream" else config.sequence_length
        self._sequences: list[Tokens] = []
        self._lengths: list[int] = []
        self._split = 0

    def add(self, document: Document, sequences: list[Tokens] | Broken) -> None:
        """Keeps the first tokens of each sequence that has a trained token."""
        if isinstance(sequences, Broken):
            self._tally.drop(_excerpt(document), sequences)
            return
        num_sequences = len(self._sequences)
        for sequence in sequences:
            _check_vocabulary(document, sequence.ids, self._vocab_size)
            trained = sequence.trained | (self._config.train_on == "all")
            if trained[: self._most].any():
                ids, trained = sequence.ids[: self._most], trained[: self._most]
                self._sequences.append(Tokens(ids, trained))
                self._lengths.append(len(sequence.ids))
        if len(self._sequences) == num_sequences:
            where = f"the first {self._most} tokens" if self._most else "it"
            self._tally.drop(_excerpt(document), Broken(f"nothing to learn in {where}"))
        self._split += len(sequences) > 1

    def rows(self) -> Rows:
        return make_rows(self._sequences, self._config.sequence_length, self._packing)

    def statistics(self, rows: Rows) -> dict[str, Any]:
        """Measures documents: lengths, trained share, packing."""
        lengths = np.asarray(self._lengths)
        quantiles = np.percentile(lengths, [50, 90, 99, 100], method="lower").tolist()
        is_text = rows.documents > 0
        return {
            "documents": len(lengths),
            "tokens": int(is_text.sum()),
            "learnt": round(float(rows.loss_mask.sum() / is_text.sum()), 4),
            "lengths": dict(zip(("p50", "p90", "p99", "longest"), quantiles, strict=True)),
            "truncated": 0 if self._most is None else int((lengths > self._most).sum()),
            "split_by_answer": self._split,
            "rows": len(rows),
            "filled": round(float(is_text.mean()), 4),
        }


def _excerpt(document: Document) -> str:
    return repr(content_key(document)[:60])


def _check_vocabulary(document: Document, ids: np.ndarray, vocab_size: int) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise UserError(
            f"{_excerpt(document)}: want token ids of 0 to {vocab_size - 1}, got {outside[0]}; "
            "tokenise with the target's own tokenizer"
        )


def _check_share(config: DataConfig, rows: Rows) -> None:
    share = rows.loss_mask.sum() / (rows.documents > 0).sum()
    if not 0 < share < 1:
        raise UserError(
            f"data.source {config.source!r}: want to train on some of the tokens, not all; got "
            f"{share:.0%} of them; check the chat template or set data.train_on: all"
        )


def _refuse_spelled_out(texts: Sequence[Any], config: DataConfig, tokenizer: Any) -> None:
    """Refuses plain texts most of which spell out special tokens: they are chats."""
    if config.format != "auto" or config.is_code:
        return
    pattern = special_pattern(tokenizer)
    marks = [match for text in texts[:_LOOKED_AT] if (match := pattern.search(text))]
    if 2 * len(marks) > len(texts[:_LOOKED_AT]):
        raise UserError(
            f"data.source {config.source!r}: texts spell out {marks[0].group()!r}, like chats that "
            "a template has written; set data.format to rendered (or to text, if they are not)"
        )


def _fingerprint(
    config: DataConfig, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]
) -> str:
    """Hash of all that decides the rows except the source's content."""
    template = config.template
    if template is not None and (path := as_path(template)).is_file():
        template = read_text(path)
    parts = [
        config_to_dict(config),
        template,
        tokenizer.chat_template,
        vocab_size,
        sorted(tokenizer.get_vocab().items()),
        sorted(stop_ids),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write(path: AnyPath, prepared: Prepared, made_from: str) -> None:
    """Writes the file atomically."""
    arrays = {
        f"{split}/{name}": array
        for split in _PARTS
        for name, array in vars(getattr(prepared, split)).items()
    }
    metadata = {"made_from": made_from, "report": json.dumps(prepared.report)}
    with replaced(path) as partial, partial.open("wb") as file:
        np.savez(file, **metadata, **arrays)


def _read(path: AnyPath, made_from: str) -> Prepared:
    try:
        with path.open("rb") as file, np.load(file) as saved:
            arrays = dict(saved)
        rows = {
            split: Rows(**{field.name: arrays[f"{split}/{field.name}"] for field in fields(Rows)})
            for split in _PARTS
        }
        report, saved_from = json.loads(str(arrays["report"])), str(arrays["made_from"])
    except Exception as error:  # zipfile raises many kinds on damaged headers
        raise UserError(
            f"{path}: want the rows of this run, got a damaged file ({one_line(error)}); remove it "
            "to make them again from the same source"
        ) from error
    if saved_from != made_from:
        raise UserError(
            f"{path}: these rows were made with another tokenizer, template or data section; "
            "start from scratch with --overwrite"
        )
    return Prepared(**rows, report=report)
