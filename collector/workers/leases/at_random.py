"""The random actions with which a run begins, of workers that never wait for one another."""

import numpy as np

from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.workers.leases.budget import LeaseBudget
from tallyroll.collector.workers.leases.segment_queue import SegmentQueue


class LeasedAtRandom:
    """A part of `Leases`, which says how many random actions are not in blocks."""

    _budget: LeaseBudget
    _queue: SegmentQueue

    @property
    def random_frames(self) -> int:
        """Transitions with random actions that are not leased yet."""
        return self._budget.random_frames

    @random_frames.setter
    def random_frames(self, count: int) -> None:
        self._budget.random_frames = count

    def drawn_ahead(self, openings: Openings) -> Counts:
        """Return how many random actions are leased, or came back and are in no block."""
        if not openings.asked.any():
            return openings.left
        waiting = [self._budget.waiting_of(segment) for segment in self._queue.segments]
        found: Counts = np.sum([self._budget.drawing, *waiting], axis=0)
        return found
