"""Storage that reads the rows of another storage together with its overlays."""

from __future__ import annotations

from typing import Any

from tallyroll.storage.ext.overlays.storage_overlays import StorageOverlays
from tallyroll.storage.replay.disk_storage import DiskStorage, WritesElsewhere
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.rows.keys import Key

_OVERLAID = "together with overlays", "whose with_overlays was called"


class OverlaidStorage(DiskStorage):
    """The rows of a storage, read together with overlays."""

    def __init__(self, rows: DiskStorage, names: tuple[str | Key, ...]) -> None:
        AsTensorStorage.__init__(self)
        if not names:
            raise TypeError("with_overlays: expected the names of one or more overlays, got none.")
        for name in names:
            rows.overlay(name, writable=False)
        reader = rows.reader_with([*rows.reader.keys, *names])
        self.of_rows, self._names = rows, names
        self.path, self.mode, self.reader = rows.path, rows.mode, reader
        self.writer = WritesElsewhere(reader, *_OVERLAID)
        self._overlays = StorageOverlays(self, rows.overlay_files)
        self._fit_ring()

    def close(self) -> None:
        """Do nothing: the underlying storage closes the files."""

    def flush(self) -> None:
        """Flush the underlying storage."""
        self.of_rows.flush()

    def drop_overlay(self, name: str | Key) -> None:
        """Raise an error, because the overlay may be one that this storage reads."""
        WritesElsewhere(self.reader, *_OVERLAID).refuse()

    def dumps(self, path: Any) -> None:
        """Write a checkpoint of the underlying storage, overlays included."""
        self.of_rows.dumps(path)

    def with_overlays(self, *names: str | Key) -> DiskStorage:
        """Return a storage that reads these overlays in addition to the present ones."""
        return self.of_rows.with_overlays(*self._names, *names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_overlays, (self.of_rows, self._names)


def storage_of_rows(storage: DiskStorage) -> DiskStorage:
    """Return the underlying storage of an `OverlaidStorage`, and any other storage unchanged."""
    return storage.of_rows if isinstance(storage, OverlaidStorage) else storage


def _with_overlays(rows: DiskStorage, names: tuple[str | Key, ...]) -> DiskStorage:
    return rows.with_overlays(*names)
