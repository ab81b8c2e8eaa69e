"""Records of every format -> documents: plain texts, chats, or tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np

from poss_jax.config.json_reading import JsonError, parse_json
from poss_jax.config.reading import one_line

Message = dict[str, Any]
"""A turn: "role", "content" (text, or parts {"type": "text", "text"}), and its other fields."""


@dataclass(frozen=True)
class Broken:
    """A record that cannot be used."""

    reason: str  # reason to count
    detail: str = ""  # details of this record

    def __str__(self) -> str:
        return f"{self.reason}: {one_line(self.detail)}" if self.detail else self.reason


@dataclass(frozen=True)
class Chat:
    """A conversation: optionally a system message, then alternating user and assistant turns.

    Tool results may stand between two turns of the assistant.
    """

    messages: list[Message]  # turns; the last is a trained assistant turn
    tools: list[Any] | None = None  # what the assistant may call, as JSON schemas; None: nothing


@dataclass(frozen=True)
class Rendered:
    """A chat already rendered by a template, special tokens spelled out."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """A tokenised document."""

    ids: np.ndarray  # [length] int64
    trained: np.ndarray  # [length] bool; True for trained tokens


Document = str | Rendered | Chat | Tokens

ROLES = {
    "system": "system",
    **dict.fromkeys(["user", "human", "prompter"], "user"),
    **dict.fromkeys(["assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model"], "assistant"),
    "tool": "tool",
}
CALLS = ("tool_calls", "function_call")  # fields of a turn
_TRAINED = ("weight", "train")  # fields that say whether a turn is trained on
_TEXT_PARTS = ("text", "input_text", "output_text")
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
    """Names the format of a record by its keys; None if unknown."""
    if _turns(record) is not None:
        return "chat"
    if "input_ids" in record:
        return "tokens"
    if _pair_keys(record):
        return "pairs"
    return "text" if "text" in record else None


def read_document(record: dict[str, Any], kind: str | None) -> tuple[Document | Broken, str]:
    """Reads a record of a format.

    A chat is used up to its first unusable turn.

    Args:
      kind: the data set's format; None if it is not known.

    Returns:
      The document, and why a part of it was left out ("" if it is whole).
    """
    match kind:
        case "chat":
            turns = _turns(record)
            if not turns:
                return Broken("no list of messages" if turns is None else "empty conversation"), ""
            messages, oddity = _read_turns(turns)
            if messages := end_with_answer(messages):
                return _make_chat(record, messages), oddity.reason if oddity else ""
            return oddity or Broken("no answer to train on"), ""
        case "pairs":
            return _read_pair(record), "earlier turns in 'history'" if record.get("history") else ""
        case "tokens":
            return _read_tokens(record), ""
        case "text" | "rendered":
            text = record.get("text")
            if not isinstance(text, str):
                return Broken("no string 'text'"), ""
            if not text.strip():
                return Broken("empty text"), ""
            return text if kind == "text" else Rendered(text), ""
    return Broken("no known format", f"keys {', '.join(record)[:80]}"), ""


def read_questions(record: dict[str, Any]) -> list[Message] | Broken:
    """Reads the questions of a chat, answered or not: optionally a system message, then user turns.

    Besides chats and pairs it reads `turns` (a list of texts) and single questions.
    """
    asked = Broken("tools with a question") if _read_tools(record) else _read_asked(record)
    return asked if isinstance(asked, Broken) else _with_system(record, asked)


def content_key(document: Document) -> str:
    """A text that is equal only for equal documents."""
    match document:
        case Chat():
            content = [document.messages, document.tools] if document.tools else document.messages
            return json.dumps(content, ensure_ascii=False, default=str)
        case Tokens():
            return json.dumps(document.ids.tolist())
        case Rendered():
            return document.text
    return document


def plain_texts(documents: Sequence[Document]) -> list[str]:
    """Texts of documents, to train a tokenizer or cut prompts from; without tokenised ones."""
    texts = []
    for document in documents:
        if isinstance(document, Chat):
            turns = (f"### {turn['role']}\n{plain_text(turn)}\n" for turn in document.messages)
            texts.append("".join(turns))
        elif not isinstance(document, Tokens):
            texts.append(content_key(document))
    return texts


def plain_text(message: Message) -> str:
    """The content of a turn, its parts joined; "" if there is none."""
    content = message.get("content", "")
    return content if isinstance(content, str) else "".join(piece["text"] for piece in content)


def is_trained(message: Message) -> bool:
    """True for an assistant turn that `weight` and `train` do not exclude."""
    return message["role"] == "assistant" and all(message.get(key, 1) for key in _TRAINED)


def end_with_answer(messages: Sequence[Message]) -> list[Message]:
    """Drops the turns after the last trained answer."""
    count = max((i for i, turn in enumerate(messages, start=1) if is_trained(turn)), default=0)
    return list(messages[:count])


def _read_asked(record: dict[str, Any]) -> list[Message] | Broken:
    turns = _turns(record)
    if turns is None and isinstance(record.get("turns"), list):
        asked: list[Message] = []
        for text in record["turns"]:
            message = _read_turn({"role": "user", "content": text}, previous_role=None)
            if isinstance(message, Broken):  # questions are read up to the first invalid one
                return asked or message
            asked.append(message | {"content": plain_text(message)})
        return asked or Broken("empty conversation")
    if turns is None:
        question = _read_question(record)
        return question if isinstance(question, Broken) else [question]
    messages, oddity = _read_turns(turns)
    without_tools = takewhile(lambda turn: turn["role"] != "tool" and not _calls(turn), messages)
    asked = [
        turn | {"content": plain_text(turn)}
        for turn in without_tools
        if turn["role"] != "assistant"
    ]
    if asked and asked[-1]["role"] == "user":
        return asked
    return oddity or Broken("empty conversation")


def _with_system(record: dict[str, Any], messages: list[Message]) -> list[Message]:
    """Turns a record's `system` field into the system message, unless the chat has one."""
    text = record.get("system")
    if not isinstance(text, str) or not text.strip() or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": text}, *messages]


