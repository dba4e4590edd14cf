"""Test rows of a ring appended elsewhere: oldest first, in any slots."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import ReplayBuffer

from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.engine import columns as private_rows
from tallyroll.storage.errors import BatchTooLong, TrajectoryIdTaken
from tallyroll.storage.storages import DiskStorage

SIZE = 20
"""Slots of the ring."""
LENGTH = 5
"""Rows per trajectory."""


def episode(number: int, lanes: int, length: int = LENGTH) -> TensorDict:
    row = np.arange(number * length, (number + 1) * length)
    end = np.arange(length) == length - 1
    return TensorDict(
        {
            ("observation",): row.astype(np.float32),
            ("next", "observation"): (row + 1).astype(np.float32),
            ("next", "reward"): np.ones((length, 1), np.float32),
            ("next", "done"): end[:, None],
            ("next", "terminated"): end[:, None],
            ("next", "truncated"): np.zeros((length, 1), np.bool_),
            ("collector", "traj_ids"): np.full(length, number),
            ("collector", "step"): np.arange(length),
            ("collector", "lane"): np.full(length, number % lanes),
        },
        [length],
    )


def ring_of(path: Path, episodes: int, lanes: int = 1) -> MemmapStorage:
    ring = MemmapStorage(path, max_size=SIZE)
    for number in range(episodes):
        ring.extend(episode(number, lanes))
    return ring


def wanted(episodes: int) -> list[float]:
    stop = episodes * LENGTH
    return [float(row) for row in range(max(0, stop - SIZE), stop)]


def require(target: DiskStorage, rows: list[float]) -> None:
    assert target.get(slice(None))["observation"].tolist() == rows
    target.close()
    assert not verify(target.path).findings


@pytest.mark.parametrize("ids", ["check", "renumber", "fresh"])
@pytest.mark.parametrize(("lanes", "copied"), [(1, 0), (2, 2**16)])
def test_a_ring_is_appended_oldest_first(
    tmp_path: Path, ids: Any, lanes: int, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_rows, "_COPIED_NBYTES", copied)
    for episodes in (3, 5, 7):
        with ring_of(tmp_path / f"{episodes}", episodes, lanes) as ring:
            for name, size in (("archive", None), ("larger", 2 * SIZE)):
                target = MemmapStorage(tmp_path / f"{episodes}-{name}", max_size=size)
                target.extend(ring[:], ids=ids)
                require(target, wanted(episodes))
            smaller = MemmapStorage(tmp_path / f"{episodes}-smaller", max_size=10)
            with pytest.raises(BatchTooLong, match="or only the last 10"):
                smaller.extend(ring[:], ids=ids)
            smaller.extend(ring.in_order()[-10:], ids=ids)
            require(smaller, wanted(episodes)[-10:])


@pytest.mark.parametrize("take", [slice(None), slice(3, 17), slice(1, None, 2)], ids=str)
def test_parts_of_a_ring_are_appended_oldest_first(tmp_path: Path, take: slice) -> None:
    with ring_of(tmp_path / "ring", 7) as ring:
        for rows in (ring[take], pickle.loads(pickle.dumps(ring[take]))):
            target = MemmapStorage()
            target.extend(rows, ids="fresh")
            shown = ring[take]["observation"].tolist()
            assert target[:]["observation"].tolist() == sorted(shown) != shown


def test_a_ring_is_indexed_by_its_slots_all_the_same(tmp_path: Path) -> None:
    with ring_of(tmp_path / "ring", 7) as ring:
        slots = [*range(20, 35), *range(15, 20)]
        assert ring[:]["observation"].tolist() == slots
        assert ring.get(list(range(SIZE)))["observation"].tolist() == slots
        assert ring.in_order()["observation"].tolist() == sorted(slots)
        assert ring.in_order(["observation"])["observation"].tolist() == sorted(slots)


def test_a_ring_that_is_read_or_was_emptied_is_appended_oldest_first(tmp_path: Path) -> None:
    with ring_of(tmp_path / "ring", 7) as ring:
        reader = open_storage(tmp_path / "ring")
        for number, take in enumerate((lambda: reader[:], reader.in_order)):
            target = MemmapStorage(tmp_path / f"target{number}")
            target.extend(take())
            require(target, wanted(7))
        ReplayBuffer(storage=ring).empty()
        for number in range(7, 12):
            ring.extend(episode(number, 1))
            for opened in (ring, reader) if number % 2 else ():
                rows = wanted(number + 1)[-LENGTH * (number - 6) :]
                target = MemmapStorage(tmp_path / f"{number}{opened.mode}")
                target.extend(opened[:])
                require(target, rows)
        reader.close()


def test_a_replay_buffer_takes_a_ring_oldest_first(tmp_path: Path) -> None:
    """If the source has more rows than the target, the last rows stay."""
    with ring_of(tmp_path / "ring", 7) as ring:
        for name, size in (("larger", 40), ("smaller", 10)):
            target = MemmapStorage(tmp_path / name, max_size=size)
            ReplayBuffer(storage=target).extend(ring[:])
            assert target.in_order()["observation"].tolist() == wanted(7)[-size:]
            target.close()
            assert not verify(target.path).findings


@pytest.mark.parametrize("ids", ["check", "renumber"])
def test_rows_in_another_order_are_refused(tmp_path: Path, ids: Any) -> None:
    """An append once accepted them between trajectories, and `verify` rejected the result."""
    for episodes in (5, 7):
        with ring_of(tmp_path / f"{episodes}", episodes) as ring, MemmapStorage() as target:
            with pytest.raises(TrajectoryIdTaken, match=r"in the order .* ring\.in_order\(\)"):
                target.extend(ring[:].clone(), ids=ids)
            target.extend(ring.in_order().clone(), ids=ids)
            assert target[:]["observation"].tolist() == wanted(episodes)


def test_rows_in_order_have_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    keys = [("next", "done"), ("collector", "step")]
    with ring_of(tmp_path / "ring", 7) as ring, open_storage(tmp_path / "ring") as reader:
        for opened in (ring, reader):
            every, some = opened.in_order(), opened.in_order(keys)
            assert set(some.keys(True, True)) == {*keys}
            assert all(torch.equal(some[key], every[key]) for key in keys)


def test_rows_overwritten_while_put_in_order_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ring_of(tmp_path / "ring", 7) as ring, open_storage(tmp_path / "ring") as reader:
        rows = reader.reader
        real = rows.copies

        def copies(*args: Any) -> Any:
            ring.extend(episode(7, 1))
            return real(*args)

        monkeypatch.setattr(rows, "copies", copies)
        assert reader.in_order()["observation"].tolist() == wanted(7)[LENGTH:]


@pytest.mark.parametrize("ids", ["check", "renumber", "fresh"])
def test_a_copy_that_begins_within_a_trajectory_is_sound(tmp_path: Path, ids: Any) -> None:
    with MemmapStorage(tmp_path / "ring", max_size=SIZE - 2) as ring:
        for number in range(7):
            ring.extend(episode(number, 1))
        target = MemmapStorage(tmp_path / "archive")
        target.extend(ring.in_order().clone(), ids=ids)
        require(target, wanted(7)[2:])


def test_a_second_source_may_have_an_older_policy(tmp_path: Path) -> None:
    """If a version decreases within a trajectory, that remains a fault."""

    def versions(number: int, *given: int) -> TensorDict:
        rows = episode(number, 1)
        return rows.set(("collector", "policy_version"), torch.tensor([*given]))

    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(versions(0, 7, 7, 8, 8, 9))
        storage.extend(versions(1, 2, 2, 2, 3, 3))
    assert not verify(storage.path).findings
    with open_storage(storage.path, "append") as storage:
        storage.extend(versions(2, 4, 4, 3, 4, 4))
    (found,) = verify(storage.path).findings
    assert "version goes back" in found.message
