"""Sums up a benchmark: turns the journal's answers into the numbers of the report.

docs/metrics.md has the formulas. Questions are the unit, because the rounds of one answer resemble
each other, and so do answers to one question with several seeds: an interval leaves out one whole
question at a time, and a test swaps two drafts on whole questions.
"""

from collections.abc import Callable, Sequence
from itertools import chain, combinations, takewhile
from typing import Any

import numpy as np

from poss_jax.engine.answers import begin_text
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt

from .journal import Answer, Cell, Key, Turn

LOOPING_BELOW = 0.5
DEPTHS = 8
LEVEL = 0.95
FEWEST = 8  # least questions of an interval: with fewer, one odd question decides its width
_RESAMPLES = 9999
_DRAWN_TOGETHER = 1000


class Grid:
    """The answers of one method to one set at one temperature; all repeats give the same texts."""

    def __init__(self, answers: Any) -> None:
        self.answers = np.array(answers, object)  # [repeats seeds questions] of `Answer`

    def of(self, questions: Sequence[int]) -> "Grid":
        """Picks questions."""
        return Grid(self.answers[:, :, list(questions)])

    def count(self, number_of: Callable[[Answer], float]) -> np.ndarray:
        """Numbers of every question [questions seeds] in the first repeat."""
        return np.vectorize(number_of, [float])(self.answers[0].T)

    def seconds(self) -> np.ndarray:
        """Seconds of every question [questions seeds], the median over repeats."""
        seconds = np.vectorize(lambda answer: answer.seconds, [float])(self.answers)
        return np.median(seconds, axis=0).T

    def tokens(self) -> np.ndarray:
        """New tokens of every question [questions seeds]."""
        return self.count(lambda answer: len(answer.join("output_ids")))

    def acceptance_lengths(self) -> np.ndarray:
        """Tokens per round of every question [questions seeds]; not a number without a round."""
        return self.count(lambda answer: float(np.mean(answer.join("accepted") or np.nan)) + 1)


def make_grid(
    answers: dict[Key, Answer],
    cells: Sequence[Cell],
    method: str,
    *,
    repeats: int,
    num_questions: int,
) -> Grid:
    """Arranges the answers of one method to cells that differ only in their seed."""
    return Grid(
        [
            [
                [answers[Key(cell, repeat, method, question)] for question in range(num_questions)]
                for cell in cells
            ]
            for repeat in range(repeats)
        ]
    )


def summarise_group(grids: dict[str, Grid], baseline: str) -> dict[str, Any]:
    """Summarises the answers of all methods to one set at one temperature.

    Speed-ups are relative to the autoregressive method, `baseline`.

    Returns:
      Numbers by method, of `all` questions and of those `not_looping`; and comparisons of drafts on
      all questions and, where only some loop, on the others.
    """
    looping = np.flatnonzero(grids[baseline].count(is_looping).any(axis=1)).tolist()
    every = list(range(grids[baseline].answers.shape[2]))
    groups = {"all": every, "not_looping": [i for i in every if i not in looping]}
    methods: dict[str, dict[str, Any]] = {name: {} for name in grids}
    comparisons: dict[str, list[dict[str, Any]]] = {group: [] for group in groups}
    drafts = [name for name in grids if name != baseline]
    for group, questions in groups.items():
        if not questions:
            continue
        some = {name: grid.of(questions) for name, grid in grids.items()}
        for name, grid in some.items():
            methods[name][group] = summarise(grid, some[baseline])
        for pair in combinations(drafts, 2) if group == "all" or looping else ():
            lengths = [some[name].acceptance_lengths() for name in pair]
            has_rounds = ~np.isnan(lengths).any(axis=(0, 2))
            speeds = (some[name].tokens() / some[name].seconds() for name in pair)
            comparisons[group].append(
                {
                    "first": pair[0],
                    "second": pair[1],
                    "acceptance_length": compare(*(values[has_rounds] for values in lengths)),
                    "tokens_per_second": compare(*speeds),
                }
            )
    return {
        "questions": len(every),
        "looping_questions": looping,
        "methods": methods,
        "comparisons": comparisons["all"],
        "comparisons_not_looping": comparisons["not_looping"],
    }


