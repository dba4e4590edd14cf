"""Rows of one slot of a slab, which a single compiled call stores: see `Kernel.store_slot`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tallyroll.storage.engine.fixed_rows import FixedRows
from tallyroll.storage.files.commit_header import Place


@dataclass(eq=False)
class SlotRows:
    """The first rows of fixed memory, and what is to be counted and recorded with them."""

    rows: FixedRows
    count: int
    """So many rows."""
    numbering: bytes
    """As `Kernel.number_slots` wants it."""
    checks: bytes
    """As `Kernel.are_inside` wants it."""
    carry: bytes
    """The address of the number of complete slots, which becomes 0, and then as `copy_rows`: what
    the next slot begins with."""
    record: bytes
    """With a place ``%d`` for each number: ``recorded``, how many trajectories are open, and
    ``next_id``."""
    recorded: tuple[Place, ...]
    counts: int
    """Index of the first count of the ledger among these; all of them follow."""
    complete: int
    """Index of the count of complete episodes."""
    next_id: Place
    """Larger than any trajectory id."""
    amounts: bytes
    """What the slot adds to each count, but for episodes; the carried ones become 0. int64."""
    ended: dict[str, Any] = field(default_factory=lambda: {"count": 0})
    """The ``"count"`` of episodes that ended, and that nobody has taken note of."""
    columns: object = None
    """Those of a storage for which the plan was made."""
    plan: tuple[Any, ...] = ()
    """Of `Kernel.store_slot`. It is kept here, and by no storage: it knows of the collector."""
    is_small: bool = False
    """The rows go through a map of files that was not written to before."""

    def make_plan(self, table: bytes, header: bytes, numbers: tuple[Place, ...], ring: int) -> None:
        """Make the plan.

        Args:
            table: as `Kernel.copy_rows` wants it.
            header: addresses of ``reserve``, of ``head``, and of both slots of records.
            numbers: places of head, reserve, the last record's sequence, and of the commits.
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
