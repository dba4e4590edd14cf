"""Test ids of appended rows: new or continued, and never those of other trajectories."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.collector import SyncCollector
from tallyroll.storage import (
    H5Storage,
    MemmapStorage,
    StorageFull,
    ZarrStorage,
    open_storage,
    verify,
)
from tallyroll.storage.errors import ColumnsMissing, RowsMismatch, TrajectoryIdTaken
from tallyroll.storage.formats.base import Format
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories import columns

import lane_model

IDS, STEP, LANE = (("collector", name) for name in ("traj_ids", "step", "lane"))
Row = tuple[int, int, int, bool]
"""Id, step, lane, and whether the trajectory ends."""


def batch(rows: list[Row], *, wide: bool = False) -> dict[Any, np.ndarray]:
    ids, steps, lanes, done = (np.array(each) for each in zip(*rows, strict=True))
    found = {
        ("x",): np.arange(len(rows), dtype=np.float32),
        ("next", "done"): done[:, None],
        ("next", "terminated"): done[:, None],
        IDS: ids.astype(np.int64),
        STEP: steps.astype(np.int64),
        LANE: lanes.astype(np.int32),
    }
    return {k: v[:, None] if wide and v.ndim == 1 else v for k, v in found.items()}


def tensors(rows: dict[Any, np.ndarray]) -> TensorDict:
    return TensorDict({key: torch.from_numpy(each) for key, each in rows.items()}, [len(rows[IDS])])


def stored(storage: DiskStorage) -> list[Row]:
    """Return the existing rows."""
    slots = storage.slots_of(np.array(storage.span, np.int64))
    done = storage.column(("next", "done"))[slots].reshape(-1)
    columns = (storage.column(key)[slots].reshape(-1) for key in (IDS, STEP, LANE))
    return list(zip(*(each.tolist() for each in (*columns, done)), strict=True))


@pytest.mark.parametrize("lane", [-1, 2**30])
def test_a_new_storage_has_lanes_that_can_be(tmp_path: Path, lane: int) -> None:
    with MemmapStorage(tmp_path / "data") as storage:
        with pytest.raises(TrajectoryIdTaken, match=f"have lane {lane}"):
            storage.extend(batch([(9, 0, lane, False), (10, 0, 0, False)]))
        storage.extend(batch([(9, 0, 1, False), (10, 0, 0, False)]))
        assert storage.head == 2


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_done_may_be_a_number(tmp_path: Path, dtype: type) -> None:
    def rows(*of: Row) -> dict[Any, np.ndarray]:
        found = batch(list(of))
        return found | {("next", "done"): found["next", "done"].astype(dtype)}

    with MemmapStorage(tmp_path / "data") as storage:
        storage.extend(rows((3, 0, 0, False), (4, 0, 1, True)))
        storage.extend(rows((3, 1, 0, False), (5, 0, 1, False)))
        with pytest.raises(TrajectoryIdTaken, match="it ended there"):
            storage.extend(rows((4, 1, 1, False), (3, 2, 0, False)))


class Model:
    """Model that decides row by row which batches continue trajectories correctly."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def wrong(self, rows: list[Row], ring: int = 0) -> bool:
        """Return whether an id is taken. Overwritten rows of a ring do not count."""
        there = self.rows[-ring:] if ring else self.rows
        for id in {row[0] for row in rows}:
            mine = [row for row in rows if row[0] == id]
            theirs = [row for row in there if row[0] == id]
            _, step, lane, _ = mine[0]
            if theirs:
                _, last, its_lane, done = theirs[-1]
                before = [row for row in [*there, *rows[: rows.index(mine[0])]] if row[2] == lane]
                if done or its_lane != lane or step != last + 1 or before[-1] != theirs[-1]:
                    return True
        return self.falls(there, rows)

    def falls(self, there: list[Row], rows: list[Row]) -> bool:
        """Return whether a smaller id follows a larger one in a lane."""
        for lane in {row[2] for row in rows}:
            mine = [row[0] for row in rows if row[2] == lane]
            before = [row[0] for row in there if row[2] == lane][-1:]
            if any(a > b for a, b in itertools.pairwise([*before, *mine])):
                return True
        return False

    def clashes(self, rows: list[Row]) -> bool:
        """Return whether a step of an id occurs twice in the rows."""
        return len({row[:2] for row in rows}) < len(rows)


