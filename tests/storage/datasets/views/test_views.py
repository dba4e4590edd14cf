"""Compare views of chosen trajectories with plain lists of the rows of each."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.utils.data import DataLoader
from torchrl.data import TensorDictReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.storage import (
    MemmapStorage,
    PrioritizedSampler,
    TrajectorySliceSampler,
    content_hash,
    n_step,
    open_storage,
    verify,
)
from tallyroll.storage.errors import (
    ColumnsMissing,
    InvalidExpression,
    NotPicklable,
    Overrun,
    ReadOnlyStorage,
    StateMismatch,
    StorageClosed,
)
from tallyroll.storage.ext.testing.reader_contract import assert_same_rows, collected
from tallyroll.storage.ext.views.view_reader import ViewReader
from tallyroll.storage.rows.keys import LANE, POLICY_VERSION, STEP, TRAJ_IDS
from tallyroll.storage.storages import DiskStorage, H5Storage, ZarrStorage
from tallyroll.storage.stores.rewinds import rewind_to

CHOICES = [
    "length > 3",
    "end == 'terminated' and return > 0",
    "lane == 1 or id in (0, 5)",
    "not whole or policy_version < 2",
    "False",
    "True",
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of three lanes in batches that split trajectories."""
    path = tmp_path_factory.mktemp("rows") / "storage"
    with MemmapStorage(path) as storage:
        for rows in collected().split([20, 1, 64, 56]):
            storage.extend(rows)
    return path


def facts_of(storage: DiskStorage) -> dict[int, dict[str, Any]]:
    """Return the facts about each trajectory that expressions may use, computed from its rows."""
    return {
        id: {
            "id": id,
            "length": len(rows),
            "return": rows["next", "reward"].double().sum().item(),
            "end": ("terminated" if rows["next", "terminated"][-1] else "truncated")
            if rows["next", "done"][-1]
            else "cut",
            "lane": rows[LANE][0].item(),
            "whole": rows[STEP][0].item() == 0,
            "policy_version": rows[POLICY_VERSION][-1].item(),
        }
        for id, rows in storage.trajectories.items()
    }


def wanted_rows(storage: DiskStorage, text: str) -> tuple[list[int], list[int]]:
    """Return the ids for which Python finds ``text`` true, and the numbers of their rows."""
    text = text.replace("return", "returned")
    names = facts_of(storage)
    ids = [id for id, f in names.items() if eval(text, {**f, "returned": f["return"]})]
    of_rows = storage.column(TRAJ_IDS).reshape(-1).tolist()
    return ids, [row for row, id in enumerate(of_rows) if id in ids]


@pytest.mark.parametrize("text", CHOICES)
def test_a_view_has_the_rows_of_the_chosen_ones_in_their_order(path: Path, text: str) -> None:
    with open_storage(path) as storage:
        ids, rows = wanted_rows(storage, text)
        view = storage.trajectories.where(text)
        assert isinstance(view, DiskStorage)
        assert (view.mode, len(view), view.trajectories.ids.tolist()) == ("read", len(rows), ids)
        assert storage.trajectories.matching(text)["id"].tolist() == ids
        if rows:
            assert_same_rows(view.get(slice(None)), storage.get(rows))
            assert view.column("action").tolist() == storage.column("action")[rows].tolist()
            assert_same_rows(view.get([-1, 0]), storage.get([rows[-1], rows[0]]))
            for id in ids:
                assert_same_rows(view.trajectories[id], storage.trajectories[id])
            table, all_of = view.trajectories.table, storage.trajectories.table
            chosen = np.isin(all_of["id"], ids)
            for name in set(table.dtype.names) - {"first_row", "last_row"}:
                assert table[name].tolist() == all_of[name][chosen].tolist()
            assert [rows[at] for at in table["last_row"]] == all_of["last_row"][chosen].tolist()


def test_a_view_of_a_view(path: Path) -> None:
    with open_storage(path) as storage:
        _, rows = wanted_rows(storage, "length > 3 and lane != 2 and policy_version > 0")
        view = storage.trajectories.where("length > 3").trajectories.where("lane != 2")
        view = view.trajectories.where("policy_version > 0")
        assert_same_rows(view.get(slice(None)), storage.get(rows))
        assert view.reader.rows is storage.reader, "it does not go through the one before"  # type: ignore[attr-defined]
        one = storage.trajectories.where("length > 3 and lane != 2 and policy_version > 0")
        assert view.manifest == one.manifest
        assert content_hash(view) == content_hash(one)


