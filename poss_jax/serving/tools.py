"""Calls of tools in an answer's text -> `tool_calls`.

    hermes    Let me look. <tool_call>{"name": "f", "arguments": {}}</tool_call>
    llama3    {"name": "f", "parameters": {}}
    mistral   [TOOL_CALLS][{"name": "f", "arguments": {}}]

A call is shown once it is complete, so a malformed one can still be shown as text.
"""

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from poss_jax.config.json_reading import JsonError, check_text, parse_json
from poss_jax.config.models import ToolFormat
from poss_jax.engine.grammar import JSON_LAYOUT, Grammar

_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9  # what Mistral's templates want; others take any
_TEXT = r"TEXT: /(.|\n)*/"
_BETWEEN = " \n\t;,"  # calls without an end mark


class CallForm(NamedTuple):
    """How a model writes calls.

    Attributes:
      begin: mark before calls.
      end: mark after each; "": calls end with the answer.
      bare: letter that begins calls without a mark, if the answer begins with it; "": none.
      one: grammar of a single call, in llguidance's Lark.
      many: grammar of one or several; "": only one is written.
      key: name of the arguments.
    """

    begin: str
    end: str = ""
    bare: str = ""
    one: str = "call"
    many: str = ""
    key: str = "arguments"


_LISTED = 'begin "[" call {} "]"'
FORMS: dict[ToolFormat, CallForm] = {
    "hermes": CallForm(
        "<tool_call>",
        "</tool_call>",
        one=r'begin "\n" call "\n" end',
        many=r'begin "\n" call "\n" end ("\n" begin "\n" call "\n" end)*',
    ),
    "mistral": CallForm(
        "[TOOL_CALLS]", one=_LISTED.format(""), many=_LISTED.format('(", " call)*')
    ),
    "llama3": CallForm("<|python_tag|>", bare="{", key="parameters"),
}


class Caller(NamedTuple):
    """What may be called in an answer, and how.

    Attributes:
      form: how calls are written.
      names: functions that exist; a call without a mark must be of one of them.
      is_single: at most one call is given to the client.
      grammar: what the answer must match; None: anything.
    """

    form: CallForm
    names: frozenset[str]
    is_single: bool = False
    grammar: Grammar | None = None


def find_format(template: str) -> ToolFormat | None:
    """The form of calls that a chat template writes; None: none of `FORMS`."""
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else "mistral"
    return "llama3" if re.search(r"<\|python_tag\|>|\bparameters\b", template) else None


def marks_of(tokenizer: Any, form: CallForm) -> dict[str, int]:
    """Ids of the marks that are special tokens, which are text only if asked for."""
    added = tokenizer.added_tokens_decoder.items()
    return {one.content: token for token, one in added if one.special and one.content in form[:2]}


def call_grammar(
    form: CallForm,
    tools: Sequence[dict[str, Any]],
    special: Mapping[str, int],
    *,
    is_forced: bool,
    is_single: bool,
) -> Grammar:
    """A grammar of answers whose calls are of these tools, with arguments of their schemas.

    Args:
      special: id of each mark that is a special token.
      is_forced: the answer is calls and nothing else; otherwise text may stand before and after
        them, and only strict tools have their schemas.
      is_single: at most one call.

    Raises:
      UserError: a schema is too large, or cannot be served.
    """
    functions = [tool["function"] for tool in tools]
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
    for i, function in enumerate(functions):
        has_schema = is_forced or function.get("strict")
        schema = (function.get("parameters") if has_schema else None) or {"type": "object"}
        head = f'{{"name": {json.dumps(function["name"])}, "{form.key}": '
        lines.append(f'call_{i}: {json.dumps(head)} args_{i} "}}"')
        lines.append(f"args_{i}: %json {json.dumps({'x-guidance': JSON_LAYOUT} | schema)}")
    marks = {mark: json.dumps(mark) for mark in form[:2]}
    marks |= {mark: f"<[{token}]>" for mark, token in special.items()}
    if form.end:
        lines.append(f"end: {marks[form.end]}")
    calls = form.one if is_single or not form.many else form.many
    if is_forced:
        return _lark(f"start: {calls}", f"begin: {marks[form.begin]}", *lines)
    if form.bare:  # text that begins otherwise
        plain = rf"PLAIN: /\s*([^\s{form.bare}](.|\n)*)?/"
        return _lark(f"start: {calls} | PLAIN", plain, *lines)
    lazy = "" if form.begin in special else "[lazy]"
    begin = f"begin{lazy}: TEXT {marks[form.begin]}"
    return _lark(f"start: ({calls}){'?' if is_single else '*'} TEXT", _TEXT, begin, *lines)


