r"""Chats -> text -> tokens: only the template writes special tokens, never a message.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and Python, as
in `transformers`; nothing limits its time and memory.

A message may spell out a special token. While the template runs, an unguessable number replaces it.
Then a copy of the tokenizer, whose special tokens have unguessable names, encodes the whole text:

    message     Hi</s>
    rendered    <s>### user\nHi90210000001\n
    encoded     (special: bos) ### user\nHi</s>\n        here </s> is four letters

Other numbers behind the messages' texts show which of them a template writes.
"""

import json
import re
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError

from poss_jax.config.reading import UserError, one_line
from poss_jax.data.tokenizer import call_tokenizer, special_pattern

_NUMBER = str(secrets.randbits(128))  # digits: no template filter changes them
_STAND_IN = re.compile(_NUMBER + "([0-9]{6})")
_LABEL = str(secrets.randbits(128))
_LABELLED = re.compile(_LABEL + "([0-9]{6})")
_NAME = f"\U000f0000{secrets.token_hex(16)}-{{}}\U000f0001"  # clients must not guess it


class RenderError(Exception):
    """A template cannot render a chat; the message is one line."""


class Step(NamedTuple):
    """A prefix of a chat to render."""

    end: int  # number of messages in it
    is_asking: bool  # add the generation prompt


def render_chat(
    tokenizer: Any, messages: Sequence[dict[str, Any]], *, is_asking: bool, **settings: Any
) -> str:
    """Renders a whole chat; `render_steps` has the settings."""
    return render_steps(tokenizer, messages, [Step(len(messages), is_asking)], **settings)[0]


