"""Loads the server: are all texts right, and how fast do they come?

Starts `python -m infer.serve` on the models of --target and --draft (by default the bundled ones),
and asks for sampled texts that `Engine.generate` has written beforehand.

    load         many clients stream for some time, a third of them leave halfway; half of the
                 prompts begin alike, a third of the answers follow a JSON schema; counts texts
                 that differ, are lost or come twice, and measures first tokens, time per token,
                 memory, and how soon a slot is free after its client left
    throughput   1, 4 and 16 clients (or --sizes), which stream or want whole answers, against
                 `Engine.generate` in batches of that size, alternating; with the draft and without

Prints tables, and as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.serving --output docs/results/serving
"""

import argparse
import asyncio
import itertools
import json
import re
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np

from benchmarks.options import Schema, add_numbers, make_parser, read_schemas, resident_bytes
from benchmarks.python_models import python_model
from infer.bench.report import show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import EngineConfig, SamplingConfig
from poss_jax.config.paths import child_python
from poss_jax.data.progress import progress_bar
from poss_jax.engine.engine import Engine
from poss_jax.engine.grammar import Grammar
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.arguments import at_least
from poss_jax.program.output import format_rows
from poss_jax.program.running import run_program

PROMPTS = ("def read_lines(path):\n", "class Node:\n    def __init__", "import os\n", "for i in ")
SHARED = "".join(f"def add_{n}(value):\n    return value + {n}\n\n\n" for n in range(10))
NUM_CASES = 64
_ADDRESS = re.compile(r"listening at (http://\S+)/")


@dataclass(frozen=True)
class Case:
    """A request, and the tokens of the right answer; some follow a schema."""

    prompt: PreparedPrompt
    schema: Schema | None
    expected: list[int]

    @property
    def body(self) -> dict[str, Any]:
        """The request."""
        schema = {"name": "answer", "schema": self.schema}
        return {
            "prompt": self.prompt.ids,
            "max_tokens": self.prompt.max_new_tokens,
            "temperature": self.prompt.sampling.temperature,
            "seed": self.prompt.sampling.seed,
            "stream": True,
            "return_token_ids": True,
            "response_format": self.schema and {"type": "json_schema", "json_schema": schema},
        }


def make_cases(engine: Engine, max_new_tokens: int, *, is_mixed: bool = False) -> list[Case]:
    """Draws requests, and answers them without a server; mixed ones share prefixes or a schema."""
    prompts, schemas = [], []
    for i, (_, schema) in enumerate(read_schemas()[:NUM_CASES]):
        text = SHARED * (is_mixed and i % 2) + PROMPTS[i % len(PROMPTS)]
        prompt = engine.prepare(text, max_new_tokens, SamplingConfig(temperature=1.0, seed=i))
        is_guided = is_mixed and i % 3 == 0
        prompts.append(
            Grammar.json_schema(schema).constrain(prompt, engine) if is_guided else prompt
        )
        schemas.append(schema if is_guided else None)
    expected = [answer.output_ids for answer in engine.decode(prompts, batch_size=8)]
    return list(map(Case, prompts, schemas, expected))


@dataclass
class Answer:
    """An answer as a client saw it; times in seconds, `ids` of its parts."""

    ids: set[str]
    tokens: list[int]
    first: float
    seconds: float
    is_whole: bool


@contextmanager
def serve(args: argparse.Namespace, draft: str | None) -> Iterator[tuple[int, str]]:
    """Runs a server of the target until it is ready; gives process and address."""
    words = ["--target", args.target, *(["--draft", draft] if draft else []), "--port", "0"]
    words += ["--max-length", str(args.max_length), "--batch-size", str(max(args.sizes))]
    command, environment = child_python("-m", "infer.serve", *words, "--max-logprobs", "0")
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        match = next(filter(None, map(_ADDRESS.search, process.stderr)))
        # Drain the rest of its stderr, or a full pipe would block the server.
        threading.Thread(target=list, args=[process.stderr], daemon=True).start()
        try:
            while not httpx.get(f"{match[1]}/ready").json().get("is_compiled"):
                time.sleep(0.5)
            yield process.pid, match[1]
        finally:
            process.terminate()
            process.wait()  # before its stderr is closed


async def ask(client: httpx.AsyncClient, case: Case, *, leave_after: int | None = None) -> Answer:
    """Streams one answer; it may leave after some tokens."""
    begun, first, tokens, is_whole, ids = time.monotonic(), 0.0, [], False, set()
    async for event in _events(client, case.body):
        ids.add(event["id"])
        new = event["choices"][0].get("token_ids") or []
        if new and not tokens:
            first = time.monotonic() - begun
        tokens += new
        is_whole = event["choices"][0]["finish_reason"] is not None
        if leave_after is not None and len(tokens) >= leave_after:
            break
    return Answer(ids, tokens, first, time.monotonic() - begun, is_whole)


