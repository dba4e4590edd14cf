"""Compare copies to a new storage with plain lists: columns, order, formats, provenance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from tallyroll.storage import MemmapStorage, content_hash, open_storage, verify
from tallyroll.storage.errors import (
    ColumnsMissing,
    InvalidSchema,
    NotWritable,
    Overrun,
    PathIsFile,
    PathIsTaken,
    StateMismatch,
    StorageFull,
    StorageLocked,
)
from tallyroll.storage.ext import storage_copy
from tallyroll.storage.ext.atomic_create import atomic_creation
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.stores.rewinds import rewind_to

FORMATS = ("memmap", "hdf5", "zarr")
SETTINGS = settings(
    max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Make a source with two lanes whose trajectories alternate, and a group of agents' columns."""
    rows = collected().exclude("agents", ("next", "agents"))
    with MemmapStorage(tmp_path / "source") as storage:
        for each in rows.split(33):
            storage.extend(each)
    return tmp_path / "source"


def nothing_is_left(folder: Path) -> bool:
    return not [each for each in folder.iterdir() if each.name.endswith(".written-aside")]


@pytest.fixture
def few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_copy, "_BLOCK_NBYTES", 1500)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.usefixtures("few_rows_at_a_time")
def test_all_rows_in_any_format(source: Path, tmp_path: Path, format: str) -> None:
    told: list[tuple[int, int]] = []
    with open_storage(source) as storage:
        report = storage.copy_to(
            tmp_path / "copy", format=format, progress=lambda *of: told.append(of)
        )
        assert (report.rows, report.format) == (len(storage), format)
        assert told[-1] == (storage.nbytes, storage.nbytes)
        assert len(told) > 5
        with open_storage(tmp_path / "copy") as copy:
            assert_same_rows(copy.get(slice(None)), storage.get(slice(None)))
            assert copy.manifest["format"] == f"tallyroll.{format}"
            assert copy.manifest["id"] != storage.manifest["id"]
            assert (copy.trajectories.table == storage.trajectories.table).all()
            entry = copy.runs[0]
            assert entry["copied_from"] == {"id": storage.manifest["id"], "rows": [0, 140]}
            assert entry["runs"] == storage.runs
            assert not copy.left_open
        with open_storage(
            tmp_path / "copy", mode="append", capacity=300
        ) as copy:  # continue it like any other storage
            copy.extend(storage.get(slice(None)), ids="renumber")
    assert verify(tmp_path / "copy").sound
    assert nothing_is_left(tmp_path)


@SETTINGS
@given(data=st.data())
def test_sorted_rows_of_some_columns(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    """The model sorts a list of rows by the start of their trajectory, then by step."""
    folder = tmp_path_factory.mktemp("rows")
    sizes = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=3))
    members, every, before = [], [], 0
    for number, size in enumerate(sizes):
        lanes = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        rows = of_lanes(lanes, data.draw(st.integers(1, 4)))
        with MemmapStorage(folder / f"m-{number}") as storage:
            storage.extend(rows, ids="fresh")
        members.append(folder / f"m-{number}")
        ids = rows["collector", "traj_ids"]
        own = [(number, ids[at].item(), rows["collector", "step"][at].item()) for at in range(size)]
        begun = {id: own.index(next(row for row in own if row[1] == id)) for _, id, _ in own}
        order = sorted(range(size), key=lambda at: (begun[own[at][1]], own[at][2]))
        every += [before + at for at in order]
        before += size
    with open_storage(members) as union:
        union.copy_to(folder / "sorted.zarr", sort=True, drop=["action"])
        with open_storage(folder / "sorted.zarr") as copy:
            assert_same_rows(copy.get(slice(None)), union.get(every).exclude("action"))
            assert [run["first_row"] for run in copy.runs] == [
                sum(sizes[:at]) for at in range(len(sizes))
            ]


