"""A rollout that stands still between two blocks, and what it has executed by then."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.rollout.driver import Driver
from tallyroll.collector.rollout.few_slots import HeldRows
from tallyroll.collector.rollout.source import Held
from tallyroll.collector.slab.slab import Slab


class Standing:
    """A part of `Rollout`, which steps only while a block is asked for."""

    driver: Driver
    slab: Slab
    _held: HeldRows
    _given: bool

    def drawn_ahead(self, openings: Openings) -> Counts:
        """Return how many random actions are in no block; see `TransitionSource.drawn_ahead`."""
        at = slice(self.driver.used - 1, self.driver.used)
        held = self._held.lanes
        if held is None:
            return np.zeros_like(openings.left)
        return openings.counted(self.slab, at, held[None])

    @contextmanager
    def still(self) -> Iterator[Sequence[Held]]:
        """Return a context without steps; see `TransitionSource.still`."""
        used, held = self.driver.used, self._held.lanes
        first = used - 1 if self._given else 0
        marks = self.slab.transitions[first:used]
        if self._given:  # all but the surplus of the last slot
            marks = marks[:0] if held is None else held[None]
        if not marks.any():
            yield ()
            return
        yield (Held.of(self.slab, marks, self.driver.ended(first, used)),)
