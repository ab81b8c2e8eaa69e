"""Chats -> text by a chat template.

A template is a program that comes with a model. Jinja's sandbox keeps it from files and Python, as
in `transformers`; nothing limits its time and memory.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

from jinja2 import TemplateError

from poss_jax.config.reading import one_line


class RenderError(Exception):
    """A template cannot render a chat; the message is one line."""


class Step(NamedTuple):
    """A prefix of a chat to render.

    Attributes:
      end: number of messages in it.
      is_asking: add the generation prompt.
    """

    end: int
    is_asking: bool


class Part(NamedTuple):
    """A rendered text, given by its difference from the one before.

    Attributes:
      shared: length of the common prefix; 0 for the first text.
      text: what follows them.
    """

    shared: int
    text: str


def render_chat(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    *,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
    is_asking: bool,
) -> str:
    """Renders a whole chat (see `render_steps`)."""
    settings: Any = {"template": template, "tools": tools, "variables": variables}
    return render_steps(tokenizer, messages, [Step(len(messages), is_asking)], **settings)[0].text


def render_steps(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    steps: Sequence[Step],
    *,
    template: str | None = None,
    tools: Sequence[Any] | None = None,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> list[Part]:
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
    parts, previous = list[Part](), ""
    try:
        chosen = tokenizer.get_chat_template(template, tools)
        settings = dict(variables) | tokenizer.special_tokens_map
        settings |= {"chat_template": chosen, "tools": tools}
        for end, is_asking in steps:
            settings["add_generation_prompt"] = is_asking
            (text,), _ = render_jinja_template(conversations=[chat[:end]], **settings)
            text.encode()
            parts.append(_difference(previous, text))
            previous = text
    except UnicodeEncodeError as error:
        raise RenderError(f"want text as UTF-8, got half a character ({error.reason})") from error
    except (TemplateError, ValueError) as error:
        raise RenderError(one_line(error)) from error
    except Exception as error:  # any error of the template's operations
        raise RenderError(f"{type(error).__name__}: {one_line(error)}") from error
    return parts


def join_parts(parts: Sequence[Part]) -> list[str]:
    """Whole texts of parts, the first of which shares nothing."""
    texts = accumulate(parts, lambda text, piece: text[: piece.shared] + piece.text, initial="")
    return [*texts][1:]


def _difference(previous: str, text: str) -> Part:
    """Compares a text with the one before, by halves."""
    low, high = 0, min(len(previous), len(text))
    while low < high:
        middle = (low + high + 1) // 2
        is_same = previous[low:middle] == text[low:middle]
        low, high = (middle, high) if is_same else (low, middle - 1)
    return Part(low, text[low:])
