"""Memory of the parent process that receives the rows of far workers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.ext.far.far_worker import Answer, as_array
from tallyroll.collector.ext.far.next_rows import Rows, put_back
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import (
    COUNTED,
    FILLED,
    HALT,
    LEASE,
    REWARD,
    ROUNDED,
    STEPPED,
    new_board,
)
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.pipes import SharedPlace
from tallyroll.collector.workers.share import Share
from tallyroll.storage.rows.keys import POLICY_VERSION, VALID


class FarBoard:
    """The parent's copy of the board of a worker in another process or on another host.

    Args:
        ordered: callback for a change of the :data:`HALT` word. It must be safe in a signal
            handler.
    """

    def __init__(self, ordered: Callable[[], None]) -> None:
        self._words, self._ordered = new_board(), ordered

    def __getitem__(self, word: int, /) -> int:
        return self._words[word]

    def __setitem__(self, word: int, value: int, /) -> None:
        changed = word == HALT and self._words[word] != value
        self._words[word] = value
        if changed:
            self._ordered()


class FarWeights:
    """Weights that are published to workers as bytes, once per version.

    Args:
        local: weights of the parent, which check the tensors and keep a copy.
        publish: function that sends a version, and the bytes of each tensor, to all workers.
    """

    def __init__(self, local: Any, publish: Callable[[int, list[NDArray[np.uint8]]], None]) -> None:
        self._local, self._publish = local, publish

    @property
    def version(self) -> int:
        """Version of the last published weights; -1 before the first publication."""
        return int(self._local.version)

    def load_into(self, module: object) -> int:
        """Copy the last published weights into ``module``."""
        return int(self._local.load_into(module))

    def publish(self, module: object, version: int) -> None:
        """Publish the tensors of ``module`` to all workers."""
        self._local.publish(module, version)
        self._publish(version, [_bytes_of(tensor) for tensor in self._local.current])


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


class FarPlace:
    """Memory from which the parent reads rows.

    Args:
        share: shares of all workers.
        plan: layout of a slab.
        module: the policy.
        ordered: callback with the index of a worker whose HALT word changed.
        publish: function that sends a version of the weights, and their bytes, to all workers.
    """

    def __init__(
        self,
        share: Share,
        plan: SlabPlan,
        module: object,
        ordered: Callable[[int], None],
        publish: Callable[[int, list[NDArray[np.uint8]]], None],
    ) -> None:
        self._blocks = SharedPlace().make(share, plan, module)
        self._share = share
        self.weights = FarWeights(self._blocks.weights, publish)
        workers = range(len(share.lanes))
        self._boards = [FarBoard(lambda worker=each: ordered(worker)) for each in workers]  # type: ignore[misc]
        self._slabs = [self._blocks.slab_of(each) for each in workers]
        # In sync mode this process decides which slots are transitions and which weights act.
        own = set() if share.segments else {POLICY_VERSION, *(() if plan.marked else (VALID,))}
        self._memory = [
            {k: as_array(v) for k, v in self._blocks.memory_of(each).items() if k not in own}
            for each in workers
        ]

    def board(self, worker: int) -> FarBoard:
        """Return the board of a worker."""
        return self._boards[worker]

    def slab_of_all(self) -> Slab:
        """Return the slab of all lanes."""
        return self._blocks.slab_of_all()

    def slab_of(self, worker: int) -> Slab:
        """Return the slab of a worker."""
        return self._slabs[worker]

    def segment(self, worker: int, index: int) -> Slab:
        """Return one segment of a worker."""
        return self._blocks.segment(worker, index)

    def actions(self, worker: int) -> None:
        """Return None: the parent does not have the actions of a worker that died."""

    # --- contents of questions and answers --------------------------------------------------------

    def given(self, worker: int, question: object) -> tuple[int | None, Rows]:
        """Return the number of filled slots, and the rows that the worker needs for a question.

        The number is None if the worker itself counts the slots.
        """
        if self._share.segments or isinstance(question, m.ActionReply):
            return None, {}
        rows: Rows = {}
        if isinstance(question, m.Steps):
            steps, slab = slice(question.start, question.stop), self._slabs[worker]
            rows[POLICY_VERSION] = slab.version[steps].copy()
            if question.by == "given":
                acted = (key for key in slab.arrays if key[-1] == "action" and key[0] != "next")
                rows |= {key: slab.arrays[key][steps].copy() for key in acted}
        return self._boards[worker][FILLED], rows

    def land(self, worker: int, question: object, answer: Answer) -> None:
        """Copy the rows of an answer into the memory, and update the board."""
        memory, board = self._memory[worker], self._boards[worker]
        for key, rows in (answer.rows or {}).items():
            if len(rows) and key in memory:
                memory[key][answer.first : answer.first + len(rows)] = rows
        put_back(memory, answer.first, answer.others or {})
        if answer.words:
            board[FILLED], board[STEPPED] = answer.words[FILLED], answer.words[FILLED]
            board[COUNTED], board[LEASE] = answer.words[COUNTED], answer.words[LEASE]
            if not board[ROUNDED]:
                board[ROUNDED], board[REWARD] = answer.words[ROUNDED], answer.words[REWARD]

    def tell(self, worker: int, words: list[int]) -> None:
        """Record the progress of a worker whose rows have not arrived."""
        board = self._boards[worker]
        board[STEPPED] = words[FILLED]
        if self._share.segments and words[LEASE] > board[LEASE]:
            # Only whole slots count, because rows of later slots are unknown here.
            board[COUNTED], board[FILLED] = words[COUNTED], words[COUNTED] >> 32
            board[LEASE] = words[LEASE]
