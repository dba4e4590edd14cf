"""Test `EpisodeBatches` against the rows of a storage: the first k episodes by start, whole."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import GymEnv, InitTracker, SerialEnv, TransformedEnv

from tallyroll.collector import (
    ArgumentError,
    EpisodeBatches,
    MultiprocessCollector,
    SyncCollector,
)
from tallyroll.storage import open_storage

ENDED = ("terminated", "truncated")


def stored_episodes(path: Path) -> tuple[dict[int, TensorDictBase], list[int], list[int]]:
    """Return the rows of each whole episode, the ids of cut ones, and the ids of open ones.

    An episode is cut if its lane went on with another one.
    """
    with open_storage(path) as storage:
        found = storage.trajectories
        rows = {int(id): storage.get(found.rows_of(int(id))) for id in found.ids}
        lanes = {int(line["id"]): int(line["lane"]) for line in found.table}
    whole = {id: each for id, each in rows.items() if bool(each["next", "done"][-1].all())}
    newest = {lane: max(id for id, own in lanes.items() if own == lane) for lane in lanes.values()}
    others = [id for id in rows if id not in whole]
    is_open = [id for id in others if newest[lanes[id]] == id]
    return whole, [id for id in others if id not in is_open], is_open


def assert_first_episodes(items: list[TensorDict], path: Path, k: int) -> None:
    whole, _, is_open = stored_episodes(path)
    ids = sorted([*whole, *is_open])
    wanted = [*takewhile(lambda id: id in whole, ids)]
    got = [[*dict.fromkeys(item["collector", "traj_ids"].reshape(-1).tolist())] for item in items]
    assert [id for each in got for id in each] == wanted
    assert all(len(each) == k for each in got[:-1])
    for item, each in zip(items, got, strict=True):
        expected = torch.cat([whole[id] for id in each])
        for key in expected.keys(True, True):
            assert torch.equal(item[key].reshape(expected[key].shape), expected[key]), key
        assert not item["collector", "cut"].any()
        assert int(item["next", "done"].sum()) == len(each)


@pytest.mark.filterwarnings("ignore:layout=.torchrl.. the lanes of this batch")
@pytest.mark.parametrize("layout", ["rows", "lanes", "trajectories", "torchrl"])
@pytest.mark.parametrize(
    ("lanes", "batch", "k", "options"),
    [
        (1, 7, 1, {}),
        (4, 50, 3, {}),
        (4, 50, 3, {"max_frames_per_traj": 15}),
        (5, 33, 8, {"surplus": "discard"}),
        (3, 500, 4, {}),
    ],
)
def test_the_episodes_that_started_first(
    layout: Any, lanes: int, batch: int, k: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "rows"
    with SyncCollector(
        "CartPole-v1", num_envs=lanes, frames_per_batch=batch, total_frames=900, seed=lanes,
        layout=layout, storage=path, **options,
    ) as collector:  # fmt: skip
        batches = EpisodeBatches(collector, k)
        items = [*batches]
        assert collector.ledger.stored == 900
    assert_first_episodes(items, path, k)
    assert items


def test_short_episodes_are_not_favoured(tmp_path: Path) -> None:
    """The first episode of each lane is in the first item, however long it is."""
    with SyncCollector(
        "CartPole-v1", num_envs=8, frames_per_batch=16, total_frames=2000, seed=3
    ) as collector:
        batches = EpisodeBatches(collector, 8)
        first = next(batches)
        assert batches.held_rows > 0
    lanes = first["collector", "lane"].reshape(-1)[first["collector", "step"].reshape(-1) == 0]
    assert sorted(lanes.tolist()) == [*range(8)]


def test_cut_episodes_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with SyncCollector(
        "CartPole-v1", num_envs=3, frames_per_batch=60, total_frames=600, seed=1,
        reset_at_each_iter=True, storage=path,
    ) as collector:  # fmt: skip
        batches = EpisodeBatches(collector, 2)
        items = [*batches]
    assert_first_episodes(items, path, 2)
    _, cut, _ = stored_episodes(path)
    assert batches.cut == len(cut) > 3


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_workers(mode: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with MultiprocessCollector(
        "CartPole-v1", num_envs=4, num_workers=2, mode=mode, frames_per_batch=40,
        total_frames=600, seed=0, storage=path, transport="thread",
    ) as collector:  # fmt: skip
        items = [*EpisodeBatches(collector, 3)]
    whole, _, _ = stored_episodes(path)
    for item in items:
        ids = [*dict.fromkeys(item["collector", "traj_ids"].tolist())]
        expected = torch.cat([whole[id] for id in ids])
        for key in expected.keys(True, True):
            assert torch.equal(item[key], expected[key]), key
    assert sum(len(set(item["collector", "traj_ids"].tolist())) for item in items) > 6


def test_recurrent_modules_begin_at_first_rows_only(tmp_path: Path) -> None:
    def make() -> TransformedEnv:
        return TransformedEnv(SerialEnv(2, lambda: GymEnv("CartPole-v1")), InitTracker())

    with SyncCollector(make, frames_per_batch=13, total_frames=400, seed=0) as collector:
        items = [*EpisodeBatches(collector, 2)]
    assert items
    for item in items:
        first = item["collector", "step"].reshape(-1) == 0
        assert torch.equal(item["is_init"].reshape(-1), first)


@pytest.mark.parametrize("count", [0, -1, 2.0, True, "3", None])
def test_numbers_of_episodes(count: Any) -> None:
    with pytest.raises(ArgumentError, match="episodes_per_batch: expected a whole number above 0"):
        EpisodeBatches([], count)


def test_other_batches_are_refused() -> None:
    with pytest.raises(ArgumentError, match="expected the column collector/traj_ids"):
        next(EpisodeBatches([TensorDict({"x": torch.zeros(3)}, [3])], 1))
    with (
        SyncCollector(
            "CartPole-v1", num_envs=2, frames_per_batch=10, total_frames=100, seed=0,
            layout="torchrl", set_truncated=True,
        ) as collector,
        pytest.raises(ArgumentError, match="Leave set_truncated out"),
    ):  # fmt: skip
        [*EpisodeBatches(collector, 1)]


def test_no_episode_ends() -> None:
    with SyncCollector(
        "CartPole-v1", num_envs=4, frames_per_batch=4, total_frames=8, seed=0
    ) as collector:
        batches = EpisodeBatches(collector, 1)
        assert [*batches] == []
        assert batches.held_rows == 8