def summarise(grid: Grid, baseline: Grid) -> dict[str, Any]:
    """Summarises the answers of one method."""
    rows, lengths = grid.answers[0].T, grid.acceptance_lengths()
    turns = [turn for answer in grid.answers.flat for turn in answer.turns]
    is_counted = ~np.isnan(lengths)
    accepted, offered, copied = (
        [np.array([n for answer in row for n in answer.join(name)], int) for row in rows]
        for name in ("accepted", "offered", "copied")
    )
    rounds = np.array(list(map(len, accepted)))
    reached, reachable = (count_reaching(counts, DEPTHS) for counts in (accepted, offered))
    tokens, seconds = grid.tokens().sum(axis=1), grid.seconds().sum(axis=1)
    plain_tokens, plain_seconds = baseline.tokens().sum(axis=1), baseline.seconds().sum(axis=1)
    return {
        "acceptance_length": estimate(
            share, np.where(is_counted, lengths, 0.0).sum(axis=1), is_counted.sum(axis=1)
        ),
        "pooled_acceptance_length": estimate(
            share, rounds + [counts.sum() for counts in accepted], rounds
        ),
        "whole_rounds_acceptance_length": estimate(share, *_count_whole_rounds(rows)),
        "positionwise_acceptance": _estimate_positions(reached, reachable),
        "positions_reached": _estimate_positions(
            reached, np.where(reachable.sum(axis=0) > 0, rounds[:, None], 0)
        ),
        "copied_per_round": estimate(share, np.array([n.sum() for n in copied]), rounds),
        "tokens_per_second": estimate(share, tokens, seconds),
        "speed_up": estimate(
            lambda new, time, plain_new, plain_time: share(new * plain_time, time * plain_new),
            *(tokens, seconds, plain_tokens, plain_seconds),
        ),
        "first_token_milliseconds": _percentiles(
            [1000 * turn.first_token_seconds for turn in turns]
        ),
        "token_milliseconds": _percentiles(
            [1000 * turn.seconds / len(turn.output_ids) for turn in turns]
        ),
        "rounds_by_accepted": np.bincount(np.concatenate(accepted)).tolist(),
        "looping_share": float(grid.count(is_looping).mean()),
        "new_tokens": int(tokens.sum()),
        "seconds": float(seconds.sum()),
        "answers": rows.size,
        **_compare_texts(grid, baseline),
    }


def _compare_texts(grid: Grid, baseline: Grid) -> dict[str, float]:
    """Counts equal answers, and the share of the baseline's tokens before the first other one."""
    is_equal = np.vectorize(lambda a, b: a.join("output_ids") == b.join("output_ids"), [bool])
    num_same = 0
    for answer, plain in zip(grid.answers[0].flat, baseline.answers[0].flat, strict=True):
        pairs = zip(answer.join("output_ids"), plain.join("output_ids"), strict=False)
        num_same += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return {
        "equal_outputs": int(is_equal(grid.answers, baseline.answers[0]).all(axis=0).sum()),
        "same_text": num_same / float(baseline.tokens().sum()),
    }


def is_looping(answer: Answer) -> bool:
    """Tells whether few 4-grams of an answer are distinct; such text is easy to draft."""
    return distinct_ngram_share(answer.join("output_ids")) < LOOPING_BELOW


def count_reaching(counts: Sequence[np.ndarray], depth: int) -> np.ndarray:
    """Counts the rounds [questions depth] that reach each position up to `depth`.

    `counts` has the position that every round reaches, per question.
    """
    positions = np.arange(1, depth + 1)[:, None]
    return np.array([(reached >= positions).sum(axis=1) for reached in counts])


