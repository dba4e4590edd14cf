"""The trajectories of a storage, as a mapping from ids to rows."""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.errors import NoSlices, Overrun, UnknownTrajectory
from tallyroll.storage.rows.keys import CUT, DONE, Key, is_done
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.episodes import END_NAMES, table_dtype

if TYPE_CHECKING:
    from tallyroll.storage.row_store import RowStore


_PATIENCE_SECONDS: Final = 1.0


class Trajectories(Mapping[int, TensorDict]):
    """The trajectories that have rows in a storage, in the order of their first rows.

    A mapping: ``trajectories[id]`` are the rows of one, ``for id, rows in
    trajectories.items()`` goes through all. Whatever one asks for is brought up to the
    rows that are committed at that moment; `table` holds all that is known of
    trajectories at one moment.

    In a ring the first rows of a trajectory may be overwritten: then `whole` is False,
    and the rows are those that are left.

    Raises:
        ColumnsMissing: the rows do not say which trajectory they belong to.
    """

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, store: RowStore) -> None:
        self._store, self._index = store, store._index

    @property
    def table(self) -> np.ndarray:
        """One line a trajectory: a structured array [trajectories], see `episodes`."""
        if self._store._engine is None:
            self._store._require_open()
            return np.empty(0, table_dtype())
        return self._index.table(self._store)

    @property
    def ids(self) -> np.ndarray:
        """int64 [trajectories]."""
        return self._field("id")

    @property
    def lanes(self) -> np.ndarray:
        """The lane of each, int32 [trajectories]."""
        return self._field("lane")

    @property
    def lengths(self) -> np.ndarray:
        """Rows that each had when it was counted, int64 [trajectories]."""
        return self._field("length")

    @property
    def returns(self) -> np.ndarray:
        """The sum of each one's rewards, float64 [trajectories]."""
        return self._field("return")

    @property
    def ends(self) -> np.ndarray:
        """The end of each: ``"terminated"``, ``"truncated"``, ``"cut"``, or still ``"open"``.

        Text [trajectories]. Cut are those that neither ended nor go on: the next one of their
        lane has begun, or nobody writes any more.
        """
        names: np.ndarray = np.array(END_NAMES)[self._field("end")]
        return names

    @property
    def whole(self) -> np.ndarray:
        """Whether all rows of each are there, from step 0 on, bool [trajectories]."""
        # The rows first: what is overwritten meanwhile is then told.
        table = self.table
        whole: np.ndarray = (table["first_step"] == 0) & (
            table["first_row"] >= self._store.span.start
        )
        return whole

    def _field(self, name: str) -> np.ndarray:
        return np.ascontiguousarray(self.table[name])

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._store!r})"

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __contains__(self, id: object) -> bool:
        try:
            return len(self.rows_of(id)) > 0
        except (UnknownTrajectory, TypeError, ValueError):
            return False

    def rows_of(self, id: Any) -> np.ndarray:
        """The numbers of a trajectory's rows, in time order, [rows].

        Raises:
            UnknownTrajectory: no row of it is stored.
        """
        with self._index.lock:
            store, last = self._store, None
            if store.head:
                last = self._index.episodes(store).last_row(int(id))
                first = store.span.start
            if last is None or last < first:
                raise _unknown(store, id)
            return self._index.links(store).back_from(last, first)

    def __getitem__(self, id: int) -> TensorDict:
        """The rows of a trajectory, batch size [rows]; raises as `rows_of`."""
        found = self._rows(self.rows_of(id))
        if not len(found):
            raise _unknown(self._store, id)
        return found

    def items(self) -> ItemsView[int, TensorDict]:
        """Pairs of id and rows; the storage is not asked again for what there is."""
        return _Items(self)

    def values(self) -> ValuesView[TensorDict]:
        """The rows of one trajectory after the other."""
        return _Values(self)

    def _each(self) -> Iterator[tuple[int, TensorDict]]:
        store, table = self._store, self.table
        for id, last in zip(table["id"].tolist(), table["last_row"].tolist(), strict=True):
            with self._index.lock:
                links, first = self._index.links(store), store.span.start
                rows = links.back_from(last, first) if last >= first else np.empty(0, np.int64)
            if len(rows) and len(found := self._rows(rows)):
                yield id, found

    def _rows(self, rows: np.ndarray) -> TensorDict:
        """The rows of these numbers [n] that are left, copied."""
        store = self._store
        columns = store._running().columns()
        slots = store.slots_of(rows)
        arrays = [column.take(slots, axis=0) for column in columns]
        # Overwritten while they were copied: the first ones.
        gone = int(np.searchsorted(rows, store.span.start))
        return store._nest([array[gone:] for array in arrays])

    def sample_slices(
        self, num_slices: int, slice_len: int, generator: torch.Generator | None = None
    ) -> TensorDict:
        """Slices drawn uniformly, with replacement, among all that there are.

        A slice is ``slice_len`` consecutive steps of one trajectory. At its last row
        ``("next", "done")``, and that of each group of agents, is True, so that value
        estimators stop there, and ``("collector", "cut")`` where the trajectory goes on;
        terminated and truncated stay as they are. A ring may be written by another process
        meanwhile.

        Args:
            num_slices: how many.
            slice_len: rows a slice.
            generator: of random numbers; None is torch's own.

        Returns:
            A TensorDict [num_slices, slice_len].

        Raises:
            NoSlices: no trajectory is that long.
            Overrun: the ring is overwritten faster than it is read.
        """
        _check_positive("num_slices", num_slices)
        _check_positive("slice_len", slice_len)
        rows = draw(self._store, num_slices, slice_len, generator)
        store, deadline = self._store, time.monotonic() + _PATIENCE_SECONDS
        engine = store._running()
        arrays = engine.gather(store.slots_of(rows))
        while (torn := np.flatnonzero(rows[:, 0] < store.span.start)).size:
            if time.monotonic() > deadline:
                raise Overrun(
                    f"{store.path} is a ring of {store.ring} rows, and its writer overwrites them "
                    f"faster than {num_slices} slices of {slice_len} can be read. Read fewer at a "
                    "time, or make the ring larger."
                )
            rows[torn] = draw(store, len(torn), slice_len, generator)
            slots = store.slots_of(rows[torn])
            for column, array in zip(engine.columns(), arrays, strict=True):
                array[torn] = column[slots]
        found = store._nest(arrays, rows.shape)
        # In place: they are copies.
        dones = {key: arrays[place] for key, place in done_places(engine.schema)}
        if marks := slice_marks(dones, *rows.shape):
            found.set(CUT, marks[CUT].reshape(found.batch_size))
        return found


