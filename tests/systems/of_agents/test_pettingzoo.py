"""Compare PettingZoo's early deaths, unequal agents and turns with the raw environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from mpe2 import simple_tag_v3
from pettingzoo import AECEnv, ParallelEnv
from pettingzoo.classic.tictactoe import tictactoe
from pettingzoo.utils.wrappers import BaseWrapper, OrderEnforcingWrapper
from tensordict import TensorDictBase
from torchrl.envs import PettingZooWrapper

from tallyroll.collector import MultiprocessCollector, Recorder, Resets, SyncCollector, uniform
from tallyroll.collector.cli import main
from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.errors import (
    ArgumentError,
    MissingExtra,
    SpaceError,
    StateError,
    TransitionError,
    ValueRefused,
)
from tallyroll.collector.ext.systems.pettingzoo import PettingZooSystem
from tallyroll.collector.testing import SystemContract
from tallyroll.storage import open_storage, verify

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*Illegal move made.*:UserWarning", "ignore:.*The base environment.*:UserWarning"
)


class Race(ParallelEnv):
    """Three runners and a seer. Runners leave at seeded steps, and the rest is truncated at 6.

    Observations are ``[step, episode, last action, draw]``; the seer's lack the action. The arrays
    are reused.
    """

    metadata = {"name": "race"}  # noqa: RUF012  as PettingZoo has it
    render_mode = None

    def __init__(self, longest: int = 6) -> None:
        self.possible_agents = ["runner_0", "runner_1", "seer_0", "runner_2"]
        self.longest, self.episode, self.closed = longest, -1, False
        self.rng = np.random.default_rng(0)
        self.seen = {a: np.zeros(3 + ("run" in a), np.float32) for a in self.possible_agents}

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, self.seen[agent].shape, np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(5) if "run" in agent else spaces.Box(-1, 1, (2,), np.float32)

    def observed(self, agents: Sequence[str], actions: dict[str, Any]) -> dict[str, Any]:
        for agent in agents:
            value = [self.step_count, self.episode, self.draw]
            if "run" in agent:
                value.insert(2, actions.get(agent, -1))
            self.seen[agent][:] = value
        return {agent: self.seen[agent] for agent in agents}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents = list(self.possible_agents)
        self.episode += 1
        self.step_count = 0
        self.draw = float(self.rng.integers(1000))
        self.ends = dict(zip(self.agents, self.rng.integers(1, 9, len(self.agents)), strict=True))
        return self.observed(self.agents, {}), {a: {} for a in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), "actions are those of who lives"
        self.step_count += 1
        at, agents = self.step_count, self.agents
        over = {a: bool(at >= self.ends[a]) for a in agents}
        cut = {a: at >= self.longest and not over[a] for a in agents}
        paid = {a: at + float(np.sum(actions[a])) for a in agents}
        seen = self.observed(agents, actions)
        self.agents = [a for a in agents if not (over[a] or cut[a])]
        return seen, paid, over, cut, {a: {} for a in agents}

    def close(self) -> None:
        self.closed = True


class Told(Race):
    """Race that observes an option of its reset instead of the episode."""

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed)
        self.episode = options["slope"]
        return self.observed(self.agents, {}), {}


def test_each_race_begins_with_its_seed_and_options() -> None:
    resets = Resets(sampler={"slope": uniform(0, 1)}, seeds=True)
    with SyncCollector(
        lambda: PettingZooSystem([Told(), Told()]),
        frames_per_batch=40,
        total_frames=40,
        seed=0,
        resets=resets,
    ) as collector:
        rows = next(iter(collector))
    first = rows[rows["collector", "step"] == 0]
    for row in first:
        seed = int(row["collector", "reset_seed"])
        seen, _ = Told().reset(seed, resets.options_of(seed))
        assert row["collector", "context", "slope"] == resets.options_of(seed)["slope"]
        assert np.array_equal(row["seer", "observation"][0], seen["seer_0"])
    assert len(first) > 6


def races(lanes: int) -> PettingZooSystem:
    return PettingZooSystem([Race() for _ in range(lanes)])


class TestUnevenDeaths(SystemContract):
    counts_episodes = True

    def make(self, lanes: int, seeds: Sequence[int] | None) -> PettingZooSystem:
        return races(lanes)


class Crowd(Race):
    """Agents end, skip steps, join late and return, by a plan that the seed draws.

    Each step draws the agents that act next, and how those end that stop. In a quarter of the
    episodes, all acting agents end in each step, and others replace them. "runner_3" never joins.
    The environment reports ends for all agents, even those that did not act.
    """

    metadata = {"name": "crowd"}  # noqa: RUF012  as PettingZoo has it

    def __init__(self, longest: int = 8) -> None:
        super().__init__(longest)
        self.possible_agents.append("runner_3")
        self.seen["runner_3"] = np.zeros(4, np.float32)

    def drawn(self) -> list[str]:
        some = self.rng.random(4) < 0.5
        some[self.rng.integers(4)] = True
        return [agent for agent, is_in in zip(self.possible_agents, some, strict=False) if is_in]

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed)
        self.agents, self.length = self.drawn(), int(self.rng.integers(1, self.longest))
        self.swaps = bool(self.rng.integers(4) == 0)
        return self.observed(self.agents, {}), {a: {} for a in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert set(actions) == set(self.agents), "actions are those of who acts"
        self.step_count += 1
        acted, last = self.agents, self.step_count >= self.length
        self.agents = [] if last else self.drawn()
        if self.swaps and not last:
            self.agents = [a for a in self.possible_agents[:4] if a not in acted] or self.agents
        gone = [a for a in acted if a not in self.agents]
        how = {a: int(self.rng.integers(3)) for a in gone}
        if self.swaps:
            how = {a: max(1, each) for a, each in how.items()}
        how |= {acted[0]: 1 + int(self.rng.integers(2))} if last else {}
        dead = [a for a in self.possible_agents if a not in {*acted, *self.agents}]
        over = {a: how.get(a, int(a in dead)) == 1 for a in self.possible_agents}
        cut = {a: how.get(a) == 2 for a in self.possible_agents}
        told = [a for a in self.possible_agents if a in self.agents or how.get(a)]
        seen = self.observed(told, actions)
        paid = {a: self.step_count + float(np.sum(actions.get(a, 9))) for a in told}
        return seen, paid, over, cut, {a: {} for a in told}


class TestAgentsThatComeBack(SystemContract):
    agents_come_back = True
    counts_episodes = True

    def make(self, lanes: int, seeds: Sequence[int] | None) -> PettingZooSystem:
        return PettingZooSystem([Crowd() for _ in range(lanes)])


class TestUnequalAgents(SystemContract):
    frames = 60
    steps = 40

    def make(self, lanes: int, seeds: Sequence[int] | None) -> PettingZooSystem:
        return PettingZooSystem.make("mpe2.simple_tag_v3", lanes, seeds, max_cycles=5)


class TestTurns(SystemContract):
    """Random moves, most of which are illegal and end the game."""

    frames = 80

    def make(self, lanes: int, seeds: Sequence[int] | None) -> PettingZooSystem:
        return PettingZooSystem.make("classic/tictactoe-v3", lanes, seeds)


def collect(make: Any, frames: int = 200, **more: Any) -> TensorDictBase:
    arguments = {"frames_per_batch": 37, "total_frames": frames, "seed": 3, **more}
    with SyncCollector(make, None, **arguments) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert rows.numel() == frames
    living = sum(int(rows[g, "mask"].sum()) for g in rows.keys() if (g, "mask") in rows.keys(True))
    assert collector.ledger.agent_transitions == living
    return rows


def lanes_of(rows: TensorDictBase) -> list[TensorDictBase]:
    """Return rows of each lane, in time."""
    lane, ids = rows["collector", "lane"].numpy(), rows["collector", "traj_ids"].numpy()
    order = np.lexsort((rows["collector", "step"].numpy(), ids, lane))
    return [rows[order[lane[order] == each]] for each in np.unique(lane)]


def check_by_hand(rows: TensorDictBase, make: Any, groups: dict[str, list[str]]) -> int:
    """Compare every row with a raw parallel environment with its lane's seed and actions."""
    parts = lanes_of(rows)
    seeds, deaths = lane_seeds(3, len(parts), 0), 0
    for lane, part in enumerate(parts):
        env = make()
        seen, _ = env.reset(seed=seeds[lane])
        for row in part:
            acting = list(env.agents)
            actions = {}
            for group, agents in groups.items():
                for i, agent in enumerate(agents):
                    lives = agent in acting
                    assert bool(row[group, "mask"][i]) == lives
                    if lives:
                        assert np.array_equal(row[group, "observation"][i].numpy(), seen[agent])
                        actions[agent] = row[group, "action"][i].numpy()
                        if actions[agent].shape == ():
                            actions[agent] = int(actions[agent])
            seen, paid, over, cut, _ = env.step(actions)
            for group, agents in groups.items():
                for i, agent in enumerate(agents):
                    after = row["next", group]
                    assert bool(after["mask"][i]) == (agent in env.agents)
                    acted = agent in acting
                    assert bool(after["terminated"][i]) == (acted and over.get(agent, False))
                    assert bool(after["truncated"][i]) == (acted and cut.get(agent, False))
                    wanted = paid.get(agent, 0.0)
                    assert after["reward"][i].item() == np.float32(wanted)
                    value = after["observation"][i].numpy()
                    assert np.array_equal(value, seen.get(agent, np.zeros_like(value)))
            ended = [agent for agent in acting if over[agent] or cut[agent]]
            last = bool(ended) and not env.agents
            deaths += bool(ended) and not last
            truncated = last and any(cut[agent] for agent in ended)
            assert bool(row["next", "truncated"]) == truncated
            assert bool(row["next", "terminated"]) == (last and not truncated)
            if last:
                seen, _ = env.reset()
    return deaths


