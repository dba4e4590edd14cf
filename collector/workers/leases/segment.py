"""A segment of a worker's slab, which is filled for one lease after another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.policies.several.openings import Counts
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.slab.slab import Slab


@dataclass(eq=False)
class Segment:
    """A part of a worker's slab. ``slab.transitions`` marks transitions that no block took yet."""

    member: int
    base: int
    slab: Slab
    used: int = 0
    left: int = 0
    """Number of ``transitions``."""
    free: bool = True
    lease: int = 0
    """Number of its last lease."""
    reserved: int = 0
    """Transitions of the budget that are reserved for it, the surplus of its last step included."""
    random_frames: Counts = field(default_factory=lambda: np.zeros(1, np.int64))
    """``[policy]``: transitions of its last lease that have random actions."""
    kept: bool = False
    """True while its rows are needed in place; it is free after that."""

    @property
    def transitions(self) -> Mask:
        """The transitions that no block took yet, ``[used, lane]``."""
        return self.slab.transitions[: self.used]


Taken = Callable[[int], None]
"""Callback with the number of transitions that were taken from a segment."""
Emptied = Callable[[Segment, bool], None]
"""Callback for a segment that is empty, and whether its rows are kept in place."""


@dataclass(frozen=True)
class SegmentOwner:
    """Owner of the rows of a block, notified when the block is delivered or released.

    A segment itself has no reference to leases. A collector without references is therefore freed
    at once, with its workers.
    """

    segment: Segment
    all_of_worker: Sequence[Segment]
    """Segments of the same worker, this one included."""
    taken: Taken
    emptied: Emptied

    def keeps(self) -> bool:
        """Return True if the segment can be kept, because its worker has another one."""
        return sum(not each.kept for each in self.all_of_worker) > 1

    def given(self, block: Block) -> None:
        """Mark the rows of ``block`` as delivered; the segment is free once it is empty."""
        segment, before = self.segment, self.segment.left
        segment.slab.transitions[: block.used] &= ~block.taken
        # Counted, because a block that lost a row must not keep its segment for ever.
        segment.left = int(np.count_nonzero(segment.transitions))
        self.taken(before - segment.left)
        if not segment.left:
            self.emptied(segment, block.kept)

    def released(self) -> None:
        """Release the segment, if it is kept, so that it can be filled again."""
        if self.segment.kept:
            self.emptied(self.segment, False)
