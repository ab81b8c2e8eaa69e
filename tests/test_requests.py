"""Requests as the server reads them, and names of tokens in its replies: without weights."""

import asyncio
import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_oracle import TOOL
from pydantic import ValidationError
from serving import Tokenising
from test_asking import CHATML, assistant, make_tokenizer, of_transformers, user
from test_text import byte_fallback, byte_level

from poss_jax.config.decoding import SamplingConfig, ServeConfig
from poss_jax.data.tokenizer import CHAT_TEMPLATE
from poss_jax.decode.sampling import SETTINGS, Sampling
from poss_jax.engine.answers import Chunk, TokenLogprobs
from poss_jax.engine.prompts import PreparedPrompt, fold_seed
from poss_jax.serving import app, requests
from poss_jax.serving.app import add_api, guarded
from poss_jax.serving.bodies import (
    FOREIGN,
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
from poss_jax.serving.replies import Reply
from poss_jax.serving.requests import (
    Job,
    read_chat,
    read_completion,
    read_text,
    read_tokenizer,
    read_tokens,
)

CONFIG = ServeConfig(target="none")
OPEN = [user("hi"), assistant("The answer")]
THINKING = CHATML + "{% if think is defined %}{{ think }}{% endif %}"
TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if m.content is defined else 'nothing' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments }}"
    "{{ call | string }}{% endfor %}{{ m['tool_call_id'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "é"}'}}
HISTORY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "hi", "name": "Zo"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Sunny.", "refusal": None, "tool_calls": []},
    {"role": "user", "content": "thanks"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
LONG_TEXT = "a b " * 50_000


def engine(template: str = THINKING) -> Tokenising:
    return Tokenising(make_tokenizer("byte level", template=template))


def read(reader: Tokenising | None = None, config: ServeConfig = CONFIG, **fields: Any) -> Job:
    """A completion if there is a prompt, else a chat, from the bytes of its body."""
    reader = reader or engine()
    if "prompt" in fields:
        body = parse_body(CompletionRequest, json.dumps(fields).encode())
        return read_completion(reader, config, body)
    content = json.dumps({"messages": [user("hi")]} | fields).encode()
    return read_chat(reader, config, parse_body(ChatRequest, content))


# --------------------------------------------------------------------------------------------------
# Messages


def test_all_fields_of_messages_reach_the_template() -> None:
    one = engine(TOOLS)
    ids = read(one, messages=HISTORY).prompts[0].ids
    assert ids == of_transformers(HISTORY, one.tokenizer)
    text = one.tokenizer.decode(ids)
    for part in ("user Zo\nhi", "<think>hm</think>nothingweather", "sunnyc1", "developer"):
        assert part in text


def test_fields_that_the_template_does_not_read() -> None:
    one = engine(CHATML)
    (prompt,) = read(one, messages=[user("hi") | {"mood": "good", "tags": []}]).prompts
    assert prompt.ids == of_transformers([user("hi")], one.tokenizer)


@pytest.mark.parametrize("content", [None, [], [{"type": "text", "text": ""}]])
def test_a_message_without_content_or_else_is_empty(content: Any) -> None:
    one = engine(TOOLS)
    (prompt,) = read(one, messages=[{"role": "user", "content": content}]).prompts
    assert prompt.ids == of_transformers([user("")], one.tokenizer)


@pytest.mark.parametrize("role", ["</s>", "", "User", "user\nhi\n### system", LONG_TEXT])
def test_roles_that_no_template_knows(role: str) -> None:
    with pytest.raises(ApiError, match="messages: want a role of assistant, developer, ") as caught:
        read(engine(CHAT_TEMPLATE), messages=[{"role": role, "content": "x"}])
    assert caught.value.param == "messages" and len(caught.value.message) < 300


def test_a_role_that_the_template_names() -> None:
    one = engine(CHATML.replace("{{ m.role }}", "{{ 'tool' if m.role == 'ipython' else m.role }}"))
    messages = [{"role": "ipython", "content": "x"}]
    (prompt,) = read(one, messages=messages).prompts
    assert prompt.ids == of_transformers(messages, one.tokenizer)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {}),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"chat_template_kwargs": {"think": "no"}}, {"add_generation_prompt": True, "think": "no"}),
    ],
    ids=str,
)
def test_chats_are_written_as_transformers_does(fields: Any, settings: Any) -> None:
    expected = engine().tokenizer.apply_chat_template(OPEN, **settings)["input_ids"]
    (prompt,) = read(messages=OPEN, **fields).prompts
    assert prompt.ids == expected
    # What continues a message is decoded behind it: its first word keeps the space.
    assert prompt.is_chat == ("continue_final_message" not in fields)
    body = TokenizeRequest(messages=OPEN, **fields)  # type: ignore[arg-type]
    assert read_text(engine(), CONFIG, body) == expected


