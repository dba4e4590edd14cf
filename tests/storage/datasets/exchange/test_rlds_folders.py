"""Test RLDS folders that TensorFlow Datasets read, and its own folders that Tallyroll reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rlds_kit as kit
import torch
from lerobot_kit import pictured
from rlds_rows import compare_ours, compare_theirs, rows_of_ours

from tallyroll.storage import (
    MemmapStorage,
    diff,
    import_dataset,
    open_storage,
    repair,
    verify,
    verify_dataset,
)
from tallyroll.storage.errors import InvalidDataset, InvalidSchema
from tallyroll.storage.ext.exchange.rlds import layout

pytest.importorskip("google.protobuf")
pytest.importorskip("google_crc32c")
pytest.importorskip("PIL")
from tallyroll.storage.ext.exchange.rlds.examples import features_in
from tallyroll.storage.ext.exchange.rlds.records import records


def exported(tmp_path: Path, rows: Any, name: str = "out", **options: Any) -> Any:
    """Write rows to a storage and export them. Return the report."""
    with MemmapStorage(tmp_path / f"{name}-rows") as storage:
        storage.extend(rows)
        return storage.export(tmp_path / name, "rlds", **options)


def come_back(tmp_path: Path, name: str = "out") -> None:
    """Import an export, compare all rows, and verify it."""
    assert verify_dataset(tmp_path / name).findings == ()
    import_dataset(tmp_path / name, tmp_path / f"{name}-back", "rlds")
    found = diff(tmp_path / f"{name}-rows", tmp_path / f"{name}-back")
    assert (found.changed, found.only, found.schema) == (0, (0, 0), ())
    assert found.equal


def lists_in(place: Path) -> list[dict[str, Any]]:
    """Return the features of all episodes of an export."""
    found: list[Any] = []
    for path in sorted(place.glob("*.tfrecord-*")):
        with path.open("rb") as file:
            found += records(file)
    return [features_in(content) for content in found]


# --- exports of Tallyroll -------------------------------------------------------------------------


def test_tensorflow_datasets_read_what_we_write(tmp_path: Path) -> None:
    """TensorFlow Datasets read the packed export once.

    Today's export has the same content and can be imported.
    """
    golden = kit.unpacked("ours", tmp_path)
    rows = rows_of_ours()
    assert exported(tmp_path, rows).lost == {}
    come_back(tmp_path)
    for name in (layout.FEATURES, layout.INFO):
        said, today = (json.loads((each / name).read_text()) for each in (golden, tmp_path / "out"))
        if name == layout.INFO:  # the name of the folder, and sizes of images
            said["name"] = today["name"] = "rows"
            said["splits"][0]["numBytes"] = today["splits"][0]["numBytes"] = "0"
        assert today == said
    for old, new in zip(lists_in(golden), lists_in(tmp_path / "out"), strict=True):
        assert {*old} == {*new}
        for name in old:
            if name.split("/")[-1] not in (
                "pixels",
                "plan",
                "stack",
            ):  # bytes that depend on the installed zlib
                assert old[name] == new[name], name
    import_dataset(golden, tmp_path / "golden", "rlds")
    assert diff(tmp_path / "out-rows", tmp_path / "golden").equal == 23
    with np.load(golden / "read.npz") as read:
        compare_ours(rows, dict(read))


def test_several_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SHARD_NBYTES", 1500)
    exported(tmp_path, pictured(31, 4))
    names = sorted(each.name for each in (tmp_path / "out").glob("*.tfrecord-*"))
    said = json.loads((tmp_path / "out" / layout.INFO).read_text())["splits"][0]
    assert len(names) == len(said["shardLengths"]) > 2
    assert names[1] == f"out-train.tfrecord-00001-of-{len(names):05d}"
    assert sum(map(int, said["shardLengths"])) == 8
    come_back(tmp_path)


@pytest.mark.parametrize("title", ["Run 7 (é)", "7", "-", "x" * 120])
def test_names_that_tensorflow_datasets_allows(title: str) -> None:
    assert layout.name_of(title).isidentifier()
    assert layout.name_of(title).islower()
    assert layout.RldsInfo.of(layout.info_json(layout.name_of(title), [3], 9)).splits[
        0
    ].lengths == (3,)


def test_next_observations_that_are_others_are_counted(tmp_path: Path) -> None:
    rows = pictured(9, 4, pixels=(8, 8, 1))
    rows["next", "pixels"][[1, 2, 7, 8]] ^= 1  # two within, one at an end, and the last of a cut
    rows["collector", "next_valid"] = torch.arange(9) != 3
    lost = {"next_observations": 2, "final_observations": 1}
    assert exported(tmp_path, rows).lost == lost


def test_an_episode_of_two_gigabytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writing = "tallyroll.storage.ext.exchange.rlds.writer"
    monkeypatch.setattr(f"{writing}._MOST_RECORD", 300)
    with pytest.raises(InvalidSchema, match="a trajectory of 4 rows takes"):
        exported(tmp_path, pictured(4, 4))
    assert not (tmp_path / "out").exists()


# --- datasets of other programs -------------------------------------------------------------------


LOST = {
    "d4rl": {"last_actions": 3, "single_steps": 1},
    "robots": {"columns": 2, "last_actions": 6, "splits": 2},
    "kinds": {"columns": 4, "last_actions": 3},
    "appended": {"last_actions": 5},
    "of_4_3": {"columns": 1, "last_actions": 3},
    "of_4_5": {"columns": 1, "last_actions": 3},
}
ROWS = {"d4rl": 17, "robots": 18, "kinds": 9, "appended": 25, "of_4_3": 9, "of_4_5": 9}
COLUMNS = {"d4rl": 2, "robots": 8, "kinds": 24, "appended": 4, "of_4_3": 5, "of_4_5": 5}


@pytest.mark.parametrize("name", LOST)
def test_what_tensorflow_datasets_wrote(name: str, tmp_path: Path) -> None:
    """Every value equals the value that TensorFlow Datasets reads."""
    place = kit.unpacked(name, tmp_path)
    report = import_dataset(place, tmp_path / "back", "rlds")
    assert (report.rows, report.lost, report.numbered) == (ROWS[name], LOST[name], False)
    assert verify(tmp_path / "back", skip=["nan"]).sound
    with np.load(place / "read.npz") as read, open_storage(tmp_path / "back") as back:
        assert compare_theirs(back, dict(read)) == COLUMNS[name]
    assert verify_dataset(place).findings == ()


def test_states_that_can_be_counted(tmp_path: Path) -> None:
    """Two equal episodes are plausible if observations are integers.

    Two equal episodes of real numbers are reported.
    """
    for dtype, checks in (("int64", []), ("float32", ["episodes"])):
        step = {"observation": kit.tensor(dtype), **kit.FLAGS}
        one = {"steps/observation": np.arange(3, dtype=dtype), **kit.flags(3, terminal=True)}
        said = kit.dictionary(steps=kit.dataset(kit.dictionary(**step)))
        kit.write(tmp_path / dtype, [[one, one]], said)
        report = verify_dataset(tmp_path / dtype)
        assert [each.check for each in report.findings] == checks
        assert report.rows == 4


def test_a_writer_that_was_killed(tmp_path: Path) -> None:
    """TensorFlow Datasets holds the last episode in memory, and the others can be saved."""
    place = kit.unpacked("killed", tmp_path)
    (finding,) = verify_dataset(place).findings
    file = "catch-train.tfrecord-00002"
    assert (finding.check, finding.places[0].file) == ("files", file)
    report = repair(place, tmp_path / "saved")
    assert (report.kind, report.rows, report.lost_rows) == ("rlds", 18, None)
    assert [(each.message, each.place.file) for each in report.lost] == [
        ("a file of records is empty", file)
    ]
    (place / "dataset_info.json").unlink()
    with (place / "catch-train.tfrecord-00001").open("r+b") as shard:
        shard.truncate(shard.seek(0, 2) - 1)
    report = repair(place, tmp_path / "less", "rlds")
    assert (report.rows, len(report.lost)) == (12, 2)
    assert report.lost[0].place.episode == 1
    assert verify(tmp_path / "less").sound
    (place / "features.json").unlink()
    with pytest.raises(InvalidDataset, match=r"Copy features.json from an intact dataset"):
        repair(place, tmp_path / "none", "rlds")


def test_our_export_is_repaired_by_its_own_text(tmp_path: Path) -> None:
    """The text of the export restores ids and columns.

    If the text is unreadable, the export is repaired like any other dataset.
    """
    exported(tmp_path, pictured(23, 6, pixels=(8, 8, 3)))
    (path,) = (tmp_path / "out").glob("*.tfrecord-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    report = repair(tmp_path / "out", tmp_path / "saved")
    assert (report.rows, len(report.lost)) == (17, 1)
    found = diff(tmp_path / "out-rows", tmp_path / "saved")
    assert (found.equal, found.changed, found.only, found.schema) == (17, 0, (6, 0), ())
    (tmp_path / "out" / layout.ABOUT).write_text('{"tallyroll_exchange": 99}')
    info = (tmp_path / "out" / layout.INFO).read_text().replace('"4"', '"9"')
    (tmp_path / "out" / layout.INFO).write_text(info)
    report = repair(tmp_path / "out", tmp_path / "theirs")
    assert (report.rows, len(report.lost)) == (17, 2)
    assert str(report.lost[1]).endswith("it has 4 of 9: a file of records lacks episodes")


def test_flags_that_are_missing_or_early(tmp_path: Path) -> None:
    """Without ``is_last``, an episode counts as cut.

    A flag in the middle of an episode is counted but does not end it.
    """
    step = {"observation": kit.tensor("float32"), "is_terminal": kit.tensor("bool")}
    step |= {"done": kit.tensor("float32"), "is_last": kit.tensor("bool")}
    one = {"steps/observation": np.arange(5, dtype=np.float32), "steps/done": np.zeros(5, "f4")}
    no, late, early = np.zeros(5, int), np.array([0, 0, 0, 0, 1]), np.array([0, 1, 0, 0, 1])
    episodes = [
        one | {"steps/is_last": last, "steps/is_terminal": terminal}
        for last, terminal in ((late, late), (late, no), (no, no), (early, no))
    ]
    said = kit.dictionary(steps=kit.dataset(kit.dictionary(**step)))
    kit.write(tmp_path / "walk", [episodes], said)
    report = import_dataset(tmp_path / "walk", tmp_path / "back", "rlds")
    assert (report.rows, report.lost) == (16, {"ends_within_episodes": 1})
    with open_storage(tmp_path / "back") as back:
        assert back.trajectories.ends.tolist() == ["terminated", "truncated", "cut", "truncated"]
        assert ("infos", "done") in back.schema.keys
    del step["is_last"], step["is_terminal"]
    for each in episodes:
        del each["steps/is_last"], each["steps/is_terminal"]
    said = kit.dictionary(steps=kit.dataset(kit.dictionary(**step)))
    kit.write(tmp_path / "bare", [episodes[:2], episodes[2:]], said)
    import_dataset(tmp_path / "bare", tmp_path / "bare-back", "rlds")
    with open_storage(tmp_path / "bare-back") as back:
        assert back.trajectories.ends.tolist() == ["truncated"] * 4
