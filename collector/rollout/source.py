"""Sources of transitions: they hand blocks of transitions, and their counts, to a collector.

A collector asks its source for one block after the other::

    block = source.block(want)
    post(ledger, block.entry)         # once, even if the rows are lost
    rows = copied from block.slab, at block.index
    # or left in the slab: block.keep(), and block.release() after they were copied
    block.giver.given(block)          # if it has one

From then on the collector counts the rows. Before that, and after an error, the source counts them,
in ``held`` or among the discarded ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.ledger import NOTHING, Ledger, LedgerEntry
from tallyroll.collector.counting.transitions import (
    Mask,
    by_lane,
    first_in_slot_order,
    lane_major,
    whole_slots,
)
from tallyroll.collector.policies.several.openings import Counts, Openings
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import Key

Sound = Callable[[Slab, int], int]
"""Takes a slab and its number of filled slots; returns how many of these are as declared."""


class BlockOwner(Protocol):
    """The owner of a block's memory, which is valid until the next block."""

    def given(self, block: "Block") -> None:
        """Hand the block over: the collector copied its rows, unless they are kept."""


class SlotKeeper(Protocol):
    """An owner of memory that can keep slots for longer."""

    def keeps(self) -> bool:
        """Return whether the slots stay valid until :meth:`released`."""

    def released(self) -> None:
        """Release the slots: the rows of the block are no longer needed."""


@dataclass(eq=False, slots=True)
class Block:
    """The transitions of a slab that enter the batch, lane by lane."""

    slab: Slab
    used: int
    """Slots of the slab that were filled."""
    taken: Mask
    """``[used, lane]``, the transitions that are rows of this block."""
    index: NDArray[np.intp]
    """``[row]``, indices into slots flattened to ``[used * lane]``. Read only: blocks share it."""
    lane: NDArray[np.int32]
    """``[row]``, the lane of each row, numbered over the whole run."""
    entry: LedgerEntry = NOTHING
    """Counts since the block before, this block's transitions included."""
    cuts: NDArray[np.bool_] | None = None
    """``[lane]``, lanes whose trajectories end, unfinished, after the block; None: no lane's."""
    giver: BlockOwner | None = None
    """The owner of the memory; None: the block owns it."""
    keeper: SlotKeeper | None = None
    """The owner, if it can leave the slots as they are when the next block is asked for."""
    kept: bool = False

    @classmethod
    def of(cls, slab: Slab, transitions: Mask, count: int) -> "Block":
        """Make a block of the first ``count`` of ``transitions`` ``[used, lane]``."""
        taken = transitions
        if slab.lane is not None:
            taken = first_in_slot_order(transitions, count)
            index, lane = by_lane(taken, slab.lane[: len(taken)])
        elif count >= transitions.size == np.count_nonzero(transitions):
            index, lane = whole_slots(*transitions.shape)
        else:
            taken = first_in_slot_order(transitions, count)
            index, lane = lane_major(taken)
        if slab.first_lane:
            lane += np.int32(slab.first_lane)
        return cls(slab, len(transitions), taken, index, lane)

    def __len__(self) -> int:
        return len(self.index)

    def numbers_of(self, at: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the number of each slot of indices ``at`` among the rows in slot order, from 1."""
        if not len(at):
            return np.zeros(0, np.int64)
        return self.taken.reshape(-1).cumsum(dtype=np.int64)[at]

    def keep(self, more: bool) -> bool:
        """Keep the slots until :meth:`release`, and return True, if their owner can.

        ``more``: another block is requested before.
        """
        if self.keeper is None:
            return self.giver is None or not more
        self.kept = self.keeper.keeps()
        return self.kept

    def release(self) -> None:
        """Return kept slots to their owner."""
        if self.kept and self.keeper is not None:
            self.keeper.released()
        self.kept = False


class DiscardedTransitions(NamedTuple):
    """Counts and lanes of transitions that a source discarded. All arrays are ``[lane]``."""

    entry: LedgerEntry
    """Counts since the last block, all discarded transitions included."""
    lanes: NDArray[np.bool_]
    """Lanes that lost transitions."""
    reward: NDArray[np.float64]
    """Reward of the last slot."""
    ended: NDArray[np.bool_]
    """Lanes of which the last slot reported an end."""


class PendingTransitions(NamedTuple):
    """Transitions that were executed and are in no block, in the order of lanes and time."""

    lane: NDArray[np.int32]
    """``[row]``, ascending."""
    ended: NDArray[np.bool_]
    """``[row]``, the transition is the last one of its episode."""
    cuts: NDArray[np.bool_] | None = None
    """``[lane]``, lanes whose trajectories are cut after these; None: no lane's."""

    @classmethod
    def of(cls, slab: Slab, transitions: Mask, ended: Mask) -> "PendingTransitions":
        """Return all ``transitions`` ``[used, lane]``; ``ended`` are the ends in these slots."""
        block = Block.of(slab, transitions, transitions.size)
        return cls(block.lane, ended.reshape(-1)[block.index])


class TransitionSource(Protocol):
    """A source of blocks of transitions for a collector, until it is dry."""

    random_frames: int
    """Number of transitions that still have random actions."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """The slabs of its blocks; they differ only in their lanes."""

    @property
    def counts(self) -> Decision:
        """The way a slot of all lanes is counted; see `RunPlan.counts`."""

    def block(self, want: int) -> Block:
        """Return at most ``want`` transitions after those of the last block; perhaps none yet."""

    @property
    def held(self) -> int:
        """Number of transitions that an entry counted and no block has; computed at each access."""

    def still(self) -> AbstractContextManager[Sequence[PendingTransitions]]:
        """Wait for steps under way, and return a context in which no step is made.

        It has the transitions that are in no block, in the order in which blocks will have them.
        The lanes executed no others.
        """

    def drawn_ahead(self, openings: Openings) -> Counts:
        """Return how many random actions at the start of several policies are in no block.

        Those of steps under way count too.
        """

    @property
    def dry(self) -> bool:
        """True if no more blocks will come: the run was stopped, or its episodes are complete."""

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Discard all transitions that are in no block, and sum their ``rewards`` columns."""

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before its next slot; no transition may be held.

        ``ledger`` has the counts of stored transitions, which say what is left of a budget.
        """

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """Yield at most ``most`` complete transitions of the ``sound`` slots after an error.

        The source discards the others, and counts them in the last entry at the latest.
        """

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return the slot whose actions an environment may have refused, after an error.

        The flags ``[lane]`` mark the lanes whose actions would have been executed.
        """

    def stop(self) -> None:
        """End after the step under way. Safe to call from a signal handler or another thread."""

    @property
    def paused(self) -> bool:
        """True if blocks are shorter than possible, because a signal handler waits."""

    def go_on(self) -> None:
        """Continue after the handler was called; this may undo :meth:`stop`."""
