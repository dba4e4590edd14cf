"""Test that rows copied from one storage to another keep the runs that made them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import ReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.collector.errors import StateError
from tallyroll.storage import MemmapStorage, Schema, open_storage, verify
from tallyroll.storage.errors import RowsMismatch, TrajectoryIdTaken
from tallyroll.storage.files import copied_runs
from tallyroll.storage.storages import DiskStorage, H5Storage, ZarrStorage
from tallyroll.storage.trajectories.episodes import END_OPEN

from storage_contract import process, receive, rows
from worker_kit import DISABLED, factory

LANES = 2
ENDS = ("done", "terminated", "truncated")


def make(path: Path, **options: Any) -> DiskStorage:
    kind = {".h5": H5Storage, ".zarr": ZarrStorage}.get(path.suffix, MemmapStorage)
    if kind is H5Storage and options.get("mode") is None:
        options["capacity"] = 12_000
    return kind(path, **options)


def collect(storage: DiskStorage, seed: int, rows: int = 40) -> None:
    """Collect a run of `rows` rows, whose lanes end their episodes with it."""
    made = factory(DISABLED, 0, LANES)
    options = {"frames_per_batch": 10, "total_frames": rows, "seed": seed, "finals": "kept"}
    with SyncCollector(made, None, storage=storage, **options) as collector:
        for _ in collector:
            pass


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a storage with two runs of 40 rows."""
    with MemmapStorage(tmp_path / "source") as storage:
        collect(storage, 3)
        collect(storage, 4)
    return tmp_path / "source"


def told(storage: DiskStorage) -> list[tuple[int, list[int | None] | None, list[int | None]]]:
    """Return each entry's first row, the rows it was copied from, and the seeds of their runs."""
    return [
        (
            run["first_row"],
            run.get("copied_from", {}).get("rows"),
            [each.get("seed") for each in run.get("runs", [])],
        )
        for run in storage.manifest["runs"]
    ]


@pytest.mark.parametrize("name", ["target", "target.h5", "target.zarr"])
def test_the_runs_come_with_the_rows(tmp_path: Path, source: Path, name: str) -> None:
    """Copies start a new storage, follow a run, reopen a closed storage, or copy a copy."""
    with open_storage(source) as other:
        made, id = other.manifest["runs"], other.manifest["id"]
        wanted = other.get(slice(None))["observation"].clone()
    target, last = tmp_path / name, tmp_path / f"last-{name}"
    with make(target) as storage:
        storage.extend(open_storage(source)[:])
        (entry,) = storage.manifest["runs"]
        from_all = {"id": id, "rows": [0, 79]}
        assert entry == {"first_row": 0, "copied_from": from_all, "runs": made}
        assert str(tmp_path) not in str(entry)
        collect(storage, 5)
        storage.extend(open_storage(source)[45:60], ids="renumber")
        assert told(storage)[2] == (120, [45, 59], [4])
        with make(last) as copied:
            copied.extend(storage[:], ids="renumber")
            (entry,) = copied.manifest["runs"]
            assert entry["runs"] == storage.manifest["runs"]
        runs = storage.manifest["runs"]
    with open_storage(target) as storage:
        assert storage.manifest["runs"] == runs
        assert torch.equal(storage.get(slice(0, 80))["observation"], wanted)
    with open_storage(last) as copied:
        assert told(copied) == [(0, [0, 134], [None, 5, None])]
    for path in (target, last):
        found = [each for each in verify(path).findings if each.check != "steps"]
        assert not found


def test_a_storage_is_no_run_to_resume_but_to_append_to(tmp_path: Path, source: Path) -> None:
    with make(tmp_path / "target") as storage:
        storage.extend(open_storage(source)[:])
        for resume in (True, "auto"):
            with pytest.raises(StateError, match="Append to the storage instead"):
                SyncCollector(
                    factory(DISABLED, 0, LANES), None, storage=storage, resume=resume,
                    frames_per_batch=10, total_frames=90,
                )  # fmt: skip
        collect(storage, 5)
        assert told(storage) == [(0, [0, 79], [3, 4]), (80, None, [])]
    assert verify(tmp_path / "target").sound


