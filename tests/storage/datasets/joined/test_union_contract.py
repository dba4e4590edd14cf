"""Run the contract of readers on a union of three storages, each with the rows of one lane."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tallyroll.storage import MemmapStorage, open_storage, verify
from tallyroll.storage.ext.joined.maps import JoinedMaps
from tallyroll.storage.ext.testing.reader_contract import _Both, _Paths, collected
from tallyroll.storage.rows.keys import LANE
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.testing import ReaderContract


class TestUnion(ReaderContract):
    def write_rows(self, source: DiskStorage, path: Path) -> None:
        path.mkdir()
        lane = source.reader.column(LANE).take(np.arange(len(source)))
        for each in range(3):
            rows = np.flatnonzero(lane == each)
            columns = {key: source.reader.column(key).take(rows) for key in source.schema.keys}
            with MemmapStorage(path / f"part-{each}") as part:
                part.initialise(source.schema, {"part": each})
                part.extend(columns, ids="fresh")

    @pytest.fixture
    def paths(self, tmp_path: Path) -> _Paths:
        """Write the rows lane by lane, each lane as a run of its own."""
        rows = collected()
        lane = rows[LANE].numpy()
        first = np.searchsorted(np.sort(lane), np.arange(3)).tolist()
        with MemmapStorage(tmp_path / "file") as file:
            file.extend(rows[np.argsort(lane, kind="stable")], ids="fresh")
            runs = [{"part": each, "first_row": row} for each, row in enumerate(first)]
            file.writer.runs.write(runs)
        with open_storage(tmp_path / "file") as file:
            self.write_rows(file, tmp_path / "other")
        return _Paths(tmp_path / "file", tmp_path / "other" / "part-?")

    def test_verify_finds_what_it_finds_in_a_file(self, both: _Both) -> None:
        """Here the ids of the runs alternate in the file.

        No collector writes such a file.
        """
        assert verify(both.other.path).sound

    def test_verify_finds_what_is_wrong(self, tmp_path: Path) -> None:
        """The findings are those of the members: see `test_union_verified`."""


class TestUnionMemberByMember(TestUnion):
    """Run the contract with members that are not memory-mapped."""

    @pytest.fixture(autouse=True)
    def without_joined_maps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(JoinedMaps, "of", lambda *_: None)
