"""Write observations, agent by agent, into the columns of agent groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.exact import ExactRow
from tallyroll.collector.envs.system import Array
from tallyroll.collector.errors import TransitionError, ValueRefused
from tallyroll.collector.ext.systems.kinds.agents import Group
from tallyroll.storage.rows.dtypes import NUMPY


class AgentRows:
    """Arrays of observations ``[lane, agent, ...]`` that are filled agent by agent."""

    def __init__(self, groups: Sequence[Group], lanes: int) -> None:
        self.slices: dict[str, slice] = {}
        """The agents of each group, as a slice of all agents."""
        self._of_groups: list[list[Array]] = []
        self._rows: list[dict[str, list[Any]]] = [{} for _ in range(lanes)]
        """The getter, target array and cast of each value, by lane and agent."""
        at = 0
        for group in groups:
            self.slices[group.name] = slice(at, at := at + len(group.agents))
            specs = list(group.observation.values())[:-1]
            arrays = [np.zeros((lanes, *spec.shape), NUMPY[spec.dtype]) for spec in specs]
            self._of_groups.append(arrays)
            getters = [leaf.getter() for leaf in group.leaves]
            exact = [
                ExactRow((group.name, *leaf.key), array.shape[2:], array.dtype, any_bools=True)
                for leaf, array in zip(group.leaves, arrays, strict=True)
            ]
            for lane, rows in enumerate(self._rows):
                for index, agent in enumerate(group.agents):
                    own = [array[lane, index, ...] for array in arrays]
                    rows[agent] = list(zip(getters, own, exact, strict=True))

    def with_masks(self, masks: Array) -> list[Array]:
        """Return the declared columns; ``masks`` ``[lane, agent]`` are the masks of all agents."""
        pairs = zip(self._of_groups, self.slices.values(), strict=True)
        return [each for arrays, part in pairs for each in (*arrays, masks[:, part])]

    def put(self, lane: int, seen: Mapping[str, Any], first_lane: int) -> None:
        """Copy the observations of a lane's agents; write zeros for agents without an observation.

        Raises:
            TransitionError: an agent with an observation has no columns, or an observation lacks a
                part.
            ValueRefused: a value does not fit its space.
        """
        rows = self._rows[lane]
        if not seen.keys() <= rows.keys():
            raise TransitionError(
                f"lane {first_lane + lane}: expected observations of the agents {[*rows]}, got "
                f"also {sorted(seen.keys() - rows.keys())}. List every agent that can appear in "
                "possible_agents."
            )
        if len(seen) < len(rows):
            for own in (own for name in rows if name not in seen for _, own, _ in rows[name]):
                own.fill(0)
        for name, value in seen.items():
            for take, row, exact in rows[name]:
                try:
                    part = take(value)
                except (KeyError, IndexError, TypeError) as error:
                    refused = exact.refused(
                        f"no such value in {value!r:.80} of {name}", first=False
                    )
                    refused.lane = first_lane + lane
                    raise refused from error
                if exact.is_right(part):
                    row[...] = part
                elif not exact.puts_bits(part, row):
                    row[...] = self._fitted(exact, part, name, first_lane + lane)

    @staticmethod
    def _fitted(exact: ExactRow, part: Any, agent: str, lane: int) -> Array:
        try:
            return exact.array(part)
        except ValueRefused as error:
            error.lane, error.got = lane, f"{error.got} of {agent}"
            raise
