"""Groups of agents with equal spaces, and the columns of these spaces."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium import spaces
from torchrl.data import Binary, TensorSpec, Unbounded

from tallyroll.collector.envs.gymnasium.spaces import Leaf, action_leaf, observation_leaves
from tallyroll.collector.errors import ArgumentError, SpaceError
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.storage.rows.keys import Key

Groups = Mapping[str, Sequence[str]]
Spaces = Mapping[str, spaces.Space[Any]]


@dataclass(frozen=True)
class Group:
    """Agents whose observations and actions are stacked."""

    name: str
    agents: Sequence[str]
    leaves: tuple[Leaf, ...]
    """Leaves of an agent's observation.

    Dtypes and shapes describe the whole group, ``[agent, ...]``.
    """
    action: Leaf

    @property
    def observation(self) -> dict[Key, TensorSpec]:
        """Specs of the columns of a lane; the mask comes last."""
        size = len(self.agents)
        specs = {(self.name, *leaf.key): _spec(leaf) for leaf in self.leaves}
        return {**specs, (self.name, "mask"): Binary(size, (size,), dtype=torch.bool)}

    @property
    def reward(self) -> TensorSpec:
        """Spec of the group's reward: one number per agent."""
        return Unbounded((len(self.agents), 1), dtype=torch.float32)


def grouped(observation: Spaces, action: Spaces, groups: Groups | None = None) -> list[Group]:
    """Return the agents in groups.

    Args:
        observation: observation space of each agent.
        action: action space of each agent.
        groups: agents by group name. By default the group is the agent's name without its number:
            "adversary_0" belongs to "adversary". If agents with such a name have different spaces,
            each of them is its own group.

    Raises:
        ArgumentError: ``groups`` do not contain each agent exactly once, or combine different
            spaces.
        SpaceError: no column can hold a space.
    """
    given = by_name(observation, action) if groups is None else groups
    if not isinstance(given, Mapping):
        raise ArgumentError(
            f"groups: expected a mapping from group names to lists of agents, got {given!r}"
        )
    listed = [agent for agents in given.values() for agent in agents]
    if sorted(listed) != sorted(observation) or not all(given.values()):
        raise ArgumentError(
            f"groups: expected each of the agents {list(observation)} in one group, got {given}"
        )
    made = []
    for name, agents in given.items():
        first, size = agents[0], len(agents)
        if not _alike(agents, observation, action):
            raise ArgumentError(
                f"groups: expected equal spaces of all agents in a group, got different spaces of "
                f"{list(agents)} in {name!r}"
            )
        leaves = observation_leaves(observation[first], size)
        if taken := [leaf.key[0] for leaf in leaves if leaf.key[0] in ("mask", "action", "reward")]:
            raise SpaceError(
                f"observation of {first}: expected names other than mask, action and reward, got "
                f"{taken}. Rename the parts in a wrapper of the environment."
            )
        made.append(Group(name, list(agents), leaves, action_leaf(action[first], size)))
    return made


def declared(groups: Sequence[Group]) -> dict[str, Any]:
    """Return the fields of `Declares` for a system's groups."""
    return {
        "observation": {key: spec for each in groups for key, spec in each.observation.items()},
        "action": {(each.name, "action"): each.action.spec for each in groups},
        "reward": {(each.name, "reward"): each.reward for each in groups},
        "groups": {each.name: len(each.agents) for each in groups},
    }


def described(name: str | None, system: object, groups: Sequence[Group]) -> dict[str, Any]:
    """Return the provenance of a system with groups."""
    agents = {each.name: list(each.agents) for each in groups}
    return {"id": name, "type": type(system).__name__, "groups": agents}


def listed(values: Any) -> Sequence[Any]:
    """Return one value per agent as a list; a dict of agents keeps its order."""
    return list(values.values()) if isinstance(values, Mapping) else list(values)


def by_name(observation: Spaces, action: Spaces) -> Groups:
    """Group agents by their names without the number."""
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
    """Return the spec of ``leaf``; masks of legal actions are bool, as distributions expect."""
    if leaf.key[-1] != MASK_NAME:
        return leaf.spec
    return Binary(leaf.shape[-1], leaf.shape, dtype=torch.bool)
