"""The parent's record of one worker."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from tallyroll.collector.slab.progress import BOARD_WORDS, FILLED, HALT, STEPPED, STOP, new_board
from tallyroll.collector.workers.messages import ActionRequest, LeaseResult
from tallyroll.collector.workers.transport import Board, Gone, Link


@dataclass(eq=False)
class Member:
    """One worker, and its state as the parent last observed it."""

    index: int
    link: Link
    lanes: range = range(0)
    """The worker's lanes, numbered over the run."""
    columns: range = range(0)
    """The worker's columns in a slab of the lanes of all workers."""
    board: Board = field(default_factory=new_board, repr=False)
    """The worker's progress board: a private board until :meth:`bind` replaces it."""
    actions: NDArray[Any] | None = field(default=None, repr=False)
    """Actions in the worker's slab, ``[slot, lane, ...]``."""
    seeds: Sequence[int] = ()
    state: bytes | None = None
    """The state of the transforms of the worker's environment."""
    ended: bool = False
    """True if the worker was ended."""
    ready: bool = False
    """True if the worker can step."""
    failed: Exception | None = None
    """The error after which the worker never answers again."""
    complete: LeaseResult | None = field(default=None, repr=False)
    """The complete part of the lease in which the worker raised, until that part is counted."""
    asked: int = 0
    """Number of questions that the worker has not answered yet."""
    since: float = 0.0
    """Monotonic time at which the worker was asked, or last made progress."""
    wants: ActionRequest | None = field(default=None, repr=False)
    """The worker's pending request for actions, which precedes its answer to a question."""
    filled: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def who(self) -> str:
        """Description of the worker for messages."""
        lanes = self.lanes
        if not lanes:
            return f"worker {self.index}"
        several = f"lanes {lanes[0]} to {lanes[-1]}" if len(lanes) > 1 else f"lane {lanes[0]}"
        return f"worker {self.index} ({several}, {self.link.name})"

    @property
    def last_action(self) -> NDArray[Any] | None:
        """Last actions, or actions in progress, of the lanes, ``[lane, ...]``; None if unknown."""
        if self.actions is None or not self.ready:
            return None
        last: NDArray[Any] = self.actions[min(self.board[FILLED], len(self.actions) - 1)]
        return last

    # --- startup ----------------------------------------------------------------------------------

    def number_lanes(self, first: int, count: int, before: int) -> None:
        """Give the worker ``count`` lanes.

        They follow ``first`` lanes of the same shard and ``before`` lanes of other shards.
        """
        self.columns = range(first, first + count)
        self.lanes = range(before + first, before + first + count)

    def record_seeds(self, seeds: Sequence[int]) -> None:
        """Record the seeds of the worker's lanes."""
        self.seeds = seeds

    def record_state(self, state: bytes) -> None:
        """Record the state that the transforms of the environment were asked to load."""
        self.state = state

    def bind(self, board: Board, actions: NDArray[Any] | None) -> None:
        """Use the progress board and the actions in shared memory."""
        self.board, self.actions = board, actions

    def mark_ready(self) -> None:
        """Record that the worker can step. The time limit of a step applies from now on."""
        self.ready = True

    # --- questions and answers --------------------------------------------------------------------

    def ask(self, message: object) -> None:
        """Send a question, unless the worker failed, and count one more answer as owed."""
        if not self.asked:
            self.since = time.monotonic()
        self.asked += 1
        if self.failed is None:
            self.link.send(message)

    def receive(self) -> Any:
        """Receive and record the next message: an answer, a request for actions, or `Gone`."""
        message = self.link.hear()
        if isinstance(message, Gone):
            return message
        self.since = time.monotonic()
        if isinstance(message, ActionRequest):
            self.wants = message
        else:
            self.asked -= 1
            self.state = getattr(message, "state", None) or self.state
        return message

    def act(self, actions: object) -> None:
        """Send the worker the actions that it requested."""
        self.wants, self.since = None, time.monotonic()
        self.link.send(actions)

    def idle_seconds(self) -> float:
        """Read the board, and return the time since the worker was asked or last made progress."""
        now = time.monotonic()
        filled = self.board[FILLED], self.board[STEPPED]
        if filled != self.filled:
            self.filled, self.since = filled, now
        return now - self.since

    # --- failures ---------------------------------------------------------------------------------

    def fail(self, error: Exception, complete: LeaseResult | None = None) -> None:
        """Mark the worker as failed: it owes no answer, and gets no more questions.

        ``complete`` is the complete part of the lease in which the worker raised.
        """
        self.asked, self.wants = 0, None
        self.failed, self.complete = error, complete

    def postpone_failure(self) -> None:
        """Let the pool report the failure again, as an answer that the worker owes."""
        self.asked = 1

    def take_failure(self) -> Exception | None:
        """Return the error that made the worker fail, if any. A failed worker owes no answer."""
        if self.failed is not None:
            self.asked = 0
        return self.failed

    def take_complete(self) -> LeaseResult | None:
        """Return the complete part of the lease in which the worker raised.

        Return None if there is none, or if an earlier call returned it.
        """
        complete, self.complete = self.complete, None
        return complete

    # --- its end ----------------------------------------------------------------------------------

    def restart(self, link: Link) -> None:
        """Continue as the worker behind ``link``, whose start asks for its first answer."""
        self.link = link
        self.asked, self.since = 1, time.monotonic()
        self.ended, self.ready, self.failed = False, False, None
        self.complete = None

    def end(self) -> None:
        """End the worker, dead or alive."""
        self.asked, self.wants = 0, None
        self.ended = True
        self.link.end()

    def abandon(self) -> None:
        """Abandon a worker that cannot be killed: it stops after its step, which is not counted."""
        self.asked, self.wants = 0, None
        self.ended = True
        seen = [self.board[word] for word in range(BOARD_WORDS)]
        self.board[HALT] = STOP
        self.board = new_board()
        for word, value in enumerate(seen):
            self.board[word] = value
        self.link.kill()
