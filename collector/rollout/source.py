"""Where transitions come from, as a collector sees it: blocks of them, and what happened.

A collector asks its source for one block after the other::

    block = source.block(want)
    post(ledger, block.entry)         # once, whatever comes of the rows
    with block:
        rows = copied from block.slab, at block.index
        # or left there: block.keep(), and block.release() when they were copied

The rows are the collector's to count once the ``with`` ends without an error; until then, and
after an error, they are the source's, which has them in ``held`` or in what it discards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

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
from tallyroll.collector.run_plan import Decision
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.rows.keys import Key

Sound = Callable[[Slab, int], int]
"""How many of the first slots of a slab, of so many that were filled, are as declared."""


class Giver(Protocol):
    """Who wants to hear what becomes of a block."""

    def keeps(self, more: bool) -> bool:
        """See :meth:`Block.keep`."""

    def given(self, block: "Block") -> None:
        """Its rows are the collector's, which copied them unless they are kept."""

    def released(self, block: "Block") -> None:
        """Its rows, which were kept, are needed no more."""


class Again(Protocol):
    """Fills one slot of all lanes, time after time, while nothing else is to be counted."""

    version: int
    """Of the policy, when the slot was filled."""
    carry: bytes
    """See `SlotRows.carry`: done when the slot was stored."""

    def fill(self) -> None:
        """Step all lanes. Raises as they do."""

    def put_back(self) -> None:
        """What was filled is the next block; where that raised, it can be salvaged."""


@dataclass(eq=False, slots=True)
class Block:
    """The transitions of a slab that enter the batch. Rows stand lane by lane."""

    slab: Slab
    used: int
    """Slots of the slab that were filled."""
    taken: Mask
    """``[used, lane]``, the transitions that are rows of this block."""
    index: NDArray[np.intp]
    """``[row]``, into the slots flattened to ``[used * lane]``. Read only: blocks share it."""
    lane: NDArray[np.int32]
    """``[row]``, numbered over the whole run."""
    entry: LedgerEntry = NOTHING
    """What happened since the block before; most of it is what this block holds."""
    cuts: NDArray[np.bool_] | None = None
    """``[lane]``, lanes whose trajectories end, unfinished, behind the block; None: no lane's."""
    giver: Giver | None = None
    """None: the memory is the block's own."""
    kept: bool = False
    again: "Again | None" = None
    """One slot of all lanes, to be copied before the next one is asked for; what fills it again."""

    @classmethod
    def of(cls, slab: Slab, transitions: Mask, count: int) -> "Block":
        """The first ``count`` of ``transitions`` ``[used, lane]``."""
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

    def __enter__(self) -> Self:
        """The block, whose rows are still its source's."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The rows are the caller's, unless there was an error."""
        if kind is None and self.giver is not None:
            self.giver.given(self)

    def keep(self, more: bool) -> bool:
        """Ask to have the slots left as they are until :meth:`release`; says whether they are.

        ``more``: another block will be asked for before.
        """
        self.kept = self.giver is None or self.giver.keeps(more)
        return self.kept

    def release(self) -> None:
        """Nothing of what was kept is needed any more."""
        if self.kept and self.giver is not None:
            self.giver.released(self)
        self.kept = False


class Discarded(NamedTuple):
    """What a source threw away. All arrays are ``[lane]``."""

    entry: LedgerEntry
    """What happened since the last block, all that was thrown away included."""
    lanes: NDArray[np.bool_]
    """Lanes that lost transitions by it."""
    reward: NDArray[np.float64]
    """Of the last slot."""
    ended: NDArray[np.bool_]
    """Lanes of which the last slot reported an end."""


class TransitionSource(Protocol):
    """A source of blocks of transitions for a collector, until it is dry."""

    random_frames: int
    """That many transitions still have random actions."""

    @property
    def slabs(self) -> Sequence[Slab]:
        """Those whose blocks it gives, alike but for their lanes."""

    @property
    def counts(self) -> Decision:
        """How a slot of all lanes is counted; see `RunPlan.counts`."""

    def block(self, want: int) -> Block:
        """At most ``want`` transitions that follow those of the last block; perhaps none yet."""

    @property
    def held(self) -> int:
        """Transitions whose execution is in an entry, and that no block gave; counted afresh."""

    @property
    def dry(self) -> bool:
        """No more will come: the run was stopped, or its episodes are complete."""

    def discard(self, rewards: Sequence[Key]) -> Discarded:
        """Throw away all that no block gave; ``rewards`` are the columns that are summed up."""

    def restart_lanes(self, ledger: Ledger) -> None:
        """Every lane begins anew before its next slot; nothing may be held then.

        What was delivered, and so what is left of a budget, is in ``ledger``.
        """

    def salvage(self, sound: Sound, most: int) -> Iterator[Block]:
        """After an error: what is complete, as far as it is ``sound``; at most ``most`` of it.

        The rest is thrown away, and counted, in the last entry at the latest.
        """

    def refused(self) -> tuple[Slab, int, NDArray[np.bool_]] | None:
        """After an error: the slot whose actions an environment may have refused.

        And ``[lane]``, those whose action it would have executed.
        """

    def stop(self) -> None:
        """End after the step under way. Safe to call from a signal handler or another thread."""

    @property
    def paused(self) -> bool:
        """Blocks are shorter than they may be, because a signal's handler waits."""

    def go_on(self) -> None:
        """They are no longer; this may take :meth:`stop` back."""