def test_what_draws_draws_from_the_chosen_ones_alone(path: Path) -> None:
    with open_storage(path) as storage:
        ids, rows = wanted_rows(storage, "length > 3")
        view = storage.trajectories.where("length > 3")
        slices = view.trajectories.sample_slices(200, 4, torch.Generator().manual_seed(0))
        assert set(slices[TRAJ_IDS].reshape(-1).tolist()) == set(ids)
        assert (slices[STEP].diff(dim=1) == 1).all()
        for sampler in (TrajectorySliceSampler(4), PrioritizedSampler(view)):
            buffer = TensorDictReplayBuffer(storage=view, sampler=sampler, batch_size=64)
            assert set(buffer.sample()[TRAJ_IDS].reshape(-1).tolist()) <= set(ids)
        drawn = [b[TRAJ_IDS] for b in view.loader(64, seed=1, batches=3, workers=1)]
        assert set(torch.cat(drawn).reshape(-1).tolist()) <= set(ids)
        found, wanted = n_step(view, torch.arange(len(view)), 3, 0.9), n_step(storage, rows, 3, 0.9)
        found.pop("index", None), wanted.pop("index", None)
        assert_same_rows(found, wanted)


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, storage: DiskStorage) -> None:
        self.storage = storage

    def __len__(self) -> int:
        return len(self.storage)

    def __getitem__(self, at: int) -> Any:
        return self.storage[at]["action"]


def test_it_is_pickled_as_the_path_and_its_rows(path: Path) -> None:
    with open_storage(path) as storage:
        view = storage.trajectories.where("length > 3")
        content = pickle.dumps(view)
        assert len(content) < 10_000
        there = pickle.loads(content)
        assert_same_rows(there.get(slice(None)), view.get(slice(None)))
        assert (there.trajectories.table == view.trajectories.table).all()
        assert there.manifest == view.manifest
        loader: Any = DataLoader(
            Rows(view), batch_size=8, num_workers=1, multiprocessing_context="fork"
        )
        assert torch.cat([*loader]).tolist() == view.column("action").tolist()
    with MemmapStorage() as writing:
        writing.extend(collected())
        with pytest.raises(NotPicklable):
            pickle.dumps(writing.trajectories.where("True"))


@pytest.mark.parametrize("kind", [MemmapStorage, H5Storage, ZarrStorage])
def test_rows_that_come_later_are_not_in_it(kind: type[DiskStorage], tmp_path: Path) -> None:
    rows = collected().exclude(("agents", "observation"), ("next", "agents", "observation"))
    first, rest = rows.split([100, 41])
    with kind(tmp_path / "rows", capacity=141) as storage:
        storage.extend(first)
        ids, rows = wanted_rows(storage, "length > 2")
        assert "open" in storage.trajectories.ends
        view = storage.trajectories.where("length > 2 or end == 'open'")
        before = view.get(slice(None))
        ends = view.trajectories.ends
        assert set(ends) == {"terminated", "truncated", "cut"}, "one that was open is cut in it"
        storage.extend(rest)
        assert len(storage.trajectories) > len(ids)
        assert_same_rows(view.get(slice(None)), before)
        assert view.trajectories.ends.tolist() == ends.tolist()
        assert len(storage.trajectories.where("True")) == 141


