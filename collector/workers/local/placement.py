"""Layout of slabs and boards in the memory that a parent shares with its workers.

Every process allocates from one arena in the same order: a board per worker, the policy's weights,
and one slab of all lanes (``mode="sync"``) or one slab per worker, of several segments
(``mode="async"``).
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import BOARD_WORDS
from tallyroll.collector.slab.slab import Slab, memory_of
from tallyroll.collector.workers.local.memory import Area
from tallyroll.collector.workers.local.weights import SharedWeights
from tallyroll.collector.workers.share import Share
from tallyroll.storage.rows.keys import Key

Memory = dict[Key, torch.Tensor]


class SharedLayout:
    """The shared memory, laid out.

    Args:
        area: the memory to allocate from.
        share: the lanes of each worker.
        plan: the layout of a slab.
        module: the policy, whose weights get memory if it is a module.
    """

    def __init__(self, area: Area, share: Share, plan: SlabPlan, module: object) -> None:
        self._share, self._plan = share, plan
        self.boards = area.array((len(share.lanes), BOARD_WORDS), np.int64)
        self.weights = SharedWeights(module, area)
        if share.segments:
            slots = share.stride * share.segments
            self._memory = [self._carved(area, slots, lanes) for lanes in share.lanes]
        else:
            self._memory = [self._carved(area, share.slots, share.total)]

    def _carved(self, area: Area, slots: int, lanes: int) -> Memory:
        plan = self._plan
        columns, arrivals = plan.columns(lanes), plan.arrivals > 0
        pieces = memory_of(slots, columns, plan.layout, plan.flowing, plan.shared, arrivals)
        return {key: area.tensor(shape, dtype) for key, (shape, dtype) in pieces.items()}

    def board(self, worker: int) -> memoryview:
        """Return the board of a worker."""
        return memoryview(self.boards[worker]).cast("B").cast("q")

    def slab_of_all(self) -> Slab:
        """Return the slab of all lanes."""
        return self._slab(self._memory[0], self._share.slots, self._share.total, 0)

    def slab_of(self, worker: int) -> Slab:
        """Return the slab that a worker fills.

        In sync mode it is the part of the common slab that has the worker's lanes. In async mode it
        has all segments of the worker.
        """
        share, lanes = self._share, self._share.of(worker)
        if share.segments:
            slots = share.stride * share.segments
            return self._slab(self._memory[worker], slots, len(lanes), lanes.start)
        return self._slab(self.memory_of(worker), share.slots, len(lanes), lanes.start)

    def memory_of(self, worker: int) -> Memory:
        """Return the memory of the slab that a worker fills."""
        share, lanes = self._share, self._share.of(worker)
        if share.segments:
            return self._memory[worker]
        return {k: piece[:, lanes.start : lanes.stop] for k, piece in self._memory[0].items()}

    def actions(self, worker: int) -> NDArray[Any] | None:
        """Return the actions ``[slot, lane, ...]`` in the slab of a worker.

        Return None if the slab does not have the actions in one array.
        """
        arrays = self.slab_of(worker).arrays
        return next((array for key, array in arrays.items() if key[-1] == "action"), None)

    def segment(self, worker: int, index: int) -> Slab:
        """Return one segment of a worker, as a slab."""
        share, lanes = self._share, self._share.of(worker)
        first, whole = index * share.stride, share.stride * share.segments
        part = {
            # An observation column that flows has one more slot.
            key: piece[first : first + share.slots + len(piece) - whole]
            for key, piece in self._memory[worker].items()
        }
        return self._slab(part, share.slots, len(lanes), lanes.start)

    def _slab(self, memory: Memory, slots: int, lanes: int, first_lane: int) -> Slab:
        first_lane += self._share.first_lane
        return self._plan.slab(slots, lanes, first_lane=first_lane, memory=memory)