def walk(rng: np.random.Generator, lanes: dict[int, Row], fresh: int) -> tuple[list[Row], int]:
    """Return rows as a vector of environments makes them, with an occasional wrong one."""
    rows: list[Row] = []
    for _ in range(rng.integers(1, 4)):
        for lane in range(len(lanes)):
            if rng.random() < 0.2:
                continue
            id, step, _, done = lanes[lane]
            if done or rng.random() < 0.1:
                id, step, fresh = fresh, -1, fresh + int(rng.integers(1, 4))
            lanes[lane] = id, step + 1, lane, bool(rng.random() < 0.15)
            rows.append(lanes[lane])
    if rng.random() < 0.5:
        rows.sort(key=lambda row: row[2])
    return rows, fresh


def spoilt(rng: np.random.Generator, model: Model, rows: list[Row], lanes: int) -> list[Row]:
    """Replace a row's id, step or lane by another's, or repeat an old row."""
    rows = list(rows)
    at = int(rng.integers(len(rows)))
    id, step, lane, done = rows[at]
    known = model.rows[int(rng.integers(len(model.rows)))]
    rows[at] = [
        (known[0], step, lane, done),
        (known[0], known[1] + 1, known[2], done),
        (id, step + int(rng.integers(-1, 2)), lane, done),
        (id, step, int(rng.integers(lanes)), done),
        known,
    ][int(rng.integers(5))]
    return rows


@pytest.mark.parametrize("ring", [0, 25])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_is_refused_as_by_a_plain_model(tmp_path: Path, seed: int, ring: int) -> None:
    rng, model, count = np.random.default_rng(seed), Model(), 1 + seed % 4
    lanes: dict[int, Row] = {lane: (-1, -1, lane, True) for lane in range(count)}
    fresh = accepted = refused = 0
    path = tmp_path / "rows"
    storage = MemmapStorage(path, max_size=ring or None)
    for turn in range(250):
        before = dict(lanes)
        rows, fresh = walk(rng, lanes, fresh)
        if model.rows and rows and rng.random() < 0.3:
            lanes, rows = before, spoilt(rng, model, rows, count)
        if not rows:
            continue
        given: Any = batch(rows, wide=bool(seed % 2))
        given = given if rng.random() < 0.5 else tensors(given)
        follow = steps_follow(rows)
        try:
            storage.extend(given)
        except TrajectoryIdTaken:
            assert model.wrong(rows, ring) or not follow or interleaved(rows), (turn, rows)
            refused += 1
            lanes = before
        else:
            assert not model.wrong(rows, ring), (turn, rows)
            assert follow, (turn, rows)
            assert not model.clashes(rows), (turn, rows)
            model.rows += rows
            accepted += 1
            for row in rows:
                lanes[row[2]] = row
            fresh = max(fresh, *(row[0] + 1 for row in rows))
        if rng.random() < 0.05:
            storage.close()
            storage = open_storage(path, "append")  # type: ignore[assignment]
        there = model.rows[-ring:] if ring else model.rows
        if turn % 10 == 0:
            assert stored(storage) == there
    storage.close()
    assert not [each for each in verify(path).findings if each.check in ("ids", "steps", "lanes")]
    assert accepted > 100
    assert refused > 20


def steps_follow(rows: list[Row]) -> bool:
    """Return whether each trajectory is in one lane, with consecutive steps until it ends."""
    for id in {row[0] for row in rows}:
        mine = [row for row in rows if row[0] == id]
        if any(b[1] != a[1] + 1 or b[2] != a[2] or a[3] for a, b in itertools.pairwise(mine)):
            return False
    return True


