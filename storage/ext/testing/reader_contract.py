"""Tests that every reader of rows must pass: subclass `ReaderContract`."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from torchrl.data import TensorDictReplayBuffer
from torchrl.data.replay_buffers import RandomSampler, SamplerWithoutReplacement

from tallyroll.storage import MemmapStorage, TrajectorySliceSampler, n_step, open_storage, verify
from tallyroll.storage.errors import ColumnsMissing, IndexOutOfRange, ReadOnlyStorage
from tallyroll.storage.readers.row_reader import RowReader, take_rows
from tallyroll.storage.rows.keys import LANE, POLICY_VERSION, STEP, TRAJ_IDS, Key
from tallyroll.storage.storages import DiskStorage

_LANES, _SLOTS = 3, 47
_LENGTHS = (5, 1, 8, 3, 12)
_SETTINGS = settings(
    max_examples=40,
    # Several classes inherit the contract.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors],
    deadline=None,
)


class _Paths(NamedTuple):
    file: Path
    other: Path


class _Both(NamedTuple):
    file: DiskStorage
    """The rows in Tallyroll's own files."""
    other: DiskStorage
    """The same rows through the reader under test."""

    @property
    def readers(self) -> tuple[RowReader, RowReader]:
        return self.file.reader, self.other.reader


