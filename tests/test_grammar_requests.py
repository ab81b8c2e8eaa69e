"""`response_format` and `structured_outputs` as the server reads and answers them."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest
from openai import OpenAI
from serving import MODEL, Tokenising, guided, serving, until
from test_asking import user
from test_grammar import PERSON, SMALL, draw_engine
from tokenizer_pool import VOCAB_SIZE, spell, tokenizer_of

from poss_jax.config.decoding import SamplingConfig, ServeConfig
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.guides import GrammarState
from poss_jax.serving.bodies import ApiError, CompletionRequest
from poss_jax.serving.requests import read_completion

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EOS = 1


@pytest.fixture(scope="module", params=["added", "special", "fallback", "plain"])
def engine(request: pytest.FixtureRequest) -> Tokenising:
    engine = Tokenising(tokenizer_of(request.param))
    engine.target_config.vocab_size, engine.stop_ids = VOCAB_SIZE, [EOS]
    return engine


def guide_of(engine: Tokenising, **fields: Any) -> GrammarState | None:
    job = read_completion(engine, ServeConfig(target="none"), CompletionRequest(**fields))
    (prompt,) = guided(engine, job).prompts
    assert prompt.guide is None or isinstance(prompt.guide, GrammarState)
    return prompt.guide


def fits(engine: Tokenising, guide: GrammarState, text: str) -> bool:
    guide = guide.copy()
    try:
        guide.advance([*spell(engine.tokenizer, text), EOS])
    except Exception:
        return False
    return True


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"b": [1, null]}', "[1]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
            '{"a": 12}',
            '{"a": "x"}',
        ),
        ({"structured_outputs": {"json": SCHEMA}}, '{"a": -3}', "{}"),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, "null", "0"),
        ({"structured_outputs": {"json_object": True}}, "{}", "{"),
        ({"structured_outputs": {"json": {}}}, "[1, null]", "a"),
        ({"structured_outputs": {"json": {"type": "integer", "maximum": 10**30}}}, "7", "a"),
        ({"structured_outputs": {"regex": ""}}, "", "a"),
        ({"structured_outputs": {"regex": "a+b"}}, "aaab", "aaabc"),
        ({"structured_outputs": {"choice": ["é", 'a"b\n', "c"]}}, 'a"b\n', "a"),
        ({"structured_outputs": {"choice": ["\x00", "a\x7f"]}}, "a\x7f", "a"),
        ({"structured_outputs": {"grammar": 'start: "x" start?'}}, "xxx", "xy"),
        ({"structured_outputs": {"grammar": 'root ::= "x" [0-9]*'}}, "x12", "12"),
    ],
    ids=str,
)
def test_what_matches(engine: Tokenising, fields: Any, good: str, bad: str) -> None:
    guide = guide_of(engine, prompt=[5], **fields)
    assert guide is not None and fits(engine, guide, good) and not fits(engine, guide, bad)


def test_no_grammar(engine: Tokenising) -> None:
    for fields in (
        {"response_format": {"type": "text"}, "structured_outputs": {}},
        {"structured_outputs": {"json": None, "disable_any_whitespace": True}},
        {"structured_outputs": {"json_object": False}},
    ):
        assert guide_of(engine, prompt=[5], **fields) is None


JSON = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("message", "constraint", "fields"),
    [
        ("want one of them", {"json": {}, "regex": "a", "choice": ["b"]}, {}),
        ("want json,", {"choice": [1]}, {}),
        ("want json,", {"whitespace_pattern": " "}, {}),
        ("want at least one text", {"choice": []}, {}),
        ("No 'root' rule", {"grammar": ""}, {}),
        ("other text", {"json": ""}, {}),
        ("want json,", {"json_object": 0}, {}),
        ("none empty", {"choice": ["a", ""]}, {}),
        ("other text", {"json": "[" * 9000}, {}),
        ("unclosed character class", {"regex": "[a"}, {}),
        ("can write none", {"regex": r"a[^\s\S]"}, {}),
        ("can write none", {"grammar": 'start: start "a"'}, {}),
        (r"no control character, got '\\x07'; write \\u0007", {"grammar": 'start: "a\a"'}, {}),
        (r"want text, got '\\ud800'", {"regex": "\ud800"}, {}),
        ("lexer error", {"grammar": 'start: "'}, {}),
        ("Unimplemented keys", {"json": {"not": {}}}, {}),
        ("want at most", {"regex": "a" * 70_000}, {}),
        ("got both", {"regex": "a"}, JSON),
        ("ignore_eos", {"regex": "a"}, {"ignore_eos": True}),
        ("satisfy the grammar", {"regex": "a"}, {"prompt": [9, 5], "continued_tokens": 1}),
        ("want a type of text", None, {"response_format": {"type": "xml"}}),
        ("want a type of text", None, {"response_format": {}}),
        ("JSON schema in schema", None, {"response_format": {"type": "json_schema"}}),
    ],
    ids=str,
)
def test_what_is_refused(engine: Tokenising, message: str, constraint: Any, fields: Any) -> None:
    param = "response_format" if constraint is None else "structured_outputs"
    with pytest.raises(ApiError, match=message) as caught:
        guide_of(engine, **{"prompt": [5], "structured_outputs": constraint} | fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "\n" not in caught.value.message


def test_deep_grammars_do_not_overflow_the_stack(engine: Tokenising) -> None:
    rules = [f'r{i}: "a" r{i + 1} | r{i + 1} "b"' for i in range(1800)]
    text = "\n".join(["start: r0", *rules, 'r1800: "c"'])
    guide_of(engine, prompt=[5], structured_outputs={"grammar": text})


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    engine = draw_engine(SMALL)
    template = "{{ tools[0].function.name if tools }}{{ messages[-1].content }}<tool_call>"
    options: Any = {"slots": (1,), "max_logprobs": 0, "max_length": 100, "has_grammars": True}
    with pytest.MonkeyPatch.context() as patch, serving(engine, batch_size=1, **options) as served:
        patch.setattr(engine.tokenizer, "chat_template", template)
        until(lambda: served.service.is_compiled, seconds=300)
        with served.client() as client:
            yield client
        assert served.scheduler.error is None and served.scheduler.stats.compilations == 0


def test_a_server_answers_as_the_engine_does(client: OpenAI) -> None:
    """Streamed and whole, as the target does alone; nothing is compiled after the warm-up."""
    plain, grammar = draw_engine(None), Grammar.json_schema(PERSON)
    sampling = SamplingConfig(temperature=1.0, seed=7)
    (want,) = plain.decode([grammar.constrain(plain.prepare("a é", 60, sampling), plain)])
    formats = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    options: Any = {"prompt": "a é", "max_tokens": 60, "seed": 7, "temperature": 1.0}
    options |= {"model": MODEL, "extra_body": {"response_format": formats}}
    for is_streamed in (False, True):
        reply = client.completions.create(stream=is_streamed, **options)
        events = list(reply) if is_streamed else [reply]
        assert "".join(event.choices[0].text for event in events) == want.text
    jsonschema_rs.validate(PERSON, json.loads(str(want.text)))


def test_a_forced_call(client: OpenAI) -> None:
    schema = {"properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"]}
    schema |= {"type": "object", "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "pick", "parameters": schema}}
    options: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    options |= {"model": MODEL, "messages": [user("x")], "max_tokens": 80}
    (whole,) = client.chat.completions.create(**options).choices
    events = client.chat.completions.create(stream=True, **options)
    choices = [event.choices[0] for event in events]
    streamed = [call for choice in choices for call in choice.delta.tool_calls or []]
    for (call,) in (whole.message.tool_calls, streamed):
        assert (call.function.name, call.type) == ("pick", "function")
        assert json.loads(call.function.arguments)["n"] in ("a", "b")
    assert not whole.message.content and not any(choice.delta.content for choice in choices)
    assert whole.finish_reason == choices[-1].finish_reason == "tool_calls"
