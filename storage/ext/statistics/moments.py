"""Count, mean, variance and extremes of numbers, computed in mergeable parts. Pure.

Parts are merged in float64 by the method of Chan, Golub and LeVeque (1979), which stays accurate
if the standard deviation is much smaller than the mean. NaNs are counted, and ignored otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tallyroll.storage.rows.dtypes import in_float64

MOMENTS: Final = np.dtype(
    [
        ("count", "<i8"),
        ("nans", "<i8"),
        ("mean", "<f8"),
        ("squares", "<f8"),
        ("least", "<f8"),
        ("most", "<f8"),
    ]
)
"""Moments of some numbers.

``count`` excludes NaNs, which ``nans`` counts. ``squares`` is the sum of squared differences from
the mean. ``least`` and ``most`` are the extremes, inf and -inf if there are no numbers.
"""

BYTES: Final = 256
QUANTILES: Final = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def nothing(*shape: int) -> np.ndarray:
    """Return the moments [*shape] of empty sets of numbers."""
    found = np.zeros(shape, MOMENTS)
    found["least"], found["most"] = np.inf, -np.inf
    return found


def moments_of(values: np.ndarray) -> np.ndarray:
    """Return the moments [columns] of numbers [n, columns], n above 0."""
    found = nothing(values.shape[1])
    values = in_float64(values)
    is_nan = np.isnan(values)
    with np.errstate(all="ignore"):
        if is_nan.any():
            found["nans"] = is_nan.sum(axis=0)
            found["count"] = len(values) - found["nans"]
            found["least"] = np.where(is_nan, np.inf, values).min(axis=0)
            found["most"] = np.where(is_nan, -np.inf, values).max(axis=0)
            values[is_nan] = 0
            found["mean"] = np.where(found["count"], values.sum(axis=0) / found["count"], 0)
            values -= found["mean"]
            values[is_nan] = 0
        else:
            found["count"] = len(values)
            found["least"], found["most"] = values.min(axis=0), values.max(axis=0)
            found["mean"] = values.mean(axis=0)
            values -= found["mean"]
        found["squares"] = np.einsum("ij,ij->j", values, values)
    return found


def moments_of_counts(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the moments [columns] of numbers that are given as a histogram.

    Args:
        counts: the number of occurrences of each value, int64 [columns, values].
        values: the values in any order, float64 [values].
    """
    found = nothing(len(counts))
    found["count"] = counts.sum(axis=1)
    there = counts > 0
    found["least"] = np.where(there, values, np.inf).min(axis=1)
    found["most"] = np.where(there, values, -np.inf).max(axis=1)
    found["mean"] = (counts @ values) / np.maximum(found["count"], 1)
    found["squares"] = (counts * (values - found["mean"][:, None]) ** 2).sum(axis=1)
    return found


def merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge the moments of two sets of numbers."""
    found = one.copy()
    with np.errstate(all="ignore"):
        count = one["count"] + other["count"]
        apart = other["mean"] - one["mean"]
        share = other["count"] / np.maximum(count, 1)
        found["mean"] += apart * share
        found["squares"] += other["squares"] + apart * apart * one["count"] * share
        endless = ~np.isfinite(apart)  # a mean is infinite, so differences from it are undefined
        found["mean"][endless] = (one["mean"] * (1 - share) + other["mean"] * share)[endless]
        found["squares"][endless] = np.nan
        # An empty part has no mean: use the moments of the other part.
        for empty, full in ((one, other), (other, one)):
            alone = empty["count"] == 0
            for name in ("mean", "squares"):
                found[name][alone] = full[name][alone]
    found["count"] = count
    found["nans"] += other["nans"]
    found["least"] = np.minimum(one["least"], other["least"])
    found["most"] = np.maximum(one["most"], other["most"])
    return found


def quantiles_of(values: np.ndarray) -> np.ndarray:
    """Return `QUANTILES` [quantiles, columns] of numbers [n, columns]; NaN if there are none.

    A quantile is the smallest number such that at least its share of all numbers is at or below it.
    """
    found = np.full((len(QUANTILES), values.shape[1]), np.nan)
    for place, column in enumerate(in_float64(values.T)):
        there = np.sort(column)  # NaNs come last
        if count := len(there) - int(np.isnan(there).sum()):
            found[:, place] = there[_ranks(count)]
    return found


def quantiles_of_counts(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return `QUANTILES` like `quantiles_of`, for numbers that are given as a histogram."""
    order = np.argsort(values)
    found = np.full((len(QUANTILES), len(counts)), np.nan)
    for place, each in enumerate(counts[:, order]):
        if count := int(each.sum()):
            at = np.searchsorted(np.cumsum(each), _ranks(count), side="right")
            found[:, place] = values[order][at]
    return found


def _ranks(count: int) -> np.ndarray:
    """Return the 0-based rank of each of `QUANTILES` among ``count`` sorted numbers."""
    shares = np.array(QUANTILES) * count
    found: np.ndarray = np.maximum(np.ceil(shares - 1e-9).astype(np.int64) - 1, 0)
    return found