def interleaved(rows: list[Row]) -> bool:
    """Return whether a lane leaves a trajectory and returns to it."""
    for lane in {row[2] for row in rows}:
        ids = [row[0] for row in rows if row[2] == lane]
        changes = 1 + sum(a != b for a, b in itertools.pairwise(ids))
        if changes > len(set(ids)):
            return True
    return False


KINDS: dict[str, Any] = {
    "memmap": MemmapStorage,
    "hdf5": lambda path: H5Storage(path, capacity=100),
    "zarr": ZarrStorage,
}
THREE: list[Row] = [(4, 0, 1, False), (4, 1, 1, False), (7, 0, 0, True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([(4, 0, 1, False)], "trajectory 4 .*step 0, lane 1.* does not .* last step is 1"),
        ([(4, 3, 1, False)], "its last step is 1"),
        ([(4, 2, 0, False)], "its last row is of lane 1"),
        ([(7, 1, 0, False)], "it ended there"),
        ([(4, 2, 1, False), (4, 2, 1, False)], "step 2 follows step 2 in trajectory 4"),
        ([(8, 0, 2, False), (4, 1, 1, False)], "Row 1 of this batch"),
        ([(9, 0, 1, False), (4, 2, 1, False)], "in lane 1 trajectory 4 follows trajectory 9"),
        ([(9, 0, 1, False), (9, 0, 2, False)], "trajectory 9 is in lanes 1 and 2"),
        ([(9, 0, 1, False), (9, 0, 1, False)], "step 0 follows step 0 in trajectory 9"),
        ([(9, 0, 1, False), (9, 2, 1, False)], "step 2 follows step 0 in trajectory 9"),
        ([(9, 0, -1, False)], "have lane -1, but lanes are numbered from 0"),
        ([(9, 0, 2**30, False), (10, 0, 0, False), (7, 0, 0, True)], "have lane 1073741824"),
    ],
)
def test_why_rows_are_refused(tmp_path: Path, kind: str, rows: list[Row], why: str) -> None:
    with KINDS[kind](tmp_path / "rows") as storage:
        storage.extend(batch(THREE))
        for given in (batch(rows), tensors(batch(rows))):
            with pytest.raises(TrajectoryIdTaken, match=why):
                storage.extend(given)
        assert stored(storage) == THREE
        assert storage.extend(batch(rows), ids="fresh") == range(3, 3 + len(rows))


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_that_falls_within_its_lane_is_refused(tmp_path: Path, kind: str) -> None:
    """The id may be new, but `verify` reports such rows as unsound."""
    with KINDS[kind](tmp_path / "rows") as storage:
        storage.extend(batch(THREE))
        for given in ([(5, 0, 0, False)], [(8, 0, 2, False), (5, 0, 0, False)]):
            with pytest.raises(
                TrajectoryIdTaken, match=r"lane 0 is already in trajectory 7 .* ids must rise"
            ):
                storage.extend(batch(given))
        storage.extend(batch([(5, 0, 2, False)]))  # another lane
        storage.extend(batch([(5, 0, 0, False)]), ids="renumber")
        assert stored(storage)[3:] == [(5, 0, 2, False), (8, 0, 0, False)]


