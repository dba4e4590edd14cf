"""Worker without access to its parent's memory.

The parent asks questions by calling the worker, and the answers carry the rows.
"""

import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from tallyroll.collector.ext.far.next_rows import Others, Rows, decide, pop_next_rows
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import BOARD_WORDS, FILLED, HALT, LEASE, new_board
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.memory import Arena, ArenaSizer
from tallyroll.collector.workers.local.placement import SharedLayout
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.worker import work
from tallyroll.storage.rows.keys import Key

_WEIGHTS_SECONDS = 60.0
"""Timeout for weights that were sent before a question."""


class Given(NamedTuple):
    """Words and rows that a question needs from the parent's memory."""

    weights: int
    """Version of the weights that were sent before the question; -1 if none were."""
    halt: tuple[int, int]
    """Sequence number of an order, and the HALT word of the order."""
    filled: int | None = None
    """Number of filled slots; None if the parent does not decide it."""
    rows: Rows | None = None
    """Rows by key, from the first slot of the question on."""


class Answer(NamedTuple):
    """An answer, with the rows of its slots."""

    content: Any
    first: int = 0
    """The first slot of ``rows``."""
    rows: Rows | None = None
    words: tuple[int, ...] = ()
    """Words of the board."""
    others: dict[Key, Others] | None = None
    """Next observations that were removed from ``rows`` and that no other slot has."""


class Ended(NamedTuple):
    """Message that the worker ended without an answer."""

    how: str


class _WorkerMemory:
    """Memory of one worker, laid out like its part of the parent's memory.

    Args:
        share: shares of all workers.
        worker: index of the worker.
        plan: layout of a slab.
        module: the policy.
    """

    def __init__(self, share: Share, worker: int, plan: SlabPlan, module: object) -> None:
        first = share.first_lane + share.of(worker).start
        own = Share((share.lanes[worker],), share.slots, share.segments, first, share.of_run)
        measure = ArenaSizer()
        SharedLayout(measure, own, plan, module)
        self._blocks = SharedLayout(Arena.create(measure.end), own, plan, module)
        self.weights = self._blocks.weights
        self.memory, self._flowing = self._blocks.memory_of(0), set(plan.flowing)
        self.sends, self.once = decide(plan)

    def board(self, worker: int) -> memoryview:
        return self._blocks.board(0)

    def slab_of_all(self) -> Slab:
        return self._blocks.slab_of_all()

    def slab_of(self, worker: int) -> Slab:
        return self._blocks.slab_of(0)

    def segment(self, worker: int, index: int) -> Slab:
        return self._blocks.segment(0, index)

    def actions(self, worker: int) -> None:
        return None

    def rows(self, first: int, stop: int) -> Rows:
        """Return the rows of slots ``[first, stop)``; flowing columns include the slot ``stop``."""
        return {
            key: as_array(piece[first : stop + (key in self._flowing)])
            for key, piece in self.memory.items()
        }


def as_array(piece: torch.Tensor) -> NDArray[Any]:
    """Return memory as an array; bfloat16, which NumPy lacks, becomes int16."""
    array: NDArray[Any] = (
        piece.view(torch.int16) if piece.dtype is torch.bfloat16 else piece
    ).numpy()
    return array


