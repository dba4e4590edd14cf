"""Transitions as they come from workers that never wait for one another (``mode="async"``)."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import LedgerError
from tallyroll.collector.rollout.driver import ended_in
from tallyroll.collector.rollout.rollout import Block, Sound
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import COUNTED, FILLED, LEASE, counted_in
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.processes import Member, WorkerPool
from tallyroll.collector.workers.shared.placement import Blocks, Share
from tallyroll.collector.workers.startup import WorkerStartup
from tallyroll.storage.rows.keys import RANDOM_VERSION, Key


@dataclass(eq=False)
class Segment:
    """A part of a worker's slab. ``slab.transitions`` marks those that nobody took yet."""

    member: int
    base: int
    slab: Slab
    used: int = 0
    free: bool = True

    @property
    def transitions(self) -> Mask:
        """``[used, lane]``."""
        return self.slab.transitions[: self.used]


@dataclass(frozen=True)
class Cut:
    """In the queue: from here on the lanes' trajectories are others."""

    lanes: range


@dataclass(frozen=True)
class Leased:
    """A lease that has not come back."""

    number: int
    segment: Segment
    reserved: int
    """Transitions of the budget that are kept for it, those of its last step included."""
    random_frames: int


@dataclass
class Tally:
    """A worker's part of the budget."""

    leases: deque[Leased] = field(default_factory=deque)
    """In the order in which it fills them."""
    granted: int = 0
    """Leases in all."""
    tickets: int = 0
    """Episodes that it may still complete."""
    fresh: bool = False
    """Its lanes are to begin anew with the next lease."""
    pending: NDArray[np.bool_] | None = None
    """Lanes that ended in the last slot of its last lease."""


