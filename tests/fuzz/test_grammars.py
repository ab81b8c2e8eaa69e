"""Hostile schemas, grammars and tools, on tokenizers of public kinds.

Each is refused in one line, or its masks lead to texts that match. Nothing takes long here.
"""

import json
import re
import time
from typing import Any

import jsonschema_rs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from serving import Tokenising
from test_grammar_tokens import STOP, allowed, compiler
from tokenizer_pool import POOL, TAGS, VOCAB_SIZE, ids_of, tokenizer_of

from poss_jax import UserError
from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.batch import no_masks
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.guides import GrammarState
from poss_jax.engine.text import decode_behind
from poss_jax.serving.bodies import ApiError, ChatRequest, parse_body
from poss_jax.serving.requests import Job, add_guides, read_chat, submit_grammar

CONFIG = ServeConfig(target="none")
MOST_TOKENS = 60
LONGEST_MESSAGE = 1000
CPU_SECONDS = 4.0  # here; the trials have their own

WORDS = ["", "a", "é", "中", "\x00", "\x7f", "\n", '"', "\\", "/", "a" * 3000, *TAGS, "<|im_end|>"]
NUMBERS = [0, 1, -1, 3, 0.1, 1e-7, 1e300, 2**53, 999_983, 10**30, -(10**18)]
PATTERNS = r"a+ ^a$ ( [^a] (a|b){2,9} .*a.{12} \d{3} (?=a) a{0,60000} <think>".split()
FORMATS = ["date", "uuid", "email", "ipv6", "uri", "nonsense"]
TYPES = ["string", "integer", "number", "boolean", "null", "array", "object", "nonsense"]
PARTS = r"""
    "a" "<think>" start WORD /[a-c]+/ | * ( ) ~ <[3]> <think> {1,9} "\x00" [a-z] ::= root &
""".split()
PARTS += ["\n", "%json {}", "%llguidance {}", "WORD: /x/\n"]


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas of schemas."""
    names, few = st.sampled_from(WORDS), st.integers(0, 3)
    objects = st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(names, inner, max_size=4)},
        optional={
            "required": st.lists(names, max_size=3),
            "additionalProperties": st.booleans() | inner,
        },
    )
    arrays = st.fixed_dictionaries(
        {"type": st.just("array"), "items": inner},
        optional={"minItems": few | st.just(10**6), "maxItems": few, "uniqueItems": st.booleans()},
    )
    unions = st.builds(
        lambda key, parts: {key: parts},
        st.sampled_from(["anyOf", "oneOf", "allOf"]),
        st.lists(inner, max_size=3),
    )
    others = st.builds(lambda key, one: {key: one}, st.sampled_from(["not", "$ref", "if"]), inner)
    return objects | arrays | unions | others


SCALARS = st.sampled_from([None, True, *NUMBERS, *WORDS])
LEAVES = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(TYPES)},
        optional={
            **dict.fromkeys(
                ("minimum", "exclusiveMaximum", "multipleOf"), st.sampled_from(NUMBERS)
            ),
            **dict.fromkeys(("minLength", "maxLength"), st.sampled_from([0, 2, 70_000])),
            "pattern": st.sampled_from(PATTERNS),
            "format": st.sampled_from(FORMATS),
        },
    ),
    st.builds(lambda values: {"enum": values}, st.lists(SCALARS | st.lists(SCALARS), max_size=4)),
    st.builds(lambda value: {"const": value}, SCALARS),
    st.sampled_from([{}, {"$ref": "#"}, {"x-guidance": {"whitespace_flexible": True}}]),
)
SCHEMAS = st.recursive(LEAVES, grow, max_leaves=6)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map(" ".join)
GRAMMARS = st.one_of(
    st.tuples(st.just(Grammar.json_schema), SCHEMAS),
    st.tuples(st.just(Grammar.regex), st.sampled_from(PATTERNS) | TEXTS),
    st.tuples(st.just(Grammar.choice), st.lists(st.sampled_from(WORDS), max_size=4)),
    st.tuples(
        st.just(Grammar.lark), TEXTS.map("start: {}".format) | TEXTS.map("root ::= {}".format)
    ),
)
TOOLS = st.lists(
    st.builds(
        lambda name, fields: {"type": "function", "function": {"name": name, **fields}},
        st.sampled_from(["f", "weather", "a-b.c"]),
        st.fixed_dictionaries({}, optional={"parameters": SCHEMAS, "strict": st.booleans()}),
    ),
    min_size=1,
    max_size=3,
)
CHOICES = st.sampled_from(["auto", "required", {"type": "function", "function": {"name": "f"}}])
SEEDS = st.integers(0, 2**32 - 1)


def check_message(message: str) -> None:
    assert message.isprintable() and len(message) <= LONGEST_MESSAGE


def write(guide: GrammarState, seed: int) -> list[int] | None:
    """Tokens that the masks allow, up to the end; None if there is none soon, or an error."""
    rng, mask, tokens = np.random.default_rng(seed), no_masks(VOCAB_SIZE), list[int]()
    while len(tokens) < MOST_TOKENS:
        guide.fill(mask)
        if guide.is_broken:
            return None
        choices = allowed(mask)
        if STOP in choices:
            return tokens
        tokens.append(int(rng.choice(choices)))
        try:
            guide.advance(tokens[-1:])
        except UserError as error:
            check_message(str(error))
            return None
    return None


@given(st.sampled_from(POOL), GRAMMARS, SEEDS)
def test_grammars(kind: str, drawn: tuple[Any, Any], seed: int) -> None:
    begun, (make, given_) = time.process_time(), drawn
    try:
        guide = compiler(kind).submit(make(given_)).result(300)
    except UserError as error:
        check_message(str(error))
    else:
        tokens = write(guide, seed)
        if tokens is not None:
            text = decode_behind(tokenizer_of(kind), ids_of(kind, ["x"])[0], tokens)
            check_text(make, given_, text)
    assert time.process_time() - begun < CPU_SECONDS


def check_text(make: Any, source: Any, text: str) -> None:
    if make is Grammar.choice:
        assert text in source
    elif make is Grammar.json_schema:
        jsonschema_rs.validate(source, json.loads(text))
    elif make is Grammar.regex and source in PATTERNS:
        assert re.fullmatch(source, text)


@given(st.sampled_from(POOL), TOOLS, CHOICES, SEEDS)
def test_tools(kind: str, tools: list[Any], choice: Any, seed: int) -> None:
    begun, engine = time.process_time(), Tokenising(tokenizer_of(kind))
    engine.target_config.vocab_size, engine.stop_ids = VOCAB_SIZE, [STOP]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "tool_choice": choice}
    try:
        job = read_chat(engine, CONFIG, parse_body(ChatRequest, json.dumps(body).encode()))
        if job.grammar is not None:
            job = add_guides(job, submit_grammar(engine, job.grammar))
            check_calls(engine, job, seed, is_forced=choice != "auto")
    except ApiError as error:
        assert error.status == 400
        check_message(error.message)
    assert time.process_time() - begun < CPU_SECONDS


def check_calls(engine: Tokenising, job: Job, seed: int, *, is_forced: bool) -> None:
    """A forced call is written whole, in the model's own form."""
    guide = job.prompts[0].guide
    assert isinstance(guide, GrammarState)
    tokens = write(guide.copy(), seed)
    if tokens is None or not is_forced:
        return
    text = engine.tokenizer.decode(tokens, skip_special_tokens=False)
    before, _, after = text.partition("<tool_call>\n")
    call, _ = json.JSONDecoder().raw_decode(after)  # a string in it may hold marks
    assert before == "" and set(call) == {"name", "arguments"}
