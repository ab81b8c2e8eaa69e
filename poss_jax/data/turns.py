"""Finds the marks a chat template writes around answers, by rendering small chats."""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from poss_jax.data.conversations import Broken, Message
from poss_jax.data.rendering import RenderError, Step
from poss_jax.data.tokenizer import match_any

Write = Callable[[Sequence[Message], Sequence[Step], list[Any] | None], list[str]]
"""Renders prefixes of a chat with tools; raises RenderError."""

QUESTION, ANSWER, NEXT = "a question", "an answer", "another question"
_WORD, _RESULT = "some word", "some result"
_CHAT = [
    {"role": "user", "content": QUESTION},
    {"role": "assistant", "content": ANSWER},
    {"role": "user", "content": NEXT},
]
_CALL = {"name": "look_up", "arguments": {"word": _WORD}}
_CALLING = [
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": _RESULT},
]
_WORDS = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
_TOOL = {"name": "look_up", "description": "looks a word up", "parameters": _WORDS}
_TOOLS = [{"type": "function", "function": _TOOL}]


@dataclass(frozen=True)
class Turns:
    """Marks that a template writes around answers."""

    stop: re.Pattern[str]  # matches a token that ends an answer when it is generated
    example: str  # text after the prompt of a small answered chat
    header: re.Pattern[str] | None  # matches the text before an answer; None: not recognisable
    lead: str  # text that every answer begins with if no prompt asks for it
    end: re.Pattern[str] | None  # matches the text after an answer; None: not recognisable
    opening: re.Pattern[str]  # matches the start of a turn, so that no answer includes it


class _Sight(NamedTuple):
    """A small rendered chat, in pieces."""

    between: str  # text between the question and the prompt's end
    asks: str  # the part of it that asks for an answer (the generation prompt)
    answer: str  # text after the prompt
    lead: str  # the part of it before the answer's words
    behind: str  # text after the answer's words
    followed: str | None  # the same if another turn follows; None: the answer is then another
    last: str  # the whole chat with another turn


def learn_turns(write: Write, special: re.Pattern[str], stops: Sequence[str]) -> Turns | Broken:
    """Finds the marks that a template writes around answers.

    Args:
      stops: tokens at which the model stops.

    Returns:
      The marks; or why the template cannot be used.

    Raises:
      RenderError: the template cannot render a small chat.
    """
    seen = _look(write, special, _CHAT, ANSWER)
    if isinstance(seen, Broken):
        return seen
    call = None
    with suppress(RenderError):  # a template may have no tools
        call = _look(write, special, _CALLING, _WORD, _TOOLS)
    call = None if isinstance(call, Broken) else call
    marks, followed_ends = set(stops), set[str]()
    for sight in filter(None, (seen, call)):
        same, different = _end_marks(sight, special, match_any(stops))
        marks, followed_ends = marks | same, followed_ends | different
    textual = _common_start(seen.behind, seen.followed or seen.behind)
    ends = marks | followed_ends
    has_end = bool(match_any(ends).search(seen.answer))
    if not has_end and textual.strip():
        ends, has_end = ends | {textual}, True
    end = match_any(ends) if has_end else None
    # A turn opens with its first special token, or else with all that the template writes there.
    turn = (seen.followed or "").partition(NEXT)[0]
    mark = end.search(turn) if end else None
    openings = set[str]()
    for text in (turn[mark.end() :] if mark else turn, seen.asks or seen.between):
        if text.strip():
            opening = special.search(text)
            openings.add(opening.group() if opening else text)
    return Turns(
        stop=match_any(marks),
        example=seen.answer,
        header=_header(seen, call, special, end),
        lead=_lead(seen),
        end=end,
        opening=match_any(openings - ends),
    )


def _look(
    write: Write,
    special: re.Pattern[str],
    chat: Sequence[Message],
    answer_text: str,
    tools: list[Any] | None = None,
) -> _Sight | Broken:
    """Renders a question, an answer, and a following turn."""
    question, prompt, full = write(chat, [Step(1, False), Step(1, True), Step(2, False)], tools)
    last = ""
    with suppress(RenderError):  # a template may support single-turn chats only
        [last] = write(chat, [Step(3, True)], tools)
    if not full.startswith(prompt):
        return Broken("the chat template begins a finished answer otherwise than it asks for it")
    answer = full[len(prompt) :]
    lead, is_found, behind = answer.partition(answer_text)
    if QUESTION not in prompt or not is_found:
        return Broken("want questions and answers written as they are, got a text without them")
    between, unasked = (text.rpartition(QUESTION)[2] for text in (prompt, question))
    followed = None
    if last.startswith(prompt):
        _, is_found, suffix = last[len(prompt) :].partition(answer_text)
        followed = suffix if is_found else None
    return _Sight(
        between=between,
        asks=between[len("".join(_common_pieces(between, unasked, special))) :],
        answer=answer,
        lead=lead,
        behind=behind,
        followed=followed,
        last=last,
    )


def _end_marks(
    seen: _Sight, special: re.Pattern[str], stop: re.Pattern[str]
) -> tuple[set[str], set[str]]:
    """Special tokens that end the answer: in any turn, and those that differ by turn.

    A template may write more after the last answer, so only what it writes in both places counts.
    """
    followed = seen.behind if seen.followed is None else seen.followed
    common = _common_pieces(seen.behind, followed, special)
    if any(map(stop.fullmatch, common)):
        return set(), set()
    if marks := common[1::2]:
        return {marks[-1]}, set()
    firsts = [special.search(text) for text in (seen.behind, followed)]
    return set(), {mark.group() for mark in firsts if mark and firsts[0]}


def _common_pieces(first: str, second: str, special: re.Pattern[str]) -> list[str]:
    """Common prefix of two texts, split into special tokens (every second) and other text."""
    return _common_start(*(re.split(f"({special.pattern})", text) for text in (first, second)))


def _header(
    seen: _Sight, call: _Sight | None, special: re.Pattern[str], end: re.Pattern[str] | None
) -> re.Pattern[str] | None:
    """Pattern of the generation prompt if it has a special token, else of all between turns."""
    if special.search(seen.asks):
        return re.compile(re.escape(seen.asks))
    lead = re.escape(_lead(seen))
    is_end = end is not None and end.fullmatch(seen.between.strip())
    if not seen.between.strip() or (is_end and not lead):
        return None
    headers = [f"{re.escape(seen.between)}(?={lead})"]
    result = call.last.rpartition(_RESULT)[2] if call else ""
    if marks := list(special.finditer(result)):
        headers.append(re.escape(result[marks[-1].start() :]))
    return re.compile("|".join(headers))


def _lead(seen: _Sight) -> str:
    return seen.lead if not seen.asks and seen.lead.strip() else ""


def _common_start(first: Any, second: Any) -> Any:
    """The start that two texts or two lists share."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(differ, min(len(first), len(second)))]
