"""Transitions as they come from workers that never wait for one another (``mode="async"``)."""

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import NOTHING, Budget, Ledger, LedgerEntry
from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import LedgerError
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.rollout.os_signals import pausable, waits
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.rollout.source import Block, Discarded, Sound
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import COUNTED, FILLED, LEASE, counted_in
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import Event, WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.start_and_replace import WorkerStartup
from tallyroll.collector.workers.transport import Place
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


class _Woken(BaseException):
    """A signal's handler waits; raised and caught around the wait for workers alone."""


def _wake() -> None:
    raise _Woken


@dataclass(eq=False)
class Segment:
    """A part of a worker's slab. ``slab.transitions`` marks those that no block took yet."""

    member: int
    base: int
    slab: Slab
    used: int = 0
    free: bool = True
    lease: int = 0
    """The number of the last lease that it was for."""
    reserved: int = 0
    """Transitions of the budget that are kept for it, those of its last step included."""
    random_frames: int = 0
    kept: bool = False
    """Its rows are needed where they are; it is free after that."""

    @property
    def transitions(self) -> Mask:
        """``[used, lane]``."""
        return self.slab.transitions[: self.used]


@dataclass(frozen=True)
class SegmentGiver:
    """Hears what becomes of a block of a segment.

    A segment itself knows no leases: a collector that is dropped goes at once, with its workers.
    """

    leases: "Leases"
    segment: Segment

    def keeps(self) -> bool:
        """Return whether the segment can wait: its worker has another one."""
        return self.leases.spare(self.segment)

    def given(self, block: Block) -> None:
        """The rows of ``block`` are the caller's; the segment is free once empty."""
        segment = self.segment
        segment.slab.transitions[: block.used] &= ~block.taken
        if not segment.transitions.any():
            self.leases.emptied(segment, block.kept)

    def released(self) -> None:
        """Let the segment be filled again."""
        if self.segment.kept:
            self.leases.emptied(self.segment, False)


@dataclass
class Tally:
    """A worker's part of the budget."""

    fresh: bool = False
    """Its lanes are to be reset with the next lease."""
    leased: deque[Segment] = field(default_factory=deque)
    """Segments whose leases have not come back, in the order in which it fills them."""
    tickets: int = 0
    """Episodes that it may still complete."""
    pending: NDArray[np.bool_] | None = None
    """Lanes that ended in the last slot of its last lease."""


