"""The last rows of a run, if they do not fill an item of a TorchRL replay buffer."""

import numpy as np

from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.batches.stored.buffer_items import warn_of_cut_item
from tallyroll.collector.counting.ledger import LedgerEntry
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import ItemsDiffer
from tallyroll.storage.rows.keys import DONE, STEP, TRAJ_IDS


class CutItems:
    """Discards last rows that do not fill an item, and warns about them when the run is over."""

    def __init__(self) -> None:
        self._count = 0
        """Number of discarded transitions, which did not fill an item."""
        self._why: ItemsDiffer | None = None

    def discard(
        self, part: ArrayBatch | SlabBatch, state: LaneState, error: ItemsDiffer
    ) -> LedgerEntry:
        """Return the changes of the ledger's counts if the rows of ``part`` are discarded.

        ``error`` has the reason why the rows do not fill an item.
        """
        ids = part.array(TRAJ_IDS)
        begun, ended = ids[part.array(STEP) == 0], ids[part.array(DONE).reshape(-1)]
        cut = len(np.setdiff1d(ended, begun))  # open trajectories are cut at the end,
        state.cut(np.isin(state.traj_id, begun))  # except these, which have no rows
        self._count, self._why = self._count + len(part), error
        return LedgerEntry(discarded=len(part), episodes_cut=cut)

    def warn(self) -> None:
        """Warn once about the discarded rows."""
        if self._why is not None:
            why, self._why = self._why, None
            warn_of_cut_item(
                self._count,
                "are discarded, because they do not fill an item of the replay buffer",
                why,
            )
