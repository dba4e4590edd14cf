"""The budget of an asynchronous run, divided among its workers by leases."""

import sys
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import NOTHING, Budget, Ledger, LedgerEntry
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.rollout.lanes import ended_in
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import COUNTED, FILLED, LEASE, counted_in
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.leases.segment import Segment
from tallyroll.collector.workers.member import Member


@dataclass
class WorkerLeases:
    """A worker's part of the budget."""

    fresh: bool = False
    """True if the worker's lanes are reset at the start of the next lease."""
    leased: deque[Segment] = field(default_factory=deque)
    """Segments of outstanding leases, in the order in which the worker fills them."""
    tickets: int = 0
    """Number of episodes that the worker may still complete."""
    pending: NDArray[np.bool_] | None = None
    """Lanes that ended in the last slot of the worker's last lease."""

    def lend(self, segment: Segment, tickets: int) -> bool:
        """Record the lease of ``segment``. Return True if it begins with a reset of all lanes."""
        fresh, self.fresh = self.fresh, False
        self.tickets += tickets
        self.leased.append(segment)
        return fresh

    def return_segment(self, filled: m.LeaseResult, resets: bool) -> Segment:
        """Return the segment of the oldest lease, as the worker filled it.

        ``resets`` is True if the slot after an end is a reset slot.
        """
        segment = self.leased.popleft()
        segment.fill(filled.used)
        self.tickets -= filled.completed
        if resets and filled.used:
            self.pending = ended_in(segment.slab, filled.used - 1, filled.used)[0]
        return segment