class Leases:
    """Hands parts of the budget to workers, and queues what comes back.

    A lease is for transitions, and comes back with at least as many (a worker steps all its
    lanes); with a budget of episodes it grants tickets to start them, so that those which started
    first are those that count, however long they last.

    Args:
        pool: the workers.
        startup: replaces one that failed.
        place: where their segments lie.
        share: who has which lanes.
        plan: what a slab looks like.
        frames: transitions a lease.
        budget: of transitions.
        episodes: the budget of episodes, where there is one.
        ledger: what was delivered before, which is not budget any more.
        random_frames: that many transitions, those leased first, have random actions.
        exact: leases bring no more transitions than they are for (``surplus="never_step"``).
    """

    def __init__(
        self,
        pool: WorkerPool,
        startup: WorkerStartup,
        place: Place,
        share: Share,
        plan: SlabPlan,
        *,
        frames: int,
        budget: Budget,
        episodes: int | None,
        ledger: Ledger,
        random_frames: int,
        exact: bool,
    ) -> None:
        self._exact = exact
        self._whole = not (plan.reset_slots or plan.marked or plan.arrivals)
        """Every lane of a slot is a transition."""
        self._worker_pool, self._startup, self._plan = pool, startup, plan
        self._frames, self._budget, self._episodes = frames, budget, episodes
        self._entry = NOTHING
        """Events since the last block."""
        self._lanes = share.total
        self._segments = [
            [
                Segment(worker, index * share.stride, place.segment(worker, index))
                for index in range(share.segments)
            ]
            for worker in range(len(share.lanes))
        ]
        self.slabs = [segment.slab for each in self._segments for segment in each]
        self.counts = Decision("by lane", "workers fill the slots")
        self.random_frames = random_frames
        self._opens = random_frames > 0
        self._stopping = False
        self._granted = 0
        self._cuts: NDArray[np.bool_] | None = None
        self._begin(ledger, fresh=False)

    def _begin(self, ledger: Ledger, fresh: bool) -> None:
        self._queue: deque[Segment | range] = deque()
        """Segments to take, and lanes whose trajectories are others from there on."""
        remaining = self._budget.remaining(ledger.stored)
        self._unleased = sys.maxsize if remaining is None else remaining
        episodes = self._episodes
        self._tickets = 0 if episodes is None else episodes - ledger.episodes_complete
        self._unfinished = self._tickets
        self._tallies = [Tally(fresh) for _ in self._worker_pool.members]

    # --- leases -----------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give leases for all segments that are free, while there is a budget."""
        if self._stopping or self._complete:
            return
        for _ in self._segments[0]:  # one each, then another: no worker is left without
            for member in self._worker_pool.members:
                if not member.ready and member.failed is None:
                    continue  # it comes in the place of another
                free = [segment for segment in self._segments[member.index] if segment.free]
                if free:
                    self._lease(member, self._tallies[member.index], free[0])

    def _lease(self, member: Member, tally: Tally, segment: Segment) -> None:
        """Give a part of what is left of the budget, if there is any."""
        tickets, frames = 0, segment.slab.slots * segment.slab.lanes
        surplus = 0 if self._exact else len(member.lanes) - 1
        if self._episodes is not None:
            # Fewer and fewer, so that no worker is left with many when the others are done.
            share = self._tickets // (2 * len(self._tallies))
            tickets = min(self._tickets, max(len(member.lanes), share))
            if not tickets and not (tally.tickets and not tally.leased):
                return
        else:
            if self._whole and min(self._frames, frames, self._unleased) % len(member.lanes) == 0:
                surplus = 0
            # So few that what comes with them is wanted as well. Only the very last ones, for
            # which nothing else is under way, may bring too many.
            wanted = self._unleased - surplus
            if wanted <= 0 and not self._out:
                wanted = self._unleased
            frames = min(self._frames, frames, wanted)
            if frames <= 0:
                return
        # Those of its last step that are more than wanted are rows too.
        reserved = min(frames + surplus, self._unleased)
        drawn = min(self.random_frames, reserved)
        if drawn < reserved and self._drawing:
            return  # what those leave over comes first: no lane acts at random after its policy did
        self._unleased -= reserved
        self.random_frames -= drawn
        self._tickets -= tickets
        tally.tickets += tickets
        self._granted += 1
        fresh, tally.fresh = tally.fresh, False
        segment.free, segment.lease = False, self._granted
        segment.reserved, segment.random_frames = reserved, drawn
        tally.leased.append(segment)
        last = self._tickets == 0
        question = m.Lease(self._granted, segment.base, frames, drawn, tickets, last, fresh)
        self._worker_pool.ask(member, question)

    @property
    def _complete(self) -> bool:
        """Every episode of the budget has ended."""
        return self._episodes is not None and self._unfinished <= 0

    @property
    def _drawing(self) -> bool:
        """Some leases with random actions have not come back."""
        return any(part.random_frames for tally in self._tallies for part in tally.leased)

    @property
    def _awaited(self) -> bool:
        """Leases will come back, or there will be a worker to give one to."""
        return self._out or (
            self._startup.replacements.under_way and not (self._stopping or self._complete)
        )

    @property
    def _out(self) -> bool:
        """Some leases have not come back."""
        return any(tally.leased for tally in self._tallies)

    def _hear(self) -> None:
        """Wait for leases to come back, and replace workers that failed."""
        try:
            events = self._worker_pool.events(during=pausable(_wake))
        except _Woken:
            return
        others = [event for event in events if not self._startup.replacements.leads(event[0])]
        failed = self._counted(others)
        try:  # once all is counted: the first may be the end
            for member, answer in events:
                self._startup.replacements.hears(member, answer)
            for member, error in failed:
                allowed = self._startup.allowed(error)
                self._queue.append(member.lanes)
                if not (
                    self._stopping or self._complete
                ):  # else no worker is going to step any more
                    self._startup.replace(member, allowed, None)
        except BaseException:
            self.stop()
            raise

    def _counted(self, events: Iterable[Event]) -> list[tuple[Member, Exception]]:
        """Count what came back or is lost; returns workers that failed."""
        failed = []
        for member, answer in events:
            if isinstance(answer, m.Filled):
                self._came_back(member, answer)
            else:
                self._lose(member)
                failed.append((member, answer))
        return failed

    def _came_back(self, member: Member, filled: m.Filled) -> None:
        tally = self._tallies[member.index]
        segment = tally.leased.popleft()
        segment.used = filled.used
        have = int(segment.transitions.sum())
        self._entry = self._entry.plus(filled.entry)
        self._unleased += segment.reserved - have
        self.random_frames += filled.random_left
        tally.tickets -= filled.completed
        self._unfinished -= filled.completed
        if self._plan.reset_slots and filled.used:
            tally.pending = ended_in(segment.slab, filled.used - 1, filled.used)[0]
        if have:
            self._queue.append(segment)
        else:
            segment.free = True
        if self._complete:
            self._worker_pool.halt()

    def _lose(self, member: Member) -> None:
        """Take the leases of a failed worker back, and count what it had executed as lost."""
        tally = self._tallies[member.index]
        self._tickets += tally.tickets
        for segment in tally.leased:
            segment.free = True
            self.random_frames += segment.random_frames
            self._unleased += segment.reserved
        if tally.leased and member.board[LEASE] == tally.leased[0].lease:
            self._count_lost(member, tally)
        self._tallies[member.index] = Tally()

    def _count_lost(self, member: Member, tally: Tally) -> None:
        """Count what a worker had executed of the lease that it had begun."""
        segment, slab, plan = tally.leased[0], tally.leased[0].slab, self._plan
        slots, executed = counted_in(member.board[COUNTED])
        counted = min(max(0, slots - segment.base), slab.slots)
        filled = min(max(0, member.board[FILLED] - segment.base), slab.slots)
        pending = np.zeros(slab.lanes, np.bool_) if tally.pending is None else tally.pending
        if counted and plan.reset_slots:
            pending = ended_in(slab, counted - 1, counted)[0]
        # What the worker counted may have been thinned out by an episode budget since.
        executed += int(plan.executed(slab, counted, filled, pending).sum())
        if self._exact:  # of the last slot it stepped only as many lanes as were missing
            executed = min(executed, segment.reserved)
        slots = filled * slab.lanes if plan.reset_slots or plan.marked else executed
        self._entry = self._entry.plus(LedgerEntry(slots, executed, slots - executed, executed))

    # --- blocks, as a collector takes them --------------------------------------------------------

    def block(self, want: int) -> Block:
        """At most ``want`` transitions of what came first; waits for some, if any will come."""
        self._grant()
        while not self._queue and self._awaited and not waits():
            self._hear()
            self._grant()
        if not self._queue:
            if not (self._awaited or self.dry):
                raise LedgerError("transitions are wanted, and no lease is left to bring them")
            return self._nothing()
        first = self._queue[0]
        if isinstance(first, range):
            return self._cut(first)
        return self._take(first, first.used, want)

    def _take(self, segment: Segment, slots: int, want: int) -> Block:
        block = Block.of(segment.slab, segment.transitions[:slots], want)
        block.giver = block.keeper = SegmentGiver(self, segment)
        block.entry = self._take_entry()
        return block

    def _take_entry(self) -> LedgerEntry:
        entry, self._entry = self._entry, NOTHING
        return entry

    def _cut(self, lanes: range) -> Block:
        self._queue.popleft()
        block = self._nothing()
        block.cuts = np.zeros(self._lanes, np.bool_)
        block.cuts[lanes.start : lanes.stop] = True
        return block

    def _nothing(self) -> Block:
        slab = self.slabs[0]
        block = Block.of(slab, np.zeros((0, slab.lanes), np.bool_), 0)
        block.entry = self._take_entry()
        return block

    def spare(self, segment: Segment) -> bool:
        """The worker of ``segment`` has another one, whose rows are not needed."""
        return sum(not each.kept for each in self._segments[segment.member]) > 1

    def emptied(self, segment: Segment, kept: bool) -> None:
        """All of ``segment`` was taken; it may be filled again unless its rows are ``kept``."""
        if self._queue and self._queue[0] is segment:
            self._queue.popleft()
        segment.kept, segment.free = kept, not kept
        if not kept:
            self._grant()

    @property
    def held(self) -> int:
        """Transitions that came back and wait for the next block."""
        waiting = [each for each in self._queue if isinstance(each, Segment)]
        return sum(int(segment.transitions.sum()) for segment in waiting)

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""
        return (self._stopping or self._complete) and not self._out and not self._queue

    def discard(self, rewards: Sequence[Key]) -> Discarded:
        """Throw away all that no block gave. Lanes have no slot in common: nothing is summed up."""
        lanes = self.discard_held()
        none = np.zeros(self._lanes)
        return Discarded(self._take_entry(), lanes, none, none.astype(np.bool_))

    def discard_held(self) -> NDArray[np.bool_]:
        """Take all leases back, and throw away what came and was not taken; returns its lanes."""
        self._settle()
        lanes = np.zeros(self._lanes, np.bool_)
        for each in self._queue:
            if isinstance(each, Segment):
                first = each.slab.first_lane
                lanes[first : first + each.slab.lanes] |= each.transitions.any(axis=0)
                if self._opens:
                    drawn = each.slab.version[: each.used] == RANDOM_VERSION
                    self.random_frames += int((each.transitions & drawn).sum())
                self._discard(each, 0)
                each.free = True
        self._queue.clear()
        return lanes

    def _discard(self, segment: Segment, start: int) -> None:
        """Count the transitions from slot ``start`` on that no block took, and forget them."""
        rest = segment.transitions[start:]
        self._entry = self._entry.plus(LedgerEntry(discarded=int(rest.sum())))
        rest[:] = False

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before its next slot."""
        self._begin(ledger, fresh=True)
        if not self._stopping:
            self._worker_pool.go_on()

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: all that came back, each worker's as far as it is ``sound``."""
        self._stopping = True
        self._settle()
        broken: set[int] = set()
        while self._queue:
            each = self._queue[0]
            if isinstance(each, range):
                yield self._cut(each)
                continue
            good = 0 if each.member in broken else sound(each.slab, each.used)
            if good < each.used:
                broken.add(each.member)
            self._discard(each, good)
            block = self._take(each, good, most)
            most -= len(block)
            yield block  # until it is given, it is counted as held
            self._discard(each, 0)
            if self._queue and self._queue[0] is each:
                self._queue.popleft()
        yield self._nothing()  # what was thrown away behind the last one

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return None: it is not known whose lanes they were."""
        return None

    @property
    def paused(self) -> bool:
        """Return False: workers do not wait for each other."""
        return False

    def go_on(self) -> None:
        """Do nothing: workers never paused."""

    def stop(self) -> None:
        """End after the steps under way. Safe to call from a signal handler."""
        self._stopping = True
        self._worker_pool.halt()

    def _settle(self) -> None:
        """Halt, and hear of all leases."""
        if self._out:
            events = self._worker_pool.settle(patient=not self._stopping)
            self._counted(
                [event for event in events if not self._startup.replacements.leads(event[0])]
            )
            for event in events:
                self._startup.replacements.hears_settled(*event)