class ReaderContract:
    """Contract of a reader; subclasses define how to write rows that the reader can read.

    Register the reader, so that `open_storage` finds it. The tests compare all results of the
    reader with the results for Tallyroll's own files, bit for bit.
    """

    def write_rows(self, source: DiskStorage, path: Path) -> None:
        """Write the rows and the manifest of ``source`` to ``path``, which does not exist."""
        raise NotImplementedError

    def rows(self) -> TensorDict:
        """Return the rows to compare, in the order of the reader."""
        return collected()

    @pytest.fixture
    def paths(self, tmp_path: Path) -> _Paths:
        """The paths of a storage with the rows that `rows` returns, and of the reader's copy."""
        with MemmapStorage(tmp_path / "file") as storage:
            for rows in self.rows().split([20, 1, 64, _LANES * _SLOTS - 85]):
                storage.extend(rows)
        with open_storage(tmp_path / "file") as file:
            self.write_rows(file, tmp_path / "other")
        return _Paths(tmp_path / "file", tmp_path / "other")

    @pytest.fixture
    def both(self, paths: _Paths) -> Iterator[_Both]:
        """Both storages, opened."""
        with open_storage(paths.file) as file, open_storage(paths.other) as other:
            yield _Both(file, other)

    # -- rows

    def test_it_says_what_it_holds(self, both: _Both) -> None:
        file, other = both.readers
        assert other.schema == file.schema
        assert other.keys == file.keys
        assert other.runs == file.runs
        assert len(other.span) == len(other) == len(both.other) == len(file)
        assert other.head == other.span.stop
        assert other.path == Path(both.other.path)
        assert (both.other.mode, both.other.closed) == ("read", False)

    @_SETTINGS
    @given(data=st.data())
    def test_a_column_gives_rows_in_any_order_and_shape(self, both: _Both, data: Any) -> None:
        file, other = both.readers
        first = other.span.start
        shape = data.draw(st.sampled_from([(0,), (1,), (7,), (40,), (2, 3), (4, 0), (3, 2, 2)]))
        count = int(np.prod(shape))
        numbers = data.draw(st.lists(st.integers(0, len(file) - 1), min_size=count, max_size=count))
        rows = np.array(numbers, np.int64).reshape(shape)
        for key, column in zip(other.keys, other.schema.columns, strict=True):
            wanted = file.column(key).take(rows)
            _assert_same(other.column(key).take(first + rows), wanted)
            out = np.empty((*shape, *column.shape), column.numpy_dtype)
            other.column(key).take(first + rows, out=out)
            _assert_same(out, wanted)

    @_SETTINGS
    @given(ends=st.tuples(st.integers(0, _LANES * _SLOTS), st.integers(0, _LANES * _SLOTS)))
    def test_a_column_gives_stretches_of_rows(self, both: _Both, ends: tuple[int, int]) -> None:
        file, other = both.readers
        start, stop = sorted(ends)
        first = other.span.start
        for key in other.keys:
            got = other.column(key).slice(first + start, first + stop)
            _assert_same(got, file.column(key).slice(start, stop))
            assert got.flags.c_contiguous

    def test_what_is_taken_is_a_copy(self, both: _Both) -> None:
        reader = both.other.reader
        rows = np.arange(reader.span.start, reader.span.stop)
        for key in reader.keys:
            once = reader.column(key).take(rows)
            before = once.copy()
            once[...] = 0
            _assert_same(reader.column(key).take(rows), before)

    def test_it_travels_as_its_path(self, both: _Both) -> None:
        with pickle.loads(pickle.dumps(both.other)) as there:
            assert type(there) is type(both.other)
            assert_same_rows(there.get(slice(None)), both.file.get(slice(None)))

    def test_a_column_that_is_not_there(self, both: _Both) -> None:
        with pytest.raises(KeyError):
            both.other.reader.column(("nobody",))

    def test_rows_are_taken_by_number(self, both: _Both) -> None:
        file, other = both.readers
        rows = np.array([[3, 0], [len(file) - 1, 3]])
        assert_same_rows(take_rows(other, other.span.start + rows), take_rows(file, rows))
        for row in (other.span.start - 1, other.span.stop):
            with pytest.raises(IndexOutOfRange):
                take_rows(other, np.array([row]))

    @pytest.mark.parametrize(
        "index",
        [
            0,
            -1,
            slice(None),
            slice(2, 90, 7),
            slice(60, 3, -4),
            range(5, 1),
            [3, -1, 3],
            torch.tensor([[1, 2], [-1, 0]]),
            torch.arange(_LANES * _SLOTS) % 3 == 1,
        ],
        ids=str,
    )
    def test_an_index_gives_what_it_gives_on_a_file(self, both: _Both, index: Any) -> None:
        assert_same_rows(both.other.get(index), both.file.get(index))
        assert_same_rows(both.other[index], both.file[index])

    @pytest.mark.parametrize(
        "keys", [["observation"], [("next", "reward"), "pixels"], [("next", "agents", "done")]]
    )
    @pytest.mark.parametrize("index", [-1, slice(2, 90, 7), torch.tensor([[1, 2], [-1, 0]])])
    def test_only_columns_that_are_wanted(self, both: _Both, index: Any, keys: list[Any]) -> None:
        wanted = both.file.get(index)
        for storage in both:
            found = storage.get(index, keys)
            leaves = dict(found.items(include_nested=True, leaves_only=True))
            assert [*leaves] == keys
            assert found.batch_size == wanted.batch_size
            for key, leaf in leaves.items():
                _assert_same(_bits(leaf), _bits(wanted[key]))

    def test_columns_that_are_wanted_and_not_there(self, both: _Both) -> None:
        for storage in both:
            assert list(storage.get([0], "pixels").keys()) == ["pixels"]
            with pytest.raises(ColumnsMissing, match="got none"):
                storage.get([0], [])
            with pytest.raises(ColumnsMissing, match="got pixels, next/sound"):
                storage.get([0], ["pixels", ("next", "sound")])

    def test_a_column_as_one_array(self, both: _Both) -> None:
        for key in both.file.schema.keys:
            _assert_same(both.other.column(key), both.file.column(key))

    # -- trajectories

    def test_trajectories(self, both: _Both) -> None:
        file, other = both.file.trajectories, both.other.trajectories
        table, wanted = other.table.copy(), file.table
        for name in ("first_row", "last_row"):
            table[name] -= both.other.span.start
        _assert_same(table, wanted)
        assert list(other) == list(file)
        for (id, rows), (wanted_id, wanted_rows) in zip(other.items(), file.items(), strict=True):
            assert id == wanted_id
            assert_same_rows(rows, wanted_rows)
            assert_same_rows(other[id], rows)

    @pytest.mark.parametrize("length", [1, 3, 8])
    def test_slices(self, both: _Both, length: int) -> None:
        drawn = [
            each.trajectories.sample_slices(20, length, torch.Generator().manual_seed(3))
            for each in both
        ]
        assert_same_rows(drawn[1], drawn[0])

    @pytest.mark.parametrize("n", [1, 3, 9])
    def test_n_steps(self, both: _Both, n: int) -> None:
        for index in (torch.arange(len(both.file)), torch.tensor([[5, -2], [0, 77]])):
            found, wanted = (n_step(each, index, n, 0.9) for each in (both.other, both.file))
            assert_same_rows(found, wanted)

    # -- replay buffers

    @pytest.mark.parametrize(
        "sampler", [RandomSampler, SamplerWithoutReplacement, lambda: TrajectorySliceSampler(4)]
    )
    def test_samples(self, paths: _Paths, sampler: Any) -> None:
        drawn = []
        for path in paths:
            with open_storage(path) as storage:
                buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler(), batch_size=32)
                torch.manual_seed(5)
                buffer.set_rng(torch.Generator().manual_seed(5))
                assert len(buffer) == len(storage)
                batches = [buffer.sample() for _ in range(4)]
                drawn.append([*batches, n_step(storage, batches[0], 3, 0.5)])
        for wanted, found in zip(*drawn, strict=True):
            assert_same_rows(found, wanted)

    def test_a_checkpoint_is_a_storage_with_these_rows(self, paths: _Paths, tmp_path: Path) -> None:
        with open_storage(paths.other) as other, open_storage(paths.file) as file:
            buffer = TensorDictReplayBuffer(storage=other, batch_size=4)
            buffer.dumps(tmp_path / "dump")
            with MemmapStorage(tmp_path / "restored") as storage:
                TensorDictReplayBuffer(storage=storage, batch_size=4).loads(tmp_path / "dump")
                assert_same_rows(storage.get(slice(None)), file.get(slice(None)))
                assert storage.reader.runs == file.reader.runs
            buffer.loads(tmp_path / "dump")  # the storage already has the rows

    def test_nothing_is_written_to_it(self, paths: _Paths) -> None:
        storage = open_storage(paths.other)
        count = len(storage)
        for write in (
            lambda: storage.extend(storage.get([0])),
            lambda: TensorDictReplayBuffer(storage=storage).extend(storage.get([0])),
            lambda: storage.initialise(storage.schema),
            lambda: storage.reserve(10),
            storage.finalize,
            lambda: storage.writer.put_record(b"{}"),
            lambda: open_storage(storage.path, mode="append"),
        ):
            with pytest.raises(ReadOnlyStorage, match="nothing writes to it"):
                write()
        assert len(storage) == count
        storage.close()

    # -- verify

    def test_verify_finds_what_it_finds_in_a_file(self, both: _Both) -> None:
        found, wanted = verify(both.other.path), verify(both.file.path)
        assert found.sound
        assert (found.rows, found.findings) == (wanted.rows, wanted.findings)

    def test_verify_finds_what_is_wrong(self, tmp_path: Path) -> None:
        rows = self.rows()
        rows["observation"][30, 1] = torch.nan
        rows["next", "observation"][50, 0] += 1
        rows[STEP][70] += 5
        with MemmapStorage(tmp_path / "file") as file:
            file.extend(rows, ids="fresh")
        with open_storage(tmp_path / "file") as file:
            self.write_rows(file, tmp_path / "other")
        found, wanted = verify(tmp_path / "other"), verify(tmp_path / "file")
        assert not wanted.sound
        skipped = {name for name in wanted.checked if name not in found.checked}
        assert skipped <= {"episodes", "checksums", "content"}  # these need optional side files
        assert found.findings == tuple(f for f in wanted.findings if f.check not in skipped)