def test_no_field_of_a_chat_can_write_a_special_token() -> None:
    tokenizer = engine().tokenizer
    (prompt,) = read(chat_template_kwargs={"think": tokenizer.eos_token}).prompts
    assert tokenizer.decode(prompt.ids).endswith(tokenizer.eos_token)
    assert tokenizer.eos_token_id not in prompt.ids


# --------------------------------------------------------------------------------------------------
# Refusals

CONTINUED = {"continue_final_message": True}
NO_CONTENT = [user("hi"), {"role": "assistant", "content": None, "tags": 1}]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("messages: only content of type text", {"messages": [user([IMAGE])]}),
        ("messages: List should have at most 4000", {"messages": [user("")] * 4001}),
        ("messages: the target's", CONTINUED | {"messages": NO_CONTENT}),
        ("tools: this model's chat template has none", {"tools": [TOOL]}),
        ("response_format: want a type of text", {"response_format": {"type": "xml"}}),
        ("modalities: only text is served", {"modalities": ["audio"]}),
        ("top_logprobs: want logprobs to be true", {"top_logprobs": 2}),
        ("logprobs: want at most 20", {"logprobs": True, "top_logprobs": 21}),
        ("continue_final_message: want an assistant's message", CONTINUED),
        ("continue_final_message: ", CONTINUED | {"messages": OPEN, "add_generation_prompt": True}),
        ("lookup: copies want an engine or server with", {"lookup": True}),
        ("temperature: Input should be less", {"temperature": 3}),
        ("temperature: want no number closer to 0 than 1e-20", {"temperature": 1e-25}),
        ("n: Input should be greater", {"n": 0}),
        ("n: Input should be less", {"n": 129}),
        ("n: Input should be a valid integer", {"n": True}),
        ("n: want at most 128 choices in all", {"prompt": ["a"] * 65, "n": 2}),
        ("stop: want at most 16 strings of at most 1,000", {"stop": "x" * 1001}),
        ("stop: want strings, got an empty one", {"stop": ""}),
        ("stop: want at most 16 strings of at most 1,000", {"stop": ["a"] * 17}),
        ("stop: want text or a list of texts", {"stop": 5}),
        ("logit_bias: want token ids of 0 to 9999, got 10000", {"logit_bias": {"10000": 1}}),
        ("logit_bias.05.[key]: String should match", {"logit_bias": {"05": 1}}),
        ("logit_bias: want at most 300", {"logit_bias": {str(i): 1 for i in range(301)}}),
        ("logit_bias.5: Input should be less", {"logit_bias": {"5": 101}}),
        ("stop_token_ids: want ids of the vocabulary", {"stop_token_ids": [10_000]}),
        ("stop_token_ids: want at most 15", {"stop_token_ids": [2] * 16}),
        ("stream: Input should be a valid boolean", {"stream": 1}),
        ("stream_options.include_usage: ", {"stream_options": {"include_usage": 1}}),
        ("min_p: Input should be less", {"min_p": 1.5}),
        ("seed: Input should be less", {"seed": 2**64}),
        ("best_of: want the same as n", {"prompt": "x", "best_of": 3}),
        ("suffix: not served", {"prompt": "x", "suffix": "x"}),
        ("max_tokens: want at least 1, or echo", {"prompt": "x", "max_tokens": 0}),
        ("prompt_logprobs: want at most 20", {"prompt": "x", "prompt_logprobs": 21}),
        ("prompt_logprobs: not", {"prompt": "x", "prompt_logprobs": 1, "stream": True}),
        ("continued_tokens: want fewer", {"prompt": "x", "continued_tokens": 99}),
        ("prompt: want at least one token", {"prompt": ""}),
        ("prompt: want at least one token", {"prompt": [[]]}),
        ("prompt: want token ids of 0 to 9999, got 10000", {"prompt": [10_000]}),
        ("prompt: want text, token ids, or a list of up to 128", {"prompt": {"a": 1}}),
        ("prompt: want text, token ids, or a list of up to 128", {"prompt": [1, "a"]}),
        ("prompt: want text, token ids, or a list of up to 128", {"prompt": [1.0]}),
        *(
            (f"chat_template_kwargs: {name} cannot be set", {"chat_template_kwargs": {name: "x"}})
            for name in ("messages", "add_generation_prompt", "eos_token", "tools")
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_is_refused(message: str, fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert caught.value.message.startswith(message)
    assert (caught.value.status, caught.value.param) == (400, re.split("[.:]", message)[0])


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("max_tokens", {"max_tokens": 1000}),
        ("prompt", {"prompt": [5] * 1001}),
        ("prompt", {"prompt": "1 " * 900}),
        ("prompt", {"prompt": "x" * 1_000_000}),
        ("messages", {"messages": [user(LONG_TEXT)]}),
        ("messages", {"messages": [user("x") | {"name": LONG_TEXT}]}),
        ("messages", {"chat_template_kwargs": {"x": LONG_TEXT}}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_too_long(param: str, fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 0.5) for name in sorted(FOREIGN.keys() - {"skip_special_tokens"})),
        ("skip_special_tokens", False),
        *((name, {}) for name in ("guided_json", "json_schema")),
        *((name, "") for name in ("guided_json", "guided_regex", "regex", "grammar")),
        *((name, "") for name in ("stop_regex", "chat_template")),
        *((name, []) for name in ("guided_choice", "allowed_token_ids")),
        ("thinking_token_budget", 0),
    ],
    ids=str,
)
def test_fields_of_other_engines_are_not_ignored(name: str, value: Any) -> None:
    """An empty value says something, too."""
    with pytest.raises(ApiError, match=f" {name}: not served") as caught:
        read_completion(engine(), CONFIG, CompletionRequest(prompt=[5], **{name: value}))
    assert caught.value.param == name


