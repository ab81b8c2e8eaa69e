"""Chats under templates of every kind: what is asked and trained on is what transformers writes."""

import functools
from collections import Counter
from typing import Any

import pytest
from chat_oracle import TOOL, call, check_chat, opened, tokenizer_of
from chat_templates import KINDS

from poss_jax.config.reading import UserError
from poss_jax.data.rendering import find_left_out
from poss_jax.engine.prompts import encode_prompt

USER = {"role": "user", "content": "what is the sum of 2 and 3?"}
THINKS = {"reasoning_content": "two and three make five"}


def answer(content: str | None = "that is 5", **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def result(content: str) -> dict[str, Any]:
    return {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": content}


CALLED = [USER, answer("let me look", tool_calls=[call("Lisbon")]), result("rainy")]
CALLED_MUTELY = [USER, answer(None, tool_calls=[call("Porto", as_text=True)]), result("mild")]
THOUGHT = [USER, answer("", tool_calls=[call("Faro")], **THINKS), result("hot")]
WEIGHTED = [USER, answer("bad", weight=0), USER, answer("good", weight=1)]
FLAGGED = [USER, answer("no", train=False), USER, answer("yes", train=True)]
PARTS = [{"type": "text", "text": text} for text in ("what", "now?")]
SYSTEM = {"role": "system", "content": "be brief"}
CHATS = {
    "one turn": {"messages": [USER, answer()]},
    "three turns": {"messages": [USER, answer("a\nb"), USER, answer("é 😀"), USER, answer("c d")]},
    "blanks": {"messages": [USER, answer(" a \n"), USER, answer("\nb\n\n")]},
    "system": {"messages": [SYSTEM, USER, answer(), USER, answer("no")]},
    "empty system": {"messages": [{**SYSTEM, "content": ""}, USER, answer()]},
    "name": {"messages": [{**USER, "name": "ann"}, answer(), USER, answer("no")]},
    "parts": {"messages": [{**USER, "content": PARTS}, answer()]},
    "weights": {"messages": [*WEIGHTED, *FLAGGED]},
    "nothing called": {"messages": [USER, answer(), USER, answer("no")], "tools": [TOOL]},
    "a call": {"messages": [*CALLED, answer("it rains")], "tools": [TOOL]},
    "a call later": {"messages": [USER, answer(), *CALLED, answer("it rains"), USER, answer()]},
    "a call without text": {"messages": [*CALLED_MUTELY, answer("it is mild")], "tools": [TOOL]},
    "a call at the end": {"messages": CALLED[:2], "tools": [TOOL]},
    "reasoning": {"messages": [USER, answer(**THINKS), USER, answer("6", **THINKS)]},
    "reasoning later": {"messages": [USER, answer(), USER, answer("6", **THINKS)]},
    "reasoning and a call": {"messages": [*THOUGHT, answer("it is", **THINKS)], "tools": [TOOL]},
    "thoughts": {"messages": [USER, answer("<think>\nhm\n</think>\n\nyes"), USER, answer("no")]},
}
FEW = ("three turns", "a call later", "reasoning and a call")
TOTAL = {"whole": 455, "cut": 87, "a text per answer": 23, "left out": 257, "refused": 28}
USED = {name for name, kind in KINDS.items() if not kind.refused}


@functools.cache
def outcomes(name: str) -> Counter[str]:
    return Counter(check_chat(name, record, knows_ends=True) for record in CHATS.values())


@pytest.mark.quick
@pytest.mark.parametrize("name", sorted(USED))
def test_chats_under_templates_of_every_kind(name: str) -> None:
    assert outcomes(name).total() == len(CHATS)
    for title in FEW:  # ends that the template alone shows
        check_chat(name, CHATS[title], knows_ends=False)


@pytest.mark.parametrize("name", sorted(set(KINDS) - USED))
def test_templates_that_no_chat_can_be_written_with(name: str) -> None:
    with pytest.raises(UserError, match=KINDS[name].refused):
        opened(name, knows_ends=True)


def test_how_many_chats_equal_the_oracle() -> None:
    total = sum(map(outcomes, USED), Counter())
    print(f"{len(USED)} templates of {len(KINDS)}, {len(CHATS)} chats: {dict(total)}")
    assert total == TOTAL


ASKED = {"role": "user", "content": "what is a cucumber?"}
BESIDE_CALL = answer("no cucumber", tool_calls=[call("Lisbon")])


def count_words(name: str, messages: list[dict[str, Any]]) -> int:
    """How often a prompt of transformers holds the word; -1: the template refuses it."""
    try:
        text = tokenizer_of(name).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # of Jinja's, or what Python raises in it
        return -1
    return text.lower().count("cucumber")


@functools.cache
def asked(name: str) -> Counter[str]:
    """What becomes of a message of each role, which says what others say, at two places."""
    tokenizer, outcomes = tokenizer_of(name), Counter[str]()
    for role in ("system", "developer", "function", "tool", "user", "assistant"):
        message = {"role": role, "content": 'a "cucumber"\n'}
        for before in ([], [ASKED, answer("a cucumber")]):
            chat = [*before, message, ASKED]
            num_words, num_others = (count_words(name, one) for one in (chat, [*before, ASKED]))
            refusal = ""
            try:
                encode_prompt(chat, tokenizer, len(tokenizer))
            except UserError as error:
                refusal = str(error)
            outcome = "written"
            if num_words < 0:
                outcome = "the target's chat template refuses them"
            elif num_words <= num_others:
                outcome = f"leaves out the text of message {len(before) + 1} (role '{role}')"
            assert (outcome in refusal) if outcome != "written" else not refusal, (chat, refusal)
            outcomes[outcome.partition(" of message")[0]] += 1
    return outcomes


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_text_of_every_message_is_in_the_prompt(name: str) -> None:
    assert asked(name).total() == 12


def test_how_many_messages_are_left_out() -> None:
    refused = "the target's chat template refuses them"
    total = sum(map(asked, KINDS), Counter())
    assert total == {"written": 520, "leaves out the text": 84, refused: 20}


def test_a_chat_is_searched_once() -> None:
    class Text(str):
        def __contains__(self, key: str) -> bool:
            raise AssertionError("searched for one message")

    def render(messages: list[dict[str, Any]]) -> str:
        return Text("".join(message["content"] for message in messages if message["role"] != "x"))

    chat = [{"role": "y" if index else "x", "content": f"{index}"} for index in range(4_000)]
    assert find_left_out(chat[1:], render) is None
    assert find_left_out([*chat[::-1], *chat], render) == 3_999


def test_a_call_may_stand_for_the_text_beside_it() -> None:
    """Clients send a reply's text and calls back, and some templates write the calls alone."""
    tokenizer = tokenizer_of("llama-3.1, tools")
    chat = [ASKED, BESIDE_CALL, result("rainy"), ASKED]
    text = tokenizer.decode(encode_prompt(chat, tokenizer, len(tokenizer)))
    assert "no cucumber" not in text and "Lisbon" in text
