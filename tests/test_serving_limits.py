"""The server under clients that leave, flood it, or send what no client should."""

import asyncio
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from threading import Barrier
from typing import Any

import openai
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from programs import Runs
from serving import MODEL, Served, request_bytes, serving, until

from poss_jax import Engine, TreeConfig
from poss_jax.config.decoding import EngineConfig, SamplingOptions, ServeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.scheduler import Scheduler
from poss_jax.serving import service
from poss_jax.serving.app import create_app, make_slots
from poss_jax.serving.guard import read_api_key

KEY = "secret"
ENDLESS = {"ignore_eos": True}
LONG = {"model": MODEL, "prompt": "def area_7", "max_tokens": 200} | ENDLESS
AUTH = f"authorization: Bearer {KEY}"
STREAM = request_bytes("/v1/completions", LONG | {"stream": True}, AUTH)


@pytest.fixture(scope="module")
def served(runs: Runs) -> Iterator[Served]:
    """A server with a key and a short queue."""
    tree = TreeConfig(depth=2, top_k=2, total_tokens=6)  # the same programs as in test_serving
    engine = Engine.load(runs.model("target"), runs.model("poss2"), EngineConfig(tree=tree))
    small = {"max_queue": 2, "max_body_mib": 0.25, "sampling": SamplingOptions(temperature=0.0)}
    with serving(engine, api_key=KEY, has_grammars=True, **small) as served:
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
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
def test_a_client_that_leaves_frees_its_slot(served, is_streamed: bool, reads: bool) -> None:
    """Before anything came, and after the first event of a stream."""
    num_before = served.scheduler.stats.finished["cancelled"]
    body = request_bytes("/v1/completions", LONG | {"stream": is_streamed}, AUTH)
    with closing(served.connect(body)) as sock:
        until(lambda: is_running(served))
        assert not (is_streamed and reads) or sock.recv(65536).startswith(b"HTTP/1.1 200")
    soon(served)
    assert served.scheduler.stats.finished["cancelled"] == num_before + 1


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
    """Clients that are answered in all slots, and others that wait."""
    with ExitStack() as stack:
        for number in range(served.scheduler.num_slots):
            stack.enter_context(closing(served.connect(STREAM)))
            until(lambda number=number: served.scheduler.num_running == number + 1)
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


def test_how_large_a_body_may_be() -> None:
    assert ServeConfig().max_body_bytes == ServeConfig(max_length=8192).max_body_bytes == 2**20
    assert ServeConfig(max_length=10**6).max_body_bytes == 16 * 10**6
    assert ServeConfig(max_length=10**6, max_body_mib=0.5).max_body_bytes == 2**19


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


def test_probes_are_answered_however_many_ask(served: Served) -> None:
    half = request_bytes("/v1/completions", LONG, AUTH)[:-9]
    guard, most = served.server.config.app, served.service.config.max_requests
    with ExitStack() as stack:
        for begin in (*[half] * most, *[b"GET /hea"] * 100):
            stack.enter_context(closing(served.connect(begin)))
        until(lambda: guard._num_requests == most)
        response = post(served, LONG)
        assert response.status_code == 503 and response.headers["retry-after"] == "1"
        assert response.json()["error"]["message"] and served.get("/health").status_code == 200
    until(lambda: guard._num_requests == 0)


def test_a_body_that_breaks_off_is_no_error_of_the_server(served, caplog) -> None:
    for _ in range(3):
        served.connect(request_bytes("/v1/completions", LONG, AUTH)[:-9]).close()
    until(lambda: served.server.config.app._num_requests == 0)
    assert served.get("/health").status_code == 200
    assert not [record for record in caplog.records if record.exc_info]


def test_keys_that_no_header_can_carry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POSS_API_KEY", raising=False)
    assert read_api_key() is None
    monkeypatch.setenv("POSS_API_KEY", KEY)
    assert read_api_key() == KEY
    for key in ("", " ", "a b", "a\n", "\u00e9"):
        monkeypatch.setenv("POSS_API_KEY", key)
        with pytest.raises(UserError, match="POSS_API_KEY: want printable ASCII"):
            read_api_key()


def test_ids_are_given_back_and_hold_no_headers(served: Served) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    smuggled = (b"a\rset-cookie: b", b"a\nset-cookie: b", b"a\x00b", b"\xff")
    for request_id in (b"a-1", *smuggled, b"x" * 129, b"a b"):
        answer = served.exchange(head + b"x-request-id: " + request_id + b"\r\n\r\n")
        assert b"\nset-cookie" not in answer
        assert (request_id in answer) == (request_id == b"a-1")


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
    statuses, checks = set(), list(HealthCheck)
    settled: Any = {"deadline": None, "database": None, "suppress_health_check": checks}
    for found in schema.get_all_operations():

        @seed(0)
        @settings(max_examples=15, phases=[Phase.generate], **settled)
        @given(case=found.ok().as_strategy())
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
    with pytest.raises(UserError, match="stop: want strings, got an empty one"):
        make_slots(served.service.engine, replace(served.service.config, stop=("",)))


def test_an_application_that_fails_ends_its_thread(served, monkeypatch) -> None:
    monkeypatch.setattr(Scheduler, "warm_up", lambda self: None)
    app = create_app(served.service.config, served.engine)

    async def fail() -> None:
        async with app.router.lifespan_context(app):
            raise OSError("the server failed")

    with pytest.raises(OSError, match="the server failed"):
        asyncio.run(fail())
    assert app.state.service.scheduler.is_closed


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
