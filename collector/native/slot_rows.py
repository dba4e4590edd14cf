"""Rows of a few slots of a slab, stored by one compiled call; see `StepKernel.store_slots`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tallyroll.collector.native.kernel import StepKernel, compiled, in_order, require_names
from tallyroll.storage.engine.columns import Columns, FixedRows, NewRows
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.counts import Counts, counts_of

RunCounts = counts_of("next_id")
"""Counts of a run in addition to its ledger: ``next_id`` is larger than any trajectory id."""
require_names("RUN", RunCounts.names)
LogCounts = counts_of("noted", "taken", "room", "records", "due")
"""Counts of a ring of episode records.

``noted`` is the number of records written, and ``taken`` is the number of those that the collector
has taken. ``room`` is the capacity of the ring, and ``records`` is its address. ``due`` is 1 if
more than half of the ring is full, so that the collector should take the records.
"""
require_names("LOG", LogCounts.names)
HeldCounts = counts_of("rows", "resets")
"""The number of rows that an earlier call left in slot 0, and of lanes that are reset next."""
require_names("HELD", HeldCounts.names)


SlotBatch = tuple[bytes, Any, Any]
"""An empty batch: its table, the addresses of its columns, and its TensorDict."""


@dataclass(eq=False)
class SlotRows(NewRows):
    """The first rows of fixed memory, with the counts and the record that belong to them.

    One call finds, numbers, counts and commits the rows, and prepares the slab for the next slots.
    If that is not possible, the collector stores the same rows as `IndexedRows`.

    This object keeps alive the tables and blocks of the plan, and the arrays of ``rows``. The
    arrays of the other tables belong to the slab and the lane state of the collector.
    """

    rows: FixedRows
    numbering: bytes
    """The table of `StepKernel.number_slots`."""
    checks: bytes
    """The table of `StepKernel.are_inside`."""
    slab: bytes
    """Addresses in the slab, and sizes.

    The words are the addresses of the number of complete slots, of the marks of held rows [lane],
    of the marks of transitions [slot, lane], and of the marks of lanes that are reset next [lane]
    (0 if there are no reset slots); 1 if a policy chose the actions, or else 0; and the number of
    columns that flow, in which the next observations follow the observations of a slot. Then come
    the address and the bytes per slot of each column that flows, and of each other column.
    """
    record: bytes
    """The record with ``%d`` for each number that the kernel writes.

    The numbers are the incarnation, every count of the ledger, the number of open trajectories, and
    ``next_id``.
    """
    run: Counts
    """A block of `RunCounts`."""
    ledger: Counts
    """The block of the ledger's counts."""
    shown: Counts
    """A copy of the ledger's counts for other threads, updated once a call has counted all rows."""
    held: Counts
    """A block of `HeldCounts`."""
    log: Counts
    """A block of `LogCounts`; the caller keeps the ring itself alive."""
    amounts: bytes
    """The numbers that a row adds to the counts of the ledger, int64.

    The kernel counts slots, resets, episodes and carried rows itself. After the numbers come the
    address and the bytes per row of each mask of agents, whose marks are agent transitions.
    """
    count: int = 0
    """The number of rows."""
    used: int = 1
    """The number of complete slots."""
    version: int = 0
    """The version of the policy that chose the actions of the last slot."""
    watched: bool = True
    """True if the collector must see rows before they are stored if an episode begins or ends."""
    batch: SlotBatch | None = None
    """The batch to lay out from the rows, which are then stored lane by lane; or None."""
    in_one_call = True
    _columns: Columns | None = None
    """The columns of the storage for which the plan was made."""
    _kernel: StepKernel | None = None
    _known: Counts | None = None
    """The block of the storage's counts to which the plan refers."""
    _plan: tuple[Any, ...] = ()
    """The plan of `StepKernel.store_slots`. It refers to the collector, so no storage keeps it."""

    def select(
        self, used: int, count: int, version: int, watched: bool, batch: SlotBatch | None
    ) -> None:
        """Choose the rows of the next commit; each argument sets the attribute of the same name."""
        self.used, self.count, self.version = used, count, version
        self.watched, self.batch = watched, batch

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Number, count and commit the rows with their own record; see `StepKernel.store_slots`."""
        if self._columns is not columns:
            self._make_plan(columns, header)
        # No signal handler, which might close the storage, runs between these two lines.
        kernel = None if columns.one_call is None else self._kernel
        if kernel is None:
            return False
        used, count, room, version = self.used, self.count, columns.room, self.version
        watched, batch = self.watched, self.batch
        return kernel.store_slots(self._plan, used, count, room, version, watched, batch) >= 0

    def _make_plan(self, columns: Columns, header: Header) -> None:
        self._kernel = compiled()
        blocks = in_order(
            "BLOCKS",
            commit=header.known.words,
            run=self.run.words,
            ledger=self.ledger.words,
            held=self.held.words,
            log=self.log.words,
            shown=self.shown.words,
        )
        parts: dict[str, Any] = {
            "numbering": self.numbering,
            "checks": self.checks,
            "slab": self.slab,
            "columns": columns.table_of(self.rows),
            "header": header.addresses,
            "amounts": self.amounts,
            "blocks": table_of(blocks),
            "record": self.record,
            "ring": header.ring,
        }
        self._plan = tuple(in_order("PLAN", **parts))
        self._known, self._columns = header.known, columns
