"""Each worker's share of the run: lanes and slots of slabs."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Each worker's share of lanes, slabs and memory."""

    lanes: tuple[int, ...]
    """Number of lanes of each worker."""
    slots: int
    """Slots of a slab, or of a segment."""
    segments: int
    """Number of segments of each worker's own slab; 0 if all workers share one slab."""
    first_lane: int = 0
    """Number in the run of the first of these lanes; the run may have other lanes."""
    run_lanes: int | None = None
    """Number of lanes of the run; None if the run has only these lanes."""

    def of(self, worker: int) -> range:
        """Return the lanes of a worker, numbered over the lanes of all workers."""
        first = sum(self.lanes[:worker])
        return range(first, first + self.lanes[worker])

    @property
    def stride(self) -> int:
        """Number of slots from the first slot of one segment to the first slot of the next.

        One more than a segment fills: the observation after a segment's last slot may be written
        while the next segment is still read.
        """
        return self.slots + 1

    @property
    def total(self) -> int:
        """Number of lanes of all workers."""
        return sum(self.lanes)

    @property
    def of_run(self) -> int:
        """Number of lanes of the run."""
        return self.total if self.run_lanes is None else self.run_lanes


def split_evenly(total: int, parts: int) -> Sequence[int]:
    """Divide ``total`` into ``parts`` parts that differ by at most one, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
