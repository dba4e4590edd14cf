"""A sink as a user writes one by `RowSink`: rows are lists of arrays in memory."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage import RowReader, Schema
from tallyroll.storage.errors import NotInitialised, SchemaMismatch, StorageFull
from tallyroll.storage.readers.row_reader import ColumnReader
from tallyroll.storage.stores.run_claim import RunClaim


class ListColumn(ColumnReader):
    """A column of which each batch is an array."""

    def __init__(self, parts: list[np.ndarray]) -> None:
        self.values = np.concatenate(parts)

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy rows [*]."""
        if out is None:
            return self.values[rows]
        out[...] = self.values[rows]
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the rows ``[start, stop)``."""
        return self.values[start:stop]


class ListRows(RowReader):
    """All rows that were appended."""

    def __init__(self) -> None:
        self.path, self.count = Path("lists"), 0
        self.made: Schema | None = None
        self.parts: dict[tuple[str, ...], list[np.ndarray]] = {}
        self.entries: list[dict[str, Any]] = []
        self.newest: tuple[int, bytes] | None = None

    @property
    def schema(self) -> Schema:
        """The columns of the first run."""
        if self.made is None:
            raise NotInitialised("lists have no schema before their first run.")
        return self.made

    @property
    def span(self) -> range:
        """The numbers of the rows."""
        return range(self.count)

    @property
    def manifest(self) -> dict[str, Any]:
        """The runs."""
        return {"id": "lists", "runs": self.entries}

    @property
    def initialised(self) -> bool:
        """True once a run began."""
        return self.made is not None

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest record."""
        return self.newest

    def column(self, key: tuple[str, ...]) -> ColumnReader:
        """Return the reader of a column."""
        return ListColumn(self.parts[key])


class ListSink:
    """A `RowSink` of at most ``most`` rows, which is its own writer."""

    mode = "append"
    in_one_call = False

    def __init__(self, most: int) -> None:
        self.most, self.turn, self.reader = most, threading.RLock(), ListRows()
        self.path, self.flushed = self.reader.path, 0
        self.claim = RunClaim(self)
        self.writer = self.runs = self

    def reserve(self, rows: int) -> None:
        """Refuse more than ``most`` rows."""
        if rows > self.most:
            raise StorageFull(f"lists: expected at most {self.most} rows, got {rows}.")

    def flush(self) -> None:
        """Count the calls."""
        self.flushed += 1

    def append(self, rows: Any, record: bytes | None = None) -> range:
        """Append a batch."""
        reader = self.reader
        start, values = reader.count, rows.as_arrays().values
        for key, value in zip(reader.keys, values, strict=True):
            reader.parts[key].append(np.array(value))
        reader.count += rows.count
        if record is not None:
            self.put_record(record)
        return range(start, reader.count)

    def put_record(self, payload: bytes) -> None:
        """Replace the record."""
        self.reader.newest = self.reader.count, bytes(payload)

    def require_schema(self, schema: Schema) -> None:
        """Refuse columns that differ from the first run's."""
        if found := self.reader.schema.differences(schema):
            raise SchemaMismatch("; ".join(found))

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Add the entry of a run."""
        if self.reader.made is None:
            self.reader.parts = {each.key: [] for each in schema.columns}
            self.reader.made = schema
        self.require_schema(schema)
        self.reader.entries.append({**(provenance or {}), "first_row": self.reader.count})

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove an entry."""
        self.reader.entries[:] = [each for each in self.reader.entries if each != run]

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a call of environments to an entry."""
        entry = next(each for each in self.reader.entries if each is run)
        entry.setdefault("events", []).append(dict(event))
        return entry
