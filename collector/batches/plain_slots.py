"""Single slots of all lanes, filled and stored when nothing else has to be done.

This does what a collector always does, in few lines and one compiled call. Between the steps of an
environment, and more so after a gradient step, the code has left the caches, and each line costs
several times more.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tallyroll.collector.batches.checks.final_observations import FinalsWatch
from tallyroll.collector.batches.rows.compiled_rows import CompiledRows
from tallyroll.collector.compat import set_gradients
from tallyroll.collector.counting.episode_log import EpisodeLog
from tallyroll.collector.counting.ledger import COUNTS, LedgerEntry
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.policies.acting import Acting
from tallyroll.collector.rollout.os_signals import deferred
from tallyroll.collector.rollout.source import Again
from tallyroll.storage.engine.kernel import require_names
from tallyroll.storage.engine.slot_rows import SlotRows
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.stores.row_writer import RowWriter

require_names("LEDGER", COUNTS)


@dataclass(frozen=True, slots=True)
class PlainSlots:
    """The objects by which the plain slots of a slab are filled, stored and logged."""

    table: CompiledRows
    slot: SlotRows
    again: Again
    writer: RowWriter
    reader: FileReader
    """The reader of the storage; it has no engine after the storage was closed."""
    episodes: EpisodeLog
    acting: Acting
    entry: LedgerEntry
    """Counts of each slot. ``slot`` was made for this entry, ``state``, ``eased`` and ``seed``."""
    state: LaneState
    eased: int
    seed: int | None
    masks: Callable[[], bool] | None
    """A check of all masks of legal actions; None: there are none to check."""

    def was_made_for(
        self, entry: LedgerEntry, state: LaneState, eased: int, seed: int | None
    ) -> bool:
        """Return whether ``slot`` was made for these values."""
        same = entry is self.entry and state is self.state
        return same and (eased, seed) == (self.eased, self.seed)

    def fill(self) -> None:
        """Step all lanes; a signal's handler may raise at any point.

        The caller raises an exception again within the run's guard, which leaves ``acting`` too.
        """
        acting = self.acting  # not by `with`: that is two calls more
        before = acting.before = torch.is_grad_enabled(), acting.place.get()
        try:
            set_gradients(False)
            acting.place.put(acting.exploration)
            self.again.fill()
        finally:
            set_gradients(before[0])
            acting.place.put(before[1])
            acting.before = None

    def store(self, finals: FinalsWatch) -> bool:
        """Check, number, count and store the filled slot; False, with nothing done, if refused."""
        if self.masks is not None and not self.masks():
            return False
        slot, append = self.slot, self.writer.append
        slot.version, slot.watched = self.again.version, finals.looks
        if self.writer.tell is None:
            stored = append(slot)
        else:
            with deferred():  # replay buffers hear of each slot that is stored
                stored = append(slot)
        if slot.run.ended:
            self.log()
        return bool(stored)

    def log(self) -> None:
        """Log the episodes that ended, unless they were logged before."""
        run = self.slot.run
        if run.ended:
            with deferred():
                self.episodes.extend(self.table.ended(run.ended))
                run.ended = 0
