"""Rows of one slot of a slab, which one compiled call stores: see `Kernel.store_slot`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tallyroll.storage.engine.fixed_rows import FixedRows
from tallyroll.storage.engine.kernel import require_names, table_of
from tallyroll.storage.files.counts import Counts, counts_of

RunCounts = counts_of("next_id", "ended")
"""Counts of a collector's run beside those of its ledger.

``next_id`` is larger than any trajectory id, and ``ended`` the number of episodes that ended and
that the collector has not logged yet.
"""
require_names("RUN", RunCounts.names)


@dataclass(eq=False)
class SlotRows:
    """The first rows of fixed memory, and the counts and the record that go with them.

    It keeps the tables and the blocks of the plan, and the arrays of ``rows``, alive. The arrays of
    the other tables belong to the collector's slab, and to its state of the lanes.
    """

    rows: FixedRows
    count: int
    """The number of rows."""
    numbering: bytes
    """The table of `Kernel.number_slots`."""
    checks: bytes
    """The table of `Kernel.are_inside`."""
    carry: bytes
    """The address of the number of complete slots, which becomes 0; then a table of `copy_rows`
    that copies the values with which the next slot begins."""
    record: bytes
    """The record with ``%d`` for each number that the kernel writes: the incarnation, every count
    of the ledger, the number of open trajectories, and ``next_id``."""
    run: Counts
    """A block of `RunCounts`."""
    ledger: Counts
    """The block of the ledger's counts."""
    amounts: bytes
    """The number that the slot adds to each count of the ledger, int64; episodes are counted by the
    kernel, and the count of carried rows becomes 0."""
    columns: object = None
    """The columns of the storage for which the plan was made."""
    plan: tuple[Any, ...] = ()
    """The plan of `Kernel.store_slot`. No storage keeps it, because it refers to the collector."""
    commit: Counts | None = None
    """The block of the storage's counts, for which the plan was made."""
    is_small: bool = False
    """True if the rows go through a map of files whose pages are new."""

    def make_plan(self, table: bytes, header: bytes, commit: Counts, ring: int) -> None:
        """Make the plan.

        Args:
            table: the table of `Kernel.copy_rows`.
            header: addresses of ``reserve``, of ``head``, and of both slots of records.
            commit: the block of the storage's counts, which is kept alive.
            ring: slots of the ring; 0: the storage grows.
        """
        self.commit = commit
        blocks = table_of(block.address for block in (commit, self.run, self.ledger))
        tables = self.numbering, self.checks, self.carry, table, header, self.amounts, blocks
        self.plan = (*tables, self.record, ring)