def test_fields_of_other_engines_that_change_nothing() -> None:
    for empty in (FOREIGN, dict.fromkeys(FOREIGN), {"bad_words": [], "top_a": 0.0}):
        assert read_completion(engine(), CONFIG, CompletionRequest(prompt=[5], **empty)).prompts


NO_OBJECT = "body: want a JSON object, with Content-Type: application/json"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "x", }', "body: want JSON, got none: trailing comma at line 1 column"),
        (b"{", "body: want JSON"),
        (b"\xff\xfe", "body: want JSON"),
        (b'{"prompt": "\\ud800"}', "body: want JSON"),
        (b'{"prompt": "a", "stop": "\\ud800"}', "body: want JSON"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: "),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", ""),
        (b'{"prompt": "a", "user": {"a": 1}}', "user: "),
        (b"null", NO_OBJECT),
        (b"[]", NO_OBJECT),
        (b'{"prompt": "a", "zz": [%s[]]}' % (b"[]," * 10_000), "body: want at most 10,000 lists"),
        (b'{"prompt": "a", "zz": [%s{}]}' % (b"{}," * 10_000), "body: want at most 10,000 lists"),
        (b'{"prompt": "a", "zz": %s1%s}' % (b"[" * 9999, b"]" * 9999), "body: want JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_malformed_bodies(content: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, content)
    assert caught.value.status == 400 and caught.value.message.startswith(message)


def test_brackets_in_texts_are_no_lists_and_objects() -> None:
    """Behind escaped quotes neither."""
    brackets = '[{"\\\\字' * 10_000
    content = json.dumps({"prompt": brackets}).encode()
    assert parse_body(CompletionRequest, content).prompt == brackets


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [None, 1] * 20_000}),
        (CompletionRequest, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(15_000)))}),
        (ChatRequest, {"messages": [{}] * 60_000}),
    ],
    ids=["prompt", "logit_bias", "messages"],
)
def test_thousands_of_mistakes_are_one(kind: Any, body: Any) -> None:
    """Millions of mistakes, each reported, stopped the server for a minute."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4  # one per kind of prompt


def test_how_many_log_probabilities_a_reply_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """One choice of full length may always have all."""
    monkeypatch.setattr(requests, "_MOST_LOGPROBS", 1000)
    config = ServeConfig(target="none", max_logprobs=5, max_length=256)
    asked: Any = {"prompt": [5], "logprobs": 5}
    assert read(config=config, n=1, max_tokens=255, **asked).prompts
    assert len(read(config=config, n=16, max_tokens=16, **asked).prompts) == 16
    with pytest.raises(ApiError, match=r"logprobs: want at most 1,536 in all choices, got up to"):
        read(config=config, n=16, max_tokens=17, **asked)
    with pytest.raises(ApiError, match="logprobs: not served"):
        read(config=ServeConfig(target="none", max_logprobs=0), prompt="a", logprobs=0)


# --------------------------------------------------------------------------------------------------
# Settings, texts and ids


def test_every_sampling_setting_has_a_field_and_a_column() -> None:
    names = {field.name for field in fields(SamplingConfig)}
    assert names == {*SETTINGS, "logit_bias"} and names <= set(CommonRequest.model_fields)
    assert {field.name for field in fields(Sampling)} == {*SETTINGS, "bias_ids", "bias"}


def test_settings_that_are_given_win_over_the_server_s() -> None:
    config = ServeConfig(target="none", sampling={"logit_bias": {3: 1.0}})  # type: ignore[arg-type]
    for given, want in ((None, {3: 1.0}), ({}, {})):
        (prompt,) = read(config=config, prompt=[5], logit_bias=given).prompts
        assert prompt.sampling.logit_bias == want
    assert [read(lookup=choice).prompts[0].lookup for choice in (None, False)] == [True, False]


def test_what_an_answer_continues() -> None:
    """A chat's answer is decoded alone, others behind their prompt."""
    for is_chat in (False, True):
        (prompt,) = read(prompt=[5, 6], continued_tokens=1, continued_chat=is_chat).prompts
        assert (prompt.num_continued, prompt.is_chat) == (1, is_chat)


