"""Rows that say which storage they came from, so that what they are written to can note it."""

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
    """A reader, as far as rows want to know where they came from."""

    @property
    def closed(self) -> bool:
        """Whether it was closed."""

    @property
    def head(self) -> int:
        """Rows ever committed."""

    @property
    def manifest(self) -> dict[str, Any]:
        """The storage's manifest, as it is now."""


class Origin:
    """A storage's manifest, as far as it was read, for rows that outlive their reader.

    It keeps nothing open. A pickle of it is `False`: rows in another process are nobody's copy,
    and can be read there without this package.
    """

    __slots__ = ("_reader", "manifest", "until")

    def __init__(self, reader: Source) -> None:
        self._reader = weakref.ref(reader)
        self.manifest: dict[str, Any] | None = None
        self.until = 0
        """`manifest` has the runs of the rows below this number."""

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()

    def look(self) -> None:
        """Read the manifest again, if its reader is open."""
        reader = self._reader()
        if reader is None or reader.closed:
            return
        # What the manifest does not tell, or tells no more, is not known: rows are copied still.
        with suppress(StorageError, OSError):
            until = reader.head  # before: a run stands in the manifest before its rows are there
            manifest = reader.manifest
            if self.manifest is None or manifest["id"] == self.manifest["id"]:
                self.manifest, self.until = manifest, until


Numbers: TypeAlias = range | Callable[[], np.ndarray]
"""Of a slice of a ring, what gives the number of each row, [rows]; of others, where they were."""


def came_from(rows: TensorDictBase, origin: Origin, numbers: Numbers) -> None:
    """Let ``rows`` [n] say that they are the rows ``numbers`` of ``origin``.

    What is made of them does not.
    """
    vars(rows)[_ORIGIN] = origin, numbers


def numbers_of(rows: TensorDictBase) -> np.ndarray | None:
    """The number of each row, where ``rows`` are a slice of a ring."""
    _, numbers = vars(rows).get(_ORIGIN, (None, range(0)))
    return None if isinstance(numbers, range) else numbers()


Told: TypeAlias = tuple[Origin, range] | None
"""Where rows came from, and the smallest range there that has them; None: not known."""


def origin_of(rows: TensorDictBase) -> Told:
    """Where ``rows`` say that they came from."""
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
