"""Lease the budget of a run to workers that keep their rows in shards.

`ShardedLeases` replaces `Leases` and the loop that assembles batches, because no row reaches this
process. A worker stores exactly the transitions of a lease in its shard and answers with counts.
The counts take effect once the storage has recorded them, in one line for all answers that arrived
together.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import add, attrgetter
from typing import NoReturn, Self

from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.batches.stored.storing_plan import StoringPlan
from tallyroll.collector.batches.stored.worker_shard import (
    FindShards,
    FoundShards,
    OpenShard,
    ShardCommit,
)
from tallyroll.collector.counting.ledger import NOTHING, LedgerEntry, post
from tallyroll.collector.counting.shards import first_id
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.interrupts import call_waiting, pause_on_signal, signal_waits
from tallyroll.collector.rollout.source import UndeliveredTransitions
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.progress import COUNTED, LEASE, counted_in
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.member import Member
from tallyroll.collector.workers.pool import Event, WorkerPool
from tallyroll.collector.workers.startup.worker_startup import WorkerStartup
from tallyroll.storage.ext.sharded.acknowledged_rows import SUMS, ShardRows
from tallyroll.storage.ext.sharded.sharded_storage import ShardedStorage
from tallyroll.storage.ext.sharded.sink import ShardedWriter

_sums_of = attrgetter(*SUMS)
_LEASES = 2
"""Leases that a worker holds at once. With two, it never waits for this process."""


class _ShardsWoken(BaseException):
    """Exception that interrupts the wait for workers because a signal handler is pending.

    `_wake` raises it, and only `_receive` catches it.
    """


def _wake() -> None:
    raise _ShardsWoken


@dataclass
class _Part:
    """A shard and its counts. Each start of a worker begins a new shard."""

    name: str
    leased: deque[m.Lease] = field(default_factory=deque)
    """Leases without an answer so far."""
    held: int = 0
    open: int = 0
    sums: tuple[int, ...] = (0,) * len(SUMS)
    """The worker's share of the counts that are sums over rows."""


class GoesOnFromStorage:
    """Replacement for `Restart` that raises: a sharded run resumes only from its storage."""

    loads: tuple[int, ...] = ()

    def __getattr__(self, name: str) -> NoReturn:
        raise StateError(
            "sharded=True: the only state of the run is its storage. Continue the run with "
            "resume=True."
        )


