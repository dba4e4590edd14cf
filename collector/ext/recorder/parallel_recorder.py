"""Recorder of PettingZoo's parallel environments. Importing this module needs that package."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pettingzoo.utils.wrappers import BaseParallelWrapper

from tallyroll.collector.envs.calls.objects import own_attribute
from tallyroll.collector.envs.setup.make import make_env
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.recorder.recorded_env import RecordedEnv
from tallyroll.collector.ext.recorder.recorder import Recorder
from tallyroll.collector.ext.systems.kinds.agents import Group, grouped
from tallyroll.collector.ext.systems.pettingzoo.envs import alike
from tallyroll.collector.ext.systems.pettingzoo.system import PettingZooSystem
from tallyroll.collector.options import Options
from tallyroll.collector.options.objects import Columns


class ParallelStandIn(BaseParallelWrapper):
    """Stand-in for a parallel environment."""

    returned: Any = None
    """The last result of the environment's ``step`` or ``reset``."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.agents: list[str] = []
        """The environment's living agents, copied when ``returned`` was last read."""

    def step(self, actions: Any) -> Any:
        """Return the last result of the environment."""
        self.agents = list(self.env.agents)
        return self.returned

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        """Return the last result of the environment."""
        self.agents = list(self.env.agents)
        return self.returned


def recorded_parallel(env: Any, options: Options) -> RecordedEnv:
    """Return the `RecordedEnv` of a parallel environment.

    Raises:
        ArgumentError: the environment does not list its possible agents, or ``info_keys`` is set.
    """
    if options.info_keys:
        raise ArgumentError(
            "info_keys: expected none, because infos of agents cannot become columns. Return the "
            "values in the observations, from a wrapper inside the recorder."
        )
    stand_in = ParallelStandIn(env)
    system, own = PettingZooSystem([stand_in], name=str(env)), PettingZooSystem([env])
    driven, actual = SystemEnv(system, rename=options.rename), SystemEnv(own)
    driven.owns_system = actual.owns_system = False
    description = make_env(actual, replace(options, columns=Columns())).description
    return RecordedEnv(
        driven,
        stand_in,
        actual,
        description,
        list(_layers(env)),
        is_single=True,
        actions=_actions_of(env, stand_in),
    )


def _layers(env: Any) -> Iterator[str]:
    """Yield the class names of ``env`` and of its inner environments, outermost first."""
    while env is not None:
        yield type(env).__name__
        env = own_attribute(env, "env")


def _actions_of(env: Any, stand_in: ParallelStandIn) -> Callable[[Any], list[NDArray[Any]]]:
    """Return a function from actions by agent to an array ``[lane, agent, ...]`` for each group."""
    _, seen, acts = alike([env])
    groups: Sequence[Group] = grouped(seen, acts)

    def actions(given: Any) -> list[NDArray[Any]]:
        acting = stand_in.agents
        if not isinstance(given, Mapping) or (missing := [a for a in acting if a not in given]):
            got = f"none of {missing[0]}" if isinstance(given, Mapping) else type(given).__name__
            raise ArgumentError(
                f"action: expected the action of each agent in env.agents, by name, got {got}"
            )
        found = []
        for group in groups:
            leaf = group.action
            rest = np.zeros(leaf.shape[1:], leaf.dtype)  # of agents that do not act
            rows = [np.asarray(given[a]) if a in acting else rest for a in group.agents]
            if wrong := {row.shape for row in rows} - {rest.shape}:
                raise ArgumentError(
                    f"action: expected the shape {list(rest.shape)} for each agent of "
                    f"{group.name!r}, got {list(wrong.pop())}"
                )
            found.append(np.stack(rows)[None])
        return found

    return actions


class ParallelRecorder(Recorder, BaseParallelWrapper):
    """`Recorder` of a parallel environment of PettingZoo."""

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        return recorded_parallel(env, options)

    def step(self, actions: Any) -> Any:
        """Step the environment, and record the joint transition of all agents."""
        return self._step_env(actions)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        """Reset the environment, and cut a running episode."""
        return self._reset_env(seed, options)
