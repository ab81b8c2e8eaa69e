"""The server under clients that leave, flood it, or send what no client should."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import fields, replace
from threading import Barrier
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import Runs
from pydantic import ValidationError
from serving import MODEL, Served, request_bytes, serving, until

from poss_jax import Engine, TreeConfig
from poss_jax.config.decoding import EngineConfig, SamplingConfig, SamplingOptions, ServeConfig
from poss_jax.config.reading import UserError
from poss_jax.decode.sampling import SETTINGS, Sampling
from poss_jax.engine.scheduler import Scheduler
from poss_jax.serving import requests, service
from poss_jax.serving.app import create_app, make_slots
from poss_jax.serving.bodies import (
    ApiError,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    parse_body,
)
from poss_jax.serving.guard import read_api_key
from poss_jax.serving.requests import read_completion

KEY = "secret"
ENDLESS = {"ignore_eos": True}
LONG = {"model": MODEL, "prompt": "def area_7", "max_tokens": 200} | ENDLESS
AUTH = f"authorization: Bearer {KEY}"
STREAM = request_bytes("/v1/completions", LONG | {"stream": True}, AUTH)


@pytest.fixture(scope="module")
def served(runs: Runs) -> Iterator[Served]:
    """A server of one slot, with a key and a short queue."""
    tree = TreeConfig(depth=3, top_k=2, total_tokens=6)  # the same programs as in test_serving
    engine = Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=tree))
    small = {"batch_size": 1, "slots": (1,), "max_queue": 2, "max_body_mib": 0.25}
    sampling = SamplingOptions(temperature=0.0)
    with serving(engine, api_key=KEY, sampling=sampling, **small) as served:
        until(lambda: served.service.is_ready, seconds=300)
        yield served
        assert served.scheduler.error is None


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    yield
    until(lambda: is_idle(served), seconds=20)


@pytest.fixture
def slow(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every round take 0.1 s, so that an answer of 200 tokens takes more than 4 s."""
    slots = served.scheduler._slots
    run = slots.run

    def run_slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return run(*args, **options)

    monkeypatch.setattr(slots, "run", run_slowly)


def is_idle(served: Served) -> bool:
    return served.scheduler.num_running == 0 and served.scheduler.num_waiting == 0


def is_running(served: Served) -> bool:
    return served.scheduler.num_running == 1


def soon(served: Served) -> None:
    """Waits until no slot is taken, for a shorter time than any answer takes."""
    until(lambda: is_idle(served), seconds=2.5)


def post(served: Served, body: Any, path: str = "/v1/completions") -> Any:
    return served.post(path, body, authorization=f"Bearer {KEY}")


# --------------------------------------------------------------------------------------------------
# Clients that leave


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_a_stream_frees_its_slot(served: Served) -> None:
    stream = served.client(api_key=KEY).completions.create(
        model=MODEL, prompt="def area_7", max_tokens=200, stream=True, extra_body=ENDLESS
    )
    assert next(iter(stream)).choices[0].text
    assert is_running(served)
    stream.close()
    soon(served)
    assert served.scheduler.stats.finished["cancelled"] >= 1


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_a_client_that_leaves_before_anything_came(served: Served, is_streamed: bool) -> None:
    body = request_bytes("/v1/completions", LONG | {"stream": is_streamed}, AUTH)
    with closing(served.connect(body)):
        until(lambda: is_running(served))
    soon(served)


@pytest.mark.usefixtures("slow")
def test_a_client_that_leaves_while_it_waits(served: Served) -> None:
    with flood(served, num_waiting=0):
        with closing(served.connect(STREAM)):
            until(lambda: served.scheduler.num_waiting == 1)
        until(lambda: served.scheduler.num_waiting == 0, seconds=1)


# --------------------------------------------------------------------------------------------------
# Too many, too much


@contextmanager
def flood(served: Served, num_waiting: int) -> Iterator[None]:
    """Clients of which one is answered, and the others wait."""
    with ExitStack() as stack:
        stack.enter_context(closing(served.connect(STREAM)))
        until(lambda: is_running(served))
        for _ in range(num_waiting):
            stack.enter_context(closing(served.connect(STREAM)))
        until(lambda: served.scheduler.num_waiting == num_waiting)
        yield
    soon(served)


