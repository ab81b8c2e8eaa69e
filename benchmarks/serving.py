"""Loads the server: are all texts right, and how fast do they come?

Starts `python -m infer.serve` on the models of --target and --draft (by default the bundled ones),
and asks for sampled texts that `Engine.generate` has written beforehand.

    load         many clients stream for some time, a third of them leave halfway; half of the
                 prompts begin alike, a third of the answers follow a JSON schema; counts texts
                 that differ, are lost or come twice, and measures first tokens, time per token,
                 memory, and how soon a slot is free after its client left
    throughput   1, 4 and 16 clients (or --sizes), which stream or want whole answers, against
                 `Engine.generate` in batches of that size, alternating; with the draft and without,
                 and with a larger pair of random weights

Prints tables, and as its last line one JSON object; --output keeps report.json and report.md. With
--apart rounds get one core and everything else the others, which imitates a separate accelerator.

    python -m benchmarks.serving --output docs/results/serving
    python -m benchmarks.serving --apart --output docs/results/serving_apart
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.cases import Case, make_cases
from benchmarks.options import make_parser, python_model
from infer.bench.report import show_report
from poss_jax.checkpoint.folder import read_target, write_model
from poss_jax.checkpoint.record import new_record, provenance, target_identity
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine
from poss_jax.model.families import init_draft
from poss_jax.model.parameters import split_items
from poss_jax.model.target import init_target
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

_ADDRESS = re.compile(r"listening at (http://\S+)/")
_SERVE = """
import sys
from benchmarks.serving import set_rounds_apart
from infer.serve import cli

