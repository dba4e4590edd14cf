"""Test that packed rows read like other files and equal the original rows bit for bit."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import FrameStack, MemmapStorage, content_hash, diff, open_storage, verify
from tallyroll.storage.errors import NotAStorage, PathIsTaken, ReadOnlyStorage
from tallyroll.storage.ext.packed.archives import ZarrArchive
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.rows.keys import LANE, STEP, TRAJ_IDS
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract


def in_order() -> TensorDict:
    """Return the contract's rows, trajectory by trajectory in the order of their first rows."""
    rows = collected()
    first: dict[int, int] = {}
    for row, id in enumerate(rows[TRAJ_IDS].tolist()):
        first.setdefault(id, row)
    order = sorted(range(len(rows)), key=lambda row: (first[int(rows[TRAJ_IDS][row])], row))
    return rows[torch.tensor(order)]


class InOrder(ReaderContract):
    """Pack the same rows once and copy the result for each test."""

    packed: ClassVar[Path]
    format: ClassVar[str]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def packed_once(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.packed = tmp_path_factory.mktemp("packed")

    def rows(self) -> TensorDict:
        return in_order()

    def write_rows(self, source: DiskStorage, path: Path) -> None:
        place = self.packed / content_hash(source)
        if not place.exists():
            report = source.pack(place, format=self.format)
            assert report.once == ("observation", "pixels", "agents/observation")
        (shutil.copytree if place.is_dir() else shutil.copy)(place, path)


class TestPackedZarr(InOrder):
    format = "zarr"


class TestPackedHdf5(InOrder):
    format = "hdf5"


# --- the order of rows ----------------------------------------------------------------------------


@pytest.fixture
def collected_storage(tmp_path: Path) -> Iterator[DiskStorage]:
    """Make a storage with rows of a collector, slot by slot, in two runs."""
    with MemmapStorage(tmp_path / "rows") as storage:
        for frames in (130, 70):
            with SyncCollector(
                "CartPole-v1",
                num_envs=3,
                frames_per_batch=50,
                total_frames=frames,
                seed=1,
                storage=storage,
            ) as collector:
                collector.collect(frames)
        yield storage


def test_a_packed_storage_has_all_that_was_collected(
    collected_storage: DiskStorage, tmp_path: Path
) -> None:
    storage, path = collected_storage, tmp_path / "packed"
    seen: list[tuple[int, int]] = []
    report = storage.pack(path, progress=lambda done, total: seen.append((done, total)))
    assert (report.rows, seen[-1]) == (200, (200, 200))
    found = verify(path)
    assert found.sound
    assert {"checksums", "record", "episodes", "metadata"} <= {*found.checked}
    with open_storage(path) as packed:
        assert content_hash(packed) == content_hash(storage)
        assert diff(path, storage.path).same
        old = packed.old_rows()
        assert sorted(old) == list(range(200))
        assert (packed.old_rows([-1, 0]) == old[[-1, 0]]).all()
        assert_same_rows(packed.get(slice(None)), storage.get(torch.from_numpy(old)))
        # Rows are ordered by run. Within a run, trajectories are contiguous.
        assert packed.runs == storage.runs
        runs = np.searchsorted([run["first_row"] for run in storage.runs], old, side="right")
        assert (np.diff(runs) >= 0).all()
        ids = packed.column(TRAJ_IDS)
        assert len({*ids.tolist()}) == 1 + int((np.diff(ids) != 0).sum())
        assert list(packed.trajectories) == list(storage.trajectories)
        assert packed.record == storage.record
        assert packed.reader.episode_lines(packed.trajectories.table.dtype) is not None
    with pytest.raises(NotAStorage, match="is not packed"):
        storage.old_rows()


def test_a_ring_is_packed_with_the_rows_that_are_left(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=60) as ring:
        for rows in collected()[:99].split(11):
            ring.extend(rows, ids="fresh")
        ring.pack(tmp_path / "packed")
        with open_storage(tmp_path / "packed") as packed:
            assert packed.span == range(39, 99)
            assert sorted(packed.old_rows()) == [*packed.span]
            for id, rows in ring.trajectories.items():
                assert_same_rows(packed.trajectories[id], rows)
            assert content_hash(packed) == content_hash(ring)
    assert verify(tmp_path / "packed").sound


def test_a_ring_of_a_collector_and_a_view_of_one(tmp_path: Path) -> None:
    """Rows of a ring keep their numbers but change their order.

    A view has no record, because no record counts its rows.
    """
    with (
        MemmapStorage(tmp_path / "ring", max_size=90) as ring,
        SyncCollector(
            "CartPole-v1", num_envs=3, frames_per_batch=50, total_frames=200, storage=ring
        ) as collector,
    ):
        collector.collect(200)
    with open_storage(tmp_path / "ring") as ring:
        ring.pack(tmp_path / "packed")
        with open_storage(tmp_path / "packed") as packed:
            assert content_hash(packed) == content_hash(ring)
            assert (packed.runs, packed.record) == (ring.runs, ring.record)
            view = packed.trajectories.where("lane > 0")
            view.pack(tmp_path / "chosen")
            with open_storage(tmp_path / "chosen") as chosen:
                assert content_hash(chosen) == content_hash(view)
                assert {*chosen.column(LANE).tolist()} == {1, 2}
    assert verify(tmp_path / "packed").sound
    # Some trajectories have no first step, which is allowed only in a ring.
    assert {each.check for each in verify(tmp_path / "chosen").findings} <= {"steps"}


def test_packed_storages_are_read_as_one(tmp_path: Path) -> None:
    for name, part in (("a", collected()[:60]), ("b", collected()[60:])):
        with MemmapStorage(tmp_path / f"{name}.rows") as storage:
            storage.extend(part)
            storage.pack(tmp_path / name)
    with open_storage([tmp_path / "a", tmp_path / "b"]) as both:
        assert len(both) == 141
        for within in ("a", "b"):  # a member's folder is its own
            with pytest.raises(PathIsTaken, match=f"is inside .*{within}, the storage to pack"):
                both.pack(tmp_path / within / "both")
        report = both.pack(tmp_path / "both")
        with open_storage(report.path) as packed:
            assert content_hash(packed) == content_hash(both)
            packed.copy_to(tmp_path / "copied")
            with open_storage(tmp_path / "copied") as copied:
                assert content_hash(copied) == content_hash(both)


def test_rows_of_no_trajectory_and_no_rows(tmp_path: Path) -> None:
    for count in (0, 5):
        with MemmapStorage(tmp_path / f"{count}") as storage:
            storage.extend(TensorDict({"x": torch.arange(float(count))}, [count]))
            storage.pack(tmp_path / f"{count}.packed")
            with open_storage(tmp_path / f"{count}.packed") as packed:
                assert packed.get(slice(None))["x"].tolist() == [*range(count)]
        assert verify(tmp_path / f"{count}.packed").sound


def test_a_packed_storage_is_packed_again(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected())
        storage.pack(tmp_path / "once")
    with open_storage(tmp_path / "once") as packed:
        packed.pack(tmp_path / "again.h5", format="hdf5")
        with open_storage(tmp_path / "again.h5") as again:
            assert_same_rows(again.get(slice(None)), packed.get(slice(None)))


# --- states and frames, compared with a plain list ------------------------------------------------

FRAME = (4, 5)
LENGTHS = st.sampled_from([1, 2, 5, 9])
Stacks = list[np.ndarray]


def episode(draw: np.random.Generator, length: int, n: int, start: str) -> tuple[Stacks, Stacks]:
    """Return stacks of an episode and the next ones, oldest frame first.

    Frame-stacking wrappers make the same stacks.
    """
    frames = [draw.integers(0, 4, FRAME, np.uint8) for _ in range(length + 1)]
    before = np.zeros_like(frames[0]) if start == "zeros" else frames[0]
    if start == "others":
        history = [draw.integers(0, 4, FRAME, np.uint8) for _ in range(n - 1)]
    else:
        history = [before] * (n - 1)
    every = [*history, *frames]
    stacks = [np.stack(every[at : at + n]) for at in range(length + 1)]
    return stacks[:-1], stacks[1:]


@st.composite
def episodes(draw: Any) -> tuple[list[int], int, str, int, int, list[int], list[int]]:
    lengths = draw(st.lists(LENGTHS, min_size=1, max_size=9))
    rows = st.lists(st.integers(0, sum(lengths) - 1), max_size=3)
    start = draw(st.sampled_from(["repeats", "zeros", "others"]))
    n = draw(st.integers(2, 4))
    axis = draw(st.sampled_from([0, 2]))
    return lengths, n, start, axis, draw(st.integers(0, 99)), draw(rows), draw(rows)


@settings(max_examples=25, deadline=None, suppress_health_check=[*HealthCheck])
@given(drawn=episodes(), declared=st.booleans(), lanes=st.integers(1, 3))
def test_states_and_frames_are_given_back(
    tmp_path_factory: pytest.TempPathFactory, drawn: Any, declared: bool, lanes: int
) -> None:
    lengths, n, start, axis, seed, spoilt, odd = drawn
    random = np.random.default_rng(seed)
    parts = [episode(random, length, n, start) for length in lengths]
    root = np.stack([stack for first, _ in parts for stack in first])
    after = np.stack([stack for _, then in parts for stack in then])
    after[spoilt] = random.integers(0, 4, after[spoilt].shape, np.uint8)  # the lost frames
    root[odd] = random.integers(0, 4, root[odd].shape, np.uint8)
    root, after = (np.moveaxis(each, 1, axis + 1) for each in (root, after))
    check_packed(tmp_path_factory, root, after, lengths, lanes, (n, axis) if declared else None)


def check_packed(
    factory: pytest.TempPathFactory,
    root: np.ndarray,
    after: np.ndarray,
    lengths: list[int],
    lanes: int,
    stack: tuple[int, int] | None,
) -> Any:
    """Pack rows of alternating lanes, and compare all ways to read with the originals."""
    ids = np.repeat(np.arange(len(lengths)), lengths)
    steps = np.concatenate([np.arange(each) for each in lengths])
    order = np.lexsort((ids % lanes, ids // lanes * 2000 + steps))  # slot by slot
    end = np.array([*(ids[1:] != ids[:-1]), True])
    rows = {
        ("observation",): root,
        ("next", "observation"): after,
        ("next", "terminated"): end[:, None],
        TRAJ_IDS: ids,
        STEP: steps,
        LANE: (ids % lanes).astype(np.int32),
    }
    rows = {key: np.ascontiguousarray(each[order]) for key, each in rows.items()}
    folder = factory.mktemp("packed")
    with MemmapStorage(folder / "rows") as storage:
        storage.extend(rows, ids="fresh")
        stacks = None if stack is None else [FrameStack("observation", *stack)]
        report = storage.pack(folder / "packed", stacks=stacks)
    with open_storage(folder / "packed") as packed:
        reader, old = packed.reader, packed.old_rows()
        assert sorted(old) == list(range(len(ids)))
        pick = np.random.default_rng(0).integers(0, len(ids), (3, 5))
        begin, stop = sorted(pick[0, :2].tolist())
        for key, values in rows.items():
            column, wanted = reader.column(key), values[old]
            assert (column.slice(0, len(ids)) == wanted).all()
            assert (column.slice(begin, stop) == wanted[begin:stop]).all()
            assert (column.take(pick) == wanted[pick]).all()
            out = np.empty_like(wanted[pick])
            assert column.take(pick, out) is out
            assert (out == wanted[pick]).all()
    return report


@pytest.mark.parametrize("start", ["repeats", "zeros"])
def test_each_frame_is_stored_once(tmp_path_factory: pytest.TempPathFactory, start: str) -> None:
    """Episodes of 1, 2, 5 and 1,000 rows store one frame per row, and one more per episode."""
    lengths, random = [1, 2, 5, 1000], np.random.default_rng(1)
    parts = [episode(random, length, 4, start) for length in lengths]
    root = np.stack([stack for first, _ in parts for stack in first])
    after = np.stack([stack for _, then in parts for stack in then])
    report = check_packed(tmp_path_factory, root, after, lengths, 2, None)
    assert (report.once, report.stacks) == (("observation",), {"observation": 4})
    frames = 1008 + 4
    with open_storage(report.path) as packed:
        assert packed.reader.layout.arrays[packed.reader.layout.states[0].frames].rows == frames


def test_a_stack_without_what_comes_next(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    root = np.stack(episode(random, 70, 3, "zeros")[0])
    rows = {("pixels",): root, ("action",): np.arange(70)}
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        assert storage.pack(tmp_path / "packed").stacks == {"pixels": 3}
        assert storage.pack(tmp_path / "whole", stacks=[]).stacks == {}
    for name in ("packed", "whole"):
        with open_storage(tmp_path / name) as packed:
            assert (packed.column("pixels") == root).all()


# --- the cache, threads, and other processes ------------------------------------------------------


@pytest.fixture
def wide(tmp_path: Path) -> tuple[Path, np.ndarray]:
    """Ten chunks of rows of two KiB, and a partial chunk."""
    values = np.random.default_rng(2).integers(0, 255, (700, 2048), np.uint8)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("x",): values})
        storage.pack(tmp_path / "packed")
    return tmp_path / "packed", values


CHUNK = 64 * 2048


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("chunks", [1, 3, 20])
def test_a_cache_of_any_size_gives_all_rows(
    wide: tuple[Path, np.ndarray], chunks: int, threads: int
) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=chunks * CHUNK, threads=threads)
    column, random = reader.column(("x",)), np.random.default_rng(3)
    for _ in range(30):
        rows = random.integers(0, 700, random.integers(0, 90))
        assert (column.take(rows) == values[rows]).all()
        start, stop = sorted(random.integers(0, 701, 2).tolist())
        assert (column.slice(start, stop) == values[start:stop]).all()
    assert reader.cache_nbytes <= max(chunks, 11) * CHUNK
    reader.close()
    reader.close()


def test_a_chunk_is_kept_when_it_is_asked_for_again(wide: tuple[Path, np.ndarray]) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=20 * CHUNK)
    column, rows = reader.column(("x",)), np.arange(0, 700, 7)
    loads = []
    for _ in range(4):
        assert (column.take(rows) == values[rows]).all()
        loads.append(reader.loads)
    assert loads == [11, 22, 22, 22]
    reader.close()


