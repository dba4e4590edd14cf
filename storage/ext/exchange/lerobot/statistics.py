"""LeRobot's statistics of features, per episode and for all rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
NAMES: Final = ("min", "max", "mean", "std", *QUANTILES)

_ROWS_OF_EPISODE, _ROWS_OF_ALL = 4096, 2**16
_SAMPLE_NBYTES: Final = 2**26
_FRAMES_OF_EPISODE: Final = 32


class Numbers:
    """Statistics of the rows of one episode, or of all rows.

    Minimum, maximum, mean and standard deviation use all rows. Quantiles use all rows if there are
    at most ``most`` rows, and otherwise every k-th row. NaN and infinite values are left out,
    because JSON cannot represent them and the statistics serve to normalise. The statistics of a
    column without finite values are zero.

    Args:
        rows: the number of rows that will be added.
        most: the maximum number of rows for the quantiles.
    """

    def __init__(self, rows: int, most: int = _ROWS_OF_EPISODE) -> None:
        self._every = max(1, -(-rows // most))
        self.count = 0
        """The number of rows added so far."""
        self._kept: list[np.ndarray] = []
        self._moments: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Add the next rows, float64 [n, numbers]."""
        every = self._every
        kept = values if every == 1 else values[-self.count % every :: every].copy()
        finite = np.isfinite(values)
        if finite.all():
            counts = np.full(values.shape[1], len(values))
            mean = values.mean(0)
            off = values - mean
            least, most = values.min(0), values.max(0)
        else:
            counts = np.count_nonzero(finite, axis=0)
            mean = np.where(finite, values, 0.0).sum(0) / np.maximum(counts, 1)
            off = np.where(finite, values - mean, 0.0)
            least = np.where(finite, values, np.inf).min(0)
            most = np.where(finite, values, -np.inf).max(0)
            kept = np.where(np.isfinite(kept), kept, np.nan)
        self._add(counts, least, most, mean, np.einsum("ij,ij->j", off, off))
        self._kept.append(kept)
        self.count += len(values)

    def _add(
        self,
        counts: np.ndarray,
        least: np.ndarray,
        most: np.ndarray,
        mean: np.ndarray,
        squares: np.ndarray,
    ) -> None:
        if self._moments:
            known, low, high, before, sum_before = self._moments
            total, off = known + counts, mean - before
            share = counts / np.maximum(total, 1)
            squares = sum_before + squares + off * off * (known * share)
            mean = before + off * share
            least, most = np.minimum(low, least), np.maximum(high, most)
            counts = total
        self._moments = [counts, least, most, mean, squares]

    def done(self) -> np.ndarray:
        """Return the statistics [`NAMES`, numbers]."""
        counts, least, most, mean, squares = self._moments
        ordered = np.sort(np.concatenate(self._kept), axis=0)  # NaN sorts to the end
        last = np.maximum(np.count_nonzero(~np.isnan(ordered), axis=0) - 1, 0)
        places = np.array([*QUANTILES.values()])[:, None] * last
        low = places.astype(np.intp)
        part = places - low
        below = np.take_along_axis(ordered, low, 0)
        above = np.take_along_axis(ordered, np.minimum(low + 1, last), 0)
        quantiles = np.where(part > 0, below + part * (above - below), below)
        deviation = np.sqrt(squares / np.maximum(counts, 1))
        found = np.concatenate([[least, most, mean, deviation], quantiles])
        return np.where(np.isfinite(found), found, 0.0)


def of_all(rows: int, width: int) -> Numbers:
    """Return statistics for all rows, with a bounded sample for the quantiles."""
    return Numbers(rows, max(1, min(_ROWS_OF_ALL, _SAMPLE_NBYTES // (8 * max(1, width)))))


class Pixels:
    """Statistics of the channels of a sample of images, as fractions of 255."""

    def __init__(self, frames: int, channels: int) -> None:
        self._every = max(1, -(-frames // _FRAMES_OF_EPISODE))
        self._seen = 0
        self.count = 0
        self._counts = np.zeros((channels, 256), np.int64)

    def add(self, images: np.ndarray) -> None:
        """Add the next images, uint8 [n, height, width, channels]."""
        kept = images[-self._seen % self._every :: self._every]
        self._seen += len(images)
        self.count += len(kept)
        for channel, counts in enumerate(self._counts):
            values = np.ascontiguousarray(kept[..., channel]).reshape(-1)
            counts += np.bincount(values, minlength=256)

    def join(self, other: Pixels) -> None:
        """Add the counts of another instance."""
        self._counts += other._counts
        self.count += other.count

    def done(self) -> np.ndarray:
        """Return the statistics [`NAMES`, channels]."""
        return np.stack([_of_counts(counts) for counts in self._counts], 1) / 255


def _of_counts(counts: np.ndarray) -> np.ndarray:
    upto = np.cumsum(counts)
    total = max(1, int(upto[-1]))
    there = np.flatnonzero(counts)
    if not len(there):
        return np.zeros(len(NAMES))
    # Integer sums are the same on every processor, unlike the products of a BLAS library.
    numbers = np.arange(256)
    first, second = int((counts * numbers).sum()), int((counts * numbers**2).sum())
    mean = first / total
    std = math.sqrt((total * second - first * first) / total**2)
    places = np.array([*QUANTILES.values()]) * (total - 1)
    quantiles = np.searchsorted(upto, places, side="right")
    return np.array([there[0], there[-1], mean, std, *np.minimum(quantiles, 255)])


def as_json(found: np.ndarray, count: int, shape: Sequence[int]) -> dict[str, object]:
    """Return the statistics of a feature with values of ``shape`` in the form of ``stats.json``."""
    said: dict[str, object] = {
        name: values.reshape(shape).tolist() for name, values in zip(NAMES, found, strict=True)
    }
    return {**said, "count": [count]}
