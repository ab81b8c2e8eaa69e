"""Streams that outlive their server, against scripted servers (real ones: test_scale.py).

A token of the scripted model is drawn from seed and position, so a stream that is continued with
other ids, another seed or at another place gives another text.
"""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("fastapi")
from starlette.testclient import TestClient

from poss_jax.engine.prompts import prompt_seed

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "ray_serve"))
from continued import ContinuedStream, Settings
from pool import Call, GivenUp, Pool
from proxy import create_proxy, main

CHAT_PROMPT = [7, 7]
WHOLE = 10**6
Body = dict[str, Any]


def draw(seed: int, prompt: list[int], position: int) -> int:
    return random.Random(f"{seed} {prompt} {position}").randrange(1000)


def answer_of(seed: int, prompt: list[int], length: int) -> list[int]:
    return [draw(seed, prompt, position) for position in range(length)]


def text_of(ids: list[int]) -> str:
    parts = ("" if token % 5 else "\N{REPLACEMENT CHARACTER}" for token in ids)
    return "".join(f"{token}{part} " for token, part in zip(ids, parts, strict=True))


class Broken(httpx.AsyncByteStream):
    """Events of a response; the connection breaks after `most`."""

    def __init__(self, events: list[Any], most: int, end: bytes = b"") -> None:
        self._events, self._most, self._end = events, most, end

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for data in self._events[: self._most]:
            yield b"data: " + json.dumps(data).encode() + b"\n\n"
            await asyncio.sleep(0)
        if self._most < len(self._events):
            yield self._end
            raise httpx.ReadError("reset")
        yield b"data: [DONE]\n\n"


def events_response(stream: httpx.AsyncByteStream) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=stream)


class Servers:
    """Scripted servers; `scripts` says of every request how many events it gets, or the status."""

    def __init__(self, *scripts: int | Callable[[Body], httpx.Response]) -> None:
        self.scripts, self.bodies = list(scripts), []
        self.about: list[Any] = []  # first answers to /v1/models: a status, or an error

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            if self.about:
                if isinstance(status := self.about.pop(0), Exception):
                    raise status
                return httpx.Response(status, json={"error": {"message": "no"}})
            return httpx.Response(200, json={"data": [{"max_model_len": 12}]})
        body = json.loads(request.content)
        is_chat = request.url.path.endswith("chat/completions")
        self.bodies.append(body)
        script = self.scripts.pop(0) if self.scripts else WHOLE
        if callable(script):
            return script(body)
        if 400 <= script < 600:
            return httpx.Response(script, json={"error": {"message": "no"}})
        events = self.events(body, is_chat)
        return events_response(Broken(events, script, b'data: {"id": "half'))

    def events(self, body: Body, is_chat: bool) -> list[Body]:
        about = {"id": f"id-{len(self.bodies)}", "system_fingerprint": "weights"}
        n, continued = body.get("n") or 1, body.get("continued_tokens") or 0
        prompts = [CHAT_PROMPT] if is_chat else body["prompt"]
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        choices = [prompt for prompt in prompts for _ in range(n)]
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 5
        told: list[list[Body]] = [[], *([] for _ in range(limit))]
        for index, prompt in enumerate(choices):
            first = {"delta": {"role": "assistant"}} if is_chat else {"text": ""}
            ends = {"logprobs": None, "finish_reason": None}
            told[0].append({"index": index, **first, "prompt_token_ids": prompt, **ends})
            start, seed = len(prompt) - continued, prompt_seed(body["seed"], index)
            characters = 0
            for step in range(limit):
                token = draw(seed, prompt[:start], continued + step)
                text = text_of([token])
                choice = {"index": index, "token_ids": [token], "logprobs": None}
                choice |= {"delta": {"content": text}} if is_chat else {"text": text}
                if body.get("logprobs") is not None and body["logprobs"] is not False:
                    choice["logprobs"] = logprobs_of(text, characters, is_chat)
                characters += len(text)
                choice["finish_reason"] = "length" if step + 1 == limit else None
                told[step + 1].append(choice)
        events = [about | {"choices": [one]} for step in told for one in step]
        if (body.get("stream_options") or {}).get("include_usage"):
            events = [data | {"usage": None} for data in events]
            prompt = sum(map(len, prompts))
            counts = {"prompt_tokens": prompt, "completion_tokens": limit * len(choices)}
            counts["total_tokens"] = sum(counts.values())
            events.append(about | {"choices": [], "usage": counts})
        return events


def logprobs_of(text: str, offset: int, is_chat: bool) -> Body:
    if is_chat:
        spelled = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        token = {"token": text, "logprob": -1.0, "bytes": spelled}
        return {"content": [token | {"top_logprobs": [token]}], "refusal": None}
    top = [{text: -1.0}]
    columns = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": top}
    return columns | {"text_offset": [offset]}


