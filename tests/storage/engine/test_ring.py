"""Test rings: their arithmetic against plain lists, and storages that overwrite the oldest rows."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.engine import ring as ring_
from tallyroll.storage.engine.columns import ArrayRows, Columns, TensorRows
from tallyroll.storage.errors import (
    BatchTooLong,
    IndexOutOfRange,
    NotAnAppend,
    StateMismatch,
    StorageLocked,
    UnsupportedPlatform,
)
from tallyroll.storage.files.commit_header import word_of

from storage_contract import arrays, rows

# -- the arithmetic


@given(st.integers(1, 12), st.integers(0, 60), st.data())
def test_pieces_cover_every_row_once_in_its_slot(size: int, start: int, data: Any) -> None:
    count = data.draw(st.integers(0, size))
    placed = [
        (slot + i, start + row + i)
        for slot, row, length in ring_.pieces(start, start + count, size)
        for i in range(length)
    ]
    assert placed == [(row % size, row) for row in range(start, start + count)]


@given(st.integers(1, 12), st.integers(0, 60), st.data())
def test_valid_rows_are_those_that_nobody_began_to_overwrite(
    size: int, head: int, data: Any
) -> None:
    reserve = head + data.draw(st.integers(0, size))
    slots: list[int | None] = [None] * size
    for row in range(head):
        slots[row % size] = row
    for row in range(head, reserve):
        slots[row % size] = None
    valid = [row for row in slots if row is not None]
    first = min(head, ring_.first_valid(reserve, size))
    assert sorted(valid) == list(range(first, head))
    at = ring_.slots_at(np.arange(len(valid)), head, reserve, size)
    assert [slots[slot] for slot in at] == valid
    assert ring_.rows_in(at, head, size).tolist() == valid


def test_without_a_ring_rows_are_slots() -> None:
    assert ring_.first_valid(9, 0) == 0
    assert ring_.pieces(3, 8, 0) == [(3, 0, 5)]
    assert ring_.slots_of(7, 0) == 7
    index = np.arange(5)
    assert ring_.slots_at(index, 5, 8, 0) is index
    assert ring_.rows_in(index, 5, 0) is index


# -- storages


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ring"


def assert_holds(storage: MemmapStorage, numbers: range) -> None:
    """Check that the storage holds exactly these rows, each in its slot."""
    assert storage.span == numbers
    assert len(storage) == len(numbers)
    number = np.arange(numbers.start, numbers.stop)
    got = storage.get(torch.from_numpy(storage.slots_of(number)))
    want = rows(0, numbers.stop)[numbers.start :]
    assert (got == want).all()
    if storage.head >= storage.ring:
        by_slot = storage.get(slice(None))
        assert (by_slot[storage.slots_of(number)] == want).all()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 40),
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    reopen=st.sets(st.integers(0, 11)),
    write_nbytes=st.sampled_from([1, 2**14]),
)
def test_a_ring_holds_the_newest_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    counts: list[int],
    reopen: set[int],
    write_nbytes: int,
) -> None:
    monkeypatch.setattr("tallyroll.storage.engine.columns._WRITE_NBYTES", write_nbytes)
    path = tmp_path / "ring"
    shutil.rmtree(path, ignore_errors=True)
    storage = MemmapStorage(path, max_size=size)
    head = 0
    for step, count in enumerate(counts):
        count = min(count, size)
        assert storage.extend(rows(head, count)) == range(head, head + count)
        head += count
        if step in reopen:
            storage.close()
            storage = MemmapStorage(path, mode="append")
            assert storage.ring == storage.max_size == size
        assert_holds(storage, range(max(0, head - size), head))
        with open_storage(path) as reader:
            assert_holds(reader, range(max(0, head - size), head))
    storage.close()
    assert sum(f.stat().st_size for f in path.rglob("*.memmap")) == (
        min(size, head) * storage_row_nbytes(path)
    )


def storage_row_nbytes(path: Path) -> int:
    with open_storage(path) as storage:
        return storage.schema.row_nbytes


def test_more_rows_at_once_than_slots_are_refused(path: Path) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 7))
        with pytest.raises(
            BatchTooLong, match="at most 10 rows at once, the size of its ring, got 11"
        ):
            storage.extend(rows(7, 11))
        assert_holds(storage, range(7))
        storage.extend(rows(7, 10))
        assert_holds(storage, range(7, 17))


def test_too_many_first_rows_make_no_files(path: Path) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        with pytest.raises(
            BatchTooLong, match="at most 10 rows at once, the size of its ring, got 11"
        ):
            storage.extend(rows(0, 11))
        assert not path.exists()
        storage.set(range(11), rows(0, 11))  # only the last rows stay
        assert_holds(storage, range(1, 11))


def test_a_ring_is_opened_as_the_ring_that_it_is(path: Path) -> None:
    MemmapStorage(path, max_size=10).close()
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 10))
        storage.extend(rows(10, 2))
    with pytest.raises(ValueError, match=r"max_size=11 was given, but .* is a ring of 10 rows"):
        MemmapStorage(path, mode="append", max_size=11)
    with MemmapStorage(path, mode="append", max_size=10) as storage:
        assert_holds(storage, range(2, 12))
    with MemmapStorage(path.with_name("grows")) as storage:
        storage.extend(rows(0, 12))
    with pytest.raises(ValueError, match="keeps every row"):
        MemmapStorage(path.with_name("grows"), mode="read", max_size=10)
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="max_size: expected a positive number"):
            MemmapStorage(path.with_name("wrong"), max_size=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [H5Storage, ZarrStorage])
def test_only_memory_maps_are_rings(kind: Any, path: Path) -> None:
    with pytest.raises(ValueError, match=rf"max_size=9 requests a ring, but {kind.__name__} keeps"):
        kind(path, max_size=9, capacity=9)
    assert not path.exists()


def interrupted(storage: MemmapStorage, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Append 6 rows of noise, and stop when half of the columns are overwritten."""
    copy = ArrayRows.copy_to

    def half(self: ArrayRows, columns: Columns, slot: int) -> None:
        copy(ArrayRows(self.values[: len(self.values) // 2]), columns, slot)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ArrayRows, "copy_to", half)
        with pytest.raises(KeyboardInterrupt):
            storage.extend(rows(at + 1000, 6))


@pytest.mark.parametrize("before", [12, 17, 20, 8, 4, 1])
def test_half_overwritten_rows_are_gone_until_new_ones_take_their_place(
    path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    size = 10
    storage = MemmapStorage(path, max_size=size)
    for start in range(0, before, 4):
        storage.extend(rows(start, min(4, before - start)))
    interrupted(storage, before, monkeypatch)
    left = range(min(before, max(0, before + 6 - size)), before)
    assert storage.span == left
    assert_gathers(storage, left)
    storage.close()
    with open_storage(path) as reader:
        assert_gathers(reader, left)
    storage = MemmapStorage(path, mode="append")
    assert_gathers(storage, left)
    head = before
    for _ in range(5):
        storage.extend(rows(head, 2))
        head += 2
        assert_gathers(storage, range(max(0, left.start, head - size), head))
    assert_holds(storage, range(max(left.start, head - size), head))
    storage.close()


def assert_gathers(storage: MemmapStorage, numbers: range) -> None:
    """Check all valid rows with every way to read them, in any slots."""
    assert storage.span == numbers
    want = {number: rows(number, 1)[0] for number in numbers}
    for got in (
        storage.get(torch.arange(len(numbers))),
        storage.get(slice(None)),
        storage.get(list(range(len(numbers)))),
    ):
        assert len(got) == len(numbers)
        if len(numbers):
            found = {int(row["id"]): row for row in got}
            assert found.keys() == want.keys()
            assert all((found[number] == want[number]).all() for number in want)
    with pytest.raises(IndexOutOfRange):
        storage.get(len(numbers))


@pytest.mark.parametrize("kind", [ReplayBuffer, TensorDictReplayBuffer])
def test_replay_buffers_write_round_and_round(path: Path, kind: type[ReplayBuffer]) -> None:
    storage = MemmapStorage(path, max_size=10)
    buffer = kind(storage=storage, batch_size=200)
    head = 0
    for count in (3, 4, 9, 1, 10, 2):
        index = buffer.extend(rows(head, count))
        assert index.tolist() == [row % 10 for row in range(head, head + count)]
        assert (buffer[index].exclude("index") == rows(head, count)).all()
        head += count
        assert_holds(storage, range(max(0, head - 10), head))
    assert buffer.add(rows(head, 1)[0]) == head % 10
    head += 1
    assert len(buffer) == 10
    assert storage._is_full
    assert storage._last_cursor_index == (head - 1) % 10
    numbers = set(buffer.sample()["id"].tolist())
    assert numbers == set(range(head - 10, head))
    storage.close()
    with MemmapStorage(path, mode="append") as again:
        buffer = kind(storage=again, sampler=SamplerWithoutReplacement(), batch_size=10)
        assert sorted(buffer.sample()["id"].tolist()) == list(range(head - 10, head))
        assert buffer.extend(rows(head, 2)).tolist() == [head % 10, (head + 1) % 10]
        assert_holds(again, range(head - 8, head + 2))
        with pytest.raises(NotAnAppend, match="directly after the last row"):
            again.set(torch.tensor([0, 1, 2]), rows(0, 3))


def test_dumps_and_loads_keep_slots_and_numbers(path: Path, tmp_path: Path) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        buffer = ReplayBuffer(storage=storage)
        for start in range(0, 24, 3):
            buffer.extend(rows(start, 3))
        buffer.dumps(tmp_path / "dump")
        buffer.extend(rows(24, 3))
        buffer.dumps(tmp_path / "dump")
    with MemmapStorage(tmp_path / "other", max_size=10) as other:
        buffer = ReplayBuffer(storage=other)
        buffer.loads(tmp_path / "dump")
        assert_holds(other, range(17, 27))
        assert buffer.extend(rows(27, 2)).tolist() == [7, 8]
        assert_holds(other, range(19, 29))


def test_capacity_reserves_the_ring_at_once(path: Path) -> None:
    with MemmapStorage(path, max_size=10, capacity=1000) as storage:
        storage.extend(arrays(0, 2))
        nbytes = sum(file.stat().st_size for file in path.rglob("*.memmap"))
        assert nbytes == 10 * storage.schema.row_nbytes


def test_load_memmap_reads_the_slots_in_use(path: Path) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 9))
        storage.extend(rows(9, 4))
        storage.flush()
        shown = TensorDict.load_memmap(path)
        assert (shown == storage.get(slice(None))).all()


def test_counts_of_a_ring_may_run_ahead(path: Path) -> None:
    """A kill can leave rows reserved but not written."""
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 10))
    with open(path / "tallyroll.header", "r+b") as header:
        header.seek(64)
        header.write(word_of(13).to_bytes(8, "little"))
    with open_storage(path) as reader:
        assert_gathers(reader, range(3, 10))


