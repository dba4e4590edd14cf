"""Means over runs, and intervals by the stratified bootstrap. Pure functions.

The interquartile mean leaves out the lowest and the highest quarter of the scores, as Agarwal et
al. ("Deep Reinforcement Learning at the Edge of the Statistical Precipice", 2021) propose for few
runs. Strata are environments: each is resampled from its own runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.extras import needs

CONFIDENCE: Final = 0.95
DRAWS: Final = 10_000
"""Number of bootstrap samples for one interval."""
_CUT = 0.25
_AT_ONCE = 2**22
"""Number of scores drawn at once, 32 MiB."""

Scores = NDArray[np.float64]
Statistic = Callable[..., Any]


@dataclass(frozen=True)
class IntervalEstimate:
    """A number with its interval, whose bounds are None if a stratum has only one run."""

    value: float
    low: float | None = None
    high: float | None = None


def mean(*strata: Scores, axis: int = -1) -> Any:
    """Return the mean of the scores of all strata, along ``axis``."""
    return np.concatenate(strata, axis).mean(axis)


def interquartile_mean(*strata: Scores, axis: int = -1) -> Any:
    """Return the mean without the ``int(n / 4)`` lowest and highest of n scores, along ``axis``.

    The result equals ``scipy.stats.trim_mean(scores, 0.25)``. For one to three scores it is the
    mean.
    """
    return needs("scipy.stats", "report", "reports").trim_mean(
        np.concatenate(strata, axis), _CUT, axis
    )


def bounds(
    statistic: Statistic, strata: Sequence[Scores], draws: int = DRAWS
) -> tuple[Scores, Scores] | None:
    """Return the bounds of the 95 % percentile bootstrap interval of a statistic.

    Args:
        statistic: function of one array per stratum. It reduces their last axis.
        strata: scores [..., run] of each stratum. All scores of a run are drawn together.
        draws: number of bootstrap samples. They are the same in each call.

    Returns:
        Two arrays [...], or None if a stratum has fewer than two runs.
    """
    if not strata or min(each.shape[-1] for each in strata) < 2:
        return None
    stats = needs("scipy.stats", "report", "reports")
    batch = max(1, _AT_ONCE // sum(each.size for each in strata))
    found = stats.bootstrap(
        tuple(strata),
        statistic,
        n_resamples=draws,
        batch=batch,
        vectorized=True,
        axis=-1,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return np.asarray(found.low, np.float64), np.asarray(found.high, np.float64)


def estimate(statistic: Statistic, strata: Sequence[Scores]) -> IntervalEstimate:
    """Return a statistic of scores, one array [run] per stratum, with its interval."""
    value = float(statistic(*strata))
    if (found := bounds(statistic, strata)) is None:
        return IntervalEstimate(value)
    return IntervalEstimate(value, float(found[0]), float(found[1]))


# --- learning curves over transitions -------------------------------------------------------------

POINTS: Final = 120
"""Number of points of a curve."""
_DRAWS = 2_000


@dataclass(frozen=True)
class Curve:
    """Interquartile mean over the runs of a group, at given numbers of transitions.

    ``low`` and ``high`` are the bounds of its interval, or None without an interval. Values are NaN
    where a run has no episode yet, and beyond the end of the shortest run.
    """

    at: NDArray[np.int64]
    value: Scores
    low: Scores | None
    high: Scores | None


def grid(end: int, points: int = POINTS) -> NDArray[np.int64]:
    """Return up to ``points`` equidistant numbers of transitions, the last of which is ``end``."""
    return np.unique(np.linspace(0, end, min(points, end) + 1).round().astype(np.int64))[1:]


def mean_of_last(
    ended_at: NDArray[np.int64], returns: Scores, at: NDArray[np.int64], window: int
) -> Scores:
    """Return the mean return of the last ``window`` episodes that ended by each point, [at].

    Args:
        ended_at: transition of the run at which each episode ended, ascending, [episode].
        returns: returns of the episodes, [episode].
        at: numbers of transitions, [at].
        window: number of episodes. If there are fewer, the mean is over all of them; without
            episodes it is NaN.
    """
    stop = np.searchsorted(ended_at, at, side="right")
    start = np.maximum(0, stop - window)
    found = np.full(len(at), np.nan)
    for place in np.flatnonzero(stop):
        found[place] = returns[start[place] : stop[place]].mean()
    return found


def group_curve(strata: Sequence[Sequence[Scores]], at: NDArray[np.int64]) -> Curve:
    """Return the curve of a group.

    Args:
        strata: values of the runs of each environment, [at] each; NaN where a run has no value.
        at: numbers of transitions, [at].
    """
    scores = [np.stack(runs, axis=-1) for runs in strata]
    known = np.all([np.isfinite(each).all(axis=-1) for each in scores], axis=0)
    there = [each[known] for each in scores]
    value = np.full(len(at), np.nan)
    value[known] = interquartile_mean(*there) if known.any() else ()
    found = bounds(interquartile_mean, there, _DRAWS) if known.any() else None
    if found is None:
        return Curve(at, value, None, None)
    low, high = np.full((2, len(at)), np.nan)
    low[known], high[known] = found
    return Curve(at, value, low, high)
