"""Rows of one slot of a slab, which one compiled call stores: see `Kernel.store_slot`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from tallyroll.storage.engine.columns import Columns
from tallyroll.storage.engine.fixed_rows import FixedRows
from tallyroll.storage.engine.kernel import require_names, table_of
from tallyroll.storage.engine.new_rows import NewRows
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.counts import Counts, counts_of

RunCounts = counts_of("next_id", "ended")
"""Counts of a collector's run beside those of its ledger.

``next_id`` is larger than any trajectory id, and ``ended`` the number of episodes that ended and
that the collector has not logged yet.
"""
require_names("RUN", RunCounts.names)


@dataclass(eq=False)
class SlotRows(NewRows):
    """The first rows of fixed memory, and the counts and the record that go with them.

    One call numbers, counts and commits them, and makes the slab ready for the next slot. What
    takes more calls is left to the collector, which has the same rows as `IndexedRows` then.

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
    version: int = 0
    """The version of the policy that chose the actions."""
    watched: bool = True
    """True if the collector must see the slot first, if an episode begins or ends in it."""
    in_one_call = only_in_one_call = True
    _columns: Columns | None = None
    """The columns of the storage for which the plan was made."""
    _known: Counts | None = None
    """The block of the storage's counts, which the plan refers to."""
    _plan: tuple[Any, ...] = ()
    """The plan of `Kernel.store_slot`. No storage keeps it, because it refers to the collector."""

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Number, count and commit the slot with its own record; see `Kernel.store_slot`."""
        if self._columns is not columns:
            self._make_plan(columns, header)
        # No handler of a signal, which might close the storage, runs between these two lines.
        kernel = columns.one_call
        return kernel is not None and (
            kernel.store_slot(self._plan, columns.room, self.version, self.watched) >= 0
        )

    def _make_plan(self, columns: Columns, header: Header) -> None:
        blocks = table_of(block.address for block in (header.known, self.run, self.ledger))
        tables = self.numbering, self.checks, self.carry, columns.table_of(self.rows)
        places = header.addresses, self.amounts, blocks
        self._plan = (*tables, *places, self.record, header.ring)
        self._known, self._columns = header.known, columns

    def copy_to(self, columns: Columns, slot: int) -> NoReturn:
        """Refuse: the rows have no numbers yet."""
        raise NotImplementedError

    def as_arrays(self) -> NoReturn:
        """Refuse: the rows have no numbers yet."""
        raise NotImplementedError
