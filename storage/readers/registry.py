"""Readers of other formats than ours, found among the installed packages."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from tallyroll.storage.readers.row_reader import RowReader

GROUP = "tallyroll.readers"
"""The group of entry points, each of them a subclass of `RowReader`."""


def reader_at(path: Path) -> RowReader | None:
    """Return the reader by the first registered class that knows ``path``; None without one."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        kind: type[RowReader] = entry.load()
        if (reader := kind.at(path)) is not None:
            return reader
    return None