class ShardedLeases:
    """Leases of exact numbers of transitions to workers, and a record of what they store.

    Args:
        pool: the workers.
        startup: replaces a worker that failed.
        storage: the sharded storage, whose writer records the transitions that count.
        frames: largest number of transitions in a lease.
    """

    fast_collect = None
    counts = Decision("by workers", "they keep their rows")

    def __init__(
        self, pool: WorkerPool, startup: WorkerStartup, storage: object, frames: int
    ) -> None:
        self._worker_pool, self._startup = pool, startup
        self._sink, self._frames = _writer_of(storage), frames
        self._parts: dict[int, _Part] = {}
        """The shard of each worker that has one, by worker index."""
        self._unleased = self._numbered = self._size = 0
        # Keep running sums over all workers, because there may be a thousand of them.
        self._out = self._open = 0
        self.held = 0
        """Transitions that workers hold until the next lease."""
        self._hungry = {*range(len(pool.members))}
        """Workers that may accept another lease."""
        self._stopping = False
        self._committed: Callable[[], object] | None = None
        here = Decision("in shards", "workers keep their rows")
        self.plan = StoringPlan(here, Decision("none", "rows stay where they are"), here, here)

    def run_loop_of(self, run: RunState) -> Self:
        """Bind the run and return this object, which is also the run's loop."""
        self._run = run
        return self

    def call_after_commits(self, committed: Callable[[], object]) -> None:
        """Call ``committed`` after answers of workers were counted."""
        self._committed = committed

    # --- leases -----------------------------------------------------------------------------------

    def collect(self, want: int) -> None:
        """Store ``want`` more transitions, or fewer if the run ends first."""
        run, ledger = self._run, self._run.ledger
        run.writer.stored_run.require_open()
        if not run.writer.stored_run.begun:
            run.reach_safe_point()  # after a refusal the run may still begin later
            run.writer.stored_run.begin(run.provenance)
            run.leave_safe_point()
        goal = ledger.stored + run.budget.batch(run.counted, want)
        self._unleased = goal - ledger.stored
        # Keep leases small enough that each worker gets one, whatever the largest size.
        each = -(-self._unleased // len(self._worker_pool.members))
        self._size = min(self._frames, each)
        self._grant()
        while ledger.stored < goal and self._awaited:
            self._receive()
            self._grant()
            if self._committed is not None:
                self._committed()
            if signal_waits():
                run.reach_safe_point()
                call_waiting()
                run.leave_safe_point()
        if (run.budget.total is not None and run.met) or ledger.stored < goal:
            self.finish()

    @property
    def _awaited(self) -> bool:
        """True while leases are out, or while a replacement worker is starting."""
        return self._out > 0 or (not self._stopping and self._startup.replacements.under_way)

    def _grant(self) -> None:
        """Give leases to the workers that can accept one, while budget remains."""
        for _ in range(_LEASES):  # one each, then a second, so that no worker is left out
            if self._stopping or not self._unleased:
                return
            for index in sorted(self._hungry):
                member = self._worker_pool.members[index]
                if not member.ready or member.failed is not None:
                    continue  # it is being replaced
                part = self._parts.get(index) or self._begin(member)
                if len(part.leased) == _LEASES:
                    self._hungry.discard(index)
                elif self._unleased:
                    self._lease(member, part)

    def _lease(self, member: Member, part: _Part) -> None:
        frames = min(self._size, self._unleased)
        self._numbered += 1
        lease = m.Lease(self._numbered, 0, frames, (0,), 0, False, False)
        self._unleased -= frames
        self._out += 1
        part.leased.append(lease)
        self._worker_pool.ask(member, lease)

    def _begin(self, member: Member) -> _Part:
        """Tell a worker to begin a shard."""
        run = self._run
        part = self._parts[member.index] = _Part(self._sink.new_shard())
        lanes = len(run.lanes.step)
        # All ids that count are below ``first``, and each lane has its own remainder.
        first = first_id(run.writer.stored_run.counts.next_id, lanes)
        path = str(self._sink.files.place_of(part.name))
        how = self._sink.stores_once, self._sink.stacks
        own = OpenShard(path, member.lanes, lanes, first, run.provenance, *how)
        self._worker_pool.ask(member, own)
        return part

    def _receive(self) -> None:
        """Wait for answers, record the counts, and replace workers that failed."""
        try:
            events = self._worker_pool.events(during=pause_on_signal(_wake))
        except _ShardsWoken:
            return
        others = [event for event in events if not self._startup.replacements.leads(event[0])]
        failed = self._counted(others)
        try:  # after counting, because the first call may end the run
            for member, answer in events:
                self._startup.replacements.handle(member, answer)
            for member, error in failed:
                allowed = self._startup.allowed(error)
                if self._unleased and not self._stopping:
                    self._startup.replace(member, allowed, None)
        except BaseException:
            self.stop()
            raise

    def _counted(self, events: Iterable[Event]) -> list[tuple[Member, Exception]]:
        """Count stored and lost transitions, and return the workers that failed."""
        failed, kept = [], []
        for member, answer in events:
            self._hungry.add(member.index)
            if isinstance(answer, ShardCommit):
                kept.append((member, answer))
            elif isinstance(answer, Exception):
                failed.append((member, answer))
        if kept:
            self._acknowledge(kept)
        for member, _ in failed:
            post(self._run.ledger, self._lost(member))
        self._run.ledger.balance(self.held)
        self._run.ledger.publish()
        return failed

    def _acknowledge(self, kept: Sequence[tuple[Member, ShardCommit]]) -> None:
        """Record whole leases of rows in the storage, so that they count."""
        run, stored_run, entry = self._run, self._run.writer.stored_run, NOTHING
        before, rows = run.ledger.stored, dict[str, ShardRows]()
        for member, answer in kept:
            part = self._parts[member.index]
            self._unleased += part.leased.popleft().frames - answer.entry.stored
            self._out -= 1
            self._holds(part, answer.held, answer.open)
            part.sums = tuple(map(add, part.sums, _sums_of(answer.entry)))
            entry = entry.plus(answer.entry)
            stored_run.count_ids(answer.next_id - 1)
            if answer.rows:
                # Report all rows of the shard, because a settled worker may answer several leases.
                kept_rows = ShardRows(part.name, answer.host, answer.id, answer.rows, part.sums)
                rows[part.name] = kept_rows
        post(run.ledger, entry)
        try:
            run.ledger.balance(self.held)
            record = stored_run.record(run.ledger, self._open)
            self._sink.acknowledge(
                [*rows.values()], record, max(answer.version for _, answer in kept)
            )
        except BaseException:
            # The rows do not count, so their executed transitions are lost.
            post(run.ledger, LedgerEntry(stored=-entry.stored, lost=entry.stored))
            raise
        for _, answer in kept:
            run.episodes.extend(answer.episodes, before)
            before += answer.entry.stored

    def _lost(self, member: Member) -> LedgerEntry:
        """Return a failed worker's leases to the budget.

        Returns:
            An entry for the transitions that the worker had executed, which are lost.
        """
        part = self._parts.pop(member.index, None)
        if part is None:
            return NOTHING
        self._unleased += sum(lease.frames for lease in part.leased)
        self._out -= len(part.leased)
        executed = 0
        if part.leased and member.board[LEASE] == part.leased[0].number:
            executed = counted_in(member.board[COUNTED])[1]
        lost, cut = part.held + executed, part.open
        self._holds(part, 0, 0)
        return LedgerEntry(executed, executed, lost=lost, episodes_cut=cut)

    def _holds(self, part: _Part, held: int, open: int) -> None:
        """Record the transitions held and the trajectories open in a worker."""
        self.held += held - part.held
        self._open += open - part.open
        part.held, part.open = held, open

    # --- end of the run ---------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run after the steps in progress. Safe to call from a signal handler."""
        self._stopping = True
        self._worker_pool.halt()

    def end(self) -> None:
        """End the run at the caller's request."""
        self.finish()

    def finish(self) -> None:
        """End the run: await the answers to all leases, and cut the open trajectories."""
        run = self._run
        run.end()
        self.stop()
        if self._out:
            events = self._worker_pool.settle()
            self._counted(
                [event for event in events if not self._startup.replacements.leads(event[0])]
            )
        held, cut, self.held, self._open = self.held, self._open, 0, 0
        self._parts.clear()
        post(run.ledger, LedgerEntry(discarded=held, episodes_cut=cut))
        run.ledger.balance(0)
        run.ledger.publish()
        run.writer.finish(run.ledger, held)

    # --- refused calls, which need rows; the run continues ---------------------------------------

    def batch(self, size: int | None = None) -> NoReturn:
        """Refuse: this process has no rows."""
        self._refuse(
            "rows stay in the shards, so the collector yields no batches. Call collect(n), and "
            "read the rows from the storage."
        )

    def discard(self, *_: object) -> None:
        """Do nothing: `restart_lanes`, which the caller calls next, refuses."""

    def restart_lanes(self, *_: object) -> NoReturn:
        """Refuse: workers number their rows."""
        self._refuse(
            "workers number their rows, so lanes cannot be restarted. Pass seed= to a new "
            "collector."
        )

    @contextmanager
    def still(self) -> Iterator[Sequence[UndeliveredTransitions]]:
        """Refuse: an environment call cannot be ordered among the rows of several shards."""
        self._refuse("calls of environments cannot be ordered among the rows of several shards")
        yield ()

    def leave(self) -> None:
        """Do nothing: no policy acts in this process."""

    def _refuse(self, why: str) -> NoReturn:
        self._run.reach_safe_point()  # the run continues
        raise ArgumentError(f"sharded=True: {why}")


def lost_since(startup: WorkerStartup, storage: object) -> list[str]:
    """Remove the shard rows that no node has any more from the acknowledged rows and the counts.

    Returns:
        Descriptions of the lost rows.
    """
    sink = _writer_of(storage)
    names = {
        str(sink.files.place_of(each.name)): each.name
        for each in sink.reader.acknowledged.shards
        if each.rows
    }
    if not names:
        return []
    answers: list[FoundShards] = startup.ask_all(FindShards([*names]))
    return sink.lose_missing(
        (names[path], *found) for answer in answers for path, found in answer.shards.items()
    )


def _writer_of(storage: object) -> ShardedWriter:
    assert isinstance(storage, ShardedStorage)
    return storage.writer
