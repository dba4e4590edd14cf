"""Marks on rows that name the storage of origin, so that another storage can record the origin."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from tensordict import TensorDictBase

from tallyroll.storage.errors import StorageError

_ORIGIN: Final = "_tallyroll_origin"


class Source(Protocol):
    """The part of a reader that an `Origin` needs."""

    @property
    def closed(self) -> bool:
        """True if the reader was closed."""

    @property
    def head(self) -> int:
        """The number of rows ever committed."""

    @property
    def manifest(self) -> dict[str, Any]:
        """The current manifest of the storage."""


class Origin:
    """The manifest of a storage when it was last read, for rows that outlive their reader.

    The object keeps no file open. It is pickled as ``False``, so that rows in another process have
    no origin and can be loaded there without this package.
    """

    __slots__ = ("_reader", "manifest", "until")

    def __init__(self, reader: Source) -> None:
        self._reader = weakref.ref(reader)
        self.manifest: dict[str, Any] | None = None
        self.until = 0
        """The number of rows whose runs are in `manifest`."""

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()

    def show(self, manifest: dict[str, Any] | None, until: int) -> None:
        """Set the manifest. It lists the runs of the first ``until`` rows."""
        self.manifest, self.until = manifest, until

    def look(self) -> None:
        """Read the manifest again, if the reader of the storage is open."""
        reader = self._reader()
        if reader is None or reader.closed:
            return
        # Without a readable manifest, the rows are copied with an unknown origin.
        with suppress(StorageError, OSError):
            until = reader.head  # first, since a run's entry precedes its rows
            manifest = reader.manifest
            if self.manifest is None or manifest["id"] == self.manifest["id"]:
                self.manifest, self.until = manifest, until


Numbers: TypeAlias = range | Callable[[], np.ndarray]
"""The range of the row numbers; for a slice of a ring, a function that returns them."""


def came_from(rows: TensorDictBase, origin: Origin, numbers: Numbers) -> None:
    """Mark ``rows`` [n] as the rows ``numbers`` of ``origin``.

    TensorDicts that are derived from them do not inherit the mark.
    """
    vars(rows)[_ORIGIN] = origin, numbers


def numbers_of(rows: TensorDictBase) -> np.ndarray | None:
    """Return the number of each row, if ``rows`` are a slice of a ring; else None."""
    _, numbers = vars(rows).get(_ORIGIN, (None, range(0)))
    return None if isinstance(numbers, range) else numbers()


RowOrigin: TypeAlias = tuple[Origin, range] | None
"""The origin of rows, and the smallest range of its rows that contains them; None if unknown."""


def origin_of(rows: TensorDictBase) -> RowOrigin:
    """Return the origin of rows that `came_from` marked, and their range in the origin, or None."""
    told = vars(rows).get(_ORIGIN)
    if not told or not told[0]:
        return None
    origin, numbers = told
    if isinstance(numbers, range):
        numbers = numbers if numbers.step > 0 else numbers[::-1]
        span = range(numbers[0], numbers[-1] + 1) if numbers else range(0)
    else:
        found = numbers()
        span = range(int(found.min()), int(found.max()) + 1) if found.size else range(0)
    if not span:
        return None
    if span.stop > origin.until:
        origin.look()
    return (origin, span) if span.stop <= origin.until else None
