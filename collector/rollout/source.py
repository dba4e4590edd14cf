"""Sources of transitions, which hand blocks of transitions and their counts to a collector.

A collector requests one block after the other from its source::

    block = source.block(want)
    post(ledger, block.entry)         # once, even if the rows are lost
    rows = copied from block.slab, at block.index
    # or left in the slab: block.keep(), and block.release() after they were copied
    block.owner.hand_over(block)      # if it has one

After ``hand_over``, the collector counts the rows. Before that, and after an error, the source
counts them, in ``carried`` or as discarded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
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
from tallyroll.storage.rows.transfers import HOST, move_columns

ValidSlots = Callable[[Slab, int], int]
"""Takes a slab and its number of filled slots, and returns the number of leading valid slots."""


class BlockOwner(Protocol):
    """The owner of a block's memory, which is valid until the next block."""

    def hand_over(self, block: "Block") -> None:
        """Hand the block over. The collector has copied its rows, or has kept its slots."""


class SlotKeeper(Protocol):
    """An owner of memory that can keep slots for longer."""

    def keeps(self) -> bool:
        """Return True if the slots can stay valid until :meth:`released`."""

    def released(self) -> None:
        """Release the slots: the rows of the block are no longer needed."""


@dataclass(eq=False, slots=True)
class Block:
    """Transitions of a slab that enter the batch, lane by lane."""

    slab: Slab
    used: int
    """Number of filled slots of the slab."""
    taken: Mask
    """Marks ``[used, lane]`` of the transitions that are rows of this block."""
    index: NDArray[np.intp]
    """Indices ``[row]`` into the slots, flattened to ``[used * lane]``.

    The array is read only, because blocks share it.
    """
    lane: NDArray[np.int32]
    """The lane of each row ``[row]``, numbered over the whole run."""
    entry: LedgerEntry = NOTHING
    """Counts since the previous block, including the transitions of this block."""
    cuts: NDArray[np.bool_] | None = None
    """Marks ``[lane]`` of lanes whose trajectories are cut after the block; None if none is."""
    owner: BlockOwner | None = None
    """The owner of the memory; None if the block owns it."""
    keeper: SlotKeeper | None = None
    """The owner, if it can leave the slots unchanged when the next block is requested."""
    kept: bool = False
    _index_there: torch.Tensor | None = None
    """The copy of ``index`` on the device of the slab."""
    _fetched: dict[Key, torch.Tensor] | None = None
    """Copies on the host of the columns that :meth:`fetch` was called with first."""

    @classmethod
    def of(
        cls,
        slab: Slab,
        transitions: Mask,
        count: int,
        *,
        owner: BlockOwner | None = None,
        keeper: SlotKeeper | None = None,
    ) -> "Block":
        """Make a block of the first ``count`` transitions in the marks ``[used, lane]``."""
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
        used = len(transitions)
        return cls(slab, used, taken, index, lane, owner=owner, keeper=keeper)

    def report(self, entry: LedgerEntry, cuts: NDArray[np.bool_] | None = None) -> "Block":
        """Set the counts since the last block, and the lanes cut after this one; return self."""
        self.entry, self.cuts = entry, cuts
        return self

    def __len__(self) -> int:
        return len(self.index)

    def numbers_of(self, at: NDArray[np.intp]) -> NDArray[np.int64]:
        """Return the number of each slot ``at`` among the rows in slot order, counted from 1."""
        if not len(at):
            return np.zeros(0, np.int64)
        return self.taken.reshape(-1).cumsum(dtype=np.int64)[at]

    @property
    def is_whole(self) -> bool:
        """True if every slot is a row, so that ``index`` is a transposition."""
        return self.slab.lane is None and len(self.index) == self.taken.size

    def index_on(self, device: torch.device) -> torch.Tensor:
        """Return ``index`` as a tensor on the device of the slab. Only the first call copies it."""
        if self._index_there is None:
            self._index_there = torch.from_numpy(self.index).to(device)
        return self._index_there

    def fetch(
        self, keys: Sequence[Key], others: Mapping[Any, torch.Tensor]
    ) -> dict[Any, torch.Tensor]:
        """Copy the columns ``keys`` and ``others`` to the host with one wait; return ``others``.

        The columns are ``[used, lane, ...]``. Later calls do not copy them again.
        """
        columns: dict[Any, torch.Tensor] = {}
        if self._fetched is None:
            columns = {("block", key): self.slab.columns[key][: self.used] for key in keys}
        moved = move_columns({**columns, **others}, HOST)
        if self._fetched is None:
            self._fetched = {key: moved["block", key] for key in keys}
        return {key: moved[key] for key in others}

    def fetched(self, keys: Sequence[Key]) -> dict[Key, torch.Tensor]:
        """Return the rows ``[row, ...]`` of the columns ``keys`` on the host; see :meth:`fetch`."""
        if self._fetched is None:
            self.fetch(keys, {})
        assert self._fetched is not None
        index = torch.from_numpy(self.index)
        return {key: self._fetched[key].flatten(0, 1).index_select(0, index) for key in keys}

    def keep(self, more: bool) -> bool:
        """Keep the slots until :meth:`release`, and return True, if their owner can do so.

        ``more`` is True if another block is requested before the release.
        """
        if self.keeper is None:
            return self.owner is None or not more
        self.kept = self.keeper.keeps()
        return self.kept

    def release(self) -> None:
        """Give the slots back to their owner, if :meth:`keep` kept them."""
        if self.kept and self.keeper is not None:
            self.keeper.released()
        self.kept = False