class _Channel:
    """Questions and answers between the parent's calls and the thread of the worker."""

    def __init__(self) -> None:
        self.questions: SimpleQueue[Any] = SimpleQueue()
        self.answers: SimpleQueue[Any] = SimpleQueue()
        self.own: _WorkerMemory | None = None
        self._binding: m.Bind | None = None
        self._changed = threading.Condition()
        self._halt = 0, 0
        self._weights: tuple[int, list[NDArray[Any]]] = (-1, [])

    # --- the worker's thread ----------------------------------------------------------------------

    def receive(self) -> Any:
        question = self.questions.get()
        if isinstance(question, m.Bind):
            self._binding = question
        return question

    def send(self, answer: object) -> None:
        self.answers.put(answer)

    def place(self, share: Share, plan: SlabPlan, module: object) -> _WorkerMemory:
        assert self._binding is not None
        own = _WorkerMemory(share, self._binding.worker, plan, module)
        with self._changed:
            self.own = own
            own.board(0)[HALT] = self._halt[1]
            self._load()
        return own

    # --- calls of the parent ----------------------------------------------------------------------

    @property
    def words(self) -> list[int]:
        """Words of the board, read so that they all belong to one lease."""
        own = self.own
        board = new_board() if own is None else own.board(0)
        while True:
            lease = board[LEASE]
            words = [board[word] for word in range(BOARD_WORDS)]
            if words[LEASE] == lease == board[LEASE]:
                return words

    def halt(self, order: tuple[int, int]) -> None:
        """Set the HALT word, unless a newer order has already arrived."""
        with self._changed:
            if order > self._halt:
                self._halt = order
                if self.own is not None:
                    self.own.board(0)[HALT] = order[1]

    def take(self, version: int, arrays: list[NDArray[Any]]) -> None:
        """Store newer weights, which the worker loads before its next action."""
        with self._changed:
            if version > self._weights[0]:
                self._weights = version, arrays
                self._load()
                self._changed.notify_all()

    def _load(self) -> None:
        version, arrays = self._weights
        if self.own is not None and version > self.own.weights.version:
            tensors = [
                torch.frombuffer(bytearray(array), dtype=room.dtype).reshape(room.shape)
                if len(array)
                else torch.empty_like(room)
                for array, room in zip(arrays, self.own.weights.current, strict=True)
            ]
            self.own.weights.publish_tensors(tensors, version)

    def prepare(self, question: object, given: Given) -> None:
        """Update the worker's memory from the parent's memory before a question."""
        self.halt(given.halt)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._weights[0] >= given.weights, _WEIGHTS_SECONDS
            ):
                raise TimeoutError(f"weights of version {given.weights} did not arrive in time")
        own = self.own
        if own is None or given.filled is None:
            return
        board = own.board(0)
        own.slab_of(0).carry_root(board[FILLED], given.filled)
        board[FILLED] = given.filled
        first = question.start if isinstance(question, m.Steps) else given.filled
        for key, rows in (given.rows or {}).items():
            as_array(own.memory[key])[first : first + len(rows)] = rows

    def answered(self, question: object, given: Given, content: object) -> Answer:
        """Return the answer with its rows."""
        own = self.own
        filled = content.filled if isinstance(content, m.ExceptionReport) else content
        if own is None or filled is None or isinstance(filled, (m.ActionRequest, Ended)):
            return Answer(content)
        if isinstance(content, m.Bound):
            return Answer(m.Bound({**content.decisions, "sends": own.sends}))
        if isinstance(question, m.Lease) and isinstance(filled, m.LeaseResult):
            first, stop = question.base, question.base + filled.used
        elif isinstance(question, (m.Begin, m.Steps)):
            assert given.filled is not None
            first, stop = given.filled, own.board(0)[FILLED]
        else:
            return Answer(content)
        rows = own.rows(first, stop)
        others = pop_next_rows(rows, own.once)
        return Answer(content, first, rows, tuple(self.words), others)


class FarWorker:
    """A worker in its own thread, for a process that a remote parent calls.

    The parent asks one question at a time. While the worker answers, another thread may use
    :meth:`halt`, :meth:`take_weights` and :attr:`words`.
    """

    def __init__(self) -> None:
        self._channel = _Channel()
        self._over = False
        self._about: tuple[Any, Given]
        """The pending question, kept while the parent chooses actions for it."""

    def start(self, job: bytes) -> Answer:
        """Start the worker and return its first message."""
        threading.Thread(target=self._work, args=(job,), daemon=True).start()
        return self._next()

    def ask(self, question: Any, given: Given) -> Answer:
        """Answer a question."""
        if self._over:
            return Answer(Ended("ended"))
        self._channel.prepare(question, given)
        self._channel.questions.put(question)
        if not isinstance(question, m.ActionReply):
            self._about = question, given
        return self._channel.answered(*self._about, self._next().content)

    def halt(self, number: int, word: int) -> None:
        """Set the HALT word, which makes the worker stop or continue; the highest number wins."""
        self._channel.halt((number, word))

    def take_weights(self, version: int, arrays: list[NDArray[Any]]) -> None:
        """Store weights, which the worker uses from its next action on."""
        self._channel.take(version, arrays)

    @property
    def words(self) -> list[int]:
        """The words on the worker's progress board; see `tallyroll.collector.slab.progress`."""
        return self._channel.words

    def _next(self) -> Answer:
        content = self._channel.answers.get()
        self._over = isinstance(content, Ended)
        return Answer(content)

    def _work(self, job: bytes) -> None:
        how = "ended"
        try:
            work(self._channel, job)
        except BaseException as error:  # noqa: BLE001  the parent reports it
            how = f"ended by {error!r}"
        self._channel.send(Ended(how))
