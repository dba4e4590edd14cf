"""A reader that another package could provide: rows in compressed chunks, which are not arrays."""

from __future__ import annotations

import json
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage.readers.row_reader import ColumnReader, RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.storages import DiskStorage

CHUNK = 16
ABOUT = "toy.json"


def write_chunks(source: DiskStorage, path: Path, first: int = 0) -> None:
    """Write the contents of a storage to a directory, with rows numbered from ``first`` on."""
    path.mkdir()
    record = source.record and [source.record[0], source.record[1].decode()]
    about = {"manifest": source.manifest, "rows": len(source), "first": first, "record": record}
    (path / ABOUT).write_text(json.dumps(about))
    for place, key in enumerate(source.schema.keys):
        for start in range(0, len(source), CHUNK):
            rows = source.column(key)[start : start + CHUNK]
            (path / f"{place}.{start}").write_bytes(zlib.compress(rows.tobytes()))


class ChunkedColumn(ColumnReader):
    """A column that holds one chunk at a time in memory."""

    def __init__(self, path: Path, place: int, first: int, column: Column) -> None:
        self._path, self._place, self._first, self._column = path, place, first, column
        self._chunk = lru_cache(1)(self._read)

    def _read(self, start: int) -> np.ndarray:
        content = zlib.decompress((self._path / f"{self._place}.{start}").read_bytes())
        column = self._column
        return np.frombuffer(content, column.numpy_dtype).reshape(-1, *column.shape)

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((*rows.shape, *self._column.shape), self._column.numpy_dtype)
        for at, row in np.ndenumerate(rows - self._first):
            out[at] = self._chunk(int(row) // CHUNK * CHUNK)[row % CHUNK]
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.take(np.arange(start, stop))


class ChunkedReader(RowReader):
    """A reader of directories that `write_chunks` wrote."""

    def __init__(self, path: Path) -> None:
        self.path, self._about = path, json.loads((path / ABOUT).read_text())
        self._schema = Schema.from_json(self._about["manifest"]["schema"])

    @classmethod
    def at(cls, path: Path) -> ChunkedReader | None:
        return cls(path) if (path / ABOUT).is_file() else None

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def span(self) -> range:
        first = self._about["first"]
        return range(first, first + self._about["rows"])

    @property
    def manifest(self) -> dict[str, Any]:
        return self._about["manifest"]

    @property
    def record(self) -> tuple[int, bytes] | None:
        found = self._about["record"]
        return found and (found[0], found[1].encode())

    def column(self, key: Key) -> ColumnReader:
        if key not in self.keys:
            raise KeyError(key)
        place = self.keys.index(key)
        return ChunkedColumn(self.path, place, self.span.start, self.schema.columns[place])


class WithoutArrays(RowReader):
    """A wrapper that hides the arrays of another reader, for example of a ring's."""

    def __init__(self, reader: RowReader) -> None:
        self._reader, self.path, self.ring = reader, reader.path, reader.ring

    @property
    def schema(self) -> Schema:
        return self._reader.schema

    @property
    def span(self) -> range:
        return self._reader.span

    @property
    def manifest(self) -> dict[str, Any]:
        return self._reader.manifest

    @property
    def is_written(self) -> bool:
        return self._reader.is_written

    def column(self, key: Key) -> ColumnReader:
        return _NoArray(self._reader.column(key))


class _NoArray(ColumnReader):
    def __init__(self, column: ColumnReader) -> None:
        self._column = column

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self._column.take(rows, out)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self._column.slice(start, stop)
