"""The fastest draft tree per batch size: predicted for hundreds of trees, confirmed for a few.

The text does not depend on the tree, and the draft's candidates after a token depend only on the
text so far. So one recording per top_k, with a draft after every token, gives the rounds of every
tree with that top_k, exact up to rounding:

    text              a   b   c   d   e
    path from "a"         1   1   7           rank among the candidates of `depth` levels, 1 best
    total_tokens 4        yes yes no          accepted 2: the next round starts at "d"

A round's predicted time is the sum of its measured parts: drafting, by depth and top_k, and
everything from verifying to committing, by the number of nodes.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import config_to_dict
from poss_jax.data.progress import progress_bar
from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.tree import Candidates, Tree, make_tree, root_tree
from poss_jax.engine.answers import mean_acceptance_length
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.steps import on_mesh
from poss_jax.engine.trees import default_tree

from ..bench.journal import Kept
from ..bench.measure import time_batches
from ..bench.phases import Batch, time_in_turn

_DEPTH = 8
_TOP_KS = {"cpu": (1, 2, 3, 4, 6)}
_OTHER_TOP_KS = (1, 2, 3, 4, 6, 8, 10, 16)
_NODES = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 60, 64, 80, 96, 128)
_MEASURED_NODES = (2, 4, 8, 16, 32, 64, 128)
_RECORDED_TOGETHER = 8
_CALLS = 15
_CONFIRMED = 3
_RECORDING_WEIGHT, _COMPILE_SECONDS = 2.5, 60.0  # see `Tuning.estimate_seconds`
_RANKED = ("tokens", "scores", "parents")  # fields of `Candidates`
_MISSING = np.iinfo(np.int32).max

Ranks = np.ndarray
"""[positions depth depth] int32: at [p, d - 1, l] the rank, from 1 on, of the node at level l of
the path that the text takes after token p, among the candidates of the first d levels."""


class Costs(NamedTuple):
    """Measured seconds of one batch size."""

    first_level: float  # the first drafted position
    level: dict[int, float]  # every further one, by top_k
    rest: dict[int, float]  # verifying, accepting and committing, by nodes
    plain: float  # a round without the draft
    start: float  # the prompts, with the draft
    plain_start: float  # the prompts without it

    def round(self, tree: TreeConfig | None) -> float:
        """Seconds of a round; None: without the draft."""
        if tree is None:
            return self.plain
        level = np.interp(tree.top_k, list(self.level), list(self.level.values()))
        finish = np.interp(tree.num_nodes, list(self.rest), list(self.rest.values()))
        return float(self.first_level + (tree.depth - 1) * level + finish)


@dataclass(frozen=True)
class Recording:
    """Numbers of tokens of some answers, and ranks of the paths that their texts take."""

    lengths: list[int]
    ranks: list[Ranks]

    def accepted(self, tree: TreeConfig) -> list[list[int]]:
        """Tokens that every round of every answer would accept with a tree of the same top_k."""
        accepted = []
        for ranks, length in zip(self.ranks, self.lengths, strict=True):
            is_kept = ranks[:, tree.depth - 1, : tree.depth] < tree.num_nodes
            kept_path = is_kept.cumprod(axis=1).sum(axis=1)
            rounds, position = [], 0
            while position < length - 1:  # the first token comes with the prompt
                rounds.append(int(kept_path[position]))
                position += rounds[-1] + 1
            accepted.append(rounds)
        return accepted


@dataclass(frozen=True)
class Tuning:
    """The search for the trees of one draft."""

    name: str  # of the draft and its vocabulary, unique in `kept`
    engine: Engine
    prompts: Sequence[PreparedPrompt]  # they should resemble later ones
    batch_sizes: Sequence[int]
    kept: Kept  # what an interrupted run found, which is not measured again
    lookup: int = 0  # most copies of a round where predictions, which know none, are confirmed

    @property
    def top_ks(self) -> list[int]:
        """Those that trees are tried with."""
        size = self.engine.weights.draft["head"]["weight"].shape[0]
        candidates = _TOP_KS.get(jax.default_backend(), _OTHER_TOP_KS)
        return sorted({min(top_k, size) for top_k in candidates})

    def of_size(self, batch_size: int) -> str:
        """Name of what is found for a batch size."""
        return f"{self.name}, batch size {batch_size}"

    def of_recording(self, top_k: int) -> str:
        """Name of a recording."""
        return f"{self.name}, top_k {top_k}"

    def estimate_seconds(self, seconds: float, repeats: int) -> float:
        """Seconds that `tune` takes about, most of them for recording; by hand, on two CPU cores.

        `seconds` are those of all prompts, without a draft.
        """
        sizes = sum(self.of_size(size) not in self.kept for size in self.batch_sizes)
        recordings = sum(self.of_recording(top_k) not in self.kept for top_k in self.top_ks)
        recordings *= sizes > 0
        confirmed = sizes * (1 + repeats) * (_CONFIRMED + 2)
        compiled = sizes + (recordings > 0)
        return (recordings * _RECORDING_WEIGHT + confirmed) * seconds + compiled * _COMPILE_SECONDS


def tune(tuning: Tuning, *, repeats: int) -> dict[int, dict[str, Any]]:
    """Finds the fastest tree of every batch size.

    A prediction is confirmed by `repeats` interleaved passes over all prompts.

    Returns:
      Per batch size: the `best` tree, and in `methods`, by name, what was predicted and measured.
    """
    engine, prompts, top_ks = tuning.engine, tuning.prompts, tuning.top_ks
    default = engine.with_tree(default_tree()).trees[1]
    recordings = cache(partial(record_all, tuning, _DEPTH))

    def measure(batch_size: int) -> dict[str, Any]:
        costs = measure_costs(engine, prompts[:batch_size], batch_size, _DEPTH, top_ks)
        predicted = predict_all(recordings(), costs, batch_size, _DEPTH)
        # A default that asks for more than was recorded is run without a prediction.
        chosen = list(dict.fromkeys([None, default, *choose_few(predicted)]))
        rows = confirm(engine, prompts, batch_size, chosen, repeats, lookup=tuning.lookup)
        for tree, row in rows.items():
            row["predicted"] = predicted[tree]._asdict() if tree in predicted else None
        best = max(rows, key=lambda tree: rows[tree]["ratio"])
        return {
            "best": best and config_to_dict(best),
            "methods": {tree_name(tree): row for tree, row in rows.items()},
            "costs": costs._asdict(),
        }

    return {
        size: tuning.kept.get(tuning.of_size(size), partial(measure, size))
        for size in tuning.batch_sizes
    }


def tree_name(tree: TreeConfig | None) -> str:
    """depth/top_k/total_tokens."""
    return "no draft" if tree is None else tree.name


# --------------------------------------------------------------------------------------------------
# Acceptance


def record_all(tuning: Tuning, depth: int) -> dict[int, Recording]:
    """Records the answers to all prompts with every top_k."""
    # All start with the program of one tree.
    trees = [TreeConfig(depth=depth, top_k=top_k, total_tokens=2) for top_k in tuning.top_ks]
    engine, names = tuning.engine.with_tree(trees[-1]), map(tuning.of_recording, tuning.top_ks)
    total = sum(name not in tuning.kept for name in names) * len(tuning.prompts)
    with progress_bar(total=total, desc="recording", unit="answer") as progress:
        recordings = {}
        for tree in trees:
            measure = partial(record, engine, tuning.prompts, tree, progress)
            fields = tuning.kept.get(tuning.of_recording(tree.top_k), measure)
            ranks = [np.reshape(ranks, (-1, depth, depth)) for ranks in fields["ranks"]]
            recordings[tree.top_k] = Recording(fields["lengths"], ranks)
        return recordings


def record(
    engine: Engine, prompts: Sequence[PreparedPrompt], tree: TreeConfig, progress: tqdm
) -> dict[str, Any]:
    """Decodes token by token, and drafts candidates of a tree's depth and top_k after every one.

    Returns:
      The fields of a `Recording` as JSON holds them.
    """
    lengths, ranks = [], []
    size = min(_RECORDED_TOGETHER, len(prompts))
    for first in range(0, len(prompts), size):
        batch, steps = FixedBatch(engine, prompts[first : first + size], batch_size=size), []
        batch.start()
        batch.config = batch.config._replace(tree=tree)
        while not bool(batch.state.output.is_done.all()):
            batch.state, candidates = _record_step(*batch.arguments)
            fields = {name: getattr(candidates, name) for name in _RANKED}
            steps.append(jax.device_get(fields))
        for row, answer in enumerate(batch.read()):
            text = answer.output_ids
            mine = [{name: step[name][row] for name in step} for step in steps[: len(text) - 1]]
            lengths.append(len(text))
            ranks.append(rank_paths(mine, text, tree).tolist())
            progress.update()
    return {"lengths": lengths, "ranks": ranks}


@partial(jax.jit, static_argnums=1, donate_argnums=3)
@on_mesh
def _record_step(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> tuple[DecodeState, Candidates]:
    """Drafts, but verifies and commits only the root."""
    noise = speculate.round_noise(config, request, state)
    candidates = speculate.draft_candidates(weights, config, request, state, noise)
    state = speculate.finish_round(weights, config, request, state, root_tree(state.root), noise)
    return state, candidates


def rank_paths(
    steps: Sequence[dict[str, np.ndarray]], text: Sequence[int], tree: TreeConfig
) -> Ranks:
    """Ranks the nodes of the path that a text takes, as `tree.select` ranks them.

    Args:
      steps: `_RANKED`, [C] each, after every token but the last.
      tree: depth and top_k of the candidates.
    """
    D, W = tree.depth, tree.top_k
    ranks = np.full((len(steps), D, D), _MISSING, np.int32)
    ends = [W + depth * W * W for depth in range(D)]
    for position, step in enumerate(steps):
        tokens, scores, parents = step["tokens"], step["scores"], step["parents"]
        node = -1
        for level, token in enumerate(text[position + 1 : position + 1 + D]):
            is_next = (parents == node) & (tokens == token)
            is_next[: ends[level - 1] if level else 0] = False
            is_next[ends[level] :] = False
            if not is_next.any():
                break
            node = int(is_next.argmax())
            is_before = (scores > scores[node]) | (scores == scores[node]) & (
                np.arange(len(scores)) <= node
            )
            ranks[position, level:, level] = is_before.cumsum()[np.array(ends[level:]) - 1]
    return ranks


# --------------------------------------------------------------------------------------------------
# Costs


@partial(jax.jit, static_argnums=1, donate_argnums=3)
@on_mesh
def _finish_round(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState, tree: Tree
) -> DecodeState:
    """All of a round that comes after drafting."""
    noise = speculate.round_noise(config, request, state)
    return speculate.finish_round(weights, config, request, state, tree, noise)


def measure_costs(
    engine: Engine,
    prompts: Sequence[PreparedPrompt],
    batch_size: int,
    depth: int,
    top_ks: Sequence[int],
) -> Costs:
    """Times the parts of a round, in turn, on the state after the prompts of a batch."""
    widest = TreeConfig(depth=depth, top_k=max(top_ks), total_tokens=max(_MEASURED_NODES))
    widest = replace(widest, total_tokens=widest.num_nodes)
    drafting = Batch(engine.with_tree(widest), prompts, batch_size=batch_size)
    plain = Batch(engine.with_tree({1: None}), prompts, batch_size=batch_size)
    programs: dict[tuple[str, int], Callable[[], Any]] = {
        ("start", 0): drafting.start,
        ("plain_start", 0): plain.start,
        ("plain", 0): plain.round,
        ("draft", 0): partial(drafting.draft, TreeConfig(depth=1, top_k=max(top_ks))),
    }
    for top_k in top_ks:
        tree = TreeConfig(depth=depth, top_k=top_k, total_tokens=min(top_ks[-1] * depth, 16))
        programs["draft", top_k] = partial(drafting.draft, tree)
    max_nodes = drafting.config.tree.num_nodes
    for nodes in sorted({min(nodes, max_nodes) for nodes in _MEASURED_NODES}):
        programs["rest", nodes] = partial(_finish, drafting, nodes)
    calls = time_in_turn(programs, _CALLS, f"costs, batch size {batch_size}")
    seconds = {name: float(np.median(times)) for name, times in calls.items()}
    first = seconds["draft", 0]
    levels = {top_k: (seconds["draft", top_k] - first) / max(depth - 1, 1) for top_k in top_ks}
    return Costs(
        first_level=first,
        level={top_k: max(time, 0.0) for top_k, time in levels.items()},
        rest={nodes: time for (name, nodes), time in seconds.items() if name == "rest"},
        plain=seconds["plain", 0],
        start=seconds["start", 0],
        plain_start=seconds["plain_start", 0],
    )


def _finish(batch: Batch, num_nodes: int) -> DecodeState:
    """Finishes a round with some tree of that many nodes."""
    config = batch.config._replace(tree=replace(batch.config.tree, total_tokens=num_nodes))
    tree = _some_tree(batch.state.root, num_nodes, config.tree.depth)
    batch.state = _finish_round(batch.weights, config, batch.request, batch.state, tree)
    return batch.state


@partial(jax.jit, static_argnums=(1, 2))
def _some_tree(root: jax.Array, num_nodes: int, depth: int) -> Tree:
    """A tree of `num_nodes` nodes: a chain, and then children of the root."""
    parents = np.where(np.arange(num_nodes) <= depth, np.arange(num_nodes) - 1, 0).clip(0)
    shape = len(root), num_nodes
    parents = jnp.broadcast_to(jnp.asarray(parents, jnp.int32), shape)
    return make_tree(jnp.broadcast_to(root[:, None], shape), parents, depth=depth)


# --------------------------------------------------------------------------------------------------
# Prediction, and what really runs


class Prediction(NamedTuple):
    """Speed and acceptance that a tree is expected to have."""

    tokens_per_second: float
    acceptance_length: float


def predict_all(
    recordings: dict[int, Recording], costs: Costs, batch_size: int, depth: int
) -> dict[TreeConfig | None, Prediction]:
    """Predicts no draft and every tree that the recordings cover; the fastest first."""
    predictions: dict[TreeConfig | None, Prediction] = {}
    for top_k, recording in recordings.items():
        plain = [[0] * (length - 1) for length in recording.lengths]
        predictions[None] = predict(recording.lengths, plain, costs, None, batch_size)
        for levels, nodes in itertools.product(range(1, depth + 1), _NODES):
            tree = TreeConfig(depth=levels, top_k=top_k, total_tokens=nodes)
            if levels < nodes == tree.num_nodes:
                accepted = recording.accepted(tree)
                predictions[tree] = predict(recording.lengths, accepted, costs, tree, batch_size)
    return dict(sorted(predictions.items(), key=lambda item: -item[1].tokens_per_second))


def predict(
    lengths: Sequence[int],
    accepted: Sequence[Sequence[int]],
    costs: Costs,
    tree: TreeConfig | None,
    batch_size: int,
) -> Prediction:
    """Speed of answers whose rounds are known; a batch runs as many as its longest answer needs."""
    rounds = [len(counts) for counts in accepted]
    longest = [max(rounds[i : i + batch_size]) for i in range(0, len(rounds), batch_size)]
    begin = costs.start if tree else costs.plain_start
    seconds = len(longest) * begin + sum(longest) * costs.round(tree)
    return Prediction(sum(lengths) / seconds, mean_acceptance_length(accepted))


def choose_few(predicted: Iterable[TreeConfig | None]) -> list[TreeConfig]:
    """Picks the first trees, one per depth and top_k, since neighbours are nearly equal."""
    chosen: dict[tuple[int, int], TreeConfig] = {}
    for tree in predicted:
        if tree is not None and len(chosen) < _CONFIRMED:
            chosen.setdefault((tree.depth, tree.top_k), tree)
    return list(chosen.values())


def confirm(
    engine: Engine,
    prompts: Sequence[PreparedPrompt],
    batch_size: int,
    trees: Sequence[TreeConfig | None],
    repeats: int,
    *,
    lookup: int = 0,
) -> dict[TreeConfig | None, dict[str, Any]]:
    """Decodes all prompts with every tree, interleaved; ratios are relative to the first tree."""
    engines = {tree: engine.with_tree({1: tree}, lookup=lookup) for tree in trees}
    passes = {tree: [] for tree in trees}
    with progress_bar(total=(1 + repeats) * len(trees), desc="confirming", unit="pass") as progress:
        for _ in range(1 + repeats):  # the first pass compiles
            for tree in trees:
                passes[tree].append(time_batches(engines[tree], prompts, batch_size))
                progress.update()
    texts = {tree: [row.answer.output_ids for row in runs[0]] for tree, runs in passes.items()}
    num_tokens = sum(map(len, texts[trees[0]]))
    seconds = {
        tree: np.array([sum(row.seconds for row in run) for run in runs[1:]])
        for tree, runs in passes.items()
    }
    return {
        tree: {
            "tokens_per_second": float(num_tokens / np.median(seconds[tree])),
            "ratio": float(np.median(seconds[trees[0]] / seconds[tree])),
            "acceptance_length": mean_acceptance_length(
                [row.answer.accepted_per_round for row in passes[tree][0]]
            ),
            "different_outputs": sum(
                a != b for a, b in zip(texts[tree], texts[trees[0]], strict=True)
            ),
        }
        for tree in trees
    }