def test_a_chunk_is_kept_at_once_if_many_of_its_rows_are_wanted(
    wide: tuple[Path, np.ndarray],
) -> None:
    """An epoch that is shuffled within a window reads many rows of a chunk.

    The next batch needs the chunk too.
    """
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=20 * CHUNK)
    column = reader.column(("x",))
    for rows in (np.arange(0, 320, 4), np.arange(3, 320, 4)):
        assert (column.take(rows) == values[rows]).all()
        assert reader.loads == 5
    reader.close()


def test_random_rows_of_more_chunks_than_are_kept_displace_none(
    wide: tuple[Path, np.ndarray],
) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=3 * CHUNK)  # room for two of these chunks
    column, kept = reader.column(("x",)), np.array([3, 70])
    for _ in range(2):
        column.take(kept)
    for rows in np.arange(128, 640).reshape(8, 64):
        assert (column.take(rows[::9]) == values[rows[::9]]).all()
    before = reader.loads
    column.take(kept)
    assert reader.loads == before
    # Read cached rows, then repeated rows along with a new one.
    for rows in (kept, np.array([3, 70, 580, 130, 690, 70])):
        assert (column.take(rows) == values[rows]).all()
    reader.close()


def test_what_came_next_is_read_with_what_was_there(tmp_path: Path) -> None:
    """Columns of the same frames are decompressed once, whichever rows of each are read."""
    root = np.random.default_rng(4).integers(0, 255, (301, 2048), np.uint8)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend({("x",): root[:-1], ("next", "x"): root[1:]})
        storage.pack(tmp_path / "packed")
    reader = PackedReader(ZarrArchive(tmp_path / "packed"))
    rows = np.array([[5, 299], [63, 64]])
    one, other = reader.copies(rows)
    assert (one == root[rows]).all()
    assert (other == root[rows + 1]).all()
    frames = reader._arrays[reader.layout.states[0].frames]
    assert frames.loads == 3
    one, other = reader.gather([rows, rows[0] - 2])
    assert (one == root[rows]).all()
    assert (other == root[rows[0] - 1]).all()
    reader.close()


