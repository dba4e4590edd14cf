"""Overlays of an open storage: create, open and drop them, and read them with the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import ReadOnlyStorage
from tallyroll.storage.ext.overlays.header import checked_column
from tallyroll.storage.ext.overlays.overlaid import OverlaidReader
from tallyroll.storage.ext.overlays.overlay import Overlay
from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.ext.overlays.overlay_set import Overlays
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.dtypes import NAMES, TORCH
from tallyroll.storage.rows.keys import Key, as_key
from tallyroll.storage.stores.row_store import RowStore


class StorageOverlays:
    """The overlays of one storage, and the readers that include some of them as columns.

    Args:
        storage: the storage that has the rows.
        files: the overlay files, if another storage object has opened them already.
    """

    def __init__(self, storage: RowStore, files: Overlays | None = None) -> None:
        self._storage = storage
        self._files = files
        self._readers: dict[Any, tuple[RowReader, tuple[OverlayFile, ...]]] = {}

    @property
    def files(self) -> Overlays:
        """The overlay files."""
        if self._files is None:
            self._files = Overlays(self._rows())
        return self._files

    def overlay(
        self,
        name: str | Key,
        dtype: torch.dtype | np.dtype[Any] | str | None,
        shape: Sequence[int] | int,
        fill: bool | int | float | complex,
        writable: bool | None,
    ) -> Overlay:
        """Return an overlay as `DiskStorage.overlay` does."""
        reader, key = self._rows(), as_key(name)
        writable = self._storage.mode != "read" if writable is None else writable
        if dtype is None:
            file = self.files.open(key, writable=writable)
        else:
            kept = checked_column(key, _dtype_of(dtype), shape, fill)
            file = self.files.made(kept, writable=writable)
        return Overlay(reader, file)

    def names(self) -> list[str | Key]:
        """Return the names of all overlays; a nested name is a tuple."""
        reader = self._storage.reader
        if not isinstance(reader, FileReader | OverlaidReader) or not reader.initialised:
            return []
        self._rows()
        return [key[0] if len(key) == 1 else key for key in self.files.keys()]

    def drop(self, name: str | Key) -> None:
        """Remove an overlay as `DiskStorage.drop_overlay` does."""
        reader = self._rows()
        if self._storage.mode == "read":
            raise ReadOnlyStorage(
                f'{reader.path} was opened with mode="read". Open it with mode="append" to drop an '
                "overlay."
            )
        self._readers.clear()
        self.files.drop(as_key(name))

    def reader_with(self, keys: tuple[str | Key, ...]) -> RowReader:
        """Return a reader of the rows that includes the overlays among ``keys``."""
        if (known := self._readers.get(keys)) is not None:
            reader, files = known
            if all(file.is_current for file in files):
                return reader
        reader, files = self._storage.reader, ()
        every = dict.fromkeys(map(as_key, keys))
        if added := [key for key in every if key not in reader.keys]:
            if not isinstance(reader, FileReader) or not all(each in self.files for each in added):
                return reader
            files = tuple(self.files.open(key) for key in added)
            reader = OverlaidReader(reader, files)
        self._readers[keys] = reader, files
        return reader

    def close(self) -> None:
        """Close all files."""
        self._readers.clear()
        if self._files is not None:
            self._files.close()

    def flush(self) -> None:
        """Flush all values that were written."""
        if self._files is not None:
            self._files.flush()

    def _rows(self) -> FileReader:
        """Return the reader of the rows; raise an error unless it reads Tallyroll's own files."""
        reader = self._storage.reader
        reader = reader.rows if isinstance(reader, OverlaidReader) else reader
        reader.require_open()
        if not isinstance(reader, FileReader):
            raise ReadOnlyStorage(
                f"{reader.path} does not support overlays, because its reader is "
                f"{type(reader).__name__}. Copy the rows to a storage of Tallyroll."
            )
        reader.running()
        return reader


def _dtype_of(dtype: torch.dtype | np.dtype[Any] | str | Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and dtype in NAMES:
        return NAMES[dtype]
    try:
        return TORCH[np.dtype(dtype)]
    except (KeyError, TypeError) as error:
        raise TypeError(
            f"dtype: expected a torch dtype that a storage supports ({', '.join(NAMES)}), got "
            f"{dtype!r}."
        ) from error