def test_the_runs_keep_their_numbers(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        for seed, frames in ((1, 60), (2, 90), (3, 60)):
            with SyncCollector(
                "CartPole-v1", num_envs=3, frames_per_batch=30, total_frames=frames,
                storage=storage, seed=seed,
            ) as collector:  # fmt: skip
                for _ in collector:
                    pass
        trajectories = storage.trajectories
        for run, rows in ((0, range(60)), (1, range(60, 150)), (2, range(150, 210))):
            view = trajectories.where(f"run == {run}")
            assert len(view) == len(rows)
            assert_same_rows(view.get(slice(None)), storage.get(rows))
            assert len(view.trajectories.where(f"run == {run}")) == len(rows)
            assert len(view.trajectories.where(f"run != {run}")) == 0
            assert [each["first_row"] for each in view.runs] == [0] * (run + 1)
        without = trajectories.where("run != 1")
        assert [each["first_row"] for each in without.runs] == [0, 60, 60]
        assert without.trajectories.matching("run == 2")["first_row"].min() == 60
        seeds = trajectories.where("run == 1 and reset_seed >= 0").trajectories.table["reset_seed"]
        assert seeds.tolist() == storage.runs[1]["lane_seeds"]
        # The chosen trajectories are not the first of their lanes, so they get no lane seeds.
        later = trajectories.where("run == 1 and reset_seed < 0")
        assert (later.trajectories.table["reset_seed"] == -1).all()
        assert len(later.trajectories.where("reset_seed >= 0")) == 0
        reader = later.reader
        assert isinstance(reader, ViewReader)
        counted = ViewReader(reader.rows, reader.picked).trajectories.table  # as for rings
        assert (counted["reset_seed"] == -1).all()


def test_what_is_made_of_it_says_whence(path: Path, tmp_path: Path) -> None:
    with open_storage(path) as storage, MemmapStorage(tmp_path / "made") as made:
        view = storage.trajectories.where("length > 3")
        made.extend(view.in_order())
        assert_same_rows(made.get(slice(None)), view.get(slice(None)))
        [run] = made.runs
        assert run["copied_from"]["id"].startswith(str(storage.manifest["id"]))
        view.dumps(tmp_path / "dump")
    assert verify(tmp_path / "made").sound
    with open_storage(tmp_path / "dump") as dumped, open_storage(tmp_path / "made") as made:
        assert content_hash(dumped) == content_hash(made)


def test_rows_that_are_gone_are_refused(tmp_path: Path) -> None:
    with MemmapStorage(max_size=60) as ring:
        for rows in collected()[:99].split(11):
            ring.extend(rows, ids="fresh")
        ids = set(ring.in_order()[TRAJ_IDS].reshape(-1).tolist())
        view = ring.trajectories.where("length >= 1")
        assert set(view.trajectories.ids.tolist()) == ids
        assert_same_rows(view.get(slice(None)), ring.in_order())
        cut_short = ring.trajectories.where("not whole")
        assert not cut_short.trajectories.whole.any()
        assert (cut_short.trajectories.lengths == [
            len(rows) for rows in cut_short.trajectories.values()
        ]).all()  # fmt: skip
        ring.extend(collected()[99:], ids="fresh")
        with pytest.raises(Overrun, match=r"row 39 of .* overwritten all rows below 81"):
            view.get([0])
        with pytest.raises(Overrun):
            view.column("action")
        assert_same_rows(view.get([-1]), ring.in_order()[17:18])
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected()[:100])
        low, high = (storage.trajectories.where(f"last_row {sign} 60") for sign in "<>")
        rewind_to(storage.writer, 80, None)
        storage.extend(collected()[:41], ids="renumber")
        assert len(low.get(slice(None))) == len(low)
        with pytest.raises(StateMismatch, match="this view has 100 rows that no longer match"):
            high.get([0])


def test_several_rewards_and_contexts(tmp_path: Path) -> None:
    rows = collected()
    rows["next", "reward"] = torch.randn(len(rows), 2)
    rows["collector", "context"] = TensorDict(
        {"gravity": rows[TRAJ_IDS].float() * 2, "wind": rows[TRAJ_IDS].bfloat16()[:, None]},
        [len(rows)],
    )
    rows["collector", "policy_id"] = rows[LANE] % 2
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        where = storage.trajectories.where
        sums = {id: each["next", "reward"].sum(0) for id, each in storage.trajectories.items()}
        assert [*where("return[1] > 0").trajectories] == [
            id for id, each in sums.items() if each[1] > 0
        ]
        with pytest.raises(InvalidExpression, match=r"return\[0\] to return\[1\]"):
            where("return > 0")
        assert [*where("context.gravity == 8").trajectories] == [4]
        assert [*where("context.wind == 5").trajectories] == [5]
        assert {id % 2 for id in where("policy_id == 1").trajectories.lanes.tolist()} == {1}


def test_without_the_columns(tmp_path: Path) -> None:
    rows = collected().exclude(("next", "reward"), POLICY_VERSION)
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows)
        for name in ("return", "policy_version", "context.gravity"):
            with pytest.raises(InvalidExpression, match=f"there is no column {name}"):
                storage.trajectories.where(f"{name} > 0")
    with MemmapStorage(tmp_path / "bare") as storage:
        storage.extend(TensorDict({"x": torch.arange(3)}, [3]))
        for ask in (lambda: storage.trajectories.where("True"), lambda: storage.split(train=1)):
            with pytest.raises(ColumnsMissing):
                ask()
    with MemmapStorage(tmp_path / "empty") as storage:
        assert len(storage.trajectories) == 0


