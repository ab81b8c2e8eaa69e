"""Several servers as one: replicas that are killed while they answer, and nobody notices.

The servers are processes of the real program on the bundled model. Texts must be those that
`Engine.generate` gives offline, whichever server a part of them comes from.
"""

import asyncio
import importlib.util
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml
from openai import AsyncOpenAI
from serving import ROOT, free_port, started, until

from benchmarks.python_models import python_model
from poss_jax.config.decoding import EngineConfig, SamplingConfig
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import Prompt, prompt_seed

pytestmark = pytest.mark.scale

EXAMPLE = ROOT / "examples" / "ray_serve"
MAX_LENGTH = 256
SERVER = ["-m", "infer.serve", "--port", "0", "--max-length", str(MAX_LENGTH)]
SERVER += ["--batch-size", "4", "--slots", "4"]
MODELS = {"target": str(python_model("target")), "draft": str(python_model("poss3"))}
MODELS["model_name"] = "bundled"
SERVER += [f"--{key.replace('_', '-')}={value}" for key, value in MODELS.items()]
NUM_TOKENS = 160


class Asked(NamedTuple):
    """A request, and the settings of its choices offline."""

    body: dict[str, Any]
    sampling: SamplingConfig

    @property
    def prompt(self) -> Prompt:
        return self.body.get("messages") or self.body["prompt"]

    @property
    def n(self) -> int:
        return self.body.get("n", 1)


class Told(NamedTuple):
    """A stream as the client saw it: per choice its texts, ids and the reason of its end."""

    ids: set[str]
    texts: list[str]
    token_ids: list[list[int]]
    reasons: list[list[str]]
    usage: Any


def until_so(holds: Callable[[], Any]) -> None:
    """Waits; whoever cannot be reached is asked again."""

    def is_so() -> Any:
        with suppress(httpx.TransportError):
            return holds()

    until(is_so, seconds=300)


@contextmanager
def server(*options: str) -> Iterator[tuple[Any, str]]:
    with started([*SERVER, *options]) as program:
        url = program.find(r"listening at (http://[^/]+)/")
        until_so(lambda: httpx.get(f"{url}/ready").is_success)
        yield program.process, url


@contextmanager
def proxy(*urls: str) -> Iterator[str]:
    """The proxy; it must not touch a device, so it gets a platform that does not exist."""
    options = [word for url in urls for word in ("--upstream", url)]
    command = [str(EXAMPLE / "proxy.py"), "--port", "0", *options]
    with started(command, JAX_PLATFORMS="none") as program:
        yield program.find(r"running on (http://[^ ]+)")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine.load(
        python_model("target"), python_model("poss3"), EngineConfig(max_length=MAX_LENGTH)
    )


def request(prompt: Prompt, sampling: SamplingConfig, **more: Any) -> Asked:
    names = ("temperature", "seed", "frequency_penalty", "presence_penalty")
    body = {name: getattr(sampling, name) for name in names}
    body |= {"prompt" if isinstance(prompt, str) else "messages": prompt}
    body |= {"max_tokens": NUM_TOKENS, "stream_options": {"include_usage": True}}
    return Asked(body | more, sampling)


def requests() -> list[Asked]:
    """Streams of every kind, long enough to be broken."""
    plain, hot = SamplingConfig(seed=1), SamplingConfig(temperature=1.0, seed=2)
    penal = SamplingConfig(temperature=0.7, frequency_penalty=0.8, presence_penalty=0.3, seed=3)
    chat = [{"role": "user", "content": "read a file"}]
    return [
        request("def read_lines(path):", plain),
        request("class Stack:\n", hot),
        request("import os\n", penal),
        request("def main():\n", hot, n=2),
        request("def add(a, b):\n", hot, stop=["qqq", "zzzz"]),
        request("for i in", hot, extra_body={"return_token_ids": True}),
        request(chat, hot),
        request(chat, penal),
    ]


def expected(engine: Engine, asked: Asked) -> list[Generation]:
    """Answers of all choices offline."""
    settings = [
        SamplingConfig(**{**vars(asked.sampling), "seed": prompt_seed(asked.sampling.seed, index)})
        for index in range(asked.n)
    ]
    stop = asked.body.get("stop", ())
    prompts = [asked.prompt] * asked.n
    return engine.generate(prompts, max_new_tokens=NUM_TOKENS, sampling=settings, stop=stop)


async def ask(url: str, asked: Asked, on_event: Callable[[], None]) -> Told:
    """Streams one request with OpenAI's own client."""
    told = Told(
        set(), [""] * asked.n, [[] for _ in range(asked.n)], [[] for _ in range(asked.n)], []
    )
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        api = client.chat.completions if "messages" in asked.body else client.completions
        async for data in await api.create(model="bundled", stream=True, **asked.body):
            on_event()
            told.ids.add(data.id)
            if data.usage is not None:
                told.usage.append(data.usage)
            for choice in data.choices:
                text = choice.delta.content if "messages" in asked.body else choice.text
                told.texts[choice.index] += text or ""
                told.token_ids[choice.index] += getattr(choice, "token_ids", None) or []
                if choice.finish_reason:
                    told.reasons[choice.index].append(choice.finish_reason)
    return told


