"""Calls of tools: given to the template, found in the answer, streamed; without weights."""

import json
import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import pytest
import tokenizer_pool
from chat_oracle import TOOL, call, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Tokenising, guided
from test_asking import user

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer, Round
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.text import Piece
from poss_jax.serving.bodies import ApiError, ChatRequest, TokenizeRequest, parse_body
from poss_jax.serving.replies import Reply
from poss_jax.serving.requests import Job, read_chat, read_text
from poss_jax.serving.tools import FORMS, Caller, CallReader, find_format, marks_of

CONFIG = ServeConfig(target="none")
CALLING = {"hermes": "chatml, tools", "llama3": "llama-3.1, tools", "mistral": "mistral, tools"}
LISBON, PORTO = ({"name": "weather", "arguments": {"city": city}} for city in ("Lisbon", "Pôrto"))
LOOK = {"name": "weather", "parameters": {"city": "Lisbon"}}
HERMES = "<tool_call>\n{}\n</tool_call>".format
MARK = "<|python_tag|>"
BROKEN = HERMES('{"name: "weather"}')
INNER = {"type": "function", "function": {"name": "f", "arguments": '{"x": [1, "é"]}'}}
F = {"name": "f", "arguments": {"x": [1, "é"]}}


def caller(form: str, **more: Any) -> Caller:
    return Caller(FORMS[form], frozenset({"weather"}), **more)  # type: ignore[index]


def read(form: str, *parts: str, **more: Any) -> tuple[str, list[Any]]:
    """Text and calls of an answer that comes in parts; none is taken back or comes twice."""
    shown = read_parts(form, *parts, **more)
    calls = [part for part in shown if isinstance(part, dict)]
    return "".join(part for part in shown if isinstance(part, str)), calls


def read_parts(form: str, *parts: str, **more: Any) -> list[Any]:
    """Texts and calls of an answer that comes in parts, in order; no text follows another."""
    both = frozenset({"weather", "time"})
    reader = CallReader(caller(form, **more)._replace(names=both))
    shown: list[Any] = [one for part in parts for one in reader.push(part, is_last=False)]
    shown += reader.push("", is_last=True)
    assert "".join(one for one in shown if isinstance(one, str)) == reader.text
    assert [one for one in shown if isinstance(one, dict)] == reader.calls
    whole: list[Any] = []
    for kind, group in groupby(shown, type):
        if kind is str:
            whole.append("".join(group))
        else:
            functions = [one["function"] for one in group]
            whole += [one | {"arguments": json.loads(one["arguments"])} for one in functions]
    return whole


def cut_at(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({0, *(place % (len(text) + 1) for place in places), len(text)})
    return [text[begin:end] for begin, end in pairwise(ends)]


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        ("hermes", "<tool_call>" + json.dumps(LISBON), "", [LISBON]),  # ends with the answer
        ("hermes", HERMES('{"name": "other"}'), "", [{"name": "other", "arguments": {}}]),
        ("hermes", "a < b <tool <tool_", "a < b <tool <tool_", []),
        ("llama3", json.dumps(LOOK), "", [LISBON]),
        ("llama3", " \n" + json.dumps(LOOK) + "; " + json.dumps(PORTO), "", [LISBON, PORTO]),
        ("llama3", MARK + json.dumps(LOOK), "", [LISBON]),
        ("llama3", '{"name": "Ann", "age": 4}', '{"name": "Ann", "age": 4}', []),
        ("llama3", "So: " + json.dumps(LOOK), "So: " + json.dumps(LOOK), []),
        ("llama3", MARK + "weather.call(1)", MARK + "weather.call(1)", []),
        ("mistral", "Well [TOOL_CALLS] " + json.dumps([LISBON]), "Well", [LISBON]),
        ("mistral", "a [1] [TOOL", "a [1] [TOOL", []),
        ("mistral", f"So\n[TOOL_CALLS][{json.dumps(LISBON)}] [{{", "So\n [{", [LISBON]),
        ("mistral", f"[TOOL_CALLS][{json.dumps(LISBON)}, 7]", None, []),
        (
            "mistral",
            f"[TOOL_CALLS][{json.dumps(LISBON)}] and [TOOL_CALLS][{json.dumps(PORTO)}];",
            "and",
            [LISBON, PORTO],
        ),
        ("mistral", f"[TOOL_CALLS]x [TOOL_CALLS][{json.dumps(PORTO)}]", "[TOOL_CALLS]x", [PORTO]),
        ("llama3", MARK + json.dumps(LOOK) + " Done.", "Done.", [LISBON]),
        ("llama3", json.dumps(LOOK) + " Done.", None, []),  # without a mark the answer is all call
        ("hermes", BROKEN + HERMES(json.dumps(LISBON)), BROKEN, [LISBON]),  # strings end with lines
        ("mistral", f"[TOOL_CALLS]{json.dumps([INNER])}", "", [F]),
    ],
)
def test_calls_are_found_in_any_parts(form: str, answer: str, text: str | None, calls: Any) -> None:
    text = answer if text is None else text
    assert read(form, answer) == read(form, *answer) == (text, calls)
    rng = np.random.default_rng(0)
    for _ in range(20):
        assert read(form, *cut_at(answer, rng.integers(0, 1000, 3).tolist())) == (text, calls)


