"""AEC environments of PettingZoo, stepped as parallel ones are: a step is the turn of one agent."""

import sys
from collections.abc import Mapping
from typing import Any

_NAMES = frozenset({"agents", "agent_selection", "rewards", "terminations", "truncations"})


class Turns:
    """An AEC environment as a parallel one of which one agent acts a step."""

    def __init__(self, env: Any) -> None:
        self.env, self.possible_agents = env, getattr(env, "possible_agents", ())
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.close = env.close
        self._base, self._layers = _unwrapped(env)
        self.agents: list[str] = []
        """The agent whose turn it is."""
        self.living: set[str] = set()
        """Agents that are there and have not ended."""

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, seed: int | None, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """First observations of all agents, and no infos."""
        self.env.reset(seed=seed, options=options)
        seen = {agent: self.env.observe(agent) for agent in self.env.agents}
        self._next_turn()
        return seen, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Play the turn of the one agent in ``agents``; return the results of all that lived."""
        env, (agent,) = self.env, self.agents
        env.step(actions[agent])
        known = self._known
        rewards, terminated, truncated = known.rewards, known.terminations, known.truncations
        seen = {agent: env.observe(agent) for agent in known.agents}
        self.living = set(seen)
        if any(terminated.values()) or any(truncated.values()):
            # Dead agents are taken away by steps that forget what this one brought.
            rewards, terminated, truncated = dict(rewards), dict(terminated), dict(truncated)
            self._next_turn()
        else:
            self.agents = [known.agent_selection] if seen else []
        return seen, rewards, terminated, truncated, {}

    def _next_turn(self) -> None:
        env = self.env
        while env.agents and (
            env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
        ):
            env.step(None)
        self.agents = [env.agent_selection] if env.agents else []
        ended, cut = env.terminations, env.truncations
        self.living = {name for name in env.agents if not (ended.get(name) or cut.get(name))}

    @property
    def _known(self) -> Any:
        """The object that knows agents, rewards and ends: the base environment, or a wrapper.

        To read five of these through three wrappers takes as long as a turn of a small game.
        """
        if all(map(_NAMES.isdisjoint, self._layers)):
            return self._base
        return self.env


def _unwrapped(env: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Return the environment below transparent wrappers, and the attributes of each wrapper.

    It is ``env`` itself if a wrapper may answer differently from the environment.
    """
    layers: list[dict[str, Any]] = []
    wrappers = sys.modules.get("pettingzoo.utils.wrappers")
    base = env
    while wrappers is not None and isinstance(base, wrappers.BaseWrapper):
        kind: Any = type(base)
        through = wrappers.BaseWrapper.__getattr__, wrappers.OrderEnforcingWrapper.__getattr__
        own = kind.__getattr__ not in through or any(hasattr(kind, name) for name in _NAMES)
        if own or kind.__getattribute__ is not object.__getattribute__:
            return env, []
        layers.append(vars(base))
        base = base.env
    return base, layers
