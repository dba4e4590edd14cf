"""Consistent counts and records of a header, which show the valid rows."""

from __future__ import annotations

from typing import NamedTuple

from tallyroll.storage.engine.ring import first_valid
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.record_slots import Rewind

_LOOKS = 100


class HeaderCounts(NamedTuple):
    """A snapshot of the counts of a header, as `CommittedCounts.read` returns it."""

    head: int
    reserve: int
    floor: int

    def span(self, ring: int) -> range:
        """Return the numbers of the valid rows, counted over all rows ever written."""
        return range(min(self.head, first_valid(self.reserve, ring)), self.head)


class CommittedCounts:
    """The counts of a storage, which another process may change.

    Args:
        header: the header with the counts.
        follows: the initial value of the attribute `follows`.
    """

    def __init__(self, header: Header, *, follows: bool) -> None:
        self._header, self._ring = header, header.ring
        self.follows = follows
        """True if another process may write, so that counts and the rows of a ring may change."""

    def follow(self) -> None:
        """Expect another process to write from now on."""
        self.follows = True
        self._header.follow()

    @property
    def head(self) -> int:
        """The number of rows committed so far, by any process."""
        return self._header.head

    @property
    def floor(self) -> int:
        """The row at which the ring was last emptied, from which indices are counted."""
        return self._header.floor

    @property
    def rewinds(self) -> int:
        """The number of rewinds, after each of which row numbers may refer to other rows."""
        return self._header.rewinds

    @property
    def span(self) -> range:
        """The row numbers of the valid rows. The numbering counts all rows ever written."""
        if not self._ring:
            return range(self._header.head)
        head, reserve = self.now()
        return range(min(head, first_valid(reserve, self._ring)), head)

    def read(self) -> HeaderCounts:
        """Return a snapshot of all counts, so that one read of the header serves one read of rows.

        Another process may change the counts at any time. A reader compares `reserve` and `rewinds`
        again after it has copied the rows.
        """
        header = self._header
        if not self._ring:
            head = header.head
            return HeaderCounts(head, head, 0)
        floor = header.floor  # first, so that it is never above the valid rows
        head, reserve = self.now()
        return HeaderCounts(head, reserve, floor)

    def now(self) -> tuple[int, int]:
        """Return consistent ``head`` and ``reserve``.

        If a writer changes them all the time, ``head`` is older, which only hides the newest rows.
        """
        header = self._header
        counts = header.counts
        if counts is not None:
            return counts
        head, reserve = header.head, header.reserve
        for _ in range(_LOOKS if self.follows else 0):
            if header.head == head:
                break
            head, reserve = header.head, header.reserve
        return head, reserve

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest record, or None: the number of rows when it was written, and its payload."""
        header = self._header
        if not self.follows:
            return header.record
        # Records alternate between two slots, so one that is being written may hide the newest.
        for _ in range(_LOOKS):
            head, record = header.head, header.record
            if record is not None and header.head == head:
                break
        return record

    @property
    def undone(self) -> Rewind | None:
        """The committed rewind that a writer, dead or alive, has not finished, or None."""
        return self._header.undone

    @property
    def record_damaged(self) -> bool:
        """True if the newest record fails its check."""
        return self._header.records.damaged

    @property
    def left_open(self) -> bool:
        """True if a writer has the storage open or did not close it."""
        return self._header.open
