"""Read rows, and read them again if a writer took some back meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

Found = TypeVar("Found")


class Rewound(Protocol):
    """The part of a reader that says whether numbers of rows still mean the same rows."""

    @property
    def rewinds(self) -> int:
        """How often rows were taken back."""

    @property
    def rewinding(self) -> bool:
        """True while rows are taken back; and until the next writer, if this one was killed."""


def read_consistently(reader: Rewound, read: Callable[[], Found]) -> Found:
    """Return what ``read`` returns, called again if rows were taken back while it read.

    An error that it raises meanwhile may be of rows that are not there any more: once more, too.
    """
    begun: int | None = None
    while True:
        rewinds = reader.rewinds
        try:
            found = read()
        except Exception:
            if reader.rewinds == rewinds:
                # The rows may be gone, and the rewind not counted yet: the next try knows of it.
                if begun == rewinds or not reader.rewinding:
                    raise
                begun = rewinds
        else:
            if reader.rewinds == rewinds:
                return found