def run(servers: Servers, body: Body, **settings: Any) -> list[Body]:
    """Events that a client gets."""

    async def read() -> list[Body]:
        transport = httpx.MockTransport(servers)
        async with httpx.AsyncClient(transport=transport) as client:
            pool = Pool(["http://a", "http://b"], client)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            call = Call("POST", path, json.dumps(body).encode(), {}, 5.0)
            stream = ContinuedStream(pool, Settings(**{"patience": 1.0, **settings}), call, body)
            response: Any = await stream.respond()
            if not hasattr(response, "body_iterator"):
                return [json.loads(response.body) | {"status": response.status_code}]
            lines = [line async for line in response.body_iterator]
        if lines[-1] == b"data: [DONE]\n\n":
            lines.pop()
        else:
            assert b'"error"' in lines[-1]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    return asyncio.run(read())


def asked(**more: Any) -> Body:
    return {"prompt": [1, 2, 3], "stream": True, "seed": 5, "max_tokens": 6} | more


def texts(events: list[Body], n: int = 1) -> list[str]:
    told = [""] * n
    for data in events:
        for choice in data["choices"]:
            text = choice.get("text", choice.get("delta", {}).get("content"))
            told[choice["index"]] += text or ""
    return told


@pytest.mark.parametrize("most", [0, 1, 4, 6, 7])
def test_a_stream_may_break_anywhere(most: int) -> None:
    body = asked(stream_options={"include_usage": True})
    servers = Servers(most)
    events = run(servers, body)
    assert texts(events) == [text_of(answer_of(5, [1, 2, 3], 6))]
    assert len({data["id"] for data in events}) == 1
    counts = {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    usages = [data["usage"] for data in events]
    assert usages == [*[None] * 6, counts] and not events[-1]["choices"]
    assert "token_ids" not in str(events)
    ids = answer_of(5, [1, 2, 3], 6)
    if most == 0:
        assert servers.bodies[1] == servers.bodies[0]
    elif most < 7:
        rest = servers.bodies[1]
        assert rest["prompt"] == [1, 2, 3, *ids[: most - 1]]
        assert (rest["continued_tokens"], rest["max_tokens"]) == (most - 1, 7 - most)
    else:
        assert len(servers.bodies) == 1


@pytest.mark.parametrize("most", [3, 9])
def test_every_choice_goes_on_by_itself(most: int) -> None:
    body = asked(prompt=[[1, 2], [3]], n=2, return_token_ids=True)
    events = run(Servers(most), body)
    choices = [([1, 2], 0), ([1, 2], 1), ([3], 2), ([3], 3)]
    ids = [answer_of(prompt_seed(5, index), prompt, 6) for prompt, index in choices]
    assert texts(events, 4) == list(map(text_of, ids))
    for index in range(4):
        mine = [one for data in events for one in data["choices"] if one["index"] == index]
        assert [token for one in mine for token in one.get("token_ids", [])] == ids[index]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == ["length"]


@pytest.mark.parametrize("most", [1, 4])
def test_chats_go_on_as_completions(most: int) -> None:
    body = {"messages": [{"role": "user", "content": "?"}], "stream": True, "seed": 5}
    body |= {"logprobs": True, "top_logprobs": 1, "max_completion_tokens": 6}
    servers = Servers(most)
    whole, broken = run(Servers(), body), run(servers, body)
    choices = [[data["choices"][0] for data in events] for events in (whole, broken)]
    assert choices[0] == choices[1] and choices[0][0]["delta"] == {"role": "assistant"}
    assert texts(broken) == [text_of(answer_of(5, CHAT_PROMPT, 6))]
    assert servers.bodies[1]["logprobs"] == 1 and "messages" not in servers.bodies[1]


def test_offsets_of_log_probabilities_go_on() -> None:
    whole, broken = (run(Servers(most), asked(logprobs=1)) for most in (WHOLE, 4))
    told = [[data["choices"][0]["logprobs"] for data in events] for events in (whole, broken)]
    assert told[0] == told[1]


def test_a_request_without_seed_or_limit() -> None:
    """A broken stream waits for a server that says its limit."""
    servers = Servers(3)
    servers.about = [httpx.ConnectError("refused"), 503] * 2
    body = asked(max_tokens=None)
    del body["seed"]
    events = run(servers, body, max_new_tokens=5)
    first, second = servers.bodies
    assert first["seed"] == second["seed"] and second["max_tokens"] == 3 and not servers.about
    assert texts(events) == [text_of(answer_of(first["seed"], [1, 2, 3], 5))]
    servers = Servers(3)
    servers.about = [503] * 50
    *_, error = run(servers, body, max_new_tokens=5)
    assert error["error"]["message"] == "no server takes the rest, status 503"


def test_another_model_does_not_continue() -> None:
    servers = Servers(3)

    def other(body: Body) -> httpx.Response:
        about = {"id": "x", "system_fingerprint": "other"}
        choice = {"index": 0, "text": "x", "token_ids": [1], "logprobs": None}
        told = about | {"choices": [choice | {"finish_reason": "stop"}]}
        return events_response(Broken([told], WHOLE))

    servers.scripts.append(other)
    assert texts(run(servers, asked())) == [text_of(answer_of(5, [1, 2, 3], 6))]
    assert len(servers.bodies) == 3


def test_an_answer_that_a_stopping_server_cuts_goes_on() -> None:
    """Such a server gives out the text that it held back, and `length` without a token."""
    servers = Servers()

    def cut(body: Body) -> httpx.Response:
        told = servers.events(body, False)[:3]
        last = {"index": 0, "text": "half", "token_ids": [], "logprobs": None}
        told += [told[0] | {"choices": [last | {"finish_reason": "length"}]}]
        return events_response(Broken(told, WHOLE))

    servers.scripts.append(cut)
    events = run(servers, asked())
    assert texts(events) == [text_of(answer_of(5, [1, 2, 3], 6))]
    servers.scripts.append(cut)
    late = run(servers, asked(), timeout_seconds=0.0)  # then the time of the answer is over
    assert texts(late) == [text_of(answer_of(5, [1, 2, 3], 2)) + "half"]


def open_call(
    outcomes: list[httpx.Response | Exception], num_servers: int, patience: float = 30.0
) -> int:
    """Status of a request to servers that answer with these, one after another."""

    def answer(request: httpx.Request) -> httpx.Response:
        if isinstance(outcome := outcomes.pop(0), Exception):
            raise outcome
        return outcome

    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            pool = Pool([f"http://s{i}" for i in range(num_servers)], client)
            return await pool.open(
                Call("POST", "/v1/completions", b"{}", {}, 5.0), patience=patience
            )

    return asyncio.run(send()).status_code


@pytest.mark.parametrize("num_servers", [2, 7])
def test_a_request_kills_five_servers_at_most(num_servers: int) -> None:
    outcomes: list[Any] = [httpx.Response(502, text="a replica died")] * 9
    assert open_call(outcomes, num_servers) == 502 and len(outcomes) == 9 - 5
    for error in (httpx.ReadError("gone"), httpx.RemoteProtocolError("gone")):
        outcomes = [error] * 9
        with pytest.raises(GivenUp, match="servers die of the request"):
            open_call(outcomes, num_servers)
        assert len(outcomes) == 9 - 5


def test_servers_that_cannot_be_reached_are_asked_again() -> None:
    errors = [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")]
    outcomes = [*errors * 4, httpx.Response(200)]
    assert open_call(outcomes, 2) == 200 and not outcomes
    with pytest.raises(GivenUp, match="no server answers"):
        open_call(errors, 2, patience=0.0)


def test_whole_answers_are_waited_for_no_longer_than_they_may_take(monkeypatch) -> None:
    calls = []

    async def fetch(self: Pool, call: Call) -> httpx.Response:
        calls.append(call)
        return httpx.Response(200)

    monkeypatch.setattr(Pool, "fetch", fetch)
    proxy = create_proxy(
        ["http://127.0.0.1:1"], Settings(timeout_seconds=70.0), allowed_hosts=["poss.example"]
    )
    with TestClient(proxy, base_url="http://poss.example") as client:
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
        foreign = client.get("/health", headers={"host": "evil.example"})
        assert foreign.status_code == 403
    assert [call.silence for call in calls] == [100.0]


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8001", "localhost:8001", "http://h:port", "http://", "ftp://h", "http://h:70000"],
)
def test_wrong_addresses_are_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--upstream", "http://127.0.0.1:1", "--upstream", url])
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and "--upstream: want an address such as http://" in told
    assert repr(url) in told


def test_errors_that_pass_are_not_told() -> None:
    for scripts in ((2, 2, 503, 2, 429, 2), (500, 502, 504)):
        assert texts(run(Servers(*scripts), asked())) == [text_of(answer_of(5, [1, 2, 3], 6))]


def test_errors_are_told() -> None:
    for status in (400, 429):
        [refused] = run(Servers(status, status), asked())
        assert refused["status"] == status
    for breaks, told in (([503] * 50, "no server takes the rest"), ([1] * 5, "servers die")):
        *begun, error = run(Servers(2, *breaks), asked())
        assert len(begun) == 1 and told in error["error"]["message"]