class Leases:
    """Hands parts of the budget to workers, and queues what comes back.

    A lease is for transitions, and comes back with at least as many (a worker steps all its
    lanes); with a budget of episodes it grants tickets to start them, so that those which started
    first are those that count, however long they last.

    Args:
        crew: the workers.
        muster: replaces one that failed.
        blocks: their memory.
        share: who has which lanes.
        plan: what a slab looks like.
        frames: transitions a lease.
        remaining: transitions that may still be delivered; None: no limit.
        episodes: with a budget of episodes, how many are not complete yet.
        ledger: counted up as leases come back.
        random_frames: that many transitions, those leased first, have random actions.
        exact: leases bring no more transitions than they are for (``surplus="never_step"``).
    """

    def __init__(
        self,
        crew: WorkerPool,
        muster: WorkerStartup,
        blocks: Blocks,
        share: Share,
        plan: SlabPlan,
        *,
        frames: int,
        remaining: Callable[[], int | None],
        episodes: Callable[[], int] | None,
        ledger: Ledger,
        random_frames: int,
        exact: bool,
    ) -> None:
        self._exact = exact
        self._worker_pool, self._startup, self._plan = crew, muster, plan
        self._frames, self._remaining, self._episodes = frames, remaining, episodes
        self._ledger = ledger
        self._lanes = share.total
        self._capacity = [share.slots * lanes for lanes in share.lanes]
        self._segments = [
            [
                Segment(worker, index * share.stride, blocks.segment(worker, index))
                for index in range(share.segments)
            ]
            for worker in range(len(share.lanes))
        ]
        self.random_frames = random_frames
        self._opens = random_frames > 0
        self._stopping = False
        self._taken: tuple[Segment, Mask] | None = None
        self._kept: list[Segment] = []
        self._cuts: NDArray[np.bool_] | None = None
        self._begin()

    def _begin(self) -> None:
        self._queue: deque[Segment | Cut] = deque()
        self._unleased = self._remaining()
        self._pool = 0 if self._episodes is None else self._episodes()
        self._unfinished = self._pool
        self._tallies = [Tally() for _ in self._worker_pool.members]
        for member in self._worker_pool.members:
            if member.board is not None:  # leases are numbered anew
                member.board[LEASE] = 0

    # --- leases -----------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give leases for all segments that are free, while there is a budget."""
        if self._stopping or self._complete:
            return
        rounds = max(len(segments) for segments in self._segments)
        for _ in range(rounds):  # one each, then another: nobody is left without
            for member in self._worker_pool.members:
                free = [segment for segment in self._segments[member.index] if segment.free]
                if free:
                    self._lease(member, self._tallies[member.index], free[0])

    def _lease(self, member: Member, tally: Tally, segment: Segment) -> None:
        """Give a part of what is left of the budget, if there is any."""
        tickets, frames = 0, self._capacity[member.index]
        if self._episodes is not None:
            # Fewer and fewer, so that no worker is left with many when the others are done.
            tickets = min(self._pool, max(len(member.lanes), self._pool // (2 * self._workers)))
            if not tickets and not (tally.tickets and not tally.leases):
                return
        else:
            frames = min(self._frames, frames, self._leasable(member))
            if frames <= 0:
                return
        # Those of its last step that are more than wanted are rows too.
        reserved = frames + self._surplus_of(member)
        if self._unleased is not None:
            reserved = min(reserved, self._unleased)
        drawn = min(self.random_frames, reserved)
        if drawn < reserved and self._drawing:
            return  # what those leave over comes first: no lane acts at random after its policy did
        if self._unleased is not None:
            self._unleased -= reserved
        self.random_frames -= drawn
        self._pool -= tickets
        tally.tickets += tickets
        tally.granted += 1
        fresh, tally.fresh = tally.fresh, False
        segment.free = False
        tally.leases.append(Leased(tally.granted, segment, reserved, drawn))
        last = self._pool == 0
        question = m.Lease(tally.granted, segment.base, frames, drawn, tickets, last, fresh)
        self._worker_pool.ask(member, question)

    def _surplus_of(self, member: Member) -> int:
        return 0 if self._exact else len(member.lanes) - 1

    def _leasable(self, member: Member) -> int:
        """Transitions that a lease may be for, so that what comes with them is wanted as well.

        Only the very last ones, for which nothing else is under way, may bring too many.
        """
        if self._unleased is None:
            return self._frames
        most = self._unleased - self._surplus_of(member)
        return self._unleased if most <= 0 and not self._out else most

    @property
    def _workers(self) -> int:
        return len(self._worker_pool.members)

    @property
    def _complete(self) -> bool:
        """Every episode of the budget has ended."""
        return self._episodes is not None and self._unfinished <= 0

    @property
    def _drawing(self) -> bool:
        """Some leases with random actions have not come back."""
        return any(lease.random_frames for tally in self._tallies for lease in tally.leases)

    @property
    def _out(self) -> bool:
        """Some leases have not come back."""
        return any(tally.leases for tally in self._tallies)

    def _hear(self, limit: float | None = None) -> None:
        failed = []
        for member, answer in self._worker_pool.events(limit):
            if isinstance(answer, m.Filled):
                self._came_back(member, answer)
            else:
                failed.append((member, answer))
        raised: BaseException | None = None
        for member, error in failed:  # once all is heard: the first may be the end
            try:
                self._failed(member, error)
            except (Exception, KeyboardInterrupt) as again:  # noqa: BLE001  raised below
                raised = raised or again
        if raised is not None:
            raise raised

    def _came_back(self, member: Member, filled: m.Filled) -> None:
        tally = self._tallies[member.index]
        lease = tally.leases.popleft()
        segment = lease.segment
        segment.used = filled.used
        have = int(segment.transitions.sum())
        for name, count in filled.counts.items():
            if name in _COUNTED:
                setattr(self._ledger, name, getattr(self._ledger, name) + count)
        if self._unleased is not None:
            self._unleased += lease.reserved - have
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

    def _failed(self, member: Member, error: Exception) -> None:
        """Count the slots of a failed worker as lost, and return its leases."""
        tally = self._tallies[member.index]
        self._lose(member, tally)
        if self._unleased is not None:
            self._unleased += sum(lease.reserved for lease in tally.leases)
        self.random_frames += sum(lease.random_frames for lease in tally.leases)
        self._pool += tally.tickets
        self._tallies[member.index] = Tally()
        try:
            allowed = self._startup.allowed(error)
            self._queue.append(Cut(member.lanes))
            if not (self._stopping or self._complete):  # else nobody is going to step any more
                self._startup.replace(member, allowed, None)
        except BaseException:
            self.stop()
            raise

    def _lose(self, member: Member, tally: Tally) -> None:
        """Count what a dead worker had executed."""
        for lease in tally.leases:
            lease.segment.free = True
        if not tally.leases or member.board is None:
            return
        lease = tally.leases[0]
        if member.board[LEASE] != lease.number:
            return  # it was not begun
        segment, slab, plan = lease.segment, lease.segment.slab, self._plan
        slots, executed = counted_in(member.board[COUNTED])
        counted = min(max(0, slots - segment.base), slab.slots)
        filled = min(max(0, member.board[FILLED] - segment.base), slab.slots)
        pending = np.zeros(slab.lanes, np.bool_) if tally.pending is None else tally.pending
        if counted and plan.reset_slots:
            pending = ended_in(slab, counted - 1, counted)[0]
        # What the worker counted may have been thinned out by an episode budget since.
        executed += int(plan.executed(slab, counted, filled, pending).sum())
        if self._exact:  # of the last slot it stepped only as many lanes as were missing
            executed = min(executed, lease.reserved)
        ledger = self._ledger
        slots = filled * slab.lanes if plan.reset_slots or plan.marked else executed
        ledger.slots += slots
        ledger.executed += executed
        ledger.lost += executed
        ledger.reset_slots += slots - executed

    # --- blocks, as a collector takes them --------------------------------------------------------

    def fill(self, want: int) -> Block:
        """At most ``want`` transitions of what came first; waits for some, if any will come."""
        self._grant()
        while not self._queue and self._out:
            self._hear()
            self._grant()
        if not self._queue:
            if not self.dry:
                raise LedgerError("transitions are wanted, and no lease is left to bring them")
            return _nothing(self._segments[0][0].slab)
        first = self._queue[0]
        if isinstance(first, Cut):
            self._queue.popleft()
            self._cut(first)
            return _nothing(self._segments[0][0].slab)
        block = Block.of(first.slab, first.transitions, want)
        self._taken = first, block.taken
        return block

    def keeps(self, more: bool) -> bool:
        """The last block's segment can wait, as long as its worker has another one."""
        if self._taken is None:
            return False
        segments = self._segments[self._taken[0].member]
        return sum(segment in self._kept for segment in segments) < len(segments) - 1

    def copied(self, kept: bool) -> None:
        """The last block's rows were copied, or are ``kept``; its segment is free once empty."""
        if self._taken is None:
            return
        (segment, taken), self._taken = self._taken, None
        segment.slab.transitions[: len(taken)] &= ~taken
        if not segment.transitions.any():
            if self._queue and self._queue[0] is segment:
                self._queue.popleft()
            if kept:
                self._kept.append(segment)
            else:
                segment.free = True
                self._grant()

    def delivered(self) -> None:
        """Segments that were kept may be filled again."""
        for segment in self._kept:
            segment.free = True
        self._kept.clear()
        self._grant()

    def _cut(self, cut: Cut) -> None:
        if self._cuts is None:
            self._cuts = np.zeros(self._lanes, np.bool_)
        self._cuts[cut.lanes.start : cut.lanes.stop] = True

    @property
    def held(self) -> int:
        """Transitions that came back and wait for the next block."""
        waiting = [each for each in self._queue if isinstance(each, Segment)]
        return sum(int(segment.transitions.sum()) for segment in waiting)

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""
        return (self._stopping or self._complete) and not self._out and not self._queue

    def take_cuts(self) -> NDArray[np.bool_] | None:
        """Lanes whose trajectories ended, unfinished, with the last block."""
        cuts, self._cuts = self._cuts, None
        return cuts

    def last_slot(self, rewards: Sequence[Key]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Lanes have no slot in common: what is discarded is discarded with a restart."""
        return np.zeros(self._lanes), np.zeros(self._lanes, np.bool_)

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
        self._taken = None
        return lanes

    def _discard(self, segment: Segment, start: int) -> None:
        """Count the transitions from slot ``start`` on that nobody took, and forget them."""
        rest = segment.transitions[start:]
        self._ledger.discarded += int(rest.sum())
        rest[:] = False

    def restart_lanes(self) -> None:
        """Every lane begins anew before its next slot."""
        self.discard_held()
        self._begin()
        for tally in self._tallies:
            tally.fresh = True
        if not self._stopping:
            self._worker_pool.go_on()

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: all that came back, each worker's as far as it is ``sound``."""
        self._stopping = True
        self._settle()
        self._taken = None
        broken: set[int] = set()
        while self._queue:
            each = self._queue[0]
            if isinstance(each, Cut):
                self._queue.popleft()
                self._cut(each)
                yield _nothing(self._segments[0][0].slab)
                continue
            good = 0 if each.member in broken else sound(each.slab, each.used)
            if good < each.used:
                broken.add(each.member)
            self._discard(each, good)
            block = Block.of(each.slab, each.transitions[:good], most)
            most -= len(block)
            self._taken = each, block.taken
            yield block  # until it is said to be copied, it is counted as held
            self._discard(each, 0)
            if self._queue and self._queue[0] is each:
                self._queue.popleft()

    def refused(self) -> tuple[Slab, int] | None:
        """Nobody knows whose lanes they were."""
        return None

    def stop(self) -> None:
        """End after the steps under way. Safe to call from a signal handler."""
        self._stopping = True
        self._worker_pool.halt()

    def _settle(self) -> None:
        """Halt, and hear of all leases."""
        if not self._out:
            return
        for member, answer in self._worker_pool.settle(patient=not self._stopping):
            if isinstance(answer, m.Filled):
                self._came_back(member, answer)
            else:
                self._lose(member, self._tallies[member.index])
                self._tallies[member.index] = Tally()


_COUNTED = ("slots", "executed", "reset_slots", "discarded", "policy_calls_on_reset_slots")


def _nothing(slab: Slab) -> Block:
    return Block.of(slab, np.zeros((0, slab.lanes), np.bool_), 0)


def frames_of_a_lease(frames_per_batch: int, workers: int) -> int:
    """So many that a batch takes one lease of every worker."""
    return max(1, ceil(frames_per_batch / workers))