@pytest.mark.usefixtures("slow")
def test_a_full_queue_takes_no_request_and_no_part_of_one(served: Served) -> None:
    with flood(served, num_waiting=1):
        assert post(served, LONG | {"n": 100}).status_code == 429
        assert served.scheduler.num_waiting == 1
    with flood(served, num_waiting=2):
        with served.client(api_key=KEY) as client, pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model=MODEL, prompt="def")
        assert caught.value.response.headers["retry-after"] == "1"
        assert served.get("/health").status_code == 200


def test_bodies_that_are_too_large(served: Served) -> None:
    """Clients read why, even while they send."""
    answer = served.exchange(request_bytes("/v1/completions", b" " * 2**23, AUTH))
    assert answer.startswith(b"HTTP/1.1 413") and answer.endswith(b"}}")
    body = json.dumps({"prompt": "x" * 300_000}).encode()
    response = post(served, body)
    assert response.status_code == 413 and response.json()["error"]["message"]
    chunked = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [body[:200_000]] * 2)
    headers = [AUTH, "transfer-encoding: chunked"]
    answer = served.exchange(request_bytes("/v1/completions", chunked + b"0\r\n\r\n", *headers))
    assert answer.startswith(b"HTTP/1.1 413")
    endless = request_bytes("/v1/completions", b"", AUTH, "content-length: " + "9" * 19)
    assert served.exchange(endless).startswith(b"HTTP/1.1 4")


@pytest.mark.parametrize(("depth", "status"), [(100, 200), (20_000, 400)])
def test_how_deep_a_body_may_be(served: Served, depth: int, status: int) -> None:
    for left, right in ("[]", ('{"a":', "}")):
        nested = left * depth + "1" + right * depth
        body = f'{{"max_tokens": 1, "prompt": "a", "unknown": {nested}}}'
        assert post(served, body.encode()).status_code == status


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [None, 1] * 20_000},
        {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(15_000)), "x")},
        {"messages": [{}] * 60_000},
    ],
    ids=lambda body: str(body)[:40],
)
def test_thousands_of_mistakes_are_one(served: Served, body: Any) -> None:
    """Millions of mistakes, each reported, stopped the server for a minute."""
    path, kind = "/v1/completions", CompletionRequest
    if "messages" in body:
        path, kind = "/v1/chat/completions", ChatRequest
    assert post(served, body, path).status_code == 400
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4  # one per kind of prompt


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, 2**20),
        ({"max_length": 8192}, 2**20),
        ({"max_length": 10**6}, 16 * 10**6),
        ({"max_length": 10**6, "max_body_mib": 0.5}, 2**19),
    ],
)
def test_how_large_a_body_may_be(given: dict[str, Any], most: int) -> None:
    assert ServeConfig(**given).max_body_bytes == most


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", True),
        ("n", "3"),
        ("prompt", [1.0]),
        ("stream", 1),
        ("temperature", "0.5"),
        ("stop_token_ids", ["1"]),
        ("logit_bias", {"5": "1"}),
        ("stream_options", {"include_usage": 1}),
    ],
    ids=str,
)
def test_types_are_those_of_json(field: str, value: Any) -> None:
    content = json.dumps({"prompt": "a", field: value}).encode()
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionRequest, content)
    assert caught.value.status == 400 and (caught.value.param or "").startswith(field)


def test_how_many_lists_and_objects_a_body_may_have() -> None:
    """Those in texts do not count, behind escaped quotes either."""
    brackets = '[{"\\\\字' * 10_000
    content = json.dumps({"prompt": brackets}).encode()
    assert parse_body(CompletionRequest, content).prompt == brackets
    for nested in ("[]," * 10_000 + "[]", "{}," * 10_000 + "{}"):
        with pytest.raises(ApiError, match="at most 10,000 lists and objects"):
            parse_body(CompletionRequest, f'{{"prompt": "a", "zz": [{nested}]}}'.encode())


def test_every_sampling_setting_has_a_field_and_a_column() -> None:
    names = {field.name for field in fields(SamplingConfig)}
    assert names == {*SETTINGS, "logit_bias"} and names <= set(CommonRequest.model_fields)
    assert {field.name for field in fields(Sampling)} == {*SETTINGS, "bias_ids", "bias"}


