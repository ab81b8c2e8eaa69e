"""Records of every format -> documents: plain texts, chats, or tokens."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poss_jax.data.records import Broken

Message = dict[str, str]


@dataclass(frozen=True)
class Chat:
    """A conversation: optionally a system message, then users' and assistants' turns in turn.

    Attributes:
      messages: {"role", "content"}; the last one is an assistant's.
    """

    messages: list[Message]


@dataclass(frozen=True)
class Rendered:
    """A chat as a template has written it already, special tokens spelled out."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A tokenised document.

    Attributes:
      ids: [length] int64.
      trained: [length] bool; True where a token is trained on.
      file: which has the target's features of them; "": none has.
    """

    ids: np.ndarray
    trained: np.ndarray
    file: str = ""


Document = str | Rendered | Chat | Tokens

ROLES = {
    "system": "system",
    **dict.fromkeys(["user", "human", "prompter"], "user"),
    **dict.fromkeys(["assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"], "assistant"),
}
_CHAT_KEYS = ("messages", "conversations", "conversation")
_PAIRS = (
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
)
_PAIR_CONTEXTS = ("input", "context")
_ASSISTANT_FIRST = Broken("begins with the assistant")


def detect_format(record: dict[str, Any]) -> str | None:
    """Names the format of a record by its keys; None if it is of none."""
    if _turns(record) is not None:
        return "chat"
    if "input_ids" in record:
        return "tokens"
    if _pair_keys(record):
        return "pairs"
    return "text" if "text" in record else None


def read_document(record: dict[str, Any], kind: str | None) -> tuple[Document | Broken, str]:
    """Reads a record of a format.

    A chat is used up to its first oddity; the turns before it are good.

    Args:
      record: record of a data set.
      kind: the data set's format; None if it is not known.

    Returns:
      The document, and why a part of it was left out ("" if it is whole).
    """
    if kind == "chat":
        return _read_chat(record)
    if kind == "pairs":
        return _read_pair(record), "earlier turns in 'history'" if record.get("history") else ""
    return _READERS.get(kind, _read_unknown)(record), ""


def read_questions(record: dict[str, Any]) -> list[Message] | Broken:
    """Reads what a chat asks, answered or not: optionally a system message, then users' turns.

    Beside chats and pairs it knows `turns` (a list of texts) and questions that stand alone.
    """
    asked = _read_asked(record)
    return asked if isinstance(asked, Broken) else _with_system(record, asked)


def content_key(document: Document) -> str:
    """A text that two documents share only if they are the same."""
    match document:
        case Chat():
            return json.dumps(document.messages, ensure_ascii=False)
        case Tokens():
            return json.dumps(document.ids.tolist())
        case Rendered():
            return document.text
    return document


def plain_texts(documents: Sequence[Document]) -> list[str]:
    """Texts of documents, to train a tokenizer on or to cut prompts from; tokens have none."""
    texts = []
    for document in documents:
        if isinstance(document, Chat):
            turns = (f"### {turn['role']}\n{turn['content']}\n" for turn in document.messages)
            texts.append("".join(turns))
        elif not isinstance(document, Tokens):
            texts.append(content_key(document))
    return texts


def _read_asked(record: dict[str, Any]) -> list[Message] | Broken:
    turns = _turns(record)
    if turns is None and isinstance(record.get("turns"), list):
        return _read_user_turns(record["turns"])
    if turns is None:
        question = _read_question(record)
        return question if isinstance(question, Broken) else [question]
    messages, oddity = _read_turns(turns)
    asked = [message for message in messages if message["role"] != "assistant"]
    if asked and asked[-1]["role"] == "user":
        return asked
    return oddity or Broken("empty conversation")


def _with_system(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Puts the system message that stands beside a chat before it, unless it has one."""
    text = record.get("system")
    if not isinstance(text, str) or not text.strip() or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def _turns(record: dict[str, Any]) -> list[Any] | None:
    """Turns of a chat, as they stand; None for any other record."""
    return next((record[key] for key in _CHAT_KEYS if isinstance(record.get(key), list)), None)


def _read_chat(record: dict[str, Any]) -> tuple[Chat | Broken, str]:
    turns = _turns(record)
    if not turns:
        return Broken("no list of messages" if turns is None else "empty conversation"), ""
    messages, oddity = _read_turns(turns)
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if messages:
        return Chat(_with_system(record, messages)), oddity.reason if oddity else ""
    return oddity or Broken("no answer"), ""


