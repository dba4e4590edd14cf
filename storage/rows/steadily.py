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


def steadily(reader: Rewound, read: Callable[[], Found]) -> Found:
    """Return what ``read`` returns, called again if rows were taken back while it read.

    An error that it raises meanwhile may be of rows that are not there any more: once more, too.
    """
    while True:
        rewinds = reader.rewinds
        try:
            found = read()
        except Exception:
            if reader.rewinds == rewinds:
                raise
        else:
            if reader.rewinds == rewinds:
                return found