@pytest.mark.parametrize("name", ["target", "target.h5", "target.zarr"])
def test_pieces_of_one_storage_are_one_entry(
    tmp_path: Path, source: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    with make(tmp_path / name) as storage, open_storage(source) as other:
        write = storage.writer.runs.write
        monkeypatch.setattr(
            storage.writer.runs, "write", lambda runs: (written.append(len(runs)), write(runs))
        )
        for piece in range(70):
            storage.extend(other[piece : piece + 1])
            assert len(storage.manifest["runs"]) == 1
        assert told(storage) == [(0, [0, None], [3, 4])]
        assert len(written) <= 3  # one for the second piece, one for the second run
    with open_storage(tmp_path / name) as storage:
        assert told(storage) == [(0, [0, 69], [3, 4])]
        assert not verify(tmp_path / name).findings
    with make(tmp_path / name, mode="append") as storage, open_storage(source) as other:
        storage.extend(other[70:])
        collect(storage, 6, 20)
        assert told(storage) == [(0, [0, 79], [3, 4]), (80, None, [])]
    assert verify(tmp_path / name).sound


def test_trajectories_go_on_from_one_copy_to_the_next(tmp_path: Path) -> None:
    """Two sources take turns, each with a lane of its own."""
    number = torch.arange(20)
    given = TensorDict(
        {
            **{("next", end): torch.zeros(20, 1, dtype=torch.bool) for end in ENDS},
            ("next", "reward"): torch.ones(20, 1),
            ("collector", "traj_ids"): number // 10,
            ("collector", "step"): number % 10,
            ("collector", "lane"): number // 10,
            ("collector", "policy_version"): torch.zeros(20, dtype=torch.int64),
        },
        [20],
    )
    with MemmapStorage(tmp_path / "target") as target:
        sources = [MemmapStorage(tmp_path / f"source{lane}") for lane in range(2)]
        for lane, source in enumerate(sources):
            source.extend(given[10 * lane : 10 * lane + 10])
        target.extend(given[:0])
        for start in (0, 4, 8):
            for source in sources:
                target.extend(source[start : min(start + 4, 10)])
        assert [rows for _, rows, _ in told(target)] == [
            rows for rows in ([0, 3], [4, 7], [8, 9]) for _ in range(2)
        ]
        table = target.trajectories.table
        assert table["length"].tolist() == [10, 10]
        assert table["end"].tolist() == [END_OPEN, END_OPEN]
        for source in sources:
            source.close()
    assert not verify(tmp_path / "target").findings


def test_what_is_not_known_is_not_said(tmp_path: Path, source: Path) -> None:
    """Provenance is lost for computed rows, rows by index, and rows sent to another process."""
    changes: list[Callable[[TensorDictBase], TensorDictBase]] = [
        lambda rows: rows.clone(),
        lambda rows: rows[torch.arange(len(rows))],
        lambda rows: torch.cat([rows, rows[:0]]),
        lambda rows: pickle.loads(pickle.dumps(rows)),
        copy.deepcopy,
    ]
    with open_storage(source) as other:
        for number, change in enumerate(changes):
            with MemmapStorage(tmp_path / f"{number}") as storage:
                storage.extend(change(other[:40]))
                assert storage.manifest["runs"] == [{"first_row": 0}]
                storage.extend(other[40:])
                storage.extend(change(other[:40]), ids="renumber")
                storage.extend(change(other[40:]), ids="renumber")
                assert told(storage) == [(0, None, []), (40, [40, 79], [4]), (80, None, [])]
            assert verify(tmp_path / f"{number}").sound


def test_nothing_is_kept_open_for_it(source: Path, tmp_path: Path) -> None:
    storage = open_storage(source)
    reader, taken = weakref.ref(storage.reader), storage[:]
    storage.close()
    del storage
    gc.collect()
    assert reader() is None
    with MemmapStorage(tmp_path / "target") as target:
        target.extend(taken)
        assert told(target) == [(0, [0, 79], [3, 4])]


def test_a_ring_and_more_rows_than_a_ring_has(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=60) as ring:
        collect(ring, 3)
        collect(ring, 4)
        for number, taken in enumerate((ring[:], ring.in_order(), ring[0:60])):
            with MemmapStorage(tmp_path / f"{number}") as target:
                target.extend(taken, ids="renumber")
                assert told(target) == [(0, [20, 79], [3, 4])]
            found = verify(tmp_path / f"{number}").findings
            assert {each.check for each in found} <= {"steps"}  # the oldest episode is cut
        ring.overlay("weight", torch.float32)
        for number, other in enumerate((ring, ring.with_overlays("weight"))):
            with MemmapStorage(tmp_path / f"part {number}") as target:
                target.extend(other[2:8], ids="fresh")
                assert told(target) == [(0, [62, 67], [4])]
        with MemmapStorage(tmp_path / "young", max_size=60) as young:
            young.extend(ring.in_order())
            assert told(young) == [(0, [20, 79], [3, 4])]
            with MemmapStorage(tmp_path / "small", max_size=20) as small:
                ReplayBuffer(storage=small, batch_size=2).extend(young[:])
                assert told(small) == [(0, [0, 59], [None])]
        ring.writer.empty()
        collect(ring, 5, 30)
        with MemmapStorage(tmp_path / "rest") as target:
            target.extend(ring[5:25])
            assert told(target) == [(0, [85, 104], [5])]


def write_a_run(connection: Any, path: Path) -> None:
    with MemmapStorage(path, mode="append") as storage:
        storage.initialise(storage.schema, {"seed": 8})
        storage.extend(rows(10, 10))
        connection.send("written")
        connection.recv()


def test_a_run_that_another_process_began_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path) as storage:
        storage.initialise(Schema.of(rows(0, 1)), {"seed": 7})
        storage.extend(rows(0, 10))
    with open_storage(path) as reader, MemmapStorage(tmp_path / "target") as target:
        target.extend(reader[2:5])
        with process(write_a_run, path) as (_, connection):
            assert receive(connection) == "written"
            target.extend(reader[5:15])
            closed = reader[:]
            connection.send("done")
        assert told(target) == [(0, [2, None], [7, 8])]
        reader.close()
        target.extend(closed)
        target.extend(closed)
        assert told(target) == [(0, [0, None], [7, 8])]
    with open_storage(tmp_path / "target") as target:
        assert told(target) == [(0, [0, 19], [7, 8])]