def _turns(record: dict[str, Any]) -> list[Any] | None:
    """Raw turns of a chat; None for any other record."""
    return next((record[key] for key in _CHAT_KEYS if isinstance(record.get(key), list)), None)


def _make_chat(record: dict[str, Any], messages: list[Message]) -> Chat | Broken:
    """Builds a chat from its turns and the record's other fields."""
    tools = _read_tools(record)
    return tools if isinstance(tools, Broken) else Chat(_with_system(record, messages), tools)


def _read_tools(record: dict[str, Any]) -> list[Any] | Broken | None:
    """Reads the tools of a record, a list or its JSON; empty means none."""
    tools = record.get("tools")
    if record.get("functions"):
        return Broken("functions with a chat, which no template takes; give tools")
    try:
        tools = parse_json(tools.strip() or "null") if isinstance(tools, str) else tools
    except JsonError as error:
        return Broken("tools that are not a list", str(error))
    if tools and not isinstance(tools, list):
        return Broken("tools that are not a list", type(tools).__name__)
    return tools if isinstance(tools, list) and tools else None


def _read_turns(turns: list[Any]) -> tuple[list[Message], Broken | None]:
    """Reads turns up to the first unusable one, such as an assistant who begins."""
    messages: list[Message] = []
    oddity = None
    for turn in turns:
        message = _read_turn(turn, previous_role=messages[-1]["role"] if messages else None)
        if isinstance(message, Broken):
            oddity = message
            if message is _ASSISTANT_FIRST:
                continue
            break
        messages.append(message)
    return messages, oddity


def _read_turn(turn: Any, *, previous_role: str | None) -> Message | Broken:
    """Reads a turn that follows one of the role `previous_role`; its other fields are kept."""
    fields = turn if isinstance(turn, dict) else {}
    fields = {key: value for key, value in fields.items() if value is not None}
    name, content = (
        fields.pop(first, fields.pop(second, None))
        for first, second in (("role", "from"), ("content", "value"))
    )
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        return Broken("unknown role", str(name)[:20])
    content = _read_content(content)
    if content is not None:
        fields = {"content": content, **fields}
    message = {"role": role, **fields}
    calls = _calls(message)
    if content is None and not calls:
        return Broken("a turn without text")
    if role == "assistant" and previous_role in (None, "system"):
        return _ASSISTANT_FIRST
    if role == previous_role != "tool":
        return Broken(f"two {role} turns in a row")
    if role == "system" and previous_role is not None:
        return Broken("a system turn inside")
    if role == "tool" and previous_role not in ("assistant", "tool"):
        return Broken("the result of a tool that was not called")
    if role in ("user", "assistant") and not (plain_text(message).strip() or calls):
        return Broken("an empty turn")
    if role == "assistant" and any(message.get(key, 1) not in (0, 1) for key in _TRAINED):
        return Broken("a weight that is not 0 or 1")
    return message


def _calls(message: Message) -> bool:
    """True if a turn calls tools."""
    return message["role"] == "assistant" and any(message.get(key) for key in CALLS)


def _read_content(content: Any) -> str | list[dict[str, str]] | None:
    """Reads the content of a turn, whose parts must be text; None if invalid."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    pieces = [piece for piece in content if isinstance(piece, dict)]
    texts = [piece.get("text") for piece in pieces if piece.get("type", "text") in _TEXT_PARTS]
    texts = [text for text in texts if isinstance(text, str)]
    is_text = 0 < len(texts) == len(content)
    return [{"type": "text", "text": text} for text in texts] if is_text else None


def _pair_keys(record: dict[str, Any]) -> tuple[str, str] | None:
    """Finds the keys of question and answer; tables of mixed layouts may have empty ones."""
    present = [pair for pair in _PAIRS if all(key in record for key in pair)]
    return min(present, key=lambda pair: any(record[key] is None for key in pair), default=None)


def _read_pair(record: dict[str, Any]) -> Chat | Broken:
    keys = _pair_keys(record)
    if keys is None:
        return Broken("no question and answer")
    question = _read_question(record)
    answer = _read_turn({"role": "assistant", "content": record[keys[1]]}, previous_role="user")
    if isinstance(question, Broken):
        return question
    return answer if isinstance(answer, Broken) else _make_chat(record, [question, answer])


def _read_question(record: dict[str, Any]) -> Message | Broken:
    both = _pair_keys(record)  # the answer may be missing
    keys = [both[0]] if both else [key for key, _ in _PAIRS if record.get(key) is not None]
    question = record[keys[0]] if keys else None
    context = next((record[key] for key in _PAIR_CONTEXTS if record.get(key)), "")
    if not (isinstance(question, str) and isinstance(context, str)):
        return Broken("no question" if question is None else "a turn without text")
    if not question.strip():
        return Broken("an empty turn")
    return {"role": "user", "content": f"{question}\n\n{context}" if context else question}


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
