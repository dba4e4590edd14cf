"""Means, intervals and learning curves, compared with plain loops, known values and all draws."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tallyroll.collector.ext.report.statistics import (
    bounds,
    estimate,
    grid,
    group_curve,
    interquartile_mean,
    mean,
    mean_of_last,
)


def plain_interquartile_mean(*strata: Any) -> float:
    scores = sorted(float(each) for some in strata for each in some)
    cut = len(scores) // 4
    kept = scores[cut : len(scores) - cut]
    return sum(kept) / len(kept)


def test_interquartile_means_of_known_scores() -> None:
    assert interquartile_mean(np.arange(1.0, 9.0)) == 4.5  # of 3, 4, 5, 6
    assert interquartile_mean(np.array([0.0, 10, 20, 1000])) == 15
    assert interquartile_mean(np.array([1.0, 2, 9])) == 4  # with three values, none is trimmed
    assert interquartile_mean(np.array([7.0]), np.array([0.0, 8, 900])) == 7.5


@pytest.mark.parametrize("runs", range(1, 14))
def test_interquartile_means_beside_a_loop(runs: int) -> None:
    scores = np.random.default_rng(runs).normal(size=(3, runs))
    for some in scores:
        assert interquartile_mean(some) == pytest.approx(plain_interquartile_mean(some))
        assert mean(some) == pytest.approx(sum(some) / runs)
    assert interquartile_mean(*scores) == pytest.approx(plain_interquartile_mean(*scores))


@pytest.mark.parametrize("statistic", [mean, interquartile_mean])
@pytest.mark.parametrize("runs", [(3,), (4,), (5,), (3, 2), (2, 2, 2)], ids=str)
def test_intervals_beside_all_draws_that_there_are(statistic: Any, runs: tuple[int, ...]) -> None:
    """Each stratum is drawn from its own runs. The bounds are percentiles of all draws."""
    rng = np.random.default_rng(0)
    strata = [rng.normal(100 * number, 1, size) for number, size in enumerate(runs)]
    own = plain_interquartile_mean if statistic is interquartile_mean else _plain_mean
    drawn = [[*product(each, repeat=len(each))] for each in strata]
    every = np.array([own(*draw) for draw in product(*drawn)])
    found = bounds(statistic, strata)
    assert found is not None
    for end, share in zip(found, (0.025, 0.975), strict=True):
        low, high = np.quantile(every, (share - 0.005, share + 0.005), method="inverted_cdf")
        assert low - 1e-9 <= end <= high + 1e-9


def _plain_mean(*strata: Any) -> float:
    scores = [float(each) for some in strata for each in some]
    return sum(scores) / len(scores)


def test_intervals_of_few_and_of_equal_runs() -> None:
    assert bounds(mean, []) is None
    assert bounds(mean, [np.array([1.0, 2]), np.array([3.0])]) is None
    alone = estimate(interquartile_mean, [np.array([5.0])])
    assert (alone.value, alone.low, alone.high) == (5, None, None)
    same = estimate(interquartile_mean, [np.full(5, 2.5)])
    assert (same.value, same.low, same.high) == (2.5, 2.5, 2.5)
    # With three runs, each bound is one of them: one of 27 draws has it three times.
    three = estimate(mean, [np.array([1.0, 2, 6])])
    assert (three.value, three.low, three.high) == (3, 1, 6)
    scores = [np.random.default_rng(0).normal(size=7)]
    assert bounds(mean, scores) == bounds(mean, scores)


def test_a_grid_ends_at_the_end() -> None:
    assert grid(1000, 4).tolist() == [250, 500, 750, 1000]
    assert grid(3, 100).tolist() == [1, 2, 3]
    assert grid(0).tolist() == []


def test_a_curve_is_the_mean_of_the_last_episodes() -> None:
    ended = np.array([3, 7, 7, 20])
    returns = np.array([1.0, 5, 9, 2])
    found = mean_of_last(ended, returns, np.array([1, 3, 6, 7, 19, 20, 50]), window=2)
    np.testing.assert_array_equal(found, [np.nan, 1, 1, 7, 7, 5.5, 5.5])
    assert np.isnan(mean_of_last(ended[:0], returns[:0], ended, 5)).all()


def test_the_curve_of_a_group() -> None:
    at = np.array([1, 2, 3])
    runs = [np.array([np.nan, v, 10 * v]) for v in (1.0, 2, 3, 400)]
    curve = group_curve([runs], at)
    np.testing.assert_array_equal(curve.value, [np.nan, 2.5, 25])
    assert curve.low is not None
    assert curve.high is not None
    for point in (1, 2):
        low, high = bounds(interquartile_mean, [np.array([run[point] for run in runs])]) or (0, 0)
        assert curve.low[point] == pytest.approx(low, rel=0.05)
        assert curve.high[point] == pytest.approx(high, rel=0.05)
    assert np.isnan([curve.low[0], curve.high[0]]).all()
    alone = group_curve([runs[:1]], at)
    assert (alone.value[2], alone.low, alone.high) == (10, None, None)
    # A run that ended early ends the curve of all. A run without episodes has no curve.
    short = group_curve([[*runs, np.array([1, 2, np.nan])]], at)
    np.testing.assert_array_equal(np.isnan(short.value), [True, False, True])
    assert np.isnan(group_curve([[*runs, np.full(3, np.nan)]], at).value).all()
