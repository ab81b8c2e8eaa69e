"""Advises on spans, how many positions each specialist should serve, and on layers.

A specialist serves its positions with one set of weights, so their inputs should be alike. Let e_d
be how far the input of depth d has drifted, and w_d the share of chains that come to depth d. The
advice is the spans with the least variation within them:

    sum over spans, sum over d in a span:  w_d (e_d - mean e of the span)^2

Means are weighted by w. If several choices leave the same variation, the most equal spans win, and
then longer spans first.

A design also has layers of the first specialist. Its acceptance follows from measured shares a_d of
a draft with one specialist of one layer, by two numbers that a study gives: what variation costs,
and the share of misses at position 1 that is left where layers double.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import combinations, pairwise
from math import log2
from typing import NamedTuple

import numpy as np

Numbers = Sequence[float] | np.ndarray
"""Numbers by depth."""

_UNIT = 1e-12  # variation is counted in it, so that rounding breaks no tie

Cost = tuple[int, int, tuple[int, ...]]
"""(variation, squared lengths, negated lengths) of spans; the least is the best."""


def advise_spans(drift: Sequence[float], weight: Sequence[float], num_spans: int) -> list[int]:
    """Cuts depths into that many best spans, at most one each, by dynamic programming (exact).

    Args:
      drift: e, by depth.
      weight: w, by depth.

    Returns:
      `positions_per_specialist`.
    """

    @cache
    def best_from(first: int, num_left: int) -> Cost:
        """Cost of the best spans of all depths from `first` on."""
        latest = len(drift) - num_left + 1  # every later span serves a depth, too
        ends = range(first + 1, latest + 1) if num_left > 1 else [len(drift)]
        return min(
            add_costs(
                cost_of(drift[first:end], weight[first:end]),
                best_from(end, num_left - 1) if num_left > 1 else (0, 0, ()),
            )
            for end in ends
        )

    return [-length for length in best_from(0, num_spans)[2]]


def cost_of(drift: Numbers, weight: Numbers) -> Cost:
    """Cost of one span of these depths."""
    variation = (np.asarray(weight, float) * _squares(drift, weight)).sum()
    return round(variation / _UNIT), len(drift) ** 2, (-len(drift),)


def add_costs(one: Cost, rest: Cost) -> Cost:
    """Cost of a span and all spans after it."""
    return one[0] + rest[0], one[1] + rest[1], one[2] + rest[2]


class Design(NamedTuple):
    """Positions of each specialist, and layers of the first."""

    spans: tuple[int, ...]
    layers: int = 1


class Gains(NamedTuple):
    """What designs gain."""

    variation: float  # acceptance lost per squared distance of a depth's drift from its span's mean
    misses_left: float  # share of the misses at position 1 that is left where layers double


def advise_design(
    acceptance: Numbers,
    drift: Numbers,
    gains: Gains,
    *,
    num_layers: int,
    time_of: Callable[[Design], float],
) -> Design:
    """Chooses the design with the most tokens per time; of equal ones the smallest.

    Args:
      acceptance: a, by depth, of a draft with one specialist of one layer, given all before.
      drift: e, by depth.
      gains: what designs gain.
      num_layers: most layers of all specialists together.
      time_of: time of a round.
    """
    designs = list_designs(len(acceptance), num_layers)
    return max(
        sorted(designs, key=lambda one: len(one.spans) + one.layers),
        key=lambda one: expected_length(acceptance, drift, gains, one) / time_of(one),
    )


def list_designs(depth: int, num_layers: int) -> Iterator[Design]:
    """Lists all designs; only a first specialist that drafts one position has further layers."""
    for num_spans in range(1, min(depth, num_layers) + 1):
        for inner in combinations(range(1, depth), num_spans - 1):
            spans = tuple(end - first for first, end in pairwise([0, *inner, depth]))
            may_be_deep = num_spans > 1 and spans[0] == 1
            most = num_layers - num_spans + 1 if may_be_deep else 1
            yield from (Design(spans, layers) for layers in range(1, most + 1))


def expected_length(acceptance: Numbers, drift: Numbers, gains: Gains, design: Design) -> float:
    """Tokens that a round of a chain should emit, the target's own included."""
    a = np.asarray(acceptance, float)
    weight = np.cumprod([1.0, *a[:-1]])
    ends = np.cumsum(design.spans)[:-1]
    parts = zip(np.split(np.asarray(drift), ends), np.split(weight, ends), strict=True)
    within = np.concatenate([_squares(*part) for part in parts])
    a = a + gains.variation * (_squares(drift, weight) - within)
    a[0] = 1 - (1 - a[0]) * gains.misses_left ** log2(design.layers)
    return float(1 + np.cumprod(a.clip(0, 1)).sum())


def _squares(drift: Numbers, weight: Numbers) -> np.ndarray:
    """Squared distances of depths from their mean."""
    e, w = np.asarray(drift, float), np.asarray(weight, float)
    return (e - (w * e).sum() / max(w.sum(), 1e-300)) ** 2
