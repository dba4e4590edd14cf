"""Filling of slots in which several policies act, some of them at random for a while."""

from typing import Any

import numpy as np

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.rollout.slab_filler import Filling
from tallyroll.storage.rows.keys import RANDOM_VERSION


class FillingOfSeveral(Filling):
    """Fills slots by several policies; takes what `Filling` does."""

    policy: SeveralPolicies

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._openings = self.policy.openings

    @property
    def _random_left(self) -> int:
        """Number of random actions still to be drawn for all; 1 where some policy has openings."""
        return super()._random_left or int(self._openings.under_way)

    def _policy_slots(self, start: int, stop: int, stepped: int) -> None:
        self.slab.version[start:stop] = self.policy.row_version
        if stepped < self.lanes:
            # Without these marks a driver goes by the version of the first lane, which may be -1.
            self.driver.part(start, stepped, np.zeros(self.lanes, np.bool_))
        else:
            self.driver.policy_steps(start, stop)

    def _opening(self, start: int, steps: int, stepped: int) -> None:
        """Fill a slot with actions of both kinds."""
        upcoming = self.driver.upcoming()
        if self.gate is not None:
            upcoming = self.gate.upcoming(upcoming)
        if (left := super()._random_left) > 0:
            drawn = upcoming & (np.cumsum(upcoming) <= left)
            version = np.where(drawn, RANDOM_VERSION, self.policy.row_version)
        else:
            drawn, version = self.policy.rows_of(self._openings.drawn(upcoming))
        self.slab.version[start] = version
        if stepped < self.lanes:
            self.driver.part(start, stepped, drawn)
        else:
            self.driver.policy_steps(start, start + 1, drawn)

    def take_back_drawn(self, at: slice, marks: Mask) -> None:
        """Let others act at random in the place of transitions that were discarded."""
        if not self.policy.draws:  # else no opening is of all policies
            super().take_back_drawn(at, marks)
        self._openings.left += self._openings.counted(self.slab, at, marks)

    def count(self, start: int, stop: int, stepped: int) -> int:
        """Mark and count the transitions of slots ``[start, stop)``; return their number."""
        marked = super().count(start, stop, stepped)
        if self._openings.under_way:
            at = slice(start, stop)
            counted = self._openings.counted(self.slab, at, self.slab.transitions[at])
            self._openings.left -= counted
        return marked
