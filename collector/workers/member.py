"""One worker, and the facts about it that its parent knows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from tallyroll.collector.slab.progress import FILLED, new_board
from tallyroll.collector.workers.messages import ActionRequest, LeaseResult
from tallyroll.collector.workers.transport import Board, Link


@dataclass(eq=False)
class Member:
    """One worker, and what was heard of it last."""

    index: int
    link: Link
    lanes: range = range(0)
    """Its lanes, numbered over the run."""
    columns: range = range(0)
    """Its lanes among those of a slab of all that are made here."""
    board: Board = field(default_factory=new_board, repr=False)
    """One of its own until it has got that of the place."""
    actions: NDArray[Any] | None = field(default=None, repr=False)
    """``[slot, lane, ...]``, those of its slab."""
    seeds: Sequence[int] = ()
    state: bytes | None = None
    """The state of its environment's transforms."""
    ended: bool = False
    """Whether it is no more."""
    ready: bool = False
    """Whether it has all it needs to step."""
    failed: Exception | None = None
    """Why it will never answer again."""
    complete: LeaseResult | None = field(default=None, repr=False)
    """The complete part of the lease in which it raised, until that is counted."""
    asked: int = 0
    """Questions that it has not answered yet."""
    since: float = 0.0
    """When it was asked, or made progress last."""
    wants: ActionRequest | None = field(default=None, repr=False)
    """The lanes that wait for actions, before its answer."""
    filled: tuple[int, int] = field(default=(0, 0), repr=False)

    @property
    def who(self) -> str:
        """For messages."""
        lanes = self.lanes
        if not lanes:
            return f"worker {self.index}"
        several = f"lanes {lanes[0]} to {lanes[-1]}" if len(lanes) > 1 else f"lane {lanes[0]}"
        return f"worker {self.index} ({several}, {self.link.name})"

    @property
    def last_action(self) -> NDArray[Any] | None:
        """The last actions of its lanes, or the ones under way, ``[lane, ...]``."""
        if self.actions is None or not self.ready:
            return None
        last: NDArray[Any] = self.actions[min(self.board[FILLED], len(self.actions) - 1)]
        return last
