"""A part of a worker's slab, filled for one lease after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.several.openings import Counts
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.slab import Slab


@dataclass(eq=False)
class Segment:
    """A part of a worker's slab. ``slab.transitions`` marks those that no block took yet."""

    member: int
    base: int
    slab: Slab
    used: int = 0
    left: int = 0
    """The number of ``transitions``."""
    free: bool = True
    lease: int = 0
    """The number of the last lease that it was for."""
    reserved: int = 0
    """Transitions of the budget that are kept for it, those of its last step included."""
    random_frames: Counts = field(default_factory=lambda: np.zeros(1, np.int64))
    """``[policy]``: transitions of its last lease that have random actions."""
    kept: bool = False
    """Its rows are needed where they are; it is free after that."""

    @property
    def transitions(self) -> Mask:
        """``[used, lane]``."""
        return self.slab.transitions[: self.used]


Taken = Callable[[int], None]
"""Hears how many transitions of a segment were taken."""
Emptied = Callable[[Segment, bool], None]
"""Hears that all of a segment was taken, and whether its rows are kept where they are."""


@dataclass(frozen=True)
class SegmentGiver:
    """Hears what becomes of a block of a segment.

    A segment itself knows no leases: a collector that is dropped goes at once, with its workers.
    """

    segment: Segment
    all_of_worker: Sequence[Segment]
    """Segments of the same worker, this one included."""
    taken: Taken
    emptied: Emptied

    def keeps(self) -> bool:
        """Return whether the segment can wait: its worker has another one."""
        return sum(not each.kept for each in self.all_of_worker) > 1

    def given(self, block: Block) -> None:
        """The rows of ``block`` are the caller's; the segment is free once empty."""
        segment, before = self.segment, self.segment.left
        segment.slab.transitions[: block.used] &= ~block.taken
        # Counted, for a block that lost a row must not keep its segment for ever.
        segment.left = int(np.count_nonzero(segment.transitions))
        self.taken(before - segment.left)
        if not segment.left:
            self.emptied(segment, block.kept)

    def released(self) -> None:
        """Let the segment be filled again."""
        if self.segment.kept:
            self.emptied(self.segment, False)
