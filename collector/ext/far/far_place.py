"""Memory of this process, which rows of far workers are copied into as they come."""

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
    """Words of a worker that is elsewhere, as far as they are known here.

    Args:
        ordered: is called once :data:`HALT` has another word. Safe in a signal handler.
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
    """Weights that are handed on as bytes, once a version.

    Args:
        local: checks them, and keeps a copy.
        publish: hands a version, and the bytes of each tensor, to all workers.
    """

    def __init__(self, local: Any, publish: Callable[[int, list[NDArray[np.uint8]]], None]) -> None:
        self._local, self._publish = local, publish

    @property
    def version(self) -> int:
        """The version of the weights that were published last; -1 before."""
        return int(self._local.version)

    def load_into(self, module: object) -> int:
        """Copy the weights published last into ``module``."""
        return int(self._local.load_into(module))

    def publish(self, module: object, version: int) -> None:
        """Hand the tensors of ``module`` to all workers."""
        self._local.publish(module, version)
        self._publish(version, [_bytes_of(tensor) for tensor in self._local.current])


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    found: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


class FarPlace:
    """The memory that rows are read from.

    Args:
        share: of all workers.
        plan: what a slab looks like.
        module: the policy.
        ordered: is called with the index of a worker that is to end, or to go on.
        publish: hands a version of weights, and what was put, to all workers.
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
        # In step this process says which slots are transitions, and which weights act in them.
        own = set() if share.segments else {POLICY_VERSION, *(() if plan.marked else (VALID,))}
        self._memory = [
            {k: as_array(v) for k, v in self._blocks.memory_of(each).items() if k not in own}
            for each in workers
        ]

    def board(self, worker: int) -> FarBoard:
        """The words of a worker."""
        return self._boards[worker]

    def slab_of_all(self) -> Slab:
        """The slab of all lanes."""
        return self._blocks.slab_of_all()

    def slab_of(self, worker: int) -> Slab:
        """The slab of a worker."""
        return self._slabs[worker]

    def segment(self, worker: int, index: int) -> Slab:
        """One segment of a worker."""
        return self._blocks.segment(worker, index)

    def actions(self, worker: int) -> None:
        """None: actions of a worker that died are not here."""

    # --- what travels with questions and answers --------------------------------------------------

    def given(self, worker: int, question: object) -> tuple[int | None, Rows]:
        """The slots that are filled, where this process decides that, and rows of a question."""
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
        """Copy rows into the memory, and count them on the board."""
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
        """Note how far a worker is whose rows have not come."""
        board = self._boards[worker]
        board[STEPPED] = words[FILLED]
        if self._share.segments and words[LEASE] > board[LEASE]:
            # Counted are whole slots: of those that follow no row is known here.
            board[COUNTED], board[FILLED] = words[COUNTED], words[COUNTED] >> 32
            board[LEASE] = words[LEASE]