CROWD = {"runner": [f"runner_{i}" for i in range(4)], "seer": ["seer_0"]}
RACERS = {"runner": ["runner_0", "runner_1", "runner_2"], "seer": ["seer_0"]}
TAG = {"adversary": [f"adversary_{i}" for i in range(3)], "agent": ["agent_0"]}


def tag() -> ParallelEnv:
    return simple_tag_v3.parallel_env(max_cycles=6)


def test_agents_that_die_before_others() -> None:
    """No death, neither the first nor a later one, loses data."""
    rows = collect(lambda: [Race() for _ in range(3)])
    assert check_by_hand(rows, Race, RACERS) > 20
    assert rows["next", "terminated"].any()
    assert rows["next", "truncated"].any()


def test_agents_that_join_and_come_back() -> None:
    """Masks, ends and counts are those of the environment, regardless of earlier agents."""
    rows = collect(lambda: [Crowd() for _ in range(3)], 400)
    assert check_by_hand(rows, Crowd, CROWD) > 50
    mask, after = rows["runner", "mask"], rows["next", "runner", "mask"]
    done = rows["next", "runner", "done"][..., 0]
    goes_on = ~rows["next", "done"]
    assert (~mask & after).any(), "some join"
    assert (mask & ~after & ~done & goes_on).any(), "some are absent without an end"
    assert (done & goes_on).any(), "some end before others"
    assert not mask[:, 3].any()
    replaced = ~(mask.any(1) & after.any(1)) & goes_on[:, 0]
    assert replaced.any(), "a whole group is absent for a while"


