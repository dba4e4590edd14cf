"""Reader of packed rows."""
# ruff: noqa: D102 - `RowReader` documents the methods of all readers

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.available_memory import available_bytes, is_small_allocation
from tallyroll.storage.errors import CorruptStorage, InvalidSchema, NotAStorage
from tallyroll.storage.ext.packed.archives import Archive, Hdf5Archive, ZarrArchive
from tallyroll.storage.ext.packed.chunk_cache import CachedArray, Workers, budgets
from tallyroll.storage.ext.packed.columns import (
    PackedColumn,
    RowsColumn,
    StateColumn,
    States,
    copied,
)
from tallyroll.storage.ext.packed.layout import Layout
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.readers.row_reader import RowReader, numbers_of
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.index import TrajectoryIndex
from tallyroll.storage.trajectories.index_file import IndexOwner

CACHE_NBYTES: Final = 2**29
"""Default cache size in bytes, unless a tenth of the available memory is less."""


def usual_cache_nbytes(wanted: int) -> int:
    """Return the default cache size for ``wanted`` bytes of data."""
    most = min(wanted, CACHE_NBYTES)
    return most if is_small_allocation(most) else min(most, available_bytes() // 10)


class PackedReader(RowReader):
    """Reader of packed rows.

    Rows are numbered in packing order, from 0 or, for a packed ring, from the number of its oldest
    row.

    Args:
        archive: the files.
        cache_nbytes: the size of the cache of decompressed chunks, which holds at least one chunk
            of every array; None: 512 MiB, or a tenth of the available memory if that is less.
        threads: the number of threads that decompress; None: one per processor, at most eight.

    Raises:
        CorruptStorage: the files are damaged.
        FormatVersionMismatch: a later version of Tallyroll packed the rows.
        MissingLibrary: a library that is needed to read the files is not installed.
    """

    def __init__(
        self, archive: Archive, *, cache_nbytes: int | None = None, threads: int | None = None
    ) -> None:
        self.path, self._archive = archive.path, archive
        self._manifest = archive.read_manifest()
        try:
            self._schema = Schema.from_json(self._manifest.get("schema"))
        except InvalidSchema as error:
            raise CorruptStorage(
                f"{self.path} has an invalid schema ({error}). Restore it from a copy."
            ) from error
        self.layout = Layout.from_json(self._manifest.get("packed"), self._schema, self.path)
        self.trajectory_index = TrajectoryIndex()  # created now, since threads share it
        self._workers = Workers(threads)
        self._arrays = self._opened(cache_nbytes)
        self._states = [
            States(self.path, each, self._arrays.__getitem__, self.layout.rows)
            for each in self.layout.states
        ]

    @classmethod
    def at(cls, path: Path) -> PackedReader | None:
        archive = ZarrArchive(path) if path.is_dir() else Hdf5Archive(path)
        return cls(archive) if archive.is_there() else None

    def _opened(self, nbytes: int | None) -> list[CachedArray]:
        layouts = self.layout.arrays
        sizes = [each.chunks * each.chunk_nbytes for each in layouts]
        kept = budgets(sizes, usual_cache_nbytes(sum(sizes)) if nbytes is None else nbytes)
        arrays = []
        try:
            for each, some in zip(layouts, kept, strict=True):
                arrays.append(CachedArray(self._archive.chunks(each), some, self._workers))
        except BaseException:
            for array in arrays:
                array.close()
            self._archive.close()
            raise
        return arrays

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._workers.close()
            for each in self._arrays:
                each.close()
            self._archive.close()

    @property
    def cache_nbytes(self) -> int:
        """The maximum size of the cache of decompressed chunks in bytes."""
        return sum(each.max_nbytes for each in self._arrays)

    @property
    def threads(self) -> int:
        """The number of threads that decompress."""
        return self._workers.threads

    @property
    def loads(self) -> int:
        """The number of chunks decompressed so far."""
        return sum(each.loads for each in self._arrays)

    @property
    def nbytes(self) -> dict[tuple[str, ...], int]:
        """Disk space in bytes of each array, by path."""
        return {each.layout.path: each.chunks.nbytes for each in self._arrays}

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def span(self) -> range:
        self.require_open()
        return range(self.layout.first, self.layout.first + self.layout.rows)

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def record(self) -> tuple[int, bytes] | None:
        self.require_open()
        found = self._manifest.get("record")
        return (self.span.stop, found.encode()) if isinstance(found, str) else None

    def old_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers that ``rows`` [*] had in the source storage, int64 [*]."""
        return RowsColumn(self._arrays[self.layout.old_rows], self.layout.first).take(rows)

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        keys = self.keys if keys is None else keys
        return copied([self.column(key).wanted(rows) for key in keys])

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        if isinstance(rows, np.ndarray):
            return self.copies(rows)
        pairs = zip(self.keys, rows, strict=True)
        return copied([self.column(key).wanted(at) for key, at in pairs])

    def column(self, key: Key) -> PackedColumn:
        self.require_open()
        try:
            return self._columns[key]
        except KeyError:
            names = ", ".join(map(format_key, self.keys))
            note = excluded_note(self.runs, [key])
            raise KeyError(f"{self.path} has no column {key!r}; it has {names}.{note}") from None

    @cached_property
    def _columns(self) -> dict[Key, PackedColumn]:
        first = self.layout.first
        found: dict[Key, PackedColumn] = {}
        for column, place in zip(self.schema.columns, self.layout.columns, strict=True):
            if place.states is None:
                assert place.array is not None
                found[column.key] = RowsColumn(self._arrays[place.array], first)
            else:
                states = self._states[place.states]
                found[column.key] = StateColumn(states, column, place.is_next, first)
        return found

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        return self._archive.read_episodes(dtype, self.span.stop)

    def kept_index(self, *, whole: bool = False) -> SavedBlocks | None:
        return self._archive.read_index(IndexOwner(self.id, 0, 0), self.layout.rows, whole=whole)

    def made_wrongly(self) -> Iterator[str]:
        return self._archive.shown_wrongly(self.layout, self._manifest)

    def damaged_chunks(self, tell: Callable[[int], object]) -> Iterator[tuple[str, str]]:
        self.require_open()
        for array in self._arrays:
            for chunk in array.each_chunk():
                try:
                    array.check(chunk)
                except CorruptStorage as error:
                    yield "/".join(array.layout.path), str(error)
                tell(array.layout.chunk_nbytes)
        for states in self._states:
            try:
                states.tables()
            except CorruptStorage as error:
                yield "/".join(self.layout.arrays[states.layout.frames].path), str(error)


def old_rows(reader: RowReader, index: Any) -> np.ndarray:
    """Return the numbers that rows had before packing; see `DiskStorage.old_rows`."""
    if not isinstance(reader, PackedReader):
        raise NotAStorage(f"{reader.path} is not packed, so its rows have no earlier numbers.")
    return reader.old_rows(numbers_of(reader, index))
