"""Chats with drawn fields under templates of every kind: texts, spans and masks of transformers."""

import itertools
from collections.abc import Iterator
from typing import Any

from chat_oracle import TOOL, call, check_chat
from chat_templates import KINDS
from hypothesis import given
from hypothesis import strategies as st

NAMES = sorted(name for name, kind in KINDS.items() if not kind.refused)
PIECES = [*" \na'\"é😀[中", "the", "{{ m }}", "\\n", "5.", "<b>", "|>"]
CONTENTS = st.builds(
    lambda pieces: "x" + "".join(pieces), st.lists(st.sampled_from(PIECES), max_size=6)
)


def word(numbers: Iterator[int]) -> str:
    """A word that occurs nowhere else in a chat."""
    return f"word{next(numbers)}w"


@st.composite
def turns_of_question(draw: st.DrawFn, numbers: Iterator[int]) -> list[dict[str, Any]]:
    """A question, what is called and comes back, and the answer; fields are drawn."""
    content: Any = draw(CONTENTS)
    if draw(st.integers(0, 3)) == 0:
        content = [{"type": "text", "text": text} for text in (content, draw(CONTENTS))]
    turns: list[dict[str, Any]] = [{"role": "user", "content": content}]
    for is_calling in [*[True] * draw(st.sampled_from([0, 0, 1, 2])), False]:
        turn: dict[str, Any] = {"role": "assistant", "content": draw(CONTENTS)}
        if draw(st.integers(0, 3)) == 0:
            turn["reasoning_content"] = word(numbers)
        turn |= draw(st.sampled_from([{}, {}, {}, {"weight": 0}, {"weight": 1}, {"train": False}]))
        if is_calling:
            turn["content"] = draw(st.sampled_from([None, "", turn["content"]]))
            turn["tool_calls"] = [call(word(numbers), as_text=draw(st.booleans()))]
            result = {"role": "tool", "tool_call_id": "call00001", "content": word(numbers)}
            turns += [turn, result]
        else:
            turns.append(turn)
    return turns


@st.composite
def records(draw: st.DrawFn) -> dict[str, Any]:
    numbers = itertools.count(10)
    parts = [draw(turns_of_question(numbers)) for _ in range(draw(st.integers(1, 3)))]
    messages = list(itertools.chain(*parts))
    messages[-1] = {k: v for k, v in messages[-1].items() if k not in ("weight", "train")}
    if draw(st.booleans()):
        system = draw(st.sampled_from(["", " ", "be brief"]))
        messages = [{"role": "system", "content": system}, *messages]
    return {"messages": messages} | ({"tools": [TOOL]} if draw(st.booleans()) else {})


@given(st.sampled_from(NAMES), records(), st.booleans())
def test_chats(name: str, record: dict[str, Any], knows_ends: bool) -> None:
    assert check_chat(name, record, knows_ends=knows_ends)