class LeaseBudget:
    """Leases parts of the budget to workers, and reclaims the unused remainder.

    A lease asks for a number of transitions, and returns at least as many, because a worker steps
    all of its lanes. With a budget of episodes a lease grants tickets to start them. The episodes
    that started first are therefore those that count, however long they last.

    Args:
        plan: the layout of a slab.
        ledger: the counts of the run. The budget excludes transitions that are already stored.
        workers: number of workers.
        frames: transitions per lease.
        budget: the budget of transitions.
        episodes: the budget of episodes; None if there is none.
        openings: numbers of transitions with random actions, which the first leases get.
        exact: True if leases return no more transitions than they ask for
            (``surplus="never_step"``).
    """

    def __init__(
        self,
        plan: SlabPlan,
        ledger: Ledger,
        *,
        workers: int,
        frames: int,
        budget: Budget,
        episodes: int | None,
        openings: Openings,
        exact: bool,
    ) -> None:
        self._exact = exact
        self._whole = not (plan.reset_slots or plan.marked or plan.arrivals)
        """True if every lane of every slot is a transition."""
        self._plan, self._workers = plan, workers
        self._frames, self._budget, self._episodes = frames, budget, episodes
        self._openings = openings
        self._granted = 0
        self.drawing: Counts = np.zeros_like(openings.left)
        """``[policy]``: transitions with random actions in outstanding leases."""
        self.begin(ledger, fresh=False)

    def begin(self, ledger: Ledger, fresh: bool) -> None:
        """Start to lease the rest of the budget, which follows from the counts in ``ledger``.

        ``fresh`` is True if all lanes are reset first.
        """
        remaining = self._budget.remaining(ledger.stored)
        self._unleased = sys.maxsize if remaining is None else remaining
        episodes = self._episodes
        self._tickets = 0 if episodes is None else episodes - ledger.episodes_complete
        self._unfinished = self._tickets
        self._tallies = [WorkerLeases(fresh) for _ in range(self._workers)]
        # Totals are maintained here, because there may be a thousand workers.
        self._out = 0
        self.drawing[:] = 0

    @property
    def complete(self) -> bool:
        """True if every episode of the budget has ended."""
        return self._episodes is not None and self._unfinished <= 0

    @property
    def out(self) -> bool:
        """True if leases are outstanding."""
        return self._out > 0

    @property
    def spent(self) -> bool:
        """True if no transition is left to lease, unless an outstanding lease returns some."""
        return self._episodes is None and self._unleased <= 0

    @property
    def random_frames(self) -> int:
        """Number of transitions with random actions of the run that are not leased yet."""
        return int(self._openings.left[0]) if self._openings.whole_run else 0

    def begin_at_random(self, count: int) -> None:
        """Lease the next ``count`` transitions with random actions, if all lanes begin so."""
        if self._openings.whole_run:
            self._openings.begin(count)

    # --- granting ---------------------------------------------------------------------------------

    def lease(self, member: Member, segment: Segment) -> m.Lease | None:
        """Lease a part of the budget for ``segment``; return None if none can be leased now."""
        tally = self._tallies[member.index]
        tickets, frames = 0, segment.slab.slots * segment.slab.lanes
        surplus = 0 if self._exact else len(member.lanes) - 1
        if self._episodes is not None:
            # Leases get smaller, so that no worker has many episodes left when the others are done.
            share = self._tickets // (2 * self._workers)
            tickets = min(self._tickets, max(len(member.lanes), share))
            if not tickets and not (tally.tickets and not tally.leased):
                return None
        else:
            if self._whole and min(self._frames, frames, self._unleased) % len(member.lanes) == 0:
                surplus = 0
            # The lease is so small that the budget includes its surplus. Only the very last lease,
            # when no other is outstanding, may return too many.
            wanted = self._unleased - surplus
            if wanted <= 0 and not self.out:
                wanted = self._unleased
            frames = min(self._frames, frames, wanted)
            if frames <= 0:
                return None
        # Surplus transitions of the lease's last step are rows too.
        reserved = min(frames + surplus, self._unleased)
        slots = segment.slab.slots
        if self._whole:
            slots = min(slots, -(-frames // len(member.lanes)))
        if (drawn := self._at_random(member, reserved, slots)) is None:
            return None
        self._unleased -= reserved
        self._openings.draw(drawn)
        self._tickets -= tickets
        self._granted += 1
        segment.lend(self._granted, reserved, drawn)
        fresh = tally.lend(segment, tickets)
        self._out += 1
        self.drawing += drawn
        last = self._tickets == 0
        random_frames = drawn.tolist()
        return m.Lease(self._granted, segment.base, frames, random_frames, tickets, last, fresh)

    def _at_random(self, member: Member, reserved: int, slots: int) -> Counts | None:
        """Return the number of random actions of each policy that a lease begins with.

        Return None if the lease has to wait until outstanding leases return their random actions.
        """
        openings = self._openings
        first = member.lanes.start - openings.first_lane
        lanes = openings.acts_in[:, first : first + len(member.lanes)].sum(axis=1)
        most = np.minimum(reserved, slots * lanes)
        drawn: Counts = np.minimum(openings.left, most)
        if ((drawn < most) & (self.drawing > 0)).any():
            # Wait for the random actions that outstanding leases did not use, so that no lane acts
            # at random after its policy acted.
            return None
        return drawn

    # --- returns ----------------------------------------------------------------------------------

    def return_lease(self, member: Member, filled: m.LeaseResult) -> Segment:
        """Give the remainder of the oldest lease back to the budget; return the lease's segment.

        The segment is free if it holds no transitions.
        """
        segment = self._tallies[member.index].return_segment(filled, self._plan.reset_slots)
        self._count_return(segment)
        self._unleased += segment.reserved - segment.left
        self._openings.give_back(np.array(filled.random_left))
        self._unfinished -= filled.completed
        return segment

    def _count_return(self, segment: Segment) -> None:
        self._out -= 1
        self.drawing -= segment.random_frames

    def return_random(self, segment: Segment) -> None:
        """Return to the budget the random actions of transitions that no block took."""
        self._openings.give_back(self.waiting_of(segment))

    def waiting_of(self, segment: Segment) -> Counts:
        """Return the number of transitions with random actions that no block took."""
        return self._openings.counted(segment.slab, slice(segment.used), segment.transitions)

    def lose(self, member: Member) -> LedgerEntry:
        """Take back the leases of a failed worker; return the counts of its lost transitions."""
        tally, lost = self._tallies[member.index], NOTHING
        self._tickets += tally.tickets
        for segment in tally.leased:
            self._count_return(segment)
            segment.release()
            self._openings.give_back(segment.random_frames)
            self._unleased += segment.reserved
        if tally.leased and member.board[LEASE] == tally.leased[0].lease:
            lost = self._lost(member, tally)
        self._tallies[member.index] = WorkerLeases()
        return lost

    def _lost(self, member: Member, tally: WorkerLeases) -> LedgerEntry:
        """Count the transitions that a worker had executed in the lease that it had begun."""
        segment, slab, plan = tally.leased[0], tally.leased[0].slab, self._plan
        slots, executed = counted_in(member.board[COUNTED])
        counted = min(max(0, slots - segment.base), slab.slots)
        filled = min(max(0, member.board[FILLED] - segment.base), slab.slots)
        pending = np.zeros(slab.lanes, np.bool_) if tally.pending is None else tally.pending
        if counted and plan.reset_slots:
            pending = ended_in(slab, counted - 1, counted)[0]
        # An episode budget may have removed some of the slots that the worker counted.
        executed += int(plan.executed(slab, counted, filled, pending).sum())
        if self._exact:  # the worker stepped only the missing lanes of the last slot
            executed = min(executed, segment.reserved)
        slots = filled * slab.lanes if plan.reset_slots or plan.marked else executed
        return LedgerEntry(slots, executed, slots - executed, executed)
