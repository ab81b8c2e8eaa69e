"""The advised spans and layers: drawn examples, and every cut there is."""

import functools
from itertools import combinations, pairwise

import numpy as np
import pytest

from infer.drift.spans import (
    Design,
    Gains,
    add_costs,
    advise_design,
    advise_spans,
    cost_of,
    expected_length,
    list_designs,
)


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


# --------------------------------------------------------------------------------------------------
# Layers, too


def test_designs_within_three_layers() -> None:
    designs = [(list(one.spans), one.layers) for one in list_designs(3, 3)]
    assert designs == [([3], 1), ([1, 2], 1), ([1, 2], 2), ([2, 1], 1), ([1, 1, 1], 1)]


def test_expected_length_by_hand() -> None:
    """Spans of one depth lose nothing; two layers leave half of the misses at position 1."""
    drift, gains = [0.0, 0.4], Gains(variation=1.0, misses_left=0.5)
    plain, cut, deep = Design((2,)), Design((1, 1)), Design((1, 1), 2)
    lengths = [expected_length([0.5, 0.5], drift, gains, one) for one in (plain, cut, deep)]
    mean = 0.5 * 0.4 / 1.5
    first, second = 0.5 + mean**2, 0.5 + (0.4 - mean) ** 2
    half = 1 - (1 - first) / 2
    wanted = [1 + 0.5 + 0.25, 1 + first + first * second, 1 + half + half * second]
    assert lengths == pytest.approx(wanted)


def made_up(spans: tuple[int, ...], layers: int) -> list[float]:
    """Acceptance of a made-up draft: a specialist pays for every kind of input but one."""
    kinds, accepted = [0, 1, 1, 1, 2, 2, 2, 2], []
    for first, end in pairwise([0, *np.cumsum(spans)]):
        accepted += [0.9 - 0.1 * len({*kinds[first:end]})] * (end - first)
    accepted[0] = 1 - (1 - accepted[0]) * 0.7 ** np.log2(layers)
    return accepted


@pytest.mark.parametrize(
    ("misses_left", "proposed"), [(0.7, Design((1, 3, 4), 2)), (0.99, Design((1, 3, 4)))]
)
def test_the_proposal_beats_equal_spans(misses_left: float, proposed: Design) -> None:
    """It draws on the draft with one specialist; what designs then accept is another matter."""
    drift, gains = [0.0, 0.4, 0.4, 0.4, 0.9, 0.9, 0.9, 0.9], Gains(1.0, misses_left)

    def speed(design: Design) -> float:
        return (1 + np.cumprod(made_up(*design)).sum()) / time_of(design)

    def time_of(design: Design) -> float:
        return 10 + 0.1 * (len(design.spans) + design.layers)

    measured = made_up((8,), 1)
    best = advise_design(measured, drift, gains, num_layers=4, time_of=time_of)
    assert best == proposed
    for spans in [(4, 4), (3, 3, 2), (2, 2, 2, 2)]:
        assert speed(best) > speed(Design(spans))
    dear = advise_design(
        measured, drift, gains, num_layers=4, time_of=lambda one: len(one.spans) + one.layers
    )
    assert dear == Design((8,))
