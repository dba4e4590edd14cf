"""Priorities of the rows of a storage, kept in step with the committed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.engine.ring import pieces
from tallyroll.storage.errors import IndexOutOfRange
from tallyroll.storage.ext.sampling.powers import Powers, powers_of
from tallyroll.storage.ext.sampling.starts import Starts
from tallyroll.storage.ext.sampling.sum_tree import LeafNumbering, Plain, SumTree, tree_nbytes
from tallyroll.storage.files.rewind_history import least_rows_after_rewinds
from tallyroll.storage.readers.row_reader import RowReader

_FIRST_ROOM: Final = 2**12
_FLOAT32: Final = np.finfo(np.float32)


class Priorities:
    """Sum tree with a leaf above 0 for each row that may be drawn. Callers must serialize calls.

    `follow` synchronizes the leaves with the committed rows: new rows get the largest existing
    leaf, and rows that have disappeared get 0. Updates skip rows whose leaf is 0 (`SumTree.put`,
    and ``put_leaves`` and ``put_priorities`` in ``_sum_tree.c``). Rows that a buffer writes with
    priorities get these at once (`PrioritizedSampler._just_written`).

    Args:
        reader: the reader of the rows.
        first_leaf: the leaf of the first rows in a new storage and after ``empty()``.
        starts: the rows that may be drawn; None: all rows.
    """

    def __init__(self, reader: RowReader, first_leaf: float, starts: Starts | None) -> None:
        self._reader, self._starts, self._first_leaf = reader, starts, first_leaf
        self._tree = SumTree(0)
        self._rewinds, self._floor = reader.rewinds, reader.floor
        # For each slot, True if its row number denoted another row before a rewind and has not been
        # drawn since.
        self._twice: np.ndarray | None = None
        self.entering = first_leaf
        """The most recent value of the largest leaf."""
        self.there = LeafNumbering(0, 0, 0, 0)
        """The rows that have leaves."""
        self.most = 0
        """One more than the largest row number that ever existed."""
        self.changed = False
        """True if a leaf has changed since the last save."""
        if reader.ring:
            self._make_room(reader.ring)

    # --- synchronization --------------------------------------------------------------------------

    def follow(self) -> LeafNumbering:
        """Synchronize the priorities with the committed rows, and return these rows."""
        reader, there = self._reader, self.there
        while True:
            rewinds, span = reader.rewinds, reader.span
            if rewinds == reader.rewinds:
                break
        if span.stop == there.stop and span.start == there.first and rewinds == self._rewinds:
            return there
        self.entering = self.largest
        if rewinds != self._rewinds or span.stop < there.stop:
            self._remove_rewound(rewinds, span)
        self._remove_old(span)
        if span.stop > self.there.stop:
            self._add_new(span)
        return self.there

    def _remove_rewound(self, rewinds: int, span: range) -> None:
        """Remove the leaves of row numbers that denote other rows since a rewind."""
        ring, base, first, stop = self.there
        kept = min(stop, span.stop)
        if rewinds != self._rewinds:
            left = least_rows_after_rewinds(self._reader.manifest, self._rewinds, rewinds)
            kept = min(kept, 0 if left is None else left)
        self._rewinds, self._floor = rewinds, self._reader.floor
        self._fill(max(kept, first), stop, 0)
        if self._twice is None:
            self._twice = np.zeros(len(self._tree.leaves), np.bool_)
        for slot, _, count in self._pieces(kept, self.most):
            self._twice[slot : slot + count] = True
        self.there = LeafNumbering(ring, base, min(first, kept), kept)
        self._require_starts(max(first, span.start), kept)

    def _require_starts(self, start: int, stop: int) -> None:
        """Remove the leaves of sequence starts whose sequences extend into removed rows."""
        if self._starts is None:
            return
        may = self._starts.which(np.arange(start, stop))
        for slot, begin, count in self._pieces(start, stop):
            left = self._tree.leaves[slot : slot + count] * may[begin : begin + count]
            self._tree.fill(slot, slot + count, left)

    def _remove_old(self, span: range) -> None:
        """Remove the leaves of rows that have disappeared."""
        ring, base, first, stop = self.there
        if span.start <= first:
            return
        gone = min(span.start, stop)
        floor = self._reader.floor
        if floor != self._floor:
            self._floor = floor
            if gone == stop:  # emptied
                self.entering = self._first_leaf
        self._fill(first, gone, 0)
        self.there = LeafNumbering(ring, base, span.start, max(stop, span.start))

    def _add_new(self, span: range) -> None:
        """Give new rows the largest leaf."""
        ring, base, first, stop = self.there
        if not self.most:
            ring = self._reader.ring
            base = 0 if ring else span.start
            first = stop = span.start
        self._make_room(ring or span.stop - base)
        start = max(stop, span.start)
        self.there = LeafNumbering(ring, base, first, stop)
        if self._starts is None:
            for slot, _, count in self._pieces(start, span.stop):
                self._tree.fill(slot, slot + count, self.entering)
        else:
            for rows in self._starts.ended_in(range(start, span.stop), first):
                at = self._slots(rows)
                new = at[self._tree.leaves[at] == 0]
                self._tree.set(new, np.full(len(new), self.entering, np.float32))
        if self._twice is not None:
            for slot, _, count in self._pieces(max(start, self.most), span.stop):
                self._twice[slot : slot + count] = False
        self.there = LeafNumbering(ring, base, first, span.stop)
        self.most, self.changed = max(self.most, span.stop), True

    def _make_room(self, slots: int) -> None:
        before = len(self._tree.leaves)
        if slots <= before:
            return
        if not self._reader.ring:  # grow by half, so that growth is rare
            slots = max(slots, before * 3 // 2, _FIRST_ROOM)
        require_memory(tree_nbytes(slots), f"the priorities of {slots:,} rows")
        self._tree.grow(slots)
        if self._twice is not None:
            self._twice = np.append(self._twice, np.zeros(len(self._tree.leaves) - before, bool))

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Return the slot ranges of rows; see `ring.pieces`."""
        ring, base, *_ = self.there
        if start >= stop:
            return []
        if not ring:
            return [(start - base, 0, stop - start)]
        return pieces(max(start, stop - ring), stop, ring)

    def _fill(self, start: int, stop: int, leaf: float) -> None:
        for slot, _, count in self._pieces(start, stop):
            self._tree.fill(slot, slot + count, leaf)
        self.changed |= start < stop

    def _slots(self, rows: np.ndarray) -> np.ndarray:
        ring, base, *_ = self.there
        return rows % ring if ring else rows - base

    # --- draws and updates ------------------------------------------------------------------------

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return self._tree.total

    @property
    def least(self) -> np.float32:
        """The smallest leaf above 0."""
        return self._tree.least

    @property
    def largest(self) -> float:
        """The largest leaf, which new rows get."""
        found = float(self._tree.largest)
        return found if found > 0 else self.entering

    def draw(self, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows in proportion to their leaves; see `SumTree.draw`."""
        found = self._tree.draw(uniform, self.there)
        if self._twice is not None:
            self._twice[self._slots(found[0])] = False
        return found

    def put_at_once(
        self, drawn: np.ndarray | None, index: Plain, priority: Plain, powers: Powers
    ) -> int | None:
        """Set priorities of rows, and return how many rows are gone; see `SumTree.put_priorities`.

        Return None without any change if the caller must use `put`, which also reports errors.
        """
        if self._twice is not None or self._starts is not None:
            return None
        gone = self._tree.put_priorities(
            powers.address, drawn, index, priority, self.there, self.most
        )
        if gone < 0:
            return None
        self.changed = True
        return gone

    def put(self, rows: np.ndarray, leaves: np.ndarray, *, sure: bool = False) -> int:
        """Set the leaves, float32 [n], of ``rows``, int64 [n]; return how many rows are gone.

        A row number that denoted another row before a rewind counts as gone until it is drawn,
        unless the caller passes ``sure``.

        Raises:
            IndexOutOfRange: a row never existed; nothing was changed.
        """
        gone = 0
        if self._twice is not None and not sure and len(rows):
            _, _, first, stop = self.there
            known = (rows >= first) & (rows < stop)
            known[known] = ~self._twice[self._slots(rows[known])]
            known |= (rows < 0) | (rows >= self.most)  # errors
            gone = len(rows) - int(known.sum())
            rows, leaves = rows[known], leaves[known]
        try:
            gone += self._tree.put(rows, leaves, self.there, self.most)
        except IndexError as error:
            raise IndexOutOfRange(
                f"cannot set priorities of rows that were never written: {self._reader.path} has "
                f"had {self.most:,} rows. Give the rows, or the index, of a sample of this "
                "storage."
            ) from error
        self.changed = True
        return gone

    def convert(self, converted: Callable[[np.ndarray], np.ndarray], first_leaf: float) -> None:
        """Convert all leaves to another alpha and eps; an error leaves them unchanged."""
        leaves = converted(self._tree.leaves)
        entering = float(converted(np.array([self.largest], np.float32))[0])
        self.entering, self._first_leaf, self.changed = entering, first_leaf, True
        self._tree.fill(0, len(leaves), leaves)

    # --- bulk access ------------------------------------------------------------------------------

    def leaves(self) -> np.ndarray:
        """Return a copy of the leaves of the known rows, float32 [rows]."""
        _, _, first, stop = self.there
        found = np.zeros(stop - first, np.float32)
        for slot, begin, count in self._pieces(first, stop):
            found[begin : begin + count] = self._tree.leaves[slot : slot + count]
        return found

    def replace(self, leaves: np.ndarray, first: int, entering: float, *, same: bool) -> None:
        """Replace all leaves by ``leaves``, float32 [n], for the rows from ``first`` on.

        Leaves of rows that are gone are ignored, and later rows are treated as new.

        Args:
            leaves: leaves of rows whose numbers still denote the same rows.
            first: the first of these rows.
            entering: the leaf for new rows while no row has a leaf.
            same: True if there was no rewind since the leaves were saved.
        """
        reader, span = self._reader, self._reader.span
        ring = reader.ring
        base = 0 if ring else span.start
        if len(span):
            self._make_room(ring or span.stop - base)
        start, stop = span.start, min(first + len(leaves), span.stop)
        if first > start or stop < start:
            stop = start
        self._tree.fill(0, len(self._tree.leaves), 0)
        self._rewinds, self._floor = reader.rewinds, reader.floor
        self.there, self.entering = LeafNumbering(ring, base, start, stop), entering
        self.most = max(self.most, span.stop)
        for slot, begin, count in self._pieces(start, stop):
            at = begin + start - first
            self._tree.fill(slot, slot + count, leaves[at : at + count])
        if not same:
            self._require_starts(start, stop)
        self.changed = True
        self.follow()


def leaves_of(priority: np.ndarray, alpha: float, eps: float) -> np.ndarray:
    """Convert priorities in float64 [n] to leaves, (priority + eps)^alpha in float32.

    Raises:
        ValueError: a priority is negative, infinite, NaN or too large, or it is 0 and ``eps`` is 0.
    """
    found = powers_of(alpha, eps).of(priority)
    if not len(found) or (
        priority.min() >= 0 and found.min() >= _FLOAT32.tiny and found.max() <= _FLOAT32.max
    ):
        return found
    _refuse(priority, found, alpha, eps)
    raised: np.ndarray = np.maximum(found, _FLOAT32.tiny)
    return raised


def _refuse(priority: np.ndarray, leaves: np.ndarray, alpha: float, eps: float) -> None:
    """Raise `ValueError` for the first invalid priority, if there is one."""
    known = np.isfinite(priority) & (priority >= 0)
    if not known.all():
        at = int(np.flatnonzero(~known)[0])
        raise ValueError(
            f"priority: expected finite numbers of at least 0, got {priority[at]} at position "
            f"{at}, the first of {int((~known).sum())} invalid ones of {len(priority)}. Nothing "
            "was changed. Check that the loss is finite, and give its absolute value."
        )
    if (large := leaves > _FLOAT32.max).any():
        at = int(np.flatnonzero(large)[0])
        raise ValueError(
            f"priority: expected numbers whose power with the exponent alpha={alpha} is below "
            f"{_FLOAT32.max:.3g}, got {priority[at]} at position {at}. Nothing was changed. Clip "
            "or scale the priorities."
        )
    zeros = priority + eps == 0
    if zeros.any():
        at = int(np.flatnonzero(zeros)[0])
        raise ValueError(
            f"priority: expected numbers above 0 with eps=0, got 0 at position {at}: its row "
            "would never be drawn again. Nothing was changed. Give an eps above 0, such as 1e-8."
        )


def moved(leaves: np.ndarray, was: tuple[float, float], now: tuple[float, float]) -> np.ndarray:
    """Convert leaves to another alpha and eps; each pair is (alpha, eps).

    Raises:
        ValueError: alpha was 0, so that the leaves do not determine the priorities.
    """
    if was == now:
        return leaves
    (alpha, eps), found = was, np.zeros_like(leaves)
    if alpha == 0:
        raise ValueError(
            "with alpha=0 all rows have the same probability, and their priorities are unknown, "
            "so alpha and eps cannot change. Create another sampler, or start with a small alpha, "
            "such as 1e-3."
        )
    alive = leaves > 0
    with np.errstate(over="ignore", under="ignore"):  # `leaves_of` rejects infinite leaves
        priority = np.maximum(leaves[alive].astype(np.float64) ** (1 / alpha) - eps, 0)
    found[alive] = leaves_of(priority, *now)
    return found


def number(name: str, value: Any) -> float:
    """Return a finite number of at least 0, or raise `ValueError`."""
    found = None if isinstance(value, (bool, str)) else value
    try:
        found = None if found is None else float(found)
    except (TypeError, ValueError):
        found = None
    if found is None or not 0 <= found < np.inf:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value!r}.")
    return found