def test_statistics_of_episodes_whose_agents_come_back(tmp_path: Path) -> None:
    """Returns are sums over agents, and lengths are those of the environment."""
    with SyncCollector(
        lambda: [Crowd() for _ in range(2)],
        None,
        frames_per_batch=40,
        total_episodes=20,
        seed=3,
        storage=tmp_path / "run",
    ) as collector:
        list(collector)
        metrics = collector.metrics()
    rows = open_storage(tmp_path / "run")[:]
    assert verify(tmp_path / "run").sound, str(verify(tmp_path / "run"))
    check_by_hand(rows, Crowd, CROWD)
    paid = sum(float(rows["next", group, "reward"].double().sum()) for group in CROWD)
    assert metrics["return_mean"] == pytest.approx(paid / 20)
    assert metrics["length_mean"] == pytest.approx(len(rows) / 20)
    acted = sum(int(rows[group, "mask"].sum()) for group in CROWD)
    assert collector.ledger.agent_transitions == acted


def test_agents_that_are_unequal() -> None:
    rows = collect("pettingzoo:mpe2.simple_tag_v3", 60, num_envs=2, env_kwargs={"max_cycles": 6})
    check_by_hand(rows, tag, TAG)
    assert rows["adversary", "observation"].shape[1:] == (3, 16)
    assert not rows["next", "terminated"].any(), "a limit of cycles truncates"


def test_an_aec_environment_that_is_parallelizable() -> None:
    rows = collect(lambda: [simple_tag_v3.env(max_cycles=6) for _ in range(2)], 60)
    check_by_hand(rows, tag, TAG)


