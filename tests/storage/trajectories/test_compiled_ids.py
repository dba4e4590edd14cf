"""Compare the compiled checks of trajectory ids with those in NumPy, over random batches."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tallyroll.collector import SyncCollector
from tallyroll.storage import MemmapStorage, fast_paths
from tallyroll.storage.errors import TrajectoryIdTaken
from tallyroll.storage.trajectories.id_checks import IdChecks

LANES = 6


def batches(seed: int, count: int) -> list[dict[Any, np.ndarray]]:
    """Return batches of several steps of the lanes, a tenth of which have a fault."""
    rng, found = np.random.default_rng(seed), []
    ids, steps, fresh = np.arange(LANES), np.zeros(LANES, np.int64), LANES

    def jump() -> int:
        return 1 if rng.random() < 0.95 else int(rng.choice([2, 63, 64, 1500, 5000, 10_000]))

    for _ in range(count):
        rows = []
        lanes = np.flatnonzero(rng.random(LANES) < 0.8)
        slots = [lane for _ in range(int(rng.integers(1, 5))) for lane in lanes] or [0]
        if rng.random() < 0.3:
            slots.sort()
        for lane in slots:
            flags = rng.random(3) < 0.15
            rows.append((ids[lane], steps[lane], lane, *flags))
            steps[lane] += 1
            if (flags[0] or flags[1]) and flags[2]:
                ids[lane], steps[lane], fresh = fresh, 0, fresh + jump()
        columns = [np.array(each) for each in zip(*rows, strict=True)]
        if rng.random() < 0.2:  # a fault
            column, at = int(rng.integers(3)), int(rng.integers(len(rows)))
            columns[column] = columns[column].copy()
            columns[column][at] = rng.integers(0, max(LANES + 2, fresh if column == 0 else 3))
            ids, steps, fresh = np.arange(fresh, fresh + LANES), steps * 0, fresh + LANES
        keys = [("collector", name) for name in ("traj_ids", "step", "lane")]
        batch: dict[Any, np.ndarray] = {
            key: column.astype(np.int32 if key[1] == "lane" else np.int64)
            for key, column in zip(keys, columns, strict=False)
        }
        for name, flag in zip(("terminated", "truncated", "done"), columns[3:], strict=True):
            batch["next", name] = flag.astype(np.bool_)[:, None]
        found.append(batch)
    return found


def as_tensors(batch: dict[Any, np.ndarray]) -> TensorDict:
    count = len(batch["collector", "step"])
    return TensorDict({key: torch.from_numpy(each) for key, each in batch.items()}, [count])


def outcome(storage: MemmapStorage, rows: Any) -> str:
    try:
        storage.extend(rows)
    except TrajectoryIdTaken as error:
        return str(error).replace(str(storage.path), "")
    return "written"


def both_ways(
    stack: ExitStack, path: Path, first: Any, ring: int | None = None
) -> list[MemmapStorage]:
    """Return storages with the rows ``first``, whose checks are compiled and in NumPy."""
    made = []
    for way in ("compiled", "plain"):
        with fast_paths.switched_off(*(["kernel"] if way == "plain" else [])):
            storage = stack.enter_context(MemmapStorage(path / way, max_size=ring))
            storage.extend(first)  # creates the checks
        made.append(storage)
    return made


@pytest.mark.parametrize("ring", [None, 60])
@pytest.mark.parametrize("kind", ["arrays", "tensors", "strided"])
@pytest.mark.parametrize("seed", range(4))
def test_both_ways_refuse_the_same_batches(
    tmp_path: Path, seed: int, kind: str, ring: int | None
) -> None:
    with ExitStack() as stack:
        made = both_ways(stack, tmp_path, batches(seed, 1)[0], ring)
        found = []
        for batch in batches(seed, 120)[1:]:
            rows: Any = as_tensors(batch) if kind == "tensors" else batch
            if kind == "strided":
                rows = {key: np.repeat(each, 2, axis=0)[::2] for key, each in batch.items()}
            found.append([outcome(storage, rows) for storage in made])
        ids = [storage.in_order()["collector", "traj_ids"].tolist() for storage in made]
    assert all(one == other for one, other in found)
    assert ids[0] == ids[1]
    assert 20 < sum(one == "written" for one, _ in found) < len(found)


def one_row_trajectories(seed: int, count: int) -> list[dict[Any, np.ndarray]]:
    """Return batches of one row per lane, with unused ids far below the largest, or used ones."""
    rng, used, last, found = np.random.default_rng(seed), set[int](), [-1] * LANES, []
    crawls = seed % 2 - 1  # 0: the ids of this lane fall out of the window; -1: of no lane
    for number in range(1, count + 1):
        ids = []
        for lane in range(LANES):
            later = sorted(each for each in used if each > last[lane])
            if later and rng.random() < 0.05:  # a fault
                ids.append(int(rng.choice(later[: 5 if lane == crawls else None])))
            else:
                free = set(range(last[lane] + 1, 100 * number)) - used - {*ids}
                ids.append(int(rng.choice(sorted(free)[: 5 if lane == crawls else None])))
        if not used.intersection(ids) and len({*ids}) == LANES:
            used.update(ids)
            last = ids
        ends = np.ones((LANES, 1), np.bool_)
        batch: dict[Any, np.ndarray] = {
            ("collector", "traj_ids"): np.array(ids),
            ("collector", "step"): np.zeros(LANES, np.int64),
            ("collector", "lane"): np.arange(LANES, dtype=np.int32),
            ("next", "terminated"): ends,
            ("next", "done"): ends,
        }
        found.append(batch)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_ids_below_the_largest(tmp_path: Path, seed: int) -> None:
    """The window of used ids moves many times over these batches."""
    with ExitStack() as stack:
        first, *others = one_row_trajectories(seed, 200)
        made = both_ways(stack, tmp_path, first)
        found = [[outcome(storage, batch) for storage in made] for batch in others]
    assert all(one == other for one, other in found)
    assert 20 < sum(one == "written" for one, _ in found) < len(found)


@pytest.mark.parametrize("size", [8, 32, 256])
@pytest.mark.parametrize("lanes", [1, 8])
def test_batches_of_collectors_are_admitted_by_the_extension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: int, size: int
) -> None:
    """The rows of a trajectory may come after those of trajectories with larger ids."""
    if not fast_paths.is_on("kernel"):
        pytest.skip("the extension is switched off")
    plain: list[int] = []
    real = IdChecks._admit_many
    monkeypatch.setattr(
        IdChecks, "_admit_many", lambda self, ids, *more: (plain.append(1), real(self, ids, *more))
    )
    collector = SyncCollector(
        "CartPole-v1", num_envs=lanes, frames_per_batch=size, total_frames=40 * size, seed=0
    )
    with collector, MemmapStorage(tmp_path / "rows") as storage:
        for batch in collector:
            storage.extend(batch)
        assert storage.head == 40 * size
    assert len(plain) == 1  # for lanes that were unknown


def test_an_id_that_falls_within_a_batch_is_refused(tmp_path: Path) -> None:
    def rows(*ids: int) -> dict[Any, np.ndarray]:
        ends = np.ones((len(ids), 1), np.bool_)
        return {
            ("collector", "traj_ids"): np.array(ids),
            ("collector", "step"): np.zeros(len(ids), np.int64),
            ("collector", "lane"): np.zeros(len(ids), np.int64),
            ("next", "terminated"): ends,
            ("next", "done"): ends,
        }

    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(rows(0, 1))
        with pytest.raises(TrajectoryIdTaken, match="in lane 0 trajectory 6 follows trajectory 7"):
            storage.extend(rows(7, 6))
        storage.extend(rows(6, 7))
        assert storage.head == 4


def test_a_write_that_failed_admits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(id: int, step: int) -> dict[Any, np.ndarray]:
        return {
            ("collector", "traj_ids"): np.array([id]),
            ("collector", "step"): np.array([step]),
            ("collector", "lane"): np.array([0]),
            ("next", "terminated"): np.zeros((1, 1), np.bool_),
            ("next", "done"): np.zeros((1, 1), np.bool_),
        }

    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(row(0, 0))
        storage.extend(row(0, 1))
        engine = storage.reader.engine
        with monkeypatch.context() as patch:
            patch.setattr(engine, "append", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                storage.extend(row(0, 2))
        storage.extend(row(0, 2))
        with pytest.raises(TrajectoryIdTaken):
            storage.extend(row(0, 2))
        assert storage.head == 3
