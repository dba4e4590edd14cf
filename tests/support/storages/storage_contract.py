"""Tests that every storage on disk must pass, in any format: subclass `StorageContract`.

A fork server, which has imported torch once, starts the other processes.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import hashlib
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, tensorclass
from torchrl.data import ReplayBuffer, TensorDictReplayBuffer
from torchrl.data.replay_buffers import (
    ImmutableDatasetWriter,
    RandomSampler,
    RoundRobinWriter,
    SamplerWithoutReplacement,
    SliceSampler,
)

from tallyroll.storage import (
    RowsMismatch,
    Schema,
    SchemaMismatch,
    StorageExists,
    StorageFull,
    StorageLocked,
    StorageMissing,
    open_storage,
)
from tallyroll.storage.engine.commit_engine import Engine
from tallyroll.storage.errors import (
    CursorOverflow,
    IndexOutOfRange,
    InvalidProvenance,
    InvalidSchema,
    NotAnAppend,
    NotAStorage,
    NotInitialised,
    NotPicklable,
    ReadOnlyStorage,
    RecordTooLarge,
    StateMismatch,
    StorageClosed,
    TrajectoryIdTaken,
    WriterForked,
)
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.format_versions import FORMAT_VERSION
from tallyroll.storage.files.record_slots import RECORD_LIMIT
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.storages import DiskStorage

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload([__name__, "h5py"])  # otherwise each process would import them
WAIT_SECONDS = 60.0

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
)


def _held_by_this_process() -> tuple[int, int]:
    """Return the number of file descriptors and of memory maps of this process."""
    gc.collect()
    with open("/proc/self/maps", "rb") as maps:
        return len(os.listdir("/proc/self/fd")), sum(1 for _ in maps)


def rows(start: int, count: int) -> TensorDict:
    """Return rows whose values are all derived from the row number."""
    number = torch.arange(start, start + count)
    return TensorDict(
        {
            "id": number,
            "wide": (number[:, None] * 0.5 + torch.arange(3)).float(),
            "next": {"id": number + 1, "done": (number % 7 == 0)[:, None]},
        },
        [count],
    )


@tensorclass
class Rows:
    """`rows` as a tensorclass."""

    id: torch.Tensor
    wide: torch.Tensor
    next: TensorDict


def arrays(start: int, count: int) -> dict[tuple[str, ...], np.ndarray]:
    """Return `rows` as arrays by key."""
    found = rows(start, count)
    return {
        key: found[key].numpy() for key in (("id",), ("wide",), ("next", "id"), ("next", "done"))
    }


def assert_rows(storage: DiskStorage, count: int, *, start: int = 0) -> None:
    """Assert that the storage has `count` rows, and that those from `start` on equal `rows`."""
    assert len(storage) == count
    for key, expected in arrays(start, count - start).items():
        np.testing.assert_array_equal(storage.column(key)[start:], expected)


def files_of(path: Path) -> dict[str, str]:
    """Return the digest of each file of a storage except the lock, which names the last writer."""
    files = path.rglob("*") if path.is_dir() else path.parent.glob(path.name + "*")
    return {
        str(file.relative_to(path.parent)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
        if file.is_file() and "lock" not in file.name
    }


def is_there(kind: type[DiskStorage], path: Path) -> bool:
    """Return True if the storage has been created completely."""
    return kind._format_class(path).exists()


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a process that runs `target(connection, *args)`, and kill it at the end."""
    here, there = SERVER.Pipe()
    child = SERVER.Process(target=target, args=(there, *args), daemon=True)
    child.start()
    there.close()
    try:
        yield child, here
    finally:
        child.kill()
        child.join(WAIT_SECONDS)
        here.close()
        child.close()


def receive(connection: Connection) -> Any:
    """Return the next message; fail after a timeout."""
    assert connection.poll(WAIT_SECONDS), "the other process sent no message"
    return connection.recv()


def write_for_ever(
    connection: Connection, kind: type[DiskStorage], path: Path, size: int, capacity: int | None
) -> None:
    """Append batches of `size` rows with a record until killed; a full fixed-size file is enlarged.

    Send the number of rows at the beginning, and again after the first commit.
    """
    there = is_there(kind, path)
    storage = kind(path, mode="append" if there else "create", capacity=capacity)
    begun_at = head = storage.head
    connection.send(head)
    while True:
        try:
            storage.extend(arrays(head, size), record=str(head + size).encode())
        except StorageFull:
            storage.close()
            storage = kind(path, mode="append", capacity=4 * head + size)
            continue
        if head == begun_at:
            connection.send(head + size)
        head += size


def engine_of(storage: DiskStorage) -> Engine:
    """Return the engine of an open storage."""
    assert isinstance(storage.reader, FileReader)
    return storage.reader.running()


def hold_and_fork(connection: Connection, kind: type[DiskStorage], path: Path) -> None:
    """Open for writing, fork, and wait; the child tries to write and reports the result."""
    storage = kind(path, mode="append")
    engine_of(storage).right.look_at = float("inf")  # do not check the lock file again yet
    child = os.fork()
    if child == 0:
        try:
            storage.extend(rows(5, 1))
            said = "it wrote"
        except WriterForked as error:
            said = str(error)
        storage.close()
        connection.send((os.getpid(), said, len(files_of(path))))
    time.sleep(WAIT_SECONDS)