def test_a_reader_who_goes_on_finds_rows_decompressed(wide: tuple[Path, np.ndarray]) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=20 * CHUNK, threads=2)
    column = reader.column(("x",))
    for start in range(0, 640, 64):
        assert (column.slice(start, start + 64) == values[start : start + 64]).all()
        array = reader._arrays[0]
        if array._ahead is not None:
            array._ahead.result(10)
    assert reader.loads == 11  # each once, including the chunk that was read ahead
    reader.close()


def test_threads_read_beside_one_another(wide: tuple[Path, np.ndarray]) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=2 * CHUNK, threads=2)
    column, wrong = reader.column(("x",)), []

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            rows = random.integers(0, 700, 20)
            if not (column.take(rows) == values[rows]).all():
                wrong.append(rows)

    workers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong
    reader.close()


def test_a_forked_child_reads(wide: tuple[Path, np.ndarray]) -> None:
    path, values = wide
    reader = PackedReader(ZarrArchive(path), cache_nbytes=20 * CHUNK, threads=2)
    column = reader.column(("x",))
    column.take(np.arange(0, 700, 7))  # the child does not inherit its threads
    reader._arrays[0]._lock.acquire()  # as if held by a thread of the parent
    pid = os.fork()
    if not pid:
        os._exit(0 if (column.take(np.arange(700)) == values).all() else 1)
    reader._arrays[0]._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    reader.close()