def test_rows_that_fill_a_ring_follow_none_that_was_there(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows", max_size=3) as ring:
        for rows in (THREE, THREE, [(2, 0, 1, False), (2, 1, 1, False), (3, 0, 0, True)]):
            ring.extend(batch(rows))
            assert stored(ring) == rows
            assert ring.trajectories.ids.tolist() == sorted({row[0] for row in rows})
        with pytest.raises(TrajectoryIdTaken, match="it ended there"):
            ring.extend(batch([(3, 1, 0, False)]))
    assert not verify(tmp_path / "rows").findings


def test_a_lane_that_went_on_does_not_come_back(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch(THREE))
        storage.extend(batch([(9, 0, 1, False)]))
        with pytest.raises(TrajectoryIdTaken, match="lane 1 has continued with trajectory 9"):
            storage.extend(batch([(4, 2, 1, False)]))
        storage.extend(batch([(9, 1, 1, False), (5, 0, 2, False)]))
        assert storage.trajectories.ids.tolist() == [4, 7, 9, 5]
        storage.extend(batch([(12, 0, 1, False), (12, 1, 1, False)]))
        for rows in ([(9, 2, 1, False)], [(5, 1, 2, False), (9, 2, 1, False)]):
            with pytest.raises(TrajectoryIdTaken, match="lane 1 has continued with trajectory 12"):
                storage.extend(batch(rows))


def test_another_storage_is_appended_with_new_numbers(tmp_path: Path) -> None:
    def collect(path: Path, seed: int, **more: Any) -> None:
        with SyncCollector(
            "CartPole-v1", None, num_envs=3, frames_per_batch=30, total_frames=90, seed=seed,
            storage=path, **more,
        ) as collector:  # fmt: skip
            for _ in collector:
                pass

    one, two = tmp_path / "one", tmp_path / "two"
    collect(one, 0)
    collect(two, 1)
    with open_storage(one, "append") as storage, open_storage(two) as source:
        rows = source.get(np.arange(len(source)))
        before = rows[IDS].clone()
        for given in (rows, {key: source.column(key) for key in source.schema.keys}):
            with pytest.raises(TrajectoryIdTaken, match=r'extend\(\.\.\., ids="renumber"\)'):
                storage.extend(given)
        assert storage.head == 90
        storage.initialise(source.schema, {"source": "two"})
        lengths = storage.trajectories.lengths.tolist()
        largest = int(storage.column(IDS).max())
        for given in (rows, {key: source.column(key) for key in source.schema.keys}):
            storage.extend(given, ids="renumber")
        assert torch.equal(rows[IDS], before), "the given rows were changed"
        assert storage.trajectories.lengths.tolist() == [
            *lengths,
            *source.trajectories.lengths.tolist(),
            *source.trajectories.lengths.tolist(),
        ]
        new = storage.column(IDS)[90:180]
        assert new.min() > largest
        np.testing.assert_array_equal(new - new.min(), before.numpy() - before.numpy().min())
        largest = int(storage.column(IDS).max())
    assert verify(one).sound
    with open_storage(one, "append") as storage, SyncCollector(
        "CartPole-v1", None, num_envs=3, frames_per_batch=30, total_frames=60, seed=3,
        storage=storage,
    ) as collector:  # fmt: skip
        for _ in collector:
            pass
        assert int(storage.column(IDS)[270:].min()) > largest
        assert len(set(storage.trajectories.ids.tolist())) == len(storage.trajectories)
    assert verify(one).sound


def test_numbers_that_a_ring_gave_away_are_not_given_again(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MemmapStorage(path, max_size=40) as storage, SyncCollector(
        "CartPole-v1", None, num_envs=2, frames_per_batch=20, total_frames=200, seed=0,
        storage=storage,
    ) as collector:  # fmt: skip
        for _ in collector:
            pass
    with open_storage(path, "append") as storage:
        used = int(storage.column(IDS).max())
        rows = storage.get(np.arange(10))
        span = storage.extend(rows, ids="renumber")
        slots = storage.slots_of(np.array(span))
        assert int(storage.column(IDS)[slots].min()) > used


def test_a_replay_buffer_is_as_safe_and_a_collector_pays_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        buffer = ReplayBuffer(storage=storage, batch_size=4)
        buffer.extend(tensors(batch(THREE)))
        with pytest.raises(TrajectoryIdTaken):
            buffer.extend(tensors(batch(THREE)))
        buffer.extend(tensors(batch([(4, 2, 1, False), (8, 0, 0, False)])))
        buffer.add(tensors(batch([(8, 1, 0, False)]))[0])
        with pytest.raises(TrajectoryIdTaken):
            buffer.add(tensors(batch([(8, 1, 0, False)]))[0])
        assert [row[:2] for row in stored(storage)] == [
            (4, 0), (4, 1), (7, 0), (4, 2), (8, 0), (8, 1),
        ]  # fmt: skip

    def never(*_: object) -> None:
        raise AssertionError("a collector's rows were looked at")

    monkeypatch.setattr("tallyroll.storage.trajectories.id_checks.IdChecks.admit", never)
    for name in ("direct", "buffer"):
        storage = MemmapStorage(tmp_path / name)
        to: dict[str, Any] = {"storage": storage}
        if name == "buffer":
            to = {"replay_buffer": ReplayBuffer(storage=storage, batch_size=4)}
        with storage, SyncCollector(
            "CartPole-v1", None, frames_per_batch=10, total_frames=30, seed=0, **to
        ) as collector:  # fmt: skip
            for _ in collector:
                pass
            assert storage.head == 30


def test_other_rows_are_nobodys_business(tmp_path: Path) -> None:
    rows = batch(THREE)
    for without in (IDS, STEP, LANE):
        path = tmp_path / without[1]
        some = {key: each for key, each in rows.items() if key != without}
        with MemmapStorage(path) as storage:
            for _ in range(3):
                storage.extend(some)
            with pytest.raises(ColumnsMissing, match=re.escape("Leave ids out")):
                storage.extend(some, ids="renumber")
            assert storage.head == 9
    with MemmapStorage(tmp_path / "names") as storage:
        with pytest.raises(
            ValueError, match="ids: expected one of 'check', 'renumber', 'fresh', got 'x'"
        ):
            storage.extend(rows, ids="x")  # type: ignore[arg-type]
        assert storage.extend(rows, ids="renumber") == range(3)
        with pytest.raises(RowsMismatch):
            storage.extend({key: each for key, each in rows.items() if key != IDS})


@pytest.mark.parametrize("new", [0, 100])
@pytest.mark.parametrize(
    "rows",
    {
        "one id in two lanes": [(9, 0, 0, False), (9, 1, 1, False)],
        "steps that fall": [(9, 1, 0, False), (9, 0, 0, False)],
        "a lane that goes to and fro": [(9, 0, 0, False), (8, 0, 0, False), (9, 1, 0, False)],
        "steps after its end": [(9, 0, 0, False), (9, 1, 0, True), (9, 2, 0, False)],
        "another end after its end": [(9, 0, 0, True), (8, 0, 1, False), (9, 1, 0, True)],
    }.items(),
    ids=lambda each: each[0],
)
def test_rows_of_no_one_trajectory_are_refused_also_where_ids_are_new(
    tmp_path: Path, rows: tuple[str, list[Row]], new: int
) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch(THREE))
        wrong = [(id + new, step, lane, done) for id, step, lane, done in rows[1]]
        with pytest.raises(TrajectoryIdTaken, match="do not form trajectories"):
            storage.extend(batch(wrong))
        assert storage.head == 3


@pytest.mark.parametrize("split", [False, True])
def test_a_batch_that_was_cut_goes_on_where_neither_flag_says_end(
    tmp_path: Path, split: bool
) -> None:
    """`verify` agrees: where both flags exist, done alone is not an end."""
    rows = batch([(1, 0, 0, False), (1, 1, 0, True), (1, 2, 0, False), (1, 3, 0, True)])
    rows["next", "truncated"] = rows["next", "terminated"] & np.array([[0], [0], [0], [1]], bool)
    rows["next", "terminated"] = np.zeros((4, 1), np.bool_)
    rows["collector", "cut"] = np.array([False, True, False, False])
    with MemmapStorage(tmp_path / "rows") as storage:
        for part in (slice(0, 2), slice(2, 4)) if split else (slice(0, 4),):
            storage.extend({key: each[part] for key, each in rows.items()})
    assert not verify(tmp_path / "rows").findings
    rows = rows | {STEP: rows[STEP] + 4}
    with (
        MemmapStorage(tmp_path / "rows", mode="append") as storage,
        pytest.raises(TrajectoryIdTaken, match="it ended there"),
    ):
        storage.extend(rows)


@pytest.mark.parametrize("rows_a_batch", [1, 2, 3])
def test_rows_that_a_trainer_marked_go_on(tmp_path: Path, rows_a_batch: int) -> None:
    """TorchRL's trainer sets truncated in every row and leaves done unchanged."""
    rows = batch([(2 + lane, step, lane, step == 5) for step in range(6) for lane in range(2)])
    rows["next", "terminated"] = np.zeros((12, 1), np.bool_)
    rows["next", "truncated"] = np.ones((12, 1), np.bool_)
    with MemmapStorage(tmp_path / "rows") as storage:
        for at in range(0, 12, rows_a_batch):
            storage.extend({key: each[at : at + rows_a_batch] for key, each in rows.items()})
        with pytest.raises(TrajectoryIdTaken, match="it ended there"):
            storage.extend(
                batch([(2, 6, 0, False), (3, 6, 1, False)])
                | {("next", "truncated"): np.zeros((2, 1), np.bool_)}
            )


def test_ids_that_are_no_whole_numbers_are_not_renumbered(tmp_path: Path) -> None:
    rows = batch(THREE)
    rows[IDS] = rows[IDS].astype(np.float64)
    with MemmapStorage(tmp_path / "rows") as storage:
        for given in (rows, tensors(rows)):
            with pytest.raises(ColumnsMissing, match="whole numbers"):
                storage.extend(given, ids="renumber")


def test_numbers_that_do_not_fit_are_told(tmp_path: Path) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch([(2**63 - 2, 0, 0, False)]))
        storage.extend(batch([(0, 0, 1, False)]), ids="renumber")
        with pytest.raises(TrajectoryIdTaken, match="renumbered from 9223372036854775808"):
            storage.extend(batch([(0, 0, 2, False)]), ids="renumber")
        assert storage.head == 2


