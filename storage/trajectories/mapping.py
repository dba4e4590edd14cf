"""The trajectories of a storage as a mapping from ids to rows."""

from __future__ import annotations

import time
from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import NoSlices, StorageError, UnknownTrajectory
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import MASK, STEP
from tallyroll.storage.rows.pages import counted
from tallyroll.storage.trajectories.columns import numbers_of
from tallyroll.storage.trajectories.episodes import END_NAMES, table_dtype
from tallyroll.storage.trajectories.index import IndexedReader
from tallyroll.storage.trajectories.slice_columns import SliceColumns
from tallyroll.storage.trajectories.windows import (
    By,
    Short,
    Slices,
    Windows,
    check_positive,
    draw_slices,
)

_PATIENCE_SECONDS: Final = 1.0
_NUMBER_NBYTES: Final = 16
"""Bytes of a row number and its mask while slices are drawn."""
_LARGE_NBYTES: Final = 2**28
"""The size in bytes above which a sample is compared with the available memory before the draw."""


_MOST_COUNTED: Final = 100_000
"""The number of rows up to which a repr counts trajectories, in 30 ms, if they are not counted."""


class Trajectories(Mapping[int, TensorDict]):
    """Mapping of the trajectories that have rows in a storage, in the order of their first rows.

    ``print(trajectories)`` shows their number and lengths. ``trajectories[id]`` returns the rows of
    one trajectory, and ``for id, rows in trajectories.items()`` iterates over all. Every access
    includes the rows that are committed at that moment. `table` is a consistent snapshot of all
    facts about trajectories.

    In a ring, the first rows of a trajectory may be overwritten. Then `whole` is False, and the
    mapping returns the remaining rows.

    Args:
        reader: the reader of the rows.
        owner: an object to keep alive while the mapping is in use, because its finalizer closes the
            reader.

    Raises:
        ColumnsMissing: the rows have no trajectory columns.

    Examples:
        >>> from tallyroll.collector import SyncCollector
        >>> from tallyroll.storage import MemmapStorage
        >>> storage = MemmapStorage()
        >>> with SyncCollector(
        ...     "CartPole-v1",
        ...     frames_per_batch=12,
        ...     total_frames=12,
        ...     max_frames_per_traj=5,
        ...     storage=storage,
        ... ) as collector:
        ...     stored = collector.collect(12)
        >>> trajectories = storage.trajectories
        >>> print(trajectories.lengths, trajectories.returns, trajectories.ends)
        [5 5 2] [5. 5. 2.] ['truncated' 'truncated' 'open']
        >>> trajectories[1]["observation"].shape
        torch.Size([5, 4])
        >>> trajectories.sample_slices(32, 4)["observation"].shape
        torch.Size([32, 4, 4])
        >>> storage.close()
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, reader: IndexedReader, owner: object = None) -> None:
        self._reader, self._owner = reader, reader if owner is None else owner
        self._index = reader.trajectory_index

    @property
    def table(self) -> np.ndarray:
        """The episode table, a structured array [trajectories]; see `episodes` for the fields."""
        if not self._reader.initialised and not self._reader.head:
            return np.empty(0, table_dtype())
        return self._index.table(self._reader)

    @property
    def ids(self) -> np.ndarray:
        """The ids of the trajectories, int64 [trajectories]."""
        return self._field("id")

    @property
    def lanes(self) -> np.ndarray:
        """The lane of each trajectory, int32 [trajectories]."""
        return self._field("lane")

    @property
    def lengths(self) -> np.ndarray:
        """The number of rows of each trajectory when it was counted, int64 [trajectories]."""
        return self._field("length")

    @property
    def returns(self) -> np.ndarray:
        """The sum of the rewards of each trajectory, float64 [trajectories]."""
        return self._field("return")

    @property
    def ends(self) -> np.ndarray:
        """The end of each trajectory: ``"terminated"``, ``"truncated"``, ``"cut"`` or ``"open"``.

        An array of text, [trajectories]. A trajectory is cut if it did not end and cannot continue,
        because the next trajectory of its lane has begun or no process writes any more.
        """
        names: np.ndarray = np.array(END_NAMES)[self._field("end")]
        return names

    @property
    def whole(self) -> np.ndarray:
        """True if all rows of a trajectory from step 0 on are stored, bool [trajectories]."""
        # Read the table first, so that rows overwritten meanwhile are missing from the span.
        table = self.table
        whole: np.ndarray = (table["first_step"] == 0) & (
            table["first_row"] >= self._reader.span.start
        )
        return whole

    def _field(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.table[name])

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        """Describe the trajectories, without counting many rows."""
        try:
            found = f"{self._counts()}, "
        except (StorageError, OSError):
            found = ""
        return f"Trajectories({found}{self._owner!r})"

    def _counts(self) -> str:
        reader = self._reader
        if not reader.initialised and not reader.head:
            return "0 trajectories"
        if (rows := self._index.uncounted(reader)) > _MOST_COUNTED:
            return f"len() counts them in {rows:,} rows"
        if not len(lengths := self.lengths):
            return "0 trajectories"
        return (
            f"{counted(len(lengths), 'trajectory')} of {lengths.min():,} to {lengths.max():,} rows "
            f"(mean {lengths.mean():,.1f})"
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, id: object) -> bool:
        try:
            return len(self.rows_of(id)) > 0
        except (UnknownTrajectory, TypeError, ValueError):
            return False

    def rows_of(self, id: Any) -> np.ndarray:
        """Return the numbers of a trajectory's rows in time order, [rows].

        Raises:
            UnknownTrajectory: no row of the trajectory is stored.
        """
        return read_consistently(self._reader, lambda: self._rows_of(id))

    def _rows_of(self, id: Any) -> np.ndarray:
        with self._index.lock:
            reader, number = self._reader, int(id)
            rows = np.empty(0, np.int64)
            if reader.head:
                rows = self._index.rows(reader).rows_of(number, reader.span.start)
            if not len(rows):
                raise _unknown(reader, id)
            return rows

    def __getitem__(self, id: int) -> TensorDict:
        """Return the rows of a trajectory, with batch size [rows]; see `rows_of` for the errors."""
        found = read_consistently(self._reader, lambda: self._rows(self._rows_of(id)))
        if not len(found):
            raise _unknown(self._reader, id)
        return found

    def items(self) -> ItemsView[int, TensorDict]:
        """Return pairs of id and rows, for the trajectories that exist when iteration begins."""
        return _Items(self, self._each)

    def values(self) -> ValuesView[TensorDict]:
        """Return the rows of the trajectories, one trajectory after the other."""
        return _Values(self, self._each)

    def _each(self) -> Iterator[tuple[int, TensorDict]]:
        reader = self._reader
        rewinds = reader.rewinds  # before the table, because a rewind may occur between the two
        table = self.table
        for id, last in zip(table["id"].tolist(), table["last_row"].tolist(), strict=True):
            with self._index.lock:
                index, first = self._index.rows(reader), reader.span.start
                taken_back = last >= index.seen or rewinds != reader.rewinds
                left = first <= last and not taken_back
                rows = index.back_from(last, first) if left else np.empty(0, np.int64)
            found = self._rows(rows) if len(rows) else None
            if taken_back or rewinds != reader.rewinds:  # a rewind has invalidated the table
                found = self.get(id)
            if found is not None and len(found):
                yield id, found

    def _rows(self, rows: np.ndarray) -> TensorDict:
        """Return copies of the rows [n] that have not been overwritten."""
        reader = self._reader
        arrays = reader.copies(rows)
        # Leading rows may have been overwritten during the copy.
        gone = int(np.searchsorted(rows, reader.span.start))
        return reader.nest([array[gone:] for array in arrays], (len(rows) - gone,))

    def sample_slices(
        self,
        num_slices: int,
        slice_len: int,
        generator: torch.Generator | None = None,
        *,
        short: Short = "skip",
        by: By = "window",
        from_start: bool = False,
        burn_in: int = 0,
    ) -> TensorDict:
        """Draw slices of trajectories uniformly, with replacement.

        A slice is ``slice_len`` consecutive steps of one trajectory. At its last row ``("next",
        "done")`` is True, at the root and in each group of agents, so that value estimators stop
        there. ``("collector", "cut")`` is True there if the trajectory continues. Terminated and
        truncated keep their values. ``"is_init"`` is True at the first row, from whose stored state
        recurrent modules begin. Another process may write to a ring during the call.

        A trajectory of n rows has ``n - slice_len + 1`` windows, from which slices are drawn. With
        ``short="pad"``, a shorter trajectory is also a window. If ``"pad"`` or ``burn_in`` can
        leave positions empty, ``("collector", "mask")`` is True where there is a row, and all other
        values are zero where there is none.

        Args:
            num_slices: the number of slices.
            slice_len: the number of rows of a slice.
            generator: the source of random numbers; None: torch's default generator.
            short: the treatment of trajectories with fewer rows than a slice, including
                trajectories that still continue. ``"skip"`` does not draw them. ``"pad"`` draws
                them whole and pads the end. ``"error"`` draws them and raises if one is drawn.
            by: ``"window"`` gives every window the same probability. ``"trajectory"`` gives every
                trajectory that has a window the same probability, and then each of its windows. A
                trajectory with gaps, rows that were never stored, counts as several.
            from_start: draw only slices that begin at the first step of a trajectory, each with the
                same probability.
            burn_in: the number of rows before the slice that warm up a recurrent state. Near the
                beginning of a trajectory there are fewer rows, preceded by empty positions.
                ``"is_init"`` is True at the first of these rows.

        Returns:
            A TensorDict [num_slices, burn_in + slice_len].

        Raises:
            NoSlices: no trajectory is long enough, or none is stored from its first step on.
            ShortTrajectory: with ``short="error"``, a drawn trajectory is shorter than a slice.
            Overrun: the ring is overwritten faster than it is read.
        """
        check_positive("num_slices", num_slices)
        windows = Windows(slice_len, short, by, from_start, burn_in)
        return read_consistently(self._reader, lambda: self._slices(num_slices, windows, generator))

    def _slices(
        self, num_slices: int, windows: Windows, generator: torch.Generator | None
    ) -> TensorDict:
        slices = draw(self._reader, num_slices, windows, generator)
        rows, mask = slices.rows, slices.mask
        reader, deadline = self._reader, time.monotonic() + _PATIENCE_SECONDS
        arrays = reader.gather(rows)
        while (torn := rows[:, 0] < reader.span.start).any():
            if time.monotonic() > deadline:
                raise reader.overrun(f"{num_slices} slices of {windows.length}")
            again = draw(reader, int(torn.sum()), windows, generator)
            rows[torn] = again.rows
            if mask is not None:
                mask[torn] = again.mask
            for array, values in zip(arrays, reader.copies(rows[torn]), strict=True):
                array[torn] = values
        # In place, because the arrays are copies.
        if mask is not None:
            for array in arrays:
                array[~mask] = 0
        found = _slice_columns(reader).marked(arrays, slices, reader.nest)
        if windows.padded:
            found.set(MASK, torch.from_numpy(mask))
        return found


_Each: TypeAlias = Callable[[], Iterator[tuple[int, TensorDict]]]


class _Items(ItemsView[int, TensorDict]):
    def __init__(self, mapping: Trajectories, each: _Each) -> None:
        super().__init__(mapping)
        self._each = each

    def __iter__(self) -> Iterator[tuple[int, TensorDict]]:
        return self._each()


class _Values(ValuesView[TensorDict]):
    def __init__(self, mapping: Trajectories, each: _Each) -> None:
        super().__init__(mapping)
        self._each = each

    def __iter__(self) -> Iterator[TensorDict]:
        return (rows for _, rows in self._each())


def draw(
    reader: IndexedReader, num_slices: int, windows: Windows, generator: torch.Generator | None
) -> Slices:
    """Draw the row numbers of slices; see `Trajectories.sample_slices`."""
    if not len(reader.span):
        raise NoSlices(f"{reader.path} has no rows yet to draw slices from. Collect some first.")
    _require_room(reader, num_slices, windows.length)
    index, deadline = reader.trajectory_index, time.monotonic() + _PATIENCE_SECONDS
    pick = _drawn_by(generator)
    while True:
        with index.lock:
            known = index.rows(reader)
            first = reader.span.start
            try:
                return draw_slices(known, windows, num_slices, first, pick, _steps_in(reader))
            except NoSlices:
                # All rows that the index knows may have been overwritten while this process slept.
                if known.seen == reader.head or time.monotonic() > deadline:
                    raise


def _require_room(reader: IndexedReader, num_slices: int, length: int) -> None:
    nbytes = num_slices * length * (_slice_columns(reader).row_nbytes + _NUMBER_NBYTES)
    if nbytes > _LARGE_NBYTES:
        what = f"{num_slices:,} slices of {length:,} rows"
        require_memory(nbytes, what, "Ask for fewer slices, or shorter ones.")


def _slice_columns(reader: IndexedReader) -> SliceColumns:
    return reader.trajectory_index.columns_of_slices(reader.schema)


def _steps_in(reader: IndexedReader) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: numbers_of(reader.column(STEP).take(rows))


def _drawn_by(generator: torch.Generator | None) -> Any:
    """Return ``pick(count, below)``, which draws ``count`` integers from 0 to ``below - 1``."""
    device = None if generator is None else generator.device

    def pick(count: int, below: int) -> np.ndarray:
        numbers = torch.randint(below, (count,), generator=generator, device=device)
        return numbers.numpy(force=True)

    return pick


def _unknown(reader: IndexedReader, id: object) -> UnknownTrajectory:
    return UnknownTrajectory(
        f"{reader.path} has no rows of trajectory {id}. See storage.trajectories.ids for the "
        "existing ids."
    )
