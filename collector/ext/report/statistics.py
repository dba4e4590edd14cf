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
