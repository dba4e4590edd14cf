"""Test every kind of source with every kind of damage.

All readable data are kept, and the rest is listed. The gate runs a few cases with one draw each.
The others have three. ``TALLYROLL_REPAIRS`` sets another number for all.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from damage_kit import DAMAGES, SECTOR, SOURCES, Disk, Source, files_of
from repair_kit import repair

from tallyroll.storage import (
    InvalidDataset,
    RepairReport,
    import_dataset,
    open_storage,
    verify_dataset,
)

_DRAWS = int(os.environ.get("TALLYROLL_REPAIRS", "0"))
_NUMBERS = {("collector", name) for name in ("traj_ids", "step", "lane")}
"""Columns that are renumbered after a gap."""
_NOT_OF_ROWS = {("collector", "reset_seed"), ("collector", "next_valid"), ("next", "done")}
_FLAGS = ("reward", "terminated", "truncated")

Columns = dict[tuple[str, ...], np.ndarray]


def columns_of(place: Path) -> Columns:
    """Return the columns of a storage that equal the source's."""
    with open_storage(place) as storage:
        keys = {*storage.reader.keys} - _NUMBERS - _NOT_OF_ROWS
        return {key: np.array(storage.reader.shown(key)) for key in sorted(keys)}


def bits(columns: Columns, keys: list[tuple[str, ...]]) -> list[bytes]:
    """Return the bits of each row."""
    parts = [
        np.ascontiguousarray(columns[key]).view(np.uint8).reshape(len(columns[key]), -1)
        for key in keys
    ]
    return [each.tobytes() for each in np.concatenate(parts, 1)]


class Sound:
    """A sound source with its rows as an import stores them."""

    def __init__(self, source: Source, folder: Path) -> None:
        (folder / "sound").mkdir()
        self.source, self.place = source, source.write(folder / "sound")
        rows = self.place
        if source.kind != "tallyroll":
            rows = folder / "imported"
            import_dataset(self.place, rows, source.kind)
        self.columns = columns_of(rows)
        self.rows = len(next(iter(self.columns.values())))

    def copy(self, folder: Path) -> Path:
        """Return a copy of the source."""
        folder.mkdir()
        place = folder / self.place.name
        (shutil.copytree if self.place.is_dir() else shutil.copy)(self.place, place)
        return place

    def wrong(self, out: Path) -> int:
        """Return the number of rows in a repair that the source does not have."""
        found = columns_of(out)
        with open_storage(out) as storage:
            known = ("collector", "next_valid") in storage.reader.keys
            valid = storage.reader.shown(("collector", "next_valid")) if known else None
        count = len(next(iter(found.values())))
        keys = [key for key in self.columns if key in found]
        assert all(found[key].dtype == self.columns[key].dtype for key in keys)
        after = [key for key in keys if key[0] != "next" or key[-1] in _FLAGS]
        both = [(Counter(bits(self.columns, each)), bits(found, each)) for each in (keys, after)]
        whole = np.ones(count, bool) if valid is None else valid.reshape(-1)
        return sum(
            (both[0] if whole[row] else both[1])[1][row]
            not in (both[0] if whole[row] else both[1])[0]
            for row in range(count)
        )


def outcome(sound: Sound, place: Path, out: Path) -> RepairReport | None:
    """Repair a source. Return None if it is refused and nothing is left."""
    before = {each: each.read_bytes() for each in files_of(place) if not each.is_symlink()}
    try:
        report = repair(place, out, sound.source.kind)
    except InvalidDataset:
        report = None
    assert before == {each: each.read_bytes() for each in before}
    names = {each.name for each in out.parent.iterdir() if not each.name.startswith(place.name)}
    assert names <= {out.name, "elsewhere"}
    return report


def judge(sound: Sound, name: str, path: Path, report: RepairReport | None, out: Path) -> None:
    """Compare the result with the sound rows."""
    source = sound.source
    small = name in ("zeros", "unreadable")
    if report is None:
        allowed = source.vital if small else (*source.vital, *source.columns)
        whole = source.most >= sound.rows
        assert whole or any(fnmatch(path.name, each) for each in allowed), path
        return
    wrong = sound.wrong(out)
    assert wrong == 0 or (source.blind and name == "zeros"), f"{wrong} rows are wrong: {path}"
    assert report.rows == sound.rows or not report.whole
    if report.lost_rows is not None:
        assert report.rows + report.lost_rows == sound.rows, report.lost
    if small:
        assert report.rows >= sound.rows - source.most, path


def draw(sound: Sound, name: str, seed: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Damage a copy of a source, and check `verify` and `repair`.

    Return whether it was possible.
    """
    place = sound.copy(folder)
    with monkeypatch.context() as patch:
        disk = Disk(patch, SECTOR)
        path = DAMAGES[name](place, np.random.default_rng(seed), disk)
        if path is None:
            return False
        if sound.source.kind != "tallyroll":
            found = verify_dataset(place, sound.source.kind)
            assert not (disk.failed and found.sound), path
        report = outcome(sound, place, folder / "out")
    judge(sound, name, path, report, folder / "out")
    if name == "a link":  # its target is not read
        other = sound.copy(folder / "other")
        (other / path.relative_to(place)).unlink()
        without = outcome(sound, other, folder / "other" / "out")
        assert (report and report.rows) == (without and without.rows), path
    return True


_MORE = {("minari, arrow", "unreadable"): 40}
"""More draws: most blocks of a small file are metadata or padding, and few have values."""
_CASES = [
    pytest.param(
        source,
        name,
        _DRAWS or _MORE.get((source, name)) or (1 if (row + column) % 4 == 0 else 3),
        id=f"{source}, {name}",
        marks=() if (row + column) % 4 == 0 else pytest.mark.slow,
    )
    for row, source in enumerate(SOURCES)
    for column, name in enumerate(DAMAGES)
]


@pytest.mark.parametrize(("source", "name", "draws"), _CASES)
def test_what_is_left(
    source: str, name: str, draws: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not SOURCES[source].there:
        pytest.skip("its libraries are not installed")
    sound = Sound(SOURCES[source], tmp_path)
    if sound.place.is_file() and name in ("missing", "a link"):
        return  # a source of one file would be gone
    done = [draw(sound, name, seed, tmp_path / str(seed), monkeypatch) for seed in range(draws)]
    assert any(done) or name == "zeros"