def test_it_lives_as_long_as_the_storage(path: Path) -> None:
    storage = open_storage(path)
    with storage.trajectories.where("length > 3") as view:
        for write in (lambda: view.extend(view.get([0])), lambda: view.reserve(10)):
            with pytest.raises(ReadOnlyStorage, match="as a view"):
                write()
    assert not view.closed
    assert not storage.closed
    assert len(storage.trajectories.where("length > 3").get([0])) == 1
    storage.close()
    assert view.closed
    with pytest.raises(StorageClosed):
        view.get([0])
    # A view keeps the files of a storage open without any other reference.
    assert len(open_storage(path).trajectories.where("length > 3").get([0])) == 1


def test_with_overlays(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(collected())
        weight = storage.overlay("weight", torch.float32)
        weight.set(np.arange(141), np.arange(141, dtype=np.float32))
        view = storage.with_overlays("weight").trajectories.where("lane == 1")
        assert view.get(slice(None))["weight"].tolist() == [*range(1, 141, 3)]


# --- splits ---------------------------------------------------------------------------------------


def test_a_split_is_exact_and_the_same_each_time(path: Path, tmp_path: Path) -> None:
    with open_storage(path) as storage:
        every = storage.trajectories.ids.tolist()
        parts = storage.split(train=0.6, val=0.3, test=0.1, seed=7)
        ids = {name: part.trajectories.ids.tolist() for name, part in parts.items()}
        count = len(every)
        ends = [round(count * share) for share in (0, 0.6, 0.9, 1)]
        assert [len(each) for each in ids.values()] == np.diff(ends).tolist()
        assert sorted(each for part in ids.values() for each in part) == sorted(every)
        assert sum(map(len, parts.values())) == len(storage)
        again = {n: p.trajectories.ids.tolist() for n, p in storage.split(
            train=0.6, val=0.3, test=0.1, seed=7).items()}  # fmt: skip
        assert again == ids
        other = storage.split(train=0.6, seed=8)["train"].trajectories.ids.tolist()
        assert sorted(other) != sorted(ids["train"])
        order = torch.from_numpy(storage.column(LANE).argsort(kind="stable"))
        rows = storage.get(order)
    with MemmapStorage(tmp_path / "by lane") as storage:
        storage.extend(rows)
        assert storage.trajectories.ids.tolist() != every
        for name, part in storage.split(train=0.6, val=0.3, test=0.1, seed=7).items():
            assert sorted(part.trajectories.ids.tolist()) == sorted(ids[name])


def test_a_split_that_is_pinned(path: Path) -> None:
    """The split is the same in every version because published results depend on it."""
    with open_storage(path) as storage:
        every = storage.trajectories.ids.tolist()
        found = storage.split(val=0.2, seed=3)["val"].trajectories.ids.tolist()
    assert sorted(found) == sorted(sorted(every, key=lambda id: mixed(id ^ mixed(3)))[:5])


def mixed(number: int) -> int:
    """Return SplitMix64's next number after a state (Steele, Lea and Flood, 2014)."""
    most = 2**64 - 1
    number = (number + 0x9E3779B97F4A7C15) & most
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & most
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & most
    return number ^ (number >> 31)


def test_a_split_of_a_view(path: Path) -> None:
    with open_storage(path) as storage:
        view = storage.trajectories.where("length > 3")
        parts = view.split(one=0.5, other=0.5)
        ids = [part.trajectories.ids.tolist() for part in parts.values()]
        assert sorted(ids[0] + ids[1]) == sorted(view.trajectories.ids.tolist())
        most = storage.split(train=1 / 3, val=1 / 3, test=1 / 3)
        assert sum(map(len, most.values())) == len(storage)


@pytest.mark.parametrize(
    ("shares", "error", "says"),
    [
        ({}, TypeError, "such as train=0.9"),
        ({"train": 0.9, "val": 0.2}, ValueError, r"add up to at most 1, got 0.9 \+ 0.2 = 1.1"),
        ({"train": 0}, ValueError, "expected train above 0 and at most 1, got 0"),
        ({"train": 1.5}, ValueError, "got 1.5"),
        ({"train": float("nan")}, ValueError, "got nan"),
        ({"train": "0.9"}, TypeError, "expected train to be a number, got '0.9'"),
        ({"train": True}, TypeError, "got True"),
        ({"train": 1, "seed": -1}, ValueError, "expected a seed from 0"),
        ({"train": 1, "seed": 1.5}, ValueError, "got 1.5"),
        ({"train": 1.0, "val": 1e-10}, ValueError, "got none for val"),
        ({"train": 0.5, "val": 1e-3, "test": 1e-4}, ValueError, "got none for val, test"),
    ],
)
def test_a_split_that_is_none(path: Path, shares: Any, error: type[Exception], says: str) -> None:
    with open_storage(path) as storage, pytest.raises(error, match=says):
        storage.split(**shares)
