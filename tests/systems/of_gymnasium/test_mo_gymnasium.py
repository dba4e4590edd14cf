"""Test MO-Gymnasium: rewards of several objectives, by id and in its own vectors."""

from __future__ import annotations

import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mo_gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from mo_gymnasium.wrappers import LinearReward
from mo_gymnasium.wrappers.vector import MOSyncVectorEnv
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector, replay
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.errors import MissingExtra
from tallyroll.storage import open_storage, verify

# Gymnasium's checker expects a scalar reward.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*The reward returned by `step:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*precision lowered by casting:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

TREASURE = "mo_gymnasium:deep-sea-treasure-v0"
MINECART = "mo_gymnasium:minecart-v0"
SHORT = {"max_episode_steps": 8}


def by_hand(rows: TensorDictBase, name: str, seeds: list[int]) -> int:
    ends = 0
    for lane, seed in enumerate(seeds):
        env = mo_gymnasium.make(name.partition(":")[2], **SHORT)
        own = rows[rows["collector", "lane"] == lane]
        order = np.lexsort((own["collector", "step"], own["collector", "traj_ids"]))
        seen, _ = env.reset(seed=seed)
        for row in (own[int(at)] for at in order):
            assert np.array_equal(row["observation"].numpy(), seen)
            seen, reward, terminated, truncated, _ = env.step(row["action"].item())
            assert np.array_equal(row["next", "observation"].numpy(), seen)
            assert np.array_equal(row["next", "reward"].numpy(), np.float32(reward))
            assert row["next", "terminated"].item() == terminated
            assert row["next", "truncated"].item() == truncated
            if terminated or truncated:
                ends += 1
                seen, _ = env.reset()
    return ends


@pytest.mark.parametrize(("name", "objectives"), [(TREASURE, 2), (MINECART, 3)])
def test_by_id_resumed_and_with_workers(name: str, objectives: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_envs": 3, "env_kwargs": SHORT, "frames_per_batch": 40}
    with SyncCollector(
        name, None, total_frames=120, seed=1, storage=tmp_path / "run", **arguments
    ) as collector:
        alone = torch.cat([batch.clone() for batch in collector])
    assert alone["next", "reward"].shape == (120, objectives)
    assert by_hand(alone, name, lane_seeds(1, 3, 0)) > 5
    with SyncCollector(
        name, None, total_frames=180, resume=True, storage=tmp_path / "run", **arguments
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 60
    assert verify(tmp_path / "run").sound
    stored = open_storage(tmp_path / "run")[120:].clone()
    assert by_hand(stored, name, lane_seeds(1, 3, 1)) > 2
    if name == MINECART:
        return
    with MultiprocessCollector(
        name, None, num_workers=2, total_frames=120, seed=1, **arguments
    ) as collector:
        shared = torch.cat([batch.clone() for batch in collector])
    for key in alone.keys(True, True):
        assert torch.equal(alone[key], shared[key]), key


@pytest.mark.parametrize("cls", [SyncVectorEnv, MOSyncVectorEnv])
@pytest.mark.parametrize("slots", ["mask", "avoid"])
def test_vectors(cls: Any, slots: Any) -> None:
    make = partial(mo_gymnasium.make, "deep-sea-treasure-v0", **SHORT)
    with SyncCollector(
        lambda: cls([make] * 2),
        None,
        frames_per_batch=60,
        total_frames=60,
        seed=4,
        reset_slots=slots,
    ) as collector:
        (rows,) = list(collector)
    assert by_hand(rows, TREASURE, lane_seeds(4, 2, 0)) > 3


def test_a_weighted_sum_is_one_number() -> None:
    def make() -> Any:
        return LinearReward(mo_gymnasium.make("deep-sea-treasure-v0", **SHORT), np.ones(2))

    with SyncCollector(
        lambda: SyncVectorEnv([make] * 2), None, frames_per_batch=20, total_frames=20, seed=4
    ) as collector:
        (rows,) = list(collector)
    assert rows["next", "reward"].shape == (20, 1)


def test_a_trajectory_begins_again_from_its_seed(tmp_path: Path) -> None:
    """Rewards of several objectives repeat, too. The manifest records the versions."""
    with SyncCollector(
        MINECART,
        num_envs=2,
        env_kwargs=SHORT,
        frames_per_batch=60,
        total_frames=60,
        seed=1,
        resets=Resets(seeds=True),
        storage=tmp_path / "rows",
    ) as collector:
        (rows,) = list(collector)
    assert len(rows["collector", "reset_seed"].unique()) == len(
        rows["collector", "traj_ids"].unique()
    )
    report = replay(
        tmp_path / "rows", "all", create_env_fn=partial(mo_gymnasium.make, MINECART, **SHORT)
    )
    assert (report.status, report.rows) == (0, 60)
    with open_storage(tmp_path / "rows") as storage:
        assert storage.runs[0]["versions"]["mo-gymnasium"] == version("mo-gymnasium")


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mo_gymnasium", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[mo-gymnasium\]"'):
        SyncCollector(TREASURE, None, frames_per_batch=4, total_frames=4)
