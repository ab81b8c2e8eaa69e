"""Compares texts with drafts and without, token for token; rounding may excuse a difference.

A difference fails the check unless rounding explains it: the two best scores, or a token and a
filter's boundary, lay closer together than the scores of the two forward passes. A round that
accepts more tokens than its tree is deep also fails it.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from poss_jax.config.bench import BenchConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import Drafting, TreeConfig
from poss_jax.data.progress import progress_bar
from poss_jax.decode import speculate
from poss_jax.decode.sampling import History, draw_noise, process_logits, shift_logits
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.verify import accept
from poss_jax.engine.answers import Generation
from poss_jax.engine.batch import FixedBatch
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.steps import on_mesh
from poss_jax.engine.trees import default_tree, tree_for
from poss_jax.program.output import print_summary, show_rows

from .bench.journal import Kept, describe
from .bench.measure import AUTOREGRESSIVE, load_engines, time_answer
from .bench.questions import first_prompts, read_questions
from .bench.report import with_provenance

_LOG = logging.getLogger(__name__)

TEMPERATURES = (0.0, 0.3, 1.0)
MORE_TEMPERATURES = (0.0, 1e-6, 0.01, 0.02, 0.1, 0.3, 0.7, 1.0, 2.0)  # low: certain tokens, ties
FILTERS = ({}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.1})
CHAIN = TreeConfig(depth=6, top_k=1, total_tokens=7)
TREES = (
    TreeConfig(depth=2, top_k=8, total_tokens=32),  # wide
    CHAIN,
    TreeConfig(depth=6, top_k=1, total_tokens=5),  # the others are cut short
    TreeConfig(depth=4, top_k=2, total_tokens=8),
    TreeConfig(depth=3, top_k=2, total_tokens=6),
)
BATCH_SIZES = (1, 4)
MAX_ROUNDING = 1e-4  # of float32 logits; beyond it, the two forwards do not compute the same


@dataclass(frozen=True)
class Setting:
    """One method of speculative decoding."""

    draft: str
    engine: Engine
    tree: TreeConfig
    batch_size: int

    @property
    def name(self) -> str:
        tree = f"{self.tree.depth}/{self.tree.top_k}/{self.tree.num_nodes}"
        settings = self.engine.settings
        drafting = "" if settings.drafting == "coupled" else f", {settings.drafting} drafts"
        lookup = f", lookup {settings.lookup}" if settings.lookup else ""
        return f"{self.draft}, tree {tree}, batch {self.batch_size}{drafting}{lookup}"


def check_lossless(
    engines: Mapping[str, Engine],
    prompts: Sequence[PreparedPrompt],
    kept: Kept,
    *,
    is_thorough: bool = False,
) -> dict[str, Any]:
    """Compares every draft, with some trees and batch sizes, with autoregressive decoding.

    What an interrupted check has `kept` is not decoded again.

    Returns:
      A JSON-compatible report; `failures` is empty if decoding is lossless.
    """
    baseline = engines[AUTOREGRESSIVE]
    temperatures = MORE_TEMPERATURES if is_thorough else TEMPERATURES
    jobs = []  # every prompt at every temperature, with and without filters
    for index, (prompt, temperature, filters) in enumerate(product(prompts, temperatures, FILTERS)):
        sampling = SamplingConfig(temperature=temperature, seed=index, **filters)
        job = baseline.prepare(prompt.ids, prompt.max_new_tokens, sampling, is_chat=prompt.is_chat)
        jobs.append(job)
    settings = [
        setting
        for name, engine in [*engines.items()][1:]  # without the autoregressive one
        for setting in list_settings(name, engine, is_thorough=is_thorough)
    ]
    names = [AUTOREGRESSIVE, *(setting.name for setting in settings)]
    total = len(jobs) * sum(name not in kept for name in names)
    minutes = total * time_answer(baseline, jobs[0]) / 60
    _LOG.warning("%d answers, about %.0f min and compilation", total, max(minutes, 1))
    with progress_bar(total=total, desc="check lossless", unit="answer") as progress:
        plain = partial(_decode, baseline, jobs, 1, progress)
        expected = kept.get(AUTOREGRESSIVE, lambda: [answer.output_ids for answer in plain()])
        compare = partial(_compare, baseline, jobs, expected, progress)
        rows = [kept.get(setting.name, partial(compare, setting)) for setting in settings]
    return {
        "answers": len(jobs),
        "max_new_tokens": prompts[0].max_new_tokens,
        "temperatures": temperatures,
        "filters": FILTERS,
        "largest_rounding": max(row["rounding"] for row in rows),
        "failures": [difference for row in rows for difference in row["failures"]],
        "excused": [difference for row in rows for difference in row["excused"]],
        "settings": rows,
    }


def list_settings(name: str, engine: Engine, *, is_thorough: bool) -> Iterator[Setting]:
    """The draft's own tree alone and a chain in batches; thoroughly, all combinations.

    These are the own tree with coupled and argmax drafts, and `TREES`, alone and in batches.
    """
    default = tree_for(engine.trees, 1) or default_tree()
    if not is_thorough:
        yield Setting(name, engine.with_tree(default), default, BATCH_SIZES[0])
        yield Setting(name, engine.with_tree(CHAIN), CHAIN, BATCH_SIZES[-1])
        return
    trees: set[tuple[TreeConfig, Drafting]] = {(default, "argmax")}
    trees |= {(tree, "coupled") for tree in (default, *TREES)}
    for (tree, drafting), size in product(sorted(trees, key=str), BATCH_SIZES):
        yield Setting(name, engine.with_tree(tree, drafting=drafting), tree, size)


def _decode(
    engine: Engine, jobs: Sequence[PreparedPrompt], batch_size: int, progress: tqdm
) -> list[Generation]:
    answers: list[Generation] = []
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        answers += engine.decode(batch, batch_size=batch_size)
        progress.update(len(batch))
    return answers


def _compare(
    baseline: Engine,
    jobs: Sequence[PreparedPrompt],
    expected: Sequence[list[int]],
    progress: tqdm,
    setting: Setting,
) -> dict[str, Any]:
    """One row of the report; the first answer, and all that differ, are replayed."""
    answers = _decode(setting.engine, jobs, setting.batch_size, progress)
    outputs = [(ids, answer.output_ids) for ids, answer in zip(expected, answers, strict=True)]
    different = [index for index, (a, b) in enumerate(outputs) if a != b]
    roundings, failures, excused = [], find_overlong(setting, answers), []
    for index in sorted({0, *different}):
        first = index - index % setting.batch_size
        batch = jobs[first : first + setting.batch_size]
        pairs = list(zip(*outputs[index], strict=False))
        # The first token that differs; the last one if none does.
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs) - 1)
        alone = replay(baseline, [jobs[index]], 0, at, batch_size=1)
        together = replay(setting.engine, batch, index - first, at, batch_size=setting.batch_size)
        # The largest change of the difference of two scores, where both texts went on.
        shifts = [a.plain - b.plain for a, b in zip(alone, together, strict=False)]
        rounding = float(max(shift.max() - shift.min() for shift in shifts))
        temperature = jobs[index].sampling.temperature or 1
        roundings.append(rounding * temperature)
        if index in different:
            tokens = pairs[at]
            difference = {"setting": setting.name, "answer": index, "token": at}
            if min(len(alone), len(together)) > at:
                difference |= examine(alone[at], together[at], tokens, rounding, temperature)
            else:
                difference |= {"tokens": tokens, "replay_ended_early": True, "is_excused": False}
            (excused if difference["is_excused"] else failures).append(difference)
    return {
        "setting": setting.name,
        "equal": len(jobs) - len(different),
        "rounding": max(roundings),
        "failures": failures,
        "excused": excused,
    }


def find_overlong(setting: Setting, answers: Sequence[Generation]) -> list[dict[str, Any]]:
    """Answers with a round that accepted more tokens than its tree, copies included, is deep."""
    longest = [max(answer.accepted_per_round, default=0) for answer in answers]
    return [
        {"setting": setting.name, "answer": index, "accepted": accepted, "is_excused": False}
        for index, accepted in enumerate(longest)
        if accepted > setting.engine.max_accepted
    ]


class Scores(NamedTuple):
    """Scores that chose a token: it is the argmax of `filtered + noise`."""

    plain: Any  # [V] before top-k, top-p and min-p
    filtered: Any  # [V] after them
    noise: Any  # [V]


def examine(
    expected: Scores,
    got: Scores,
    tokens: tuple[int, int],
    rounding: float,
    temperature: float = 1.0,
) -> dict[str, Any]:
    """Examines whether rounding explains that two forwards chose different tokens.

    Args:
      expected: scores of the autoregressive forward; those of the speculative one are `got`.
      rounding: the largest difference that was measured between their scores.
      temperature: what the logits were divided by.
    """
    chosen = tuple(int((scores.filtered + scores.noise).argmax()) for scores in (expected, got))
    best = np.sort(expected.filtered + expected.noise)[-2:]
    at_boundary = np.isfinite(expected.filtered) != np.isfinite(got.filtered)
    gap = float(best[1] - best[0])
    explained = chosen == tokens and np.array_equal(expected.noise, got.noise)
    return {
        "tokens": tokens,
        "gap": gap,
        "tokens_at_a_filters_boundary": np.flatnonzero(at_boundary).tolist(),
        "rounding": rounding,
        "is_excused": bool(
            explained
            and rounding * temperature <= MAX_ROUNDING
            and (at_boundary.any() or gap <= rounding)
        ),
    }


def replay(
    engine: Engine, batch: Sequence[PreparedPrompt], row: int, last: int, *, batch_size: int
) -> list[Scores]:
    """Decodes a batch once more, from the host, and keeps the scores of tokens 0 to `last`.

    Other programs than these decoded the text first, so here it may end before `last`.
    """
    laid_out = FixedBatch(engine, batch, batch_size=batch_size)
    config, request = laid_out.config, laid_out.request
    state, seen = _start(engine.weights, config, request)
    scores = [Scores(*(np.array(array[row, 0]) for array in seen))]
    while len(scores) <= last and not bool(state.output.is_done[row]):
        num_tokens = int(state.output.num_tokens[row])
        state, seen = _run_round(engine.weights, config, request, state)
        landed = int(state.output.num_tokens[row]) - num_tokens
        scores += [Scores(*(np.array(array[row, i]) for array in seen)) for i in range(landed)]
    return scores[: last + 1]


@partial(jax.jit, static_argnums=1)
@on_mesh
def _start(weights: Weights, config: StaticShape, request: Request) -> tuple[DecodeState, Scores]:
    out = speculate.prefill(weights, config, request)
    logits = out.logits[:, None]
    history = speculate.prompt_history(request)
    depths = jnp.zeros(logits.shape[:2], jnp.int32)
    scores = _scores(request, history, logits, request.lengths, depths)
    return speculate.first_state(weights, config, request, out), scores


@partial(jax.jit, static_argnums=1)
@on_mesh
def _run_round(
    weights: Weights, config: StaticShape, request: Request, state: DecodeState
) -> tuple[DecodeState, Scores]:
    """A round that also gives the scores along the accepted path."""
    noise = speculate.round_noise(config, request, state)
    tree = speculate.draft_tree(weights, config, request, state, noise)
    out = speculate.verify_tree(weights, config, state, tree)
    chosen = speculate.choose_tokens(request, state, tree, out.logits, noise)
    acceptance = accept(tree, chosen, max_accepted=config.max_accepted)
    history = speculate.history_before(request, state.output, tree)
    first = state.target_cache.length + 1
    scores = _scores(request, history, out.logits, first, tree.depths)
    path = acceptance.path[:, :, None]
    scores = Scores(*(jnp.take_along_axis(array, path, axis=1) for array in scores))
    return speculate.commit(weights, config, request, state, out, acceptance), scores


def _scores(
    request: Request, history: History, logits: jax.Array, first: jax.Array, depths: jax.Array
) -> Scores:
    """Computes the scores of the tokens after some nodes once more."""
    wide, sampling = logits.astype(jnp.float32), request.sampling
    if sampling is None:
        return Scores(wide, wide, jnp.zeros_like(wide))
    V = wide.shape[-1]
    noise = draw_noise(sampling, first, num_positions=depths.shape[1], vocab_size=V)
    return Scores(
        shift_logits(wide, sampling, history, vocab_size=V),
        process_logits(wide, sampling, history),
        jnp.take_along_axis(noise, depths[:, :, None], axis=1),
    )


def check(config: BenchConfig, *, is_thorough: bool) -> None:
    """Compares, prints, and exits with code 1 if a difference is more than rounding."""
    engines = load_engines(config)
    prompts = first_prompts(read_questions(config, engines[AUTOREGRESSIVE]))
    kept = Kept("lossless", describe(config, engines, prompts, is_thorough=is_thorough))
    report = check_lossless(engines, prompts, kept, is_thorough=is_thorough)
    kept.finish()
    table = []
    for row in report["settings"]:
        counts = row["equal"], len(row["excused"]), len(row["failures"])
        table.append((row["setting"], *counts, f"{row['rounding']:.1e}"))
    print(
        f"{report['answers']} answers of at most {report['max_new_tokens']} tokens, temperatures "
        f"{', '.join(map(str, report['temperatures']))}, with and without filters; reference: "
        "autoregressive decoding, alone",
        "",
        *show_rows(["decoded", "equal", "excused", "failures", "rounding"], table),
        *(f"{kind}: {json.dumps(row)}" for kind in ("excused", "failures") for row in report[kind]),
        sep="\n",
    )
    counts = {kind: len(report[kind]) for kind in ("settings", "excused", "failures")}
    brief = {"answers": report["answers"], **counts}
    print_summary(with_provenance(report, config), "", brief=brief)
    if report["failures"]:
        raise SystemExit(1)
