"""Test repairs of LeRobot recordings: killed ones, and those with damaged files."""

from __future__ import annotations

import contextlib
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("av")

import pyarrow as pa
import pyarrow.parquet as pq
from fault_kit import LENGTHS, ROWS, halve, rewrite, walk
from lerobot_faults import V2, V3
from lerobot_recordings import EPISODES, VIDEO_V3, data_v2, data_v3, sound_v2, sound_v3
from repair_kit import repair

from tallyroll.storage import InvalidDataset, open_storage, verify

GOLDEN = Path(__file__).parents[1] / "golden" / "lerobot-0.4.4-killed.zip"
KILLED = (7, 9, 11)
"""Rows of the episodes that LeRobot 0.4.4 had saved when it was killed before its `finalize`."""


def column(path: Path, *key: str) -> np.ndarray:
    with open_storage(path) as storage:
        return storage.reader.shown(key)


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """Unpack a recording that LeRobot did not finish. Its own reader finds no rows in it."""
    with zipfile.ZipFile(GOLDEN) as archive:
        archive.extractall(tmp_path / "killed")
    return tmp_path / "killed"


def test_all_saved_episodes_of_a_killed_recording(killed: Path, tmp_path: Path) -> None:
    data = killed / data_v3(0)
    with pytest.raises(pa.ArrowInvalid, match="magic bytes"):
        pq.read_table(data)
    before = data.read_bytes()
    report = repair(killed, tmp_path / "out")
    assert (report.kind, report.rows, report.whole) == ("lerobot", sum(KILLED), True)
    states = np.random.default_rng(0)
    wanted = []
    for count in KILLED:  # the values that the recorder drew
        for _ in range(count):
            state, action = states.normal(size=3), states.normal(size=2)
            wanted.append((*state, *action, states.normal()))
    values = np.asarray(wanted, np.float32)
    found = [column(tmp_path / "out", *key) for key in (("observation", "state"), ("action",))]
    found.append(column(tmp_path / "out", "next", "reward"))
    assert np.concatenate([each.reshape(sum(KILLED), -1) for each in found], 1).tobytes() == (
        values.tobytes()
    )
    ids = column(tmp_path / "out", "collector", "traj_ids")
    assert np.bincount(ids).tolist() == [*KILLED]
    assert verify(tmp_path / "out").sound
    assert data.read_bytes() == before
    assert {each.name for each in tmp_path.iterdir()} == {"killed", "out"}


def test_killed_while_it_saved_an_episode(killed: Path, tmp_path: Path) -> None:
    with (killed / data_v3(0)).open("r+b") as file:
        file.truncate((killed / data_v3(0)).stat().st_size - 40)
    report = repair(killed, tmp_path / "out")
    assert report.rows == sum(KILLED[:2])
    assert not report.whole
    assert report.lost_rows is None
    assert report.lost[0].place.file == str(data_v3(0))
    assert f"after {sum(KILLED[:2])} rows" in report.lost[0].place.what


def test_every_cut_gives_whole_episodes_or_nothing(killed: Path, tmp_path: Path) -> None:
    """A file that is cut anywhere gives only complete first episodes, and never a wrong row."""
    content = (killed / data_v3(0)).read_bytes()
    repair(killed, tmp_path / "whole")
    whole = column(tmp_path / "whole", "observation", "state").tobytes()
    saved = {0, *np.cumsum(KILLED).tolist()}
    for number, stop in enumerate(np.linspace(0, len(content) - 1, 12).astype(int).tolist()):
        (killed / data_v3(0)).write_bytes(content[:stop])
        try:
            report = repair(killed, tmp_path / f"out{number}")
        except InvalidDataset:
            continue
        assert report.rows in saved
        found = column(tmp_path / f"out{number}", "observation", "state").tobytes()
        assert whole.startswith(found)


def test_a_damaged_file_of_one_episode(tmp_path: Path) -> None:
    sound_v2(tmp_path / "rows")
    data = tmp_path / "rows" / data_v2(2)
    place = pq.read_metadata(data).row_group(0).column(0)
    rewrite(data, place.data_page_offset + place.total_compressed_size - 9, b"\xff" * 8)
    report = repair(tmp_path / "rows", tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS - LENGTHS[2], LENGTHS[2])
    assert report.lost[0].place.file == str(data_v2(2))
    kept = np.concatenate([walk(n, LENGTHS[n], 3) for n in (0, 1, 3)])
    assert column(tmp_path / "out", "observation", "state").tobytes() == kept.tobytes()
    with open_storage(tmp_path / "out") as storage:
        assert ("observation", "images", "top") in storage.reader.keys
    assert verify(tmp_path / "out").sound


def test_the_list_of_episodes_is_lost(tmp_path: Path) -> None:
    """The order of rows locates the videos: there is one, with a frame for each row."""
    sound_v3(tmp_path / "rows")
    halve(tmp_path / "rows" / EPISODES)
    report = repair(tmp_path / "rows", tmp_path / "out")
    assert (report.rows, report.whole) == (ROWS, True)
    pictures = column(tmp_path / "out", "observation", "images", "top")
    assert np.abs(pictures[30].astype(int) - 30).max() <= 6  # lossy: each frame has its number


def test_films_that_are_lost_are_left_out(tmp_path: Path) -> None:
    sound_v3(tmp_path / "rows")
    (tmp_path / "rows" / VIDEO_V3).unlink()
    report = repair(tmp_path / "rows", tmp_path / "out")
    assert (report.rows, report.lost_rows, report.whole) == (ROWS, 0, False)
    assert report.lost[0].place.column == "observation.images.top"


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_no_fault_makes_a_wrong_storage(version: str, tmp_path: Path) -> None:
    """Each fault of the lists is refused, or the storage has consecutive rows."""
    write, faults = (sound_v2, V2) if version == "v2" else (sound_v3, V3)
    write(tmp_path / "sound")
    for number, fault in enumerate(faults[:: 1 if os.environ.get("TALLYROLL_REPAIRS") else 6]):
        place, out = tmp_path / f"rows{number}", tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "sound", place)
        fault.inject(place)
        with contextlib.suppress(InvalidDataset):
            repair(place, out, "lerobot")