class Twice(BaseWrapper):
    """Pays double from its first step on."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.rewards = {agent: 2 * paid for agent, paid in self.env.rewards.items()}


class TwiceAsProperty(BaseWrapper):
    @property
    def rewards(self) -> dict[str, float]:
        return {agent: 2 * paid for agent, paid in self.env.rewards.items()}

    @rewards.setter
    def rewards(self, paid: Any) -> None:
        pass


class TwiceOnAsking(BaseWrapper):
    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return {a: 2 * paid for a, paid in value.items()} if name == "rewards" else value


class TwiceAnyway(BaseWrapper):
    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__("env" if name == "rewards" else name)
        return {a: 2 * paid for a, paid in value.rewards.items()} if name == "rewards" else value


class Inverted(BaseWrapper):
    """Inverts the marks on the board."""

    def observe(self, agent: str) -> Any:
        seen = super().observe(agent)
        return {**seen, "observation": 1 - seen["observation"]}


class InvertedLater(BaseWrapper):
    """Inverts from its first step on, with an attribute."""

    def step(self, action: Any) -> None:
        super().step(action)
        self.observe = partial(Inverted.observe, Inverted(self.env))


@pytest.mark.parametrize(
    ("wrap", "paid"),
    [
        (lambda env: env, 1.0),
        (lambda env: env.unwrapped, 1.0),
        *((kind, 2.0) for kind in (Twice, TwiceAsProperty, TwiceOnAsking, TwiceAnyway)),
        (lambda env: OrderEnforcingWrapper(Twice(env)), 2.0),
        (Inverted, 1.0),
        (InvertedLater, 1.0),
        (lambda env: OrderEnforcingWrapper(Inverted(env)), 1.0),
    ],
)
def test_turns_are_rows(wrap: Any, paid: float) -> None:
    """Compare with the AEC interface: turns, rewards, observations and legal moves."""
    rows = collect(lambda: [wrap(tictactoe.env()) for _ in range(2)], 150)
    names = ["player_1", "player_2"]
    for part in lanes_of(rows):
        env: AECEnv = wrap(tictactoe.env())
        env.reset()
        for row in part:
            who = names.index(env.agent_selection)
            assert row["player", "mask"].tolist() == [who == 0, who == 1]
            for i, name in enumerate(names):
                seen = env.observe(name)
                assert np.array_equal(row["player", "observation"][i].numpy(), seen["observation"])
                legal = row["player", "action_mask"][i].numpy()
                assert np.array_equal(legal, seen["action_mask"])
            action = int(row["player", "action"][who])
            assert env.observe(names[who])["action_mask"][action], "a move was illegal"
            env.step(action)
            after = row["next", "player"]
            for i, name in enumerate(names):
                assert after["reward"][i].item() == env.rewards[name]
                assert bool(after["terminated"][i]) == env.terminations[name]
                seen = env.observe(name)
                assert np.array_equal(after["observation"][i].numpy(), seen["observation"])
            while env.agents and env.terminations[env.agent_selection]:
                env.step(None)
            assert bool(row["next", "terminated"]) == (not env.agents)
            if not env.agents:
                env.reset()
    assert int(rows["next", "terminated"].sum()) > 10
    assert set(rows["next", "player", "reward"].flatten().tolist()) == {-paid, 0.0, paid}


class Visitors(AECEnv):
    """Game of turns in which players end in any turn, join and return, as the seed draws."""

    metadata = {"name": "visitors"}  # noqa: RUF012  as PettingZoo has it
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["player_1", "player_2", "player_3"]
        self.rng = np.random.default_rng(0)

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(-np.inf, np.inf, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(3)

    def observe(self, agent: str) -> Any:
        return np.array([self.possible_agents.index(agent) + 1, self.step_count], np.float32)

    def reset(self, seed: int | None = None, options: Any = None) -> None:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.step_count = [], 0
        self.length = int(self.rng.integers(2, 9))
        self.rewards, self.terminations, self.truncations = {}, {}, {}
        self.join(["player_2"])
        self.choose()

    def join(self, agents: Sequence[str]) -> None:
        for agent in agents:
            self.agents.append(agent)
            self.rewards[agent] = 0.0
            self.terminations[agent] = self.truncations[agent] = False

    def over(self, agent: str) -> bool:
        return self.terminations[agent] or self.truncations[agent]

    def choose(self) -> None:
        over = [agent for agent in self.agents if self.over(agent)]
        self.agent_selection = (over or [str(self.rng.choice(self.agents))])[0]

    def step(self, action: int | None) -> None:
        mover = self.agent_selection
        if self.over(mover):
            self.agents.remove(mover)
            for each in (self.rewards, self.terminations, self.truncations):
                del each[mover]
        else:
            self.step_count += 1
            last = self.step_count >= self.length
            self.rewards = {a: self.step_count + action * (a == mover) for a in self.agents}
            for agent in self.agents:
                ends = last or self.rng.random() < 0.3
                kind = self.terminations if self.rng.integers(2) else self.truncations
                kind[agent] = bool(ends)
            if not last:
                absent = [a for a in self.possible_agents if a not in self.agents]
                self.join(absent if all(map(self.over, self.agents)) else absent[:1])
        if self.agents:
            self.choose()


def test_turns_of_agents_that_join_and_come_back() -> None:
    rows = collect(lambda: [Visitors() for _ in range(2)], 300)
    names, joined, back = Visitors().possible_agents, 0, 0
    for lane, part in enumerate(lanes_of(rows)):
        env = Visitors()
        env.reset(seed=lane_seeds(3, 2, 0)[lane])
        ended: set[str] = set()
        for row in part:
            agents, group = list(env.agents), row["player"]
            assert group["mask"].tolist() == [name == env.agent_selection for name in names]
            action = int(group["action"][names.index(env.agent_selection)])
            env.step(action)
            after = row["next", "player"]
            for i, name in enumerate(names):
                assert after["reward"][i].item() == env.rewards.get(name, 0.0)
                for flag, known in (
                    ("terminated", env.terminations),
                    ("truncated", env.truncations),
                ):
                    assert bool(after[flag][i]) == (name in agents and known[name])
                seen = env.observe(name) if name in env.agents else np.zeros(2)
                assert np.array_equal(after["observation"][i].numpy(), seen)
            joined += len(set(env.agents) - set(agents))
            back += len(ended & (set(env.agents) - set(agents)))
            ended |= {name for name in agents if env.over(name)}
            cut = any(env.truncations.values())
            while env.agents and env.over(env.agent_selection):
                env.step(None)
            turn = env.agent_selection if env.agents else None
            assert after["mask"].tolist() == [name == turn for name in names]
            assert bool(row["next", "truncated"]) == (turn is None and cut)
            assert bool(row["next", "terminated"]) == (turn is None and not cut)
            if turn is None:
                env.reset()
                ended.clear()
    assert joined > 50
    assert back > 20
    assert int(rows["next", "done"].sum()) > 10


class TestTurnsOfAgentsThatComeBack(SystemContract):
    agents_come_back = True

    def make(self, lanes: int, seeds: Sequence[int] | None) -> PettingZooSystem:
        return PettingZooSystem([Visitors() for _ in range(lanes)])


def test_workers_and_resumed(tmp_path: Path) -> None:
    name = "pettingzoo:test_pettingzoo:Race"
    alone = collect(name, num_envs=4)
    with MultiprocessCollector(
        name,
        None,
        num_envs=4,
        num_workers=2,
        frames_per_batch=37,
        total_frames=200,
        seed=3,
        storage=tmp_path / "workers",
    ) as collector:
        rows = torch.cat([batch.clone() for batch in collector])
    assert verify(tmp_path / "workers").sound
    for key in alone.keys(True, True):
        assert torch.equal(alone[key], rows[key]), key
    path = tmp_path / "run"
    collect(name, 100, num_envs=4, storage=path)
    with SyncCollector(
        name, None, num_envs=4, frames_per_batch=37, total_frames=250, storage=path, resume=True
    ) as collector:
        list(collector)
    stored = open_storage(path)[:]
    check_by_hand(stored[:100], Race, RACERS)
    living = sum(int(stored[group, "mask"].sum()) for group in RACERS)
    assert collector.ledger.agent_transitions == living
    assert verify(path).sound, str(verify(path))


def test_the_command_shows_agent_transitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run")
    kwargs = json.dumps({"longest": 3})
    name = "pettingzoo:test_pettingzoo:Race"
    options = ["--frames", "40", "--num-envs", "2", "--env-kwargs", kwargs, "--out", out]
    assert main(["collect", name, *options]) == 0
    assert main(["inspect", out]) == 0
    assert "agent transitions" in capsys.readouterr().out
    rows = open_storage(out)[:]
    assert int(rows["collector", "step"].max()) == 2


def test_a_command_counts_agent_transitions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Four agents always live: 26 rows give 102 agent transitions or more, and 38 rows give 150."""
    out, tag = str(tmp_path / "run"), "pettingzoo:mpe2.simple_tag_v3"
    unit = ["--budget-unit", "agent_transitions", "--num-envs", "2", "--frames", "102"]
    assert main(["collect", tag, *unit, "--out", out]) == 0
    assert "agent surplus                   2  agent transitions" in capsys.readouterr().out
    assert len(open_storage(out)[:]) == 26
    assert main(["collect", tag, "--resume", "--frames", "150", "--out", out]) == 0
    assert len(open_storage(out)[:]) == 38


