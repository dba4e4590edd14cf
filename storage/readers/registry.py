"""Readers of other formats than ours, found among the installed packages."""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tallyroll.storage.readers.row_reader import RowReader

GROUP = "tallyroll.readers"
"""The group of entry points, each of them a subclass of `RowReader`."""


def reader_at(path: Path) -> RowReader | None:
    """Return the reader by the first registered class that knows ``path``; None without one."""
    for entry in _registered(tuple((each, *_state(each)) for each in sys.path)):
        kind: type[RowReader] = entry.load()
        if (reader := kind.at(path)) is not None:
            return reader
    return None


@lru_cache(1)
def _registered(places: tuple[object, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points; looked for again when ``places`` are others: it takes 4 ms."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _state(place: str) -> tuple[int, ...]:
    """Return numbers that change when a package is installed in a directory, or removed."""
    try:
        found = os.stat(place or ".")
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns
