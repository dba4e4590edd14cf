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
    """Transitions of the budget that are reserved for the segment, with the last step's surplus."""
    random_frames: Counts = field(default_factory=lambda: np.zeros(1, np.int64))
    """``[policy]``: transitions of its last lease that have random actions."""
    kept: bool = False
    """True while rows of the segment are needed in place. The segment is free after that."""

    @property
    def transitions(self) -> Mask:
        """The transitions that no block took yet, ``[used, lane]``."""
        return self.slab.transitions[: self.used]

    def lend(self, lease: int, reserved: int, random_frames: Counts) -> None:
        """Lend the segment for the lease of number ``lease``."""
        self.free, self.lease = False, lease
        self.reserved, self.random_frames = reserved, random_frames

    def fill(self, used: int) -> None:
        """Take the segment back with ``used`` filled slots. If none is a transition, it is free."""
        self.used = used
        self.recount()
        self.free = not self.left

    def recount(self) -> None:
        """Count the transitions that no block took."""
        self.left = int(np.count_nonzero(self.transitions))

    def take(self, taken: Mask) -> int:
        """Remove ``taken`` ``[slot, lane]`` from the transitions; return the number removed."""
        self.slab.transitions[: len(taken)] &= ~taken
        # Counted, because a block that lost a row must not keep its segment for ever.
        before = self.left
        self.recount()
        return before - self.left

    def drop(self, start: int, count: int) -> None:
        """Remove the ``count`` transitions from slot ``start`` on."""
        self.left -= count
        self.transitions[start:] = False

    def release(self, kept: bool = False) -> None:
        """Free the segment, unless its rows are ``kept`` in place."""
        self.kept, self.free = kept, not kept


Taken = Callable[[int], None]
"""Callback with the number of transitions that were taken from a segment."""
Emptied = Callable[[Segment, bool], None]
"""Callback with an empty segment, and a flag: True if the segment's rows are kept in place."""


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

    def hand_over(self, block: Block) -> None:
        """Mark the rows of ``block`` as delivered; the segment is free once it is empty."""
        self.taken(self.segment.take(block.taken))
        if not self.segment.left:
            self.emptied(self.segment, block.kept)

    def released(self) -> None:
        """Release the segment, if it is kept, so that it can be filled again."""
        if self.segment.kept:
            self.emptied(self.segment, False)