def stream_all(url: str, all_asked: list[Asked], break_it: Callable[[], None]) -> list[Told]:
    """Streams all requests at once; breaks something once they are under way."""

    async def run() -> list[Told]:
        counts = [0] * len(all_asked)

        async def one(index: int, asked: Asked) -> Told:
            def count() -> None:
                counts[index] += 1

            return await ask(url, asked, count)

        async def disturb() -> None:
            while sum(count > 4 for count in counts) < 4:
                await asyncio.sleep(0.01)
            await asyncio.to_thread(break_it)

        streams = [one(index, asked) for index, asked in enumerate(all_asked)]
        *told, _ = await asyncio.gather(*streams, disturb())
        return told

    return asyncio.run(asyncio.wait_for(run(), 400))


def check(answers: list[Generation], asked: Asked, told: Told) -> None:
    """A stream holds exactly the answers that the engine gives offline."""
    assert told.texts == [answer.text for answer in answers]
    assert told.reasons == [[answer.stop_reason] for answer in answers]
    assert len(told.ids) == 1
    shows_ids = "extra_body" in asked.body
    assert told.token_ids == [answer.output_ids if shows_ids else [] for answer in answers]
    [usage] = told.usage
    assert usage.completion_tokens == sum(len(answer.output_ids) for answer in answers)
    assert usage.prompt_tokens == len(answers[0].prompt_ids)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def num_running(url: str) -> float:
    found = re.search(r"^poss:num_requests_running (\S+)", httpx.get(f"{url}/metrics").text, re.M)
    assert found
    return float(found[1])


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGTERM])
def test_streams_outlive_their_server(engine: Engine, stop: signal.Signals) -> None:
    """One of three is never there; one is killed, or stops and cuts its answers early."""
    gone = f"http://127.0.0.1:{free_port()}"
    draining, other = server("--drain-seconds", "0.5"), server()
    with draining as (process, first), other as (_, second), proxy(gone, first, second) as url:

        def kill() -> None:
            until_so(lambda: num_running(first) > 1)
            process.send_signal(stop)

        all_asked = requests()
        all_told = stream_all(url, all_asked, kill)
        assert process.wait(60) == (-signal.SIGKILL if stop == signal.SIGKILL else 0)
        for asked, told in zip(all_asked, all_told, strict=True):
            check(expected(engine, asked), asked, told)


def test_without_servers_requests_are_refused() -> None:
    with proxy(f"http://127.0.0.1:{free_port()}") as url:
        assert httpx.get(f"{url}/health").is_success
        assert httpx.get(f"{url}/metrics").status_code == 404
        for stream in (True, False):
            body = {"prompt": "def f():", "stream": stream}
            reply = httpx.post(f"{url}/v1/completions", json=body)
            assert reply.status_code == 503 and reply.headers["retry-after"] == "1"


# --------------------------------------------------------------------------------------------------
# Ray Serve


def replicas(root: int) -> list[int]:
    """Processes of replicas that descend from a process."""
    found = []
    children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    for child in map(int, children):
        with suppress(FileNotFoundError):
            name = Path(f"/proc/{child}/cmdline").read_bytes()
            found += [child] if name.startswith(b"ray::ServeReplica") else []
            found += replicas(child)
    return found


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: make test-scale")
def test_replicas_of_ray_serve(engine: Engine, tmp_path: Path) -> None:
    config = yaml.safe_load((EXAMPLE / "serve.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    sizes = {"max_length": MAX_LENGTH, "batch_size": 4, "slots": [4]}
    config["applications"][0]["args"] |= MODELS | sizes
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    command = ["-c", "from ray.serve.scripts import cli; cli()", "run"]
    environment = {"RAY_ADDRESS": "local", "RAY_USAGE_STATS_ENABLED": "0", "HOME": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLE), str(ROOT)])
    with started([*command, str(tmp_path / "serve.yaml")], **environment) as program:
        process = program.process
        ray = f"http://127.0.0.1:{port}"
        until_so(lambda: httpx.get(f"{ray}/ready").is_success and len(replicas(process.pid)) == 2)
        some = requests()
        all_asked = [some[index % len(some)] for index in range(32)]
        with proxy(ray) as url:
            whole = stream_all(ray, all_asked, lambda: None)
            victim = replicas(process.pid)[0]
            broken = stream_all(url, all_asked, lambda: os.kill(victim, signal.SIGKILL))
        assert victim not in replicas(process.pid)
    answers = [expected(engine, asked) for asked in some]
    for index, asked in enumerate(all_asked):
        check(answers[index % len(some)], asked, whole[index])
        check(answers[index % len(some)], asked, broken[index])
