"""Source of transitions from workers that never wait for one another (``mode="async"``)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import LedgerError, WorkerError
from tallyroll.collector.interrupts import pause_on_signal, signal_waits
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.rollout.source import (
    Block,
    DiscardedTransitions,
    UndeliveredTransitions,
    ValidSlots,
)
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.leases.budget import LeaseBudget
from tallyroll.collector.workers.leases.segment import Segment
from tallyroll.collector.workers.leases.segment_queue import SegmentQueue
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import Event, WorkerPool
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.startup.worker_startup import WorkerStartup
from tallyroll.collector.workers.transport import Place
from tallyroll.storage.rows.keys import Key


class _Woken(BaseException):
    """Exception that interrupts the wait for workers, because a signal handler is waiting."""


def _wake() -> None:
    raise _Woken


class Leases:
    """Sends leases to workers, and returns their transitions in blocks.

    Args:
        pool: the workers.
        startup: the object that replaces workers that fail.
        place: the memory with the segments.
        share: the lanes of each worker.
        budget: the budget, which makes the leases.
    """

    paused = False
    """Always False: workers do not wait for each other."""

    def __init__(
        self,
        pool: WorkerPool,
        startup: WorkerStartup,
        place: Place,
        share: Share,
        budget: LeaseBudget,
    ) -> None:
        self._worker_pool, self._startup, self._budget = pool, startup, budget
        self._lanes = share.of_run
        self._segments = [
            [
                Segment(worker, index * share.stride, place.segment(worker, index))
                for index in range(share.segments)
            ]
            for worker in range(len(share.lanes))
        ]
        self._queue = SegmentQueue(self._segments, share.of_run)
        self.slabs = [segment.slab for each in self._segments for segment in each]
        self.counts = Decision("by lane", "workers fill the slots")
        self._hungry = {*range(len(share.lanes))}
        """Workers that may have a free segment."""
        self._stopping = False
        self._missed = False
        """True if an exception came between an answer and its count, which leaves a gap."""

    # --- leases -----------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Lease all free segments while the budget lasts."""
        if self._stopping or self._budget.complete or self._budget.spent:
            return
        for _ in self._segments[0]:  # every worker gets one lease before any gets a second
            for index in sorted(self._hungry):
                member = self._worker_pool.members[index]
                if not member.ready and member.failed is None:
                    continue  # a replacement that is not ready
                if self._worker_pool.central is not None and member.asked:
                    continue  # the worker accepts only actions until it has answered
                free = [segment for segment in self._segments[index] if segment.free]
                if not free:
                    self._hungry.discard(index)
                elif (lease := self._budget.lease(member, free[0])) is not None:
                    self._worker_pool.ask(member, lease)

    @property
    def _awaited(self) -> bool:
        """True if a lease will come back, or a replacement will be ready to get one."""
        return self._budget.out or (
            self._startup.replacements.under_way and not (self._stopping or self._budget.complete)
        )

    def _receive(self) -> None:
        """Wait for leases to come back, and replace workers that failed."""
        try:
            events = self._worker_pool.events(during=pause_on_signal(_wake))
            others = [event for event in events if not self._startup.replacements.leads(event[0])]
            failed = self._counted(others)
        except _Woken:
            return
        except BaseException:
            self._missed = True
            self._queue.recount()
            raise
        try:  # only after all are counted, because the first may end the run
            for member, answer in events:
                self._startup.replacements.handle(member, answer)
            for member, error in failed:
                self._replace(member, self._startup.allowed(error))
        except BaseException:
            self.stop()
            raise

    def _replace(self, member: Member, error: Exception) -> None:
        """Cut the lanes of a worker that failed, and replace it unless the run is ending."""
        self._queue.waiting.append(member.lanes)
        if not (self._stopping or self._budget.complete):
            self._startup.replace(member, error, None)

    def _counted(self, events: Iterable[Event]) -> list[tuple[Member, Exception]]:
        """Count returned and lost transitions; return the workers that failed."""
        failed = []
        for member, answer in events:
            self._hungry.add(member.index)
            failure = None if isinstance(answer, m.LeaseResult) else answer
            filled = member.take_complete() if failure else answer
            if filled is not None:
                self._queue.add(self._budget.return_lease(member, filled), filled.entry)
                if self._budget.complete:
                    self._worker_pool.halt()
            if failure is not None:
                self._queue.count(self._budget.lose(member))
                failed.append((member, failure))
        return failed

    # --- interface of a source --------------------------------------------------------------------

    def block(self, want: int) -> Block:
        """Return at most ``want`` of the oldest transitions; wait for some if any will come."""
        self._grant()
        queue = self._queue
        while not queue.waiting and self._awaited and not signal_waits():
            self._receive()
            self._grant()
        if not (queue.waiting or self._awaited or self.dry):
            raise LedgerError(
                "expected a lease for the transitions that are still missing, got none"
            )
        return queue.block(want, self._emptied)

    def _emptied(self, segment: Segment, kept: bool) -> None:
        """Free ``segment``, which is empty, unless its rows are ``kept``."""
        self._queue.drop(segment)
        segment.release(kept)
        if not kept:
            self._hungry.add(segment.member)
            self._grant()

    @property
    def boards(self) -> list[Any]:
        """The board of each worker."""
        return [member.board for member in self._worker_pool.members]

    @property
    def carried(self) -> int:
        """Number of returned transitions that wait for the next block."""
        return self._queue.carried

    @contextmanager
    def still(self) -> Iterator[Sequence[UndeliveredTransitions]]:
        """Let workers end the steps in progress; they continue after the context."""
        out, failed = self._budget.out, self._settle()
        if not (self._stopping or self._budget.complete):
            self._worker_pool.go_on()
        for member, error in failed:
            with suppress(WorkerError):  # if it may not be replaced, the next block reports it
                self._replace(member, self._startup.allowed(error))
        yield self._queue.pending_transitions()
        if out:
            self._grant()

    @property
    def dry(self) -> bool:
        """True if no more transitions will come, because the run or its budget ended."""
        ends = self._stopping or self._budget.complete
        return ends and not self._budget.out and not self._queue.waiting

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Discard all transitions that are in no block.

        Lanes have no slot in common, so no rewards are summed.
        """
        self._settle()
        for segment in self._queue.segments:
            self._budget.return_random(segment)
            self._hungry.add(segment.member)
        lanes, none = self._queue.discard(), np.zeros(self._lanes)
        return DiscardedTransitions(self._queue.take_entry(), lanes, none, none.astype(np.bool_))

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before its next slot."""
        self._queue.waiting.clear()
        self._hungry.update(range(len(self._segments)))
        self._budget.begin(ledger, fresh=True)
        if not self._stopping:
            self._worker_pool.go_on()

    def recover(self, valid_slots: ValidSlots, most: int) -> Iterator[Block]:
        """Yield the returned segments after an error, up to each worker's first invalid slot."""
        self._stopping = True
        before = len(self._queue.waiting)
        self._queue.recount()
        self._settle()
        if self._missed:
            self._queue.discard_from(before)
        yield from self._queue.recover(valid_slots, most, self._emptied)

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return None, because the lanes are not known."""
        return None

    def go_on(self) -> None:
        """Do nothing: workers never paused."""

    def stop(self) -> None:
        """End after the steps in progress. Safe to call from a signal handler."""
        self._stopping = True
        self._worker_pool.halt()

    def _settle(self) -> list[tuple[Member, Exception]]:
        """Halt, and wait for all leases; return the workers that failed."""
        failed = []
        if self._budget.out:
            events = self._worker_pool.settle(patient=not self._stopping)
            failed = self._counted(
                [event for event in events if not self._startup.replacements.leads(event[0])]
            )
            for event in events:
                self._startup.replacements.handle_settled(*event)
        return failed

    @property
    def random_frames(self) -> int:
        """Number of transitions with random actions that are not leased yet."""
        return self._budget.random_frames

    @random_frames.setter
    def random_frames(self, count: int) -> None:
        self._budget.begin_at_random(count)

    def undelivered_random(self, openings: Openings) -> Counts:
        """Return the number of random actions that are leased, or returned but in no block yet."""
        if not openings.asked.any():
            return openings.left
        waiting = [self._budget.waiting_of(segment) for segment in self._queue.segments]
        found: Counts = np.sum([self._budget.drawing, *waiting], axis=0)
        return found
