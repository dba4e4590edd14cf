"""The queue of what workers filled, from which a collector takes its blocks."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import NOTHING, LedgerEntry
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.rollout.source import Block, PendingTransitions, Sound
from tallyroll.collector.workers.leases.segment import Emptied, Segment, SegmentGiver


class SegmentQueue:
    """Gives blocks of the segments that came first, with the counts since the block before.

    Args:
        segments: those of each worker.
        lanes: of the run.
    """

    def __init__(self, segments: Sequence[Sequence[Segment]], lanes: int) -> None:
        self._segments, self._lanes = segments, lanes
        self.waiting: deque[Segment | range] = deque()
        """Segments to take, and lanes whose trajectories are others from there on."""
        self._entry = NOTHING
        """Events since the last block."""
        self.held = 0
        """Transitions that came back and wait for the next block."""

    # --- what came --------------------------------------------------------------------------------

    def came(self, segment: Segment, entry: LedgerEntry) -> None:
        """Count ``entry``, and let ``segment`` wait if there is anything in it."""
        self.count(entry)
        if not segment.free:
            self.waiting.append(segment)
            self.held += segment.left

    def count(self, entry: LedgerEntry) -> None:
        """Count events; the next block has them."""
        self._entry = self._entry.plus(entry)

    def recount(self) -> None:
        """Count again what waits, after an exception that may have come between two counts."""
        self.held = 0
        for each in self.segments:
            each.left = int(np.count_nonzero(each.transitions))
            self.held += each.left

    @property
    def segments(self) -> list[Segment]:
        """Segments that wait."""
        return [each for each in self.waiting if isinstance(each, Segment)]

    def all_held(self) -> list[PendingTransitions]:
        """Return the transitions that wait, and the lanes that are cut between them."""
        none = np.zeros(0, np.int32)
        found = []
        for each in self.waiting:
            if isinstance(each, Segment):
                ended = ended_in(each.slab, 0, each.used)
                found.append(PendingTransitions.of(each.slab, each.transitions, ended))
            else:
                found.append(PendingTransitions(none, none.astype(np.bool_), self._flags(each)))
        return found

    # --- what is given ----------------------------------------------------------------------------

    def block(self, want: int, emptied: Emptied) -> Block:
        """At most ``want`` transitions of what came first; none where nothing waits."""
        if not self.waiting:
            return self._nothing()
        first = self.waiting[0]
        if isinstance(first, range):
            return self._cut(first)
        return self._take(first, first.used, want, emptied)

    def _take(self, segment: Segment, slots: int, want: int, emptied: Emptied) -> Block:
        block = Block.of(segment.slab, segment.transitions[:slots], want)
        siblings = self._segments[segment.member]
        giver = SegmentGiver(segment, siblings, self._took, emptied)
        block.giver = block.keeper = giver
        block.entry = self.take_entry()
        return block

    def _took(self, count: int) -> None:
        self.held -= count

    def _cut(self, lanes: range) -> Block:
        self.waiting.popleft()
        block = self._nothing()
        block.cuts = self._flags(lanes)
        return block

    def _flags(self, lanes: range) -> NDArray[np.bool_]:
        """Return marks of some lanes among all of the run."""
        flags = np.zeros(self._lanes, np.bool_)
        flags[lanes.start : lanes.stop] = True
        return flags

    def _nothing(self) -> Block:
        slab = self._segments[0][0].slab
        block = Block.of(slab, np.zeros((0, slab.lanes), np.bool_), 0)
        block.entry = self.take_entry()
        return block

    def take_entry(self) -> LedgerEntry:
        """Return the counts since the last block, which no block has then."""
        entry, self._entry = self._entry, NOTHING
        return entry

    def drop(self, segment: Segment) -> None:
        """Let ``segment``, of which all was taken, wait no more."""
        if self.waiting and self.waiting[0] is segment:
            self.waiting.popleft()

    def salvage(self, sound: Sound, most: int, emptied: Emptied) -> Iterator[Block]:
        """After an error: all that waits, each worker's as far as it is ``sound``."""
        broken: set[int] = set()
        while self.waiting:
            each = self.waiting[0]
            if isinstance(each, range):
                yield self._cut(each)
                continue
            good = 0 if each.member in broken else sound(each.slab, each.used)
            if good < each.used:
                broken.add(each.member)
            self._discard(each, good)
            block = self._take(each, good, most, emptied)
            most -= len(block)
            yield block  # until it is given, it is counted as held
            self._discard(each, 0)
            self.drop(each)
        yield self._nothing()  # what was thrown away behind the last one

    # --- what is thrown away ----------------------------------------------------------------------

    def discard(self) -> NDArray[np.bool_]:
        """Throw away all that waits; returns its lanes."""
        lanes = np.zeros(self._lanes, np.bool_)
        for each in self.segments:
            first = each.slab.first_lane
            lanes[first : first + each.slab.lanes] |= each.transitions.any(axis=0)
            self._discard(each, 0)
            each.free = True
        self.waiting.clear()
        return lanes

    def discard_from(self, place: int) -> None:
        """Throw away what waits from ``place`` on, because something before it was missed."""
        while len(self.waiting) > place:
            each = self.waiting.pop()
            if isinstance(each, Segment):
                self._discard(each, 0)

    def _discard(self, segment: Segment, start: int) -> None:
        """Count the transitions from slot ``start`` on that no block took, and forget them."""
        rest = segment.transitions[start:]
        gone = int(np.count_nonzero(rest))
        self.count(LedgerEntry(discarded=gone))
        self.held -= gone
        segment.left -= gone
        rest[:] = False
