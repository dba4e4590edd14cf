"""A reader as a user writes one: a folder with a NumPy file for each column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tallyroll.storage import DiskStorage, Schema
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader

ABOUT = "mine.json"


def write_npy(source: DiskStorage, path: Path) -> None:
    """Write the rows of a storage to the folder ``path``."""
    path.mkdir()
    record = source.record and [source.record[0], source.record[1].decode()]
    about = {"manifest": source.manifest, "rows": len(source), "record": record}
    (path / ABOUT).write_text(json.dumps(about))
    for place, key in enumerate(source.schema.keys):
        np.save(path / f"{place}.npy", source.column(key))


class NpyColumn(ColumnReader):
    """A column that is a file."""

    def __init__(self, path: Path) -> None:
        self.values = np.load(path, mmap_mode="r", allow_pickle=False)

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy rows [*]."""
        if out is None:
            return np.array(self.values[rows])
        out[...] = self.values[rows]
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the rows ``[start, stop)``."""
        return np.asarray(self.values[start:stop])


class NpyReader(RowReader):
    """Reads the folders of `write_npy`."""

    def __init__(self, path: Path) -> None:
        self.path, self.about = path, json.loads((path / ABOUT).read_text())
        self.made = Schema.from_json(self.about["manifest"]["schema"])

    @classmethod
    def at(cls, path: Path) -> NpyReader | None:
        """Return a reader of such a folder."""
        return cls(path) if (path / ABOUT).is_file() else None

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.made

    @property
    def span(self) -> range:
        """The numbers of the rows."""
        return range(self.about["rows"])

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the storage that was written."""
        return self.about["manifest"]

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The record of that storage."""
        found = self.about["record"]
        return found and (found[0], found[1].encode())

    def column(self, key: tuple[str, ...]) -> ColumnReader:
        """Return the reader of a column."""
        if key not in self.keys:
            raise KeyError(key)
        return NpyColumn(self.path / f"{self.keys.index(key)}.npy")
