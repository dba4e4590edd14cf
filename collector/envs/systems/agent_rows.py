"""What agents see, agent by agent, in columns of their groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.system import Array
from tallyroll.collector.envs.systems.agents import Group
from tallyroll.collector.errors import TransitionError
from tallyroll.storage.rows.dtypes import NUMPY


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
            TransitionError: a value that its space does not declare, or of an unknown agent.
        """
        rows = self._rows[lane]
        if not seen.keys() <= rows.keys():
            raise TransitionError(
                f"lane {first_lane + lane}: expected observations of the agents {[*rows]}, got "
                f"others of {sorted(seen.keys() - rows.keys())}; name all agents there may be in "
                "possible_agents"
            )
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
