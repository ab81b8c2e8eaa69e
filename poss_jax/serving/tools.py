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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from poss_jax.config.json_reading import JsonError, parse_json
from poss_jax.config.models import ToolFormat
from poss_jax.engine.grammar import JSON_LAYOUT, Grammar

_BETWEEN = string.whitespace + ";,"  # calls without an end mark

Call = dict[str, Any]
"""A call as the API writes it: its id, and the name and arguments of a function."""


class CallForm(NamedTuple):
    """The format in which a model writes calls."""

    begin: str  # mark before calls
    end: str = ""  # mark after each; "": none, so text may follow their JSON
    bare: str = ""  # letter that begins calls without a mark, if the answer begins with it
    single: str = "call"  # grammar of a single call, in llguidance's Lark
    many: str = ""  # grammar of one or several; "": only one is written
    key: str = "arguments"  # name of the arguments


_LISTED = 'begin "[" call {} "]"'
FORMS: dict[ToolFormat, CallForm] = {
    "hermes": CallForm(
        "<tool_call>",
        "</tool_call>",
        single=r'begin "\n" call "\n" end',
        many=r'begin "\n" call "\n" end ("\n" begin "\n" call "\n" end)*',
    ),
    "mistral": CallForm(
        "[TOOL_CALLS]", single=_LISTED.format(""), many=_LISTED.format('(", " call)*')
    ),
    "llama3": CallForm("<|python_tag|>", bare="{", key="parameters"),
}


class Caller(NamedTuple):
    """The calls that an answer may hold, and their format."""

    form: CallForm
    names: frozenset[str]  # functions that exist; a call without a mark must be of one of them
    is_single: bool = False  # whether the client gets at most one call
    grammar: Grammar | None = None  # what the answer must match; None: anything


def find_format(template: str) -> ToolFormat | None:
    """The form of calls that a chat template writes; None: none of `FORMS`."""
    if "<tool_call>" in template:
        return None if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return None if "[ARGS]" in template else "mistral"
    return "llama3" if re.search(r"<\|python_tag\|>|\bparameters\b", template) else None


def marks_of(tokenizer: Any, form: CallForm, *, with_text: bool = False) -> dict[str, int]:
    """Ids of the marks that are special tokens, which are text only if asked for.

    Args:
      with_text: also of marks that are tokens and text, as in Qwen's models.
    """
    added = tokenizer.added_tokens_decoder.items()
    marks = {m.content: token for token, m in added if m.special or with_text}
    return {mark: marks[mark] for mark in form[:2] if mark in marks}