def test_how_many_messages_a_chat_may_have() -> None:
    message = {"role": "user", "content": ""}
    assert parse_body(ChatRequest, json.dumps({"messages": [message] * 4000}).encode())
    with pytest.raises(ApiError, match=r"messages: .* at most 4000"):
        parse_body(ChatRequest, json.dumps({"messages": [message] * 4001}).encode())


@pytest.mark.parametrize("where", ["content", "name"])
def test_no_part_of_a_message_is_too_long(served: Served, where: str) -> None:
    message = {"role": "user", "content": "x", where: "a b " * 50_000}
    error = post(served, {"messages": [message]}, "/v1/chat/completions").json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


def test_a_long_role_is_refused_before_it_is_rendered(served: Served) -> None:
    """One of 7 MiB was rendered and tokenised, which took 2.2 GB."""
    message = {"role": "a b " * 50_000, "content": "x"}
    error = post(served, {"messages": [message]}, "/v1/chat/completions").json()["error"]
    assert "want a role of" in error["message"]
    assert len(error["message"]) < 300


def test_how_many_log_probabilities_a_reply_may_have(served, monkeypatch) -> None:
    """One choice of full length may always have all."""
    monkeypatch.setattr(requests, "_MOST_LOGPROBS", 1000)

    def ask(num_choices: int, num_tokens: int) -> int:
        body = CompletionRequest(prompt=[5], n=num_choices, logprobs=5, max_tokens=num_tokens)
        return len(read_completion(served.service.engine, served.service.limits, body).prompts)

    assert ask(1, 255) == 1 and ask(16, 16) == 16
    with pytest.raises(ApiError, match=r"logprobs: want at most 1,536 in all choices, got up to"):
        ask(16, 17)


def test_bodies_are_read_beside_the_event_loop_and_large_ones_in_turn(served, monkeypatch) -> None:
    parse, loops, together, most = service.parse_body, [], 0, 0

    def watch(*args: Any) -> Any:
        nonlocal together, most
        with suppress(RuntimeError):
            loops.append(asyncio.get_running_loop())
        together += 1
        most = max(most, together)
        time.sleep(0.1) if is_large else pairs.wait()
        together -= 1
        return parse(*args)

    monkeypatch.setattr(service, "parse_body", watch)
    large = {"prompt": "a", "max_tokens": 1, "user": "x" * 2**17}
    pairs = Barrier(2, timeout=60)
    for body in (large, large | {"user": "x"}):
        most, is_large = 0, body is large
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda body: post(served, body).status_code, [body] * 4))
        assert set(found) <= {200, 429} and (most == 1) == is_large
    assert not loops


# --------------------------------------------------------------------------------------------------
# Keys, ids, connections


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/models", f"Bearer {KEY}", 200),
        ("/v1/models", f"BEARER   {KEY}", 200),
        ("/v1/models", "", 401),
        ("/v1/models", KEY, 401),
        ("/v1/models", f"Basic {KEY}", 401),
        ("/v1/models", f"Bearer {KEY}x", 401),
        ("/openapi.json", "", 401),
        ("/tokenize", "", 401),
        ("/v1/../health", "", 401),
        *((path, "", 200) for path in ("/", "/health", "/ready", "/version", "/metrics")),
    ],
)
def test_the_api_wants_the_key_and_probes_do_not(served, path, key, status) -> None:
    lines = [f"GET {path} HTTP/1.1", "host: a", "connection: close", f"authorization: {key}"]
    answer = served.exchange("\r\n".join([*lines, "", ""]).encode())
    assert answer.startswith(b"HTTP/1.1 %d" % status)
    assert status == 200 or KEY.encode() not in answer


def test_probes_are_answered_however_many_are_connected(served: Served) -> None:
    socks = [served.connect(b"GET /hea") for _ in range(served.service.config.max_requests + 100)]
    assert served.get("/health").status_code == 200
    for sock in socks:
        sock.close()


