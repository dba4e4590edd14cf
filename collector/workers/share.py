"""The part of the run that each worker has: lanes, and slots of slabs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """The share of lanes, slabs and memory that each worker has."""

    lanes: tuple[int, ...]
    """Lanes of each worker."""
    slots: int
    """Slots of a slab, or of a segment."""
    segments: int
    """Segments of each worker's own slab; 0: one slab for all."""
    first_lane: int = 0
    """The number of the first of these lanes in the run, which may have others."""
    run_lanes: int | None = None
    """Lanes of the run; None: they are these."""

    def of(self, worker: int) -> range:
        """The lanes of a worker, numbered over all that are made here."""
        first = sum(self.lanes[:worker])
        return range(first, first + self.lanes[worker])

    @property
    def stride(self) -> int:
        """Slots from one segment's first to the next's.

        One more than are filled: what follows on a segment's last slot may be written while the
        next segment is still read.
        """
        return self.slots + 1

    @property
    def total(self) -> int:
        """Lanes that are made here."""
        return sum(self.lanes)

    @property
    def of_run(self) -> int:
        """Lanes of the run."""
        return self.total if self.run_lanes is None else self.run_lanes


def evenly(total: int, parts: int) -> Sequence[int]:
    """``total`` in ``parts`` parts that differ by at most one, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
