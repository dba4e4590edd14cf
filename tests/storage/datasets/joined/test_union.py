"""Compare unions with plain lists: rows, ids, columns, rings, writers, pickles."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tallyroll.storage import (
    DiskStorage,
    H5Storage,
    MemmapStorage,
    PrioritizedSampler,
    Schema,
    ZarrStorage,
    content_hash,
    open_storage,
)
from tallyroll.storage.errors import (
    ColumnsMissing,
    IndexOutOfRange,
    Overrun,
    ReadOnlyStorage,
    RowsDoubled,
    SchemaMismatch,
    StateMismatch,
    StorageClosed,
    StorageMissing,
    TrajectoryIdTaken,
)
from tallyroll.storage.ext.joined.maps import JoinedMaps
from tallyroll.storage.ext.joined.packs import JoinedPacks
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows
from tallyroll.storage.stores.rewinds import rewind_to

SETTINGS = settings(
    max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)


def union_of(storage: DiskStorage) -> UnionReader:
    assert isinstance(storage.reader, UnionReader)
    return storage.reader


def made(path: Path, first: int, rows: int, kind: type[DiskStorage] = MemmapStorage) -> TensorDict:
    """Make a storage of rows with distinct values. Return the rows."""
    found = trajectory_rows(first, rows, steps=5)
    with kind(path, capacity=rows) as storage:
        storage.extend(found)
    return found


def leaves(rows: TensorDict) -> dict[Any, torch.Tensor]:
    return dict(rows.items(include_nested=True, leaves_only=True))


def assert_same(found: TensorDict, wanted: TensorDict) -> None:
    assert found.batch_size == wanted.batch_size
    both = leaves(found), leaves(wanted)
    assert both[0].keys() == both[1].keys()
    for key, values in both[0].items():
        assert torch.equal(values, both[1][key]), key


@pytest.fixture(params=["memmap", "mixed", "packed", "packed otherwise"])
def members(request: Any, tmp_path: Path) -> tuple[Path, TensorDict]:
    """Make eleven storages, run-0 to run-10, and return them with all of their rows.

    One storage is empty, and some have only a few rows.
    """
    mixed: list[type[DiskStorage]] = [ZarrStorage, MemmapStorage, H5Storage]
    kinds = mixed if request.param == "mixed" else [MemmapStorage]
    # Packing treats a single row differently because it does not show the next observation.
    few = 2 if request.param == "packed" else 1
    sizes, rows, first = [7, 30, 0, few, 12, 5, 5, 40, 3, 9, 8], [], 0
    for number, size in enumerate(sizes):
        path = tmp_path / f"run-{number}"
        kind = kinds[number % len(kinds)]
        if size:
            rows.append(made(path, first, size, kind))
        else:
            with kind(path, capacity=1) as storage:
                storage.extend(trajectory_rows(0, 1, steps=5)[:0])
        if request.param.startswith("packed"):
            packed_in_place(path)
        first += 5 * size
    with open_storage(tmp_path / "run-*") as union:
        joined = {"memmap": JoinedMaps, "packed": JoinedPacks}.get(request.param, type(None))
        assert type(union_of(union)._joined) is joined
    return tmp_path, torch.cat(rows)


def packed_in_place(path: Path, **options: Any) -> None:
    """Replace a storage by its packed rows."""
    with open_storage(path) as storage:
        storage.pack(path.with_name("packed"), **options)
    shutil.rmtree(path)
    path.with_name("packed").rename(path)


@SETTINGS
@given(data=st.data())
def test_rows_are_those_of_a_list(members: tuple[Path, TensorDict], data: Any) -> None:
    folder, every = members
    with open_storage(folder / "run-*") as union:
        count = len(every)
        assert len(union) == count
        shape = data.draw(st.sampled_from([(0,), (1,), (9,), (3, 2)]))
        size = int(np.prod(shape))
        numbers = data.draw(st.lists(st.integers(-count, count - 1), min_size=size, max_size=size))
        index = torch.tensor(numbers, dtype=torch.int64).reshape(shape)
        assert_same(union.get(index), every[index])
        ends = [data.draw(st.integers(-count - 3, count + 3)) for _ in range(2)]
        part = slice(*ends, data.draw(st.sampled_from([None, 1, 3, -2])))
        assert_same(union.get(part), every[torch.from_numpy(np.arange(count)[part].copy())])
        start, stop = sorted(data.draw(st.integers(0, count)) for _ in range(2))
        for key, values in leaves(every).items():
            key = (key,) if isinstance(key, str) else key
            found = union.reader.column(key).slice(start, stop)
            assert np.array_equal(found, values[start:stop].numpy())
        assert union.get(index.reshape(-1), ["observation"])["observation"].equal(
            every["observation"][index.reshape(-1)]
        )


def test_what_is_beyond_is_refused(members: tuple[Path, TensorDict]) -> None:
    folder, every = members
    with open_storage(folder / "run-*") as union:
        for index in (len(every), [0, len(every)], -len(every) - 1):
            with pytest.raises(IndexOutOfRange):
                union.get(index)
    with pytest.raises(StorageClosed):
        union.get([0])


@pytest.fixture
def three(tmp_path: Path) -> Path:
    """Make storages a, b and c with different rows. Their trajectories all have the ids 0 to 3."""
    for number, name in enumerate("abc"):
        rows = trajectory_rows(0, 20, steps=5)
        rows["observation"] += 1000 * number
        with MemmapStorage(tmp_path / name) as storage:
            storage.extend(rows)
    return tmp_path


def test_ids_that_clash_are_moved(three: Path) -> None:
    with open_storage([three / "a", three / "b", three / "c"]) as union:
        assert union_of(union).ids_moved_by == (0, 4, 8)
        assert union.trajectories.ids.tolist() == list(range(12))
        assert union.get(slice(None))["collector", "traj_ids"].tolist() == [
            number // 5 for number in range(60)
        ]
        assert union.trajectories[6]["observation"].reshape(-1).tolist() == [
            float(1000 + number) for number in range(10, 15)
        ]
        assert union.column(("collector", "traj_ids"))[20:25].tolist() == [4] * 5
    with pytest.raises(
        TrajectoryIdTaken, match=r"4 trajectory ids of .*b also .* as 0 in .*a\. Op"
    ):
        open_storage([three / "a", three / "b"], ids="keep")
    with pytest.raises(ValueError, match="ids: expected 'offset' or 'keep', got"):
        open_storage([three / "a"], ids="moved")


def test_ids_that_do_not_clash_stay(tmp_path: Path) -> None:
    """Shards whose lanes take turns have such ids. Their union equals the single run."""
    rows = trajectory_rows(0, 40, steps=5)
    with MemmapStorage(tmp_path / "one") as one:
        one.extend(rows)
    odd = rows["collector", "traj_ids"] % 2
    for shard in range(2):
        with MemmapStorage(tmp_path / f"shard-{shard}") as storage:
            storage.extend(rows[odd == shard])
    with open_storage(str(tmp_path / "shard-*")) as union:
        assert union_of(union).ids_moved_by == (0, 0)
        assert content_hash(union) == content_hash(tmp_path / "one")
        assert union.trajectories.returns.sum() == rows["next", "reward"].sum()
    with open_storage(str(tmp_path / "shard-*"), ids="keep") as union:
        assert len(union.trajectories) == 8


def test_ids_beyond_their_dtype_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        rows = trajectory_rows(0, 10, steps=5)
        rows["collector", "traj_ids"] = torch.tensor([0] * 5 + [250] * 5, dtype=torch.uint8)
        with MemmapStorage(tmp_path / name) as storage:
            storage.extend(rows)
    with (
        open_storage(tmp_path / "?") as union,
        pytest.raises(TrajectoryIdTaken, match="uint8 cannot"),
    ):
        union.get([0])


def test_columns_that_differ_are_named(tmp_path: Path) -> None:
    rows = trajectory_rows(0, 10, steps=5)
    extra = rows.clone().set("pixels", torch.zeros(10, 3, dtype=torch.uint8))
    other = rows.clone().set("observation", torch.zeros(10, 2))
    for name, each in (("a", rows), ("b", extra), ("c", other)):
        with MemmapStorage(tmp_path / name) as storage:
            storage.extend(each)
    with pytest.raises(
        SchemaMismatch, match=r"pixels is not in .*a\. Pass columns= .* 9 columns that all"
    ):
        open_storage([tmp_path / "a", tmp_path / "b"])
    with pytest.raises(
        SchemaMismatch, match=r"observation is float32 \[1\] in .*c has float32 \[2\]"
    ):
        open_storage([tmp_path / "a", tmp_path / "c"], columns=["observation"])
    with pytest.raises(ColumnsMissing, match="got nothing"):
        open_storage([tmp_path / "a", tmp_path / "b"], columns=["nothing"])
    with pytest.raises(ColumnsMissing, match="got none"):
        open_storage([tmp_path / "a", tmp_path / "b"], columns=[])
    wanted = ["observation", ("next", "reward")]
    with open_storage([tmp_path / "a", tmp_path / "b"], columns=wanted) as union:
        assert union.schema.keys == (("observation",), ("next", "reward"))
        assert_same(union.get([3, 13]), rows.select(*wanted)[[3, 3]])
        assert_same(pickle.loads(pickle.dumps(union)).get([3]), rows.select(*wanted)[[3]])


def test_paths(three: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(three)
    for number in (1, 2, 10):
        made(three / f"r-{number}", 0, 5)
    with open_storage(["b", "r-*", "a"]) as union:
        assert [each.path.name for each in union_of(union).members] == [
            "b",
            "r-1",
            "r-2",
            "r-10",
            "a",
        ]
        assert union.path == Path("b, r-*, a")
    made(three / "[x]", 0, 5)  # a name, not a pattern
    assert not isinstance(open_storage("[x]").reader, UnionReader)
    with pytest.raises(StorageMissing, match="nix-\\* matches no path"):
        open_storage(["a", "nix-*"])
    with pytest.raises(RowsDoubled, match=r"a is given twice"):
        open_storage(["a", three / "a"])
    with pytest.raises(ValueError, match="got none"):
        open_storage([])
    with pytest.raises(TypeError, match="got 3"):
        open_storage(["a", 3])  # type: ignore[list-item]
    with pytest.raises(ReadOnlyStorage, match="nothing writes to it"):
        open_storage(["a", "b"], mode="append")
    monkeypatch.chdir("/")
    assert len(pickle.loads(pickle.dumps(union_opened(three)))) == 40


def union_opened(folder: Path) -> DiskStorage:
    return open_storage([folder / "a", folder / "b"])


def test_it_has_the_rows_of_its_opening(three: Path) -> None:
    """Rows that a writer adds later are neither in the union nor in its pickle.

    Rewound rows raise an error.
    """
    with MemmapStorage(three / "a", mode="append") as writer, union_opened(three) as union:
        before = union.get(slice(None))
        writer.extend(trajectory_rows(20, 20, steps=5))
        assert len(union) == 40
        assert_same(union.get(slice(None)), before)
        assert union.trajectories.lengths.sum() == 40
        with pickle.loads(pickle.dumps(union)) as there:
            assert_same(there.get(slice(None)), before)
        with open_storage([three / "a", three / "b"]) as later:
            assert len(later) == 60
            assert_same(later.get([3]), before[[3]])
            rewind_to(writer.writer, 30, None)
            for read in (
                lambda: later.get([3]),
                lambda: later.get(slice(None)),
                lambda: later.trajectories.table,
                lambda: later.reader.column(("observation",)).slice(0, 3),
            ):
                with pytest.raises(StateMismatch, match="was rewound since this union was opened"):
                    read()


@pytest.mark.parametrize("others", [MemmapStorage, ZarrStorage])
def test_a_ring_as_a_member(tmp_path: Path, others: Any) -> None:
    rows = trajectory_rows(0, 50, steps=5)
    made(tmp_path / "a", 500, 10, others)
    with MemmapStorage(tmp_path / "ring", max_size=30) as ring:
        for each in rows.split(10):
            ring.extend(each)
        with open_storage([tmp_path / "a", tmp_path / "ring"]) as union:
            assert union_of(union).members[1].span == range(20, 50)
            wanted = torch.cat([trajectory_rows(500, 10, steps=5), rows[20:]])
            assert_same(union.get(slice(None)), wanted)
            assert_same(union.get(torch.tensor([[39, 10], [0, 25]])), wanted[[[39, 10], [0, 25]]])
            assert union.trajectories.ids.tolist() == [100, 101, 4, 5, 6, 7, 8, 9]
            assert union.runs[1]["first_row"] == 10
            ring.extend(trajectory_rows(50, 10, steps=5))
            assert_same(union.get([25, 0]), wanted[[25, 0]])  # these rows remain
            for read in (
                lambda: union.get([25, 12]),
                lambda: union.get(slice(10, 20)),
                lambda: union.reader.column(("observation",)).slice(10, 20),
                lambda: pickle.loads(pickle.dumps(union)),
            ):
                with pytest.raises(Overrun, match="ring, and its writer has overwritten"):
                    read()


def test_priorities_are_kept_elsewhere(three: Path, tmp_path: Path) -> None:
    """Several storages have no common place for priorities, so a folder or a state holds them."""
    drawn = []
    for begun in (True, False):
        with open_storage([three / "a", three / "b"]) as union:
            sampler = PrioritizedSampler(union)
            buffer = TensorDictReplayBuffer(storage=union, sampler=sampler, batch_size=64)
            if begun:
                index = torch.arange(40)
                buffer.update_priority(index, (index == 33).float())
                sampler.dumps(tmp_path / "kept")
                state = sampler.state_dict()
            else:
                sampler.loads(tmp_path / "kept")
            counts = buffer.sample()["observation"].reshape(-1).unique(return_counts=True)
            drawn.append(counts[0][counts[1].argmax()].item())
            assert sampler.state_dict()["leaves"].equal(state["leaves"])
            with pytest.raises(ReadOnlyStorage, match="Use dumps"):
                sampler.save()
    assert drawn == [1013.0, 1013.0]
    with (
        open_storage([three / "b", three / "a"]) as other,
        pytest.raises(StateMismatch, match="belongs to another storage"),
    ):
        PrioritizedSampler(other).load_state_dict(state)


def test_the_table_beside_the_rows_is_that_of_the_rows(three: Path) -> None:
    """Each member keeps its own table, and a union joins them, even if a member ends in a cut."""
    made(three / "d", 300, 12)
    paths = [three / name for name in "adb"]
    with open_storage(paths) as union:
        joined = union.trajectories.table
        assert union.reader.episode_lines(joined.dtype) is not None
    for path in paths:
        (path / "episodes.npy").unlink()
    with open_storage(paths) as union:
        assert union.reader.episode_lines(joined.dtype) is None
        assert (union.trajectories.table == joined).all()


def test_runs_of_all_are_there(tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        with MemmapStorage(tmp_path / name) as storage:
            for part in range(2):
                storage.initialise(trajectory_schema(), {"part": [number, part], "lane_seeds": [7]})
                storage.extend(trajectory_rows(100 * number + 10 * part, 10, steps=5), ids="fresh")
    with open_storage([tmp_path / "b", tmp_path / "a"]) as union:
        found = [(run["first_row"], run["part"]) for run in union.runs]
    assert found == [(0, [1, 0]), (10, [1, 1]), (20, [0, 0]), (30, [0, 1])]


def trajectory_schema() -> Schema:
    return Schema.of(trajectory_rows(0, 1, steps=5))


def test_maps_side_by_side_give_what_members_give(
    three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JoinedMaps, "of", lambda *_: None)
    index = torch.randint(60, (200,))
    with open_storage(three / "?") as slow:
        assert slow.reader._joined is None  # type: ignore[attr-defined]
        wanted = slow.get(index), slow.trajectories.sample_slices(8, 3, torch.Generator())
    monkeypatch.undo()
    with open_storage(three / "?") as fast:
        assert fast.reader._joined is not None  # type: ignore[attr-defined]
        assert_same(fast.get(index), wanted[0])
        found = fast.trajectories.sample_slices(8, 3, torch.Generator())
        assert_same(found, wanted[1])