def test_all_bits_of_a_seed_count() -> None:
    """Small ones are the device's own, so that their texts stay."""
    small, shifts = [0, 1, 7, 2**32 - 1], [0, 2**32, 2**33, 2**63, -(2**32)]
    assert list(map(fold_seed, small)) == small
    seeds = [fold_seed(seed + shift) for seed in small for shift in shifts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)


def test_ids_to_text_and_back() -> None:
    one = Tokenising(byte_level())
    ids = read_text(one, CONFIG, TokenizeRequest(prompt="a中😀</s>é b"))
    assert read_tokens(one, CONFIG, DetokenizeRequest(tokens=ids)) == "a中😀</s>é b"
    assert read_tokens(one, CONFIG, DetokenizeRequest(tokens=[])) == ""
    for token in (-1, 10_000):
        with pytest.raises(ApiError, match="tokens: want ids of the vocabulary"):
            read_tokens(one, CONFIG, DetokenizeRequest(tokens=[token]))
    for both in ({}, {"prompt": "a", "messages": OPEN}):
        with pytest.raises(ApiError, match="prompt: want this or messages"):
            read_text(one, CONFIG, TokenizeRequest(**both))


def test_a_text_without_the_special_tokens_that_a_tokenizer_adds() -> None:
    one = Tokenising(make_tokenizer("byte level", single="<s> $A"))
    bare = read_text(one, CONFIG, TokenizeRequest(prompt="</s>a", add_special_tokens=False))
    assert read_text(one, CONFIG, TokenizeRequest(prompt="</s>a")) == [1, *bare] != bare
    assert read(one, prompt="</s>a", add_special_tokens=False).prompts[0].ids == bare
    assert read_tokenizer(one)["eos_token"] == "</s>"


