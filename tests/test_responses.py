"""/v1/responses: the official client reads scripted answers, and inputs become chats."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from chat_oracle import TOOL
from pydantic import BaseModel
from test_asking import assistant, user
from test_tools import CALLING, CONFIG, HERMES, LISBON, PORTO, engine_of
from test_tools import ask as ask_chat

from poss_jax.engine.answers import Chunk, Generation
from poss_jax.engine.text import Piece
from poss_jax.serving.bodies import ApiError, parse_body
from poss_jax.serving.requests import Job
from poss_jax.serving.responses import ResponseReply, ResponseRequest, read_response

FLAT = {"type": "function", **TOOL["function"]}
SEEN = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"at": "é"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "é"}'}}
CHAT = [
    {"role": "system", "content": "be brief"},
    user("hi"),
    assistant("So.") | {"tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
]
CITY = {"type": "object", "properties": {"city": {"enum": ["Faro"]}}, "required": ["city"]}


class City(BaseModel):
    city: str


def read(**fields: Any) -> tuple[ResponseRequest, Job]:
    body = parse_body(ResponseRequest, json.dumps({"input": "hi"} | fields).encode())
    return body, read_response(engine_of(CALLING["hermes"]), CONFIG, body)


def client(*parts: str, stop_reason: Any = "stop") -> Any:
    """Responses of the official client, whose server answers with these parts."""

    async def chunks() -> AsyncIterator[tuple[int, Chunk] | None]:
        yield None
        for part in parts:
            yield 0, Chunk([Piece(part, 0)], [5], [0])
        whole = Generation([1], [5] * len(parts), "".join(parts), [], [], stop_reason)
        yield 0, Chunk([], [], [], answer=whole)

    async def joined(events: AsyncIterator[bytes]) -> bytes:
        return b"".join([one async for one in events])

    def handle(request: httpx.Request) -> httpx.Response:
        try:
            body, job = read(**json.loads(request.content))
        except ApiError as error:
            return httpx.Response(error.status, json=error.body())
        reply = ResponseReply(body, engine_of(CALLING["hermes"]), job, model="tiny")
        if not body.stream:
            return httpx.Response(200, json=asyncio.run(reply.write_body(chunks())))
        kind = {"content-type": "text/event-stream"}
        content = asyncio.run(joined(reply.write_events(chunks())))
        return httpx.Response(200, content=content, headers=kind)

    web = httpx.Client(transport=httpx.MockTransport(handle))
    url = "http://localhost/v1"
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=web).responses


def test_a_text() -> None:
    options: Any = {"model": "tiny", "input": "hi", "instructions": "be brief"}
    whole = client("It is", " warm.").create(**options)
    events = list(client("It is", " warm.").create(**options, stream=True))
    assert [event.type.removeprefix("response.") for event in events] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress" and not events[0].response.output
    for answer in (whole, events[-1].response):
        assert answer.output_text == events[6].text == "It is warm."
        assert (answer.status, answer.model, answer.error) == ("completed", "tiny", None)
        assert answer.usage.output_tokens == 2 and answer.instructions == "be brief"
        assert not answer.store


def test_calls_are_items() -> None:
    """In the order of the answer, its texts without the blanks beside calls."""
    parts = "Let me look. " + HERMES(json.dumps(LISBON)) + "\nThen \n"
    parts += HERMES(json.dumps(PORTO)) + "\n" + HERMES(json.dumps(LISBON)) + " Well."
    options: Any = {"model": "tiny", "input": "hi", "tools": [FLAT]}
    whole = client(*parts).create(**options)
    with client(*parts).stream(**options) as events:
        streamed = events.get_final_response()
    for answer in (whole, streamed):
        items = [
            item.content[0].text if item.type == "message" else json.loads(item.arguments)
            for item in answer.output
        ]
        lisbon, porto = LISBON["arguments"], PORTO["arguments"]
        assert items == ["Let me look.", lisbon, "Then", porto, lisbon, "Well."]
        assert answer.output_text == "Let me look.ThenWell."
    assert streamed.output[1].status == "completed"
    assert len({item.id for item in streamed.output}) == len(streamed.output)


@pytest.mark.parametrize("parts", [(), ("It",)])
def test_an_answer_that_is_cut(parts: Any) -> None:
    answer = client(*parts, stop_reason="length").create(model="tiny", input="hi")
    assert (answer.status, answer.output_text) == ("incomplete", "".join(parts))
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]


def test_an_answer_is_parsed() -> None:
    answer = client('{"city": "Faro"}').parse(model="tiny", input="hi", text_format=City)
    assert answer.output_parsed == City(city="Faro")
    assert answer.text.format.name == "City"


@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_an_input_is_a_chat(instructions: str | None) -> None:
    expected = ask_chat(CALLING["hermes"], CHAT[instructions is None :])
    body, job = read(input=SEEN, instructions=instructions, tools=[FLAT], max_output_tokens=9)
    assert job.prompts[0].ids == expected.prompts[0].ids and job.caller == expected.caller
    assert job.prompts[0].max_new_tokens == body.max_output_tokens
    (alone,) = ask_chat(CALLING["hermes"], [user("hi")], tools=[]).prompts
    assert read()[1].prompts[0].ids == alone.ids


def test_settings_are_those_of_chats() -> None:
    _, job = read(seed=7, temperature=0.5, top_k=3, stop=["x"], draft=False)
    (prompt,) = job.prompts
    assert (prompt.sampling.seed, prompt.sampling.temperature, prompt.sampling.top_k) == (7, 0.5, 3)
    assert job.stop == ["x"] and not prompt.drafts


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"format": {"type": "json_schema", "name": "city", "schema": CITY}}},
        {"text": {"format": {"type": "json_object"}}},
        {"tools": [FLAT], "tool_choice": "required"},
        {"tools": [FLAT], "tool_choice": {"type": "function", "name": TOOL["function"]["name"]}},
        {"tools": [FLAT | {"strict": True}], "text": {"format": {"type": "text"}}},
    ],
    ids=str,
)
def test_what_constrains_an_answer(fields: Any) -> None:
    grammar = read(**fields)[1].grammar
    assert grammar is not None and grammar.name == ("tools" if "tools" in fields else "text")


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("background", {"background": True}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("n", {"n": 2}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": ["message.output_text.logprobs"]}),
        ("tools", {"tools": [{"type": "web_search"}]}),
        ("text", {"text": {"format": {"type": "xml"}}}),
        ("text", {"text": {"format": {}}}),
        ("text", {"text": {"format": "text"}}),
        ("response_format", {"response_format": {}}),
        ("conversation", {"conversation": {}}),
        ("input", {"input": []}),
        ("input", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        ("input", {"input": [{"role": "clown", "content": "hi"}]}),
        ("input", {"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}),
        ("input", {"input": 5}),
        ("max_output_tokens", {"max_output_tokens": 2_000}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("bad_words", {"bad_words": ["a"]}),
        ("metadata", {"metadata": {"a": float("nan")}}),
    ],
    ids=str,
)
def test_what_is_refused(param: str, fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message
