"""Streams that outlive their server, against scripted servers (real ones: test_scale.py).

A token of the scripted model is drawn from seed and position, so a stream that is continued with
other ids, another seed or at another place gives another text.
"""

import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
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


def text_of(ids: list[int]) -> str:
    return "".join(
        f"{token} " if token % 5 else f"{token}\N{REPLACEMENT CHARACTER} " for token in ids
    )


def answer_of(length: int, seed: int = 5, prompt: Sequence[int] = (1, 2, 3)) -> str:
    return text_of([draw(seed, list(prompt), position) for position in range(length)])


def prompts_of(body: Body) -> list[list[int]]:
    """The prompt of each choice."""
    prompts = body.get("prompt", CHAT_PROMPT)
    prompts = [prompts] if isinstance(prompts[0], int) else prompts
    return [prompt for prompt in prompts for _ in range(body.get("n", 1))]


async def stream_of(events: list[Body], num_events: int) -> AsyncIterator[bytes]:
    """A response's bytes; the connection breaks after `num_events`."""
    for data in events[:num_events]:
        yield b"data: " + json.dumps(data).encode() + b"\n\n"
        await asyncio.sleep(0)
    if num_events < len(events):
        yield b'data: {"id": "half'
        raise httpx.ReadError("reset")
    yield b"data: [DONE]\n\n"


class Servers:
    """Scripted servers: what each request gets, and the bodies of those for answers.

    A script is how many events come before the connection breaks, a status, an error, or makes the
    events of a body. `models` are the scripts of /v1/models.
    """

    def __init__(self, *scripts: Any, models: Sequence[Any] = ()) -> None:
        self.scripts, self.models, self.bodies = list(scripts), list(models), list[Body]()

    def __call__(self, request: httpx.Request) -> httpx.Response:
        is_about = request.url.path == "/v1/models"
        scripts = self.models if is_about else self.scripts
        script = scripts.pop(0) if scripts else WHOLE
        if not is_about:
            self.bodies.append(body := json.loads(request.content))
            assert ("messages" in body) == request.url.path.endswith("chat/completions")
        if isinstance(script, Exception):
            raise script
        if not callable(script) and 400 <= script < 600:
            return httpx.Response(script, json={"error": {"message": "no"}})
        if is_about:
            return httpx.Response(200, json={"data": [{"max_model_len": 12}]})
        events, num_events = (
            (script(body), WHOLE) if callable(script) else (self.events(body), script)
        )
        stream = stream_of(events, num_events)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=stream)

    def events(self, body: Body) -> list[Body]:
        """The stream of a server that does not break: choices begin, then get token after token."""
        about = {"id": f"id-{len(self.bodies)}", "system_fingerprint": "weights"}
        continued, prompts = body.get("continued_tokens", 0), prompts_of(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 5
        is_chat = "messages" in body
        steps: list[list[Body]] = [[] for _ in range(1 + limit)]
        for index, prompt in enumerate(prompts):
            choice: Body = {"index": index, "logprobs": None, "finish_reason": None}
            first = {"delta": {"role": "assistant"}} if is_chat else {"text": ""}
            steps[0].append(choice | first | {"prompt_token_ids": prompt})
            seed, num_characters = prompt_seed(body["seed"], index), 0
            for step in range(limit):
                token = draw(seed, prompt[: len(prompt) - continued], continued + step)
                text = text_of([token])
                told = {"delta": {"content": text}} if is_chat else {"text": text}
                if body.get("logprobs") is not None:
                    told["logprobs"] = logprobs_of(text, num_characters, is_chat)
                num_characters += len(text)
                steps[step + 1].append(choice | told | {"token_ids": [token]})
            steps[-1][-1]["finish_reason"] = "length"
        events: list[Body] = [about | {"choices": [one]} for step in steps for one in step]
        if body.get("stream_options"):
            usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": limit}
            usage["total_tokens"] = sum(usage.values())
            events = [data | {"usage": None} for data in events]
            events.append(about | {"choices": [], "usage": usage})
        return events


def logprobs_of(text: str, offset: int, is_chat: bool) -> Body:
    if is_chat:
        spelled = None if "\N{REPLACEMENT CHARACTER}" in text else list(text.encode())
        token = {"token": text, "logprob": -1.0, "bytes": spelled}
        return {"content": [token | {"top_logprobs": [token]}], "refusal": None}
    columns = {"tokens": [text], "token_logprobs": [-1.0], "top_logprobs": [{text: -1.0}]}
    return columns | {"text_offset": [offset]}


def run(servers: Servers, body: Body, num_servers: int = 2, **settings: Any) -> list[Body]:
    """Events that a client gets."""

    async def read() -> list[Body]:
        async with httpx.AsyncClient(transport=httpx.MockTransport(servers)) as client:
            pool = Pool([f"http://s{index}" for index in range(num_servers)], client)
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            call = Call("POST", path, json.dumps(body).encode(), {}, 5.0)
            stream = ContinuedStream(pool, Settings(**{"patience": 1.0, **settings}), call, body)
            response: Any = await stream.respond()
            if not hasattr(response, "body_iterator"):
                return [json.loads(response.body) | {"status": response.status_code}]
            lines = [line async for line in response.body_iterator]
        if b'"error"' not in lines[-1]:
            assert lines.pop() == b"data: [DONE]\n\n"
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]

    return asyncio.run(read())


