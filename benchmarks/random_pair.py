"""A random pair of any shape, and the time of its rounds, many of them in one program."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from infer.bench.phases import state_after
from poss_jax.checkpoint.record import new_record, target_identity, with_vocabulary
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.engine.engine import Engine
from poss_jax.model.families import init_draft
from poss_jax.model.target import init_target


def random_engines(llama: LlamaConfig, num_draft_tokens: int) -> tuple[Engine, Engine, Engine]:
    """Engines of a random target: alone, with a PosS-3 draft, and with fewer draft tokens."""
    target = jax.jit(init_target, static_argnums=0)(llama, jax.random.key(0))
    config = DraftConfig(layer=llama, positions_per_specialist=(3, 3), trained_depth=6)
    draft = jax.jit(init_draft, static_argnums=0)(config, jax.random.key(1))
    identity = target_identity(
        "random", None, np.asarray(target["embed"]["weight"]), np.asarray(target["head"]["weight"])
    )
    baseline = Engine(new_record(llama, identity, tokenizer_from=None), target)
    record = new_record(config, identity, tokenizer_from=None)
    tokens = range(num_draft_tokens)
    reduced = with_vocabulary(record, tokens, origin="random")
    return baseline, baseline.with_draft(record, draft), baseline.with_draft(reduced, draft)


def time_rounds(engine: Engine, prompt: Sequence[int], num_rounds: int) -> Callable[[], float]:
    """Returns a function that gives milliseconds per round on the state after the prompt.

    The sequence is marked as done: it is computed like any other, but its caches do not grow.
    """
    config, request, state = state_after(engine, engine.prepare(prompt, 2 * num_rounds + 64))
    return timed_rounds(engine, config, request, state, num_rounds)


def timed_rounds(
    engine: Engine, config: DecodeConfig, request: Request, state: DecodeState, num_rounds: int
) -> Callable[[], float]:
    """Returns a function that gives milliseconds per round; it uses the state up."""

    def run() -> float:
        nonlocal state
        started = time.perf_counter()
        state = repeat_round(engine.weights, config, request, state, num_rounds)
        jax.block_until_ready(state)
        return 1000 * (time.perf_counter() - started) / num_rounds

    return run


@partial(jax.jit, static_argnums=(1, 4), donate_argnums=3)
def repeat_round(
    weights: Weights, config: DecodeConfig, request: Request, state: DecodeState, num_rounds: int
) -> DecodeState:
    """Runs rounds one after the other in one program, as decoding does."""

    def body(_: Any, state: DecodeState) -> DecodeState:
        return speculate.run_round(weights, config, request, state)

    return jax.lax.fori_loop(0, num_rounds, body, state)


def interleaved(
    runs: dict[str, Callable[[], float]], repeats: int, name: str
) -> dict[str, list[float]]:
    """Calls every function in turn; the first round of calls compiles and is not counted."""
    results: dict[str, list[float]] = {key: [] for key in runs}
    with tqdm(total=(1 + repeats) * len(runs), desc=name, unit="run") as progress:
        for repeat in range(1 + repeats):
            for key, run in runs.items():
                result = run()
                progress.update()
                if repeat:
                    results[key].append(result)
    return results
