"""Windows of trajectories: the sequences of rows from which slices are drawn. Pure.

A stretch consists of consecutive stored steps of a trajectory. A trajectory is one stretch unless
rows in between were never stored. A stretch of ``n`` rows has ``n - slice_len + 1`` windows. A
stretch of fewer than ``slice_len`` rows has no window, or is itself one padded window.

`RowIndex` finds the rows of a window. It never crosses the end of a trajectory, a gap or the oldest
row of a ring. All samplers use it. `Starts` (`storage/ext/sampling/starts.py`) checks again that a
sequence is complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from tallyroll.storage.errors import NoSlices, ShortTrajectory
from tallyroll.storage.trajectories.row_index import RowIndex

Short: TypeAlias = Literal["skip", "pad", "error"]
"""Treatment of a trajectory that is shorter than a slice."""
By: TypeAlias = Literal["window", "trajectory"]
"""The unit that is drawn with equal probability."""
Pick: TypeAlias = Callable[[int, int], np.ndarray]
"""``pick(count, below)`` draws ``count`` integers from 0 to ``below - 1`` uniformly."""

_MOST_AT_ONCE: Final = 2**18
_MANY: Final = 2**62
_SHORTS: Final = get_args(Short)  # evaluated once, because it takes as long as a small draw
_BYS: Final = get_args(By)


@dataclass(frozen=True, slots=True)
class Windows:
    """Specification of slices; see `Trajectories.sample_slices` for the arguments."""

    slice_len: int
    short: Short = "skip"
    by: By = "window"
    from_start: bool = False
    burn_in: int = 0

    def __post_init__(self) -> None:
        check_positive("slice_len", self.slice_len)
        if type(self.burn_in) is not int or self.burn_in < 0:
            raise ValueError(
                f"burn_in: expected a whole number of rows or 0, got {self.burn_in!r}."
            )
        for name, given, kinds in (("short", self.short, _SHORTS), ("by", self.by, _BYS)):
            if given not in kinds:
                names = ", ".join(map(repr, kinds))
                raise ValueError(f"{name}: expected one of {names}, got {given!r}.")
        if type(self.from_start) is not bool:
            raise ValueError(f"from_start: expected True or False, got {self.from_start!r}.")
        if self.from_start and self.burn_in:
            raise ValueError(
                f"expected from_start=True or burn_in={self.burn_in}, got both: no row comes "
                "before the start of a trajectory. Leave one of them out."
            )

    @property
    def length(self) -> int:
        """The number of rows of a slice, including the burn-in."""
        return self.burn_in + self.slice_len

    @property
    def padded(self) -> bool:
        """True if some positions of a slice may hold no row."""
        return self.short == "pad" or self.burn_in > 0

    @property
    def plain(self) -> bool:
        """True if slices are drawn from all windows of full length, as `RowIndex.draw` does."""
        return self.short == "skip" and self.by == "window" and not self.from_start

    def __str__(self) -> str:
        named = {name: getattr(self, name) for name in ("short", "by", "from_start", "burn_in")}
        default = Windows(self.slice_len)
        said = [f"{name}={it!r}" for name, it in named.items() if it != getattr(default, name)]
        return ", ".join([f"slice_len={self.slice_len}", *said])


@dataclass(frozen=True, slots=True)
class Slices:
    """The rows of slices, in time order."""

    rows: np.ndarray
    """Row numbers, [slices, length]. Positions where `mask` is False repeat the nearest row."""
    mask: np.ndarray | None = None
    """True where there is a row, bool [slices, length]; the rows of each slice are contiguous. None
    if every position holds a row."""

    @property
    def first(self) -> tuple[Any, Any]:
        """The index, in arrays [slices, length, ...], of the first row of each slice."""
        if self.mask is None:
            return slice(None), 0
        return np.arange(len(self.rows)), self.mask.argmax(axis=1)

    @property
    def last(self) -> tuple[Any, Any]:
        """The index of the last row of each slice."""
        if self.mask is None:
            return slice(None), -1
        every, first = self.first
        return every, first + self.mask.sum(axis=1) - 1


def check_positive(name: str, value: object) -> None:
    """Raise `ValueError` unless ``value`` is an integer above 0."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: expected a whole number above 0, got {value!r}.")


