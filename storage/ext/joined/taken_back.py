"""Watch whether members of a union take rows back, at little cost a read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from tallyroll.storage.errors import StateMismatch
from tallyroll.storage.ext.joined.members import Member

_SECONDS: Final = 0.02


class TakenBack:
    """Counts how often rows of the members were taken back.

    Only a writer does that: members that one has open are asked each time, others now and then,
    whether one has opened them.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._open: list[Member] = []
        self._others = 0
        self._next = -1.0

    @property
    def count(self) -> int:
        """The sum of all members' counts."""
        if time.monotonic() >= self._next:
            self._look()
        return self._others + sum([each.reader.rewinds for each in self._open])

    def _look(self) -> None:
        self._open = [each for each in self._members if each.reader.left_open]
        open_ones = {id(each) for each in self._open}
        self._others = sum(
            each.reader.rewinds for each in self._members if id(each) not in open_ones
        )
        self._next = time.monotonic() + _SECONDS

    def require(self, count: int) -> None:
        """Raise `StateMismatch` unless it is still ``count``."""
        if self.count != count:
            for each in self._members:
                require_kept(each)


def require_kept(member: Member) -> None:
    """Raise `StateMismatch` if rows of a member were taken back since the union was opened."""
    if member.reader.rewinds != member.rewinds:
        raise StateMismatch(
            f"{member.path} had rows taken back since this union was opened, and its numbers may "
            "mean others now. Open the union again."
        )