async def _events(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        buffer = b""
        async for data in response.aiter_raw():
            *events, buffer = (buffer + data).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: {"):
                    yield json.loads(event[6:])


def make_client(url: str) -> httpx.AsyncClient:
    """A client without limits, and without certificates, which take 20 ms to read."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=url, limits=limits, timeout=300, verify=False)


async def run_load(
    url: str, pid: int, cases: Sequence[Case], *, num_clients: int, seconds: float
) -> dict[str, Any]:
    """Streams from many clients; every third request of each leaves halfway."""
    began, answers, wrong, lost = time.monotonic(), [], 0, 0
    end = began + seconds
    memory = [resident_bytes(pid)]

    async def run_client(index: int, client: httpx.AsyncClient) -> None:
        nonlocal wrong, lost
        for turn in itertools.count():
            if time.monotonic() >= end:
                return
            case = cases[(index + turn * (num_clients + 1)) % len(cases)]
            leaves = (index + turn) % 3 == 0
            half = len(case.expected) // 2
            answer = await ask(client, case, leave_after=half if leaves else None)
            expected = case.expected[: len(answer.tokens)] if leaves else case.expected
            wrong += answer.tokens != expected
            lost += not (leaves or answer.is_whole)
            answers.append(answer)

    async with make_client(url) as client:
        clients = [asyncio.create_task(run_client(i, client)) for i in range(num_clients)]
        with progress_bar(total=round(seconds), desc="load", unit="s") as bar:
            while time.monotonic() < end:
                await asyncio.sleep(1)
                bar.update()
                memory.append(resident_bytes(pid))
        await asyncio.gather(*clients)
        elapsed = time.monotonic() - began  # with the answers that were begun in time
        freed = await measure_freeing(client, cases, num_clients)
        cached = await read_metric(client, "prefix_cache_hits_total")
    return describe_answers(answers, elapsed) | {
        "clients": num_clients,
        "left": sum(not answer.is_whole for answer in answers),
        "wrong": wrong,
        "lost": lost,
        "crossed": sum(len(answer.ids) != 1 for answer in answers),
        "duplicated": len(answers) - len({name for answer in answers for name in answer.ids}),
        "cached_tokens": cached,
        "freed_milliseconds": freed,
        "memory_mib": {
            "after_10_s": memory[min(10, len(memory) - 1)] / 2**20,
            "at_the_end": memory[-1] / 2**20,
        },
    }


def describe_answers(answers: Sequence[Answer], elapsed: float) -> dict[str, Any]:
    """Tokens per second of all answers, and percentiles of the times of whole ones."""

    def percentiles(seconds: Sequence[float]) -> dict[str, float]:
        values = [1000 * value for value in seconds]
        return {f"p{share}": float(np.percentile(values, share)) for share in (50, 99)}

    complete = [answer for answer in answers if answer.is_whole]
    gaps = [
        (answer.seconds - answer.first) / (len(answer.tokens) - 1)
        for answer in complete
        if len(answer.tokens) > 1
    ]
    return {
        "answers": len(answers),
        "tokens_per_second": sum(len(answer.tokens) for answer in answers) / elapsed,
        "first_token_milliseconds": percentiles([answer.first for answer in complete]),
        "per_token_milliseconds": percentiles(gaps),
    }


async def measure_freeing(
    client: httpx.AsyncClient, cases: Sequence[Case], num_clients: int
) -> float:
    """Milliseconds from the moment at which all clients leave until no slot is taken."""
    await asyncio.gather(*(ask(client, case, leave_after=8) for case in cases[:num_clients]))
    started = time.monotonic()
    while await read_metric(client, "num_requests_running"):
        await asyncio.sleep(0.002)
    return 1000 * (time.monotonic() - started)


async def read_metric(client: httpx.AsyncClient, name: str) -> float:
    """Reads one number of /metrics."""
    text = (await client.get("/metrics")).text
    match = re.search(rf"^poss:{name} (\S+)$", text, re.MULTILINE)
    assert match is not None, name
    return float(match[1])


async def ask_whole(client: httpx.AsyncClient, case: Case) -> Answer:
    """Gets one answer at once."""
    begun = time.monotonic()
    response = await client.post("/v1/completions", json=case.body | {"stream": False})
    response.raise_for_status()
    seconds = time.monotonic() - begun
    body = response.json()
    tokens = body["choices"][0]["token_ids"]
    return Answer({body["id"]}, tokens, seconds, seconds, is_whole=True)


async def run_clients(
    url: str, num_clients: int, run_client: Callable[[httpx.AsyncClient, float], Awaitable[None]]
) -> float:
    """Runs clients, already connected, and tells each the time; gives the seconds they take."""
    async with make_client(url) as client:
        await asyncio.gather(*(client.get("/health") for _ in range(num_clients)))
        begun = time.monotonic()
        await asyncio.gather(*(run_client(client, begun) for _ in range(num_clients)))
        return time.monotonic() - begun


def run_server(
    url: str, ask_one: Callable[..., Awaitable[Answer]], cases: Sequence[Case], num_clients: int
) -> float:
    """Tokens per second of clients that ask for one text after the other."""
    waiting = list(cases)

    async def run_client(client: httpx.AsyncClient, begun: float) -> None:
        del begun
        while waiting:
            case = waiting.pop()
            answer = await ask_one(client, case)
            assert answer.tokens == case.expected

    num_tokens = sum(len(case.expected) for case in cases)
    return num_tokens / asyncio.run(run_clients(url, num_clients, run_client))


def run_engine(engine: Engine, cases: Sequence[Case], batch_size: int) -> float:
    """Tokens per second of `Engine.generate`'s loop."""
    begun = time.monotonic()
    answers = engine.decode([case.prompt for case in cases], batch_size=batch_size)
    assert [answer.output_ids for answer in answers] == [case.expected for case in cases]
    return sum(len(case.expected) for case in cases) / (time.monotonic() - begun)


def measure_throughput(
    args: argparse.Namespace, engine: Engine, url: str, cases: Sequence[Case]
) -> list[dict[str, Any]]:
    """Times the server and the engine, alternating; the first pass is not counted."""
    rows = []
    for size in args.sizes:
        subset = cases[: max(4 * size, 8)]
        runs: dict[str, Callable[[], float]] = {
            "engine": partial(run_engine, engine, subset, size),
            "streamed": partial(run_server, url, ask, subset, size),
            "whole": partial(run_server, url, ask_whole, subset, size),
        }
        passes = progress_bar(range(1 + args.repeats), desc=f"{size} clients", unit="pass")
        speeds = [{name: run() for name, run in runs.items()} for _ in passes][1:]
        row: dict[str, Any] = {"clients": size}
        for name in runs:
            ratios = [speed[name] / speed["engine"] for speed in speeds]
            row[name] = float(np.median([speed[name] for speed in speeds]))
            row[f"{name}_to_engine"] = float(np.median(ratios))
        rows.append(row)
    return rows


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all parts."""
    engine = Engine.load(args.target, args.draft, EngineConfig(max_length=args.max_length))
    cases, mixed = (
        make_cases(engine, args.max_new_tokens, is_mixed=is_mixed) for is_mixed in (False, True)
    )
    with serve(args, args.draft) as (pid, url):
        load = run_load(url, pid, mixed, num_clients=args.clients, seconds=args.seconds)
        report: dict[str, Any] = {"load": asyncio.run(load)}
        throughput = {"with draft": measure_throughput(args, engine, url, cases)}
    engine = Engine.load(args.target, settings=EngineConfig(max_length=args.max_length))
    cases = make_cases(engine, args.max_new_tokens)
    with serve(args, None) as (_, url):
        throughput["without"] = measure_throughput(args, engine, url, cases)
    return report | {"throughput": throughput, "provenance": provenance()}


def format_report(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    load = report["load"]
    first, per_token = load["first_token_milliseconds"], load["per_token_milliseconds"]
    lines = [
        f"{load['clients']} clients: {load['answers']} answers, of which {load['left']} were left "
        f"halfway; **{load['wrong']} wrong**, {load['lost']} lost, {load['crossed']} crossed, "
        f"{load['duplicated']} duplicated; {load['tokens_per_second']:.0f} tokens/s, and "
        f"{load['cached_tokens']:.0f} tokens of prompts from the prefix cache.",
        "",
        *format_rows(
            ["", "p50", "p99"],
            [
                ("first token, ms", *(f"{first[key]:.0f}" for key in ("p50", "p99"))),
                ("time per token, ms", *(f"{per_token[key]:.1f}" for key in ("p50", "p99"))),
            ],
        ),
        "",
        f"All slots are free {load['freed_milliseconds']:.0f} ms after all clients have left. "
        f"Memory: {load['memory_mib']['after_10_s']:.0f} MiB after 10 s, "
        f"{load['memory_mib']['at_the_end']:.0f} MiB at the end.",
        "",
        "Tokens per second, and the ratio to `Engine.generate` in batches of as many:",
        "",
    ]
    lines += format_rows(
        ["clients", "models", "`Engine.generate`", "streamed", "ratio", "whole", "ratio"],
        [
            (
                row["clients"],
                name,
                f"{row['engine']:.0f}",
                *(f"{row['streamed']:.0f}", f"{row['streamed_to_engine']:.2f}"),
                *(f"{row['whole']:.0f}", f"{row['whole_to_engine']:.2f}"),
            )
            for name, rows in report["throughput"].items()
            for row in rows
        ],
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=str(python_model("target")), metavar="DIR")
    parser.add_argument("--draft", default=str(python_model("poss3")), metavar="DIR")
    parser.add_argument(
        "--sizes", type=at_least(1), nargs="+", default=[1, 4, 16], help="clients at once"
    )
    parser.add_argument("--max-new-tokens", type=at_least(8), default=128, metavar="N")
    add_numbers(parser, {"clients": 64, "seconds": 120, "max-length": 512, "repeats": 3})
    args = parser.parse_args(arguments)
    report = measure(args)
    show_report(report, format_report(report), args.output)


if __name__ == "__main__":
    run_program(main)
