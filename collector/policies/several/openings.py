"""Random actions with which policies begin: how many are left, and where. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import POLICY_VERSION, RANDOM_VERSION, Key

Counts = NDArray[np.int64]
"""``[policy]``: of transitions."""
MOST = 2**62
"""More transitions than any run has."""


class Openings:
    """So many transitions of the lanes of each policy have random actions: the first ones.

    Args:
        asked: of each policy.
        acts_in: ``[policy, lane]``: the lanes of each; with groups all are of each.
        versions: the column of each that has -1 where its action is random.
        first_lane: the number of the first lane in the run.
    """

    def __init__(
        self, asked: Sequence[int], acts_in: Mask, versions: Sequence[Key], first_lane: int = 0
    ) -> None:
        self.asked: Counts = np.array([min(each, MOST) for each in asked], np.int64)
        """``[policy]``: transitions of a run that have random actions at its start."""
        self.left = self.asked.copy()
        """``[policy]``: transitions that are still to have random actions."""
        self.acts_in, self.versions, self.first_lane = acts_in, versions, first_lane
        self.whole_run = False
        """True if all lanes of a run begin at random, and not those of some policies."""

    @classmethod
    def of_run(cls, asked: int, lanes: int) -> "Openings":
        """Return those of a run in which all lanes begin at random, with one policy or several."""
        made = cls([asked], np.ones((1, lanes), np.bool_), [POLICY_VERSION])
        made.whole_run = True
        return made

    def of_lanes(self, own: range) -> "Openings":
        """Return the part of ``own`` lanes, in a run every slot of which is a transition.

        So in slot order the first ones of a policy are spread over its lanes.
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
        """True if some are left."""
        return bool(self.left.any())

    def drawn(self, upcoming: Mask) -> Mask:
        """Return ``[policy, lane]``, where each acts at random in the next slot.

        ``upcoming`` are the lanes whose slot will be a transition.
        """
        mine = self.acts_in & upcoming
        drawn: Mask = mine & (np.cumsum(mine, axis=1) <= self.left[:, None])
        return drawn

    def counted(self, slab: Slab, at: slice, marks: Mask) -> Counts:
        """Count the transitions with which each policy begins, of ``marks`` of slots ``at``.

        ``marks`` are ``[time, lane]``, like the columns of ``slab``, which tell.
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
        """Go on after ``stored`` ``[policy]`` transitions with random actions."""
        self.left[:] = np.maximum(0, self.asked - stored)
