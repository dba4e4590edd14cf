"""The source of a collector whose workers never wait for one another (``mode="async"``)."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import LedgerError, WorkerError
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.rollout.os_signals import pausable, waits
from tallyroll.collector.rollout.source import (
    Block,
    DiscardedTransitions,
    PendingTransitions,
    Sound,
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


class LeasedAtRandom:
    """A part of `Leases`, which says how many random actions are not in blocks."""

    _budget: LeaseBudget
    _queue: SegmentQueue

    @property
    def random_frames(self) -> int:
        """Transitions with random actions that are not leased yet."""
        return self._budget.random_frames

    @random_frames.setter
    def random_frames(self, count: int) -> None:
        self._budget.random_frames = count

    def drawn_ahead(self, openings: Openings) -> Counts:
        """Return how many random actions are leased, or came back and are in no block."""
        if not openings.asked.any():
            return openings.left
        waiting = [self._budget.waiting_of(segment) for segment in self._queue.segments]
        found: Counts = np.sum([self._budget.drawing, *waiting], axis=0)
        return found


class _Woken(BaseException):
    """A signal's handler waits; raised and caught around the wait for workers alone."""


def _wake() -> None:
    raise _Woken


class Leases(LeasedAtRandom):
    """Sends leases to workers, and gives what comes back in blocks.

    Args:
        pool: the workers.
        startup: replaces one that failed.
        place: where their segments lie.
        share: who has which lanes.
        budget: makes the leases.
    """

    paused = False
    """Workers do not wait for each other."""

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
        """Workers that may have a segment which is free."""
        self._stopping = False
        self._missed = False
        """True if an exception came between an answer and its count: what follows has a gap."""

    # --- leases -----------------------------------------------------------------------------------

    def _grant(self) -> None:
        """Give leases for all segments that are free, while there is a budget."""
        if self._stopping or self._budget.complete or self._budget.spent:
            return
        for _ in self._segments[0]:  # one each, then another: no worker is left without
            for index in sorted(self._hungry):
                member = self._worker_pool.members[index]
                if not member.ready and member.failed is None:
                    continue  # it comes in the place of another
                if self._worker_pool.central is not None and member.asked:
                    continue  # before it has answered, it is asked nothing but what is chosen
                free = [segment for segment in self._segments[index] if segment.free]
                if not free:
                    self._hungry.discard(index)
                elif (lease := self._budget.lease(member, free[0])) is not None:
                    self._worker_pool.ask(member, lease)

    @property
    def _awaited(self) -> bool:
        """Leases will come back, or there will be a worker to give one to."""
        return self._budget.out or (
            self._startup.replacements.under_way and not (self._stopping or self._budget.complete)
        )

    def _hear(self) -> None:
        """Wait for leases to come back, and replace workers that failed."""
        try:
            events = self._worker_pool.events(during=pausable(_wake))
            others = [event for event in events if not self._startup.replacements.leads(event[0])]
            failed = self._counted(others)
        except _Woken:
            return
        except BaseException:
            self._missed = True
            self._queue.recount()
            raise
        try:  # once all is counted: the first may be the end
            for member, answer in events:
                self._startup.replacements.hears(member, answer)
            for member, error in failed:
                self._replace(member, self._startup.allowed(error))
        except BaseException:
            self.stop()
            raise

    def _replace(self, member: Member, error: Exception) -> None:
        """Cut the lanes of a worker that failed, and start another one if any is to step on."""
        self._queue.waiting.append(member.lanes)
        if not (self._stopping or self._budget.complete):
            self._startup.replace(member, error, None)

    def _counted(self, events: Iterable[Event]) -> list[tuple[Member, Exception]]:
        """Count what came back or is lost; returns workers that failed."""
        failed = []
        for member, answer in events:
            self._hungry.add(member.index)
            failure = None if isinstance(answer, m.LeaseResult) else answer
            filled, member.complete = member.complete if failure else answer, None
            if filled is not None:
                self._queue.came(self._budget.take_back(member, filled), filled.entry)
                if self._budget.complete:
                    self._worker_pool.halt()
            if failure is not None:
                self._queue.count(self._budget.lose(member))
                failed.append((member, failure))
        return failed

    # --- blocks, as a collector takes them --------------------------------------------------------

    def block(self, want: int) -> Block:
        """At most ``want`` transitions of what came first; waits for some, if any will come."""
        self._grant()
        queue = self._queue
        while not queue.waiting and self._awaited and not waits():
            self._hear()
            self._grant()
        if not (queue.waiting or self._awaited or self.dry):
            raise LedgerError("transitions are wanted, and no lease is left to bring them")
        return queue.block(want, self._emptied)

    def _emptied(self, segment: Segment, kept: bool) -> None:
        """All of ``segment`` was taken; it may be filled again unless its rows are ``kept``."""
        self._queue.drop(segment)
        segment.kept, segment.free = kept, not kept
        if not kept:
            self._hungry.add(segment.member)
            self._grant()

    @property
    def boards(self) -> list[Any]:
        """The words of each worker."""
        return [member.board for member in self._worker_pool.members]

    @property
    def held(self) -> int:
        """Transitions that came back and wait for the next block."""
        return self._queue.held

    @contextmanager
    def still(self) -> Iterator[Sequence[PendingTransitions]]:
        """Let workers end the steps under way; they go on after the context."""
        out, failed = self._budget.out, self._settle()
        if not (self._stopping or self._budget.complete):
            self._worker_pool.go_on()
        for member, error in failed:
            with suppress(WorkerError):  # it may not be replaced: the next block says so
                self._replace(member, self._startup.allowed(error))
        yield self._queue.all_held()
        if out:
            self._grant()

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""
        ends = self._stopping or self._budget.complete
        return ends and not self._budget.out and not self._queue.waiting

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Throw away all that no block gave. Lanes have no slot in common: nothing is summed up."""
        self._settle()
        for segment in self._queue.segments:
            self._budget.take_back_random(segment)
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

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: all that came back, each worker's as far as it is ``sound``."""
        self._stopping = True
        before = len(self._queue.waiting)
        self._queue.recount()
        self._settle()
        if self._missed:
            self._queue.discard_from(before)
        yield from self._queue.salvage(sound, most, self._emptied)

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return None: it is not known whose lanes they were."""
        return None

    def go_on(self) -> None:
        """Do nothing: workers never paused."""

    def stop(self) -> None:
        """End after the steps under way. Safe to call from a signal handler."""
        self._stopping = True
        self._worker_pool.halt()

    def _settle(self) -> list[tuple[Member, Exception]]:
        """Halt, and hear of all leases; return workers that failed."""
        failed = []
        if self._budget.out:
            events = self._worker_pool.settle(patient=not self._stopping)
            failed = self._counted(
                [event for event in events if not self._startup.replacements.leads(event[0])]
            )
            for event in events:
                self._startup.replacements.hears_settled(*event)
        return failed
