"""Repair packed rows: save the rows whose chunks can all be decompressed."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import CorruptStorage, DiskFailed, NotAStorage
from tallyroll.storage.ext.dataset_checks.checker import DatasetFolder
from tallyroll.storage.ext.dataset_checks.disk import Ranges, require_readable, unread
from tallyroll.storage.ext.packed.archives import Archive, Hdf5Archive, ZarrArchive
from tallyroll.storage.ext.packed.chunk_cache import CachedArray, Chunks
from tallyroll.storage.ext.packed.codecs import stored_nbytes
from tallyroll.storage.ext.packed.front import MAGIC, Front, front_in
from tallyroll.storage.ext.packed.hdf5 import FrontChunks
from tallyroll.storage.ext.packed.layout import ArrayLayout, Layout
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.packed.shards import LocalFiles, ShardChunks
from tallyroll.storage.files.manifest import Manifest, parse_manifest
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema

_ROWS: Final = 2**16
"""The number of rows that are looked up at a time."""
_DAMAGE: Final = (CorruptStorage, DiskFailed, OSError)


class _ByFront(Archive):
    """An HDF5 file that is read with the copy of its metadata at the front.

    The file may be truncated, or have damaged metadata.
    """

    def __init__(self, path: Path, raw: Any, front: Front) -> None:
        self.path, self._raw, self._front = path, raw, front
        self._numbers = dict[tuple[str, ...], int]()

    def is_there(self) -> bool:
        """Return True."""
        return True

    def read_manifest(self) -> Manifest:
        """Return the manifest from the copy."""
        found = parse_manifest(self._front.manifest, self.path)
        arrays = Layout.from_json(
            found.get("packed"), Schema.from_json(found.get("schema")), self.path
        ).arrays
        self._numbers = {each.path: number for number, each in enumerate(arrays)}
        return found

    def chunks(self, layout: ArrayLayout) -> Chunks:
        """Return the chunks of an array."""
        number, front = self._numbers[layout.path], self._front
        if number >= len(front.places):
            raise CorruptStorage(f"the front of {self.path} does not locate all chunks.")
        kept = front.tables.get(number, ())
        return FrontChunks(self._read, self.path, layout, front.places[number], kept)

    def _read(self, nbytes: int, at: int) -> bytes:
        require_readable(getattr(self._raw, "gaps", []), at, at + nbytes)
        return os.pread(self._raw.fileno(), nbytes, at)

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class _AsItIs(ZarrArchive):
    """A Zarr group whose shards may be missing or truncated. Opening it does not check them."""

    def __init__(self, path: Path, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__(path)
        self._unreadable = unreadable

    def chunks(self, layout: ArrayLayout) -> Chunks:
        """Return the chunks of an array."""
        return _CutShards(_FilesWithGaps(self.inside, self._unreadable), layout)


class _FilesWithGaps(LocalFiles):
    """Shard files with ranges that the disk cannot read."""

    def __init__(self, inside: Inside, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__(inside)
        self._unreadable = unreadable
        self._gaps = dict[int, Ranges]()

    def open(self, path: Path) -> int:
        """Open a file and return its descriptor."""
        file = super().open(path)
        self._gaps[file] = self._unreadable.get(path.relative_to(self.root), [])
        return file

    def read(self, file: int, nbytes: int, begin: int) -> bytes:
        """Return bytes of a file; raise OSError (EIO) if some of them are unreadable."""
        require_readable(self._gaps[file], begin, begin + nbytes)
        return super().read(file, nbytes, begin)

    def read_some(self, file: int, nbytes: int, begin: int) -> bytes:
        """Return bytes up to the first unreadable byte."""
        stops = [start for start, stop in self._gaps[file] if stop > begin]
        return super().read(file, max(0, min([nbytes, *(each - begin for each in stops)])), begin)


class _CutShards(ShardChunks):
    """Shards whose index may be lost. A lost index is rebuilt from the lengths of the chunks."""

    def __init__(self, files: _FilesWithGaps, layout: ArrayLayout) -> None:
        super().__init__(files, layout, nbytes=0)
        self._some = files.read_some

    def _read_index(self, shard: int) -> np.ndarray:
        try:
            return super()._read_index(shard)
        except (CorruptStorage, DiskFailed):
            layout, file = self.layout, self._file(shard)
            size, most = self._source.size(file), layout.codec.most_stored(layout.chunk_nbytes)
            chunks = layout.shard_rows // layout.chunk_rows
            index = np.zeros((min(chunks, layout.chunks - shard * chunks), 2), np.int64)
            at = 0
            for line in index:
                with contextlib.suppress(OSError, ValueError, IndexError, struct.error):
                    content = self._some(file, min(most, size - at), at)
                    nbytes = stored_nbytes(layout.codec, content, layout.chunk_nbytes)
                    if nbytes <= size - at:
                        line[:] = at, nbytes
                        at += nbytes
                        continue
                break
            return index


def packed_reader(place: Path, folder: DatasetFolder) -> PackedReader | None:
    """Return a reader of packed rows, which may be damaged, or None for other storages.

    Raises:
        CorruptStorage: the manifest is damaged.
    """
    if not place.is_dir():
        return _of_hdf5(place, folder)
    archive = _AsItIs(place, folder.unreadable)
    return PackedReader(archive) if archive.is_there() else None


def _of_hdf5(place: Path, folder: DatasetFolder) -> PackedReader | None:
    """Return a reader of a packed HDF5 file, or None for another file.

    The reader uses the copy of the metadata at the front of the file, or HDF5 if there is no copy.

    Raises:
        CorruptStorage: the file starts with the marker of packed rows, but cannot be read.
    """
    named, front, raw = False, None, folder.opened(place.name)
    if raw is None:
        return None
    with contextlib.ExitStack() as stack:
        stack.enter_context(raw)
        try:
            named = raw.read(len(MAGIC)) == MAGIC
            front = front_in(raw)
        except OSError as error:
            if not unread(error):
                raise
        if front is not None:
            reader = PackedReader(_ByFront(place, raw, front))
            stack.pop_all()
            return reader
    try:
        return PackedReader(Hdf5Archive(place))
    except (CorruptStorage, NotAStorage):
        if named:
            raise
        return None


def unreadable_rows(reader: PackedReader) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield each column with a mask [n] of the rows that need an unreadable chunk."""
    damaged = dict[CachedArray, np.ndarray]()
    rows = len(reader.span)
    for key in reader.keys:
        column, wrong = reader.column(key), np.ones(rows, bool)
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            try:
                wanted = column.wanted(np.arange(start, stop) + reader.span.start)
            except _DAMAGE:  # the tables of the states cannot be read
                break
            array = wanted.array
            if array not in damaged:
                damaged[array] = _damaged_chunks(array)
            chunks = wanted.rows.reshape(stop - start, -1) // array.layout.chunk_rows
            wrong[start:stop] = damaged[array][chunks].any(1)
        yield key, wrong


def _damaged_chunks(array: CachedArray) -> np.ndarray:
    found = np.zeros(array.layout.chunks, bool)
    for chunk in array.each_chunk():
        try:
            array.check(chunk)
        except _DAMAGE:
            found[chunk] = True
    return found