# --------------------------------------------------------------------------------------------------
# Names of tokens in replies


def show(tokenizer: Any, tokens: list[int], top: list[int], *, is_chat: bool) -> dict[str, Any]:
    """Log-probabilities of tokens, at each of which the same ones are likely."""
    before = tokenizer("b")["input_ids"][-1:]
    prompt = PreparedPrompt(before, len(tokens), is_chat=is_chat)
    job = Job([prompt], [], len(top), 1, [""], is_chat=is_chat)
    reply = Reply(Tokenising(tokenizer), job, model="tiny")
    row = TokenLogprobs(-0.5, top, [-float(place) for place in range(len(top))])
    event: Any = reply.take(0, Chunk([], tokens, [0] * len(tokens), logprobs=[row] * len(tokens)))
    return event["choices"][0]["logprobs"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_a_text_are_those_of_its_tokens(make: Any) -> None:
    tokenizer, text = make(), "a中😀é b"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    content = show(tokenizer, ids, ids[:1], is_chat=True)["content"]
    assert any("\ufffd" in token["token"] for token in content)
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == text
    assert all(token["top_logprobs"][0]["bytes"] == content[0]["bytes"] for token in content)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_every_likely_token_has_a_name_of_its_own(make: Any) -> None:
    tokenizer = make()
    beyond = [len(tokenizer) + 1, len(tokenizer) + 2]  # targets may embed more than there are
    letter, part = (tokenizer(text)["input_ids"][-1] for text in ("b", "中"))
    top = [part, *beyond, letter, *range(40, 56)]
    shown = show(tokenizer, [part, beyond[1], letter], top, is_chat=False)
    assert list(shown["top_logprobs"][0].values()) == [-float(place) for place in range(20)]
    assert shown["tokens"] == [rf"bytes:\x{0xAD:02x}", f"token_id:{beyond[1]}", "b"]
    for name, place in zip(shown["tokens"], (0, 2, 3), strict=True):
        assert all(row[name] == -float(place) for row in shown["top_logprobs"])


def test_tokens_of_one_text() -> None:
    tokenizer: Any = byte_fallback()
    byte, letter = tokenizer.convert_tokens_to_ids(["<0x62>", "b"])  # both are b
    shown = show(tokenizer, [letter], [byte, letter], is_chat=False)
    assert shown["top_logprobs"] == [{"b": 0.0, f"token_id:{letter}": -1.0}]
    assert shown["tokens"] == [f"token_id:{letter}"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("is_text", [True, False])
def test_offsets_of_an_echo_are_places_in_its_text(make: Any, is_text: bool) -> None:
    """A prompt that is sent as text may spell out special tokens; of ids they are no text."""
    tokenizer: Any = make()
    names = ["<s>", "b", "</s>", "b", "<s>", "</s>", "b"]  # the tokenizer added the first
    ids = tokenizer.convert_tokens_to_ids(names)
    text = "".join(names[1:]) if is_text else tokenizer.decode(ids, skip_special_tokens=True)
    reply = Reply(Tokenising(tokenizer), Job([PreparedPrompt(ids, 1)], [], 0, 1, [text]), model="m")
    reply.take_scores(0, [TokenLogprobs(-1.0, [], [])] * (len(ids) - 1))
    shown = reply.first_events()[0]["choices"][0]["logprobs"]
    assert shown["tokens"] == names
    ends = [*shown["text_offset"][1:], len(text)]
    parts = [text[i:j] for i, j in zip(shown["text_offset"], ends, strict=True)]
    assert parts == (["", *names[1:]] if is_text else ["", "b", "", "b", "", "", "b"])


# --------------------------------------------------------------------------------------------------
# The application without models


def call(config: ServeConfig, method: str, path: str, *, key: str | None, **headers: str) -> Any:
    """Asks an application that has endpoints but no models."""
    from fastapi import FastAPI

    app = FastAPI(title="poss_jax", docs_url=None, redoc_url=None)
    add_api(app)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=guarded(app, config, api_key=key))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("allowed", "is_allowed"),
    [((), False), (("http://b",), False), (("http://a", "http://b"), True), (("*",), True)],
)
def test_pages_of_other_sites(allowed: tuple[str, ...], is_allowed: bool) -> None:
    config = ServeConfig(target="none", allowed_origins=allowed)
    name, origin = "access-control-allow-origin", {"origin": "http://a"}
    for path in ("/docs", "/openapi.json"):  # with a key or refused for lack of one
        assert (name in call(config, "GET", path, key="secret", **origin).headers) == is_allowed
    preflight = origin | {"access-control-request-method": "POST"}
    preflight |= {"access-control-request-headers": "authorization, content-type"}
    reply = call(config, "OPTIONS", "/v1/completions", key="secret", **preflight)
    assert (reply.status_code == 200) == is_allowed


