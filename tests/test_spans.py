"""The advised spans: drawn examples, and every cut there is."""

import functools
from itertools import combinations, pairwise

import numpy as np
import pytest

from benchmarks.drift import add_costs, advise_spans, cost_of


def test_spans_end_where_the_drift_jumps():
    #        depth    0    1    2    3    4    5    6    7
    drift = [0.0, 0.4, 0.4, 0.4, 0.9, 0.9, 0.9, 0.9]
    assert advise_spans(drift, [1.0] * 8, 3) == [1, 3, 4]


@pytest.mark.parametrize(
    ("size", "num_spans", "spans"),
    [(8, 2, [4, 4]), (8, 3, [3, 3, 2]), (7, 4, [2, 2, 2, 1]), (5, 1, [5]), (3, 3, [1, 1, 1])],
)
@pytest.mark.parametrize("drift", [0.0, 0.1, 1 / 3])
def test_equal_inputs_get_equal_spans(size: int, num_spans: int, spans: list[int], drift: float):
    assert advise_spans([drift] * size, np.linspace(1, 0.1, size).tolist(), num_spans) == spans


def test_steady_drift_gets_equal_spans():
    """Unless few chains come to the later depths, which then matter less."""
    drift = [0.1 * depth for depth in range(9)]
    assert advise_spans(drift, [1.0] * 9, 3) == [3, 3, 3]
    assert advise_spans(drift, [0.3**depth for depth in range(9)], 3) == [1, 1, 7]


def test_variation_by_hand():
    assert cost_of([0.0, 1.0], [1.0, 1.0]) == (0.5e12, 4, (-2,))
    # mean 0.25: 3 (0.25)^2 + 1 (0.75)^2
    assert cost_of([0.0, 1.0], [3.0, 1.0]) == (0.75e12, 4, (-2,))
    assert cost_of([0.3, 0.7], [0.0, 0.0])[0] == 0


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed: int):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 9))
    drift, weight = rng.random(size), np.sort(rng.random(size))[::-1]
    if seed % 2:
        drift = drift.round(1)  # with ties
    for num_spans in range(1, size + 1):
        costs = []
        for inner in combinations(range(1, size), num_spans - 1):
            spans = pairwise([0, *inner, size])
            costs.append(
                functools.reduce(add_costs, [cost_of(drift[a:b], weight[a:b]) for a, b in spans])
            )
        best = [-length for length in min(costs)[2]]
        assert advise_spans(drift.tolist(), weight.tolist(), num_spans) == best
