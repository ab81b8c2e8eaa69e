"""Compiles each phase of a round as a separate program, and times it in turn with the round.

    draft ── verify ── accept ── commit        round
      └ a level: the time of this depth's tree minus the time of a tree one level shallower

Every phase takes what the one before it returned, on the state after a prompt. The sequence is
marked as done: it costs the same, but its caches do not grow from call to call.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from poss_jax.decode import speculate, verify
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.decode.tree import Tree, root_tree
from poss_jax.decode.verify import Acceptance
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.rounds import on_mesh, run_round, start

from .costs import Device, cost_card, describe_workload, floors, num_parts

PARTS = ("draft", "verify", "accept", "commit")
"""Phases whose sum is compared with the round."""

_CALLS = 20
_Result = TypeVar("_Result")

verify_tree = jax.jit(on_mesh(speculate.verify_tree, is_state=False), static_argnums=1)
commit = jax.jit(on_mesh(speculate.commit), static_argnums=1, donate_argnums=3)


@partial(jax.jit, static_argnums=1)
@on_mesh
def draft_tree(
    weights: Weights, config: DecodeConfig, request: Request, state: DecodeState
) -> Tree:
    """First phase of a round."""
    noise = speculate.round_noise(config, request, state)
    return speculate.draft_tree(weights, config, request, state, noise)


@partial(jax.jit, static_argnums=1)
@on_mesh
def accept(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    tree: Tree,
    logits: jax.Array,
) -> Acceptance:
    """Third phase of a round: the target's choices, and the path that agrees with them."""
    del weights
    noise = speculate.round_noise(config, request, state)
    chosen = speculate.choose_tokens(request, state, tree, logits, noise)
    return verify.accept(tree, chosen, max_accepted=config.max_accepted)


def state_after(
    engine: Engine, prompt: PreparedPrompt
) -> tuple[DecodeConfig, Request, DecodeState]:
    """Runs a prompt and marks its sequence as done."""
    config, request = engine.request([prompt])
    return config, request, mark_done(start(engine.weights, config, request))


def mark_done(state: DecodeState) -> DecodeState:
    """Marks all sequences as done: they are computed like others, but their caches do not grow."""
    return state.replace(output=state.output.replace(is_done=state.output.is_done | True))


def shallower(config: DecodeConfig) -> list[DecodeConfig]:
    """Settings of trees of one level, of two, and so on, up to the whole tree."""
    if config.draft is None:
        return []
    depths = range(1, config.tree.depth + 1)
    return [config._replace(tree=replace(config.tree, depth=depth)) for depth in depths]


def measure_phases(
    engine: Engine, prompt: PreparedPrompt, *, num_calls: int = _CALLS
) -> dict[str, float]:
    """Times prefill, the phases of a round, and the round.

    Returns:
      Median milliseconds by the names of `costs.cost_card`.
    """
    config, request, state = state_after(engine, prompt)
    weights, trees = engine.weights, shallower(config)
    calls: list[dict[str, float]] = []
    for _ in range(num_calls + 1):
        now: dict[str, float] = {}
        _time(now, "prefill", lambda: start(weights, config, request))
        tree = root_tree(state.root)
        for depth, shallow in enumerate(trees):
            run = partial(draft_tree, weights, shallow, request, state)
            tree = _time(now, f"draft/level{depth}", run)
        out = _time(now, "verify", partial(verify_tree, weights, config, state, tree))
        run = partial(accept, weights, config, request, state, tree, out.logits)
        acceptance = _time(now, "accept", run)
        run = partial(commit, weights, config, request, state, out, acceptance)
        state = _time(now, "commit", run)
        state = _time(now, "round", partial(run_round, weights, config, request, state))
        calls.append(now)
    medians = {
        name: 1000 * float(np.median([call[name] for call in calls[1:]])) for name in calls[0]
    }
    return _split_levels(medians, len(trees))


def measure_card(
    engine: Engine, prompt: PreparedPrompt, device: Device, *, num_calls: int = _CALLS
) -> dict[str, Any]:
    """Times the phases and adds their floors, for the tables of a report.

    Args:
      prompt: the prompt on whose state it is measured.

    Returns:
      Milliseconds per phase, their sum relative to the whole round, and the cost of each phase:
      bytes and FLOPs per device, floor in milliseconds, and floor / measured.
    """
    phases = measure_phases(engine, prompt, num_calls=num_calls)
    config, num_tokens = engine.request([prompt])[0], len(prompt.ids)
    work = describe_workload(engine.weights, config, batch=1, context=num_tokens)
    parts = num_parts(config.mesh)
    card = {name: cost / parts for name, cost in cost_card(work, prompt_tokens=num_tokens).items()}
    least = floors(card, device)
    return {
        "phase_milliseconds": phases,
        "phases_to_round": phases_to_round(phases),
        "costs": {
            name: {
                "bytes": cost.bytes,
                "flops": cost.flops,
                "floor_milliseconds": least[name],
                # A level is a difference of two measurements, and may drown in their noise.
                "floor_to_measured": least[name] / phases[name] if phases[name] > 0 else None,
            }
            for name, cost in card.items()
        },
    }


def phases_to_round(milliseconds: dict[str, float]) -> float:
    """Sum of the separately timed phases, relative to the round."""
    return sum(milliseconds.get(name, 0.0) for name in PARTS) / milliseconds["round"]


def _split_levels(medians: dict[str, float], num_levels: int) -> dict[str, float]:
    """Turns times of ever deeper trees into times of their last levels."""
    if not num_levels:
        return medians
    names = [f"draft/level{depth}" for depth in range(num_levels)]
    whole = [medians[name] for name in names]
    levels = np.diff(whole, prepend=0.0).tolist()
    return medians | {"draft": whole[-1]} | dict(zip(names, levels, strict=True))


def _time(seconds: dict[str, float], name: str, run: Callable[[], _Result]) -> _Result:
    started = time.perf_counter()
    result = jax.block_until_ready(run())
    seconds[name] = time.perf_counter() - started
    return result
