"""Grammars on tokenizers of public kinds: tags that are tokens are text, special tokens are not."""

import json
import re
from typing import Any

import numpy as np
import pytest
from tokenizer_pool import EOS, POOL, SPECIAL, TAGS, VOCAB_SIZE, ids_of, spell, tokenizer_of

from poss_jax import UserError
from poss_jax.engine.batch import no_masks
from poss_jax.engine.grammar import Grammar, GrammarCompiler, compiler_of
from poss_jax.engine.text import decode_behind
from poss_jax.serving.tools import FORMS, call_grammar, marks_of

STOP = 1
GRAMMARS = {
    "regex, at the beginning": (
        Grammar.regex("<think>[a-c]{3}</think>x"),
        "<think>[a-c]{3}</think>x",
    ),
    "regex, inside": (Grammar.regex("[a-c]{2}<tool_call>x"), "[a-c]{2}<tool_call>x"),
    "GBNF": (Grammar.lark('root ::= "<think>" [a-c] "</think>"'), "<think>[a-c]</think>"),
    "Lark": (Grammar.lark('start: "<think>" /[a-c]/ "</think>"'), "<think>[a-c]</think>"),
    "choice": (Grammar.choice(["a</think>"]), "a</think>"),
    "enum": (Grammar.json_schema({"enum": ["xy <think> z"]}), '"xy <think> z"'),
    "special": (Grammar.json_schema({"enum": ["a <|endoftext|> b"]}), r'"a <\|endoftext\|> b"'),
    "no tag": (Grammar.json_schema({"enum": ["xy <b> z"]}), '"xy <b> z"'),
    "field": (
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {"a</think>": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["a</think>"],
                "additionalProperties": False,
            }
        ),
        r'\{"a</think>": [0-9]\}',
    ),
}


def compiler(kind: str) -> GrammarCompiler:
    return compiler_of(tokenizer_of(kind), VOCAB_SIZE, [STOP])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def write(kind: str, grammar: Grammar, rng: np.random.Generator, most: int = 300) -> list[int]:
    """Any tokens that the masks allow, up to the first end."""
    guide, mask = compiler(kind).submit(grammar).result(60), no_masks(VOCAB_SIZE)
    tokens: list[int] = []
    while len(tokens) < most:
        guide.fill(mask)
        choices = allowed(mask)
        if STOP in choices:
            return tokens
        tokens.append(int(rng.choice(choices)))
        guide.advance(tokens[-1:])
    raise AssertionError("the text does not end")


def read(kind: str, tokens: list[int]) -> str:
    """The text of tokens that continue others."""
    tokenizer = tokenizer_of(kind)
    return decode_behind(tokenizer, spell(tokenizer, "x")[0], tokens)


@pytest.mark.quick
@pytest.mark.parametrize("kind", POOL)
@pytest.mark.parametrize("name", GRAMMARS)
def test_tags_are_text(kind: str, name: str) -> None:
    grammar, pattern = GRAMMARS[name]
    for seed in range(5):
        assert re.fullmatch(pattern, read(kind, write(kind, grammar, np.random.default_rng(seed))))


@pytest.mark.parametrize("kind", POOL)
def test_tokens_have_the_bytes_that_they_decode_to(kind: str) -> None:
    tokenizer, tokens = tokenizer_of(kind), compiler(kind)._tokens.tokens
    special = {*ids_of(kind, SPECIAL), *(ids_of(kind, TAGS) if kind == "special" else ())}
    ordinary = [token for token in range(len(tokenizer)) if token not in special]
    rng = np.random.default_rng(0)
    for _ in range(200):
        drawn = rng.choice(ordinary, 6).tolist()
        text = b"".join(tokens[token] for token in drawn).decode(errors="replace")
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert read(kind, drawn) == text
    assert all(tokens[token].startswith(b"\xff") for token in [*special, len(tokenizer)])
    assert len(tokens) == VOCAB_SIZE


@pytest.mark.parametrize("kind", ["added", "fallback", "letters"])
def test_what_must_follow_is_split_as_the_model_reads_it(kind: str) -> None:
    text, tokenizer = "<think>the weather</think>", tokenizer_of(kind)
    tokens = write(kind, Grammar.choice([text]), np.random.default_rng(0))
    begin, end = ids_of(kind, ["<think>", "</think>"])
    inside = spell(tokenizer, "xthe weather")[1:]
    assert tokens[0] == begin and tokens[-1] == end
    assert len(tokens) <= len(inside) + 2 and read(kind, tokens) == text


def test_a_long_text_that_must_follow_is_split_at_its_beginning() -> None:
    tokens = compiler("added")._tokens
    ids = tokens("weather " * 7500)
    assert b"".join(tokens.tokens[token] for token in ids) == b"weather " * 32


@pytest.mark.parametrize("kind", POOL)
def test_a_special_token_is_no_text(kind: str) -> None:
    """Not even of a grammar that allows all text."""
    guide, mask = compiler(kind).submit(Grammar.regex("(.|\n)*")).result(60), no_masks(VOCAB_SIZE)
    guide.fill(mask)
    tags, special = {*ids_of(kind, TAGS)}, {*ids_of(kind, [one for one in SPECIAL if one != EOS])}
    assert not special & set(allowed(mask))
    if kind in ("added", "fallback", "letters", "folding"):
        assert tags <= set(allowed(mask))
    if kind == "special":
        assert not tags & set(allowed(mask))


TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize("kind", POOL)
@pytest.mark.parametrize("is_single", [True, False])
def test_forced_calls_are_written_with_their_marks(kind: str, is_single: bool) -> None:
    form, tools = FORMS["hermes"], [{"type": "function", "function": TOOL}]
    marks = marks_of(tokenizer_of(kind), form, with_text=True)
    grammar = call_grammar(form, tools, marks, is_forced=True, is_single=is_single)
    tokens, tokenizer = write(kind, grammar, np.random.default_rng(0)), tokenizer_of(kind)
    text = tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == f"<tool_call>\n{CALL}\n</tool_call>"
    if kind != "plain":
        assert [tokens[0], tokens[-1]] == ids_of(kind, ["<tool_call>", "</tool_call>"])


def test_text_that_no_token_writes_is_refused_at_once() -> None:
    letters = compiler_of(tokenizer_of("letters"), VOCAB_SIZE, [STOP])
    with pytest.raises(UserError, match="can write none"):
        letters.submit(Grammar.choice(["中文"])).result()


def test_an_unreadable_tokenizer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []

    class Unreadable:
        def __init__(self) -> None:
            self.backend_tokenizer = self

        def to_str(self) -> str:
            reads.append(self)
            return json.dumps({"added_tokens": [], "decoder": {"type": "WordPiece"}})

    tokenizer = Unreadable()
    for _ in range(3):
        with pytest.raises(UserError, match="a decoder of type WordPiece; use another target"):
            compiler_of(tokenizer, 8, [STOP])
    assert len(reads) == 1