@pytest.mark.parametrize("ids", [[-(2**63), 5 - 2**63], [2**63 - 6, 2**63 - 1]])
def test_ids_at_the_ends_of_their_range_are_renumbered(tmp_path: Path, ids: list[int]) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch([(7, 0, 0, False)]))
        storage.extend(batch([(id, 0, lane, True) for lane, id in enumerate(ids)]), ids="renumber")
        assert [row[0] for row in stored(storage)] == [7, 8, 13]


def test_a_write_that_failed_took_no_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(batch(THREE))
        many = [(10, step, 0, False) for step in range(200_000)]

        def full(self: Format, rows: int) -> None:
            raise StorageFull("no space")

        with monkeypatch.context() as patch:
            patch.setattr(type(storage.writer.files), "grow", full)
            with pytest.raises(StorageFull):
                storage.extend(batch(many))
        storage.extend(batch(many[:3]))
        storage.extend(batch(many[3:9]))
        storage.extend(batch([(4, 2, 1, False)]))
        assert storage.head == 13


@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize("ends", [False, True])
def test_ids_from_long_ago_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reopened: bool, ends: bool
) -> None:
    """Their last row may be anywhere, and columns for the ends of trajectories may be missing."""
    monkeypatch.setattr(columns, "_CHUNK_ROWS", 16)
    model = lane_model.Model.random(np.random.default_rng(3), rows=100, lanes=3, mean_length=4.0)

    def rows(start: int, stop: int) -> TensorDict:
        found = model.rows(start, stop)
        return found if ends else found.exclude("next")

    path = tmp_path / "rows"
    storage: DiskStorage = MemmapStorage(path)
    storage.extend(rows(0, 100))
    if reopened:
        storage.close()
        storage = open_storage(path, "append")
    with storage:
        for id, own in model.trajectories().items():
            with pytest.raises(TrajectoryIdTaken, match=f"trajectory {id} is already stored in"):
                storage.extend(rows(own[0], own[0] + 1))
        assert storage.head == 100
        if not ends:
            with pytest.raises(ColumnsMissing):
                _ = storage.trajectories.table