def _lark(*lines: str) -> Grammar:
    return Grammar.lark("\n".join(lines), "tools")


class CallReader:
    """Separates the text of an answer from its calls, as it grows.

    Attributes:
      text: the text so far, without calls.
      calls: the calls so far, as the API writes them.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller, self._form = caller, caller.form
        self.text, self.calls = "", list[dict[str, Any]]()
        self._held = ""  # neither text nor a whole call yet
        self._opening = ""  # what was dropped before a call: blanks and the mark
        self._is_calling = self._follows_call = False

    def push(self, text: str, *, is_last: bool) -> tuple[str, list[dict[str, Any]]]:
        """Adds to the answer; returns the text and the calls that are certain now."""
        self._held += text
        shown, num_before = "", len(self.calls)
        while (part := self._take(is_last=is_last)) is not None:
            shown += part
        self.text += shown
        return shown, self.calls[num_before:]

    def _take(self, *, is_last: bool) -> str | None:
        """Takes text or calls from what is held; None if that needs more text."""
        if self._is_calling:
            return self._take_calls(is_last=is_last)
        form, is_first = self._form, not (self.text or self.calls)
        if self._follows_call:
            self._held = self._held.lstrip()
        if is_first and form.bare and self._held.lstrip().startswith(form.bare):
            self._opening, self._is_calling = "", True
            return ""
        before, mark, after = self._held.partition(form.begin)
        if mark:
            self._held, self._is_calling, shown = after, True, before.rstrip()
            self._opening = before[len(shown) :] + mark
            return shown
        size = len(before) if is_last else _num_decided(before, form.begin)
        self._held, self._follows_call = before[size:], self._follows_call and not size
        return before[:size] or None

    def _take_calls(self, *, is_last: bool) -> str | None:
        """Takes calls up to their end; what is no call is text."""
        form = self._form
        whole = self._held, "", ""
        inside, mark, after = self._held.partition(form.end) if form.end else whole
        if not (mark or is_last):
            return None
        self._held, self._is_calling = after, False
        found = _read_calls(inside)
        if found and (self._opening or all(one["name"] in self._caller.names for one in found)):
            self.calls += [_describe(one) for one in found]
            self.calls = self.calls[:1] if self._caller.is_single else self.calls
            self._follows_call = True
            return ""
        return self._opening + inside + mark


def _num_decided(text: str, mark: str) -> int:
    """Length of a text without an end that may begin the mark, and without blanks before that."""
    sizes = range(min(len(mark) - 1, len(text)), -1, -1)
    size = next(n for n in sizes if mark.startswith(text[len(text) - n :]))
    return len(text[: len(text) - size].rstrip())


def _describe(function: dict[str, str]) -> dict[str, Any]:
    """A call as the API writes it, with a new id."""
    name = "".join(secrets.choice(_ALPHABET) for _ in range(_ID_LENGTH))
    return {"id": name, "type": "function", "function": function}


def _read_calls(text: str) -> list[dict[str, str]]:
    """Reads calls, in a list or one after the other; none if anything is wrong."""
    decoder, found, rest = json.JSONDecoder(parse_constant=_refuse), [], text.strip()
    try:
        while rest:
            value, end = decoder.raw_decode(rest)
            found += map(_read_call, value if isinstance(value, list) else [value])
            rest = rest[end:].lstrip(_BETWEEN)
    except (ValueError, RecursionError):
        return []
    return found


def _read_call(value: Any) -> dict[str, str]:
    """Reads one call: its arguments are an object, or the JSON of one."""
    inner = value.get("function") if isinstance(value, dict) else None
    call = inner if isinstance(inner, dict) else value
    name = call.get("name") if isinstance(call, dict) else None
    if not (name and isinstance(name, str)):
        raise JsonError("want a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise JsonError("want arguments by name")
    check_text(call)
    return {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _refuse(constant: str) -> None:
    raise JsonError(f"{constant} is no JSON")