def test_each_group_has_a_policy() -> None:
    def act(td: TensorDictBase) -> TensorDictBase:
        return td.set("action", td["observation"][..., 0].long() * 0 + 1)

    policies = {"adversary": act, "agent": None}
    with SyncCollector(
        "pettingzoo:mpe2.simple_tag_v3", policies, num_envs=2, frames_per_batch=40, total_frames=40
    ) as collector:
        rows = next(iter(collector))
    assert (rows["adversary", "action"] == 1).all()
    assert len(rows["agent", "action"].unique()) > 2
    assert (rows["collector", "policy_versions", "agent"] == -1).all()


def test_a_time_limit_from_outside() -> None:
    rows = collect(lambda: races(2), 60, max_frames_per_traj=2)
    assert int(rows["collector", "step"].max()) == 1
    assert (rows["runner", "observation"][:, :, 0].max(1).values <= 1).all()


def test_only_as_many_lanes_as_are_needed() -> None:
    rows = collect(lambda: races(3), 50, surplus="never_step")
    check_by_hand(rows, Race, RACERS)


def test_groups_of_the_caller() -> None:
    groups = {"first": ["runner_0"], "others": ["runner_2", "runner_1"], "seer": ["seer_0"]}
    rows = collect("pettingzoo:test_pettingzoo:Race", 60, num_envs=2, env_kwargs={"groups": groups})
    check_by_hand(rows, Race, groups)


class Broken(Race):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def step(self, actions: dict[str, Any]) -> Any:
        seen, paid, over, cut, infos = super().step(actions)
        if self.how == "vanish":
            self.agents = []
            over = cut = dict.fromkeys(over, False)
        if self.how == "listed" and not self.agents:
            self.agents = list(actions)
        if self.how == "stranger":
            self.agents = [*self.agents, "bystander_0"]
        if self.how == "blind":
            seen = {agent: value for agent, value in seen.items() if agent not in self.agents}
        if self.how == "common":
            seen = {**seen, "common": np.zeros(4, np.float32)}
        if self.how == "shape":
            seen = dict.fromkeys(seen, np.zeros(7, np.float32))
        if self.how == "dtype":
            seen = {agent: value.astype(np.complex64) for agent, value in seen.items()}
        if self.how == "reward":
            paid = {agent: np.full(1, value) for agent, value in paid.items()}
        if self.how == "flag":
            over = {agent: [value] for agent, value in over.items()}
        return seen, paid, over, cut, infos


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("vanish", "lane 0: race has no agents left, but no agent was terminated"),
        ("shape", r"expected float32 \[4\] as the space .* got float32 \[7\] of runner_0"),
        ("dtype", r"next/runner/observation at lane 0, step 0 of .* got complex64"),
        (
            "reward",
            r"next/reward at lane 0, step 0 of .* one number, got float64 \[1\].* of runner",
        ),
        ("flag", r"next/terminated at lane 0, step 0 of .* got \[False\] \(list\) of runner_0"),
        ("listed", "race ended every agent that acted, but still lists all of them. Empty"),
        (
            "stranger",
            r"lists the agents \['bystander_0'\], but they are not in possible_agents\. List",
        ),
        ("blind", r"lists the agents .*, but returned no observations of them\. Return an"),
        ("common", r"expected observations of the agents .*, got also \['common'\]"),
    ],
)
def test_environments_that_break_their_word(how: str, match: str) -> None:
    with pytest.raises(TransitionError, match=match):
        collect(lambda: Broken(how), 20)


