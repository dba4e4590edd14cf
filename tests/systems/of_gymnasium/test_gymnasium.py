"""Compare Gymnasium's third-party environments with one that is stepped by hand."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from minigrid.core.mission import MissionSpace
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds

# Packages of environments warn about deprecations and about their spaces.
pytestmark = pytest.mark.filterwarnings("ignore")

SHORT: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": {"max_episode_steps": 9},
    "LunarLander-v3": {"max_episode_steps": 9},
    "BipedalWalker-v3": {"max_episode_steps": 9},
    "minigrid:MiniGrid-GoToObject-6x6-N2-v0": {"max_episode_steps": 7},
    "highway_env:highway-fast-v0": {"max_episode_steps": 4},
    "highway_env:parking-v0": {"max_episode_steps": 5},
    "gymnasium_robotics:FetchReach-v4": {"max_episode_steps": 6},
    "gymnasium_robotics:PointMaze_UMaze-v3": {"max_episode_steps": 6},
}


def columns(observation: Any) -> dict[str, Any]:
    return dict(observation) if isinstance(observation, dict) else {"observation": observation}


def same(row: TensorDictBase, prefix: tuple[str, ...], observation: Any) -> None:
    for name, value in columns(observation).items():
        got = row[(*prefix, name)].numpy()
        if isinstance(value, str):
            assert bytes(got.tolist()).rstrip(b"\0").decode() == value
        else:
            assert np.array_equal(got, value), (prefix, name)


def by_hand(rows: TensorDictBase, name: str, kwargs: dict[str, Any], seeds: list[int]) -> int:
    """Step the environment with the actions of each lane's rows. Return the number of ends."""
    ends = 0
    for lane, seed in enumerate(seeds):
        env = gym.make(name, **kwargs)
        own = rows[rows["collector", "lane"] == lane]
        order = np.lexsort((own["collector", "step"], own["collector", "traj_ids"]))
        seen, _ = env.reset(seed=seed)
        for row in (own[int(at)] for at in order):
            same(row, (), seen)
            seen, reward, terminated, truncated, _ = env.step(row["action"].numpy())
            same(row, ("next",), seen)
            assert row["next", "reward"].item() == np.float32(reward)
            assert row["next", "terminated"].item() == terminated
            assert row["next", "truncated"].item() == truncated
            if terminated or truncated:
                ends += 1
                seen, _ = env.reset()
        env.close()
    return ends


@pytest.mark.parametrize("name", list(SHORT))
def test_rows_are_those_of_the_environment_alone(name: str) -> None:
    frames = 20 if "highway" in name else 40
    with SyncCollector(
        name,
        None,
        num_envs=2,
        env_kwargs=SHORT[name],
        frames_per_batch=frames,
        seed=3,
        total_frames=frames,
    ) as collector:
        (rows,) = list(collector)
    assert rows.numel() == frames
    assert by_hand(rows, name, SHORT[name], lane_seeds(3, 2, 0)) >= 2


@pytest.mark.parametrize("cls", [SyncVectorEnv, partial(AsyncVectorEnv, shared_memory=False)])
@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_missions_in_every_mode(cls: Any, mode: AutoresetMode) -> None:
    name = "minigrid:MiniGrid-GoToObject-6x6-N2-v0"
    if cls is not SyncVectorEnv and mode is not AutoresetMode.SAME_STEP:
        return  # workers take seconds, and the last mode covers them
    make = partial(gym.make, name, **SHORT[name])
    vector = partial(cls, [make, make], autoreset_mode=mode)
    with SyncCollector(vector, None, frames_per_batch=40, total_frames=40, seed=1) as collector:
        (rows,) = list(collector)
    assert by_hand(rows, name, SHORT[name], lane_seeds(1, 2, 0)) >= 4
    assert len(rows["mission"].unique(dim=0)) > 1


def test_the_longest_mission_fits() -> None:
    space = MissionSpace(lambda a, b: f"go to {a} {b}", [["red", "violet"], ["key", "ball"]])
    from tallyroll.collector.envs.gymnasium.spaces import text_width

    assert text_width(space) == len("go to violet ball")


def test_workers() -> None:
    name = "gymnasium_robotics:FetchReach-v4"
    arguments: dict[str, Any] = {
        "num_envs": 2, "env_kwargs": SHORT[name], "frames_per_batch": 20, "total_frames": 40,
    }  # fmt: skip
    with MultiprocessCollector(name, None, num_workers=2, seed=6, **arguments) as collector:
        shared = torch.cat([batch.clone() for batch in collector])
    with SyncCollector(name, None, seed=6, **arguments) as collector:
        alone = torch.cat([batch.clone() for batch in collector])
    assert {"achieved_goal", "desired_goal", "observation"} <= set(alone.keys())
    for key in alone.keys(True, True):
        assert torch.equal(alone[key], shared[key]), key


@pytest.mark.parametrize("mode", [*AutoresetMode, None])
def test_a_native_vector_and_every_mode_of_others(mode: AutoresetMode | None) -> None:
    """CartPole's own vector, ``vector_entry_point``, shares seeds, so only ends are compared."""
    how = "vector_entry_point" if mode is None else "sync"
    kwargs = {} if mode is None else {"vector_kwargs": {"autoreset_mode": mode}}
    with warnings.catch_warnings(), SyncCollector(
        lambda: gym.make_vec("CartPole-v1", 3, how, **kwargs),
        None, frames_per_batch=200, total_frames=200, seed=2,
    ) as collector:  # fmt: skip
        (rows,) = list(collector)
    over = rows["next", "observation"][:, 0].abs() > 2.4
    over |= rows["next", "observation"][:, 2].abs() > 12 * np.pi / 180
    assert torch.equal(rows["next", "terminated"][:, 0], over)
    assert over.sum() > 3
    starts = rows["observation"][rows["collector", "step"] == 0]
    assert float(starts.abs().max()) <= 0.05
