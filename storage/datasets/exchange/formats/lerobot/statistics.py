"""Statistics of features as LeRobot has them, of each episode and of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

QUANTILES: Final = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
NAMES: Final = ("min", "max", "mean", "std", *QUANTILES)

_ROWS_OF_EPISODE, _ROWS_OF_ALL = 4096, 2**16
_SAMPLE_NBYTES: Final = 2**26
_FRAMES_OF_EPISODE: Final = 32


class Numbers:
    """Statistics of the rows of one episode, or of all.

    Least, largest, mean and deviation are of all rows; quantiles are of all where there are few,
    or else of rows at even distances.

    Args:
        rows: how many there will be.
        most: how many the quantiles are of, at most.
    """

    def __init__(self, rows: int, most: int = _ROWS_OF_EPISODE) -> None:
        self._every = max(1, -(-rows // most))
        self.count = 0
        self._kept: list[np.ndarray] = []
        self._moments: list[np.ndarray] = []

    def add(self, values: np.ndarray) -> None:
        """Add rows that follow, float64 [n, numbers]."""
        count = len(values)
        every = self._every
        kept = values if every == 1 else values[-self.count % every :: every].copy()
        mean = values.mean(0)
        off = values - mean
        least, most = values.min(0), values.max(0)
        self._add(count, least, most, mean, np.einsum("ij,ij->j", off, off))
        self._kept.append(kept)

    def _add(
        self, count: int, least: np.ndarray, most: np.ndarray, mean: np.ndarray, squares: np.ndarray
    ) -> None:
        if self.count:
            low, high, before, sum_before = self._moments
            total, off = self.count + count, mean - before
            squares = sum_before + squares + off * off * (self.count * count / total)
            mean = before + off * (count / total)
            least, most = np.minimum(low, least), np.maximum(high, most)
        self._moments = [least, most, mean, squares]
        self.count += count

    def done(self) -> np.ndarray:
        """Return the statistics [`NAMES`, numbers]."""
        least, most, mean, squares = self._moments
        ordered = np.sort(np.concatenate(self._kept), axis=0)
        places = np.array([*QUANTILES.values()]) * (len(ordered) - 1)
        low = places.astype(np.intp)
        part = (places - low)[:, None]
        below, above = ordered[low], ordered[np.minimum(low + 1, len(ordered) - 1)]
        quantiles = np.where(part > 0, below + part * (above - below), below)
        return np.concatenate([[least, most, mean, np.sqrt(squares / self.count)], quantiles])


def of_all(rows: int, width: int) -> Numbers:
    """Return the statistics of all rows, of which few enough are kept."""
    return Numbers(rows, max(1, min(_ROWS_OF_ALL, _SAMPLE_NBYTES // (8 * max(1, width)))))


class Pixels:
    """Statistics of the channels of images, of at most some of them, as parts of 255."""

    def __init__(self, frames: int, channels: int) -> None:
        self._every = max(1, -(-frames // _FRAMES_OF_EPISODE))
        self._seen = 0
        self.count = 0
        self._counts = np.zeros((channels, 256), np.int64)

    def add(self, images: np.ndarray) -> None:
        """Add images that follow, uint8 [n, height, width, channels]."""
        kept = images[-self._seen % self._every :: self._every]
        self._seen += len(images)
        self.count += len(kept)
        for channel, counts in enumerate(self._counts):
            values = np.ascontiguousarray(kept[..., channel]).reshape(-1)
            counts += np.bincount(values, minlength=256)

    def join(self, other: Pixels) -> None:
        """Add what another has counted."""
        self._counts += other._counts
        self.count += other.count

    def done(self) -> np.ndarray:
        """Return the statistics [`NAMES`, channels]."""
        return np.stack([_of_counts(counts) for counts in self._counts], 1) / 255


def _of_counts(counts: np.ndarray) -> np.ndarray:
    values, upto = np.arange(256.0), np.cumsum(counts)
    total = max(1, int(upto[-1]))
    there = np.flatnonzero(counts)
    if not len(there):
        return np.zeros(len(NAMES))
    mean = counts @ values / total
    std = np.sqrt(counts @ (values - mean) ** 2 / total)
    places = np.array([*QUANTILES.values()]) * (total - 1)
    quantiles = np.searchsorted(upto, places, side="right")
    return np.array([there[0], there[-1], mean, std, *np.minimum(quantiles, 255)])


def as_json(found: np.ndarray, count: int, shape: Sequence[int]) -> dict[str, object]:
    """Return the statistics of a feature whose value has this shape, as ``stats.json`` has them."""
    said: dict[str, object] = {
        name: values.reshape(shape).tolist() for name, values in zip(NAMES, found, strict=True)
    }
    return {**said, "count": [count]}