def test_a_packed_storage_travels(wide: tuple[Path, np.ndarray]) -> None:
    with open_storage(wide[0]) as packed, pickle.loads(pickle.dumps(packed)) as there:
        assert (there.column("x") == wide[1]).all()


def test_a_file_that_is_not_written_is_closed(wide: tuple[Path, np.ndarray]) -> None:
    path = wide[0].with_name("packed.h5")
    with open_storage(wide[0]) as packed:
        packed.pack(path, format="hdf5")
    before = len(os.listdir("/proc/self/fd"))
    for source in (path, [path]):
        with pytest.raises(ReadOnlyStorage, match="nothing writes to it") as raised:
            open_storage(source, mode="append")
        assert len(os.listdir("/proc/self/fd")) == before, raised


def test_a_reader_that_nobody_closes_leaves_no_file_open(wide: tuple[Path, np.ndarray]) -> None:
    def files_open() -> int:
        links = (os.path.join("/proc/self/fd", each) for each in os.listdir("/proc/self/fd"))
        return sum(
            os.readlink(each).startswith(str(wide[0])) for each in links if os.path.lexists(each)
        )

    gc.collect()
    before = files_open()
    reader = PackedReader(ZarrArchive(wide[0]))
    reader.column(("x",)).take(np.arange(700))
    assert files_open() > before
    del reader
    gc.collect()
    assert files_open() == before
