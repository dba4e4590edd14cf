"""VMAS: batched torch, time limits that truncate, agents in groups."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from gymnasium import spaces

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.ext.systems.kinds.agents import (
    Groups,
    declared,
    described,
    grouped,
    listed,
)


class VmasSystem(System):
    """A batched VMAS environment. All agents of a lane end together.

    VMAS draws for all lanes from one generator. The system seeds it with the first lane's seed.
    VMAS shares one generator state among all environments of a process, but the system keeps a
    separate state for this environment. If all lanes end in the same step, one call resets them.
    Otherwise each lane is reset by its own call.

    Args:
        env: an environment made with ``terminated_truncated=True``.
        groups: agents by group name. None groups them by name and spaces (`agents.grouped`), and
            names the group "agents" if there is only the group "agent".
        name: the scenario, for provenance.

    Raises:
        EnvironmentRefused: the environment does not distinguish time limits from other ends.
        ArgumentError: the groups are invalid.
        SpaceError: no column can hold a space.
    """

    package = "vmas"
    extra = "vmas"
    about = "time limits truncate, agents end together; one seed for all lanes, at a reset"
    why_no_resets = (
        "all lanes draw from one generator, also in steps, so no lane has a seed of its own"
    )
    conflicts = "it brings the old gym, which changes what TorchRL refuses; install it apart"

    def __init__(self, env: Any, groups: Groups | None = None, name: str | None = None) -> None:
        if not env.terminated_truncated:
            raise EnvironmentRefused(
                "VMAS would report time limits as terminations. Make the environment with "
                "terminated_truncated=True."
            )
        self.env, self.name = env, name or type(env.scenario).__name__
        self._random = list(env.vmas_random_state)
        names = [agent.name for agent in env.agents]
        seen, acts = (
            {agent: as_gymnasium(each) for agent, each in zip(names, listed(space), strict=True)}
            for space in (env.observation_space, env.action_space)
        )
        self._groups = grouped(seen, acts, groups)
        if groups is None and [group.name for group in self._groups] == ["agent"]:
            self._groups = grouped(seen, acts, {"agents": names})
        of_groups, lanes = {group.name: group for group in self._groups}, env.num_envs
        self._agents = {n: [names.index(a) for a in g.agents] for n, g in of_groups.items()}
        self._takes = {n: [leaf.getter() for leaf in g.leaves] for n, g in of_groups.items()}
        self._alive = {n: np.ones((lanes, len(g.agents)), np.bool_) for n, g in of_groups.items()}
        more, device = declared(self._groups), str(env.device)
        self.declares = Declares(lanes=lanes, at_end="final", seeds="shared", device=device, **more)

    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Reset lanes. The first lane's seed applies to all lanes."""
        with self._own_generator():
            if lanes is None or lanes.all():
                seed = None if seeds is None else int(seeds[0])
                return self._observed(listed(self.env.reset(seed=seed)))
            for lane in np.flatnonzero(lanes).tolist():
                self.env.reset_at(lane, return_observations=False)
            (seen,) = self.env.get_from_scenario(
                get_observations=True, get_rewards=False, get_infos=False, get_dones=False
            )
            return self._observed(listed(seen))

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes."""
        given: list[Any] = [None] * len(self.env.agents)
        for group, acts in zip(self._agents.values(), action, strict=True):
            for agent, own in zip(group, torch.as_tensor(acts).unbind(1), strict=True):
                given[agent] = own
        with self._own_generator():
            seen, rewards, *ends, _ = self.env.step(given)
        seen, rewards, (over, cut) = listed(seen), listed(rewards), map(_flags, ends)
        return Step(
            self._observed(seen),
            [torch.stack([rewards[a] for a in group], 1) for group in self._agents.values()],
            over,
            cut,
            agents={
                name: AgentFlags(*(_flags(each, len(group)) for each in ends))
                for name, group in self._agents.items()
            },
        )

    def _observed(self, seen: Sequence[Any]) -> list[Array]:
        arrays: list[Array] = []
        for name, group in self._agents.items():
            stacked = ([take(seen[agent]) for agent in group] for take in self._takes[name])
            arrays += [torch.stack(each, 1) for each in stacked]
            arrays.append(self._alive[name])
        return arrays

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        """Make VMAS draw from the random states of this environment."""
        shared = self.env.vmas_random_state
        others, shared[:] = list(shared), self._random
        try:
            yield
        finally:
            self._random, shared[:] = list(shared), others

    @property
    def ticks(self) -> int | None:
        """Physics steps in a transition, from the world."""
        return ticks_of_objects([self.env.world])

    def describe(self) -> dict[str, Any]:
        """Return the scenario and the groups of agents."""
        return described(self.name, self, self._groups)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make ``vmas:SCENARIO``.

        ``kwargs``, such as ``max_steps``, are passed to ``vmas.make_env``, except for ``groups``.
        """
        vmas: Any = needs("vmas", "vmas")
        given = {"terminated_truncated": True, **kwargs}
        groups = given.pop("groups", None)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "Scenario kwargs", UserWarning)
                env = vmas.make_env(name, num_envs=lanes, **given)
        except (AssertionError, TypeError, UserWarning) as error:
            raise ArgumentError(f"vmas:{name} with {kwargs}: {error}") from error
        return cls(env, groups, name)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap a ``vmas.simulator.environment.Environment``; return None for other objects."""
        kind = getattr(sys.modules.get("vmas.simulator.environment"), "Environment", ())
        return cls(made) if isinstance(made, kind) else None


def _flags(flags: torch.Tensor, count: int | None = None) -> Array:
    """Return flags of lanes, expanded to ``count`` agents if given, as the driver expects them."""
    each = flags if count is None else flags[:, None].expand(-1, count)
    return each.numpy() if flags.device.type == "cpu" else each


def as_gymnasium(space: Any) -> spaces.Space[Any]:
    """Convert a space of the old gym package to a Gymnasium space."""
    kind, of = type(space).__name__, spaces
    if kind == "Dict":
        return of.Dict({name: as_gymnasium(each) for name, each in space.spaces.items()})
    if kind == "Discrete":
        return of.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return of.MultiDiscrete(space.nvec)
    return of.Box(space.low, space.high, space.shape, space.dtype)