def test_what_is_refused_leaves_no_entry(tmp_path: Path, source: Path) -> None:
    with open_storage(source) as other, MemmapStorage(tmp_path / "target") as target:
        target.extend(other[:40])
        before = target.manifest["runs"]
        with pytest.raises(RowsMismatch):
            target.extend(other.get(slice(40, 80), ["observation"]))
        with pytest.raises(TrajectoryIdTaken):
            target.extend(other[:20])
        assert target.manifest["runs"] == before
    with open_storage(tmp_path / "target") as target:
        assert target.manifest["runs"] == before


@pytest.mark.parametrize(
    "name", ["target", "target.h5", pytest.param("target.zarr", marks=pytest.mark.slow)]
)
def test_no_manifest_is_too_small(tmp_path: Path, name: str) -> None:
    """Entries that do not fit are left out and counted, be they large, many or deep."""
    deep: Any = 0
    for _ in range(100):
        deep = [deep]
    sources = [MemmapStorage(tmp_path / f"source{number}") for number in range(2)]
    for source in sources:
        for seed in range(30):
            more = {"deep": deep} if seed == 5 else {}
            source.initialise(Schema.of(rows(0, 1)), {"seed": seed, "text": "x" * 20_000, **more})
            source.extend(rows(seed, 1))
    with make(tmp_path / name) as target:
        for number in range(300):
            target.extend(sources[number % 2][:])
        runs = target.manifest["runs"]
        assert len(runs[0]["runs"]) + runs[0]["runs_left_out"] == 30
        # The 24 runs after the deep one fit, but not into HDF5.
        assert len(runs[0]["runs"]) == (9 if name == "target.h5" else 24)
        assert len(runs) == copied_runs._MOST_COPIES + 1
        assert runs[-1] == {"first_row": 30 * 256, "copies_left_out": True}
        target.extend(sources[0].get(slice(4, 6)).clone())
        assert target.manifest["runs"] == runs
        target.initialise(target.schema, {"text": "y" * 200_000})
        target.extend(sources[0].get(slice(4, 6)))
        target.extend(rows(0, 1))
    for source in sources:
        source.close()
    assert not [each for each in verify(tmp_path / name).findings if each.check == "runs"]


def test_a_manifest_that_is_full(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as source, make(tmp_path / "target.h5") as target:
        source.initialise(Schema.of(rows(0, 1)), {"text": "x" * 10_000})
        source.extend(rows(0, 10))
        target.initialise(source.schema, {"text": "y" * 448_500})
        target.extend(rows(0, 10))
        target.extend(source[:])
        _, entry = target.manifest["runs"]
        assert entry["copied_from"]["rows"] == [0, 9]
        assert (entry["runs"], entry["runs_left_out"]) == ([], 1)
    assert not [each for each in verify(tmp_path / "target.h5").findings if each.check == "runs"]


def test_a_checkpoint_keeps_the_runs_as_they_are(tmp_path: Path, source: Path) -> None:
    with make(tmp_path / "target", mode="create") as target, open_storage(source) as other:
        target.extend(other[:40])
        target.dumps(tmp_path / "copy")
        with open_storage(tmp_path / "copy") as copied:
            assert copied.manifest["runs"] == target.manifest["runs"]
