"""Compiles each phase of a round as a separate program, and times it in turn with the round.

    draft ── verify ── accept ── commit        round
      └ a level: the time of this depth's tree minus the time of a tree one level shallower

Every phase takes what the one before it returned, on the state after a prompt. The sequence is
marked as done: it costs the same, but its caches do not grow from call to call.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np

from poss_jax.config.models import TreeConfig
from poss_jax.data.progress import progress_bar
from poss_jax.decode import speculate, verify
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.tree import Tree, root_tree
from poss_jax.decode.verify import Acceptance
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.steps import on_mesh
from poss_jax.model.target import Verified

from .costs import Device, cost_card, describe_workload, floors, num_parts

PARTS = ("draft", "verify", "accept", "commit")
"""Phases whose sum is compared with the round."""

_CALLS = 20
_Name = TypeVar("_Name")

verify_tree = jax.jit(on_mesh(speculate.verify_tree, is_state=False), static_argnums=1)
commit = jax.jit(on_mesh(speculate.commit), static_argnums=1, donate_argnums=3)
run_round = jax.jit(on_mesh(speculate.run_round), static_argnums=1, donate_argnums=3)
run_rounds = jax.jit(on_mesh(speculate.run_rounds), static_argnums=1, donate_argnums=3)


@partial(jax.jit, static_argnums=1)
@on_mesh
def draft_tree(weights: Weights, config: StaticShape, request: Request, state: DecodeState) -> Tree:
    """First phase of a round."""
    noise = speculate.round_noise(config, request, state)
    return speculate.draft_tree(weights, config, request, state, noise)


@partial(jax.jit, static_argnums=1)
@on_mesh
def accept(
    weights: Weights,
    config: StaticShape,
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


class Batch:
    """Prompts that were read, marked as done; every call runs a part of a round, in turn."""

    def __init__(
        self, engine: Engine, prompts: Sequence[PreparedPrompt], *, batch_size: int = 1
    ) -> None:
        self._batch = FixedBatch(engine, prompts, batch_size=batch_size)
        self.weights, self.config = self._batch.weights, self._batch.config
        self.request = self._batch.request
        state = self.start()
        # Sequences that are done are computed like others, but their caches do not grow.
        self.state = state.replace(output=state.output.replace(is_done=state.output.is_done | True))
        self._tree = root_tree(self.state.root)

    def start(self) -> DecodeState:
        self._batch.start()
        return self._batch.state

    def draft(self, tree: TreeConfig) -> Tree:
        config = self.config._replace(tree=tree)
        self._tree = draft_tree(self.weights, config, self.request, self.state)
        return self._tree

    def verify(self) -> Verified:
        self._out = verify_tree(self.weights, self.config, self.state, self._tree)
        return self._out

    def accept(self) -> Acceptance:
        inputs = self.weights, self.config, self.request, self.state, self._tree
        self._acceptance = accept(*inputs, self._out.logits)
        return self._acceptance

    def commit(self) -> DecodeState:
        inputs = self.weights, self.config, self.request, self.state
        self.state = commit(*inputs, self._out, self._acceptance)
        return self.state

    def round(self) -> DecodeState:
        self.state = run_round(self.weights, self.config, self.request, self.state)
        return self.state


def shallower(config: StaticShape) -> list[TreeConfig]:
    """Trees of one level, of two, and so on, up to the whole tree; none without a draft."""
    depths = range(1, config.tree.depth + 1) if config.draft else ()
    return [replace(config.tree, depth=depth) for depth in depths]


def time_in_turn(
    programs: Mapping[_Name, Callable[[], Any]], num_calls: int, title: str | None = None
) -> dict[_Name, np.ndarray]:
    """Seconds of every call [num_calls], by program; a first call of each is not counted.

    With a title, a progress bar is shown.
    """
    seconds: dict[_Name, list[float]] = {name: [] for name in programs}
    for _ in progress_bar(range(num_calls + 1), desc=title, unit="call", disable=title is None):
        for name, run in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - started)
    return {name: np.array(calls[1:]) for name, calls in seconds.items()}


def measure_phases(
    engine: Engine, prompt: PreparedPrompt, *, num_calls: int = _CALLS
) -> dict[str, float]:
    """Times prefill, the phases of a round, and the round.

    Returns:
      Median milliseconds by the names of `costs.cost_card`.
    """
    batch = Batch(engine, [prompt])
    levels = {f"draft/level{i}": tree for i, tree in enumerate(shallower(batch.config))}
    programs: dict[str, Callable[[], Any]] = {"prefill": batch.start}
    programs |= {name: partial(batch.draft, tree) for name, tree in levels.items()}
    if not levels and batch.config.num_copied:
        programs["draft"] = partial(batch.draft, batch.config.tree)  # copies alone
    programs |= {"verify": batch.verify, "accept": batch.accept, "commit": batch.commit}
    seconds = time_in_turn(programs | {"round": batch.round}, num_calls)
    medians = {name: 1000 * float(np.median(calls)) for name, calls in seconds.items()}
    if not levels:
        return medians
    totals = [medians[name] for name in levels]  # of ever deeper trees
    last_levels = np.diff(totals, prepend=0.0).tolist()
    return medians | {"draft": totals[-1]} | dict(zip(levels, last_levels, strict=True))


def measure_card(
    engine: Engine, prompt: PreparedPrompt, device: Device, *, num_calls: int = _CALLS
) -> dict[str, Any]:
    """Times the phases after a prompt and adds their floors, for the tables of a report.

    Returns:
      Milliseconds per phase, their sum relative to the whole round, and the cost of each phase:
      bytes and FLOPs per device, floor in milliseconds, and floor / measured.
    """
    phases = measure_phases(engine, prompt, num_calls=num_calls)
    config, num_tokens = FixedBatch(engine, [prompt]).config, len(prompt.ids)
    work = describe_workload(engine.weights, config, batch=1, context=num_tokens)
    parts = num_parts(config.mesh)
    card = {name: cost / parts for name, cost in cost_card(work, prompt_tokens=num_tokens).items()}
    floor = floors(card, device)
    return {
        "phase_milliseconds": phases,
        "phases_to_round": phases_to_round(phases),
        "costs": {
            name: {
                "bytes": cost.bytes,
                "flops": cost.flops,
                "floor_milliseconds": floor[name],
                # A level is a difference of two measurements, and may drown in their noise.
                "floor_to_measured": floor[name] / phases[name] if phases[name] > 0 else None,
            }
            for name, cost in card.items()
        },
    }


def phases_to_round(milliseconds: dict[str, float]) -> float:
    """Sum of the separately timed phases, relative to the round."""
    return sum(milliseconds.get(name, 0.0) for name in PARTS) / milliseconds["round"]
