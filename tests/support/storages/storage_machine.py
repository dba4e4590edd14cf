"""State machine that runs random operations on a storage, and compares it with a NumPy model."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.storage import DiskStorage, open_storage, verify
from tallyroll.storage.errors import (
    BatchTooLong,
    IndexOutOfRange,
    NoSlices,
    NotAnAppend,
    ReadOnlyStorage,
    RowsMismatch,
    StateMismatch,
    StorageClosed,
    StorageFull,
    StorageLocked,
    UnknownTrajectory,
)
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.rows.keys import CUT, Key
from tallyroll.storage.stores.rewinds import rewind_to

_MOST_ROWS = 12
"""Maximum number of rows of a write to a storage without a ring."""


class RowsModel:
    """Model of a storage: arrays of all rows that were not rewound, and the valid range.

    Args:
        ring: the number of slots; 0: every row is kept.
        steps: rows per trajectory.
    """

    def __init__(self, ring: int, steps: int) -> None:
        self.ring, self.steps = ring, steps
        self.columns: dict[Key, np.ndarray] = {}
        self.records: list[tuple[int, bytes]] = []
        self.head = self.floor = 0
        """The number of committed rows, and the row below which `empty` or a rewind left no row."""
        self.rewinds = self.finalized = self._used = 0
        """The number of rewinds, of rows at finalization, and of rows that took slots."""

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The number of rows when the newest record was written, and the record."""
        return self.records[-1] if self.records else None

    def next_rows(self, count: int) -> TensorDict:
        """Return the next rows. After a rewind, they differ from the rows that they replace."""
        rows = trajectory_rows(self.head, count, steps=self.steps)
        rows["next", "reward"] += 1000 * self.rewinds
        return rows

    def append(self, rows: TensorDictBase, record: bytes | None = None) -> None:
        """Commit rows, and a record if there is one."""
        new = arrays_of(rows)
        old = self.columns or {key: array[:0] for key, array in new.items()}
        self.columns = {key: np.concatenate([old[key], new[key]]) for key in new}
        self.head += len(rows)
        self._used = max(self._used, self.head)
        if record is not None:
            self.records.append((self.head, record))

    def empty(self) -> None:
        """Remove all rows; the numbers of later rows continue."""
        self.floor = self.head
        self._used = max(self._used, self.head + self.ring)  # no slot contains a row any more

    def rewind(self, rows: int) -> None:
        """Rewind to ``rows`` rows."""
        if rows < self.head:
            self.columns = {key: array[:rows] for key, array in self.columns.items()}
            self.records = [each for each in self.records if each[0] <= rows]
            self.head, self.rewinds = rows, self.rewinds + 1
            if not self.ring or self._used >= rows + self.ring or self.floor > rows:
                self._used, self.floor = rows, rows if self.ring else 0
            elif self._used > self.ring:
                self.floor = max(self.floor, self._used - self.ring)

    @property
    def span(self) -> range:
        """The numbers of the rows that are left."""
        used = self._used - self.ring if self.ring else 0
        return range(min(self.head, max(self.floor, used)), self.head)

    @property
    def by_index(self) -> np.ndarray:
        """The row number at each index; the rows of a ring are in slot order."""
        numbers = np.arange(self.span.start, self.span.stop)
        return numbers[np.argsort((numbers - self.floor) % self.ring)] if self.ring else numbers

    def index_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the index of each row, given the row numbers."""
        place = {number: index for index, number in enumerate(self.by_index.tolist())}
        return np.array([place[number] for number in numbers.tolist()], np.int64)

    def assert_same(self, found: TensorDictBase, numbers: np.ndarray) -> None:
        """Assert that ``found`` contains the rows with these numbers [*], bit for bit."""
        assert found.batch_size == numbers.shape
        arrays = arrays_of(found)
        assert arrays
        assert arrays.keys() <= self.columns.keys()
        for key, array in arrays.items():
            np.testing.assert_array_equal(array, self.columns[key][numbers], strict=True)


class StorageMachine(RuleBasedStateMachine):
    """Hypothesis state machine of a storage on disk; subclasses set ``storage_class``.

    ::

        class MyMachine(StorageMachine):
            storage_class = MyStorage

        TestMyStorage = MyMachine.TestCase

    The machine creates, writes, reads, reserves, empties, finalizes, closes and reopens storages in
    each mode, while a second reader may be open. After each operation, rows, row numbers and the
    record must equal those of `RowsModel`. At the end, `verify` must find nothing.
    """

    storage_class: type[DiskStorage]
    max_size: int | None = None
    """The number of slots of a ring; None: every row is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tallyroll-machine-"))
        self.path = self.folder / "rows"
        self.reader: DiskStorage | None = None
        """A second, read-only object for the storage."""

    @initialize(steps=st.integers(1, 7), capacity=st.integers(1, 40))
    def create(self, steps: int, capacity: int) -> None:
        """Create a storage, which has no columns yet."""
        self.storage = self._make(capacity=capacity)
        self.model = RowsModel(self.storage.ring, steps)

    def _make(self, **options: Any) -> DiskStorage:
        return self.storage_class(self.path, max_size=self.max_size, **options)

    # -- writing

    @rule(
        count=st.integers(0, _MOST_ROWS),
        as_arrays=st.booleans(),
        record=st.none() | st.binary(max_size=20),
    )
    def extend(self, count: int, as_arrays: bool, record: bytes | None) -> None:
        """Append rows, as a TensorDict or as arrays."""
        rows, storage, model = self.model.next_rows(count), self.storage, self.model
        data = arrays_of(rows) if as_arrays else rows
        if storage.mode == "read":
            with pytest.raises(ReadOnlyStorage):
                storage.extend(data, record=record)
        elif 0 < model.ring < count:
            with pytest.raises(BatchTooLong):
                storage.extend(data, record=record)
        else:
            numbers = self._written(lambda: storage.extend(data, record=record), count)
            assert numbers == range(model.head, model.head + count)
            model.append(rows, record)

    @precondition(lambda self: self.storage.mode != "read")
    @rule(count=st.integers(1, _MOST_ROWS))
    def extend_a_buffer(self, count: int) -> None:
        """Append rows through a replay buffer, possibly more rows than a ring has slots."""
        rows, model = self.model.next_rows(count), self.model
        buffer = ReplayBuffer(storage=self.storage, batch_size=1)
        index = self._written(lambda: buffer.extend(rows), count)
        model.append(rows)
        left = np.arange(max(model.head - count, model.span.start), model.head)
        np.testing.assert_array_equal(index.numpy()[count - len(left) :], model.index_of(left))

    def _written(self, write: Callable[[], Any], count: int) -> Any:
        """Run a write and return its result; reserve more space first if the format cannot grow."""
        try:
            return write()
        except StorageFull:
            assert not self.storage.grows
            self._close_reader()  # otherwise it would read the file that is replaced
            self.storage.reserve(self.model.head + count)
            return write()

    @precondition(lambda self: self.has_columns and self.storage.mode != "read")
    @rule(missing=st.sampled_from(["observation", "next", "collector"]))
    def extend_by_other_columns(self, missing: str) -> None:
        """Check that rows without one of the columns are refused."""
        with pytest.raises(RowsMismatch):
            self.storage.extend(self.model.next_rows(2).exclude(missing))

    @precondition(lambda self: self.storage.mode != "read")
    @rule(rows=st.integers(1, 60))
    def reserve(self, rows: int) -> None:
        """Reserve space; a format that cannot grow replaces its file."""
        if not self.storage.grows:
            self._close_reader()
        self.storage.reserve(rows)

    @precondition(lambda self: self.has_columns and self.storage.mode != "read")
    @rule()
    def empty(self) -> None:
        """Empty the storage through a replay buffer, which only a ring permits."""
        buffer = ReplayBuffer(storage=self.storage, batch_size=1)
        if self.model.span and not self.model.ring:
            with pytest.raises(NotAnAppend):
                buffer.empty()
        else:
            buffer.empty()
            self.model.empty()

    @precondition(lambda self: self.has_columns and self.storage.mode != "read")
    @rule(share=st.floats(0, 1))
    def rewind(self, share: float) -> None:
        """Rewind the storage; a rewind that would remove finalized rows is refused."""
        model, rows = self.model, round(share * self.model.head)
        record = next((each for each in reversed(model.records) if each[0] <= rows), None)
        if rows < model.finalized:
            with pytest.raises(StateMismatch):
                rewind_to(self.storage.writer, rows, record)
        else:
            assert rewind_to(self.storage.writer, rows, record) == model.head - rows
            model.rewind(rows)

    # -- opening and closing

    @rule(mode=st.sampled_from(["append", "append", "read"]), finalize=st.booleans())
    def reopen(self, mode: Any, finalize: bool) -> None:
        """Close or finalize the storage, and open it again; create it if there is no file yet."""
        storage, has_columns = self.storage, self.has_columns
        if finalize and has_columns and storage.mode != "read":
            if not storage.grows:
                self._close_reader()
            storage.finalize()
            self.model.finalized = self.model.head
        storage.close()
        storage.close()
        with pytest.raises(StorageClosed):
            storage.get(0)
        self.storage = self._make(mode=mode) if has_columns else self._make(capacity=9)
        if self.model.ring and mode == "append":
            self.model.finalized = 0  # a ring is no longer finalized after it is reopened to append

    @precondition(lambda self: self.has_columns)
    @rule()
    def open_a_second_reader(self) -> None:
        """Open a second reader, which stays open during later operations."""
        self._close_reader()
        self.reader = open_storage(self.path)

    @precondition(lambda self: self.has_columns and self.storage.mode != "read")
    @rule()
    def open_a_second_writer(self) -> None:
        """Check that a second writer is refused."""
        with pytest.raises(StorageLocked):
            self.storage_class(self.path, mode="append")

    def _close_reader(self) -> None:
        if self.reader is not None:
            self.reader.close()
            self.reader = None

    # -- reading

    @precondition(lambda self: self.has_columns)
    @rule(data=st.data())
    def get(self, data: st.DataObject) -> None:
        """Read rows by an index of any kind."""
        by_index = self.model.by_index
        count = len(by_index)
        index = data.draw(_indices(count), label="index")
        keys = data.draw(
            st.sampled_from([None, ["observation"], [("next", "reward"), ("collector", "step")]])
        )
        wanted = by_index[np.asarray(index) if isinstance(index, torch.Tensor) else index]
        for storage in self._opened():
            self.model.assert_same(storage.get(index, keys), np.asarray(wanted))
            with pytest.raises(IndexOutOfRange):
                storage.get(count)

    @precondition(lambda self: self.has_columns)
    @rule()
    def read_columns(self) -> None:
        """Read each column as one array in slot order."""
        numbers = np.array(self.model.span, np.int64)
        for storage in self._opened():
            slots = storage.slots_of(numbers)
            np.testing.assert_array_equal(storage.index_of(numbers), self.model.index_of(numbers))
            for key, array in self.model.columns.items():
                np.testing.assert_array_equal(storage.column(key)[slots], array[numbers])

    @precondition(lambda self: self.has_columns)
    @rule()
    def read_trajectories(self) -> None:
        """Read the remaining rows of each trajectory."""
        numbers = np.array(self.model.span, np.int64)
        ids = numbers // self.model.steps
        for storage in self._opened():
            assert list(storage.trajectories) == list(dict.fromkeys(ids.tolist()))
            for id, rows in storage.trajectories.items():
                self.model.assert_same(rows, numbers[ids == id])
            with pytest.raises(UnknownTrajectory):
                storage.trajectories[self.model.head + 1]

    @precondition(lambda self: self.has_columns)
    @rule(length=st.integers(1, 5), seed=st.integers(0, 2**32))
    def sample_slices(self, length: int, seed: int) -> None:
        """Draw slices of trajectories."""
        model = self.model
        starts = [
            number
            for number in model.span
            if number + length <= model.head
            and number // model.steps == (number + length - 1) // model.steps
        ]
        for storage in self._opened():
            generator = torch.Generator().manual_seed(seed)
            if not starts:
                with pytest.raises(NoSlices):
                    storage.trajectories.sample_slices(4, length, generator)
                continue
            slices = storage.trajectories.sample_slices(4, length, generator)
            first = slices["observation"][:, 0, 0].long().numpy()
            assert {*first.tolist()} <= {*starts}
            unmarked = slices.select("observation", ("next", "reward"), "collector")
            model.assert_same(unmarked.exclude(CUT), first[:, None] + np.arange(length))

    @invariant()
    def holds_the_rows_of_the_model(self) -> None:
        """Compare all rows, row numbers and the record with the model."""
        model = self.model
        for storage in self._opened():
            assert (len(storage), storage.head) == (len(model.span), model.head)
            assert storage.span == model.span
            assert storage.record == model.record
            if self.has_columns:
                model.assert_same(storage.in_order(), np.array(model.span, np.int64))

    def _opened(self) -> list[DiskStorage]:
        return [self.storage] if self.reader is None else [self.storage, self.reader]

    @property
    def has_columns(self) -> bool:
        """True after the first write, which creates the files."""
        return bool(self.model.columns)

    def teardown(self) -> None:
        """Close all storages, verify the files, and remove them."""
        try:
            self._close_reader()
            if hasattr(self, "storage"):
                self.storage.close()
                if self.has_columns:
                    report = verify(self.path)
                    assert report.sound, report.findings
        finally:
            shutil.rmtree(self.folder)


def _indices(count: int) -> st.SearchStrategy[Any]:
    """Return a strategy of indices into ``count`` rows."""
    mask = st.lists(st.booleans(), min_size=count, max_size=count)
    found = st.slices(count) | mask.map(lambda drawn: np.array(drawn, np.bool_))
    if not count:
        return found
    number = st.integers(-count, count - 1)
    return (
        found
        | number
        | st.lists(number, max_size=9).map(lambda drawn: torch.tensor(drawn, dtype=torch.int64))
    )


def arrays_of(rows: TensorDictBase) -> dict[Key, np.ndarray]:
    """Return the columns of rows as arrays."""
    leaves = rows.items(include_nested=True, leaves_only=True)
    return {key if isinstance(key, tuple) else (key,): leaf.numpy() for key, leaf in leaves}