class Forgetful(ParallelEnv):
    """Two walkers and a seer: ``walker_1`` leaves at step 2, the others at 4.

    Observations are ``[step + 1, number]``. ``how`` selects the data that a step omits for the
    agents that leave in it.
    """

    metadata = {"name": "forgetful"}  # noqa: RUF012  as PettingZoo has it
    render_mode = None
    possible_agents = ("walker_0", "walker_1", "seer_0")  # type: ignore[assignment]
    leaves = (4, 2, 4)

    def __init__(self, how: str) -> None:
        self.how = how

    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Box(0, 9, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space:
        return spaces.Discrete(2)

    def seen(self) -> dict[str, Any]:
        return {
            agent: np.array([self.at + 1, number], np.float32)
            for number, agent in enumerate(self.possible_agents)
            if agent in self.agents
        }

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        self.agents, self.at = list(self.possible_agents), 0
        return self.seen(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.at += 1
        seen, acted = self.seen(), list(self.agents)
        ends = dict(zip(self.possible_agents, self.leaves, strict=True))
        over = [agent for agent in acted if ends[agent] <= self.at]
        self.agents = [agent for agent in acted if agent not in over]
        flags = [dict.fromkeys(acted, False) for _ in range(2)]
        flags[self.how != "terminated"] |= dict.fromkeys(over, True)
        rewards = dict.fromkeys(acted, 1.0)
        for agent in over:
            if self.how != "observed":
                del seen[agent]
            if self.how == "rewards":
                del rewards[agent]
            if self.how == "flags":
                del flags[0][agent], flags[1][agent]
            if self.how == "absent" and self.at == 2:
                flags[1][agent] = False
        return seen, rewards, *flags, {agent: {} for agent in acted}


@pytest.mark.parametrize("how", ["observed", "truncated", "terminated", "absent"])
@pytest.mark.parametrize("way", ["one process", "workers", "a time limit"])
def test_lost_last_observations_are_marked(how: str, way: str, tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"frames_per_batch": 8, "total_frames": 16, "seed": 0}
    make = partial(Forgetful, how)
    path = tmp_path / "rows"
    if way == "workers":
        made: Any = MultiprocessCollector(make, num_workers=2, storage=path, **kwargs)
    else:
        limit = 30 if way == "a time limit" else None
        two = lambda: [make(), make()]  # noqa: E731
        made = SyncCollector(two, storage=path, max_frames_per_traj=limit, **kwargs)
    with made as collector:
        for _ in collector:
            pass
    storage = open_storage(path)
    rows = storage.get(slice(0, 16))
    step = rows["collector", "step"]
    for group, numbers in (("walker", [0, 1]), ("seer", [2])):
        valid = rows["collector", "next_valid", group]
        leaves = torch.tensor([Forgetful.leaves[number] for number in numbers])
        left = (step[:, None] + 1 == leaves) & (how != "observed")
        assert torch.equal(valid, ~left)
        lost = rows["next", group, "observation"][~valid]
        assert not lost.any()
        kept = rows["next", group, "observation"][valid & rows[group, "mask"]]
        assert (kept[:, 0] >= 2).all()
    storage.close()
    assert verify(path).sound


@pytest.mark.parametrize(
    ("how", "match"),
    [
        (
            "rewards",
            "next/walker/reward at lane 1, step 1 of .* a value for agent walker_1, which acted",
        ),
        ("flags", "next/walker/terminated at lane 1, step 1 of its trajectory: .* walker_1"),
    ],
)
def test_a_reward_or_an_end_that_a_step_leaves_out_is_an_error(how: str, match: str) -> None:
    make = lambda: [Forgetful("truncated"), Forgetful(how)]  # noqa: E731
    with (
        SyncCollector(make, frames_per_batch=8, total_frames=16) as collector,
        pytest.raises(ValueRefused, match=match),
    ):
        list(collector)


def test_all_ends_are_doubted_where_a_user_says_that_finals_are_lost() -> None:
    with SyncCollector(
        lambda: Forgetful("observed"), frames_per_batch=8, total_frames=8, finals="lost"
    ) as collector:
        (batch,) = collector
    last = batch["collector", "step"] == 3
    assert torch.equal(batch["collector", "next_valid", "walker"].all(1), ~last)


@pytest.mark.filterwarnings("ignore:PettingZoo in TorchRL is tested:UserWarning")
def test_the_wrapper_of_torchrl_raises_where_it_would_store_zeros() -> None:
    for how in ("observed", "truncated"):
        make = lambda how=how: PettingZooWrapper(Forgetful(how), use_mask=True)  # noqa: E731
        with SyncCollector(make, frames_per_batch=8, total_frames=8) as collector:
            if how == "observed":
                list(collector)
                continue
            with pytest.raises(ValueRefused, match=r"at lane 0, step 1 .* agent walker_1, which"):
                list(collector)


class Empty(Race):
    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed)
        self.agents = []
        return {}, {}


def test_a_reset_that_leaves_no_agents() -> None:
    with pytest.raises(TransitionError, match="lane 0: race has no agents after its reset"):
        collect(Empty, 20)


class Masked(Race):
    def observation_space(self, agent: str) -> spaces.Space:
        return spaces.Dict(mask=spaces.Box(0, 1, (2,)))


@pytest.mark.parametrize(
    ("name", "kwargs", "error", "match"),
    [
        ("sisl/no_such_v0", {}, ArgumentError, "neither in PettingZoo's registry nor a module"),
        ("mpe2.simple_tag_v3", {"cycles": 1}, ArgumentError, "unexpected keyword argument"),
        ("os:getcwd", {}, ArgumentError, "returns an environment, got one that returns a str"),
        (
            "test_pettingzoo:Race",
            {"groups": 3},
            ArgumentError,
            "expected a mapping from group names",
        ),
        ("test_pettingzoo:Race", {"groups": {"a": ["runner_0"]}}, ArgumentError, "in one group"),
        (
            "test_pettingzoo:Race",
            {"groups": {"a": RACERS["runner"] + RACERS["seer"]}},
            ArgumentError,
            "got different spaces",
        ),
        ("test_pettingzoo:Masked", {}, SpaceError, "names other than mask, action and reward"),
    ],
)
def test_misuse(name: str, kwargs: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SyncCollector(
            f"pettingzoo:{name}", None, frames_per_batch=4, total_frames=4, env_kwargs=kwargs
        )


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(MissingExtra, match=r'pip install "tallyroll\[pettingzoo\]"'):
        PettingZooSystem.make("sisl/pursuit_v5", 1, None)


def test_nothing_half_made_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Race] = []

    def factory(**kwargs: Any) -> Race:
        if len(made) == 2:
            raise TypeError("no third one")
        made.append(Race())
        return made[-1]

    monkeypatch.setattr(sys.modules[__name__], "factory", factory, raising=False)
    with pytest.raises(ArgumentError, match="no third one"):
        PettingZooSystem.make("test_pettingzoo:factory", 3, None)
    assert [env.closed for env in made] == [True, True]


class MaskedRace(ParallelEnv[str, Any, Any]):
    """Infos of agents have masks, and one agent dies early. Rewards are 1 for legal actions."""

    metadata: ClassVar[dict[str, Any]] = {"name": "masked"}

    def __init__(self) -> None:
        self.possible_agents = ["a_0", "a_1", "b_0"]
        self.agents: list[str] = []

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 100, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(5) if agent[0] == "a" else spaces.MultiDiscrete([2, 3])

    def _infos(self, agents: Sequence[str]) -> dict[str, Any]:
        self.masks: dict[str, Any] = {}
        for agent in agents:
            if agent == "a_1" and self.time % 2:
                self.masks[agent] = None
            elif agent == "b_0":
                self.masks[agent] = tuple(np.eye(n, dtype=np.int8)[self.time % n] for n in (2, 3))
            else:  # no action is legal for a dead agent
                self.masks[agent] = np.eye(5, dtype=np.int8)[self.time % 5] * (agent in self.agents)
        return {a: {} if m is None else {"action_mask": m} for a, m in self.masks.items()}

    def _seen(self, agents: Sequence[str]) -> dict[str, Any]:
        return {agent: np.full(1, self.time, np.float32) for agent in agents}

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        self.agents, self.time = [*self.possible_agents], 0
        return self._seen(self.agents), self._infos(self.agents)

    def step(self, actions: dict[str, Any]) -> Any:
        def legal(agent: str) -> bool:
            mask, action = self.masks[agent], actions[agent]
            if mask is None:
                return True
            parts = zip(mask, action, strict=True) if agent == "b_0" else [(mask, action)]
            return all(bool(marks[value]) for marks, value in parts)

        acted = [*self.agents]
        rewards = {agent: float(legal(agent)) for agent in acted}
        self.time += 1
        over = self.time == 6
        ended = {agent: over or (agent == "a_0" and self.time == 3) for agent in acted}
        self.agents = [agent for agent in acted if not ended[agent]]
        cut = dict.fromkeys(acted, False)
        return self._seen(acted), rewards, ended, cut, self._infos(acted)


class MaskedTurns(AECEnv[str, Any, Any]):
    """Two alternating agents with masks in ``infos``."""

    metadata: ClassVar[dict[str, Any]] = {"name": "masked turns"}

    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["p_0", "p_1"]

    def observation_space(self, agent: str) -> Any:
        return spaces.Box(-1, 100, (1,), np.float32)

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def observe(self, agent: str) -> Any:
        return np.full(1, self.time, np.float32)

    def _put_masks(self) -> None:
        for index, agent in enumerate(self.agents):
            mask = np.eye(4, dtype=np.int8)[(3 * self.time + index) % 4]
            self.infos[agent] = {"action_mask": mask}

    def reset(self, seed: Any = None, options: Any = None) -> None:
        self.agents, self.time = [*self.possible_agents], 0
        self.agent_selection = "p_0"
        self.rewards = dict.fromkeys(self.agents, 0.0)
        self._cumulative_rewards = dict.fromkeys(self.agents, 0.0)
        self.terminations = dict.fromkeys(self.agents, False)
        self.truncations = dict.fromkeys(self.agents, False)
        self.infos = {agent: {} for agent in self.agents}
        self._put_masks()

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        legal = float(self.infos[agent]["action_mask"][action])
        self.rewards = {each: legal * (each == agent) for each in self.agents}
        self.time += 1
        self.terminations = dict.fromkeys(self.agents, self.time == 7)
        self.agent_selection = self.agents[self.time % 2]
        self._put_masks()


def masked_races(num_envs: int = 2) -> PettingZooSystem:
    return PettingZooSystem([MaskedRace() for _ in range(num_envs)])


def test_random_actions_keep_to_masks_in_infos_of_agents() -> None:
    options: dict[str, Any] = {"frames_per_batch": 30, "total_frames": 60, "seed": 0}
    found = []
    for more in ({}, {"num_workers": 2, "transport": "thread"}):
        kind: Any = MultiprocessCollector if more else SyncCollector
        with kind(masked_races, num_envs=2, **options, **more) as collector:
            assert collector.plan.masks.way == "infos"
            batch = torch.cat(list(collector))
        for group in ("a", "b"):
            legal = batch["next", group, "reward"][..., 0] == 1
            assert bool((legal | ~batch[group, "mask"]).all())
        found.append(batch["a", "action"])
    assert torch.equal(*found)
    with SyncCollector(lambda: PettingZooSystem([MaskedTurns()]), **options) as collector:
        batch = torch.cat(list(collector))
    legal = batch["next", "p", "reward"][..., 0] == 1
    assert bool((legal | ~batch["p", "mask"]).all())


# --- recorders ------------------------------------------------------------------------------------


def chosen(observations: Any) -> Any:
    """Return an action for each agent, a function of its observation."""
    return {
        agent: np.int64(seen.sum() % 5) if "run" in agent else np.clip(seen[:2] / 10, -1, 1)
        for agent, seen in observations.items()
    }


def as_chosen(td: TensorDictBase) -> TensorDictBase:
    """Write the actions of `chosen`."""
    runner, seer = td["runner", "observation"], td["seer", "observation"]
    td["runner", "action"] = (runner.sum(-1) % 5).to(torch.int64)
    td["seer", "action"] = (seer[..., :2] / 10).clamp(-1, 1)
    return td


@pytest.mark.parametrize("kind", [Race, Crowd])
def test_a_recorder_stores_the_rows_that_a_collector_stores(kind: Any, tmp_path: Path) -> None:
    how: dict[str, Any] = {"total_frames": 60}
    with Recorder(kind(), storage=tmp_path / "own", commit_every=7, **how) as env:
        assert isinstance(env, ParallelEnv)
        env.policy_version = 0
        seen, _ = env.reset(seed=lane_seeds(5, 1, 0)[0])
        while not env.full:
            actions = chosen({agent: seen[agent] for agent in env.agents})
            seen, *rest = env.step(actions)
            assert rest[0].keys() >= actions.keys() or kind is Crowd
            if not env.agents and not env.full:
                seen, _ = env.reset()
        counts = env.ledger.counts()
    with SyncCollector(
        PettingZooSystem([kind()]),
        as_chosen,
        frames_per_batch=20,
        seed=5,
        storage=tmp_path / "collected",
        **how,
    ) as collector:
        collector.collect(60)
        assert counts == collector.ledger.counts()
    assert verify(tmp_path / "own").sound
    with (
        open_storage(tmp_path / "own") as own,
        open_storage(tmp_path / "collected") as collected,
    ):
        ours, theirs = own[:], collected[:]
        run = own.manifest["runs"][-1]
    assert run["call"]["recorded"] == [kind.__name__]
    assert set(ours.keys(True, True)) == set(theirs.keys(True, True))
    for key in ours.keys(True, True):
        one, other = ours[key], theirs[key]
        if key[-1] == "action":  # a policy acts for agents that are gone, too
            mask = ours[key[0], "mask"]
            assert not one[~mask].any()
            one, other = one[mask], other[mask]
        assert torch.equal(one, other), key


def test_a_recorder_refuses_actions_that_no_row_can_hold(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="info_keys: expected none"):
        Recorder(Race(), storage=tmp_path / "rows", info_keys=["a"])
    with Recorder(Race(), storage=tmp_path / "rows") as env:
        with pytest.raises(StateError, match="expected a reset"):
            env.step({})
        seen, _ = env.reset(seed=0)
        actions = chosen(seen)
        with pytest.raises(ArgumentError, match=r"action of each agent .* got none of seer_0"):
            env.step({agent: each for agent, each in actions.items() if agent != "seer_0"})
        with pytest.raises(ArgumentError, match="by name, got list"):
            env.step([0, 1])
        with pytest.raises(ArgumentError, match=r"expected the shape \[2\] .* 'seer', got \[3\]"):
            env.step({**actions, "seer_0": np.zeros(3, np.float32)})
        with pytest.raises(ValueRefused, match="action"):
            env.step({**actions, "runner_1": 0.5})
        env.step(actions)
        env.reset(seed=1)  # cuts the episode
    assert env.ledger.counts()["episodes_cut"] == 1
    assert env.ledger.stored == 1
    assert env.env.closed
