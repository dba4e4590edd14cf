"""Few slots, filled and stored when nothing else has to be done.

This does what a collector always does, in few lines and one compiled call. Between the steps of an
environment, and more so after a gradient step, the code has left the caches, and each line costs
several times more.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.layouts.small_batches import SmallBatches
from tallyroll.collector.compat import set_gradients
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.episode_ring import EpisodeRing
from tallyroll.collector.counting.ledger import COUNTS
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.native.kernel import require_names
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.few_slots import FewSlots
from tallyroll.collector.rollout.os_signals import deferred
from tallyroll.collector.slab.progress import FILLED
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.stores.row_writer import RowWriter

require_names("LEDGER", COUNTS)


@dataclass(frozen=True, slots=True)
class PlainSlots:
    """The objects by which the plain slots of a slab are filled and stored."""

    rows: SlotRows
    """Rows that were made for this ``state``, ``eased`` and ``seed``."""
    few: FewSlots
    writer: RowWriter
    reader: FileReader
    """The reader of the storage; it has no engine after the storage was closed."""
    episodes: EpisodeLog
    ring: EpisodeRing
    """The ring in which ``rows`` note episodes, which ``episodes`` takes from there."""
    acting: Acting
    state: LaneState
    eased: int
    seed: int | None
    masks: Callable[[int], bool] | None
    """A check of all masks of legal actions in slots; None: there are none to check."""
    batches: SmallBatches | None
    """The maker of batches that are yielded; None: rows are stored alone."""

    def was_made_for(self, state: LaneState, eased: int, seed: int | None) -> bool:
        """Return whether ``rows`` were made for these values."""
        return state is self.state and (eased, seed) == (self.eased, self.seed)

    def fill(self, want: int) -> None:
        """Step all lanes until ``want`` rows are there; a signal's handler may raise at any point.

        The caller raises an exception again within the run's guard, which leaves ``acting`` too.
        """
        acting = self.acting  # not by `with`: that is two calls more
        before = acting.before = torch.is_grad_enabled(), acting.place.get()
        try:
            set_gradients(False)
            acting.place.put(acting.exploration)
            self.few.fill(want)
        finally:
            set_gradients(before[0])
            acting.place.put(before[1])
            acting.before = None

    def store(self, want: int, finals: FinalsWatch, batch: Any = None) -> bool:
        """Check, number, count and store ``want`` rows; False, with nothing done, if refused.

        An empty ``batch`` of `SmallBatches` is filled with them, and they are stored lane by lane.
        """
        few, rows, append = self.few, self.rows, self.writer.append
        used = few.board[FILLED]
        if few.has_rounded or not few.sound or (self.masks is not None and not self.masks(used)):
            return False
        rows.used, rows.count = used, want
        rows.version, rows.watched, rows.batch = few.version, finals.looks, batch
        if self.writer.tell is None:
            stored = append(rows)
        else:
            with deferred():  # replay buffers hear of all rows that are stored
                stored = append(rows)
        if self.ring.counts.due:
            self.episodes.take()
        return bool(stored)