@pytest.mark.parametrize(
    ("name", "allowed", "is_known"),
    [
        ("localhost:8000", (), True),
        ("LOCALHOST:8000", (), True),
        ("10.1.2.3", (), True),
        ("[fd00::1]:80", (), True),
        ("", (), True),
        ("poss.example", (), False),
        ("POSS.example:8000", ("poss.Example",), True),
        ("poss.example.evil", ("poss.example",), False),
        ("localhost.evil.example", (), False),
        ("127.0.0.1.x", (), False),
        ("poss.example:80:80", ("poss.example",), False),
        ("evil", ("*",), True),
    ],
)
def test_names_of_a_server(name: str, allowed: tuple[str, ...], is_known: bool) -> None:
    config = ServeConfig(target="none", allowed_hosts=allowed)
    reply = call(config, "GET", "/docs", key=None, host=name)
    assert reply.status_code == (200 if is_known else 403)
    assert is_known or "localhost" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("allowed_origins", ["", "x", "chat.example", "https://", "https://A", "https://a/"]),
        ("allowed_hosts", ["", " ", "https://a", "a:80", "a/b", "ä"]),
    ],
)
def test_names_that_no_header_holds(field: str, names: list[str]) -> None:
    valid = {
        "allowed_origins": ("http://a:80", "http://[::1]"),
        "allowed_hosts": ("*", "a.example"),
    }
    assert ServeConfig(target="none", **{field: valid[field]})
    for name in names:
        with pytest.raises(ValidationError, match=f"{field}.2\n"):
            ServeConfig(target="none", **{field: (*valid[field], name)})


def test_pages_need_no_network_and_read_no_text_as_html() -> None:
    page = call(CONFIG, "GET", "/docs", key="secret")
    assert "POST /v1/chat/completions" in page.text and "stop_token_ids" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http:" not in page.text and "https:" not in page.text
    chat = (Path(app.__file__).parent / "chat.html").read_text()
    assert not re.search(r"https?://|\bsrc=|@import|url\(", chat)
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|DOMParser|document\.write"
    assert not re.search(ways, chat) and "textContent" in chat
