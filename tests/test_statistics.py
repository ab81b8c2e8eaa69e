"""Intervals and tests on made-up numbers."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from scipy import stats

from infer.bench.summary import (
    compare,
    compare_seeds,
    distinct_ngram_share,
    estimate,
    estimate_mean,
    format_estimate,
    share,
)
from poss_jax.engine.answers import Generation, mean_acceptance_length
from poss_jax.serving.replies import count_accepted, describe_acceptance


def test_share_of_totals_rather_than_mean_of_shares():
    part, whole = np.array([[1.0, 0.0], [1.0, 3.0]] * 4), np.array([[1.0, 0.0], [9.0, 3.0]] * 4)
    number = estimate(share, part, whole)
    assert number["value"] == [0.2, 1.0]
    assert number["low"][0] < 0.2 < number["high"][0]
    assert number["low"][1] == number["high"][1] == 1
    json.dumps(number, allow_nan=False)


def test_interval_is_that_of_a_mean():
    values = np.random.default_rng(0).gamma(2.0, 1.0, 9)
    number = estimate_mean(values)
    want = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert number["value"] == pytest.approx(values.mean())
    assert (number["low"], number["high"]) == pytest.approx(tuple(want))


def test_interval_of_a_share_by_hand():
    """The jackknife: nine shares, each without one of nine questions."""
    part, whole = np.arange(9.0), np.arange(9.0) + 3
    others = [np.delete(part, i).sum() / np.delete(whole, i).sum() for i in range(9)]
    error = np.sqrt(8 / 9 * np.square(others - np.mean(others)).sum())
    number = estimate(share, part, whole)
    assert number["high"] - number["value"] == pytest.approx(2.306 * error, rel=1e-4)
    assert number["value"] - number["low"] == pytest.approx(2.306 * error, rel=1e-4)


def test_numbers_of_several_depths_are_drawn_together():
    """An identity for each draw of questions, such as a sum over depths, holds for the interval."""
    values = np.random.default_rng(1).random((12, 3))
    whole = np.ones_like(values)
    summed = estimate(lambda part, whole: share(part, whole).sum(axis=0), values, whole)
    assert summed == pytest.approx(estimate_mean(values.sum(axis=1)))


def test_few_questions_have_no_interval():
    values = np.arange(7.0)
    assert estimate_mean(values) == {"value": 3.0, "low": None, "high": None}
    assert None not in estimate_mean(np.arange(8.0)).values()
    assert estimate(share, np.array([1.0]), np.array([0.0]))["value"] is None
    assert compare(np.array([1.0]), np.array([2.0]))["p_value"] == 1
    # All that one question holds: without it no share can be compared.
    part, whole = np.eye(8)[0], 2 * np.eye(8)[0]
    assert estimate(share, part, whole) == {"value": 0.5, "low": None, "high": None}


def test_training_seeds_are_compared_by_their_spread():
    """Means 1 apart, variances 1 of three each: t = -1.22, 4 degrees of freedom."""
    assert compare_seeds([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]) == pytest.approx(0.2879, abs=1e-4)
    assert compare_seeds([1.0], [2.0, 3.0]) is None


def test_permutation_by_hand():
    """All signs of the differences 3, 1, 2, 4: one of 16 is as large, and one as small."""
    first, second = np.array([1.0, 1.0, 1.0, 1.0]), np.array([4.0, 2.0, 3.0, 5.0])
    found = compare(first, second)
    assert found["p_value"] == 2 / 16 and found["difference"]["value"] == 2.5
    assert compare(second, first)["difference"]["value"] == -2.5
    assert compare(first, first)["p_value"] == 1
    second = np.array([4.0, 0.0, 3.0, 5.0])
    sums = [np.dot(signs, second - first) for signs in product([-1, 1], repeat=4)]
    p_value = 2 * np.mean([total >= 8 for total in sums])
    assert compare(first, second)["p_value"] == pytest.approx(p_value)


def test_seeds_of_a_question_are_one_observation():
    rng = np.random.default_rng(2)
    first = rng.random((6, 1)) + np.zeros((6, 5))
    second = first + 0.1 * rng.random((6, 1))  # alike for all seeds: six observations, not thirty
    found, alone = compare(first, second), compare(first[:, 0], second[:, 0])
    assert found["difference"] == pytest.approx(alone["difference"])
    assert found["p_value"] == alone["p_value"] == 2 / 2**6


def test_many_questions_are_sampled_and_give_the_same_again():
    first, second = np.random.default_rng(3).random((2, 60))
    found = compare(first, second)
    assert 0 < found["p_value"] <= 1 and compare(first, second) == found


def test_format():
    assert format_estimate({"value": 0.5, "low": 0.25, "high": 0.75}) == "0.50 [0.25, 0.75]"
    assert format_estimate({"value": 0.5, "low": None, "high": None}, digits=3) == "0.500"
    assert format_estimate({"value": -0.001, "low": -0.1, "high": 0.0}) == "0.00 [-0.10, 0.00]"
    assert format_estimate({"value": None, "low": None, "high": None}) == ""


def answer(*rounds: tuple[int, int]) -> Generation:
    accepted, offered = ([one[i] for one in rounds] for i in (0, 1))
    return Generation([1], [2], "", accepted, offered, "stop")


def test_an_example() -> None:
    found = describe_acceptance(answer((2, 3), (0, 3), (1, 1), (0, 0)), 4)
    assert found == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 3 / 7,
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 1, 0]},
        "num_spec_steps": 3,  # the last round had no draft
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
    }
    at_once = describe_acceptance(answer(), 4)
    assert (at_once["acceptance_histogram"], at_once["num_spec_steps"]) == ([0] * 5, 0)
    copied = replace(answer((2, 3), (0, 3)), copied_per_round=[1, 0])
    assert count_accepted([copied, answer((1, 1))]) == {
        "rounds": 3,
        "accepted_tokens": 3,
        "copied_tokens": 1,
        "acceptance_length": 2.0,
        "accepted_per_position": [2, 1],
    }


def test_mean_over_prompts_that_have_a_round():
    assert mean_acceptance_length([[4, 2, 3], [1], []]) == ((1 + 9 / 3) + (1 + 1)) / 2
    assert mean_acceptance_length([[]]) == mean_acceptance_length([]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ([1, 2, 3, 4, 5, 6], 4, 1.0),
        ([1, 2, 1, 2, 1, 2, 1], 4, 2 / 4),  # 1212 2121 1212 2121
        ([5, 5, 5, 5], 1, 1 / 4),
        ([5, 5, 5], 4, 1.0),
        ([], 4, 1.0),
    ],
)
def test_distinct_ngram_share(tokens, n, share):
    assert distinct_ngram_share(tokens, n) == share
