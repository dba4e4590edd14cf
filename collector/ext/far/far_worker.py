"""A worker without memory of its parent's: it is asked by calls, and sends rows with answers."""

import threading
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray

from tallyroll.collector.ext.far.next_rows import Others, Rows, decide, taken_out
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.collector.slab.progress import BOARD_WORDS, FILLED, HALT, LEASE, new_board
from tallyroll.collector.slab.slab import Slab
from tallyroll.collector.workers import messages as m
from tallyroll.collector.workers.local.memory import Arena, Measure
from tallyroll.collector.workers.local.placement import Blocks
from tallyroll.collector.workers.share import Share
from tallyroll.collector.workers.worker import work
from tallyroll.storage.rows.keys import Key

_WEIGHTS_SECONDS = 60.0
"""How long weights may take that were sent before a question."""


class Given(NamedTuple):
    """Words and rows that a question needs from its parent's memory."""

    weights: int
    """The version of the weights that were sent before; -1: none were."""
    halt: tuple[int, int]
    """The number of this order among all of its kind, and the word."""
    filled: int | None = None
    """Slots that are filled, where the parent decides that."""
    rows: Rows | None = None
    """Memory from the first slot of the question on."""


class Answer(NamedTuple):
    """An answer, and memory of the slab that it is about."""

    content: Any
    first: int = 0
    """The slot that ``rows`` begin with."""
    rows: Rows | None = None
    words: tuple[int, ...] = ()
    """The board."""
    others: dict[Key, Others] | None = None
    """Next observations that are not in ``rows``, and are not those of another slot."""


class Ended(NamedTuple):
    """The worker ended without an answer."""

    how: str


class _WorkerMemory:
    """Memory of one worker, laid out as its part of the parent's.

    Args:
        share: of all workers.
        worker: whose part it is.
        plan: what a slab looks like.
        module: the policy.
    """

    def __init__(self, share: Share, worker: int, plan: SlabPlan, module: object) -> None:
        first = share.first_lane + share.of(worker).start
        own = Share((share.lanes[worker],), share.slots, share.segments, first, share.of_run)
        measure = Measure()
        Blocks(measure, own, plan, module)
        self._blocks = Blocks(Arena.create(measure.end), own, plan, module)
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
        """Slots ``[first, stop)``, and of what flows the slot after them."""
        return {
            key: as_array(piece[first : stop + (key in self._flowing)])
            for key, piece in self.memory.items()
        }


def as_array(piece: torch.Tensor) -> NDArray[Any]:
    """Memory as an array; what NumPy has no type for as integers of its size."""
    array: NDArray[Any] = (
        piece.view(torch.int16) if piece.dtype is torch.bfloat16 else piece
    ).numpy()
    return array


class _Channel:
    """Questions and answers between what the parent calls and the thread that is the worker."""

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

    # --- what the parent calls --------------------------------------------------------------------

    @property
    def words(self) -> list[int]:
        """The board; of another lease's counts none are given."""
        own = self.own
        board = new_board() if own is None else own.board(0)
        while True:
            lease = board[LEASE]
            words = [board[word] for word in range(BOARD_WORDS)]
            if words[LEASE] == lease == board[LEASE]:
                return words

    def halt(self, order: tuple[int, int]) -> None:
        """Take over the word of the newest order, in whichever order they come."""
        with self._changed:
            if order > self._halt:
                self._halt = order
                if self.own is not None:
                    self.own.board(0)[HALT] = order[1]

    def take(self, version: int, arrays: list[NDArray[Any]]) -> None:
        """Take over newer weights, which the worker loads before its next action."""
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
        """Bring the memory to the state that the parent's is in."""
        self.halt(given.halt)
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._weights[0] >= given.weights, _WEIGHTS_SECONDS
            ):
                raise TimeoutError(f"weights {given.weights} did not come")
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
        """The answer, with the rows that it is about."""
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
        others = taken_out(rows, own.once)
        return Answer(content, first, rows, tuple(self.words), others)


class FarWorker:
    """A worker in a thread of its own, for a process that a parent elsewhere calls.

    Questions are asked one after the other; :meth:`halt`, :meth:`take_weights` and :attr:`words`
    are for another thread, while a question is answered.
    """

    def __init__(self) -> None:
        self._channel = _Channel()
        self._over = False
        self._about: tuple[Any, Given]
        """The question that is not answered yet, while actions are chosen for it."""

    def start(self, job: bytes) -> Answer:
        """Start the worker; returns what it says first."""
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
        """Take over a word that tells it to end, or to go on; the highest number holds."""
        self._channel.halt((number, word))

    def take_weights(self, version: int, arrays: list[NDArray[Any]]) -> None:
        """Take over weights, which are used before the next action."""
        self._channel.take(version, arrays)

    @property
    def words(self) -> list[int]:
        """How far it is: its board."""
        return self._channel.words

    def _next(self) -> Answer:
        content = self._channel.answers.get()
        self._over = isinstance(content, Ended)
        return Answer(content)

    def _work(self, job: bytes) -> None:
        how = "ended"
        try:
            work(self._channel, job)
        except BaseException as error:  # noqa: BLE001  the parent says it
            how = f"ended by {error!r}"
        self._channel.send(Ended(how))
