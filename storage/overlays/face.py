"""The methods of a storage that make, open, name and drop overlays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import ReadOnlyStorage
from tallyroll.storage.overlays.beside import Overlays
from tallyroll.storage.overlays.header import kept_as
from tallyroll.storage.overlays.overlaid import OverlaidReader
from tallyroll.storage.overlays.overlay import Overlay
from tallyroll.storage.overlays.overlay_file import OverlayFile
from tallyroll.storage.readers.file_reader import FileReader, Mode
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.dtypes import NAMES, TORCH
from tallyroll.storage.rows.keys import Key, Keys, as_key


class HasOverlays:
    """A storage whose rows may have overlays."""

    mode: Mode
    reader: RowReader

    def overlay(
        self,
        name: str | Key,
        dtype: torch.dtype | np.dtype[Any] | str | None = None,
        shape: Sequence[int] | int = (),
        fill: bool | int | float | complex = 0,
        *,
        writable: bool | None = None,
    ) -> Overlay:
        """Return a column beside the rows that may be written again; make it if there is none.

        Its values are in a file of their own, and rows are read as before: with its values by
        ``get(index, keys=[..., name])``, `column`, `n_step`'s ``reward_key``, and
        `DiskStorage.with_overlays` for slices and replay buffers. It has one writer at a time,
        from the first value that is set until the storage is closed.

        Args:
            name: a name, or a tuple of names, that is no column of the rows.
            dtype: of the values. None opens one that is there, whatever it keeps.
            shape: of one row's value.
            fill: the number that rows without a value have.
            writable: whether values may be set here. None: unless the storage was opened with
                mode="read". There, True writes to the overlay, and never to rows.

        Raises:
            SchemaMismatch: there is one of another dtype, shape or fill.
            InvalidSchema: a column has that name, or the overlay cannot be beside the rows.
            ColumnsMissing: there is none, and ``dtype`` is None.
            DamagedOverlay: its file cannot be used; `drop_overlay` removes it.
            ReadOnlyStorage: there is none, and it is not ``writable``.
            NotInitialised: the storage has no schema yet.
        """
        reader, key = self._rows(), as_key(name)
        writable = self.mode != "read" if writable is None else writable
        if dtype is None:
            file = self.overlay_files.open(key, writable=writable)
        else:
            kept = kept_as(key, _dtype_of(dtype), shape, fill)
            file = self.overlay_files.made(kept, writable=writable)
        return Overlay(reader, file)

    @property
    def overlays(self) -> list[str | Key]:
        """The names of all overlays: of one that has several, a tuple."""
        if not isinstance(self.reader, FileReader | OverlaidReader) or not self.reader.initialised:
            return []
        self._rows()
        return [key[0] if len(key) == 1 else key for key in self.overlay_files.keys()]

    def drop_overlay(self, name: str | Key) -> None:
        """Remove an overlay and its values. A damaged one can be removed, too.

        Raises:
            ColumnsMissing: there is none of that name.
            StorageLocked: another process writes to it.
            ReadOnlyStorage: the storage was opened with mode="read".
        """
        reader = self._rows()
        if self.mode == "read":
            raise ReadOnlyStorage(
                f'{reader.path} was opened with mode="read". Open it with mode="append" to drop an '
                "overlay."
            )
        self._readers.clear()
        self.overlay_files.drop(as_key(name))

    def reader_with(self, keys: Keys) -> RowReader:
        """Return the reader of the rows, together with those of ``keys`` that are overlays."""
        wanted = (keys,) if isinstance(keys, str) else tuple(keys)
        if (known := self._readers.get(wanted)) is not None:
            reader, files = known
            if all(file.is_current for file in files):
                return reader
        reader, files = self.reader, ()
        every = dict.fromkeys(map(as_key, wanted))
        if added := [key for key in every if key not in reader.keys]:
            if not isinstance(reader, FileReader) or not all(
                each in self.overlay_files for each in added
            ):
                return reader
            files = tuple(self.overlay_files.open(key) for key in added)
            reader = OverlaidReader(reader, files)
        self._readers[wanted] = reader, files
        return reader

    def _rows(self) -> FileReader:
        """Return the reader of the rows, of files of ours."""
        reader = self.reader.rows if isinstance(self.reader, OverlaidReader) else self.reader
        reader.require_open()
        if not isinstance(reader, FileReader):
            raise ReadOnlyStorage(
                f"{reader.path} is read by {type(reader).__name__}, and no overlay can be beside "
                "it. Copy the rows to a storage of ours."
            )
        reader.running()
        return reader

    @cached_property
    def overlay_files(self) -> Overlays:
        """The files of the overlays."""
        return Overlays(self._rows())

    @cached_property
    def _readers(self) -> dict[Any, tuple[RowReader, tuple[OverlayFile, ...]]]:
        return {}

    def _close_overlays(self) -> None:
        if "overlay_files" in self.__dict__:
            self._readers.clear()
            self.overlay_files.close()

    def _flush_overlays(self) -> None:
        if "overlay_files" in self.__dict__:
            self.overlay_files.flush()


def _dtype_of(dtype: torch.dtype | np.dtype[Any] | str | Any) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if isinstance(dtype, str) and dtype in NAMES:
        return NAMES[dtype]
    try:
        return TORCH[np.dtype(dtype)]
    except (KeyError, TypeError) as error:
        raise TypeError(
            f"dtype: expected one of torch's that a storage holds ({', '.join(NAMES)}), got "
            f"{dtype!r}."
        ) from error