DRAWN = settings(deadline=None, derandomize=True)
TEXTS = st.text('a \n"\\{}[<té', max_size=12)  # they hold no whole mark
STRINGS = st.lists(st.sampled_from([*'ab"\\\n{}é', "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]))
CUTS = st.lists(st.integers(0, 2**16), max_size=9)


@st.composite
def answers(draw: Any) -> list[Any]:
    """Texts with a call between every two of them."""
    parts: list[Any] = [draw(TEXTS)]
    for strings in draw(st.lists(STRINGS, max_size=3)):
        parts += [{"name": "weather", "arguments": {"city": "".join(strings)}}, draw(TEXTS)]
    return parts


@DRAWN
@given(answers(), CUTS, st.sampled_from([None, 1]))
def test_texts_and_calls_are_kept_as_they_are(
    parts: list[Any], cuts: list[int], indent: int | None
):
    """Blanks beside a call are kept between texts; marks within a call's strings are letters."""
    texts = [part for part in parts if isinstance(part, str)]
    calls = [part for part in parts if isinstance(part, dict)]
    answer = "".join(
        part if isinstance(part, str) else HERMES(json.dumps(part, indent=indent)) for part in parts
    )
    content = "".join(texts)
    if calls:
        content = content if texts[0].strip() else content.lstrip()
        content = content if texts[-1].strip() else content.rstrip()
    assert read("hermes", *cut_at(answer, cuts)) == (content, calls)
    ordered = [part.split() if isinstance(part, str) else part for part in parts]
    shown = read_parts("hermes", *cut_at(answer, cuts))
    split = [part.split() if isinstance(part, str) else part for part in shown]
    assert [part for part in split if part] == [part for part in ordered if part]


SOUP = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", MARK, json.dumps(LISBON), json.dumps(LOOK)]
SOUP += [*'"\\\n {}[],a', '{"name": "weather"', ', "arguments": {}}']


@DRAWN
@given(st.sampled_from([*FORMS]), st.lists(st.sampled_from(SOUP), max_size=12), CUTS)
def test_any_answer_reads_the_same_in_any_parts(form: str, pieces: list[str], cuts: list[int]):
    answer = "".join(pieces)
    shown = read_parts(form, answer)
    assert read_parts(form, *cut_at(answer, cuts)) == read_parts(form, *answer) == shown
    if not any(isinstance(part, dict) for part in shown):
        assert "".join(shown) == answer


def test_no_letter_is_scanned_again() -> None:
    """Scanning goes on where it stands, in a long string and outside one."""
    arguments = {"city": 'Lis"bon\n</tool_call>' * 200, "days": [*range(200)]}
    answer = HERMES(json.dumps({"name": "weather", "arguments": arguments}))
    reader = CallReader(caller("hermes"))
    for begin in range(0, len(answer), 4):
        reader.push(answer[begin : begin + 4], is_last=False)
        assert len(reader._held) - reader._num_scanned < len("</tool_call>")
    (made,) = reader.calls
    assert json.loads(made["function"]["arguments"]) == arguments


@pytest.mark.parametrize(
    "inside",
    [
        *("", "{", "weather", "[]", "7", "null", '"a"', '{"name": ""}', '{"name": 7}', "{" * 5000),
        *('{"name": "f", "arguments": 7}', '{"name": "f", "arguments": "7"}', '[{"name": "f"}, 1]'),
        *('{"name": "f", "arguments": {"x": NaN}}', '{"name": "f", "arguments": {"x": "\\ud800"}}'),
        *('{"name": "f"} and more', '{"function": "f"}'),
    ],
    ids=lambda text: text[:45],
)
def test_a_malformed_call_is_text(inside: str) -> None:
    answer = f"So \n{HERMES(inside)} "
    assert read("hermes", *answer) == (answer, [])


def test_one_call_at_a_time() -> None:
    both = HERMES(json.dumps(LISBON)) + HERMES(json.dumps(PORTO))
    assert read("hermes", *both, is_single=True) == ("", [LISBON])


# --------------------------------------------------------------------------------------------------
# Requests


def ask(name: str, messages: Any = None, **fields: Any) -> Job:
    fields = {"messages": messages or [user("hi")], "tools": [TOOL]} | fields
    body = parse_body(ChatRequest, json.dumps(fields).encode())
    engine = engine_of(name)
    return guided(engine, read_chat(engine, CONFIG, body))


def engine_of(name: str) -> Tokenising:
    engine = Tokenising(tokenizer_of(name))
    engine.stop_ids = [engine.tokenizer.eos_token_id]
    return engine


def written(name: str, messages: Any, **settings: Any) -> list[int]:
    settings = {"add_generation_prompt": True} | settings
    return tokenizer_of(name).apply_chat_template(messages, **settings)["input_ids"]


@pytest.mark.parametrize("form", CALLING)
def test_forms_are_found_in_the_template(form: str) -> None:
    name = CALLING[form]
    job = ask(name)
    assert job.caller == caller(form)
    marks = marks_of(tokenizer_of(name), FORMS[form])  # type: ignore[index]
    assert list(job.prompts[0].shown_ids) == list(marks.values())
    assert job.prompts[0].ids == written(name, [user("hi")], tools=[TOOL])
    body = TokenizeRequest(messages=[user("hi")], tools=[TOOL])  # type: ignore[list-item]
    assert read_text(Tokenising(tokenizer_of(name)), CONFIG, body) == job.prompts[0].ids


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("<tool_call>", "hermes"),
        ("<tool_call>\n<function=", None),
        ("[TOOL_CALLS]", "mistral"),
        ("[TOOL_CALLS] [ARGS]", None),
        ('{"name": "", "parameters": {}}', "llama3"),
        ("{{ tools }}", None),
    ],
)
def test_forms_of_templates(template: str, form: str | None) -> None:
    assert find_format(template) == form


def test_templates_see_tools_that_may_be_called() -> None:
    """A template may be for tools alone; without a choice the model sees none."""
    apart, name = "chatml, tools in a template apart", CALLING["hermes"]
    assert ask(apart).prompts[0].ids == written(apart, [user("hi")], tools=[TOOL])
    unchosen = ask(name, tool_choice="none")
    assert unchosen.caller is None and unchosen.prompts[0].ids == written(name, [user("hi")])
    assert ask(name, tools=[]).prompts[0].ids == written(name, [user("hi")])


@pytest.mark.parametrize("form", CALLING)
def test_calls_of_the_history_are_written_as_the_template_wants(form: str) -> None:
    """Clients send arguments as text, which these templates would write as text in text."""

    def chat(**settings: bool) -> list[Any]:
        called = {"role": "assistant", "content": None, "tool_calls": [call("Faro", **settings)]}
        result = {"role": "tool", "tool_call_id": "call00001", "content": "hot"}
        return [user("hi"), called, result]

    expected = written(CALLING[form], chat(), tools=[TOOL])
    for messages in (chat(), chat(as_text=True)):
        assert ask(CALLING[form], messages).prompts[0].ids == expected


JSON = {"type": "json_object"}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def with_schema(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "time", "parameters": schema, **more}}


