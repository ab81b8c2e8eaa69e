"""The server over a random pair on this device, and closed-loop clients in another process.

Its rounds accept recorded numbers of tokens (`random_pair`). Prompts are random, so the prefix
cache, which is off, would not help.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.random_pair import forced_round
from benchmarks.serving import Answer, Case, ask, make_client, percentiles
from poss_jax.config.decoding import ServeConfig
from poss_jax.decode import speculate
from poss_jax.engine.batch import RoundKind
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.slots import Slots
from poss_jax.serving.app import create_app
from poss_jax.serving.server import listen, make_server


class GreedySlots(Slots):
    """Slots whose clients never sample, so that half of the rounds need not be compiled."""

    def round_kinds(self, size: int) -> list[RoundKind]:
        return [program for program in super().round_kinds(size) if not program.is_sampled]

    def rare_kinds(self, size: int) -> list[RoundKind]:
        del size
        return []


@contextmanager
def serving(engine: Engine, num_slots: int, max_length: int) -> Iterator[str]:
    """Serves from a thread of this process, all programs compiled; gives the address."""
    slots = GreedySlots(engine, sizes=[num_slots], max_length=max_length)
    config = ServeConfig(target="random", batch_size=num_slots, max_length=max_length)
    app = create_app(config, slots=slots)
    server = make_server(app, config, api_key=None)
    patch = mock.patch.object(speculate, "run_round", forced_round)
    with closing(listen("127.0.0.1", 0)) as sock, patch:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        try:
            while not (server.started and app.state.service.is_compiled):
                if server.error is not None or not thread.is_alive():
                    raise RuntimeError("the server ended while it compiled") from server.error
                time.sleep(0.1)
            yield "http://{}:{}".format(*sock.getsockname()[:2])
        finally:
            server.should_exit = True
            thread.join()


def measure_load(url: str, **load: Any) -> dict[str, Any]:
    """Runs `ask_all` in a process that leaves this one's interpreter to the server."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(ask_all, url, **load).result()


def ask_all(
    url: str,
    *,
    num_clients: int,
    seconds: float,
    num_prompt: int,
    num_new: int,
    vocab_size: int,
) -> dict[str, Any]:
    """Streams to clients that ask again and again until the time is over.

    Returns:
      Answers, their tokens per second, milliseconds per token of a client, and percentiles of the
      milliseconds to the first token and per further token.
    """
    rng = np.random.default_rng(num_clients)
    answers: list[Answer] = []

    async def run_client(client: Any, until: float) -> None:
        for _ in itertools.count():
            ids = rng.integers(0, vocab_size, num_prompt).tolist()
            answers.append(await ask(client, Case(PreparedPrompt(ids, num_new), None, [])))
            if time.monotonic() >= until:
                return

    async def run_all() -> float:
        async with make_client(url) as client:
            await asyncio.gather(*(client.get("/health") for _ in range(num_clients)))
            begun = time.monotonic()
            until = begun + seconds
            await asyncio.gather(*(run_client(client, until) for _ in range(num_clients)))
            return time.monotonic() - begun

    elapsed = asyncio.run(run_all())
    further = [
        (answer.seconds - answer.first) / max(len(answer.tokens) - 1, 1) for answer in answers
    ]
    tokens_per_second = sum(len(answer.tokens) for answer in answers) / elapsed
    return {
        "clients": num_clients,
        "answers": len(answers),
        "tokens_per_second": tokens_per_second,
        "token_milliseconds": 1000 * num_clients / tokens_per_second,
        "first_token_milliseconds": percentiles([1000 * answer.first for answer in answers]),
        "per_token_milliseconds": percentiles([1000 * gap for gap in further]),
    }
