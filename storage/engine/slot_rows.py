"""Rows of one slot of a slab, which one compiled call stores: see `Kernel.store_slot`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tallyroll.storage.engine.fixed_rows import FixedRows
from tallyroll.storage.files.commit_header import Place


@dataclass(eq=False)
class SlotRows:
    """The first rows of fixed memory, and the counts and the record that go with them.

    It keeps the tables of the plan, and the arrays of ``rows``, alive. The arrays of the other
    tables belong to the collector's slab, and to its state of the lanes.
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
    """The record with ``%d`` for each number: ``recorded``, the number of open trajectories, and
    ``next_id``."""
    recorded: tuple[Place, ...]
    counts: int
    """The index of the first count of the ledger in ``recorded``; the other counts follow it."""
    complete: int
    """The index of the count of complete episodes."""
    next_id: Place
    """The place of a number larger than any trajectory id."""
    amounts: bytes
    """The number that the slot adds to each count, int64; episodes are counted by the kernel, and
    the count of carried rows becomes 0."""
    ended: dict[str, Any] = field(default_factory=lambda: {"count": 0})
    """The ``"count"`` of episodes that ended and that the collector has not read yet."""
    columns: object = None
    """The columns of the storage for which the plan was made."""
    plan: tuple[Any, ...] = ()
    """The plan of `Kernel.store_slot`. No storage keeps it, because it refers to the collector."""
    is_small: bool = False
    """True if the rows go through a map of files whose pages are new."""

    def make_plan(self, table: bytes, header: bytes, numbers: tuple[Place, ...], ring: int) -> None:
        """Make the plan.

        Args:
            table: the table of `Kernel.copy_rows`.
            header: addresses of ``reserve``, of ``head``, and of both slots of records.
            numbers: places of head, reserve, the last record's sequence, and the commits.
            ring: slots of the ring; 0: the storage grows.
        """
        places = (*numbers, (self.ended, "count"), self.next_id, *self.recorded)
        before = len(numbers) + 2
        self.plan = (
            self.numbering,
            self.checks,
            self.carry,
            table,
            header,
            self.amounts,
            tuple(part for place in places for part in place),
            self.record,
            ring,
            before + self.counts,
            before + self.complete,
        )