def test_elsewhere_a_ring_is_not_read_while_it_is_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors other than x86-64 may make stores visible in another order."""
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 10))
        with pytest.raises(UnsupportedPlatform, match="being written, and on aarch64 a reader"):
            open_storage(path)
    with open_storage(path) as reader, open_storage(path) as another:
        assert_holds(reader, range(10))
        assert_holds(another, range(10))
        with pytest.raises(StorageLocked):
            MemmapStorage(path, mode="append")
    MemmapStorage(path, mode="append").close()
    with MemmapStorage(path.with_name("grows")) as storage:
        storage.extend(rows(0, 10))
        open_storage(path.with_name("grows")).close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(size=st.integers(4, 30), data=st.data(), write_nbytes=st.sampled_from([1, 2**14]))
def test_a_ring_is_given_its_own_rows(
    path: Path, monkeypatch: pytest.MonkeyPatch, size: int, data: st.DataObject, write_nbytes: int
) -> None:
    """The rows are views of slots that the same batch overwrites."""
    monkeypatch.setattr("tallyroll.storage.engine.columns._WRITE_NBYTES", write_nbytes)
    shutil.rmtree(path, ignore_errors=True)
    ring, model = MemmapStorage(path, max_size=size), np.zeros(size, np.int64)
    head = 0

    def extend(rows: Any, values: np.ndarray) -> None:
        nonlocal head
        model[(head + np.arange(len(values))) % size] = values
        head += len(values)
        assert ring.extend(rows) == range(head - len(values), head)
        np.testing.assert_array_equal(ring.column("x"), model[: min(head, size)])

    for start in range(0, data.draw(st.integers(1, 2 * size)), 4):
        values = np.arange(start, start + 4)
        extend(TensorDict({"x": torch.from_numpy(values)}, [4]), values)
    for _ in range(4):
        if data.draw(st.booleans()):
            ring.close()
            ring = MemmapStorage(path, mode="append")
        held = min(head, size)
        start = data.draw(st.integers(0, held - 1))
        stop = data.draw(st.integers(start + 1, held))
        step = data.draw(st.sampled_from([1, 1, 2]))
        own = ring.column("x")[start:stop:step]
        values = own.copy()
        which = data.draw(st.sampled_from(["column", "tensor", "get", "fresh"]))
        if which == "column":
            extend({("x",): own}, values)
        elif which == "fresh":
            extend(TensorDict({"x": torch.from_numpy(values)}, [len(values)]), values)
        elif which == "get":
            # Rows from `get` carry the order in which they were written.
            age = (head - 1 - np.arange(size)[start:stop:step]) % size
            extend(ring.get(slice(start, stop, step)), values[np.argsort(-age)])
        else:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # it is read-only
                tensor = torch.from_numpy(own)
            extend(TensorDict({"x": tensor}, [len(values)]), values)
    ring.close()


@pytest.mark.parametrize("shift", [1, 68, 700])
def test_a_ring_is_given_many_of_its_own_rows(path: Path, shift: int) -> None:
    """There are more rows than one read covers before the first write, and their size is known."""
    size, count = 3000, 1403
    model = np.zeros(size, np.int64)
    with MemmapStorage(path, max_size=size) as ring:
        for start in range(0, 3 * count, count):
            values = np.arange(start, start + count)
            ring.extend(TensorDict({"x": torch.from_numpy(values)}, [count]))
            model[values % size] = values
        slot = ring.head % size
        own = ring.get(slice(slot - shift, slot - shift + count))
        model[slot : slot + count] = model[slot - shift : slot - shift + count].copy()
        ring.extend(TensorDict({"x": own["x"]}, [count]))  # without the order of the rows
        np.testing.assert_array_equal(ring.column("x"), model)


@pytest.mark.parametrize("form", [rows, arrays])
def test_power_durability_syncs_the_reserve_before_it_overwrites(
    path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    """If no row is overwritten, only data and head are synced."""
    with MemmapStorage(path, max_size=10, durability="power") as storage:
        storage.extend(form(0, 3))
        engine, done = storage.reader.engine, []
        assert engine is not None
        header = engine._header

        def note(name: str, real: Any) -> Any:
            def noted(*args: Any) -> Any:
                done.append((name, header.reserve, header.head))
                return real(*args)

            return noted

        for kind in (ArrayRows, TensorRows):
            monkeypatch.setattr(kind, "copy_to", note("rows", kind.copy_to))
        monkeypatch.setattr(header, "sync", note("header", header.sync))
        monkeypatch.setattr(engine._format, "sync", note("data", engine._format.sync))
        storage.extend(form(3, 7))
        assert done == [("rows", 10, 3), ("data", 10, 3), ("header", 10, 10)]
        done.clear()
        storage.extend(form(10, 1))
        assert done == [("header", 11, 10), ("rows", 11, 10), ("data", 11, 10), ("header", 11, 11)]
        done.clear()
        storage.extend(form(11, 10))
        assert done[0] == ("header", 21, 11)
        assert done[-2:] == [("data", 21, 11), ("header", 21, 21)]


@pytest.mark.parametrize("size", [None, 9, 11])
def test_a_dump_of_a_ring_of_another_size_is_refused(
    path: Path, tmp_path: Path, size: int | None
) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        storage.extend(rows(0, 10))
        storage.extend(rows(10, 5))
        storage.dumps(tmp_path / "dump")
    other = MemmapStorage(tmp_path / "other", max_size=size)
    wording = rf"other has max_size={size}, but .*dump has max_size=10\. Use the same max_size"
    with other, pytest.raises(StateMismatch, match=wording):
        other.loads(tmp_path / "dump")
    assert not (tmp_path / "other").exists()


def test_loads_repairs_a_copy_that_was_interrupted(path: Path, tmp_path: Path) -> None:
    with MemmapStorage(path, max_size=10) as storage:
        buffer = ReplayBuffer(storage=storage)
        for start in range(0, 15, 5):
            buffer.extend(rows(start, 5))
        buffer.dumps(tmp_path / "dump")
    with MemmapStorage(tmp_path / "other", max_size=10) as other:
        ReplayBuffer(storage=other).loads(tmp_path / "dump")
        header = other.reader.engine._header  # type: ignore[union-attr]
        header.set_reserve(header.head + 10)  # as before the last word of a copy is stored
        assert len(other) == 0
        ReplayBuffer(storage=other).loads(tmp_path / "dump")
        assert_holds(other, range(5, 15))