def asked(**more: Any) -> Body:
    return {"prompt": [1, 2, 3], "stream": True, "seed": 5, "max_tokens": 6} | more


def choices_of(events: list[Body]) -> dict[int, list[Body]]:
    """What is told of each choice, in order."""
    told: dict[int, list[Body]] = {}
    for choice in (choice for data in events for choice in data["choices"]):
        told.setdefault(choice["index"], []).append(choice)
    return told


def texts(events: list[Body]) -> list[str]:
    return [
        "".join(one.get("text", one.get("delta", {}).get("content")) or "" for one in choice)
        for _, choice in sorted(choices_of(events).items())
    ]


CHAT = {"messages": [{"role": "user", "content": "?"}], "stream": True, "seed": 5}
CHAT |= {"logprobs": True, "top_logprobs": 1, "max_completion_tokens": 6}


@pytest.mark.parametrize(
    ("body", "breaks"),
    [
        (asked(stream_options={"include_usage": True}), [0, 1, 4, 6, 7]),
        (asked(prompt=[[1, 2], [3]], n=2, return_token_ids=True), [3, 9]),
        (asked(logprobs=1), [4]),
        (CHAT, [1, 4]),
    ],
    ids=["usage", "choices", "log-probabilities", "chat"],
)
def test_a_stream_may_break_anywhere(body: Body, breaks: list[int]) -> None:
    """The client gets one stream, with the events of a server that does not break."""
    whole = run(Servers(), body)
    prompts = prompts_of(body)
    seeds = [prompt_seed(5, index) for index in range(len(prompts))]
    assert texts(whole) == [answer_of(6, *one) for one in zip(seeds, prompts, strict=True)]
    assert ("token_ids" in str(whole)) == ("return_token_ids" in body)
    for num_events in breaks:
        events = run(Servers(num_events), body)
        assert choices_of(events) == choices_of(whole)
        assert len({data["id"] for data in events}) == 1
        assert [data.get("usage") for data in events] == [data.get("usage") for data in whole]


def test_a_request_without_seed_or_limit() -> None:
    """A broken stream waits for a server that says its limit."""
    servers = Servers(3, models=[httpx.ConnectError("refused"), 503] * 2)
    body = asked(max_tokens=None)
    del body["seed"]
    events = run(servers, body, max_new_tokens=5)
    assert texts(events) == [answer_of(5, servers.bodies[0]["seed"])] and not servers.models
    *_, error = run(Servers(3, models=[503, 503]), body, patience=0.0)
    assert error["error"]["message"] == "no server takes the rest, status 503"


def test_another_model_does_not_continue() -> None:
    servers = Servers(3)
    servers.scripts.append(
        lambda body: [data | {"system_fingerprint": "other"} for data in servers.events(body)]
    )
    assert texts(run(servers, asked())) == [answer_of(6)] and len(servers.bodies) == 3


def test_an_answer_that_a_stopping_server_cuts_goes_on() -> None:
    """Such a server gives out the text that it held back, and `length` without a token."""
    servers = Servers()

    def cut(body: Body) -> list[Body]:
        *events, last = servers.events(body)[:4]
        held_back = {"text": "half", "token_ids": [], "finish_reason": "length"}
        return [*events, last | {"choices": [last["choices"][0] | held_back]}]

    servers.scripts.append(cut)
    assert texts(run(servers, asked())) == [answer_of(6)]
    servers.scripts.append(cut)
    late = run(servers, asked(), timeout_seconds=0.0)  # then the time of the answer is over
    assert texts(late) == [answer_of(2) + "half"]


@pytest.mark.parametrize("num_servers", [2, 7])
def test_a_request_kills_five_servers_at_most(num_servers: int) -> None:
    servers = Servers(*[502] * 9)
    [refused] = run(servers, asked(), num_servers)
    assert refused["status"] == 502 and len(servers.bodies) == 5
    servers = Servers(2, *[httpx.ReadError("gone")] * 9)
    *_, error = run(servers, asked(), num_servers)
    assert "servers die of the request" in error["error"]["message"] and len(servers.bodies) == 6


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


@pytest.mark.parametrize("url", ["localhost:8001", "http://h:port", "http://", "http://h:70000"])
def test_wrong_addresses_are_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--upstream", "http://127.0.0.1:1", "--upstream", url])
    told = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and f"--upstream: invalid address value: {url!r}" in told


UNREACHED = [httpx.ConnectError("refused"), httpx.ConnectTimeout("slow")]


@pytest.mark.parametrize("scripts", [(2, 2, 503, 2, 429, 2), (500, 502, 504), (2, *UNREACHED * 3)])
def test_errors_that_pass_are_not_told(scripts: tuple[Any, ...]) -> None:
    servers = Servers(*scripts)
    assert texts(run(servers, asked())) == [answer_of(6)] and not servers.scripts


def test_errors_are_told() -> None:
    with pytest.raises(GivenUp, match="no server answers"):
        run(Servers(*UNREACHED), asked())
    for status in (400, 429):
        [refused] = run(Servers(status, status), asked())
        assert refused["status"] == status
    for breaks, told in (([503] * 50, "no server takes the rest"), ([1] * 5, "servers die")):
        *begun, error = run(Servers(2, *breaks), asked(), patience=0.1)
        assert len(begun) == 1 and told in error["error"]["message"]