FORCED = {"tool_choice": "required"}


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("tools", {"tools": [{"type": "function"}]}),
        ("tools", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        ("tools", {"tools": [{"type": "web", "function": {"name": "a"}}]}),
        ("tools", {"tools": [TOOL] * 129}),
        ("tools", {"tools": [with_schema([])]}),
        ("tools", {"tools": [with_schema(False)]}),
        ("tool_choice", {"tool_choice": "any"}),
        ("tool_choice", {"tool_choice": {"type": "function"}}),
        ("tool_choice", {"tool_choice": named("other")}),
        ("tool_choice", FORCED | {"tools": []}),
        ("response_format", FORCED | {"response_format": JSON}),
        ("structured_outputs", FORCED | {"structured_outputs": {"regex": "a"}}),
        ("tools", FORCED | {"ignore_eos": True}),
        ("tools", FORCED | {"tools": [with_schema({"$ref": "#/x"})]}),
        ("functions", {"functions": [TOOL["function"]]}),
    ],
    ids=str,
)
def test_what_tools_are_refused(param: str, fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        ask(CALLING["hermes"], **fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    with pytest.raises(ApiError, match="tools: "):  # its template has none
        ask("chatml")


def test_messages_that_the_template_leaves_out() -> None:
    """As by Mistral's and Qwen's, which know no such role."""
    with pytest.raises(ApiError, match=r"messages: .*message 1 \(role 'developer'\)"):
        ask(CALLING["mistral"], [{"role": "developer", "content": "be brief"}, user("hi")])


@pytest.mark.parametrize("name", ["chatml, tools", "mistral, tools"])
def test_an_answer_of_json_holds_no_calls(name: str) -> None:
    """Its strings may hold marks; text that matches another grammar may hold calls."""
    assert ask(name, response_format=JSON).caller is None
    assert ask(name, structured_outputs={"json": {"type": "object"}}).caller is None
    assert ask(name, response_format={"type": "text"}).caller == ask(name).caller
    assert ask(name, structured_outputs={"regex": "(.|\\n)*"}).caller == ask(name).caller
    assert ask(CALLING["llama3"], response_format=JSON).caller is not None  # its calls are JSON


def test_a_forced_call_beside_fields_that_constrain_nothing() -> None:
    forced = ask(CALLING["hermes"], tool_choice="required").grammar
    for name, value in (
        ("response_format", {"type": "text"}),
        ("structured_outputs", {"json": None, "json_object": False}),
    ):
        fields = {"tool_choice": "required", name: value}
        assert ask(CALLING["hermes"], **fields).grammar == forced


def test_tools_count_as_text() -> None:
    large = {"type": "function", "function": {"name": "f", "description": "a b " * 50_000}}
    with pytest.raises(ApiError) as caught:
        ask(CALLING["hermes"], tools=[large])
    assert caught.value.code == "context_length_exceeded"


# --------------------------------------------------------------------------------------------------
# Grammars

ZONE = {"$defs": {"Zone": {"enum": ["UTC", "CET"]}}, "type": "object", "required": ["zone"]}
ZONE |= {"properties": {"zone": {"$ref": "#/$defs/Zone"}}, "additionalProperties": False}
TIME = with_schema(ZONE, strict=True)


def write(form: str, *calls: dict[str, Any]) -> str:
    key = FORMS[form].key  # type: ignore[index]
    given = [json.dumps({"name": one["name"], key: one["arguments"]}) for one in calls]
    if form == "hermes":
        return "\n".join(map(HERMES, given))
    return "; ".join(given) if form == "llama3" else f"[TOOL_CALLS][{', '.join(given)}]"


def matches(job: Job, text: str) -> bool:
    tokenizer = tokenizer_of(CALLING[str(job.caller and find_form(job.caller))])
    (prompt,) = job.prompts
    assert prompt.guide is not None
    guide = prompt.guide.copy()
    try:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        guide.advance([*ids, tokenizer.eos_token_id])
    except UserError:
        return False
    return True


def find_form(caller: Caller) -> str:
    return next(name for name, form in FORMS.items() if form == caller.form)


@pytest.mark.parametrize("form", CALLING)
@pytest.mark.parametrize("choice", ["auto", "required", "time"])
def test_what_an_answer_may_be(form: str, choice: str) -> None:
    """A strict tool has its schema if it is called, any tool if a call is forced."""
    given: Any = choice if choice != "time" else named("time")
    job = ask(CALLING[form], tools=[TOOL, TIME], tool_choice=given)
    right, wrong = ({"name": "time", "arguments": {"zone": zone}} for zone in ("UTC", "EST"))
    is_forced, is_named = choice != "auto", choice == "time"
    assert matches(job, write(form, right)) and not matches(job, write(form, wrong))
    assert matches(job, write(form, LISBON)) == (not is_named)
    assert matches(job, "It is late. ") == (not is_forced)
    assert matches(job, "") == (not is_forced)
    assert not matches(job, write(form, right)[:-1])
    has_two = form != "llama3" and not is_named
    assert matches(job, write(form, right, LISBON)) == has_two
    for calls in ([right], [right, LISBON])[: 1 + has_two]:
        assert read(form, write(form, *calls)) == ("", calls)


def test_tools_that_are_not_strict_leave_answers_free() -> None:
    assert ask(CALLING["hermes"]).prompts[0].guide is None
    job = ask(CALLING["hermes"], tool_choice="required", parallel_tool_calls=False)
    assert matches(job, write("hermes", LISBON))
    assert not matches(job, write("hermes", LISBON, PORTO))


# --------------------------------------------------------------------------------------------------
# Replies


def reply(*parts: str, stop_reason: Any = "stop") -> tuple[list[dict[str, Any]], dict[str, Any]]:
    job = ask(CALLING["hermes"])
    engine = Tokenising(tokenizer_of(CALLING["hermes"]))
    made = Reply(engine, job, model="tiny")
    chunks = [Chunk([Piece(part, 0)], [5], [0]) for part in parts]
    whole = Generation([1], [5] * len(parts), "".join(parts), [], [], stop_reason)
    taken = [made.take(0, chunk) for chunk in [*chunks, Chunk([], [], [], answer=whole)]]
    return [event["choices"][0] for event in taken if event], made.body()["choices"][0]


def test_calls_are_streamed_as_deltas() -> None:
    answer = "So. " + HERMES(json.dumps(LISBON)) + HERMES(json.dumps(PORTO))
    events, choice = reply(*answer)
    assert "".join(event["delta"].get("content", "") for event in events) == "So."
    streamed = [one for event in events for one in event["delta"].get("tool_calls", [])]
    assert [one.pop("index") for one in streamed] == [0, 1]
    message = choice["message"]
    assert (message["content"], message["tool_calls"]) == ("So.", streamed)
    assert len({one["id"] for one in streamed}) == 2
    assert json.loads(streamed[1]["function"]["arguments"]) == PORTO["arguments"]
    assert [event["finish_reason"] for event in events[-2:]] == [None, "tool_calls"]
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("It is warm.", "stop"), (HERMES(json.dumps(LISBON))[:30], "length")],
    ids=["text", "a call that is cut"],
)
def test_an_answer_without_calls_is_text(answer: str, reason: str) -> None:
    events, choice = reply(*answer, stop_reason=reason)
    assert "".join(event["delta"].get("content", "") for event in events) == answer
    assert choice["message"] == {"role": "assistant", "content": answer, "refusal": None}
    assert choice["finish_reason"] == events[-1]["finish_reason"] == reason


