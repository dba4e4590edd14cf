"""The methods of a storage that pack its rows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.storage.datasets.packed.column_writers import FrameStack
from tallyroll.storage.datasets.packed.packed_reader import PackedReader
from tallyroll.storage.datasets.packed.packing import Format, PackReport, pack
from tallyroll.storage.errors import NotAStorage
from tallyroll.storage.readers.row_reader import RowReader, numbers_of
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.progress import Progress


class HasPacking:
    """A storage whose rows can be packed."""

    reader: RowReader

    def pack(
        self,
        path: str | os.PathLike[str],
        *,
        format: Format | None = None,
        codecs: Mapping[str | Key, str] | str | None = None,
        once: bool = True,
        stacks: Sequence[FrameStack] | None = None,
        progress: Progress | None = None,
    ) -> PackReport:
        """Write the committed rows to a new storage, compressed, in the order of trajectories.

        They get new numbers; `old_rows` of the packed storage has those of now. All bits of all
        rows are kept. It is there when the call returns, whole; if it fails, or the process is
        killed, nothing is at ``path``.

        Args:
            path: where it will be.
            format: ``"zarr"``, a directory that zarr-python, TensorStore and xarray read, or
                ``"hdf5"``, a file that h5py reads; None: HDF5 if ``path`` ends in ``.h5`` or
                ``.hdf5``, else Zarr.
            codecs: a codec for each column that is named, or for all: ``"zstd:3"``,
                ``"shuffle:5"`` (zstd after a shuffle of bytes, for numbers), ``"none"``; of HDF5
                ``"gzip:4"``.
            once: store an observation once that one row ends and the next begins with, and each
                frame of a stack once.
            stacks: columns that are stacks of frames; None looks which are.
            progress: called now and then with the rows that are packed, and with all.

        Raises:
            OpenError: ``path`` is taken, or cannot be written; or another process packs to it.
            StorageFull: they do not fit on the disk.
            Overrun: a ring's writer overwrites rows before they are packed.
            MissingLibrary: the extra ``pack``, or ``hdf5``, is not installed.
            ValueError: an argument is none of its values.
        """
        self.reader.require_open()
        return pack(
            self.reader,
            path,
            format=format,
            codecs=codecs,
            once=once,
            stacks=stacks,
            progress=progress,
        )

    def old_rows(self, index: Any = slice(None)) -> np.ndarray:
        """Return the numbers that rows had in the storage that was packed, int64.

        Raises:
            NotAStorage: this storage is not packed.
        """
        reader = self.reader
        if not isinstance(reader, PackedReader):
            raise NotAStorage(f"{reader.path} is not packed, and its rows have their own numbers.")
        return reader.old_rows(numbers_of(reader, index))
