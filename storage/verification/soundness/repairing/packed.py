"""Repair of packed rows: those of which every chunk can be decompressed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from tallyroll.storage.datasets.packed.archives import ZarrArchive
from tallyroll.storage.datasets.packed.chunk_cache import CachedArray, Chunks
from tallyroll.storage.datasets.packed.layout import ArrayLayout
from tallyroll.storage.datasets.packed.packed_reader import PackedReader
from tallyroll.storage.datasets.packed.shards import LocalFiles, ShardChunks
from tallyroll.storage.errors import CorruptStorage, DiskFailed
from tallyroll.storage.rows.keys import Key

_ROWS: Final = 2**16
"""Rows that are looked up at a time."""
_DAMAGE: Final = (CorruptStorage, DiskFailed, OSError)


class _AsItIs(ZarrArchive):
    """A group of which shards may be missing, or cut: they are not looked at when it is opened."""

    def chunks(self, layout: ArrayLayout) -> Chunks:
        """Return the chunks of an array."""
        return ShardChunks(LocalFiles(self.inside), layout, nbytes=0)


def packed_reader(place: Path) -> PackedReader | None:
    """Return a reader of packed rows, of which some may be damaged; None of other storages.

    Raises:
        CorruptStorage: the manifest is damaged.
    """
    if not place.is_dir():
        return PackedReader.at(place)
    archive = _AsItIs(place)
    return PackedReader(archive) if archive.is_there() else None


def unreadable_rows(reader: PackedReader) -> Iterator[tuple[Key, np.ndarray]]:
    """Yield each column with the rows [n] that are made of a chunk that cannot be read."""
    damaged = dict[CachedArray, np.ndarray]()
    rows = len(reader.span)
    for key in reader.keys:
        column, wrong = reader.column(key), np.ones(rows, bool)
        for start in range(0, rows, _ROWS):
            stop = min(start + _ROWS, rows)
            try:
                wanted = column.wanted(np.arange(start, stop) + reader.span.start)
            except _DAMAGE:  # where its states begin is lost
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