@pytest.mark.parametrize("kind", tokenizer_pool.POOL)
def test_calls_are_read_from_the_tokens_of_public_tokenizers(kind: str) -> None:
    """Marks are tokens, special or not, or spelled; one in a string of a call is a letter."""
    tokenizer = tokenizer_pool.tokenizer_of(kind)
    cities = ["Rome", "a </tool_call> b", "<tool_call>", 'x"</tool_call>']
    calls = [{"name": "weather", "arguments": {"city": city}} for city in cities]
    answer = "so. " + "\n\n".join(HERMES(json.dumps(one)) for one in calls) + " and on"
    tokens = tokenizer_pool.spell(tokenizer, "x")
    for piece in re.split("(</?tool_call>)", answer):  # some would write spaces around tags
        tokens += tokenizer_pool.ids_of(kind, [piece]) or tokenizer_pool.spell(tokenizer, piece)
    shown_ids = list(marks_of(tokenizer, FORMS["hermes"]).values())
    live = LiveAnswer(PreparedPrompt(tokens[:1], 1, shown_ids=shown_ids), tokenizer)
    chunks = [
        live.add(Round([token], is_done=False, num_accepted=0, num_offered=0))
        for token in tokens[1:]
    ]
    texts = [chunk.text for chunk in [*chunks, live.cancel()]]
    assert read("hermes", *texts) == ("so. \n\n\n\n\n\n and on", calls)