def of_lanes(lanes: list[int], steps: int) -> TensorDict:
    """Return rows of lanes in this order, in trajectories of this many steps."""
    seen = [0, 0, 0]
    ids, step = [], []
    for lane in lanes:
        ids.append(lane + 3 * (seen[lane] // steps))
        step.append(seen[lane] % steps)
        seen[lane] += 1
    count = len(lanes)
    done = torch.tensor(step)[:, None] == steps - 1
    return TensorDict(
        {
            "observation": torch.rand(count, 2),
            "action": torch.arange(count),
            "next": {"terminated": done, "truncated": torch.zeros_like(done), "done": done},
            "collector": {
                "traj_ids": torch.tensor(ids),
                "step": torch.tensor(step),
                "lane": torch.tensor(lanes, dtype=torch.int32),
            },
        },
        [count],
    )


def test_columns_and_groups(tmp_path: Path) -> None:
    """Batch dimensions of agents stay in the groups that are copied."""
    with MemmapStorage(tmp_path / "source") as storage:
        agents = TensorDict({"x": torch.rand(6, 2, 3), "y": torch.rand(6, 2)}, [6, 2])
        storage.extend(TensorDict({"agents": agents, "z": torch.arange(6)}, [6]))
        every = storage.get(slice(None))
        storage.copy_to(tmp_path / "a", columns=[("agents", "x")])
        storage.copy_to(tmp_path / "b", drop="z")
        storage.copy_to(tmp_path / "c", drop=[("agents", "x"), ("agents", "y")])
        for name, wanted in (
            ("a", every.select(("agents", "x"))),
            ("b", every.exclude("z")),
            ("c", every.exclude("agents")),
        ):
            with open_storage(tmp_path / name) as copy:
                assert_same_rows(copy.get(slice(None)), wanted)
        for more, told in (
            ({"columns": ["w"]}, "got w"),
            ({"columns": []}, "got none"),
            ({"drop": ["w"]}, "got w"),
            ({"columns": ["z"], "drop": ["z"]}, "Keep at least one"),
        ):
            with pytest.raises(ColumnsMissing, match=told):
                storage.copy_to(tmp_path / "d", **more)  # type: ignore[arg-type]
        with pytest.raises(ColumnsMissing, match="Copy without sorting"):
            storage.copy_to(tmp_path / "d", sort=True)
        with pytest.raises(ValueError, match="format: expected one of"):
            storage.copy_to(tmp_path / "d", format="parquet")
        with pytest.raises(ValueError, match="has the suffix of hdf5"):
            storage.copy_to(tmp_path / "d.h5", format="zarr")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a", "b", "c", "source"]


def test_a_copy_of_nothing(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(trajectory_rows(0, 5, steps=5)[:0])
        assert storage.copy_to(tmp_path / "copy", sort=True).rows == 0
    with open_storage(tmp_path / "copy") as copy:
        assert len(copy) == 0
        assert len(copy.trajectories) == 0
    assert not [each for each in verify(tmp_path / "copy").findings if each.check != "runs"]


@pytest.mark.parametrize("suffix", ["", ".h5", ".zarr"])
def test_what_is_there_is_not_replaced(source: Path, tmp_path: Path, suffix: str) -> None:
    place = tmp_path / f"place{suffix}"
    with open_storage(source) as storage:
        storage.copy_to(place)
        before = content_hash(place)
        with pytest.raises(PathIsTaken, match="already exists"):
            storage.copy_to(place)
        with pytest.raises(PathIsTaken, match="already exists"):
            storage.copy_to(source, format=None)
        assert content_hash(place) == before
        (tmp_path / f"link{suffix}").symlink_to(tmp_path / "nothing")
        with pytest.raises(PathIsTaken):
            storage.copy_to(tmp_path / f"link{suffix}")
        with pytest.raises(NotWritable, match="is inside the storage"):
            storage.copy_to(source / f"x{suffix}")
        with pytest.raises(PathIsFile):
            storage.copy_to(source / "action.memmap" / f"x{suffix}")
        with pytest.raises(NotWritable):
            storage.copy_to(tmp_path / ("x" * 300 + suffix))


@pytest.mark.parametrize("suffix", ["", ".h5"])
def test_what_comes_there_meanwhile_is_not_replaced(
    source: Path, tmp_path: Path, suffix: str
) -> None:
    place = tmp_path / f"place{suffix}"

    def other(*_: int) -> None:
        if suffix:
            place.write_text("mine")
        else:
            place.mkdir(exist_ok=True)
            (place / "file").write_text("mine")

    with open_storage(source) as storage, pytest.raises(PathIsTaken):
        storage.copy_to(place, progress=other)
    assert (place if suffix else place / "file").read_text() == "mine"
    assert nothing_is_left(tmp_path)


def test_a_format_that_cannot_hold_them(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as storage:
        storage.extend(TensorDict({"x": torch.zeros(3, 2, dtype=torch.bfloat16)}, [3]))
        with pytest.raises(InvalidSchema, match="bfloat16"):
            storage.copy_to(tmp_path / "copy.h5")
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_free_space_is_asked_for_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tallyroll.storage.formats.space.free_bytes", lambda _: 1000)
    with open_storage(source) as storage:
        with pytest.raises(StorageFull, match="1,000 are free"):
            storage.copy_to(tmp_path / "copy")
        report = storage.copy_to(tmp_path / "copy", dry_run=True)
    assert (report.free, report.nbytes) == (1000, 141 * report.row_nbytes)
    assert [each.name for each in tmp_path.iterdir()] == ["source"]


def test_two_at_once(source: Path, tmp_path: Path) -> None:
    """One copy gets the destination, and the other is refused.

    Leftovers of a killed copy do not matter.
    """
    place = tmp_path / "copy"
    with open_storage(source) as storage:
        with contextlib.suppress(KeyboardInterrupt), atomic_creation(place) as target:
            target.mkdir()
            with pytest.raises(StorageLocked, match="is being written by another process"):
                storage.copy_to(place)
            assert target.is_dir()
            raise KeyboardInterrupt
        assert nothing_is_left(tmp_path)
        target.mkdir(parents=True)
        (target / "half").write_text("written")
        storage.copy_to(place)
        assert nothing_is_left(tmp_path)
        won: list[bool] = []

        def race() -> None:
            with open_storage(source) as own:
                try:
                    own.copy_to(tmp_path / "raced")
                    won.append(True)
                except (PathIsTaken, StorageLocked):
                    won.append(False)

        threads = [threading.Thread(target=race) for _ in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(60)
        assert sorted(won) == [False, False, False, True]
        assert content_hash(tmp_path / "raced") == content_hash(storage)


# --- with a concurrent writer ---------------------------------------------------------------------


def test_rows_that_come_meanwhile_are_not_copied(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as writer:
        writer.extend(trajectory_rows(0, 50, steps=5))
        with open_storage(tmp_path / "source") as storage:

            def more(*_: int) -> None:
                writer.extend(trajectory_rows(len(writer), 5, steps=5))

            assert storage.copy_to(tmp_path / "copy", progress=more).rows == 50
    with open_storage(tmp_path / "copy") as copy:
        assert_same_rows(copy.get(slice(None)), trajectory_rows(0, 50, steps=5))


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.usefixtures("few_rows_at_a_time")
def test_a_ring_that_is_overwritten_meanwhile(tmp_path: Path, many: bool) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=200) as ring:
        for start in range(0, 250, 50):
            ring.extend(trajectory_rows(start, 50, steps=5))
        with open_storage([tmp_path / "ring"] if many else tmp_path / "ring") as storage:
            assert storage.copy_to(tmp_path / "copy").rows == 200
            wanted = trajectory_rows(50, 200, steps=5)
            with open_storage(tmp_path / "copy") as copy:
                assert_same_rows(copy.get(slice(None)), wanted)
                assert copy.runs[0]["copied_from"]["rows"] == [50, 249]

            def overwrite(*_: int) -> None:
                ring.extend(trajectory_rows(ring.head, 100, steps=5))

            with pytest.raises(Overrun, match="a ring, and its writer has overwritten row"):
                storage.copy_to(tmp_path / "other", progress=overwrite)
    assert not (tmp_path / "other").exists()
    assert nothing_is_left(tmp_path)


def test_rows_that_are_taken_back_meanwhile(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "source") as writer:
        writer.extend(trajectory_rows(0, 20, steps=5))
        writer.extend(trajectory_rows(20, 20, steps=5))
        with (
            open_storage(tmp_path / "source") as storage,
            pytest.raises(StateMismatch, match="were rewound during the copy"),
        ):
            storage.copy_to(
                tmp_path / "copy", progress=lambda *_: rewind_to(writer.writer, 20, None)
            )
    assert nothing_is_left(tmp_path)


def test_following_a_writer(tmp_path: Path) -> None:
    """The copy ends with the writer.

    It has all rows, and the trajectories are those of the source.
    """
    writer = MemmapStorage(tmp_path / "source")
    writer.extend(trajectory_rows(0, 7, steps=5))
    parts = iter([trajectory_rows(7, 9, steps=5), trajectory_rows(16, 3, steps=5)])

    def on(*_: int) -> None:
        if (part := next(parts, None)) is not None:
            writer.extend(part)
        else:
            writer.close()

    with open_storage(tmp_path / "source") as storage:
        report = storage.copy_to(tmp_path / "copy", follow=True, progress=on)
    assert report.rows == 19
    with open_storage(tmp_path / "copy") as copy:
        assert_same_rows(copy.get(slice(None)), trajectory_rows(0, 19, steps=5))
        assert [run["copied_from"]["rows"] for run in copy.runs] == [[0, 18]]


def test_following_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    """The copy has the whole batches that were committed by then."""
    with MemmapStorage(tmp_path / "source") as writer:
        writer.extend(trajectory_rows(0, 8, steps=5))
        asked = iter(range(9))

        def stop() -> bool:
            writer.extend(trajectory_rows(len(writer), 4, steps=5))
            return next(asked) == 3

        with open_storage(tmp_path / "source") as storage:
            report = storage.copy_to(tmp_path / "copy", follow=True, stop=stop)
        assert report.rows == 8 + 3 * 4
        with open_storage(tmp_path / "copy") as copy:
            assert_same_rows(copy.get(slice(None)), trajectory_rows(0, 20, steps=5))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda storage, to: storage.copy_to(to, follow=True, sort=True), "follow and sort"),
        (
            lambda storage, to: storage.copy_to(to, follow=True, format="hdf5"),
            "final number of rows",
        ),
    ],
)
def test_what_cannot_be_followed(
    source: Path, tmp_path: Path, call: Callable[[Any, Path], object], told: str
) -> None:
    with open_storage(source) as storage, pytest.raises(ValueError, match=told):
        call(storage, tmp_path / "copy")
    with (
        open_storage([source]) as union,
        pytest.raises(ValueError, match="expected a single storage"),
    ):
        union.copy_to(tmp_path / "copy", follow=True)


def test_more_sources_than_a_manifest_names(tmp_path: Path) -> None:
    """One entry covers the remaining rows and marks that copies were left out."""
    rows = of_lanes([0, 1, 0], 2)
    for number in range(3):
        with MemmapStorage(tmp_path / f"m-{number}") as storage:
            storage.extend(rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tallyroll.storage.files.copied_runs._MOST_COPIES", 1)
        with open_storage(str(tmp_path / "m-?")) as union:
            union.copy_to(tmp_path / "copy")
    with open_storage(tmp_path / "copy") as copy:
        assert [run.get("copies_left_out") for run in copy.runs] == [None, True]
        assert [run["first_row"] for run in copy.runs] == [0, 3]
        assert np.array_equal(copy.trajectories.ids, [0, 1, 2, 3, 4, 5])
    assert verify(tmp_path / "copy").sound


def test_chosen_trajectories(tmp_path: Path) -> None:
    """From many storages, sorted: each entry names the source rows of its trajectories."""
    for number in range(3):
        with MemmapStorage(tmp_path / f"m-{number}") as storage:
            storage.extend(of_lanes([0, 1] * 10, 4))
    with open_storage(str(tmp_path / "m-?")) as union:
        view = union.trajectories.where("lane == 1 and length == 4 and id > 8")
        ids = view.trajectories.ids.tolist()
        assert len(ids) == 4
        assert view.copy_to(tmp_path / "copy.zarr", sort=True, drop=["action"]).rows == 16
        with open_storage(tmp_path / "copy.zarr") as copy:
            assert copy.trajectories.ids.tolist() == ids
            for id in ids:
                wanted = union.trajectories[id].exclude("action")
                assert_same_rows(copy.trajectories[id], wanted)
            with open_storage([tmp_path / "m-1", tmp_path / "m-2"]) as sources:
                members = [each.id for each in sources.reader.members]  # type: ignore[attr-defined]
            assert [run["copied_from"] for run in copy.runs] == [
                {"id": each, "rows": [1, 15], "ids_moved_by": moved}
                for each, moved in zip(members, union.reader.ids_moved_by[1:], strict=True)
            ]
    assert verify(tmp_path / "copy.zarr").sound


def test_a_view_of_a_ring_that_is_overwritten(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=40) as ring:
        ring.extend(trajectory_rows(0, 40, steps=5))
        for source in (tmp_path / "ring", [tmp_path / "ring"]):
            with open_storage(source) as storage:
                view = storage.trajectories.where("length == 5")
                ring.extend(trajectory_rows(ring.head, 10, steps=5))
                with pytest.raises(Overrun):
                    view.copy_to(tmp_path / "copy")
    assert nothing_is_left(tmp_path)
