"""Openings: the random actions with which policies begin, and their remaining numbers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import POLICY_VERSION, RANDOM_VERSION, Key

Counts = NDArray[np.int64]
"""``[policy]``: numbers of transitions."""
MOST = 2**62
"""More transitions than any run has."""


class Openings:
    """The first transitions of each policy's lanes, which have random actions.

    Args:
        asked: number of such transitions of each policy.
        acts_in: ``[policy, lane]``: the lanes of each; with groups, each has all lanes.
        versions: the column of each that is -1 where its action is random.
        first_lane: number of the first lane in the run.
    """

    def __init__(
        self, asked: Sequence[int], acts_in: Mask, versions: Sequence[Key], first_lane: int = 0
    ) -> None:
        self.asked: Counts = np.array([min(each, MOST) for each in asked], np.int64)
        """``[policy]``: transitions at the start of a run that have random actions."""
        self.left = self.asked.copy()
        """``[policy]``: transitions with random actions that are left."""
        self.acts_in, self.versions, self.first_lane = acts_in, versions, first_lane
        self.whole_run = False
        """True if all lanes of a run begin at random, False if those of some policies do."""

    @classmethod
    def of_run(cls, asked: int, lanes: int) -> "Openings":
        """Return the opening of a run in which all lanes begin at random."""
        made = cls([asked], np.ones((1, lanes), np.bool_), [POLICY_VERSION])
        made.whole_run = True
        return made

    def of_lanes(self, own: range) -> "Openings":
        """Return the part of the openings for the lanes ``own``.

        Every slot of the run must be a transition. In slot order the first transitions of a policy
        are then spread over its lanes.
        """
        asked = []
        for count, acts in zip(self.asked.tolist(), self.acts_in, strict=True):
            lanes = np.flatnonzero(acts)
            each, more = divmod(count, max(1, len(lanes)))
            mine = (lanes >= own.start) & (lanes < own.stop)
            asked.append(each * int(mine.sum()) + int(mine[:more].sum()))
        acts_in = self.acts_in[:, own.start : own.stop]
        return type(self)(asked, acts_in, self.versions, own.start)

    @property
    def under_way(self) -> bool:
        """True if some random actions are left."""
        return bool(self.left.any())

    def drawn(self, upcoming: Mask) -> Mask:
        """Return ``[policy, lane]``: where each acts at random in the next slot.

        ``upcoming`` marks the lanes whose next slot will be a transition.
        """
        mine = self.acts_in & upcoming
        drawn: Mask = mine & (np.cumsum(mine, axis=1) <= self.left[:, None])
        return drawn

    def counted(self, slab: Slab, at: slice, marks: Mask) -> Counts:
        """Count the opening transitions of each policy among ``marks`` of the slots ``at``.

        ``marks`` are ``[time, lane]``, like the version columns of ``slab``.
        """
        first = slab.first_lane - self.first_lane
        found = np.zeros_like(self.asked)
        for policy in np.flatnonzero(self.asked).tolist():
            key = self.versions[policy]
            own = key != POLICY_VERSION
            version = slab.columns[key][at].cpu().numpy() if own else slab.version[at]
            mine = self.acts_in[policy, first : first + slab.lanes]
            found[policy] = np.count_nonzero(marks & mine & (version == RANDOM_VERSION))
        return found

    def go_on_after(self, stored: Counts) -> None:
        """Continue after ``stored`` ``[policy]`` transitions with random actions."""
        self.left[:] = np.maximum(0, self.asked - stored)
