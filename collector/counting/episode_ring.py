"""A ring that passes finished episodes from the extension to the log."""

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.native.kernel import require_names
from tallyroll.collector.native.slot_rows import LogCounts

EPISODE = np.dtype(
    [
        ("traj_id", np.int64),
        ("lane", np.int32),
        ("return", np.float64),
        ("length", np.int64),
        ("terminated", np.bool_),
        ("first_version", np.int64),
        ("last_version", np.int64),
        ("ended_at", np.int64),
    ]
)
"""The fields of an episode. Until its rows are counted, ``ended_at`` counts within their block."""
require_names("EPISODE", EPISODE.names or ())

LEAST_ROOM = 256
"""The minimum number of records in a ring; more would evict other memory from CPU caches."""


class EpisodeRing:
    """A ring to which `StepKernel.store_slots` writes records.

    Args:
        most: the maximum number of episodes that end in a call; the ring has room for twice as
            many.
    """

    def __init__(self, most: int) -> None:
        self.counts = LogCounts()
        """The numbers of records that the extension has written and that the log has taken."""
        room = max(2 * most, LEAST_ROOM)
        self._records: NDArray[np.void] = np.zeros(room, EPISODE)
        self.counts.room, self.counts.records = room, self._records.ctypes.data

    def free(self, taken: int) -> None:
        """Let the extension overwrite the first ``taken`` records, which the log has."""
        self.counts.taken = taken

    def since(self, taken: int) -> NDArray[np.void]:
        """Return copies of the records after the first ``taken`` ones, in their order."""
        nth = np.arange(taken, self.counts.noted)
        return self._records[nth % len(self._records)]
