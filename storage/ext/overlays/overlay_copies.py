"""Copies of overlays, to a storage that has the same rows or to one that is being written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from tallyroll.storage.errors import SchemaMismatch
from tallyroll.storage.ext.overlays.entries import entry_nbytes
from tallyroll.storage.ext.overlays.header import HEADER_NBYTES, OverlayColumn
from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.ext.overlays.overlay_set import Overlays
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, format_key

_CHUNK_NBYTES: Final = 2**24


def copy_overlays(source: FileReader, target: Overlays, *, exactly: bool) -> None:
    """Copy values from ``source`` to ``target``, for the rows that both storages have.

    With ``exactly``, the target ends up with the overlays of the source and no others. Without it,
    the target keeps overlays that the source lacks, and values of rows that the source lacks.

    Raises:
        DamagedOverlay: an overlay of the source cannot be used.
        SchemaMismatch: without ``exactly``, the target has an overlay with another dtype, shape
            or fill.
    """
    given = Overlays(source)
    try:
        keys = given.keys()
        for key in keys:
            file = given.open(key)
            try:
                into = target.made(file.header, writable=True)
            except SchemaMismatch:
                if not exactly:
                    raise
                target.drop(key)
                into = target.made(file.header, writable=True)
            _copy(source, file, target.reader, into)
        if exactly:
            for key in set(target.keys()).difference(keys):
                target.drop(key)
    finally:
        given.close()


def _copy(source: FileReader, file: OverlayFile, target: FileReader, into: OverlayFile) -> None:
    into.put(np.empty(0, np.int64), np.empty(0))  # clears the entries of rewound rows
    step = max(1, _CHUNK_NBYTES // max(1, file.header.column.row_nbytes))
    for each in (into, file):  # a row that has a value only in the target gets the fill
        for start, stop in each.stretches(step):
            rows = each.rows_in(start, stop)
            first = max(source.span.start, target.span.start)
            rows = rows[(rows >= first) & (rows < min(source.head, target.head))]
            if len(rows):
                into.put(rows, file.take(rows))


class RowsOf(Protocol):
    """The requested rows that come from one source."""

    @property
    def member(self) -> int:
        """The number of the source."""

    @property
    def at(self) -> np.ndarray | slice:
        """The positions of these rows among the requested rows."""

    @property
    def rows(self) -> np.ndarray:
        """The numbers of these rows in the source."""


@dataclass(frozen=True, slots=True)
class OverlayValues:
    """Values of one overlay for some of the requested rows."""

    key: Key
    at: np.ndarray
    """The positions [n], among the requested rows, of the rows with these values."""
    values: np.ndarray
    """The values [n, ...]."""


class OverlaysOf:
    """The overlays of one or more storages whose rows are being copied.

    If several storages have an overlay of the same name, those that differ from the first one in
    dtype, shape or fill are left out.

    Args:
        sources: readers of the storages.
        wanted: predicate that selects overlays by key.

    Raises:
        DamagedOverlay: an overlay cannot be used.
    """

    def __init__(self, sources: Sequence[RowReader], wanted: Callable[[Key], bool]) -> None:
        self._beside = [Overlays(each) for each in sources if isinstance(each, FileReader)]
        self.left_out: list[str] = []
        """Overlays that were not selected, or that differ from the first one, as ``PATH: NAME``."""
        self.every: set[Key] = set()
        """The keys of all overlays, selected or not."""
        self._files: dict[Key, dict[int, OverlayFile]] = {}
        try:
            for beside in self._beside:
                self._add(beside, sources.index(beside.reader), wanted)
        except BaseException:
            self.close()
            raise

    def _add(self, beside: Overlays, source: int, wanted: Callable[[Key], bool]) -> None:
        for key in beside.keys():
            self.every.add(key)
            known = self._files.get(key, {})
            file = beside.open(key) if wanted(key) else None
            if file is None or any(each.header != file.header for each in known.values()):
                self.left_out.append(f"{beside.reader.path}: {format_key(key)}")
            else:
                self._files[key] = {**known, source: file}

    @property
    def headers(self) -> list[OverlayColumn]:
        """The columns of the selected overlays."""
        return [next(iter(files.values())).header for files in self._files.values()]

    def nbytes(self, rows: int) -> int:
        """Return the disk space in bytes that the selected overlays need for ``rows`` rows."""
        return sum(HEADER_NBYTES + rows * entry_nbytes(each.column) for each in self.headers)

    def take(self, parts: Iterable[RowsOf], count: int) -> list[OverlayValues]:
        """Copy the values of ``count`` requested rows, and skip rows without a value.

        Args:
            parts: the requested rows, by source.
            count: the number of requested rows.

        Raises:
            Overrun: a writer changes values faster than they are read.
            ColumnsMissing: an overlay was dropped after this object was created.
        """
        found = []
        for part in parts if self._files else ():
            at = np.arange(count)[part.at]
            for files in self._files.values():
                if (file := files.get(part.member)) is not None:
                    values, own = file.values_of(part.rows)
                    found.append(OverlayValues(file.key, at[own], values[own]))
        return found

    def close(self) -> None:
        """Close the files."""
        for each in self._beside:
            each.close()


class NewOverlays:
    """Overlays of a storage that is being written.

    Args:
        reader: the reader of the new storage, whose schema exists already.
        kept: the columns of the overlays.
    """

    def __init__(self, reader: FileReader, kept: Iterable[OverlayColumn]) -> None:
        self._beside = Overlays(reader)
        self._files = {each.key: self._beside.made(each, writable=True) for each in kept}

    def put(self, values: Iterable[OverlayValues], first: int) -> None:
        """Write values; ``first`` is the row number of the first requested row.

        Raises:
            StorageFull: there is no space.
        """
        for each in values:
            self._files[each.key].put(first + each.at, each.values)

    def close(self) -> None:
        """Flush the values to the disk and close the files."""
        self._beside.flush()
        self._beside.close()