class DiscardedTransitions(NamedTuple):
    """Counts and lanes of transitions that a source has discarded. All arrays are ``[lane]``."""

    entry: LedgerEntry
    """Counts since the last block, including all discarded transitions."""
    lanes: NDArray[np.bool_]
    """Lanes that lost transitions."""
    reward: NDArray[np.float64]
    """The reward of each lane in the last slot."""
    ended: NDArray[np.bool_]
    """Lanes that reported an end in the last slot."""


class UndeliveredTransitions(NamedTuple):
    """Transitions that were executed and are in no block, ordered by lane, then by time."""

    lane: NDArray[np.int32]
    """The lane of each transition ``[row]``, ascending."""
    ended: NDArray[np.bool_]
    """Marks ``[row]`` of transitions that are the last of their episode."""
    cuts: NDArray[np.bool_] | None = None
    """Marks ``[lane]`` of lanes whose trajectories are cut after these; None if none is."""

    @classmethod
    def of(cls, slab: Slab, transitions: Mask, ended: Mask) -> "UndeliveredTransitions":
        """Return the marked ``transitions``; ``ended`` marks the ends of episodes in these slots.

        Both are ``[used, lane]``.
        """
        block = Block.of(slab, transitions, transitions.size)
        return cls(block.lane, ended.reshape(-1)[block.index])


class TransitionSource(Protocol):
    """A source of blocks of transitions for a collector, until it is dry."""

    random_frames: int
    """Number of transitions that still have random actions."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """The slabs of the blocks, which differ only in their lanes."""

    @property
    def counts(self) -> Decision:
        """The decision about how a slot of all lanes is counted; see `RunPlan.counts`."""

    def block(self, want: int) -> Block:
        """Return at most ``want`` transitions after the last block, or an empty block for now."""

    @property
    def carried(self) -> int:
        """Number of transitions that an entry has counted but that are in no block.

        It is computed at each access.
        """

    def still(self) -> AbstractContextManager[Sequence[UndeliveredTransitions]]:
        """Wait for steps in progress, and pause stepping inside a ``with`` block.

        The context manager yields all executed transitions that are in no block, in the order in
        which blocks will have them.
        """

    def undelivered_random(self, openings: Openings) -> Counts:
        """Return the number of opening random actions of each policy that are in no block.

        Random actions of steps in progress count too.
        """

    @property
    def dry(self) -> bool:
        """True if no more blocks will come: the run is stopped, or its episodes are complete."""

    def discard(self, rewards: Sequence[Key]) -> DiscardedTransitions:
        """Discard all transitions that are in no block, and sum their ``rewards`` columns."""

    def restart_lanes(self, ledger: Ledger) -> None:
        """Reset every lane before its next slot; no transition may be carried at this time.

        ``ledger`` has the counts of stored rows, which determine the rest of a budget.
        """

    def recover(self, valid_slots: ValidSlots, most: int) -> Iterator[Block]:
        """Yield at most ``most`` complete transitions of valid slots after an error.

        The source discards all other transitions, and counts them in the last entry at the latest.
        """

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """Return the slot whose actions an environment may have refused, after an error.

        The flags ``[lane]`` mark the lanes whose actions would have been executed.
        """

    def stop(self) -> None:
        """End after the step in progress. Safe to call from a signal handler or another thread."""

    @property
    def paused(self) -> bool:
        """True if blocks are shorter than possible because a signal handler is waiting."""

    def go_on(self) -> None:
        """Continue after the handler was called; this may undo :meth:`stop`."""
