"""The rows of a storage together with overlays, as a storage."""

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
        """Do nothing: the storage that has the rows closes them."""

    def flush(self) -> None:
        """Flush the storage that has the rows."""
        self.of_rows.flush()

    def drop_overlay(self, name: str | Key) -> None:
        """Refuse: it may be one of those that are read here."""
        WritesElsewhere(self.reader, *_OVERLAID).refuse()

    def dumps(self, path: Any) -> None:
        """Write a checkpoint of the storage that has the rows, overlays included."""
        self.of_rows.dumps(path)

    def with_overlays(self, *names: str | Key) -> DiskStorage:
        """Return the rows with these overlays, too."""
        return self.of_rows.with_overlays(*self._names, *names)

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_overlays, (self.of_rows, self._names)


def storage_of_rows(storage: DiskStorage) -> DiskStorage:
    """Return the storage that has the rows, where overlays are read together with them."""
    return storage.of_rows if isinstance(storage, OverlaidStorage) else storage


def _with_overlays(rows: DiskStorage, names: tuple[str | Key, ...]) -> DiskStorage:
    return rows.with_overlays(*names)
