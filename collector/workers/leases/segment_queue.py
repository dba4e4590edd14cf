"""Queue of filled segments, from which a collector takes its blocks."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import NOTHING, LedgerEntry
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.rollout.source import Block, UndeliveredTransitions, ValidSlots
from tallyroll.collector.workers.leases.segment import Emptied, Segment, SegmentOwner


class SegmentQueue:
    """Returns blocks of the oldest segments, with the counts since the previous block.

    Args:
        segments: the segments of each worker.
        lanes: number of lanes of the run.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], lanes: int) -> None:
        self._segments, self._lanes = segments, lanes
        self.waiting: deque[Segment | range] = deque()
        """Segments to take, and ranges of lanes whose trajectories are cut at that place."""
        self._entry = NOTHING
        """Events since the last block."""
        self.carried = 0
        """Number of returned transitions that wait for the next block."""

    # --- arrivals ---------------------------------------------------------------------------------

    def add(self, segment: Segment, entry: LedgerEntry) -> None:
        """Count ``entry``, and append ``segment`` unless it is empty."""
        self.count(entry)
        if not segment.free:
            self.waiting.append(segment)
            self.carried += segment.left

    def count(self, entry: LedgerEntry) -> None:
        """Count events; the next block reports them."""
        self._entry = self._entry.plus(entry)

    def recount(self) -> None:
        """Recompute the number of waiting transitions, which an exception may have left stale."""
        self.carried = 0
        for each in self.segments:
            each.recount()
            self.carried += each.left

    @property
    def segments(self) -> list[Segment]:
        """Segments that wait."""
        return [each for each in self.waiting if isinstance(each, Segment)]

    def pending_transitions(self) -> list[UndeliveredTransitions]:
        """Return the transitions that wait, and the lanes that are cut between them."""
        none = np.zeros(0, np.int32)
        found = []
        for each in self.waiting:
            if isinstance(each, Segment):
                ended = ended_in(each.slab, 0, each.used)
                found.append(UndeliveredTransitions.of(each.slab, each.transitions, ended))
            else:
                found.append(UndeliveredTransitions(none, none.astype(np.bool_), self._flags(each)))
        return found

    # --- blocks -----------------------------------------------------------------------------------

    def block(self, want: int, emptied: Emptied) -> Block:
        """Return at most ``want`` transitions of the oldest entry; none if the queue is empty."""
        if not self.waiting:
            return self._nothing()
        first = self.waiting[0]
        if isinstance(first, range):
            return self._cut(first)
        return self._take(first, first.used, want, emptied)

    def _take(self, segment: Segment, slots: int, want: int, emptied: Emptied) -> Block:
        siblings = self._segments[segment.member]
        owner = SegmentOwner(segment, siblings, self._took, emptied)
        marks = segment.transitions[:slots]
        block = Block.of(segment.slab, marks, want, owner=owner, keeper=owner)
        return block.report(self.take_entry())

    def _took(self, count: int) -> None:
        self.carried -= count

    def _cut(self, lanes: range) -> Block:
        self.waiting.popleft()
        return self._nothing(self._flags(lanes))

    def _flags(self, lanes: range) -> NDArray[np.bool_]:
        """Return ``lanes`` as flags over all lanes of the run."""
        flags = np.zeros(self._lanes, np.bool_)
        flags[lanes.start : lanes.stop] = True
        return flags

    def _nothing(self, cuts: NDArray[np.bool_] | None = None) -> Block:
        slab = self._segments[0][0].slab
        block = Block.of(slab, np.zeros((0, slab.lanes), np.bool_), 0)
        return block.report(self.take_entry(), cuts)

    def take_entry(self) -> LedgerEntry:
        """Return the counts since the last block, and reset them."""
        entry, self._entry = self._entry, NOTHING
        return entry

    def drop(self, segment: Segment) -> None:
        """Remove ``segment``, which is empty, from the queue."""
        if self.waiting and self.waiting[0] is segment:
            self.waiting.popleft()

    def recover(self, valid_slots: ValidSlots, most: int, emptied: Emptied) -> Iterator[Block]:
        """Yield the waiting segments after an error, up to each worker's first invalid slot."""
        broken: set[int] = set()
        while self.waiting:
            each = self.waiting[0]
            if isinstance(each, range):
                yield self._cut(each)
                continue
            good = 0 if each.member in broken else valid_slots(each.slab, each.used)
            if good < each.used:
                broken.add(each.member)
            self._discard(each, good)
            block = self._take(each, good, most, emptied)
            most -= len(block)
            yield block  # counted as carried until it is delivered
            self._discard(each, 0)
            self.drop(each)
        yield self._nothing()  # counts of transitions discarded after the last block

    # --- discarding -------------------------------------------------------------------------------

    def discard(self) -> NDArray[np.bool_]:
        """Discard all waiting transitions, and return flags of the lanes that they came from."""
        lanes = np.zeros(self._lanes, np.bool_)
        for each in self.segments:
            first = each.slab.first_lane
            lanes[first : first + each.slab.lanes] |= each.transitions.any(axis=0)
            self._discard(each, 0)
            each.release()
        self.waiting.clear()
        return lanes

    def discard_from(self, place: int) -> None:
        """Discard all entries from ``place`` on, because an answer before them was missed."""
        while len(self.waiting) > place:
            each = self.waiting.pop()
            if isinstance(each, Segment):
                self._discard(each, 0)

    def _discard(self, segment: Segment, start: int) -> None:
        """Discard the transitions from slot ``start`` on that no block took, and count them."""
        gone = int(np.count_nonzero(segment.transitions[start:]))
        self.count(LedgerEntry(discarded=gone))
        self.carried -= gone
        segment.drop(start, gone)
