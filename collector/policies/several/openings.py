"""Openings: the random actions at the start of a run, counted down separately for each policy.

`SlabFiller.count` counts the random actions of a run with one policy (``init_random_frames``), and
uses `Openings` if there are several policies. With ``mode="async"``, `LeaseBudget` divides them
among workers. The fast path for few slots starts after them (`Rollout.make_ready`).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import POLICY_VERSION, RANDOM_VERSION, Key

Counts = NDArray[np.int64]
"""Numbers of transitions ``[policy]``."""
MOST = 2**62
"""A number of transitions that no run reaches."""


class Openings:
    """The first transitions of each policy's lanes, which have random actions.

    Args:
        asked: number of opening transitions of each policy.
        acts_in: marks ``[policy, lane]`` of the lanes of each policy; the policy of a group has all
            lanes.
        versions: the key of each policy's version column, which is -1 in rows with a random action.
        first_lane: number of the first lane in the run.
        whole_run: True if one opening covers all lanes of a run, False if each policy has its own.
    """

    def __init__(
        self,
        asked: Sequence[int],
        acts_in: Mask,
        versions: Sequence[Key],
        first_lane: int = 0,
        *,
        whole_run: bool = False,
    ) -> None:
        self.asked: Counts = np.array([min(each, MOST) for each in asked], np.int64)
        """Number of random actions of each policy at the start of a run ``[policy]``."""
        self.left = self.asked.copy()
        """Number of random actions of each policy that are left ``[policy]``."""
        self.acts_in, self.versions, self.first_lane = acts_in, versions, first_lane
        self.whole_run = whole_run

    @classmethod
    def of_run(cls, asked: int, lanes: int) -> "Openings":
        """Return the opening of a run in which all lanes begin at random."""
        return cls([asked], np.ones((1, lanes), np.bool_), [POLICY_VERSION], whole_run=True)

    def of_lanes(self, own: range) -> "Openings":
        """Return the part of the openings for the lanes ``own``.

        Every slot of the run must be a transition. Then the first transitions of a policy, in slot
        order, are spread evenly over its lanes.
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

    def begin(self, count: int) -> None:
        """Begin an opening of the whole run with ``count`` random actions."""
        self.asked[:] = self.left[:] = min(count, MOST)

    def draw(self, counts: Counts) -> None:
        """Subtract ``counts`` ``[policy]`` random actions, which were or will be drawn."""
        self.left -= counts

    def give_back(self, counts: Counts) -> None:
        """Add back ``counts`` ``[policy]`` random actions, which will be drawn again."""
        self.left += counts

    def continue_with(self, left: Sequence[int] | Counts) -> None:
        """Continue with ``left`` ``[policy]`` remaining random actions."""
        self.left[:] = left

    def drawn(self, upcoming: Mask) -> Mask:
        """Return marks ``[policy, lane]``, True if a policy acts at random in its lane's next slot.

        ``upcoming`` marks the lanes whose next slot will be a transition.
        """
        mine = self.acts_in & upcoming
        drawn: Mask = mine & (np.cumsum(mine, axis=1) <= self.left[:, None])
        return drawn

    def counted(self, slab: Slab, at: slice, marks: Mask) -> Counts:
        """Count the opening transitions of each policy among those marked in the slots ``at``.

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

    def continue_after(self, stored: Counts) -> None:
        """Continue after ``stored`` ``[policy]`` transitions with random actions."""
        self.left[:] = np.maximum(0, self.asked - stored)
