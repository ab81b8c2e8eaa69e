"""Fields of requests as the server reads them: without weights."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from test_asking import CHATML, assistant, make_tokenizer, user
from test_messages import Tokenising
from test_text import byte_level

from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.prompts import fold_seed
from poss_jax.serving import app
from poss_jax.serving.app import add_api, guarded
from poss_jax.serving.bodies import (
    FOREIGN,
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse_body,
)
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


def engine(template: str = THINKING) -> Tokenising:
    return Tokenising(make_tokenizer("byte level", template=template))


def chat(messages: Any, **fields: Any) -> Job:
    return read_chat(engine(), CONFIG, ChatRequest(messages=messages, **fields))


def ids_of_transformers(messages: Any, **settings: Any) -> list[int]:
    return engine().tokenizer.apply_chat_template(messages, **settings)["input_ids"]


def test_copies_may_be_left_out_and_are_refused_where_there_are_none() -> None:
    jobs = [chat(OPEN, lookup=choice) for choice in (None, False)]
    assert [job.prompts[0].lookup for job in jobs] == [True, False]
    with pytest.raises(ApiError, match="lookup: copies want an engine or server with") as caught:
        chat(OPEN, lookup=True)
    assert (caught.value.status, caught.value.param) == (400, "lookup")


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
    expected = ids_of_transformers(OPEN, **settings)
    (prompt,) = chat(OPEN, **fields).prompts
    assert prompt.ids == expected
    # What continues a message is decoded behind it: its first word keeps the space.
    assert prompt.is_chat == ("continue_final_message" not in fields)
    body = TokenizeRequest(messages=OPEN, **fields)
    assert read_text(engine(), CONFIG, body) == expected


def test_no_field_of_a_chat_can_write_a_special_token() -> None:
    eos = engine().tokenizer.eos_token
    (prompt,) = chat([user("hi")], chat_template_kwargs={"think": eos}).prompts
    text = engine().tokenizer.decode(prompt.ids)
    assert text.endswith(eos) and engine().tokenizer.eos_token_id not in prompt.ids


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("continue_final_message", {"messages": [user("hi")]}),
        ("continue_final_message", {"messages": OPEN, "add_generation_prompt": True}),
        ("messages", {"messages": [user("hi"), {"role": "assistant", "content": None, "a": 1}]}),
    ],
    ids=str,
)
def test_what_cannot_be_continued(param: str, fields: Any) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields, continue_final_message=True)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt", "eos_token", "tools"])
def test_variables_that_the_template_gets_from_elsewhere(name: str) -> None:
    with pytest.raises(ApiError, match=f"chat_template_kwargs: {name} cannot"):
        chat(OPEN, chat_template_kwargs={name: "x"})


def test_variables_count_as_text() -> None:
    with pytest.raises(ApiError) as caught:
        chat(OPEN, chat_template_kwargs={"x": "a b " * 50_000})
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_fields_of_other_engines_are_not_ignored(name: str) -> None:
    fields = {name: False if name == "skip_special_tokens" else 0.5}
    with pytest.raises(ApiError) as caught:
        read_completion(engine(), CONFIG, CompletionRequest(prompt=[5], **fields))
    assert (caught.value.status, caught.value.param) == (400, name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, {}) for name in ("guided_json", "json_schema")),
        *((name, "") for name in ("guided_json", "guided_regex", "regex", "grammar")),
        *((name, "") for name in ("stop_regex", "chat_template")),
        *((name, []) for name in ("guided_choice", "allowed_token_ids")),
        ("thinking_token_budget", 0),
    ],
)
def test_an_empty_value_says_something(name: str, value: Any) -> None:
    with pytest.raises(ApiError, match=f"{name}: not served"):
        read_completion(engine(), CONFIG, CompletionRequest(prompt=[5], **{name: value}))


def test_no_bias_replaces_the_server_s() -> None:
    config = ServeConfig(target="none", sampling={"logit_bias": {3: 1.0}})  # type: ignore[arg-type]
    for given, want in ((None, {3: 1.0}), ({}, {})):
        body = CompletionRequest(prompt=[5], logit_bias=given)
        assert read_completion(engine(), config, body).prompts[0].sampling.logit_bias == want


def test_fields_of_other_engines_that_change_nothing() -> None:
    for empty in (FOREIGN, dict.fromkeys(FOREIGN), {"bad_words": [], "top_a": 0.0}):
        assert read_completion(engine(), CONFIG, CompletionRequest(prompt=[5], **empty)).prompts


def test_ids_to_text_and_back() -> None:
    one = Tokenising(byte_level())
    ids = read_text(one, CONFIG, TokenizeRequest(prompt="a中😀</s>é b"))
    assert read_tokens(one, CONFIG, DetokenizeRequest(tokens=ids)) == "a中😀</s>é b"
    assert read_tokens(one, CONFIG, DetokenizeRequest(tokens=[])) == ""


@pytest.mark.parametrize("fields", [{}, {"prompt": "a", "messages": OPEN}], ids=["none", "both"])
def test_a_text_or_a_chat_is_tokenised(fields: Any) -> None:
    with pytest.raises(ApiError, match="prompt: want this or messages"):
        read_text(engine(), CONFIG, TokenizeRequest(**fields))


def test_a_text_without_the_special_tokens_that_a_tokenizer_adds() -> None:
    one = Tokenising(make_tokenizer("byte level", single="<s> $A"))
    bare = read_text(one, CONFIG, TokenizeRequest(prompt="</s>a", add_special_tokens=False))
    assert read_text(one, CONFIG, TokenizeRequest(prompt="</s>a")) == [1, *bare] != bare
    body = CompletionRequest(prompt="</s>a", add_special_tokens=False)
    assert read_completion(one, CONFIG, body).prompts[0].ids == bare
    assert read_tokenizer(one)["eos_token"] == "</s>"


def test_ids_that_are_no_tokens() -> None:
    for ids in ([-1], [10_000]):
        with pytest.raises(ApiError, match="tokens: want ids of the vocabulary"):
            read_tokens(engine(), CONFIG, DetokenizeRequest(tokens=ids))


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
    wanted = {"access-control-request-method": "POST"}
    wanted |= {"access-control-request-headers": "authorization, content-type"}
    asked = call(config, "OPTIONS", "/v1/completions", key="secret", **origin, **wanted)
    assert (asked.status_code == 200) == is_allowed


@pytest.mark.parametrize(
    ("name", "allowed", "is_known"),
    [
        ("localhost:8000", (), True),
        ("10.1.2.3", (), True),
        ("[fd00::1]:80", (), True),
        ("", (), True),
        ("poss.example", (), False),
        ("poss.example", ("poss.example",), True),
        ("POSS.example:8000", ("poss.Example",), True),
        ("poss.example.evil", ("poss.example",), False),
        ("LOCALHOST:8000", (), True),
        ("evil.example:8000", (), False),
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


@pytest.mark.parametrize("origin", ["", "x", "chat.example", "https://", "https://A", "https://a/"])
def test_origins_that_no_browser_sends(origin: str) -> None:
    with pytest.raises(ValidationError, match="allowed_origins: want"):
        ServeConfig(target="none", allowed_origins=("http://a:80", "http://[::1]", origin))


@pytest.mark.parametrize("name", ["", " ", "https://a", "a:80", "a/b", "ä"])
def test_hosts_that_no_header_names(name: str) -> None:
    with pytest.raises(ValidationError, match="allowed_hosts: want"):
        ServeConfig(target="none", allowed_hosts=("*", "chat.example", name))


def test_all_bits_of_a_seed_count() -> None:
    """Small ones are the device's own, so that their texts stay."""
    small, shifts = [0, 1, 7, 2**32 - 1], [0, 2**32, 2**33, 2**63, -(2**32)]
    assert list(map(fold_seed, small)) == small
    seeds = [fold_seed(seed + shift) for seed in small for shift in shifts]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**32 for seed in seeds)
    for seed in (2**64, -(2**63) - 1):
        with pytest.raises(ApiError) as caught:
            parse_body(CompletionRequest, json.dumps({"prompt": "a", "seed": seed}).encode())
        assert caught.value.param == "seed"


def test_the_list_of_endpoints_needs_no_network() -> None:
    page = call(CONFIG, "GET", "/docs", key="secret")
    assert "POST /v1/chat/completions" in page.text and "stop_token_ids" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http:" not in page.text and "https:" not in page.text


# The chat page: what a model writes is never read as HTML.
PAGE = (Path(app.__file__).parent / "chat.html").read_text()


def test_the_page_never_reads_text_as_html() -> None:
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|DOMParser|document\.write"
    assert not re.search(ways, PAGE) and "textContent" in PAGE


def test_the_page_takes_nothing_from_elsewhere() -> None:
    assert not re.search(r"https?://|\bsrc=|@import|url\(", PAGE)
