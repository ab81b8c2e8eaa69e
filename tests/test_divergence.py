"""Telling a run that goes wrong from one that learns."""

import math

import pytest

from train.run_log import Diverged, LossWatch, check_finite


def watch(*losses: float, factor: float | None = 5.0, level: float | None = None) -> LossWatch:
    watched = LossWatch(factor, level)
    for step, loss in enumerate(losses, start=1):
        watched.check(step, {"loss": loss})
    return watched


def test_level_is_a_running_mean():
    assert watch().level is None
    assert watch(2.0).level == 2.0
    assert watch(2.0, 3.0).level == pytest.approx(0.98 * 2 + 0.02 * 3)
    assert watch(3.0, level=watch(2.0).level).level == watch(2.0, 3.0).level


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        ([2.0, 10.0], 5.0),  # not above
        ([0.01, 1.0], 5.0),  # a hundredfold, but a jump of less than 1
        ([2.0, 1e6, 1e9], None),
        ([1e6, 2.0, 1.0], 5.0),  # falls
        ([0.0, 5.0, 0.0, 5.0], 2.0),
    ],
)
def test_goes_on(losses, factor):
    level, *others = filter(None, losses)  # batches with nothing to learn do not count
    for loss in others:
        level = 0.98 * level + 0.02 * loss
    assert watch(*losses, factor=factor).level == pytest.approx(level)


@pytest.mark.parametrize(
    ("losses", "factor", "reason"),
    [
        ([2.0, 10.1], 5.0, "loss 10.1, its running mean 2"),
        ([0.01, 1.1], 5.0, "loss 1.1, its running mean 0.01"),
        ([2.0, 4.1], 2.0, "loss 4.1"),
        ([2.0, math.nan], None, "loss nan"),
        ([math.inf], 5.0, "loss inf"),
    ],
)
def test_stops(losses, factor, reason):
    with pytest.raises(Diverged, match=reason) as caught:
        watch(*losses, factor=factor)
    assert caught.value.step == len(losses)


def test_a_list_is_finite_where_all_its_numbers_are():
    check_finite(3, {"loss": 1.0, "loss_per_depth": [1.0, 2.0]})
    with pytest.raises(Diverged, match=r"loss_per_depth \[1.0, inf\]"):
        check_finite(3, {"loss": 1.0, "loss_per_depth": [1.0, math.inf]})