def draw_slices(
    index: RowIndex,
    windows: Windows,
    count: int,
    first: int,
    pick: Pick,
    steps_of: Callable[[np.ndarray], np.ndarray],
) -> Slices:
    """Draw ``count`` slices with replacement.

    Args:
        index: the index of the rows.
        windows: the specification of the slices.
        count: the number of slices.
        first: the lowest valid row.
        pick: the source of random numbers.
        steps_of: returns the steps of rows [n] within their trajectories.

    Raises:
        NoSlices: no window matches.
        ShortTrajectory: a shorter trajectory was drawn, and ``short`` is ``"error"``.
    """
    if windows.plain and not windows.burn_in:
        return Slices(index.draw(count, windows.slice_len, first, pick))
    return _WindowDraw(index, windows, first, pick, steps_of).slices(count)


def _mask_of(slices: Slices) -> np.ndarray:
    return np.ones(slices.rows.shape, np.bool_) if slices.mask is None else slices.mask


class _WindowDraw:
    """Draw windows from the current rows; see `draw_slices` for the arguments.

    No list of windows is needed: rows are drawn, and those at which a window ends are kept. A
    stretch has at most ``slice_len`` times as many rows as windows, so the time of a sample is
    proportional to its own rows, however many rows are stored. With ``by="trajectory"`` or
    ``from_start``, the number of rows to look at per slice is the average length of trajectories.
    """

    def __init__(
        self,
        index: RowIndex,
        windows: Windows,
        first: int,
        pick: Pick,
        steps_of: Callable[[np.ndarray], np.ndarray],
    ) -> None:
        self._index, self._windows, self._first = index, windows, first
        self._pick, self._steps_of = pick, steps_of
        self._left = range(first, index.seen)
        self._reach = min(windows.slice_len, max(1, len(self._left)))
        """The maximum number of rows of a window."""

    def slices(self, count: int) -> Slices:
        """Return the slices, including the burn-in."""
        found = self._windows_of(count)
        if self._windows.short == "error" and not (mask := _mask_of(found)).all():
            raise ShortTrajectory(
                f"slices of {self._windows.slice_len} rows were requested, but a trajectory that "
                f"was drawn has {mask.sum(axis=1).min()}. Request shorter slices, or pass "
                'short="pad" or "skip".'
            )
        return self._with_burn_in(found) if self._windows.burn_in else found

    def _windows_of(self, count: int) -> Slices:
        index, windows = self._index, self._windows
        if windows.plain:
            rows = index.draw(count, windows.slice_len, self._first, self._pick)
            return Slices(rows)
        if windows.from_start:
            return self._onward(self._picked(count, self._starts))
        if windows.by == "window":
            return self._back(self._picked(count, self._ends))
        ends = self._picked(count, self._lasts)
        more = self._lengths(ends) - windows.slice_len
        return self._back(index.back(ends, self._pick(count, _MANY) % (np.maximum(more, 0) + 1)))

    # --- which rows -------------------------------------------------------------------------------

    def _picked(self, count: int, keep: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Draw ``count`` rows uniformly from those that ``keep`` selects among rows [n]."""
        left, found, missing, tried, size = self._left, [], count, 0, 4 * count
        while missing and tried < len(left):
            kept = keep(left.start + self._pick(size, len(left)))[:missing]
            found.append(kept)
            tried, missing = tried + size, missing - len(kept)
            # Estimate the number of rows to draw from the share that was kept so far.
            size = min(_MOST_AT_ONCE, 16 + missing * tried // max(1, count - missing) * 5 // 4)
        if missing:
            parts = (left[at : at + _MOST_AT_ONCE] for at in range(0, len(left), _MOST_AT_ONCE))
            every = np.concatenate([keep(np.arange(part.start, part.stop)) for part in parts])
            if not len(every):
                raise self._none()
            found.append(every[self._pick(missing, len(every))])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _none(self) -> NoSlices:
        index, windows = self._index, self._windows
        if windows.from_start:
            return NoSlices(
                f"slices of {windows.slice_len} rows from the first step of a trajectory were "
                "requested, but no trajectory here has that many rows from its first step on. "
                'Request shorter slices, pass short="pad", or collect more.'
            )
        return NoSlices(
            f"slices of {windows.slice_len} rows were requested, but the longest stretch of a "
            f"trajectory here has {index.longest(self._first)}. Request shorter slices, pass "
            'short="pad", or collect more.'
        )

    def _ends(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows at which a window ends. A short window ends at its last row."""
        before, last = self._index.places(rows)
        whole = before >= self._windows.slice_len - 1
        keep = np.flatnonzero(whole | last)
        rows, whole, last = rows.take(keep), whole.take(keep), last.take(keep)
        if not self._first:
            return rows
        return rows.take(np.flatnonzero(last | (whole & self._whole(rows, whole))))

    def _lasts(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that are the last of a stretch with a window."""
        before, last = self._index.places(rows)
        if self._windows.short != "skip":
            return rows.take(np.flatnonzero(last))
        long = before >= self._windows.slice_len - 1
        rows = rows.take(np.flatnonzero(last & long))
        if not self._first:
            return rows
        return rows.take(np.flatnonzero(self._whole(rows, np.ones(len(rows), np.bool_))))

    def _whole(self, rows: np.ndarray, long: np.ndarray) -> np.ndarray:
        """Return a mask of the rows [n] whose window a ring still has completely."""
        steps = np.where(long, self._windows.slice_len - 1, 0)
        found: np.ndarray = self._index.back(rows, steps) >= self._first
        return found

    def _starts(self, rows: np.ndarray) -> np.ndarray:
        """Return the rows that are the first step of a trajectory with a window."""
        before, _ = self._index.places(rows)
        rows = rows.take(np.flatnonzero(before == 0))
        rows = rows.take(np.flatnonzero(self._steps_of(rows) == 0))
        length = self._windows.slice_len
        if self._windows.short != "skip" or not len(rows) or length == 1:
            return rows
        if length > self._reach:
            return rows[:0]
        onward = self._index.onward(rows, length)
        return rows.take(np.flatnonzero(onward[-1] != onward[-2]))

    def _lengths(self, ends: np.ndarray) -> np.ndarray:
        """Return the number of remaining rows of the stretches that end at ``ends`` [n]."""
        before, _ = self._index.places(ends)
        if self._first:
            gone = np.flatnonzero(self._index.back(ends, before) < self._first)
            for at in gone.tolist():
                left = len(self._index.back_from(int(ends[at]), self._first))
                before[at] = min(before[at], left - 1)
        return before.astype(np.int64) + 1

    # --- their rows -------------------------------------------------------------------------------

    def _back(self, ends: np.ndarray) -> Slices:
        """Return the windows that end at rows [n]."""
        reach = self._reach
        rows = self._index.windows(ends, reach)
        before, _ = self._index.places(ends)
        is_row = np.arange(reach) >= reach - 1 - before[:, None]
        return self._laid_out(rows, is_row & (rows >= self._first))

    def _onward(self, starts: np.ndarray) -> Slices:
        """Return the windows that begin at rows [n]."""
        rows = np.ascontiguousarray(self._index.onward(starts, self._reach).T)
        is_row = np.ones(rows.shape, np.bool_)
        is_row[:, 1:] = rows[:, 1:] != rows[:, :-1]
        return self._laid_out(rows, is_row)

    def _laid_out(self, rows: np.ndarray, is_row: np.ndarray) -> Slices:
        """Return slices [n, length] that begin with the rows that ``is_row`` selects."""
        length = self._windows.slice_len
        count = is_row.sum(axis=1)[:, None]
        place = np.arange(length)
        at = is_row.argmax(axis=1)[:, None] + np.minimum(place, count - 1)
        return Slices(np.take_along_axis(rows, at, axis=1), place < count)

    def _with_burn_in(self, slices: Slices) -> Slices:
        """Prepend the available burn-in rows to the slices."""
        index, burn_in = self._index, self._windows.burn_in
        starts = slices.rows[:, 0]
        reach = min(burn_in, len(self._left))
        rows = index.windows(starts, reach + 1)[:, :-1]
        before, _ = index.places(starts)
        is_row = (np.arange(reach) >= reach - before[:, None]) & (rows >= self._first)
        oldest = np.where(is_row, rows, starts[:, None]).min(axis=1)
        front = np.repeat(oldest[:, None], burn_in, axis=1)
        mask = np.zeros(front.shape, np.bool_)
        np.copyto(front[:, burn_in - reach :], rows, where=is_row)
        mask[:, burn_in - reach :] = is_row
        return Slices(
            np.concatenate([front, slices.rows], axis=1),
            np.concatenate([mask, _mask_of(slices)], axis=1),
        )
