"""Compare stored values with replayed ones, bit for bit. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tallyroll.storage.rows.keys import Key, format_key

Array = np.ndarray[Any, Any]

_SHOWN = 16
"""Largest number of elements of a value that is shown in full."""


@dataclass(frozen=True)
class Difference:
    """The first difference of a trajectory: the stored value and the replayed one."""

    trajectory: int
    step: int
    row: int
    """Row number."""
    lane: int
    column: str
    stored: Array
    replayed: Array

    @property
    def at(self) -> tuple[int, ...]:
        """Index of the first element that differs within the value."""
        return tuple(int(each) for each in self._where()[0])

    @property
    def numbers(self) -> int:
        """Number of elements that differ. For an image these are pixels times channels."""
        return len(self._where())

    @property
    def is_image(self) -> bool:
        """True if the value is an image: uint8 with two axes, or with a third axis for colours."""
        value = self.stored
        if value.dtype != np.uint8 or value.ndim not in (2, 3) or min(value.shape[:2]) < 2:
            return False
        return value.ndim == 2 or value.shape[-1] in (1, 3, 4)

    @property
    def pixels(self) -> int | None:
        """Number of pixels that differ; None if the value is not an image."""
        if not self.is_image:
            return None
        return len({tuple(each[:2]) for each in self._where().tolist()})

    @property
    def largest(self) -> float:
        """Largest difference of two elements; infinite if only one of them is NaN."""
        return largest(self.stored, self.replayed)

    def _where(self) -> Array:
        shape = self.stored.shape or (1,)
        stored, replayed = self.stored.reshape(shape), self.replayed.reshape(shape)
        return np.argwhere(~same_bits(stored, replayed))

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values. A large array is represented by the first element that differs."""
        at = self.at
        found: dict[str, Any] = {
            "trajectory": self.trajectory,
            "step": self.step,
            "row": self.row,
            "lane": self.lane,
            "column": self.column,
            "dtype": str(self.stored.dtype),
            "shape": [*self.stored.shape],
            "at": [*at] if self.stored.ndim else [],
            "stored": _plain(self.stored, at),
            "replayed": _plain(self.replayed, at),
            "numbers_that_differ": self.numbers,
            "largest": self.largest,
        }
        if self.is_image:
            found["pixels_that_differ"] = self.pixels
        return found

    def __str__(self) -> str:
        where = f"trajectory {self.trajectory}, step {self.step} (row {self.row:,}), {self.column}"
        if self.is_image:
            height, width = self.stored.shape[:2]
            return (
                f"{where}: {self.pixels:,} of {height * width:,} pixels differ, by {self.largest:g}"
                " at most"
            )
        at = self.at
        if self.stored.size > _SHOWN:
            where += f" at {[*at]}, {self.numbers:,} of {self.stored.size:,} numbers differ"
        stored, replayed = _shown(self.stored, at), _shown(self.replayed, at)
        text = f"{where}: stored {stored}, replayed {replayed}"
        if stored == replayed:
            text += f" (bytes {_octets(self.stored, at)} and {_octets(self.replayed, at)})"
        return text


def _plain(value: Array, at: tuple[int, ...]) -> Any:
    return value.tolist() if value.size <= _SHOWN or not value.ndim else value[at].item()


def _shown(value: Array, at: tuple[int, ...]) -> str:
    return repr(_plain(value, at))


def _octets(value: Array, at: tuple[int, ...]) -> str:
    return (value[at] if value.ndim else value[()]).tobytes().hex()


def same_bits(one: Array, other: Array) -> Array:
    """Return a mask of the equal elements of two arrays with the same shape and dtype."""
    if one.dtype.kind in "biu" and one.dtype.itemsize <= 8:
        same: Array = one == other
        return same
    octets = one.dtype.itemsize
    shape = (*one.shape, octets)
    bits = [np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other)]
    equal: Array = (bits[0] == bits[1]).reshape(shape).all(axis=-1)
    return equal


def differing_rows(stored: Array, replayed: Array, atol: float = 0.0) -> Array:
    """Return the indices of rows ``[n, ...]`` that differ, in ascending order.

    Floats that differ by at most ``atol`` are equal. With a positive ``atol``, two NaNs are equal
    too.
    """
    if stored.tobytes() == replayed.tobytes():
        return np.empty(0, np.intp)
    same = same_bits(stored, replayed)
    if atol > 0 and stored.dtype.kind in "fc":
        with np.errstate(all="ignore"):
            same |= np.isclose(stored, replayed, rtol=0, atol=atol, equal_nan=True)
    return np.flatnonzero(~same.reshape(len(stored), -1).all(axis=1))


def largest(stored: Array, replayed: Array) -> float:
    """Return the largest difference of two elements; infinite if only one of them is NaN."""
    kind = "c16" if stored.dtype.kind == "c" else "f8"
    with np.errstate(all="ignore"):
        apart = np.abs(stored.astype(kind) - replayed.astype(kind))
    same = same_bits(stored, replayed)
    both = np.isnan(stored) & np.isnan(replayed) if stored.dtype.kind in "fc" else same
    apart = np.where(same | both, 0.0, np.where(np.isnan(apart), np.inf, apart))
    return float(apart.max(initial=0.0))


class Comparison:
    """Results of all comparisons: rows, first differences by trajectory, largest differences.

    Args:
        atol: largest difference of two floats that count as equal.
    """

    def __init__(self, atol: float = 0.0) -> None:
        self.atol = atol
        self.rows = 0
        """Number of rows compared."""
        self.columns: dict[str, float] = {}
        """Largest difference in each compared column."""
        self.differing: dict[str, int] = {}
        """Number of rows that differ, by column. Columns without differences are absent."""
        self.first: dict[int, Difference] = {}
        """The first difference of each trajectory that has one."""

    def column(
        self,
        key: Key,
        stored: Array,
        replayed: Array,
        where: tuple[Array, Array, Array, Array],
    ) -> Array:
        """Compare rows ``[n, ...]`` of a column; return the indices of rows that differ.

        ``where`` has the trajectories, steps, rows and lanes, ``[n]`` each. Within a block, call
        this method in the order of the columns; pass blocks in the order of time.
        """
        name = format_key(key)
        rows = differing_rows(stored, replayed, self.atol)
        before = self.columns.setdefault(name, 0.0)
        if not len(rows) and self.atol <= 0:
            return rows
        some = rows if self.atol <= 0 else slice(None)
        self.columns[name] = max(before, largest(stored[some], replayed[some]))
        if len(rows):
            self.differing[name] = self.differing.get(name, 0) + len(rows)
        ids, steps, numbers, lanes = where
        for at in rows.tolist():
            id, step = int(ids[at]), int(steps[at])
            known = self.first.get(id)
            if known is None or step < known.step:
                self.first[id] = Difference(
                    id,
                    step,
                    int(numbers[at]),
                    int(lanes[at]),
                    name,
                    stored[at].copy(),
                    replayed[at].copy(),
                )
        return rows
