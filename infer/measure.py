"""Timing for the benchmark: whole prompts, the phases of a round, and a bare decode step."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from poss_jax.config import SamplingConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.decode.tree import Tree, root_tree
from poss_jax.decode.verify import accept, choose
from poss_jax.engine import Engine, Generation, generate_jit, prompt_seed
from poss_jax.model import target

_PHASE_CALLS = 20


@dataclass
class Decoder:
    """A way to decode, and its row in the table.

    Attributes:
      name: in the table.
      engine: decodes.
      sampling: how tokens are chosen; every prompt has its own seed.
      compile_seconds: what compiling took.
    """

    name: str
    engine: Engine
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    compile_seconds: float = 0.0

    def request(self, ids: list[int], index: int, max_new_tokens: int) -> Request:
        """One prompt, alone in its batch; its seed follows from its index."""
        sampling = replace(self.sampling, seed=prompt_seed(self.sampling.seed, index))
        return self.engine.request([ids], max_new_tokens, batch_size=1, sampling=[sampling])

    def compile(self, prompts: list[list[int]], max_new_tokens: int) -> None:
        """Runs one prompt of every shape, so that later calls compile nothing."""
        started = time.monotonic()
        requests = [self.request(ids, i, max_new_tokens) for i, ids in enumerate(prompts)]
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
    for index, ids in enumerate(prompts):
        request = jax.block_until_ready(decoder.request(ids, index, max_new_tokens))
        started = time.perf_counter()
        state = jax.block_until_ready(generate_jit(engine.weights, config, request))
        run.seconds.append(time.perf_counter() - started)
        run.answers += engine.read([ids], state.output)
        progress.update()
    return run


def measure_phases(decoder: Decoder, prompt: list[int], max_new_tokens: int) -> dict[str, float]:
    """Times draft, verify and commit as programs of their own, on the state after the prompt.

    Returns:
      Median milliseconds of each; their sum is more than a round, which is one program.
    """
    engine = decoder.engine
    config = engine.decode_config(max_new_tokens)
    request = decoder.request(prompt, 0, max_new_tokens)
    start = jax.jit(speculate.start, static_argnums=1)
    state = start(engine.weights, config, request)
    # A sequence that is done is computed like any other, but its caches do not grow.
    done = state.output.replace(is_done=state.output.is_done | True)
    state = state.replace(output=done)
    phases: dict[str, float] = {}
    if config.draft is not None:
        phases["draft"], (state, tree) = _timed(
            lambda previous: _draft(engine.weights, config, request, previous[0]), (state, None)
        )
    else:
        tree = root_tree(state.root)
    phases["verify"], (state, out) = _timed(
        lambda previous: _verify(engine.weights, config, previous[0], tree), (state, None)
    )
    phases["commit"], _ = _timed(
        lambda previous: _commit(engine.weights, config, request, previous, out, tree), state
    )
    return {name: 1000 * seconds for name, seconds in phases.items()}


def measure_steps(engine: Engine, prompt: list[int], max_new_tokens: int) -> dict[str, float]:
    """Times the autoregressive loop against plain decode steps, interleaved, without the prompt.

    The plain program takes a step and the argmax, and knows nothing of trees, rounds or stop
    tokens; if the loop is much slower, the baseline of every speed-up is too.

    Returns:
      Median milliseconds per token of `plain` and `loop`, and of their ratio `loop_to_plain`.
    """
    config = engine.decode_config(max_new_tokens)
    num_steps = config.max_new_tokens - 1  # the bucket's, so that there are some
    request = engine.request([prompt], config.max_new_tokens, batch_size=1)
    request = request.replace(stop_ids=jnp.full_like(request.stop_ids, -1))
    state = jax.jit(speculate.start, static_argnums=1)(engine.weights, config, request)
    loop = jax.jit(speculate.run_rounds, static_argnums=1)
    programs = (
        lambda: _plain_steps(engine.weights, config, num_steps, state),
        lambda: loop(engine.weights, config, request, state),
    )
    seconds = np.array([[_seconds(run) for run in programs] for _ in range(_PHASE_CALLS + 1)])[1:]
    plain, whole = 1000 * np.median(seconds, axis=0) / num_steps
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    return {"plain": float(plain), "loop": float(whole), "loop_to_plain": float(ratio)}


@partial(jax.jit, static_argnums=(1, 2))
def _plain_steps(
    weights: Weights, config: DecodeConfig, num_steps: int, state: DecodeState
) -> jax.Array:
    def step(carry: tuple[Any, Any], _: None) -> tuple[Any, None]:
        cache, token = carry
        out = target.decode(weights.target, config.target, cache, token)
        return (out.cache, choose(out.logits)[:, 0]), None

    (_, token), _ = jax.lax.scan(step, (state.target_cache, state.root), length=num_steps)
    return token


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - started


@partial(jax.jit, static_argnums=1, donate_argnums=3)
def _draft(
    weights: Weights, config: DecodeConfig, request: Request, state: DecodeState
) -> tuple[DecodeState, Tree]:
    noise = speculate.round_noise(config, request, state)
    return speculate.draft_tree(weights, config, request, state, noise)


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
    noise = speculate.round_noise(config, request, state)
    chosen = speculate.choose_tokens(request, state, tree, out[0], noise)
    acceptance = accept(tree, chosen, max_accepted=config.max_accepted)
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