def _read_turns(turns: list[Any]) -> tuple[list[Message], Broken | None]:
    """Reads turns up to the first oddity, which may be that the assistant begins."""
    messages: list[Message] = []
    oddity = None
    for turn in turns:
        message = _read_turn(turn, after=messages[-1]["role"] if messages else None)
        if isinstance(message, Broken):
            oddity = message
            if message is _ASSISTANT_FIRST:
                continue
            break
        if message["content"]:
            messages.append(message)
    return messages, oddity


def _read_user_turns(texts: list[Any]) -> list[Message] | Broken:
    """Reads questions up to the first that is not one."""
    asked: list[Message] = []
    for text in texts:
        message = _read_turn({"role": "user", "content": text}, after=None)
        if isinstance(message, Broken):
            return asked or message
        asked.append(message)
    return asked or Broken("empty conversation")


def _read_turn(turn: Any, *, after: str | None) -> Message | Broken:
    """Reads a turn that follows one of the role `after`; only a system's may come out empty."""
    fields = turn if isinstance(turn, dict) else {}
    fields = {key: value for key, value in fields.items() if value is not None}
    name = fields.get("role", fields.get("from"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    text = _join_parts(fields.get("content", fields.get("value")))
    if role is None:
        return Broken("unknown role", str(name)[:20])
    if not isinstance(text, str):
        return Broken("a turn without text")
    if role == "assistant" and after in (None, "system"):
        return _ASSISTANT_FIRST
    if role == after:
        return Broken(f"two {role} turns in a row")
    if role == "system" and after is not None:
        return Broken("a system turn inside")
    if role != "system" and not text.strip():
        return Broken("an empty turn")
    return {"role": role, "content": text if text.strip() else ""}


def _join_parts(content: Any) -> Any:
    """Joins content that comes in parts of text."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(map(str, texts)) if is_text else None


def _pair_keys(record: dict[str, Any]) -> tuple[str, str] | None:
    """Finds the keys of question and answer; a table of several layouts has empty ones, too."""
    found = [pair for pair in _PAIRS if all(key in record for key in pair)]
    return min(found, key=lambda pair: any(record[key] is None for key in pair), default=None)


def _read_pair(record: dict[str, Any]) -> Chat | Broken:
    keys = _pair_keys(record)
    if keys is None:
        return Broken("no question and answer")
    question, answer = _read_question(record), record[keys[1]]
    if isinstance(question, Broken):
        return question
    if not isinstance(answer, str):
        return Broken("a turn without text")
    if not answer.strip():
        return Broken("an empty turn")
    return Chat(_with_system(record, [question, {"role": "assistant", "content": answer}]))


def _read_question(record: dict[str, Any]) -> Message | Broken:
    both = _pair_keys(record)  # a question may stand without an answer, to be asked
    keys = [both[0]] if both else [key for key, _ in _PAIRS if record.get(key) is not None]
    question = record[keys[0]] if keys else None
    context = next((record[key] for key in _PAIR_CONTEXTS if record.get(key)), "")
    if not (isinstance(question, str) and isinstance(context, str)):
        return Broken("no question" if question is None else "a turn without text")
    if not question.strip():
        return Broken("an empty turn")
    return {"role": "user", "content": f"{question}\n\n{context}" if context else question}


def _read_text(record: dict[str, Any]) -> str | Broken:
    text = record.get("text")
    if not isinstance(text, str):
        return Broken("no string 'text'")
    return text if text.strip() else Broken("empty text")


def _read_tokens(record: dict[str, Any]) -> Tokens | Broken:
    try:
        ids, trained = (np.asarray(record.get(key)) for key in ("input_ids", "loss_mask"))
    except ValueError:  # lists of unequal length
        return Broken("input_ids and loss_mask are not lists of numbers")
    if ids.dtype.kind != "i" or trained.dtype.kind not in "ib" or ids.ndim != 1:
        return Broken("input_ids and loss_mask are not lists of numbers")
    if ids.shape != trained.shape or not len(ids):
        return Broken("input_ids and loss_mask of different length, or empty")
    if not np.isin(trained, (0, 1)).all():
        return Broken("a loss_mask that is not 0 or 1")
    return Tokens(ids.astype(np.int64), trained.astype(bool))


def _read_rendered(record: dict[str, Any]) -> Rendered | Broken:
    text = _read_text(record)
    return text if isinstance(text, Broken) else Rendered(text)


def _read_unknown(record: dict[str, Any]) -> Broken:
    return Broken("no known format", f"keys {', '.join(record)[:80]}")


_READERS: dict[str | None, Callable[[dict[str, Any]], Document | Broken]] = {
    "tokens": _read_tokens,
    "text": _read_text,
    "rendered": _read_rendered,
}
