"""Agents of a lane in groups: who belongs together, and what their spaces are in columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torchrl.data import Binary, TensorSpec, Unbounded

from tallyroll.collector.envs.gymnasium.spaces import Leaf, action_leaf, observation_leaves
from tallyroll.collector.envs.system import Array
from tallyroll.collector.errors import ArgumentError, SpaceError, TransitionError
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key

Groups = Mapping[str, Sequence[str]]
Spaces = Mapping[str, spaces.Space[Any]]


@dataclass(frozen=True)
class Group:
    """Agents whose observations and actions are stacked."""

    name: str
    agents: Sequence[str]
    leaves: tuple[Leaf, ...]
    """Of the observation of one of them; dtypes and shapes are those of all ``[agent, ...]``."""
    action: Leaf

    @property
    def observation(self) -> dict[Key, TensorSpec]:
        """The columns of a lane; the mask comes last."""
        size = len(self.agents)
        specs = {(self.name, *leaf.key): _spec(leaf) for leaf in self.leaves}
        return {**specs, (self.name, "mask"): Binary(size, (size,), dtype=torch.bool)}

    @property
    def reward(self) -> TensorSpec:
        """One number an agent."""
        return Unbounded((len(self.agents), 1), dtype=torch.float32)


def grouped(observation: Spaces, action: Spaces, groups: Groups | None = None) -> list[Group]:
    """The agents, in groups.

    Args:
        observation: of each agent.
        action: of each agent.
        groups: name -> agents. By default it is an agent's name up to its number: "adversary_0" is
            of "adversary"; where spaces under such a name differ, each agent is a group.

    Raises:
        ArgumentError: ``groups`` are not of these agents, each in one, with equal spaces.
        SpaceError: a space that no column can hold.
    """
    given = by_name(observation, action) if groups is None else groups
    if not isinstance(given, Mapping):
        raise ArgumentError(f"groups: expected names and the agents of each, got {given!r}")
    listed = [agent for agents in given.values() for agent in agents]
    if sorted(listed) != sorted(observation) or not all(given.values()):
        raise ArgumentError(
            f"groups: expected each of the agents {list(observation)} in one group, got {given}"
        )
    made = []
    for name, agents in given.items():
        first, size = agents[0], len(agents)
        if not _alike(agents, observation, action):
            raise ArgumentError(f"groups: the agents {list(agents)} of {name!r} have other spaces")
        leaves = observation_leaves(observation[first], size)
        if taken := [leaf.key[0] for leaf in leaves if leaf.key[0] in ("mask", "action", "reward")]:
            raise SpaceError(
                f"{taken} in the observation of {first} is the name of another column of its "
                "group; rename it in a wrapper of the environment"
            )
        made.append(Group(name, list(agents), leaves, action_leaf(action[first], size)))
    return made


def declared(groups: Sequence[Group]) -> dict[str, Any]:
    """What a system declares of its groups."""
    return {
        "observation": {key: spec for each in groups for key, spec in each.observation.items()},
        "action": {(each.name, "action"): each.action.spec for each in groups},
        "reward": {(each.name, "reward"): each.reward for each in groups},
        "groups": {each.name: len(each.agents) for each in groups},
    }


class AgentRows:
    """Arrays of observations ``[lane, agent, ...]`` that are filled agent by agent."""

    def __init__(self, groups: Sequence[Group], lanes: int) -> None:
        self.slices: dict[str, slice] = {}
        """The agents of each group, among all of them."""
        self._of_groups: list[list[Array]] = []
        self._rows: list[dict[str, list[Any]]] = [{} for _ in range(lanes)]
        """By lane and agent: what takes a value out of an observation, and where it goes."""
        at = 0
        for group in groups:
            self.slices[group.name] = slice(at, at := at + len(group.agents))
            specs = list(group.observation.values())[:-1]
            arrays = [np.zeros((lanes, *spec.shape), NUMPY[spec.dtype]) for spec in specs]
            self._of_groups.append(arrays)
            getters = [leaf.getter() for leaf in group.leaves]
            for lane, rows in enumerate(self._rows):
                for index, agent in enumerate(group.agents):
                    own = [array[lane, index, ...] for array in arrays]
                    rows[agent] = list(zip(getters, own, strict=True))

    def with_masks(self, masks: Array) -> list[Array]:
        """The columns that are declared; ``masks`` ``[lane, agent]`` are those of all agents."""
        pairs = zip(self._of_groups, self.slices.values(), strict=True)
        return [each for arrays, part in pairs for each in (*arrays, masks[:, part])]

    def put(self, lane: int, seen: Mapping[str, Any], first_lane: int) -> None:
        """Copy what the agents of a lane saw; of those that saw nothing, zeros.

        Raises:
            TransitionError: a value that its space does not declare.
        """
        rows = self._rows[lane]
        if len(seen) < len(rows):
            for own in (own for name in rows if name not in seen for _, own in rows[name]):
                own.fill(0)
        for name, value in seen.items():
            for take, row in rows[name]:
                part = take(value)
                if type(part) is np.ndarray and part.shape == row.shape and part.dtype == row.dtype:
                    row[...] = part
                else:
                    row[...] = _fitting(part, row, f"lane {first_lane + lane}, {name}")


def _fitting(value: Any, row: Array, where: str) -> Array:
    """``value``, of the shape of ``row`` and of a dtype that loses nothing but digits."""
    found = np.asarray(value)
    fits = row.dtype == np.bool_ or np.can_cast(found.dtype, row.dtype, "same_kind")
    if found.shape != row.shape or not fits:
        raise TransitionError(
            f"{where}: the space declares {row.dtype} {list(row.shape)}, the environment returned "
            f"{found.dtype} {list(found.shape)}; correct the environment's space"
        )
    return found


def as_gymnasium(space: Any) -> spaces.Space[Any]:
    """A space of the old gym as Gymnasium's."""
    kind, of = type(space).__name__, spaces
    if kind == "Dict":
        return of.Dict({name: as_gymnasium(each) for name, each in space.spaces.items()})
    if kind == "Discrete":
        return of.Discrete(int(space.n))
    if kind == "MultiDiscrete":
        return of.MultiDiscrete(space.nvec)
    return of.Box(space.low, space.high, space.shape, space.dtype)


def by_name(observation: Spaces, action: Spaces) -> Groups:
    """Agents by their names up to the number."""
    found: dict[str, list[str]] = {}
    for agent in observation:
        kind, _, number = agent.rpartition("_")
        found.setdefault(kind if kind and number.isdigit() else agent, []).append(agent)
    groups: dict[str, list[str]] = {}
    for kind, agents in found.items():
        alike = _alike(agents, observation, action)
        groups |= {kind: agents} if alike else {agent: [agent] for agent in agents}
    return groups


def _alike(agents: Sequence[str], *of_agents: Spaces) -> bool:
    return all(each[agent] == each[agents[0]] for each in of_agents for agent in agents)


def _spec(leaf: Leaf) -> TensorSpec:
    """Masks of legal actions are bool, as distributions take them."""
    if leaf.key[-1] != MASK_NAME:
        return leaf.spec
    return Binary(leaf.shape[-1], leaf.shape, dtype=torch.bool)
