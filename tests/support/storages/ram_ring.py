"""A storage that another package could provide: a ring of tensors in the memory of a device."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tallyroll.storage.engine.columns import StepwiseRows
from tallyroll.storage.errors import NotInitialised, SchemaMismatch, StorageClosed
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.run_claim import RunClaim


class RamColumn(ColumnReader):
    """A column that is a tensor [ring, ...], possibly on a device."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        at = torch.from_numpy(rows % len(self._values)).to(self._values.device)
        found = self._values[at].cpu().numpy()
        if out is None:
            return found
        np.copyto(out, found)
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.take(np.arange(start, stop))


class RamRows(RowReader):
    """The newest ``size`` rows."""

    def __init__(self, size: int) -> None:
        self.path, self.ring, self.stop = Path("memory"), size, 0
        self.entries: list[dict[str, Any]] = []
        self.columns: dict[Key, torch.Tensor] = {}
        self.made: Schema | None = None
        self.newest: tuple[int, bytes] | None = None

    @property
    def schema(self) -> Schema:
        if self.made is None:
            raise NotInitialised("a ring in memory has no schema before its first run.")
        return self.made

    @property
    def span(self) -> range:
        return range(max(0, self.stop - self.ring), self.stop)

    @property
    def manifest(self) -> dict[str, Any]:
        return {"id": "memory", "runs": self.entries}

    @property
    def initialised(self) -> bool:
        return self.made is not None

    @property
    def record(self) -> tuple[int, bytes] | None:
        return self.newest

    def column(self, key: Key) -> ColumnReader:
        return RamColumn(self.columns[key])


class RamRing:
    """A `RowSink` that is its own writer and keeps the entries of its runs."""

    mode = "append"
    in_one_call = False

    def __init__(self, size: int, device: str = "cpu") -> None:
        self.reader, self.turn, self.device = RamRows(size), threading.RLock(), device
        self.path, self.claim, self.flushed = self.reader.path, RunClaim(self), 0
        self.writer = self.runs = self

    def reserve(self, rows: int) -> None:
        """Do nothing, because a ring has all its space from the start."""

    def flush(self) -> None:
        self.flushed += 1

    def append(self, rows: StepwiseRows, record: bytes | None = None) -> range:
        reader, ring = self.reader, self.reader.ring
        if reader.closed:
            raise StorageClosed("the ring in memory was closed.")
        start, stop = reader.stop, reader.stop + rows.count
        slots = torch.arange(start, stop, device=self.device) % ring
        for key, values in zip(reader.keys, rows.as_arrays().values, strict=True):
            reader.columns[key][slots] = torch.from_numpy(np.array(values)).to(self.device)
        reader.stop = stop
        if record is not None:
            self.put_record(record)
        return range(start, stop)

    def put_record(self, payload: bytes) -> None:
        self.reader.newest = self.reader.stop, bytes(payload)

    # --- the entries of runs ----------------------------------------------------------------------

    def require_schema(self, schema: Schema) -> None:
        if found := self.reader.schema.differences(schema):
            raise SchemaMismatch("; ".join(found))

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        reader = self.reader
        if reader.made is None:
            for each in schema.columns:
                empty = np.zeros((reader.ring, *each.shape), each.numpy_dtype)
                reader.columns[each.key] = torch.from_numpy(empty).to(self.device)
            reader.made = schema
        self.require_schema(schema)
        reader.entries.append({**(provenance or {}), "first_row": reader.stop})

    def withdraw(self, run: Mapping[str, Any]) -> None:
        self.reader.entries[:] = [each for each in self.reader.entries if each != run]

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        entry = next(each for each in self.reader.entries if each is run)
        entry.setdefault("events", []).append(dict(event))
        return entry
