"""PettingZoo: parallel and AEC environments, a lane each, their agents in groups."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.envs.systems.agent_rows import AgentRows
from tallyroll.collector.envs.systems.agents import Groups, declared, described, grouped
from tallyroll.collector.envs.systems.pettingzoo_envs import alike, make_into
from tallyroll.collector.envs.systems.pettingzoo_turns import Turns
from tallyroll.collector.envs.systems.side_by_side import all_or_none, close_all, numbers
from tallyroll.collector.errors import TransitionError


class PettingZooSystem(System):
    """PettingZoo environments side by side: an env step is a joint step of all living agents.

    A lane's episode goes on until no agent is left, and is truncated where one of the last ones
    was. What an agent saw last is its final observation; later ones are zeros, with a mask that is
    False, as are its rewards. An AEC environment that is parallelizable is stepped in cycles. In
    any other an env step is the turn of one agent: the mask says whose turn is next, observations
    are those of all living agents, rewards what the turn brought each of them, and the steps that
    take dead agents away are made within it.

    Args:
        envs: parallel or AEC environments, all alike; they are closed with this.
        groups: group -> its agents; None: by name and spaces (`agents.grouped`).
        name: what made them, as provenance.

    Raises:
        ArgumentError, SpaceError: environments, groups or spaces that cannot be driven.
    """

    package = "pettingzoo"
    extra = "pettingzoo"
    about = "an episode ends with its last agent; masks say who lives; a seed a lane"
    conflicts = "mpe2 brings pygame-ce; the pygame of MO-Gymnasium and CARL writes over it"

    def __init__(
        self, envs: Sequence[Any], groups: Groups | None = None, name: str | None = None
    ) -> None:
        self.envs, seen, acts = alike(envs)
        self.name, lanes = name or str(envs[0]), len(self.envs)
        self._groups = grouped(seen, acts, groups)
        self._names = [agent for group in self._groups for agent in group.agents]
        self._turns = isinstance(self.envs[0], Turns)
        self._ids = [not group.action.shape[1:] for group in self._groups]
        shape = lanes, len(self._names)
        self._reward = np.zeros(shape, np.float32)
        self._mask, self._alive, self._terminated, self._truncated = np.zeros((4, *shape), np.bool_)
        self._over = np.zeros((2, lanes), np.bool_)
        self._rows = AgentRows(self._groups, lanes)
        self._arrays = self._rows.with_masks(self._mask)
        self.declares = Declares(
            lanes=lanes, at_end="final", parts=True, turns=self._turns, **declared(self._groups)
        )

    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Reset environments; each takes its seed."""
        for lane in numbers(lanes, len(self.envs)):
            seed = None if seeds is None else seeds[lane]
            seen, _ = self.envs[lane].reset(seed=seed, options=options.get("options"))
            self._rows.put(lane, seen, self.first_lane)
            self._alive[lane] = [name in seen for name in self._names]
            self._mask[lane] = [name in self.envs[lane].agents for name in self._names]
        return self._arrays

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step environments, one after the other."""
        names, count = self._names, len(self._names)
        parts = [x.tolist() if ids else x for x, ids in zip(action, self._ids, strict=True)]
        for flags in (self._terminated, self._truncated, self._over):
            flags.fill(False)
        for lane in numbers(lanes, len(self.envs)):
            env = self.envs[lane]
            acting, before = env.agents, len(env.agents)
            given = (each for part in parts for each in part[lane])
            actions = dict(zip(names, given, strict=True))
            if before < count:
                actions = {name: actions[name] for name in acting}
            seen, rewards, terminated, truncated, _ = env.step(actions)
            self._rows.put(lane, seen, self.first_lane)
            self._reward[lane] = [rewards.get(name, 0.0) for name in names]
            if any(terminated.values()) or any(truncated.values()) or len(env.agents) != before:
                self._end(lane, terminated, truncated)
            elif self._turns:
                self._mask[lane] = [name in env.agents for name in names]
        return Step(
            self._arrays,
            [self._reward[:, part] for part in self._rows.slices.values()],
            self._over[0],
            self._over[1],
            agents={
                group: AgentFlags(self._terminated[:, part], self._truncated[:, part])
                for group, part in self._rows.slices.items()
            },
        )

    def _end(self, lane: int, terminated: Mapping[str, Any], truncated: Mapping[str, Any]) -> None:
        """Ends of agents that lived, and of the lane with the last of them."""
        alive, acting = self._alive[lane], self.envs[lane].agents
        over = [[bool(each.get(n, False)) for n in self._names] for each in (terminated, truncated)]
        ended = np.array(over) & alive
        self._terminated[lane], self._truncated[lane] = ended
        alive &= ~ended.any(0)
        self._mask[lane] = [name in acting for name in self._names]
        self._mask[lane] &= alive
        if acting and alive.any():
            return
        if not ended.any():
            raise TransitionError(
                f"lane {self.first_lane + lane}: {self.name} has no agents left, and none of them "
                "was terminated or truncated; let its step say how they ended"
            )
        cut = bool((ended[1] & ~ended[0]).any())
        self._over[:, lane] = not cut, cut

    def close(self) -> None:
        """Close every environment."""
        close_all(self.envs)

    def describe(self) -> dict[str, Any]:
        """The name, and groups of agents."""
        return described(self.name, self, self._groups)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """``pettingzoo:sisl/pursuit-v5``, or a module: ``pettingzoo:mpe2.simple_tag_v3``.

        A function behind a colon is called in the place of its ``parallel_env`` or ``env``.
        ``kwargs`` are its own, and ``groups``.
        """
        groups = kwargs.pop("groups", None)
        with all_or_none() as envs:
            make_into(envs, name, lanes, kwargs)
            return cls(envs, groups, name)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A lane over a parallel or AEC environment, or a lane each over a list of them."""
        module = sys.modules.get("pettingzoo.utils.env")
        envs = made if isinstance(made, (list, tuple)) else [made]
        kinds = () if module is None else (module.ParallelEnv, module.AECEnv)
        return cls(envs) if envs and all(isinstance(env, kinds) for env in envs) else None
