"""Uncertainty of measured numbers: t intervals, and a paired test of two drafts.

Questions are the unit, because the rounds of one answer resemble each other, and so do answers to
one question with several seeds. So an interval leaves out one whole question at a time, and a test
swaps the two drafts on whole questions.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

LEVEL = 0.95
FEWEST = 8  # least questions of an interval: with fewer, one odd question decides its width
_RESAMPLES = 9999
_DRAWN_TOGETHER = 1000


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
    return {name: _jsonable(end) for name, end in ends.items()}


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


def _jsonable(array: np.ndarray) -> Any:
    """Turns an array into what JSON can hold."""
    values = np.asarray(array).astype(object)
    values[np.isnan(array)] = None
    return values.tolist()
