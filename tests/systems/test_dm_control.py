"""Compare dm_control's suite, and any dm_env environment, with their own loop."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import dm_env
import numpy as np
import pytest
import torch
from dm_control import suite
from dm_env import specs
from reset_kit import trajectories
from tensordict import TensorDictBase

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs import registry
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    SpaceError,
    TransitionError,
)
from tallyroll.collector.ext.systems.dm_control import DmControlSystem
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

SHORT = {"task_kwargs": {"time_limit": 0.15}}  # 15 steps of cartpole
BALANCE = {"num_envs": 3, "env_kwargs": SHORT, "frames_per_batch": 40}


def test_each_episode_by_hand_from_its_seed() -> None:
    with SyncCollector(
        "dm_control:cartpole-balance",
        total_frames=120,
        seed=0,
        resets=Resets(seeds=True),
        **BALANCE,
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    found = trajectories(rows)
    for part in found:
        env = suite.load("cartpole", "balance", task_kwargs=SHORT["task_kwargs"])
        env.task.random.seed(int(part["collector", "reset_seed"][0]))
        seen = env.reset().observation
        for row in part:
            assert np.array_equal(row["position"], seen["position"])
            seen = env.step(row["action"].numpy()).observation
            assert np.array_equal(row["next", "velocity"], seen["velocity"])
    assert len(found) > 6


class Chain(dm_env.Environment):
    """Counts steps. It ends with discount 0 after 4 steps, or is cut with discount 1 after 7."""

    def __init__(self, seed: int = 0) -> None:
        self.random_state = np.random.RandomState(seed)
        self.closed = False

    def reset(self) -> dm_env.TimeStep:
        self.at, self.over = 0, False
        self.long = bool(self.random_state.randint(2))
        return dm_env.restart(self._seen())

    def _seen(self) -> Any:
        return np.array([self.at, self.long], np.int32)

    def step(self, action: Any) -> dm_env.TimeStep:
        if self.over:
            return self.reset()
        self.at += 1
        self.over = self.at >= (7 if self.long else 4)
        end = dm_env.truncation if self.long else dm_env.termination
        reward = float(self.at + action)
        return (end if self.over else dm_env.transition)(reward, self._seen())

    def observation_spec(self) -> Any:
        return specs.BoundedArray((2,), np.int32, 0, 7)

    def action_spec(self) -> Any:
        return specs.DiscreteArray(3)

    def close(self) -> None:
        self.closed = True


class TestCartpole(SystemContract):
    def make(self, lanes: int, seeds: Sequence[int] | None) -> DmControlSystem:
        return DmControlSystem.make("cartpole/balance", lanes, seeds, **SHORT)


@pytest.mark.filterwarnings("ignore:next.reward at lane")  # its rewards are huge integers
class TestAModelThatIsDrawn(SystemContract):
    frames = 60

    def make(self, lanes: int, seeds: Sequence[int] | None) -> DmControlSystem:
        return DmControlSystem.make("lqr-lqr_2_1", lanes, seeds, task_kwargs={"time_limit": 0.3})


class TestAnyDmEnv(SystemContract):
    def make(self, lanes: int, seeds: Sequence[int] | None) -> DmControlSystem:
        return DmControlSystem([Chain() for _ in range(lanes)])


def by_hand(rows: TensorDictBase, lane: int, seed: int) -> int:
    """Step the task with the actions of a lane's rows. Return the number of ended episodes."""
    env = suite.load("cartpole", "balance", task_kwargs={**SHORT["task_kwargs"], "random": seed})
    own = rows[rows["collector", "lane"] == lane]
    order = np.lexsort((own["collector", "step"], own["collector", "traj_ids"]))
    ends, now = 0, env.reset()
    for row in (own[int(at)] for at in order):
        for name, value in now.observation.items():
            assert np.array_equal(row[name].numpy(), value)
        now = env.step(row["action"].numpy())
        for name, value in now.observation.items():
            assert np.array_equal(row["next", name].numpy(), value)
        assert row["next", "reward"].item() == np.float32(now.reward)
        assert bool(row["next", "truncated"]) == (now.last() and now.discount == 1)
        assert bool(row["next", "terminated"]) == (now.last() and now.discount != 1)
        if now.last():
            ends, now = ends + 1, env.step(None)
            assert now.first()
    return ends


def test_rows_are_those_of_its_own_loop_sync_and_with_workers(tmp_path: Path) -> None:
    collect = partial(SyncCollector, "dm_control:cartpole-balance", None, **BALANCE)
    with collect(total_frames=150, seed=5, storage=tmp_path / "run") as collector:
        alone = torch.cat([batch.clone() for batch in collector])
    assert alone.numel() == 150
    assert alone["position"].dtype is torch.float64
    assert alone["next", "reward"].dtype is torch.float32
    for lane, seed in enumerate(lane_seeds(5, 3, 0)):
        assert by_hand(alone, lane, seed) >= 2
    with collect(total_frames=220, resume=True, storage=tmp_path / "run") as collector:
        assert sum(batch.numel() for batch in collector) == 70
    assert verify(tmp_path / "run").sound
    stored = open_storage(tmp_path / "run")
    resumed = stored[150:].clone()
    for lane, seed in enumerate(lane_seeds(5, 3, 1)):
        assert by_hand(resumed, lane, seed) >= 1
    assert stored.manifest["runs"][0]["environment"] == {
        "id": "dm_control:cartpole-balance",
        "kwargs": SHORT,
        "type": "DmControlSystem",
    }
    with MultiprocessCollector(
        "dm_control:cartpole-balance", None, num_workers=2, total_frames=150, seed=5, **BALANCE
    ) as collector:
        shared = torch.cat([batch.clone() for batch in collector])
    for key in alone.keys(True, True):
        assert torch.equal(alone[key], shared[key]), key


@pytest.mark.filterwarnings("ignore:next.reward at lane")  # as above
def test_a_model_that_is_drawn_when_it_is_made_is_repeated_by_its_seed() -> None:
    runs = []
    for seed in (1, 1, 2):
        with SyncCollector(
            "dm_control:lqr-lqr_2_1", None, frames_per_batch=20, total_frames=20, seed=seed
        ) as collector:
            runs.append(next(iter(collector)).clone())
    assert torch.equal(runs[0]["next", "position"], runs[1]["next", "position"])
    assert not torch.equal(runs[0]["next", "position"], runs[2]["next", "position"])


@pytest.mark.parametrize("as_a_list", [False, True])
@pytest.mark.parametrize("by_factory", [False, True])
def test_environments_that_are_made(as_a_list: bool, by_factory: bool) -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append([Chain(), Chain()] if as_a_list else Chain())
        return made[-1]

    with SyncCollector(
        make if by_factory else make(), None, frames_per_batch=30, total_frames=60, seed=3
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
        assert collector.env.batch_size == torch.Size([2 if as_a_list else 1])
    after, step = rows["next", "observation"], rows["collector", "step"]
    assert torch.equal(after[:, 0], (step + 1).int())
    assert torch.equal(rows["next", "truncated"][:, 0], (step == 6))
    assert torch.equal(rows["next", "terminated"][:, 0], (step == 3) & (after[:, 1] == 0))
    envs = made[-1] if as_a_list else [made[-1]]
    assert all(env.closed == by_factory for env in envs)


def test_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The renderer needs no display, and each image shows the mean position."""

    def render(self: Any, height: int, width: int) -> Any:
        return np.full((height, width, 3), abs(self.data.qpos).sum() * 50, np.uint8)

    monkeypatch.setattr("dm_control.mujoco.engine.Physics.render", render)
    pixels = {"render_kwargs": {"height": 8, "width": 12}, "pixels_only": False}
    with SyncCollector(
        "dm_control:cartpole/balance",
        None,
        num_envs=2,
        env_kwargs={"pixels": pixels, **SHORT},
        frames_per_batch=40,
        total_frames=40,
        seed=0,
    ) as collector:
        (rows,) = list(collector)
    assert rows["next", "pixels"].shape == (40, 8, 12, 3)
    assert rows["next", "pixels"].dtype is torch.uint8
    assert "position" in rows
    assert len(rows["pixels"].unique()) > 1


@pytest.mark.parametrize(
    ("name", "kwargs", "match"),
    [
        ("cartpole", {}, "expected dm_control:DOMAIN/TASK, got 'cartpole'"),
        ("nothing/balance", {}, "dm_control cannot make 'nothing/balance': Domain 'nothing'"),
        ("cartpole/nothing", {}, "cannot make 'cartpole/nothing': Level 'nothing'"),
        ("cartpole/balance", {"speed": 1}, "unexpected keyword argument 'speed'"),
        ("cartpole/balance", {"task_kwargs": {"speed": 1}}, "unexpected keyword argument 'speed'"),
    ],
)
def test_what_cannot_be_made(name: str, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        SyncCollector(
            f"dm_control:{name}", None, frames_per_batch=4, total_frames=4, env_kwargs=kwargs
        )


def test_observations_that_no_column_holds() -> None:
    class Words(Chain):
        def observation_spec(self) -> Any:
            return {"word": specs.StringArray(())}

    with pytest.raises(SpaceError, match="word: expected one array of numbers"):
        SyncCollector(Words(), None, frames_per_batch=4, total_frames=4)


def test_one_that_resets_itself_unasked() -> None:
    class Restless(Chain):
        def step(self, action: Any) -> dm_env.TimeStep:
            return self.reset() if self.at == 2 else super().step(action)

    with (
        pytest.raises(EnvironmentRefused, match="lane 0: Restless reset itself in a step"),
        SyncCollector(Restless(), None, frames_per_batch=4, total_frames=8) as collector,
    ):
        list(collector)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("dm_control", "dm_control.suite", "dm_env"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[dm-control\]"'):
        SyncCollector("dm_control:cartpole/balance", None, frames_per_batch=4, total_frames=4)
    assert DmControlSystem.adopt(Chain()) is None
    assert registry.find("dm_control:a/b") == (DmControlSystem, "a/b")


@pytest.mark.parametrize("seen", [np.array([1], np.int32), np.array([0.5, 1.5])])
def test_observations_that_the_spec_does_not_declare_are_refused(seen: Any) -> None:
    class Liar(Chain):
        def _seen(self) -> Any:
            return seen

    system = DmControlSystem([Liar()])
    wanted = (
        r"observation at lane 0, step 0 of .* expected int32 \[2\] as the space declares it, got"
    )
    with pytest.raises(TransitionError, match=wanted):
        system.reset(None, None)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ({"observation": np.array([1], np.int32)}, r"next/observation .* expected int32 \[2\]"),
        ({"reward": np.array([1.0])}, r"next/reward .* expected one number, got float64 \[1\]"),
        ({"reward": None}, r"next/reward .* expected one number, got None"),
    ],
)
def test_steps_that_return_something_else_are_refused(how: Any, wanted: str) -> None:
    class Liar(Chain):
        def step(self, action: Any) -> Any:
            return super().step(action)._replace(**how)

    with (
        pytest.raises(TransitionError, match=rf"{wanted}") as found,
        SyncCollector(Liar(), None, frames_per_batch=4, total_frames=8) as collector,
    ):
        list(collector)
    assert "at lane 0, step 0 of its trajectory" in str(found.value)
