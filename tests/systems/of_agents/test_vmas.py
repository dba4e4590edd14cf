"""Compare our rows with VMAS: truncating time limits, groups, one generator for all lanes."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vmas
from tensordict import TensorDictBase
from vmas.scenarios import balance

from tallyroll.collector import MultiprocessCollector, Resets, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
)
from tallyroll.collector.ext.systems.vmas import VmasSystem
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

LIMIT = 7


class Ended(balance.Scenario):
    """Even lanes end at different steps. Odd lanes never end by themselves."""

    def env_reset_world_at(self, env_index: int | None) -> None:
        if not hasattr(self, "clock"):
            self.clock = torch.zeros(self.world.batch_dim, dtype=torch.int64)
        self.clock[slice(None) if env_index is None else env_index] = 0
        super().env_reset_world_at(env_index)

    def post_step(self) -> None:
        self.clock += 1

    def done(self) -> torch.Tensor:
        lane = torch.arange(self.world.batch_dim)
        return (lane % 2 == 0) & (self.clock >= 3 + lane // 2)


def make(lanes: int, **kwargs: Any) -> Any:
    options = {"max_steps": LIMIT, "terminated_truncated": True, **kwargs}
    return vmas.make_env(Ended(), num_envs=lanes, **options)


class TestEnds(SystemContract):
    frames = 60
    steps = 30

    def make(self, lanes: int, seeds: Sequence[int] | None) -> VmasSystem:
        return VmasSystem(make(lanes))


class TestUnequalAgents(SystemContract):
    frames = 40
    steps = 20

    def make(self, lanes: int, seeds: Sequence[int] | None) -> VmasSystem:
        kwargs = {"max_steps": 5, "continuous_actions": False}
        return VmasSystem.make("simple_speaker_listener", lanes, seeds, **kwargs)


def collect(create: Any, frames: int = 120, **more: Any) -> TensorDictBase:
    arguments = {"frames_per_batch": 37, "total_frames": frames, "seed": 3, **more}
    with SyncCollector(create, None, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    groups = [key for key in rows.keys() if (key, "mask") in rows.keys(True)]
    agents = sum(rows[group, "mask"].shape[1] for group in groups)
    assert collector.ledger.agent_transitions == frames * agents
    return rows


def check_by_hand(rows: TensorDictBase, env: Any, seed: int, groups: dict[str, list[int]]) -> None:
    """Compare every row with VMAS stepped by hand: one seed, resets lane by lane."""
    lanes = env.num_envs
    lane, ids = rows["collector", "lane"].numpy(), rows["collector", "traj_ids"].numpy()
    order = np.lexsort((rows["collector", "step"].numpy(), ids, lane))
    parts = [rows[order[lane[order] == each]] for each in range(lanes)]
    seen = env.reset(seed=seed)
    for at in range(min(map(len, parts))):
        row = torch.stack([part[at] for part in parts])
        action: list[Any] = [None] * len(env.agents)
        for group, agents in groups.items():
            for i, agent in enumerate(agents):
                assert torch.equal(row[group, "observation"][:, i], seen[agent])
                action[agent] = row[group, "action"][:, i].clone()
        seen, reward, terminated, truncated, _ = env.step(action)
        for group, agents in groups.items():
            for i, agent in enumerate(agents):
                after = row["next", group]
                assert torch.equal(after["observation"][:, i], seen[agent])
                assert torch.equal(after["reward"][:, i, 0], reward[agent])
                assert torch.equal(after["terminated"][:, i, 0], terminated)
                assert torch.equal(after["truncated"][:, i, 0], truncated)
        assert torch.equal(row["next", "terminated"][:, 0], terminated)
        assert torch.equal(row["next", "truncated"][:, 0], truncated)
        over = terminated | truncated
        if over.all():
            seen = env.reset()
        elif over.any():
            for each in torch.nonzero(over)[:, 0].tolist():
                env.reset_at(each)
            (seen,) = env.get_from_scenario(True, False, False, False)


BALANCE = {"agents": [0, 1, 2]}


def test_time_limits_are_truncated_and_other_ends_are_not() -> None:
    rows = collect(lambda: make(4))
    check_by_hand(rows, make(4), lane_seeds(3, 4, 0)[0], BALANCE)
    lane, step = rows["collector", "lane"], rows["collector", "step"]
    cut, over = rows["next", "truncated"][:, 0], rows["next", "terminated"][:, 0]
    assert torch.equal(cut, (lane % 2 == 1) & (step == LIMIT - 1))
    assert torch.equal(over, (lane % 2 == 0) & (step == 2 + lane // 2))


def test_unequal_agents_have_a_group_each() -> None:
    kwargs = {"max_steps": 5}
    name = "simple_speaker_listener"
    rows = collect(f"vmas:{name}", 40, num_envs=4, env_kwargs=kwargs)
    env = vmas.make_env(name, num_envs=4, terminated_truncated=True, **kwargs)
    check_by_hand(rows, env, lane_seeds(3, 4, 0)[0], {"speaker": [0], "listener": [1]})
    assert rows["speaker", "action"].shape[1:] == (1, 5)
    assert rows["listener", "action"].shape[1:] == (1, 2)


def test_groups_of_the_caller_and_discrete_actions() -> None:
    groups = {"left": ["agent_1"], "right": ["agent_2", "agent_0"]}
    kwargs = {"max_steps": 5, "continuous_actions": False}
    rows = collect("vmas:balance", 40, num_envs=4, env_kwargs={**kwargs, "groups": groups})
    env = vmas.make_env("balance", num_envs=4, terminated_truncated=True, **kwargs)
    check_by_hand(rows, env, lane_seeds(3, 4, 0)[0], {"left": [1], "right": [2, 0]})
    assert rows["left", "action"].dtype is torch.int64


def test_another_environment_changes_nothing() -> None:
    """VMAS has one random state per process. Here, each environment has its own."""
    alone = collect(lambda: make(3), 60)
    other = SyncCollector(lambda: make(3), None, frames_per_batch=9, total_frames=90, seed=8)
    beside = []
    with (
        other,
        SyncCollector(
            lambda: make(3), None, frames_per_batch=10, total_frames=60, seed=3
        ) as collector,
    ):
        for batch, _ in zip(collector, other, strict=False):
            beside.append(batch.clone())
    by_id = [
        rows[np.lexsort((rows["collector", "step"].numpy(), rows["collector", "traj_ids"].numpy()))]
        for rows in (alone, torch.cat(beside))
    ]
    assert torch.equal(by_id[0]["agents", "observation"], by_id[1]["agents", "observation"])


def test_workers_and_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_envs": 4, "env_kwargs": {"max_steps": 5}}
    with MultiprocessCollector(
        "vmas:balance",
        None,
        num_workers=2,
        frames_per_batch=37,
        total_frames=100,
        seed=3,
        storage=tmp_path / "workers",
        **arguments,
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert verify(tmp_path / "workers").sound
    for worker in range(2):
        env = vmas.make_env("balance", num_envs=2, terminated_truncated=True, max_steps=5)
        own = rows[rows["collector", "lane"] // 2 == worker]
        own["collector", "lane"] -= 2 * worker
        check_by_hand(own, env, lane_seeds(3, 4, 0)[2 * worker], BALANCE)
    path = tmp_path / "run"
    collect("vmas:balance", 60, storage=path, **arguments)
    with SyncCollector(
        "vmas:balance",
        None,
        frames_per_batch=37,
        total_frames=150,
        storage=path,
        resume=True,
        **arguments,
    ) as collector:
        list(collector)
    assert collector.ledger.agent_transitions == 450
    stored = open_storage(path)[:]
    env = vmas.make_env("balance", num_envs=4, terminated_truncated=True, max_steps=5)
    check_by_hand(stored[:60], env, lane_seeds(3, 4, 0)[0], BALANCE)
    check_by_hand(stored[60:], env, lane_seeds(3, 4, 1)[0], BALANCE)
    assert verify(path).sound, str(verify(path))


def test_an_instance_that_takes_no_seed_later_is_seeded_by_its_reset() -> None:
    env = make(2)
    rows = collect(env, 30)
    check_by_hand(rows, make(2), lane_seeds(3, 2, 0)[0], BALANCE)


def test_misuse() -> None:
    def start(name: str, **kwargs: Any) -> None:
        SyncCollector(name, None, frames_per_batch=4, total_frames=4, env_kwargs=kwargs)

    with pytest.raises(ArgumentError, match=r"no_such\.py scenario not found"):
        start("vmas:no_such")
    with pytest.raises(ArgumentError, match=r"n_agentz.* not used by the scenario"):
        start("vmas:balance", n_agentz=3)
    with pytest.raises(ArgumentError, match="groups: expected each of the agents"):
        start("vmas:balance", groups={"a": ["agent_0"]})
    with pytest.raises(EnvironmentRefused, match="terminated_truncated=True"):
        SyncCollector(make(2, terminated_truncated=False), None, frames_per_batch=4, total_frames=4)


def test_the_example_trains_on_exactly_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "systems" / "multiagent_ppo.py"
    names = runpy.run_path(str(path))
    small = {"num_envs": 4, "max_steps": 10, "epochs": 1, "minibatch": 64, "eval_episodes": 3}
    names["main"](names["Args"](total_frames=300, frames_per_batch=128, **small))
    out = capsys.readouterr().out
    assert "300 env steps, exactly, and 900 agent transitions" in out
    assert "mean return before" in out


def test_no_seed_is_one_lanes() -> None:
    with pytest.raises(EnvironmentRefused, match="lanes draw from one generator, also in steps"):
        SyncCollector(
            "vmas:balance",
            num_envs=2,
            frames_per_batch=4,
            total_frames=4,
            resets=Resets(seeds=True),
        )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vmas", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[vmas\]"'):
        VmasSystem.make("balance", 1, None)
