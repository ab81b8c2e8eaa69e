"""The rows of a run: made once, kept in its folder, the same on resume."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from poss_jax.checkpoint.whole import replaced
from poss_jax.config.data import DataConfig
from poss_jax.config.paths import AnyPath, as_path, read_text
from poss_jax.config.reading import UserError, config_to_dict, one_line
from poss_jax.data.conversations import (
    CALLS,
    Broken,
    Chat,
    Document,
    Message,
    Rendered,
    Tokens,
    content_key,
    end_with_answer,
    plain_text,
)
from poss_jax.data.records import Documents, load_documents
from poss_jax.data.rendering import RenderError, label_names, make_label
from poss_jax.data.rows import Rows, encode_documents, make_rows
from poss_jax.data.templates import ChatTemplate
from poss_jax.data.tokenizer import special_pattern

_FILE = "data.npz"
_PARTS = ("train", "validation")
_LOOKED_AT = 100  # texts inspected to see whether they are chats
_FIELDS = {  # of an assistant turn
    "tool calls": CALLS,
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
}


@dataclass(frozen=True)
class Prepared:
    """Rows of a run."""

    train: Rows
    validation: Rows  # held out
    report: dict[str, Any]  # records used and dropped; lengths, packing, trained share


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
    template = config.template
    if template is not None and (file := as_path(template)).is_file():
        template = read_text(file)
    decides = [  # all that decides the rows except the source's content
        config_to_dict(config),
        template,
        tokenizer.chat_template,
        vocab_size,
        sorted(tokenizer.get_vocab().items()),
        sorted(stop_ids),
    ]
    made_from = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
    if path.exists():
        return _read(path, made_from)
    documents = load() if load else load_documents(config)
    prepared = make_prepared(documents, config, tokenizer, vocab_size, stop_ids)
    arrays = {
        f"{split}/{name}": array
        for split in _PARTS
        for name, array in vars(getattr(prepared, split)).items()
    }
    with replaced(path) as partial, partial.open("wb") as file:
        np.savez(file, made_from=made_from, report=json.dumps(prepared.report), **arrays)
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
    limit = None if packing == "stream" else config.sequence_length
    sides = {name: _Sequences() for name in _PARTS}
    for name, side in sides.items():
        split = getattr(documents, name)
        for document, encoded in zip(
            split, encode_documents(split, tokenizer, template), strict=True
        ):
            if isinstance(encoded, list):
                _check_vocabulary(document, encoded, vocab_size)
                encoded = side.add(encoded, limit, trains_all=config.train_on == "all")
            if isinstance(encoded, Broken):
                tally.drop(_excerpt(document), encoded)
    tally.check(config.max_dropped)
    length = config.sequence_length
    rows = {name: make_rows(side.kept, length, packing) for name, side in sides.items()}
    if not isinstance(first, str) and config.train_on == "assistant":
        share = rows["train"].loss_mask.sum() / (rows["train"].documents > 0).sum()
        if not 0 < share < 1:
            raise UserError(
                f"data.source {config.source!r}: want to train on some of the tokens, not all; got "
                f"{share:.0%} of them; check the chat template or set data.train_on: all"
            )
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
        **{name: side.statistics(rows[name], limit) for name, side in sides.items()},
    }
    return Prepared(**rows, report=report)


def _fit_chats(documents: Documents, template: ChatTemplate) -> Documents:
    """Cuts chats where the template leaves something out, and counts them."""
    tally, sides = documents.tally, {name: list[Document]() for name in _PARTS}
    for name, kept in sides.items():
        for document in getattr(documents, name):
            fitted, left_out = document, ""
            if isinstance(document, Chat):
                fitted, left_out = fit_chat(document, template)
            tally.cut.update([left_out] if left_out else [])
            if isinstance(fitted, Broken):
                tally.drop(_excerpt(document), fitted)
            else:
                kept.append(fitted)
    return Documents(**sides, tally=tally)


def fit_chat(chat: Chat, template: ChatTemplate) -> tuple[Chat | Broken, str]:
    """Cuts a chat before the first turn that the template does not write in full.

    The template writes the chat once more, with a label behind each text that it may leave out.

    Returns:
      The chat, and why a part of it was left out ("" if it is whole); or why none can be used.
    """
    fields: list[tuple[int, int, str]] = []  # turn, its text among `write_answers`, kind of field
    tools = label_names(chat.tools, make_label(0))
    if chat.tools:
        fields.append((0, 0, "tools"))
    messages, num_answered = list[Message](), 0
    for index, turn in enumerate(chat.messages):
        if turn["role"] == "tool" and plain_text(turn).strip():
            turn = turn | {"content": plain_text(turn) + make_label(len(fields))}
            fields.append((index, 2 * num_answered, "results of tools"))
        elif turn["role"] == "assistant":
            for what, keys in _FIELDS.items():
                if held := {key: turn[key] for key in keys if turn.get(key)}:
                    label = make_label(len(fields))
                    turn = turn | {key: _add_label(value, label) for key, value in held.items()}
                    fields.append((index, 2 * num_answered + 1, what))
            num_answered += 1
        messages.append(turn)
    try:
        labelled = replace(chat, messages=messages, tools=tools)
        texts = template.write_answers(labelled) if fields else []
    except RenderError:  # `render` will say why
        return chat, ""
    missing = [
        (index, what)
        for number, (index, text_index, what) in enumerate(fields)
        if make_label(number) not in texts[text_index]
    ]
    if not missing:
        return chat, ""
    end, what = min(missing)
    why, messages = f"{what} that the chat template leaves out", chat.messages[:end]
    if messages := end_with_answer(messages):
        return replace(chat, messages=messages), why
    return Broken(why), ""


def _add_label(value: Any, label: str) -> Any:
    return value + label if isinstance(value, str) else label_names(value, label)


@dataclass
class _Sequences:
    """The sequences of one side of the split."""

    kept: list[Tokens] = field(default_factory=list)  # those with a trained token, cut to a row
    lengths: list[int] = field(default_factory=list)  # their lengths before they were cut
    num_split: int = 0  # documents of several sequences

    def add(self, sequences: list[Tokens], limit: int | None, *, trains_all: bool) -> Broken | None:
        """Keeps the first `limit` tokens of a document's sequences; Broken: it has none to keep."""
        num_kept = len(self.kept)
        for sequence in sequences:
            trained = (sequence.trained | trains_all)[:limit]
            if trained.any():
                self.kept.append(Tokens(sequence.ids[:limit], trained))
                self.lengths.append(len(sequence.ids))
        self.num_split += len(sequences) > 1
        if len(self.kept) > num_kept:
            return None
        return Broken(f"nothing to learn in {f'the first {limit} tokens' if limit else 'it'}")

    def statistics(self, rows: Rows, limit: int | None) -> dict[str, Any]:
        """Measures documents: lengths, trained share, packing."""
        lengths = np.asarray(self.lengths)
        quantiles = np.percentile(lengths, [50, 90, 99, 100], method="lower").tolist()
        is_text = rows.documents > 0
        return {
            "documents": len(lengths),
            "tokens": int(is_text.sum()),
            "learnt": round(float(rows.loss_mask.sum() / is_text.sum()), 4),
            "lengths": dict(zip(("p50", "p90", "p99", "longest"), quantiles, strict=True)),
            "truncated": 0 if limit is None else int((lengths > limit).sum()),
            "split_by_answer": self.num_split,
            "rows": len(rows),
            "filled": round(float(is_text.mean()), 4),
        }


def _excerpt(document: Document) -> str:
    return repr(content_key(document)[:60])


def _check_vocabulary(document: Document, sequences: list[Tokens], vocab_size: int) -> None:
    for sequence in sequences:
        outside = sequence.ids[(sequence.ids < 0) | (sequence.ids >= vocab_size)]
        if len(outside):
            raise UserError(
                f"{_excerpt(document)}: want token ids of 0 to {vocab_size - 1}, got {outside[0]}; "
                "tokenise with the target's own tokenizer"
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


def _read(path: AnyPath, made_from: str) -> Prepared:
    try:
        with path.open("rb") as file, np.load(file) as saved:
            arrays = dict(saved)
        rows = {
            split: Rows(**{each.name: arrays[f"{split}/{each.name}"] for each in fields(Rows)})
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
