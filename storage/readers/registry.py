"""Registry of readers that extensions and installed packages provide for other storages."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.readers.row_reader import RowReader

GROUP = "tallyroll.readers"
"""The group of entry points that name subclasses of `RowReader`."""

_OPENERS: Final = {
    "address": "tallyroll.storage.ext.remote.remote_archive",
    "several": "tallyroll.storage.ext.joined.union_storage",
    "sharded": "tallyroll.storage.ext.sharded.sharded_storage",
}
"""For each kind of storage, the extension module whose function ``open_at`` opens it."""


def open_by(kind: str, path: Any, mode: str, options: Mapping[str, Any]) -> Any:
    """Open a storage with the extension for its kind.

    Args:
        kind: ``"address"``, ``"several"`` (a list of paths, or a pattern) or ``"sharded"``.
        path: see `open_storage`.
        mode: see `open_storage`.
        options: further arguments of `open_storage`.
    """
    return import_module(_OPENERS[kind]).open_at(path, mode, **options)


def reader_at(path: Path) -> RowReader | None:
    """Return a reader from the first registered class that recognises ``path``, or None."""
    for entry in _registered(tuple((each, *_state(each)) for each in sys.path)):
        kind: type[RowReader] = entry.load()
        if (reader := kind.at(path)) is not None:
            return reader
    return None


@lru_cache(1)
def _registered(places: tuple[object, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points, cached until ``places`` change, because the search takes 4 ms."""
    return tuple(sorted(entry_points(group=GROUP), key=lambda entry: entry.name))


def _state(place: str) -> tuple[int, ...]:
    """Return numbers that change when a package is installed in, or removed from, a directory."""
    try:
        found = os.stat(place or ".")
    except (OSError, ValueError):
        return ()
    return found.st_dev, found.st_ino, found.st_mtime_ns
