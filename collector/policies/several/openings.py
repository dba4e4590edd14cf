"""Random actions with which policies by lane begin: how many are left, and where. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask


class Openings:
    """So many transitions of the lanes of each policy have random actions: the first ones.

    Args:
        left: of each policy.
        policy_of_lane: ``[lane]``; None: no policy has lanes of its own.
    """

    def __init__(self, left: Sequence[int], policy_of_lane: NDArray[np.int64] | None) -> None:
        self.left: NDArray[np.int64] = np.array(left, np.int64)
        """``[policy]``: transitions that are still to have random actions."""
        self._asked = self.left.copy()
        of_lane = np.zeros(0, np.int64) if policy_of_lane is None else policy_of_lane
        self._mine: Mask = np.arange(len(left))[:, None] == of_lane
        """``[policy, lane]``: the lanes of each."""

    @property
    def under_way(self) -> bool:
        """True if some are left."""
        return bool(self.left.any())

    def drawn(self, upcoming: Mask) -> Mask:
        """Return the lanes that act at random in the next slot.

        ``upcoming`` are those whose slot will be a transition.
        """
        if not self.under_way:
            return np.zeros_like(upcoming)
        mine = self._mine & upcoming
        within = np.cumsum(mine, axis=1) <= self.left[:, None]
        drawn: Mask = np.logical_or.reduce(mine & within, axis=0)
        return drawn

    def count(self, drawn: Mask, by: int = -1) -> None:
        """Count ``drawn`` ``[time, lane]``, transitions with random actions that were made."""
        if not self._asked.any():
            return
        self.left += by * self._of_policies(drawn.sum(axis=0))

    def _of_policies(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add ``counts`` ``[lane]`` up for each policy that has an opening."""
        return np.where(self._asked > 0, self._mine @ counts, 0)

    def without(self, held: Mask) -> list[int]:
        """Return how many are left if the transitions of ``held`` ``[lane]`` are made again."""
        again = self._of_policies(held.astype(np.int64)) if self._asked.any() else 0
        found: list[int] = (self.left + again).tolist()
        return found

    def go_on_after(self, stored: NDArray[np.int64], acted: NDArray[np.bool_]) -> None:
        """Go on after ``stored`` transitions with random actions in each lane.

        ``acted``: lanes in which a policy acted since, so that its opening is over.
        """
        if not self._asked.any():
            return
        over = (self._mine & acted).any(axis=1)
        left = np.maximum(0, self._asked - self._of_policies(stored))
        self.left[:] = np.where(over, 0, left)
