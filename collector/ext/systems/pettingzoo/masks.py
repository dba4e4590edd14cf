"""Masks of legal actions in the infos of agents."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.info_entries import as_array, joined
from tallyroll.collector.envs.gymnasium.info_masks import are_bits, marks_of
from tallyroll.collector.errors import TransitionError
from tallyroll.collector.ext.systems.kinds.agents import Group
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.storage.rows.keys import Key

Infos = Mapping[str, Any]
"""The infos of a lane, by agent."""


class AgentMasks:
    """The masks of the agents that act next, by group.

    A group has masks if the first infos of some agent have one, and its observations have none. An
    agent without one may choose any action.

    Args:
        groups: the agents.
        first: the infos of the first reset, by lane.
    """

    def __init__(self, groups: Sequence[Group], first: Sequence[Infos]) -> None:
        self.legal: dict[Key, NDArray[np.bool_]] = {}
        """Masks ``[lane, agent, ...]`` by action, as `System.legal`."""
        self._groups: list[tuple[Group, NDArray[np.bool_], tuple[int, ...], bool]] = []
        for group in groups:
            if any(leaf.key == (MASK_NAME,) for leaf in group.leaves):
                continue
            masks = [_mask_in(infos, agent) for infos in first for agent in group.agents]
            found = next((each for each in masks if each is not None), None)
            if found is None:
                continue
            bits = are_bits(group.action, found.shape)
            shape = (2 * found.size,) if bits else found.shape
            marks = np.ones((len(first), len(group.agents), *shape), np.bool_)
            self.legal[group.name, "action"] = marks
            self._groups.append((group, marks, found.shape, bits))

    def put(self, lane: int, infos: Infos, acting: Sequence[str], first_lane: int) -> None:
        """Take the masks of the agents of a ``lane`` that act next.

        Raises:
            TransitionError: a mask of another shape than the first one, or of other numbers.
        """
        for group, marks, shape, bits in self._groups:
            marks[lane] = True
            for index, agent in enumerate(group.agents):
                found = _mask_in(infos, agent) if agent in acting else None
                if found is None:
                    continue
                place = f"of {agent} in lane {first_lane + lane}"
                if found.shape != shape:
                    raise TransitionError(
                        f"info key {MASK_NAME!r}: expected the shape {list(shape)} of the first "
                        f"one, got {list(found.shape)} {place}; return one shape"
                    )
                marks[lane, index] = marks_of(found[None], bits, [place].__getitem__)[0]


def _mask_in(infos: Infos, agent: str) -> NDArray[Any] | None:
    info = infos.get(agent)
    value = info.get(MASK_NAME) if isinstance(info, Mapping) else None
    found = None if value is None else as_array(joined((MASK_NAME,), value))
    if value is not None and (found is None or found.dtype.kind not in "biuf"):
        raise TransitionError(
            f"info key {MASK_NAME!r}: expected an array of numbers, got {value!r:.80} of {agent}; "
            "correct the mask"
        )
    return found