set_rounds_apart({cores})
cli()
"""


def set_rounds_apart(cores: Sequence[int]) -> None:
    """Gives JAX the first core, and everything else in this process the others."""
    os.sched_setaffinity(0, cores[:1])  # of the threads that JAX starts now
    numbers = jnp.ones((512, 512))
    jax.block_until_ready(numbers @ numbers)
    os.sched_setaffinity(0, cores[1:])


@dataclass
class Answer:
    """An answer as a client saw it; times in seconds, `ids` are those of its parts."""

    ids: set[str]
    tokens: list[int]
    first: float
    seconds: float
    is_whole: bool


def serve(
    args: argparse.Namespace, target: str, draft: str | None
) -> AbstractContextManager[tuple[int, str]]:
    """Runs a server of a pair."""
    words = ["--target", target, *(["--draft", draft] if draft else [])]
    words += ["--max-length", str(args.max_length), "--batch-size", str(max(args.sizes))]
    program = ["-c", _SERVE.format(cores=args.cores)] if args.cores else ["-m", "infer.serve"]
    return running([*program, *words, "--max-logprobs", "0"])


@contextmanager
def running(words: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Runs a server, by the arguments of `python`, until it is ready; gives process and address."""
    command = [sys.executable, *words, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(filter(None, map(_ADDRESS.search, process.stderr)))
        # Drain the rest of its stderr, or a full pipe would block the server.
        threading.Thread(target=list, args=[process.stderr], daemon=True).start()
        try:
            while not httpx.get(f"{found[1]}/ready").json().get("is_compiled"):
                time.sleep(0.5)
            yield process.pid, found[1]
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
        rest = b""
        async for data in response.aiter_raw():
            *events, rest = (rest + data).split(b"\n\n")
            for one in events:
                if one.startswith(b"data: {"):
                    yield json.loads(one[6:])


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
    memory = [resident_mib(pid)]

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
        with tqdm(total=round(seconds), desc="load", unit="s") as bar:
            while time.monotonic() < end:
                await asyncio.sleep(1)
                bar.update()
                memory.append(resident_mib(pid))
        await asyncio.gather(*clients)
        elapsed = time.monotonic() - began  # with the answers that were begun in time
        freed = await measure_freeing(client, cases, num_clients)
        cached = await read_metric(client, "prefix_cache_hits_total")
    whole = [answer for answer in answers if answer.is_whole]
    per_token = [
        (one.seconds - one.first) / (len(one.tokens) - 1) for one in whole if len(one.tokens) > 1
    ]
    return {
        "clients": num_clients,
        "answers": len(answers),
        "left": len(answers) - len(whole),
        "wrong": wrong,
        "lost": lost,
        "crossed": sum(len(one.ids) != 1 for one in answers),
        "duplicated": len(answers) - len({name for one in answers for name in one.ids}),
        "cached_tokens": cached,
        "tokens_per_second": sum(len(one.tokens) for one in answers) / elapsed,
        "first_token_milliseconds": percentiles([1000 * one.first for one in whole]),
        "per_token_milliseconds": percentiles([1000 * one for one in per_token]),
        "freed_milliseconds": freed,
        "memory_mib": {"after_10_s": memory[min(10, len(memory) - 1)], "at_the_end": memory[-1]},
    }


async def measure_freeing(
    client: httpx.AsyncClient, cases: Sequence[Case], num_clients: int
) -> float:
    """Milliseconds from the moment at which all clients leave until no slot is taken."""
    await asyncio.gather(*(ask(client, case, leave_after=8) for case in cases[:num_clients]))
    left = time.monotonic()
    while await read_metric(client, "num_requests_running"):
        await asyncio.sleep(0.002)
    return 1000 * (time.monotonic() - left)


async def read_metric(client: httpx.AsyncClient, name: str) -> float:
    """Reads one number of /metrics."""
    text = (await client.get("/metrics")).text
    found = re.search(rf"^poss:{name} (\S+)$", text, re.MULTILINE)
    assert found is not None, name
    return float(found[1])


async def ask_whole(client: httpx.AsyncClient, case: Case) -> Answer:
    """Gets one answer at once."""
    begun = time.monotonic()
    response = await client.post("/v1/completions", json=case.body | {"stream": False})
    response.raise_for_status()
    seconds = time.monotonic() - begun
    body = response.json()
    tokens = body["choices"][0]["token_ids"]
    return Answer({body["id"]}, tokens, seconds, seconds, is_whole=True)


def run_server(
    url: str, ask_one: Callable[..., Awaitable[Answer]], cases: Sequence[Case], num_clients: int
) -> float:
    """Tokens per second of clients, already connected, that ask for one text after the other."""
    waiting = list(cases)

    async def run_client(client: httpx.AsyncClient) -> None:
        while waiting:
            case = waiting.pop()
            answer = await ask_one(client, case)
            assert answer.tokens == case.expected

    async def run_clients() -> float:
        async with make_client(url) as client:
            await asyncio.gather(*(client.get("/health") for _ in range(num_clients)))
            begun = time.monotonic()
            await asyncio.gather(*(run_client(client) for _ in range(num_clients)))
            return time.monotonic() - begun

    return sum(len(case.expected) for case in cases) / asyncio.run(run_clients())


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
        few = cases[: max(4 * size, 8)]
        runs: dict[str, Callable[[], float]] = {"engine": partial(run_engine, engine, few, size)}
        for name, ask_one in (("streamed", ask), ("whole", ask_whole)):
            runs[name] = partial(run_server, url, ask_one, few, size)
        passes = tqdm(range(1 + args.repeats), desc=f"{size} clients", unit="pass")
        speeds = [{name: run() for name, run in runs.items()} for _ in passes][1:]
        row: dict[str, Any] = {"clients": size}
        row |= {name: float(np.median([one[name] for one in speeds])) for name in runs}
        for name in runs:
            ratios = [one[name] / one["engine"] for one in speeds]
            row[f"{name}_to_engine"] = float(np.median(ratios))
        rows.append(row)
    return rows


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    return {"p50": float(np.percentile(values, 50)), "p99": float(np.percentile(values, 99))}


def resident_mib(pid: int) -> float:
    """Resident memory of a process, NaN if the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, ValueError):
        return float("nan")
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def write_random_pair(folder: Path, hidden_size: int) -> tuple[str, str]:
    """Writes a target of that width and a PosS-3 draft with random weights; gives their folders."""
    target = python_model("target")
    known = read_target(target).config
    assert isinstance(known, LlamaConfig)
    heads = {"num_heads": hidden_size // 64, "num_kv_heads": hidden_size // 64, "head_dim": 64}
    sizes = {"hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    llama = replace(known, **sizes, **heads)
    draft = DraftConfig(layer=llama, positions_per_specialist=(3, 3), trained_depth=6)
    params = jax.jit(init_target, static_argnums=0)(llama, jax.random.key(0))
    embedding = np.asarray(params["embed"]["weight"])
    identity = target_identity("random", None, embedding, embedding)
    pair = ("target", llama, params), ("draft", draft, init_draft(draft, jax.random.key(1)))
    for name, config, weights in pair:
        tokenizer_from = as_path(target) if name == "target" else None
        record = new_record(config, identity, tokenizer_from=tokenizer_from)
        items = split_items(config, weights)
        write_model(folder / name, record, items, tokenizer_from=tokenizer_from)
    return str(folder / "target"), str(folder / "draft")


def compare(args: argparse.Namespace, target: str, draft: str | None) -> list[dict[str, Any]]:
    """Starts a server for a pair; returns the rows of `measure_throughput`."""
    engine = Engine.load(target, draft, max_length=args.max_length)
    cases = make_cases(engine, args.max_new_tokens)
    with serve(args, target, draft) as (_, url):
        return measure_throughput(args, engine, url, cases)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Runs all parts."""
    engine = Engine.load(args.target, args.draft, max_length=args.max_length)
    cases, mixed = (
        make_cases(engine, args.max_new_tokens, is_mixed=is_mixed) for is_mixed in (False, True)
    )
    report: dict[str, Any] = {"apart": args.apart}
    with serve(args, args.target, args.draft) as (pid, url):
        load = run_load(url, pid, mixed, num_clients=args.clients, seconds=args.seconds)
        report["load"] = asyncio.run(load)
        throughput = {"with draft": measure_throughput(args, engine, url, cases)}
    throughput["without"] = compare(args, args.target, None)
    with tempfile.TemporaryDirectory() as folder:
        target, draft = write_random_pair(Path(folder), args.random_size)
        for name, one in (("with draft", draft), ("without", None)):
            throughput[f"{name}, random {args.random_size} wide"] = compare(args, target, one)
    return report | {"throughput": throughput, "provenance": provenance()}


def format_report(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    load = report["load"]
    first, per_token = load["first_token_milliseconds"], load["per_token_milliseconds"]
    lines = ["Rounds have one core, all else the others.", ""] if report["apart"] else []
    lines += [
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


def _known_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < 2:
        raise UserError(f"--apart: want Linux and 2 processor cores or more, got {len(cores)}")
    return cores


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", default=str(python_model("target")), metavar="DIR")
    parser.add_argument("--draft", default=str(python_model("poss3")), metavar="DIR")
    parser.add_argument("--clients", type=at_least(1), default=64)
    parser.add_argument("--seconds", type=at_least(1), default=120)
    parser.add_argument("--max-new-tokens", type=at_least(8), default=128)
    parser.add_argument("--max-length", type=at_least(16), default=512)
    parser.add_argument(
        "--sizes", type=at_least(1), nargs="+", default=[1, 4, 16], help="clients at once"
    )
    parser.add_argument("--repeats", type=at_least(1), default=3)
    parser.add_argument(
        "--random-size", type=at_least(64), default=512, help="width of the random pair"
    )
    parser.add_argument(
        "--apart", action="store_true", help="give rounds a core, and all else the others"
    )
    args = parser.parse_args(arguments)
    args.cores = _known_cores() if args.apart else None
    if args.cores:
        set_rounds_apart(args.cores)
    report = measure(args)
    show_report(report, format_report(report), args.output)


if __name__ == "__main__":
    run_program(main)