def collected() -> TensorDict:
    """Return rows as a collector writes them: 47 steps of three lanes, slot by slot, [141]."""
    generator = torch.Generator().manual_seed(1)
    place = torch.arange(_LANES * _SLOTS)
    lane, slot = place % _LANES, place // _LANES
    step, ends = torch.empty_like(place), torch.zeros_like(place, dtype=torch.bool)
    number = torch.empty_like(place)
    for each in range(_LANES):
        lengths = _LENGTHS[each:] + _LENGTHS
        steps = torch.cat([torch.arange(n) for n in lengths * 3])[:_SLOTS]
        mine = lane == each
        step[mine] = steps
        ends[mine] = torch.cat([torch.arange(n) == n - 1 for n in lengths * 3])[:_SLOTS]
        number[mine] = (steps == 0).cumsum(0) - 1
    rows: dict[Key, torch.Tensor] = {}
    shapes: dict[Key, tuple[torch.dtype, tuple[int, ...]]] = {
        ("observation",): (torch.float32, (4,)),
        ("pixels",): (torch.uint8, (5, 3, 2)),
        ("agents", "observation"): (torch.bfloat16, (2, 3)),
    }
    for key, (dtype, shape) in shapes.items():
        # Each lane has one more state than rows; a final state is not the start of any row.
        states = torch.rand(_SLOTS + 1, _LANES, *shape, generator=generator)
        finals = torch.rand(_SLOTS, _LANES, *shape, generator=generator)
        states, finals = ((255 * each + 1).to(dtype) for each in (states, finals))
        rows[key] = states[slot, lane]
        final = ends.reshape(-1, *(1 for _ in shape))
        rows["next", *key] = torch.where(final, finals[slot, lane], states[slot + 1, lane])
    terminated = ends & (number % 2 == 0)
    rows |= {
        ("action",): torch.randint(5, (len(place),), generator=generator),
        ("is_init",): (step == 0)[:, None],
        ("next", "reward"): torch.randn(len(place), 1, generator=generator),
        ("next", "done"): ends[:, None],
        ("next", "terminated"): terminated[:, None],
        ("next", "truncated"): (ends & ~terminated)[:, None],
        ("next", "agents", "done"): ends[:, None, None].expand(-1, 2, 1),
        TRAJ_IDS: lane + _LANES * number,
        STEP: step,
        LANE: lane.int(),
        POLICY_VERSION: slot // 20,
    }
    return TensorDict(
        {key: leaf.contiguous() for key, leaf in rows.items()}, [len(place)]
    ).unflatten_keys()


def assert_same_rows(found: TensorDictBase, wanted: TensorDictBase) -> None:
    """Assert that both have the same keys, shapes and bits."""
    assert found.batch_size == wanted.batch_size
    leaves, others = (
        dict(each.items(include_nested=True, leaves_only=True)) for each in (found, wanted)
    )
    assert list(leaves) == list(others)
    for key, leaf in leaves.items():
        assert leaf.dtype == others[key].dtype, key
        _assert_same(*(_bits(each) for each in (leaf, others[key])))


def _bits(leaf: torch.Tensor) -> np.ndarray:
    found: np.ndarray = (leaf.view(torch.int16) if leaf.dtype is torch.bfloat16 else leaf).numpy()
    return found


def _assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()
