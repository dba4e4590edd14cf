"""Readers of what is no storage of ours, found among the packages that are installed."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

from tallyroll.storage.readers.row_reader import RowReader

GROUP = "tallyroll.readers"
"""The group of entry points, each of them a subclass of `RowReader`."""


def reader_at(path: Path) -> RowReader | None:
    """What the first registered reader that knows ``path`` makes of it; None where none does."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        kind: type[RowReader] = entry.load()
        if (reader := kind.at(path)) is not None:
            return reader
    return None
