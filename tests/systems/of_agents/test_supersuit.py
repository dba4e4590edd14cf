"""Test SuperSuit's vectors, where agents are lanes.

They are right if agents end together, and refused otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import supersuit
import torch
from gymnasium import spaces
from mpe2 import simple_spread_v3
from pettingzoo import ParallelEnv

from tallyroll.collector import GymnasiumVectorEnv, SyncCollector
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.ext.systems.supersuit import SuperSuitSystem
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import verify


class Pair(ParallelEnv):
    """Two agents that end together after 2 to 5 steps, or one of them a step earlier."""

    metadata = {"name": "pair"}  # noqa: RUF012  as PettingZoo has it
    render_mode = None

    def __init__(self, together: bool = True) -> None:
        self.possible_agents, self.together = ["a_0", "a_1"], together
        self.rng, self.episode = np.random.default_rng(0), -1

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (4,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(5)

    def observed(self, actions: dict[str, Any]) -> dict[str, Any]:
        return {
            a: np.array([i, self.episode, self.at, actions.get(a, -1)], np.float32)
            for i, a in enumerate(self.possible_agents)
            if a in self.agents
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.at, self.length = 0, int(self.rng.integers(2, 6))
        self.episode += 1
        return self.observed({}), {a: {} for a in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        seen, agents = self.observed(actions), self.agents
        over = {a: self.at >= self.length - (a == "a_1" and not self.together) for a in agents}
        paid = {a: float(self.at + actions[a]) for a in agents}
        cut = dict.fromkeys(agents, False)
        self.agents = [a for a in agents if not over[a]]
        return seen, paid, over, cut, {a: {} for a in agents}


def vector(env: ParallelEnv, copies: int) -> Any:
    one = supersuit.pettingzoo_env_to_vec_env_v1(env)
    return supersuit.concat_vec_envs_v1(one, copies, base_class="gymnasium")


class TestTogether(SystemContract):
    lanes = 4

    def make(self, lanes: int, seeds: Sequence[int] | None) -> SuperSuitSystem:
        return SuperSuitSystem(vector(Pair(), lanes // 2))


def test_rows_against_the_vector_stepped_by_hand(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"frames_per_batch": 40, "seed": 3, "storage": tmp_path / "run"}
    with SyncCollector(
        lambda: vector(simple_spread_v3.parallel_env(max_cycles=5), 2),
        None,
        total_frames=120,
        **arguments,
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert verify(tmp_path / "run").sound
    by_hand = vector(simple_spread_v3.parallel_env(max_cycles=5), 2)
    seen, _ = by_hand.reset(seed=lane_seeds(3, 6, 0)[0])
    lane, step = rows["collector", "lane"].numpy(), rows["collector", "traj_ids"].numpy()
    order = np.lexsort((rows["collector", "step"].numpy(), step, lane))
    parts = [rows[order[lane[order] == each]] for each in range(6)]
    for at in range(20):
        row = torch.stack([part[at] for part in parts])
        assert np.array_equal(row["observation"].numpy(), seen)
        seen, reward, over, cut, infos = by_hand.step(row["action"].numpy())
        ended = (over | cut).astype(bool)
        after = seen.copy()
        for each in np.flatnonzero(ended):
            after[each] = infos[each]["terminal_observation"]
        assert np.array_equal(row["next", "observation"].numpy(), after)
        assert np.array_equal(row["next", "reward"].numpy()[:, 0], reward)
        assert np.array_equal(row["next", "truncated"].numpy()[:, 0], cut.astype(bool))
        assert not row["next", "terminated"].any()
        assert ended.all() == (at % 5 == 4)


def test_uneven_deaths_are_refused_with_the_way_out(tmp_path: Path) -> None:
    env = supersuit.vector.MarkovVectorEnv(Pair(together=False), black_death=True)
    with (
        SyncCollector(
            lambda: env, None, frames_per_batch=2, total_frames=40, storage=tmp_path / "run"
        ) as collector,
        pytest.raises(EnvironmentRefused, match="Pass the PettingZoo environment itself"),
    ):
        list(collector)
    assert verify(tmp_path / "run").sound, "what came before is true"
    with SyncCollector(
        lambda: Pair(together=False), None, frames_per_batch=20, total_frames=40
    ) as collector:
        assert sum(batch.numel() for batch in collector) == 40
        assert collector.ledger.agent_transitions < 80


class Late(Pair):
    """The second agent acts from the second step on, but is observed before."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        seen, infos = super().reset(seed)
        self.agents = ["a_0"]
        return seen, infos

    def step(self, actions: dict[str, Any]) -> Any:
        self.agents = list(self.possible_agents)
        return super().step({"a_1": 0, **actions})


@pytest.mark.parametrize("copies", [1, 2])
def test_absent_agents_are_refused(copies: int) -> None:
    """Rows of an agent that the environment did not step were once stored."""
    lone = supersuit.vector.MarkovVectorEnv(Late(), black_death=True)
    env = (
        lone if copies == 1 else supersuit.concat_vec_envs_v1(lone, copies, base_class="gymnasium")
    )
    with (
        SyncCollector(lambda: env, None, frames_per_batch=4, total_frames=20) as collector,
        pytest.raises(EnvironmentRefused, match=r"\['a_1'\] are absent, but SuperSuit's vectors"),
    ):
        list(collector)


def test_misuse() -> None:
    with pytest.raises(ArgumentError, match="cannot make environments by name"):
        SyncCollector("supersuit:pair", None, frames_per_batch=2, total_frames=2)
    with pytest.raises(
        EnvironmentRefused, match=r"wrong results if agents die at different times. Pass the"
    ):
        GymnasiumVectorEnv(vector(Pair(), 1))
