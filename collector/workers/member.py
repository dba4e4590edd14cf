"""The parent's record of one worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from tallyroll.collector.slab.progress import FILLED, new_board
from tallyroll.collector.workers.messages import ActionRequest, LeaseResult
from tallyroll.collector.workers.transport import Board, Link


@dataclass(eq=False)
class Member:
    """One worker, and its state as the parent last observed it."""

    index: int
    link: Link
    lanes: range = range(0)
    """Its lanes, numbered over the run."""
    columns: range = range(0)
    """Its columns in a slab of all lanes that are made here."""
    board: Board = field(default_factory=new_board, repr=False)
    """Its progress board: a private one until the board of the place replaces it."""
    actions: NDArray[Any] | None = field(default=None, repr=False)
    """Actions in its slab, ``[slot, lane, ...]``."""
    seeds: Sequence[int] = ()
    state: bytes | None = None
    """The state of its environment's transforms."""
    ended: bool = False
    """True if the worker was ended."""
    ready: bool = False
    """True if the worker can step."""
    failed: Exception | None = None
    """The error after which the worker never answers again."""
    complete: LeaseResult | None = field(default=None, repr=False)
    """The complete part of the lease in which it raised, until that part is counted."""
    asked: int = 0
    """Number of questions that it has not answered yet."""
    since: float = 0.0
    """Monotonic time at which it was asked, or last made progress."""
    wants: ActionRequest | None = field(default=None, repr=False)
    """Its pending request for actions, which precedes its answer."""
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
        """Last actions of its lanes, or those in progress, ``[lane, ...]``; None if not known."""
        if self.actions is None or not self.ready:
            return None
        last: NDArray[Any] = self.actions[min(self.board[FILLED], len(self.actions) - 1)]
        return last
