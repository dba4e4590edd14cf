"""Columns of a packed storage: rows of an array, or states and their frames."""
# ruff: noqa: D102 - `ColumnReader` documents the methods of all columns

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tallyroll.storage.engine.available_memory import is_small_allocation, require_memory
from tallyroll.storage.errors import CorruptStorage
from tallyroll.storage.ext.packed.chunk_cache import CachedArray
from tallyroll.storage.ext.packed.layout import StatesLayout
from tallyroll.storage.ext.packed.stacks import frames_of, stacked, state_of, what_is_wrong
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.rows.schema import Column

Tables: TypeAlias = tuple[np.ndarray | None, np.ndarray | None]
"""The breaks and the starts of states; see `StatesLayout`."""


def _as_they_are(found: np.ndarray) -> np.ndarray:
    return found


@dataclass(frozen=True)
class RowRequest:
    """Rows of an array, and a function that converts them to the values of a column."""

    array: CachedArray
    rows: np.ndarray
    made: Callable[[np.ndarray], np.ndarray] = _as_they_are


def copied(wanted: Sequence[RowRequest]) -> list[np.ndarray]:
    """Return the values of columns, with one read for all columns of the same array.

    This saves time because the state and the next state of a row are usually in the same chunk.
    """
    found: dict[CachedArray, Iterator[np.ndarray]] = {}
    for each in wanted:
        if (array := each.array) not in found:
            rows = [other.rows for other in wanted if other.array is array]
            found[array] = iter(array.take_each(rows))
    return [each.made(next(found[each.array])) for each in wanted]


class PackedColumn(ColumnReader):
    """A column of packed rows whose values are derived from an array."""

    @property
    @abstractmethod
    def source(self) -> CachedArray:
        """The array from which the values are derived."""

    @abstractmethod
    def wanted(self, rows: np.ndarray) -> RowRequest:
        """Return the rows of the array from which the values of ``rows`` [*] are derived."""


class RowsColumn(PackedColumn):
    """A column that is stored as an array; ``first`` is the number of its first row."""

    def __init__(self, array: CachedArray, first: int) -> None:
        self._array, self._first = array, first

    @property
    def source(self) -> CachedArray:
        return self._array

    def wanted(self, rows: np.ndarray) -> RowRequest:
        return RowRequest(self._array, rows - self._first if self._first else rows)

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self._array.take(rows - self._first if self._first else rows, out)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self._array.slice(start - self._first, stop - self._first)


class States:
    """States of a packed storage, and the positions of their frames.

    Args:
        path: the storage, for messages.
        layout: the layout of the states.
        array: a function that returns an array by its index.
        rows: the number of rows.
    """

    def __init__(
        self, path: object, layout: StatesLayout, array: Callable[[int], CachedArray], rows: int
    ) -> None:
        self.layout, self.path, self._array, self._rows = layout, path, array, rows
        self._lock = threading.Lock()
        self._found: Tables | None = None

    @property
    def frames(self) -> CachedArray:
        """The array of the frames."""
        return self._array(self.layout.frames)

    def frame_of(self, states: np.ndarray) -> np.ndarray:
        """Return the frames of ``states`` [n], for states with one frame each."""
        return states

    def tables(self) -> Tables:
        """Return the breaks and the starts, which are read once.

        Raises:
            CorruptStorage: the tables are inconsistent with the rows.
            NotEnoughMemory: there is not enough memory for the tables.
        """
        if self._found is None:
            with self._lock:
                self._found = self._read()
        return self._found

    def _read(self) -> Tables:
        layout = self.layout
        breaks, starts = (self._whole(place) for place in (layout.breaks, layout.starts))
        frames = self.frames.layout.rows
        if wrong := what_is_wrong(breaks, starts, self._rows, layout.states, frames, layout.n):
            raise CorruptStorage(
                f"{self.path} has invalid states: {wrong}. Restore it from a copy."
            )
        return breaks, starts

    def _whole(self, place: int | None) -> np.ndarray | None:
        if place is None:
            return None
        array = self._array(place)
        count = array.layout.rows
        if not is_small_allocation(nbytes := 3 * count * array.layout.row_nbytes):
            require_memory(nbytes, f"a table of {count:,} states of {self.path}")
        found = array.slice(0, count)
        array.close_files()  # the array is not read again
        return found


class StateColumn(PackedColumn):
    """A column whose values are the states of rows, or their next states.

    Args:
        states: the states.
        column: the column.
        is_next: True if the column contains next states.
        first: the number of the first row.
    """

    def __init__(self, states: States, column: Column, is_next: bool, first: int) -> None:
        self.states, self.is_next = states, is_next
        self._column, self._first = column, first

    @property
    def source(self) -> CachedArray:
        return self.states.frames

    def wanted(self, rows: np.ndarray) -> RowRequest:
        breaks, starts = self.states.tables()
        state = state_of(rows.reshape(-1) - self._first, breaks, self.is_next)
        frames = self.states.frames
        if starts is None:
            return RowRequest(frames, self.states.frame_of(state).reshape(rows.shape))
        at, zeros = frames_of(state, starts, self.states.layout.n)
        shape = (*rows.shape, *self._column.shape)
        return RowRequest(frames, at, lambda found: self._stacked(found, zeros, shape))

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        breaks, starts = self.states.tables()
        state = state_of(rows.reshape(-1) - self._first, breaks, self.is_next)
        frames, layout = self.states.frames, self.states.layout
        shape = (*rows.shape, *self._column.shape)
        if starts is None:
            return frames.take(self.states.frame_of(state).reshape(rows.shape), out)
        at, zeros = frames_of(state, starts, layout.n)
        if out is not None and layout.axis == 0:
            target = out.reshape(*at.shape, *frames.layout.shape)
            frames.take(at, target)
            target[zeros] = 0
            return out
        found = frames.take(at)
        return self._stacked(found, zeros, shape, out)

    def _stacked(
        self,
        found: np.ndarray,
        zeros: np.ndarray,
        shape: tuple[int, ...],
        out: np.ndarray | None = None,
    ) -> np.ndarray:
        if zeros.any():
            found[zeros] = 0
        stacks = stacked(found, self.states.layout.axis).reshape(shape)
        if out is None:
            return stacks
        out[...] = stacks
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        breaks, starts = self.states.tables()
        rows = np.arange(start - self._first, max(start, stop) - self._first)
        frames, layout = self.states.frames, self.states.layout
        state = state_of(rows, breaks, self.is_next)
        if not len(rows):
            return np.empty((0, *self._column.shape), self._column.numpy_dtype)
        if starts is None:
            at = self.states.frame_of(state)
            first = int(at[0])
            found = frames.slice(first, int(at[-1]) + 1)
            if len(found) == len(rows):
                return found
            return found.take(at - first, axis=0)
        at, zeros = frames_of(state, starts, layout.n)
        first = int(at.min())
        found = frames.slice(first, int(at.max()) + 1).take(at - first, axis=0)
        return self._stacked(found, zeros, (len(rows), *self._column.shape))
