"""Learning curves over transitions, of a run and of a group of runs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.ext.report.statistics import (
    Scores,
    bounds,
    interquartile_mean,
)

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