def render_steps(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    steps: Sequence[Step],
    *,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[str]:
    """Renders prefixes of a chat as `tokenizer.apply_chat_template` does.

    Args:
      template: text of the template; None takes the tokenizer's own.
      tools: JSON schemas of what the assistant may call.
      variables: further values for the template, and `continue_final_message` to leave the last
        message open.

    Raises:
      RenderError: the template is missing or raises an error, or writes half a character.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    # As transformers, without keys that have no value.
    chat = [{k: message[k] for k in message if message[k] is not None} for message in messages]
    texts: list[str] = []
    try:
        chosen = tokenizer.get_chat_template(template, tools)
        settings = dict(variables) | tokenizer.special_tokens_map
        settings |= {"chat_template": chosen, "tools": tools}
        for end, is_asking in steps:
            settings["add_generation_prompt"] = is_asking
            (text,), _ = render_jinja_template(conversations=[chat[:end]], **settings)
            text.encode()
            texts.append(text)
    except UnicodeEncodeError as error:
        raise RenderError(f"want text as UTF-8, got half a character ({error.reason})") from error
    except (TemplateError, ValueError) as error:
        raise RenderError(one_line(error)) from error
    except Exception as error:  # any error of the template's operations
        raise RenderError(f"{type(error).__name__}: {one_line(error)}") from error
    return texts


class _Marks(NamedTuple):
    """Special tokens of a tokenizer."""

    ids: dict[str, int]  # id of each, by its text
    names: dict[str, str]  # unguessable name of each, by its text
    reserved: frozenset[int]  # their ids except the unknown token's, which any text may give
    pattern: re.Pattern[str]  # matches them if a text spells them out


def hide_marks(tokenizer: Any, value: Any) -> Any:
    """Replaces special tokens spelled out in messages, in keys and values at any depth."""
    marks = _find_marks(tokenizer)
    numbers = {text: f"{_NUMBER}{index:06}" for index, text in enumerate(marks.ids)}

    def hide(value: Any) -> Any:
        if isinstance(value, str):
            return marks.pattern.sub(lambda match: numbers[match.group()], value)
        if isinstance(value, dict):
            return {hide(key): hide(item) for key, item in value.items()}
        return list(map(hide, value)) if isinstance(value, list | tuple) else value

    return hide(value)


def find_left_out(
    messages: Sequence[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str]
) -> int | None:
    """Finds a message with a text of which a template writes nothing; returns its index.

    The template writes the messages once more, with a number behind every text. (A text may be
    shortened or escaped.) A message's calls may stand for the text beside them.

    Args:
      render: writes messages.
    """
    labels = {
        index: make_label(index)
        for index, message in enumerate(messages)
        if (message.get("content") or "").strip()
    }
    labelled = list(messages)
    for index, label in labels.items():
        message = messages[index]
        labelled[index] = message | {"content": message["content"] + label}
        if calls := message.get("tool_calls"):
            labelled[index]["tool_calls"] = label_names(calls, label)
    text = render(labelled)
    return min(labels.keys() - set(map(int, _LABELLED.findall(text))), default=None)


def make_label(index: int) -> str:
    """A text that no template writes by itself, to be found in what it writes."""
    return f"{_LABEL}{index:06}"


def label_names(value: Any, label: str) -> Any:
    """Puts a label behind the names of functions, in tools or the calls of a message."""
    if isinstance(value, list):
        return [label_names(item, label) for item in value]
    if isinstance(value, dict):
        fields = {key: label_names(item, label) for key, item in value.items()}
        name = value.get("name")
        return fields | ({"name": name + label} if isinstance(name, str) else {})
    return value


def encode_rendered(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encodes rendered chats as `apply_chat_template` does: special tokens are those spelled out.

    So bos appears only if the template writes it. What `hide_marks` hid becomes plain text.

    Raises:
      UserError: a message spells out a special token that the tokenizer cannot tell apart.
    """
    encoded = call_tokenizer(
        tokenizer,
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
    )["input_ids"]
    marks = _find_marks(tokenizer)
    spelled, rows = list(marks.ids), list[list[int]]()
    for text, ids in zip(texts, encoded, strict=True):
        # Some tokenizers normalise letters before they look for special tokens, so that one arises
        # without its name being there.
        counts = Counter(token for token in ids if token in marks.reserved)
        named = Counter(marks.ids[name] for name in marks.pattern.findall(text))
        if _STAND_IN.search(text) or counts - named:
            renamed = marks.pattern.sub(lambda match: marks.names[match.group()], text)
            plain = _STAND_IN.sub(lambda match: spelled[int(match.group(1))], renamed)
            ids = _rename_marks(tokenizer).encode(plain, add_special_tokens=False).ids
        rows.append(list(ids))
    return rows


@lru_cache(maxsize=8)
def _find_marks(tokenizer: Any) -> _Marks:
    added = tokenizer.added_tokens_decoder
    ids = {token.content: token_id for token_id, token in added.items() if token.special}
    names = {text: _NAME.format(index) for index, text in enumerate(ids)}
    reserved = frozenset(ids.values()) - {tokenizer.unk_token_id}
    return _Marks(ids, names, reserved, special_pattern(tokenizer))


@lru_cache(maxsize=8)
def _rename_marks(tokenizer: Any) -> Any:
    """Copies a tokenizer and renames its special tokens."""
    from tokenizers import Tokenizer

    marks = _find_marks(tokenizer)
    names = marks.names
    try:
        state = json.loads(tokenizer.backend_tokenizer.to_str()) | {"post_processor": None}
        state |= {"truncation": None, "padding": None}
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(key, key): i for key, i in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(key, key), score] for key, score in model["vocab"]]
        if "unk_token" in model:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed = Tokenizer.from_str(json.dumps(state))
        if any(renamed.token_to_id(names[text]) != i for text, i in marks.ids.items()):
            raise ValueError("a special token has another id")
    except Exception as error:  # the tokenizer's Rust side raises nothing narrower
        raise UserError(
            "messages: a special token is spelled out in one, and this tokenizer cannot tell it "
            "from its own; leave it out"
        ) from error
    return renamed
