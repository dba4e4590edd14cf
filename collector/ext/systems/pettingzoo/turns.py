"""Adapter from PettingZoo's AEC interface to the parallel one: a step is the turn of one agent."""

import sys
from collections.abc import Mapping
from typing import Any

_NAMES = frozenset({"agents", "agent_selection", "rewards", "terminations", "truncations"})
_OWN = _NAMES | {"observe"}


class AgentTurns:
    """Parallel interface to an AEC environment, with one acting agent per step."""

    def __init__(self, env: Any) -> None:
        self.env, self.possible_agents = env, getattr(env, "possible_agents", ())
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.close = env.close
        self._base, self._observer, self._layers = _unwrapped(env)
        self.agents: list[str] = []
        """The agent whose turn it is."""
        self.living: set[str] = set()
        """Agents that are present and have not ended."""

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, seed: int | None, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reset; return the first observations of all agents, and no infos."""
        self.env.reset(seed=seed, options=options)
        known, observer = self._inside()
        seen = {agent: observer.observe(agent) for agent in known.agents}
        self._next_turn()
        return seen, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Play the turn of the one agent in ``agents``; return results of the agents present."""
        env, (agent,) = self.env, self.agents
        env.step(actions[agent])
        known, observer = self._inside()
        rewards, terminated, truncated = known.rewards, known.terminations, known.truncations
        observe = observer.observe
        seen = {agent: observe(agent) for agent in known.agents}
        self.living = set(seen)
        if any(terminated.values()) or any(truncated.values()):
            # The steps that remove dead agents overwrite the results of this step.
            rewards, terminated, truncated = dict(rewards), dict(terminated), dict(truncated)
            self._next_turn()
        else:
            self.agents = [known.agent_selection] if seen else []
        return seen, rewards, terminated, truncated, {}

    @property
    def infos(self) -> Mapping[str, Any]:
        """The infos of all agents after the last turn."""
        return getattr(self._inside()[0], "infos", {})

    def _next_turn(self) -> None:
        known, _ = self._inside()
        while (agents := known.agents) and (
            known.terminations[known.agent_selection] or known.truncations[known.agent_selection]
        ):
            self.env.step(None)
            known, _ = self._inside()
        self.agents = [known.agent_selection] if agents else []
        ended, cut = known.terminations, known.truncations
        self.living = {name for name in agents if not (ended.get(name) or cut.get(name))}

    def _inside(self) -> tuple[Any, Any]:
        """Return the environment with agents, rewards and ends, and the environment to observe.

        They are the base environment and the outermost environment that does more than forward
        observations. If a wrapper has an attribute of its own, both are ``env``. Reading five
        attributes through three wrappers takes as long as a turn of a small game.
        """
        if all(map(_OWN.isdisjoint, self._layers)):
            return self._base, self._observer
        return self.env, self.env


def _unwrapped(env: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    """Return the base environment, the environment to observe, and each wrapper's attributes.

    The base environment is the one below transparent wrappers. The environment to observe is the
    outermost one that defines its own ``observe``. Both are ``env`` itself if a wrapper may answer
    differently.
    """
    layers: list[dict[str, Any]] = []
    wrappers = sys.modules.get("pettingzoo.utils.wrappers")
    base, observer = env, None
    while wrappers is not None and isinstance(base, wrappers.BaseWrapper):
        kind: Any = type(base)
        of, ordered = wrappers.BaseWrapper, wrappers.OrderEnforcingWrapper
        through = of.__getattr__, ordered.__getattr__
        own = kind.__getattr__ not in through or any(hasattr(kind, name) for name in _NAMES)
        if own or kind.__getattribute__ is not object.__getattribute__:
            return env, env, []
        if observer is None and kind.observe not in (of.observe, ordered.observe):
            observer = base
        layers.append(vars(base))
        base = base.env
    return base, observer or base, layers