class _Items(ItemsView[int, TensorDict]):
    _mapping: Trajectories

    def __iter__(self) -> Iterator[tuple[int, TensorDict]]:
        return self._mapping._each()


class _Values(ValuesView[TensorDict]):
    _mapping: Trajectories

    def __iter__(self) -> Iterator[TensorDict]:
        return (rows for _, rows in self._mapping._each())


def draw(
    store: RowStore, num_slices: int, slice_len: int, generator: torch.Generator | None
) -> np.ndarray:
    """The row numbers of slices, [num_slices, slice_len]; see `Trajectories.sample_slices`."""
    if not store.head:
        raise NoSlices(f"{store.path} has no rows yet to draw slices from. Collect some first.")
    index, deadline = store._index, time.monotonic() + _PATIENCE_SECONDS
    while True:
        with index.lock:
            links = index.links(store)
            first = store.span.start if store.ring else 0
            try:
                return links.draw(num_slices, slice_len, first, _drawn_by(generator))
            except NoSlices:
                # All that it knows of may be overwritten while this process slept.
                if links.seen == store.head or time.monotonic() > deadline:
                    raise


def done_places(schema: Schema) -> list[tuple[Key, int]]:
    """Every done column, that of the root and those of groups, and its place in the schema.

    None where the root has none: then nothing says whether a trajectory goes on.
    """
    if DONE not in schema:
        return []
    columns = enumerate(schema.columns)
    return [(column.key, at) for at, column in columns if is_done(column.key, column.dtype)]


def slice_marks(
    dones: Mapping[Key, np.ndarray], num_slices: int, slice_len: int
) -> dict[Key, torch.Tensor]:
    """Values at the last row of each slice that differ from the stored ones, by key.

    Args:
        dones: copies of what is stored, bool [num_slices * slice_len, ...], which are written.
        num_slices: how many slices.
        slice_len: rows a slice.
    """
    marks: dict[Key, torch.Tensor] = {}
    for key, done in dones.items():
        last = done.reshape(num_slices, slice_len, -1)[:, -1]
        if key == DONE:
            cut = np.zeros((num_slices, slice_len), np.bool_)
            cut[:, -1] = ~last.any(axis=1)
            marks[CUT] = torch.from_numpy(cut.reshape(-1))
        last[:] = True
        marks[key] = torch.from_numpy(done)
    return marks


def _drawn_by(generator: torch.Generator | None) -> Any:
    """``pick(count, below)``: as many numbers from 0 to ``below - 1``, drawn uniformly."""
    device = None if generator is None else generator.device

    def pick(count: int, below: int) -> np.ndarray:
        numbers = torch.randint(below, (count,), generator=generator, device=device)
        return numbers.numpy(force=True)

    return pick


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is a whole number above 0, got {value!r}.")


def _unknown(store: RowStore, id: object) -> UnknownTrajectory:
    return UnknownTrajectory(
        f"{store.path} has no rows of trajectory {id}. See storage.trajectories.ids for those that "
        "there are."
    )