def _count_whole_rounds(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Counts tokens and rounds of each question's row, without the rounds that a limit can cut.

    These begin at most D tokens before a text's end, where D is the deepest offered position. vLLM
    counts rounds whole: with a limit D lower, it counts just the others.
    """
    deepest = max(
        (depth for row in rows for answer in row for depth in answer.join("offered")), default=0
    )

    def complete(turn: Turn) -> list[int]:
        ends = np.cumsum([1, *(count + 1 for count in turn.accepted)])  # the prompt gives a token
        limit = len(turn.output_ids) - deepest
        return [1 + n for n, begin in zip(turn.accepted, ends[:-1], strict=True) if begin < limit]

    emitted = [
        [n for answer in row for turn in answer.turns for n in complete(turn)] for row in rows
    ]
    return np.array([sum(row) for row in emitted]), np.array([len(row) for row in emitted])


def _estimate_positions(reached: np.ndarray, offered: np.ndarray) -> dict[str, Any]:
    """Estimates a share at every position that any tree offered."""
    is_offered = offered.sum(axis=0) > 0
    if not is_offered.any():
        return {"value": [], "low": [], "high": []}
    return estimate(share, reached[:, is_offered], offered[:, is_offered])


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p90 = np.percentile(values, (50, 90))
    return {"p50": float(p50), "p90": float(p90)}


def show_example(
    engine: Engine, prompt: PreparedPrompt | None, answers: dict[str, Answer]
) -> dict[str, Any]:
    """Splits the answers of drafts to a question's first turn into what their tokens added.

    Returns:
      The text of the prompt, and of every answer (text, depth) per piece: the position that it was
      drafted at, 0 for the target's own. Nothing without a prompt or a tokenizer.
    """
    if engine.tokenizer is None or prompt is None:
        return {}
    pieces = {}
    for name, answer in answers.items():
        stream, turn = begin_text(prompt, engine.tokenizer), answer.turns[0]
        assert stream is not None, "want a tokenizer"
        rounds = ([*range(1, count + 1), 0] for count in turn.accepted)
        depths = chain([0], *rounds)  # the first token is from the prompt
        shown = [
            piece
            for token, depth in zip(turn.output_ids, depths, strict=False)
            if token not in prompt.stop_ids
            for piece in stream.push(token, depth=depth)
        ]
        pieces[name] = [[piece.text, piece.depth] for piece in shown + stream.finish()]
    text = engine.tokenizer.decode(prompt.ids, skip_special_tokens=True)
    return {"prompt": text, "answers": pieces}


def distinct_ngram_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams; near 0 for looping text, which is easy to draft.

    1 for a text too short for two.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


# --------------------------------------------------------------------------------------------------
# Uncertainty of measured numbers: t intervals, and a paired test of two drafts


def estimate(of_totals: Callable[..., np.ndarray], *per_question: np.ndarray) -> dict[str, Any]:
    """Computes a number from totals over questions, with a t interval.

    Args:
      of_totals: function of the total of every sample. A total has the axes of one question, and
        behind them an axis of questions left out while the interval is computed.
      per_question: [questions ...] samples of one shape: what each question adds to a total.

    Returns:
      `value`, `low` and `high`, as numbers or nested lists. None stands for what is not known: a
      share of nothing, or the interval of fewer than `FEWEST` questions or where only one of them
      holds something.
    """
    totals = [sample.sum(axis=0) for sample in per_question]
    value, num_questions = of_totals(*totals), len(per_question[0])
    reach = np.full_like(value, np.nan)
    if num_questions >= FEWEST:
        from scipy.stats import t

        # The jackknife's standard error times a quantile of Student's t.
        pairs = zip(totals, per_question, strict=True)
        without_one = of_totals(*(np.moveaxis(total - sample, 0, -1) for total, sample in pairs))
        error = np.sqrt((num_questions - 1) * without_one.var(axis=-1))
        reach = t.ppf((1 + LEVEL) / 2, num_questions - 1) * error
    ends = {"value": value, "low": value - reach, "high": value + reach}
    return {
        name: np.where(np.isnan(end), np.array(None), end).tolist() for name, end in ends.items()
    }


def estimate_mean(values: np.ndarray) -> dict[str, Any]:
    """Averages values [questions ...], with an interval."""
    return estimate(share, values, np.ones_like(values))


def share(count: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Divides totals; a share of nothing is not a number."""
    return np.divide(count, total, out=np.full(np.shape(count), np.nan), where=total > 0)


def compare(first: np.ndarray, second: np.ndarray) -> dict[str, Any]:
    """Compares two drafts on the same questions by a paired permutation test.

    Args:
      first: one number per question, such as its acceptance length, or [questions seeds].
      second: the same of the other draft.

    Returns:
      The mean `difference` (second less first) with its interval, and the two-sided `p_value`:
      how often exchanging the drafts at random, question by question, brings a difference as large.
    """
    from scipy.stats import permutation_test

    pairs = tuple(np.atleast_2d(numbers.T).mean(axis=0) for numbers in (first, second))
    p_value = 1.0  # of one question, or none
    if len(first) > 1:
        p_value = permutation_test(
            pairs,
            lambda a, b, axis: (b - a).mean(axis=axis),
            permutation_type="samples",
            vectorized=True,
            n_resamples=_RESAMPLES,
            batch=_DRAWN_TOGETHER,
            rng=np.random.default_rng(0),
        ).pvalue
    return {"difference": estimate_mean(pairs[1] - pairs[0]), "p_value": float(p_value)}


def compare_seeds(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Compares two training methods by the results of their training seeds (Welch's t-test).

    Returns:
      The two-sided p-value: how likely other seeds of two equal methods differ as much; None where
      one of them has a single seed.
    """
    from scipy.stats import ttest_ind

    if min(len(first), len(second)) < 2:
        return None
    result: Any = ttest_ind(first, second, equal_var=False)
    return float(result.pvalue)


def format_estimate(number: dict[str, Any], *, digits: int = 2) -> str:
    """Formats one number as `value [low, high]`; an unknown one is empty."""
    if number["value"] is None:
        return ""
    value, low, high = (
        "" if number[key] is None else f"{round(number[key], digits) + 0.0:.{digits}f}"  # no -0.00
        for key in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]" if low else value
