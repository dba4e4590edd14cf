"""Retry of reads that raced with a rewind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Found = TypeVar("Found")


class RewindState(Protocol):
    """The part of a reader that shows whether row numbers still refer to the same rows."""

    @property
    def rewinds(self) -> int:
        """The number of rewinds."""

    @property
    def rewinding(self) -> bool:
        """True during a rewind, and after a kill until the next writer finishes it."""


def read_consistently(reader: RewindState, read: Callable[[], Found]) -> Found:
    """Return the result of ``read``, which is called again if rows were rewound meanwhile.

    An error of ``read`` during a rewind also causes a retry, because it may be due to rows that no
    longer exist.
    """
    begun: int | None = None
    while True:
        rewinds = reader.rewinds
        try:
            found = read()
        except Exception:
            if reader.rewinds == rewinds:
                # The rewind may not be counted yet. Retry once, when the counts are known.
                if begun == rewinds or not reader.rewinding:
                    raise
                begun = rewinds
        else:
            if reader.rewinds == rewinds:
                return found
