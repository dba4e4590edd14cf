"""Agents that join and leave: lanes as PettingZoo's parallel environments, and a model of them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

from random_spaces import Array


def living(agents: int, lane: int, episode: int, at: int) -> Array:
    """Return which agents live in this state of a running episode, bool ``[agent]``."""
    draws = [
        np.random.default_rng([lane, episode, agent, (at + agent) // 3]).integers(3)
        for agent in range(agents)
    ]
    alive = np.array(draws) > 0
    alive[(episode + at // 4) % agents] = True
    return alive


def leaves_by_end(lane: int, at: int) -> bool:
    """Return whether an agent that leaves at this step is terminated instead of truncated."""
    return (lane + at) % 2 == 0


class Herd:
    """A lane as a parallel environment. Each agent is a row of the lane's observation."""

    metadata: dict[str, Any] = {"name": "herd"}  # noqa: RUF012  PettingZoo declares it so
    render_mode = None

    def __init__(self, env: gym.Env[Any, Any], lane: int) -> None:
        self.env, self.lane = env, lane
        space: Any = env.observation_space
        self.count = space.shape[0]
        self.possible_agents = [f"agents_{agent}" for agent in range(self.count)]
        self.agents: list[str] = []
        self.episode, self.at = -1, 0

    def __str__(self) -> str:
        return "herd"

    def observation_space(self, agent: str) -> Box:
        """Return the space of each agent's observation."""
        return Box(-100, 100, (2,), np.float32)

    def action_space(self, agent: str) -> Discrete:
        """Return the space of each agent's action."""
        return Discrete(3)

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[dict[str, Any], Any]:
        """Begin an episode."""
        observation, _ = self.env.reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        alive = self._living()
        self.agents = self._names(alive)
        return self._by_agent(observation, alive), self._by_agent([{}] * self.count, alive)

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        """Step the living agents."""
        assert set(actions) == set(self.agents), f"{set(actions)} acted, {self.agents} live"
        before = self._living()
        action = [int(actions.get(name, 0)) for name in self.possible_agents]
        observation, reward, terminated, truncated, _ = self.env.step(np.array(action))
        self.at += 1
        over = terminated or truncated
        after = self._living() & (not over)
        leaving, seen = before & ~after, before | after
        ended = terminated if over else leaves_by_end(self.lane, self.at)
        cut = truncated if over else not ended
        rewards = [reward * (agent + 1) * before[agent] for agent in range(self.count)]
        self.agents = self._names(after)
        return (
            self._by_agent(observation, seen),
            self._by_agent(rewards, seen),
            self._by_agent(leaving & ended, seen),
            self._by_agent(leaving & cut, seen),
            self._by_agent([{}] * self.count, seen),
        )

    def close(self) -> None:
        """Close the lane."""
        self.env.close()

    def _living(self) -> Array:
        return living(self.count, self.lane, self.episode, self.at)

    def _names(self, which: Array) -> list[str]:
        return [name for name, one in zip(self.possible_agents, which, strict=True) if one]

    def _by_agent(self, values: Any, which: Array) -> dict[str, Any]:
        pairs = zip(self.possible_agents, values, which, strict=True)
        return {name: value for name, value, one in pairs if one}


# --- expected rows --------------------------------------------------------------------------------


class HerdRows:
    """Expected values of agents in the transitions of a lane, all ``[row, agent]``.

    ``steps`` has ``(episode, step, over)`` of each row.
    """

    def __init__(self, agents: int, lane: int, steps: list[tuple[int, int, bool]]) -> None:
        none = np.zeros(agents, np.bool_)

        def at(episode: int, step: int) -> Array:
            return living(agents, lane, episode, step) if step >= 0 else none

        self.before = np.array([at(episode, step) for episode, step, _ in steps])
        self.after = np.array(
            [none if over else at(episode, step + 1) for episode, step, over in steps]
        )
        earlier = np.array([at(episode, step - 1) for episode, step, _ in steps])
        self.seen_before = self.before | earlier
        self.seen_after = self.before | self.after
        self.leaving = self.before & ~self.after
        self.over = np.array([over for *_, over in steps])
        self.ended = np.array([leaves_by_end(lane, step + 1) for _, step, _ in steps])

    def flags(self, terminated: Array, truncated: Array) -> dict[str, Array]:
        """Return the flags of the agents, from the root's flags ``[row]``."""
        ended = np.where(self.over, terminated, self.ended)
        cut = np.where(self.over, truncated, ~self.ended)
        own = {
            "terminated": self.leaving & ended[:, None],
            "truncated": self.leaving & cut[:, None],
        }
        return {**own, "done": own["terminated"] | own["truncated"]}
