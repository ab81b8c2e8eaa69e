"""Timing for the benchmark: whole prompts, the phases of a round, and a bare decode step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from poss_jax import speculate, target
from poss_jax.engine import Engine, Generation, generate_jit
from poss_jax.speculate import DecodeConfig, DecodeState, Request, Weights
from poss_jax.tree import Tree
from poss_jax.verify import accept, choose

_PHASE_CALLS = 20


@dataclass
class Decoder:
    """A way to decode, and its row in the table."""

    name: str
    engine: Engine
    compile_seconds: float = 0.0

    def compile(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Runs one prompt of every shape, so that later calls compile nothing."""
        started = time.monotonic()
        requests = [self.engine.request([ids], max_new_tokens, batch_size=1) for ids in prompts]
        for request in {request.tokens.shape: request for request in requests}.values():
            config = self.engine.decode_config(max_new_tokens)
            jax.block_until_ready(generate_jit(self.engine.weights, config, request))
        self.compile_seconds = time.monotonic() - started


@dataclass
class Run:
    """One pass over all prompts."""

    answers: list[Generation] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


def time_prompts(
    decoder: Decoder, prompts: list[list[int]], max_new_tokens: int, progress: tqdm
) -> Run:
    """Decodes every prompt alone; times prefill and all rounds up to the finished output.

    Args:
      decoder: compiled already.
      prompts: token ids.
      max_new_tokens: most new tokens of each.
      progress: advanced by one per prompt.
    """
    engine, run = decoder.engine, Run()
    config = engine.decode_config(max_new_tokens)
    for ids in prompts:
        request = jax.block_until_ready(engine.request([ids], max_new_tokens, batch_size=1))
        started = time.perf_counter()
        state = jax.block_until_ready(generate_jit(engine.weights, config, request))
        run.seconds.append(time.perf_counter() - started)
        run.answers += engine.read([ids], state.output)
        progress.update()
    return run


def measure_phases(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> dict[str, float]:
    """Times draft, verify and commit as programs of their own, on the state after the prompt.

    Returns:
      Median milliseconds of each; their sum is more than a round, which fuses them.
    """
    engine = decoder.engine
    config = engine.decode_config(max_new_tokens)
    request = engine.request([prompt], max_new_tokens, batch_size=1)
    start = jax.jit(speculate.start, static_argnums=1)
    state = start(engine.weights, config, request)
    # A sequence that is done is computed like any other, but its caches do not grow.
    done = state.output.replace(is_done=state.output.is_done | True)
    state = state.replace(output=done)
    phases: dict[str, float] = {}
    if config.draft is not None:
        draft = jax.jit(speculate.draft_tree, static_argnums=1, donate_argnums=2)
        phases["draft"], (state, tree) = _timed(
            lambda previous: draft(engine.weights, config, previous[0]), (state, None)
        )
    else:
        tree = jax.jit(speculate.draft_tree, static_argnums=1)(engine.weights, config, state)[1]
    phases["verify"], (state, out) = _timed(
        lambda previous: _verify(engine.weights, config, previous[0], tree), (state, None)
    )
    phases["commit"], _ = _timed(
        lambda previous: _commit(engine.weights, config, request, previous, out, tree), state
    )
    return {name: 1000 * seconds for name, seconds in phases.items()}


def plain_step_seconds(engine: Engine, prompt: list[int], max_new_tokens: int) -> float:
    """Median seconds of one jitted decode step and argmax, called from the host in a plain loop."""
    config = engine.decode_config(max_new_tokens)._replace(draft=None)
    request = engine.request([prompt], max_new_tokens, batch_size=1)
    state = jax.jit(speculate.start, static_argnums=1)(engine.weights, config, request)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, cache: Any, token: Any) -> tuple[Any, Any]:
        out = target.decode(params, config.target, cache, token)
        return out.cache, choose(out.logits)[:, 0]

    cache, token = step(engine.weights.target, state.target_cache, state.root)
    jax.block_until_ready(token)
    seconds = []
    for _ in range(config.max_new_tokens - 1):
        started = time.perf_counter()
        cache, token = step(engine.weights.target, cache, token)
        jax.block_until_ready(token)
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds))


@partial(jax.jit, static_argnums=1, donate_argnums=2)
def _verify(
    weights: Weights, config: DecodeConfig, state: DecodeState, tree: Tree
) -> tuple[DecodeState, tuple[Any, Any]]:
    out = speculate.verify_tree(weights, config, state, tree)
    return state.replace(target_cache=out.cache), (out.logits, out.features)


@partial(jax.jit, static_argnums=1, donate_argnums=3)
def _commit(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    out: tuple[Any, Any],
    tree: Tree,
) -> DecodeState:
    verified = target.TargetOutput(logits=out[0], features=out[1], cache=state.target_cache)
    acceptance = accept(tree, choose(out[0]), max_accepted=config.max_accepted)
    return speculate.commit(weights, config, request, state, verified, acceptance)


def _timed(function: Callable[[Any], Any], first: Any) -> tuple[float, Any]:
    """Median seconds of calls that each take what the one before returned."""
    result = jax.block_until_ready(function(first))
    seconds = []
    for _ in range(_PHASE_CALLS):
        started = time.perf_counter()
        result = jax.block_until_ready(function(result))
        seconds.append(time.perf_counter() - started)
    return float(np.median(seconds)), result