def test_more_requests_than_there_may_be(served: Served) -> None:
    half = request_bytes("/v1/completions", LONG, AUTH)[:-9]
    guard = served.server.config.app
    socks = [served.connect(half) for _ in range(served.service.config.max_requests)]
    until(lambda: guard._num_requests == len(socks))
    response = post(served, LONG)
    assert response.status_code == 503 and response.headers["retry-after"] == "1"
    assert response.json()["error"]["message"] and served.get("/health").status_code == 200
    for sock in socks:
        sock.close()
    until(lambda: guard._num_requests == 0)


def test_a_body_that_breaks_off_is_no_error_of_the_server(served, caplog) -> None:
    for _ in range(3):
        served.connect(request_bytes("/v1/completions", LONG, AUTH)[:-9]).close()
    until(lambda: served.server.config.app._num_requests == 0)
    assert served.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("key", ["", " ", "a b", "a\n", "\u00e9"])
def test_keys_that_no_header_can_carry(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv("POSS_API_KEY", raising=False)
    assert read_api_key() is None
    monkeypatch.setenv("POSS_API_KEY", KEY)
    assert read_api_key() == KEY
    monkeypatch.setenv("POSS_API_KEY", key)
    with pytest.raises(UserError, match="POSS_API_KEY: want printable ASCII"):
        read_api_key()


def test_ids_hold_no_headers(served: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    for smuggled in (b"a\rset-cookie: b", b"a\nset-cookie: b", b"a\x00b", b"\xff"):
        answer = served.exchange(head + b"x-request-id: " + smuggled + b"\r\n\r\n")
        assert b"\nset-cookie" not in answer and smuggled not in answer


def test_a_page_of_another_site_cannot_ask(served: Served) -> None:
    """Requests that browsers send without asking first are not of type JSON: refused."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        headers = {"authorization": f"Bearer {KEY}", "content-type": kind, "origin": "http://x"}
        response = served.post("/v1/completions", LONG, **headers)
        message = "body: want a JSON object, with Content-Type: application/json"
        assert response.status_code == 400 and response.json()["error"]["message"] == message
        assert "access-control-allow-origin" not in response.headers


# --------------------------------------------------------------------------------------------------
# Anything the schema allows


@pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
def test_no_request_is_an_error_of_the_server(served: Served) -> None:
    """Drawn from the schema and beyond it, for every operation; the same in every run."""
    schema = schemathesis.openapi.from_dict(served.schema)
    statuses = set()
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(0)
        @settings(
            max_examples=15,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            headers = {"authorization": f"Bearer {KEY}"}
            # It may ask for 128 answers.
            response = case.call(base_url=served.url, headers=headers, timeout=120)
            statuses.add(response.status_code)
            assert response.status_code < 500, response.text

        check()
    assert {200, 400} <= statuses


# --------------------------------------------------------------------------------------------------
# Servers that serve less


def test_stop_strings_of_a_server_are_checked_as_it_starts(served: Served) -> None:
    with pytest.raises(UserError, match="characters are more than 256 new tokens can write"):
        make_slots(served.service.engine, replace(served.service.config, stop=("x" * 10_000,)))


def test_an_application_that_fails_ends_its_thread(served, monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "warm_up", lambda self: None)
    app = create_app(served.service.config, served.engine)

    async def fail() -> None:
        async with app.router.lifespan_context(app):
            raise OSError("the server failed")

    with pytest.raises(OSError, match="the server failed"):
        asyncio.run(fail())
    assert app.state.service.scheduler.is_closed


def test_log_probabilities_may_be_off(served: Served) -> None:
    config = replace(served.service.config, max_logprobs=0)
    body = CompletionRequest(prompt="def", logprobs=0)
    with pytest.raises(ApiError, match="logprobs: not served"):
        read_completion(served.service.engine, config, body)


def test_a_continued_text_is_decoded_beside_the_event_loop(served, monkeypatch) -> None:
    loops, submit = [], served.scheduler.submit_all

    def watch(*args: Any, **options: Any) -> Any:
        with suppress(RuntimeError):  # there is none in this thread
            loops.append(asyncio.get_running_loop())
        return submit(*args, **options)

    monkeypatch.setattr(served.scheduler, "submit_all", watch)
    body = {"model": MODEL, "prompt": [5, 6, 7, 8], "max_tokens": 4}
    assert post(served, body | {"continued_tokens": 3}).status_code == 200
    assert not loops
    assert post(served, body).status_code == 200
    assert len(loops) == 1