def call_grammar(
    form: CallForm,
    tools: Sequence[dict[str, Any]],
    marks: Mapping[str, int],
    *,
    is_forced: bool,
    is_single: bool,
) -> Grammar:
    """A grammar of answers whose calls are of these tools, with arguments of their schemas.

    Args:
      marks: id of each mark that is a token; one that text can hold, too, only if calls are forced.
      is_forced: the answer is calls and nothing else; otherwise text may stand before and after
        them, and only strict tools have their schemas.
      is_single: whether at most one call is allowed.

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
    written = {mark: json.dumps(mark) for mark in form[:2]}
    written |= {mark: f"<[{token}]>" for mark, token in marks.items()}
    if form.end:
        lines.append(f"end: {written[form.end]}")
    calls = form.single if is_single or not form.many else form.many
    if is_forced:
        return _lark(f"start: {calls}", f"begin: {written[form.begin]}", *lines)
    if form.bare:  # text that begins otherwise
        plain = rf"PLAIN: /\s*([^\s{form.bare}](.|\n)*)?/"
        return _lark(f"start: {calls} | PLAIN", plain, *lines)
    lazy = "" if form.begin in marks else "[lazy]"
    begin = f"begin{lazy}: TEXT {written[form.begin]}"
    return _lark(
        f"start: ({calls}){'?' if is_single else '*'} TEXT", r"TEXT: /(.|\n)*/", begin, *lines
    )


def _lark(*lines: str) -> Grammar:
    return Grammar.lark("\n".join(lines), "tools")


class CallReader:
    """Separates the text of an answer from its calls, as it grows.

    A call reaches to the first end mark outside its strings; what is no call is text. A string
    ends at a quote, at the latest at the end of its line, since JSON breaks no line within one.
    Without an end mark calls are read once the answer has ended: the JSON that follows the mark.
    Blanks next to a call are text only between two texts, and belong to the later one.

    Attributes:
      text: the text so far, without calls.
      calls: the calls so far.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller, self._form = caller, caller.form
        self.text, self.calls = "", list[Call]()
        self._held = ""  # neither text nor a whole call yet
        self._opening: str | None = None  # mark of the call that is held; None: text is held
        self._blanks = ""  # behind the text so far
        self._follows_call = False
        self._num_scanned = 0  # letters of that call that are not looked at again
        self._is_in_string = False  # whether they end within one of its strings
        self._edge = re.compile(rf'\\?["\n]|\\\\|{re.escape(self._form.end)}')

    def push(self, text: str, *, is_last: bool) -> list[str | Call]:
        """Adds to the answer; returns the texts and calls that are certain now, in their order.

        All of them together do not depend on how the answer is cut.
        """
        self._held += text
        items = [self._show(item) for item in self._split(is_last=is_last)]
        if is_last and not self._follows_call:
            self.text += self._blanks
            items.append(self._blanks)
        return [item for item in items if item]

    def _show(self, item: str | Call) -> str | Call:
        """Adds a text or a call, and holds the blanks at its end; returns what is shown of it."""
        if isinstance(item, dict):
            self._follows_call = True
            if self.calls and self._caller.is_single:
                return ""
            self.calls.append(item)
            return item
        text = self._blanks + item
        shown = text.rstrip()
        self._blanks = text[len(shown) :]
        if self._follows_call and not self.text:
            shown = shown.lstrip()
        self._follows_call = self._follows_call and not shown
        self.text += shown
        return shown

    def _split(self, *, is_last: bool) -> Iterator[str | Call]:
        """Takes from what is held: texts as they were written, and calls."""
        while True:
            if self._opening is None:
                yield self._take_text(is_last=is_last)
            if self._opening is None:
                return
            end = self._find_end() if self._form.end else None
            if end is None and not is_last:
                return
            yield from self._take_calls(end)

    def _take_text(self, *, is_last: bool) -> str:
        """Takes text; the mark behind it, if there is one, begins a call."""
        form, is_first = self._form, not (self.text or self.calls)
        if is_first and form.bare and self._held.lstrip().startswith(form.bare):
            self._opening = ""
            return ""
        text, mark, suffix = self._held.partition(form.begin)
        if mark:
            self._opening, self._held = mark, suffix
            return text
        size = len(text)
        if not is_last:  # the end may begin the mark
            starts = range(max(size - len(form.begin) + 1, 0), size + 1)
            size = next(start for start in starts if form.begin.startswith(text[start:]))
        self._held = text[size:]
        return text[:size]

    def _find_end(self) -> int | None:
        """Where the call that is held ends; None: not yet. A client may make it long."""
        mark = self._form.end
        for match in self._edge.finditer(self._held, self._num_scanned):
            if self._is_in_string:
                self._is_in_string = match[0] not in ('"', "\n")
            elif match[0] == mark:
                return match.start()
            else:
                self._is_in_string = match[0].endswith('"')
            self._num_scanned = match.end()
        self._num_scanned = max(self._num_scanned, len(self._held) - len(mark) + 1)
        return None

    def _take_calls(self, end: int | None) -> list[str | Call]:
        """Takes the calls up to their end, or the text that they are if they are none."""
        inside, mark = self._held[:end], "" if end is None else self._form.end
        decoder, calls, behind = json.JSONDecoder(), list[Call](), inside
        with suppress(ValueError, RecursionError):
            while remaining := behind.lstrip(_BETWEEN):
                value, size = decoder.raw_decode(remaining)
                calls += [*map(_read_call, value if isinstance(value, list) else [value])]
                behind = remaining[size:]
        is_whole = bool(calls) and not behind.strip(_BETWEEN)
        opening, self._opening = self._opening, None
        self._num_scanned, self._is_in_string = 0, False
        if opening and not self._form.end:
            self._held = "" if is_whole else behind
            return [*calls] or [opening]
        self._held = self._held[len(inside) + len(mark) :]
        is_known = opening or all(call["function"]["name"] in self._caller.names for call in calls)
        return [*calls] if is_whole and is_known else [f"{opening}{inside}{mark}"]


def _read_call(value: Any) -> Call:
    """Reads one call, and gives it an id: its arguments are an object, or the JSON of one."""
    inner = value.get("function") if isinstance(value, dict) else None
    call = inner if isinstance(inner, dict) else value
    name = call.get("name") if isinstance(call, dict) else None
    if not (name and isinstance(name, str)):
        raise JsonError("want a name")
    arguments = call.get("arguments", call.get("parameters", {}))
    arguments = parse_json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise JsonError("want arguments by name")
    function = {
        "name": name,
        "arguments": json.dumps(arguments, ensure_ascii=False, allow_nan=False),
    }
    "".join(function.values()).encode()  # raises ValueError for half a character
    call_id = secrets.token_hex(5)[:9]  # as long as Mistral's templates want; others take any
    return {"id": call_id, "type": "function", "function": function}