class StorageContract:
    """Contract of a storage class; subclasses set ``storage_class``.

    Set `default_capacity` if a new storage needs to know its number of rows, and `holds_bfloat16`
    to False if the format does not support it.
    """

    storage_class: type[DiskStorage]
    default_capacity: int | None = None
    holds_bfloat16 = True
    opened_class: type[DiskStorage] | None = None
    """The class that `open_storage` returns; None: ``storage_class``."""
    format_version = FORMAT_VERSION

    def make(self, path: Path, **options: Any) -> DiskStorage:
        if self.default_capacity and options.get("mode", "create") == "create":
            given = options.get("capacity")
            if given is None or (type(given) is int and 0 < given < self.default_capacity):
                options["capacity"] = self.default_capacity
        return self.storage_class(path, **options)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "rows"

    @pytest.fixture
    def five(self, path: Path) -> Path:
        """The path of a storage of five rows."""
        with self.make(path) as storage:
            storage.extend(rows(0, 5))
        return path

    # -- rows in and out

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype_comes_back_bit_for_bit(self, path: Path, dtype: torch.dtype) -> None:
        bits = torch.randint(0, 256, (9, 4, 16), dtype=torch.uint8)
        values = bits % 2 == 0 if dtype is torch.bool else bits.view(dtype)
        if dtype is torch.bfloat16 and not self.holds_bfloat16:
            with self.make(path) as storage:
                with pytest.raises(InvalidSchema, match=r"x is bfloat16, .* Convert it to float32"):
                    storage.extend(TensorDict({"x": values}, [9]))
                assert not path.exists()
            return
        with self.make(path) as storage:
            storage.extend(TensorDict({"x": values[:4], "s": values[:4, 0, 0]}, [4]))
            storage.extend(TensorDict({"x": values[4:], "s": values[4:, 0, 0]}, [5]))
        with self.make(path, mode="read") as storage:
            for got in (storage.get(slice(None)), storage.get(torch.arange(9))):
                assert got["x"].dtype is dtype
                assert got["x"].view(torch.uint8).equal(values.view(torch.uint8))
                assert got["s"].shape == (9,)

    def test_tensordicts_and_arrays_give_the_same_rows(self, path: Path) -> None:
        with self.make(path) as storage:
            assert storage.extend(rows(0, 3)) == range(3)
            assert storage.extend(arrays(3, 4)) == range(3, 7)
            assert_rows(storage, 7)

    def test_a_new_storage_takes_its_schema_from_arrays(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(arrays(0, 2))
            assert storage.schema == Schema.of(rows(0, 2))

    def test_odd_tensors_are_written_as_their_values(self, path: Path) -> None:
        leaf = torch.arange(12.0).reshape(3, 4)
        odd = TensorDict(
            {
                "transposed": leaf.T,
                "tracked": leaf.T.clone().requires_grad_(),
                "conjugated": torch.complex(leaf, leaf).T.conj(),
            },
            [4],
        )
        with self.make(path) as storage:
            storage.extend(odd)
            for key in odd.keys():
                assert storage.get(slice(None))[key].equal(odd[key].detach().resolve_conj())

    def test_a_batch_of_two_dimensions_is_rows_by_its_first(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(TensorDict({"x": torch.zeros(3, 2)}, [3, 2]))
            assert len(storage) == 3
            assert storage.get(slice(None)).batch_size == (3, 2)
            assert storage.get(torch.tensor([2, 0])).batch_size == (2, 2)
            assert storage.get(1).batch_size == (2,)

    @pytest.mark.parametrize(
        "index",
        [
            0,
            -1,
            np.int64(3),
            torch.tensor(2),
            slice(None),
            slice(2, 9, 3),
            slice(7, 2, -2),
            slice(5, 5),
            range(1, 8, 2),
            [3, -1, 3],
            [],
            np.array([0, 9]),
            torch.tensor([[1, 2], [-1, 0]]),
            torch.arange(10) % 2 == 0,
            (torch.tensor([4, 5]),),
            (slice(1, 3),),
        ],
        ids=repr,
    )
    def test_an_index_means_what_it_means_to_a_tensordict(self, path: Path, index: Any) -> None:
        with self.make(path) as storage:
            storage.extend(rows(0, 10))
            plain = index[0] if isinstance(index, tuple) else index
            if isinstance(plain, slice) and (plain.step or 1) < 0:
                plain = range(*plain.indices(10))
            expected = (
                rows(0, 10)[torch.as_tensor(list(plain), dtype=torch.long)]
                if isinstance(plain, range | list)
                else rows(0, 10)[plain]
            )
            got = storage.get(index)
            assert got.batch_size == expected.batch_size
            assert (got == expected).all()

    def test_columns_that_are_wanted_have_memory_of_their_own(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.extend(rows(0, 10))
            every, some = storage.get([3, 1]), storage.get([3, 1], ["wide", ("next", "id")])
            assert (some == every.select("wide", ("next", "id"))).all()
            again = storage.get([4, 4], [("next", "id"), "wide"])
            assert again["next", "id"].tolist() == [5, 5]
            assert (some == every.select("wide", ("next", "id"))).all()

    @pytest.mark.parametrize("index", [10, -11, [0, 10], torch.tensor([-11])], ids=repr)
    def test_an_index_beyond_the_rows_is_refused(self, path: Path, index: Any) -> None:
        with self.make(path) as storage:
            storage.extend(rows(0, 10))
            with pytest.raises(
                IndexOutOfRange, match=r"row -?1[01] is out of range: .* has 10 rows"
            ):
                storage.get(index)
            with pytest.raises(IndexOutOfRange, match="one value for each of the 10 rows"):
                storage.get(torch.ones(9, dtype=torch.bool))

    @pytest.mark.parametrize("index", [1.5, None, [0.5], (1, 2)], ids=repr)
    def test_values_that_are_no_index_are_refused(self, five: Path, index: Any) -> None:
        with self.make(five, mode="read") as storage, pytest.raises(TypeError, match=r"ind(ex|ic)"):
            storage.get(index)

    def test_gathered_rows_are_copies_and_slices_stay_in_this_process(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            storage.get([0])["id"].fill_(77)
            storage.get(0)["id"].fill_(77)
            storage.get(slice(0, 2))["id"].fill_(77)
            with pytest.raises(ValueError, match="read-only"):
                storage.column("id")[0] = 77
            assert_rows(storage, 5)
            with self.make(five, mode="read") as reader:
                assert_rows(reader, 5)

    @pytest.mark.parametrize("count", [5, 5000], ids=["copied", "mapped"])
    def test_what_is_written_to_a_slice_is_seen_in_that_slice_alone(
        self, path: Path, count: int
    ) -> None:
        """A write to one slice does not hide later rows from other slices."""
        with self.make(path, capacity=4 * count) as storage:
            storage.extend(arrays(0, count))
            with self.make(path, mode="read") as reader:
                for opened in (storage, reader):
                    before, whole = opened.get(slice(None)), opened.get(slice(None))
                    part, column = opened.get(slice(1, count, 2)), opened.get("wide")
                    numbers = opened.column("id")
                    numbers.flags.writeable = True  # torch ignores the flag
                    for leaf in (*whole.values(True, True), *part.values(True, True)):
                        leaf.zero_()
                    column.clamp_(-1, 0)
                    numbers[:] = 0
                    head = storage.head
                    storage.extend(arrays(head, count))
                    assert (before == rows(0, head)).all()
                    assert (opened.get(slice(None)) == rows(0, head + count)).all()
                    assert (opened.get("wide") == rows(0, head + count)["wide"]).all()
                    assert_rows(opened, head + count)
                    for leaf in (*whole.values(True, True), *part.values(True, True)):
                        assert not leaf.any()
                    assert not numbers.any()
                    assert (column <= 0).all()
        assert not whole["id"].any()  # after closing
        assert (before == rows(0, len(before))).all()

    def test_slices_that_are_gone_leave_nothing_and_many_may_be_held(self, path: Path) -> None:
        with self.make(path, capacity=20_000) as storage:
            storage.extend(arrays(0, 20_000))
            storage.get(slice(None))
            before = _held_by_this_process()
            for _ in range(300):
                storage.get(slice(3, None))["id"].zero_()
            slices = [storage.get(slice(start, None)) for start in range(50)]
            for start, each in enumerate(slices):
                assert each["id"][0] == start
                each["id"].zero_()
            assert_rows(storage, 20_000)
            descriptors, maps = _held_by_this_process()
            assert descriptors <= before[0]
            slices.clear()
            del each
            assert _held_by_this_process()[1] < before[1] + (maps - before[1]) // 4 + 10

    def test_rows_written_to_a_slice_are_appended_as_they_are_there(self, path: Path) -> None:
        with self.make(path, capacity=20_000) as storage:
            storage.extend(arrays(0, 5000))
            part = storage.get(slice(None))
            part["id"] += 5000
            part["wide"].copy_(rows(5000, 5000)["wide"])
            part["next", "id"] += 5000
            part["next", "done"].copy_(rows(5000, 5000)["next", "done"])
            storage.extend(part)
            assert_rows(storage, 10_000)

    def test_a_sampler_sees_true_rows_whatever_was_written_to_a_slice(self, path: Path) -> None:
        """Zero the flags of a slice, like a learner that marks the end of its rows."""
        with self.make(path, capacity=20_000) as storage:
            storage.extend(arrays(0, 5000))
            sampler = SliceSampler(slice_len=3, end_key=("next", "done"), cache_values=False)
            buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=300)
            buffer[:]["next", "done"].zero_()
            storage.extend(arrays(5000, 5000))
            slices = buffer.sample().reshape(-1, 3)
            assert not slices["next", "done"][:, :2].any()
            assert (slices["id"].diff(dim=1) == 1).all()
            assert (slices["id"][:, 0] < 5000).sum() > 20, "expected equally likely episodes"

    def test_slices_show_rows_that_came_after_an_earlier_slice(self, path: Path) -> None:
        with self.make(path, capacity=100) as storage:
            storage.extend(rows(0, 2))
            with self.make(path, mode="read") as reader:
                for head in range(2, 100, 7):
                    for opened in (storage, reader):
                        assert (opened.get(slice(None)) == rows(0, head)).all()
                        assert_rows(opened, head)
                    storage.extend(rows(head, 7))

    def test_an_unknown_column_is_named(self, five: Path) -> None:
        with self.make(five, mode="read") as storage, pytest.raises(KeyError, match="next/done"):
            storage.column("reward")

    def test_no_rows_are_no_commit_but_carry_a_record(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            assert storage.extend(rows(0, 0), record=b"r") == range(5, 5)
            assert storage.record == (5, b"r")
            assert_rows(storage, 5)

    @settings(
        max_examples=25,
        deadline=None,
        # Each format runs this test in its own class.
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(
        steps=st.lists(st.one_of(st.integers(0, 40), st.just("reopen"), st.just("record"))),
        capacity=st.one_of(st.none(), st.integers(1, 100)),
    )
    def test_any_appends_equal_a_list(
        self, tmp_path_factory: pytest.TempPathFactory, steps: list[Any], capacity: int | None
    ) -> None:
        path = tmp_path_factory.mktemp("any") / "rows"
        storage, head, record = self.make(path, capacity=capacity), 0, None
        storage.initialise(Schema.of(rows(0, 1)))
        for step in steps:
            if step == "reopen":
                storage.close()
                storage = self.make(path, mode="append", capacity=capacity)
            elif step == "record":
                record = (head, os.urandom(head % 50))
                storage.writer.put_record(record[1])
            else:
                assert storage.extend(rows(head, step)) == range(head, head + step)
                head += step
            assert storage.record == record
            assert_rows(storage, head)
        storage.close()

    # -- modes

    def test_nothing_is_written_before_the_schema_is_known(self, path: Path) -> None:
        with self.make(path) as storage:
            assert not path.exists()
            assert (len(storage), storage.head, storage.record, storage.nbytes) == (0, 0, None, 0)
            with pytest.raises(NotInitialised, match="no rows and no schema yet"):
                storage.get(0)
            with pytest.raises(NotInitialised, match="initialise"):
                storage.writer.put_record(b"")
        assert not path.exists()

    def test_create_refuses_an_existing_storage(self, five: Path) -> None:
        before = files_of(five)
        with pytest.raises(StorageExists, match=r'holds a storage already.*mode="append"'):
            self.make(five)
        assert files_of(five) == before

    def test_create_refuses_one_made_meanwhile(self, path: Path) -> None:
        with self.make(path) as late, self.make(path) as early:
            early.extend(rows(0, 5))
            with pytest.raises(StorageExists, match="holds a storage already"):
                late.extend(rows(0, 9))
            assert_rows(early, 5)

    @pytest.mark.parametrize("mode", ["append", "read"])
    def test_opening_nothing_is_refused(self, path: Path, mode: Any) -> None:
        with pytest.raises(StorageMissing, match="does not exist"):
            self.make(path, mode=mode)
        with pytest.raises(StorageMissing, match="does not exist"):
            open_storage(path, mode)
        assert not path.exists()

    @pytest.mark.parametrize(
        ("options", "wording"),
        [
            ({"mode": "w"}, "mode: expected one of 'create', 'append', 'read', 'auto', got 'w'"),
            ({"durability": "x"}, "durability: expected one of 'process', 'power', got 'x'"),
            ({"capacity": 0}, "capacity: expected a positive number of rows or None, got 0"),
            ({"capacity": 2.0}, "capacity: expected a positive number of rows or None, got 2.0"),
        ],
    )
    def test_wrong_options_are_named(
        self, path: Path, options: dict[str, Any], wording: str
    ) -> None:
        with pytest.raises(ValueError, match=wording):
            self.make(path, **options)

    def test_append_goes_on_behind_the_last_row(self, five: Path) -> None:
        with open_storage(five, "append") as storage:
            assert type(storage) is (self.opened_class or self.storage_class)
            assert storage.extend(rows(5, 3)) == range(5, 8)
        with open_storage(five) as storage:
            assert_rows(storage, 8)

    def test_a_reader_never_writes(self, five: Path) -> None:
        before = files_of(five)
        with self.make(five, mode="read") as storage:
            for write in (
                lambda: storage.extend(rows(5, 1)),
                lambda: storage.writer.put_record(b""),
                lambda: storage.initialise(Schema.of(rows(0, 1))),
            ):
                with pytest.raises(ReadOnlyStorage, match=r'mode="append" to write'):
                    write()
            storage.flush()
        assert files_of(five) == before

    def test_a_closed_storage_says_so(self, five: Path) -> None:
        storage = self.make(five, mode="append")
        storage.close()
        storage.close()
        for use in (
            lambda: len(storage),
            lambda: storage.get(0),
            lambda: storage.extend(rows(5, 1)),
            lambda: storage.set(5, rows(5, 1)[0]),
            lambda: storage.writer.put_record(b""),
            lambda: storage.writer.stage_record(b""),
            lambda: storage.record,
            lambda: storage.schema,
            lambda: storage.manifest,
            lambda: storage.column("id"),
            lambda: storage.initialise(Schema.of(rows(0, 1))),
            storage.flush,
        ):
            with pytest.raises(StorageClosed, match="was closed"):
                use()
        assert "closed" in repr(storage)

    def test_a_closed_new_storage_makes_nothing(self, path: Path) -> None:
        storage = self.make(path)
        storage.close()
        with pytest.raises(StorageClosed):
            storage.extend(rows(0, 1))
        assert not path.exists()

    def test_an_unclosed_writer_warns_and_closes(self, five: Path) -> None:
        storage = self.make(five, mode="append")
        storage.extend(rows(5, 1))
        with pytest.warns(ResourceWarning, match="unclosed storage"):
            storage.writer.__del__()
        del storage
        with self.make(five, mode="append") as storage:
            assert_rows(storage, 6)

    @pytest.mark.parametrize("copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.deepcopy])
    def test_a_reader_travels_as_its_path(
        self, five: Path, monkeypatch: pytest.MonkeyPatch, copied: Callable[[Any], Any]
    ) -> None:
        monkeypatch.chdir(five.parent)
        with self.make(Path(five.name), mode="read") as storage:
            sent = pickle.dumps(storage)
            assert len(sent) < 1000, "expected a pickle without rows or maps"
            monkeypatch.chdir("/")
            with copied(storage) as other:
                assert (type(other), other.mode, other.path) == (type(storage), "read", five)
                assert_rows(other, 5)
        assert other.closed
        with self.make(five, mode="append") as writer:
            writer.extend(rows(5, 1))  # the storage keeps its identity when it grows
            with pickle.loads(sent) as other:
                assert_rows(other, 6)

    def test_a_writer_and_a_closed_storage_do_not_travel(self, five: Path) -> None:
        for mode in ("append", "create"):
            path = five if mode == "append" else five.with_name(f"new{five.suffix}")
            with (
                self.make(path, mode=mode) as storage,
                pytest.raises(
                    NotPicklable, match=r"two owners. Open the storage there .*mode=.read"
                ),
            ):
                pickle.dumps(storage)
        with self.make(five, mode="read") as storage:
            pass
        with pytest.raises(NotPicklable, match="is closed"):
            pickle.dumps(storage)

    def test_a_reader_that_arrives_elsewhere_says_so(self, five: Path) -> None:
        with self.make(five, mode="read") as storage:
            sent = pickle.dumps(storage)
        moved = five.with_name(f"moved{five.suffix}")
        five.rename(moved)
        with pytest.raises(StorageMissing, match=re.escape(str(five))):
            pickle.loads(sent)
        with self.make(five) as other:
            other.extend(rows(0, 9))
        descriptors = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StateMismatch, match="is another storage"):
            pickle.loads(sent)
        assert len(os.listdir("/proc/self/fd")) == descriptors, "the refused storage was not closed"

    # -- schema, rows and provenance

    def test_another_schema_is_refused_and_each_difference_named(self, five: Path) -> None:
        before = files_of(five)
        other = TensorDict(
            {
                "id": torch.zeros(1, dtype=torch.int32),
                "wide": torch.zeros(1, 4),
                "next": {"done": torch.zeros(1, 1, dtype=torch.bool)},
                "extra": torch.zeros(1),
            },
            [1],
        )
        with self.make(five, mode="append") as storage:
            with pytest.raises(SchemaMismatch) as caught:
                storage.initialise(Schema.of(other))
            for part in (
                "id has dtype int32, expected int64",
                "wide has shape [4] per row, expected [3]",
                "next/id is missing",
                "extra is not a column here",
                "Nothing was written",
            ):
                assert part in str(caught.value)
            with pytest.raises(RowsMismatch) as refused:
                storage.extend(other)
            for part in (
                "id has int32, shape [1], expected an array of int64, shape [1]",
                "wide has float32, shape [1, 4], expected an array of float32, shape [1, 3]",
                "next/id is missing",
                "('extra',) is not a column here",
                "Nothing was written",
            ):
                assert part in str(refused.value)
        assert files_of(five) == before

    @pytest.mark.parametrize(
        ("wrong", "wording"),
        [
            (
                {("id",): np.zeros(2, np.int64)},
                r"id has int64, shape \[2\], expected .* shape \[3\]",
            ),
            ({("id",): torch.zeros(3, dtype=torch.int64)}, "id is Tensor, expected an array"),
            ({("id",): None}, "id is missing"),
            ({"id": np.zeros(3, np.int64)}, "'id' is not a column here"),
            ({("id",): np.zeros((), np.int64)}, r"id has int64, shape \[\]"),
        ],
        ids=["count", "tensor", "none", "string", "scalar"],
    )
    def test_arrays_that_do_not_fit_are_refused(
        self, five: Path, wrong: dict[Any, Any], wording: str
    ) -> None:
        before = files_of(five)
        with self.make(five, mode="append") as storage:
            with pytest.raises(RowsMismatch, match=wording):
                storage.extend(dict(reversed((arrays(5, 3) | wrong).items())))
            assert len(storage) == 5
        assert files_of(five) == before

    def test_rows_that_are_no_rows_are_refused(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            with pytest.raises(RowsMismatch, match=r"batch size \[N\], got \[\]"):
                storage.extend(rows(5, 1)[0])
            with pytest.raises(RowsMismatch, match="a TensorDict or arrays by key, got list"):
                storage.extend([1])
            with pytest.raises(RowsMismatch, match=r"note is NonTensorData.*tensors only"):
                storage.extend(rows(5, 1).set("note", NonTensorData("hi", batch_size=[1])))
            sparse = rows(5, 1).set("id", torch.zeros(1, dtype=torch.int64).to_sparse())
            with pytest.raises(RowsMismatch, match="id is not a dense tensor"):
                storage.extend(sparse)
            assert_rows(storage, 5)

    @pytest.mark.parametrize(
        ("content", "wording"),
        [
            (lambda: TensorDict({}, [2]), "at least one column"),
            (
                lambda: TensorDict({"a/b": torch.zeros(2)}, [2]),
                "'a/b' in column .* cannot be a name",
            ),
            (lambda: TensorDict({"..": torch.zeros(2)}, [2]), "cannot be a name"),
            (lambda: TensorDict({"x": torch.zeros(2, 0)}, [2]), "holds no values"),
            (lambda: {("x",): np.array(["a"])}, "x has dtype <U1; a storage holds bool, uint8"),
            (lambda: {"x": np.zeros(2)}, "a column's key is a tuple of names, got 'x'"),
            (lambda: {("x",): 3}, "must be an array"),
        ],
    )
    def test_columns_that_cannot_be_held_are_refused(
        self, path: Path, content: Callable[[], Any], wording: str
    ) -> None:
        with self.make(path) as storage:
            with pytest.raises(InvalidSchema, match=wording):
                storage.extend(content())
            assert not path.exists()
            storage.extend(rows(0, 1))

    def test_runs_and_their_provenance_are_in_the_manifest(self, path: Path) -> None:
        schema = Schema.of(rows(0, 1))
        with self.make(path) as storage:
            storage.initialise(schema, {"seed": 3, "env": {"id": "X"}})
            storage.extend(rows(0, 4))
        with self.make(path, mode="append") as storage, self.make(path, mode="read") as reader:
            storage.initialise(schema, {"seed": 4})
            runs = [{"first_row": 0, "seed": 3, "env": {"id": "X"}}, {"first_row": 4, "seed": 4}]
            for manifest in (storage.manifest, reader.manifest):
                assert manifest["runs"] == runs
                assert Schema.from_json(manifest["schema"]) == schema
                assert manifest["format_version"] == self.format_version
            with pytest.raises(InvalidProvenance, match="provenance must be JSON"):
                storage.initialise(schema, {"f": print})
            with pytest.raises(InvalidProvenance, match="provenance must be JSON"):
                storage.initialise(schema, {"f": float("nan")})
            assert storage.manifest["runs"] == runs

    def test_copied_rows_keep_the_runs_that_made_them(self, path: Path) -> None:
        other = path.with_name(f"other-{path.name}")
        with self.make(path) as source, self.make(other) as storage:
            for seed in range(3):
                source.initialise(Schema.of(rows(0, 1)), {"seed": seed})
                source.extend(rows(5 * seed, 5))
            storage.extend(source.get(slice(1, 7)))
            storage.extend(source.get(np.arange(5)))
            for start in range(5):
                storage.extend(source.get(slice(start, start + 1)))
            found, made, id = storage.manifest["runs"], source.manifest["runs"], source.reader.id
            assert found == [
                {"first_row": 0, "copied_from": {"id": id, "rows": [1, 6]}, "runs": made[:2]},
                {"first_row": 6},
                {"first_row": 11, "copied_from": {"id": id, "rows": [0, None]}, "runs": made[:1]},
            ]
        found[2]["copied_from"]["rows"] = [0, 4]
        with self.make(other, mode="read") as storage:
            assert storage.manifest["runs"] == found

    # -- the record

    def test_the_newest_record_is_kept_through_reopening(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.initialise(Schema.of(rows(0, 1)))
            assert storage.record is None
            storage.writer.put_record(b"before any row")
            assert storage.record == (0, b"before any row")
            storage.extend(rows(0, 2), record=b"two")
            storage.extend(rows(2, 2))
            assert storage.record == (2, b"two")
            with self.make(path, mode="read") as reader:
                assert reader.record == (2, b"two")
        for number in range(5):
            with self.make(path, mode="append") as storage:
                storage.writer.put_record(b"%d" % number)
                assert storage.record == (4, b"%d" % number)

    def test_a_staged_record_goes_with_the_next_commit(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            storage.writer.stage_record(b"old")
            storage.writer.stage_record(b"new")
            assert storage.record is None
            with pytest.raises(RowsMismatch):
                storage.extend(rows(5, 1).exclude("id"))
            assert storage.record is None
            ReplayBuffer(storage=storage, batch_size=1).extend(rows(5, 1))
            assert storage.record == (6, b"new")
            storage.extend(rows(6, 1))
            assert storage.record == (6, b"new")
            storage.writer.stage_record(b"staged")
            storage.extend(rows(7, 1), record=b"given")
            storage.extend(rows(8, 1))
            assert storage.record == (8, b"given")

    def test_a_record_has_a_limit(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            storage.writer.put_record(bytes(RECORD_LIMIT))
            assert storage.record == (5, bytes(RECORD_LIMIT))
            long = bytes(RECORD_LIMIT + 1)
            for write in (
                lambda: storage.writer.put_record(long),
                lambda: storage.writer.stage_record(long),
                lambda: storage.extend(rows(5, 1), record=long),
            ):
                with pytest.raises(RecordTooLarge, match=r"may have 65536 bytes and .* has 65537"):
                    write()
            assert_rows(storage, 5)

    def test_first_rows_that_are_refused_make_no_files(self, path: Path) -> None:
        steps = {"traj_ids": torch.zeros(2).long(), "step": torch.tensor([0, 2])}
        gap = TensorDict({"collector": {**steps, "lane": torch.zeros(2).int()}}, [2])
        with self.make(path) as storage:
            with pytest.raises(RecordTooLarge):
                storage.extend(rows(0, 1), record=bytes(RECORD_LIMIT + 1))
            with pytest.raises(TrajectoryIdTaken, match="step 2 follows step 0"):
                storage.extend(gap)
            with pytest.raises(TrajectoryIdTaken, match="step 2 follows step 0"):
                storage.extend(gap, ids="renumber")
            with pytest.raises(TrajectoryIdTaken, match="step 2 follows step 0"):
                ReplayBuffer(storage=storage).extend(gap)
            assert list(path.parent.iterdir()) == []
            storage.extend(rows(0, 2))
            assert_rows(storage, 2)

    @pytest.mark.parametrize("step", ["rows", "record", "commit", "head"])
    @pytest.mark.parametrize("reopened", [False, True])
    def test_an_interrupted_append_leaves_nothing(
        self, five: Path, step: str, reopened: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        storage = self.make(five, mode="append")
        storage.extend(rows(5, 1), record=b"good")
        engine = engine_of(storage)

        def interrupt(*args: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            if step == "head":  # the record is written, but its rows are not committed
                patch.setattr(Header, "set_head", interrupt)
            elif step == "commit":
                patch.setattr(engine, "_commit", interrupt)
            elif step == "record":
                patch.setattr(engine._header, "write_record", interrupt)
            else:
                columns = engine.space.columns
                patch.setattr(columns, "arrays", [*columns.arrays[:2], None, None])
            with pytest.raises((KeyboardInterrupt, TypeError)):
                storage.extend(arrays(100, 3), record=b"bad")
        assert storage.record == (6, b"good")
        if reopened:
            storage.close()
            storage = self.make(five, mode="append")
        # Other rows replace the lost ones; the lost record must not reappear.
        storage.extend(rows(6, 4))
        assert storage.record == (6, b"good")
        assert_rows(storage, 10)
        storage.close()
        with self.make(five, mode="append") as storage:
            assert storage.record == (6, b"good")

    # -- durability

    def test_power_durability_waits_for_data_then_head(
        self, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with self.make(path, durability="power") as storage:
            storage.extend(rows(0, 1))
            engine = engine_of(storage)
            done: list[tuple[str, int]] = []
            monkeypatch.setattr(
                engine._format, "sync", lambda start=0: done.append(("rows", engine.counts.head))
            )
            monkeypatch.setattr(
                engine._header, "sync", lambda: done.append(("header", engine.counts.head))
            )
            storage.extend(rows(1, 2))
            assert done == [("rows", 1), ("header", 3)]
            storage.writer.put_record(b"")
            assert done[2:] == [("header", 3)]
        with self.make(path, mode="append", durability="power") as storage:
            storage.extend(rows(3, 2))
            storage.flush()
            assert_rows(storage, 5)

    # -- several processes

    def test_a_second_writer_is_refused(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            wording = r"by this process itself: a storage has one writer at a time"
            with pytest.raises(StorageLocked, match=wording):
                self.make(five, mode="append")
            storage.extend(rows(5, 1))
        with self.make(five, mode="append") as storage:
            assert_rows(storage, 6)

    def test_a_forked_child_neither_writes_nor_holds_the_lock(self, five: Path) -> None:
        with process(hold_and_fork, self.storage_class, five) as (writer, connection):
            child, said, _ = receive(connection)
            try:
                assert "this is a forked child" in said
                with pytest.raises(StorageLocked, match=f"process {writer.pid} is writing"):
                    self.make(five, mode="append")
                writer.kill()
                writer.join(WAIT_SECONDS)
                with self.make(five, mode="append") as storage:
                    os.kill(child, 0)  # the child is alive
                    storage.extend(rows(5, 2))
                    assert_rows(storage, 7)
            finally:
                os.kill(child, signal.SIGKILL)

    def test_a_reader_sees_committed_rows_only(self, path: Path) -> None:
        size = 64
        capacity = 5_000_000 if self.default_capacity else None
        target = (write_for_ever, self.storage_class, path, size, capacity)
        with process(*target) as (_, connection):
            receive(connection)
            while not is_there(self.storage_class, path):
                time.sleep(0.01)
            with self.make(path, mode="read") as reader:
                seen, end = set(), time.monotonic() + 1.0
                while time.monotonic() < end:
                    head = len(reader)
                    assert head % size == 0
                    low = max(0, head - 3 * size)
                    assert reader.column("wide")[low:head].tolist() == (
                        rows(low, head - low)["wide"].tolist()
                    )
                    if head:
                        assert (reader.get([head - 1]) == rows(head - 1, 1)).all()
                    record = reader.record
                    assert record is None or record[1] == str(record[0]).encode()
                    seen.add(head)
                assert len(seen) > 3

    def test_kill_9_loses_no_committed_row(self, path: Path) -> None:
        pick, heads = random.Random(7), [0]
        for number in range(12):
            size = pick.choice([1, 3, 64, 1000])
            # Reserve enough room, so that writers do not spend their time on enlarging the file.
            capacity = heads[-1] + 20_000 if self.default_capacity else None
            target = (write_for_ever, self.storage_class, path, size, capacity)
            with process(*target) as (writer, connection):
                assert receive(connection) == heads[-1]
                while number % 3 and not is_there(self.storage_class, path):
                    time.sleep(0.001)
                if number % 3 == 2:  # on a slow machine, other kills may precede the first commit
                    assert receive(connection) == heads[-1] + size
                time.sleep(pick.uniform(0.0, 0.06))
                writer.kill()
                writer.join(WAIT_SECONDS)
                assert writer.exitcode == -signal.SIGKILL, "the writer had ended before"
            if not path.exists():
                continue
            try:
                reader = self.make(path, mode="read")
            except NotAStorage:  # killed during the creation
                continue
            with reader:
                head = len(reader)
                assert head >= heads[-1]
                assert_rows(reader, head)
                if record := reader.record:
                    assert record == (head, str(head).encode()) or record[0] == head - size
            heads.append(head)
        assert len(set(heads)) > 3
        with self.make(path, mode="append", capacity=heads[-1] + 10) as storage:
            storage.extend(rows(heads[-1], 10))
            assert_rows(storage, heads[-1] + 10)

    # -- TorchRL

    @pytest.mark.parametrize("buffer_class", [ReplayBuffer, TensorDictReplayBuffer])
    @pytest.mark.parametrize("prefetch", [None, 2])
    @pytest.mark.parametrize("sampler", [RandomSampler, SamplerWithoutReplacement])
    def test_replay_buffers_write_and_sample(
        self, path: Path, buffer_class: type[ReplayBuffer], prefetch: int | None, sampler: Any
    ) -> None:
        def buffer(storage: DiskStorage) -> ReplayBuffer:
            return buffer_class(
                storage=storage, sampler=sampler(), batch_size=16, prefetch=prefetch
            )

        with self.make(path) as storage:
            replay = buffer(storage)
            assert replay.extend(rows(0, 20)).tolist() == list(range(20))
            assert replay.add(rows(20, 1)[0]) == 20
            replay.extend(torch.stack(list(rows(21, 3))))
            assert len(replay) == 24
            assert storage.schema == Schema.of(rows(0, 1))
            assert_rows(storage, 24)
        with self.make(path, mode="append") as storage:
            replay = buffer(storage)
            assert replay.extend(rows(24, 20)).tolist() == list(range(24, 44))
            assert_rows(storage, 44)
            for _ in range(6):
                sample = replay.sample()
                expected = rows(0, 44)[sample["id"]]
                assert (sample.select(*expected.keys()) == expected).all()
                if buffer_class is TensorDictReplayBuffer:
                    assert sample["index"].equal(sample["id"])
            if prefetch:
                replay._prefetch_executor.shutdown()

    def test_lists_of_rows_and_tensorclasses_are_written(self, path: Path) -> None:
        with self.make(path) as storage:
            storage.set(range(3), list(rows(0, 3)))
            storage.set(3, rows(3, 1)[0])
            made: Any = Rows.from_tensordict  # type: ignore[attr-defined]
            storage.set(range(4, 6), made(rows(4, 2)))
            assert_rows(storage, 6)
            with pytest.raises(RowsMismatch, match="holds TensorDicts, got list"):
                storage.set(range(6, 8), [1, 2])
            with pytest.raises(
                NotAnAppend, match="expected 2 rows, one per index of cursor, got 3"
            ):
                storage.set(range(6, 8), list(rows(6, 3)))
            assert_rows(storage, 6)

    def test_an_index_that_no_buffer_added_is_a_column_too_many(self, five: Path) -> None:
        """TorchRL's writer adds an index at the root, where it is ignored, and nowhere else."""
        with self.make(five, mode="append") as storage:
            replay = TensorDictReplayBuffer(storage=storage, batch_size=2)
            more = rows(5, 1)
            replay.extend(more.clone())
            for key in (("next", "index"), ("other", "index")):
                odd = rows(6, 1)
                odd[key] = torch.zeros(1, dtype=torch.int64)
                with pytest.raises(RowsMismatch, match="is not a column here"):
                    replay.extend(odd)
            with pytest.raises(RowsMismatch, match=r"'index',. is not a column here"):
                storage.extend(rows(6, 1).set("index", torch.zeros(1)))
            assert_rows(storage, 6)

    def test_a_buffer_whose_writer_has_no_cursor_samples(self, five: Path) -> None:
        with self.make(five, mode="read") as storage:
            replay = ReplayBuffer(storage=storage, writer=ImmutableDatasetWriter(), batch_size=8)
            sample = replay.sample()
            assert (sample == rows(0, 5)[sample["id"]]).all()
            with pytest.raises(RuntimeError, match="doesn't allow writing"):
                replay.extend(rows(5, 1))
            assert_rows(storage, 5)

    def test_an_index_column_of_ones_own_is_kept(self, path: Path) -> None:
        own = TensorDict({"index": torch.tensor([5, 6, 7])}, [3])
        with self.make(path) as storage:
            ReplayBuffer(storage=storage, batch_size=2).extend(own)
            assert storage.column("index").tolist() == [5, 6, 7]

    def test_slices_are_sampled(self, path: Path) -> None:
        data = rows(0, 70)
        data["next", "done"][-1] = True
        with self.make(path) as storage:
            replay = TensorDictReplayBuffer(
                storage=storage,
                sampler=SliceSampler(slice_len=4, end_key=("next", "done")),
                batch_size=32,
            )
            replay.extend(data[:40])
            replay.extend(data[40:])
            for _ in range(5):
                starts = replay.sample()["id"].reshape(-1, 4)
                assert (starts.diff(dim=1) == 1).all()

    def test_rows_written_directly_are_known_to_buffers(self, path: Path) -> None:
        with self.make(path) as storage:
            one, two = (ReplayBuffer(storage=storage, batch_size=4) for _ in range(2))
            one.extend(rows(0, 4))
            two.extend(rows(4, 4))
            storage.extend(rows(8, 4))
            one.extend(rows(12, 4))
            assert_rows(storage, 16)
            assert len(two) == 16

    def test_a_refused_write_leaves_the_writer_where_it_was(self, path: Path) -> None:
        with self.make(path) as storage:
            replay = ReplayBuffer(storage=storage, batch_size=4)
            replay.extend(rows(0, 4))
            with pytest.raises(RowsMismatch):
                replay.extend(rows(4, 4).exclude("wide"))
            with pytest.raises(RowsMismatch, match="a storage holds TensorDicts, got Tensor"):
                replay.extend(torch.zeros(3))
            replay.extend(rows(4, 4))
            assert_rows(storage, 8)

    def test_rows_on_disk_are_only_added(self, five: Path) -> None:
        with self.make(five, mode="append") as storage:
            cursor: Any
            for cursor, wording in (
                (0, "after the last row, at row 5, got a write at row 0"),
                (6, "a write at row 6"),
                (torch.tensor([5, 7]), "not consecutive"),
                (torch.tensor([6, 5]), "not consecutive"),
                (slice(5, 9, 2), "a slice with a start, a stop and a step of 1"),
                (torch.tensor([0.5]), "whole numbers"),
                (range(5, 8), "expected 3 rows, one per index of cursor, got 2"),
            ):
                data = rows(5, 1)[0] if isinstance(cursor, int) else rows(5, 2)
                with pytest.raises(NotAnAppend, match=wording):
                    storage.set(cursor, data)
            with pytest.raises(NotAnAppend, match=r"storage\[i\] = rows is not supported"):
                storage[5] = rows(5, 1)[0]
            for cursor in (torch.tensor([5, 6]), slice(7, 9), range(9, 11), np.arange(11, 13)):
                storage.set(cursor, rows(storage.head, 2))
            storage.set(13, rows(13, 1)[0])
            assert_rows(storage, 14)

    def test_emptying_is_refused_and_the_buffer_goes_on(self, path: Path) -> None:
        with self.make(path) as storage:
            replay = ReplayBuffer(storage=storage, batch_size=4)
            replay.empty()
            replay.extend(rows(0, 4))
            with pytest.raises(NotAnAppend, match="keeps every row, 4 so far"):
                replay.empty()
            replay.extend(rows(4, 4))
            assert_rows(storage, 8)

    def test_a_writer_of_32_bits_is_not_overrun(
        self, five: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tallyroll.storage.replay.buffers._CURSOR_LIMIT", 7)
        with self.make(five, mode="append") as storage:
            replay = ReplayBuffer(storage=storage, batch_size=4)
            wide = ReplayBuffer(
                storage=storage, batch_size=4, writer=RoundRobinWriter(compilable=True)
            )
            replay.extend(rows(5, 2))
            with pytest.raises(CursorOverflow, match=r"32 bits.* ends at row 8"):
                replay.extend(rows(7, 1))
            storage.extend(rows(7, 1))
            with pytest.raises(CursorOverflow, match=r"is row 8\. Give the buffer a writer"):
                storage.attach(ReplayBuffer(storage=storage, batch_size=4))
            assert wide._writer._cursor == 8

    def test_contains(self, five: Path) -> None:
        with self.make(five, mode="read") as storage:
            assert 4 in storage
            assert 5 not in storage
            assert storage.contains(torch.tensor([0, 5, -5, -6])).tolist() == [1, 0, 1, 0]
            assert [row["id"].item() for row in storage] == [0, 1, 2, 3, 4]

    def test_a_state_is_checked_against_the_rows(self, five: Path, tmp_path: Path) -> None:
        with self.make(five, mode="append") as storage:
            replay = ReplayBuffer(storage=storage, batch_size=2)
            early = replay.state_dict()
            replay.load_state_dict(early)
            replay.extend(rows(5, 2))
            late = storage.state_dict()
            storage.load_state_dict(early["_storage"])
            assert_rows(storage, 7)
            storage.load_state_dict(late)
            with pytest.raises(StateMismatch, match=r"this state has 9 rows, but .* has 7 rows"):
                storage.load_state_dict(late | {"head": 9})
        with self.make(tmp_path / "other") as other:
            other.extend(rows(0, 20))
            with pytest.raises(StateMismatch, match="is another storage"):
                other.load_state_dict(late)

    def test_dumps_and_loads(self, five: Path, tmp_path: Path) -> None:
        dump = tmp_path / "dump"
        with self.make(five, mode="append") as storage:
            replay = ReplayBuffer(storage=storage, batch_size=2)
            storage.writer.put_record(b"r")
            replay.dumps(dump)
            storage.reserve(100_005)
            replay.extend(rows(5, 100_000))
            replay.dumps(dump)
            replay.loads(dump)
            assert_rows(storage, 100_005)
        with self.make(tmp_path / "new") as storage:
            replay = ReplayBuffer(storage=storage, batch_size=2)
            replay.loads(dump)
            assert_rows(storage, 100_005)
            assert storage.record is not None
            assert storage.record[1] == b"r"
            storage.reserve(100_007)
            replay.extend(rows(100_005, 2))
            replay.loads(dump)
            assert_rows(storage, 100_007)
        with self.make(five, mode="read") as behind:
            assert behind.manifest["id"] == open_storage(tmp_path / "new").manifest["id"]

    def test_dumps_refuses_a_copy_of_another_storage(self, five: Path, tmp_path: Path) -> None:
        with self.make(tmp_path / "other") as other:
            with pytest.raises(NotInitialised, match="no rows to dump"):
                other.dumps(tmp_path / "dump")
            other.extend(rows(0, 2))
            other.dumps(tmp_path / "dump")
        with self.make(five, mode="append") as storage:
            for act in (storage.dumps, storage.loads):
                with pytest.raises(StateMismatch, match="hold rows of different storages"):
                    act(tmp_path / "dump")
            assert_rows(storage, 5)

    def test_dumps_refuses_a_copy_that_is_newer(self, five: Path, tmp_path: Path) -> None:
        """Dump from a storage that was restored from a copy older than the dump."""
        backup = tmp_path / "backup"
        backup.mkdir()
        for file in five.parent.glob(five.name + "*"):
            (shutil.copytree if file.is_dir() else shutil.copy2)(file, backup / file.name)
        with self.make(five, mode="append") as storage:
            storage.extend(rows(5, 2))
            storage.dumps(tmp_path / "dump")
        with self.make(backup / five.name, mode="append") as older:
            with pytest.raises(
                StateMismatch, match=r"has 7 rows and .* 5 rows: the target is newer"
            ):
                older.dumps(tmp_path / "dump")
            assert_rows(older, 5)
        with self.make(tmp_path / "dump", mode="read") as dump:
            assert_rows(dump, 7)


class GrowingStorageContract(StorageContract):
    """Additional tests of a storage that grows while it is open."""

    def test_threads_read_slices_while_rows_come(self, path: Path) -> None:
        done = threading.Event()

        def read(storage: DiskStorage) -> int:
            looks = 0
            while not done.is_set() or not looks:
                seen = storage.get(slice(None))["id"].numpy()
                assert (seen == np.arange(len(seen))).all()
                looks += 1
            return looks

        with self.make(path) as storage, ThreadPoolExecutor(4) as pool:
            storage.extend(arrays(0, 10))
            with self.make(path, mode="read") as reader:
                readers = [pool.submit(read, one) for one in (storage, reader) * 2]
                try:
                    for head in range(10, 600_010, 20_000):
                        storage.extend(arrays(head, 20_000))
                finally:
                    done.set()
                assert all(each.result() for each in readers)

    def test_views_taken_before_the_storage_grew_stay_valid(self, path: Path) -> None:
        with self.make(path, capacity=2) as storage:
            storage.extend(rows(0, 2))
            column, view = storage.column(("next", "id")), storage.get(slice(None))
            head = 2
            while head < 300_000:
                storage.extend(arrays(head, 50_000))
                head += 50_000
            assert column.tolist() == [1, 2]
            assert view["id"].tolist() == [0, 1]
            assert_rows(storage, head)
        assert column.tolist() == [1, 2]

    # -- disk full

    def test_a_full_disk_is_said_and_committed_rows_are_intact(
        self, five: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(file: int, start: int, length: int) -> None:
            raise OSError(28, "No space left on device")

        with self.make(five, mode="append") as storage:
            monkeypatch.setattr(os, "posix_fallocate", full)
            with pytest.raises(StorageFull, match=r"needs \d+ more bytes, and \d+ are free"):
                storage.extend(arrays(5, 100_000))
            assert_rows(storage, 5)
            monkeypatch.undo()
            storage.extend(arrays(5, 100_000))
            assert_rows(storage, 100_005)
