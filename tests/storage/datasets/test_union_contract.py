"""A union passes the contract of readers: each of three storages has the rows of one lane."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import H5Storage, MemmapStorage, ZarrStorage, open_storage
from tallyroll.storage.rows.keys import LANE
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract
from tallyroll.storage.testing.reader_contract import _Paths, collected

KINDS: dict[str, list[type[DiskStorage]]] = {
    "memmap": [MemmapStorage] * 3,
    "mixed": [H5Storage, MemmapStorage, ZarrStorage],
}


def as_arrays(storage: DiskStorage, rows: Any) -> dict[Any, np.ndarray]:
    """Rows that do not say where they came from."""
    return {key: storage.reader.column(key).take(rows) for key in storage.schema.keys}


class _Contract(ReaderContract):
    kinds: list[type[DiskStorage]]

    def write_rows(self, source: DiskStorage, path: Path) -> None:
        path.mkdir()
        lane = source.reader.column(LANE).take(np.arange(len(source)))
        for each, kind in enumerate(self.kinds):
            rows = np.flatnonzero(lane == each)
            with kind(path / f"part-{each}", capacity=len(rows)) as part:
                part.initialise(source.schema, {"part": each})
                part.extend(as_arrays(source, rows), ids="fresh")
                part.writer.runs.write([{"first_row": 0, "part": each}])

    @pytest.fixture
    def paths(self, tmp_path: Path) -> _Paths:
        """The rows lane by lane, each lane as a run of its own."""
        rows = collected()
        lane = rows[LANE].numpy()
        first = np.searchsorted(np.sort(lane), np.arange(3)).tolist()
        with MemmapStorage(tmp_path / "file") as file:
            file.extend(rows[np.argsort(lane, kind="stable")], ids="fresh")
            runs = [{"first_row": row, "part": each} for each, row in enumerate(first)]
            file.writer.runs.write(runs)
        with open_storage(tmp_path / "file") as file:
            self.write_rows(file, tmp_path / "other")
        return _Paths(tmp_path / "file", tmp_path / "other" / "part-?")

    def test_verify_finds_what_is_wrong(self, tmp_path: Path) -> None:
        """Its findings are those of the members: see test_union_verify."""


class TestMemmapUnion(_Contract):
    kinds = KINDS["memmap"]


class TestMixedUnion(_Contract):
    kinds = KINDS["mixed"]
