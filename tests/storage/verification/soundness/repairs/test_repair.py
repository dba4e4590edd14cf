"""Test repairs: all readable data are saved, bit for bit, and the rest is listed."""

from __future__ import annotations

import shutil
from pathlib import Path

import d4rl_faults
import h5py
import minari_faults
import numpy as np
import pytest
import torch
from fault_kit import ENDS, LENGTHS, ROWS, actions, halve, rewrite, walk
from repair_kit import repair

from tallyroll.storage import (
    InvalidDataset,
    MemmapStorage,
    PathIsTaken,
    StorageMissing,
    import_dataset,
    open_storage,
    verify,
)
from tallyroll.storage.ext.testing.trajectory_rows import trajectory_rows


def column(path: Path, *key: str) -> np.ndarray:
    """Return a column of a storage."""
    with open_storage(path) as storage:
        return storage.reader.shown(key)


def states(number: int) -> np.ndarray:
    """Return the observations of the kit's episode, from the first to the last."""
    return walk(number, LENGTHS[number] + 1, 3)


def sound(path: Path) -> bool:
    return verify(path).sound


# --- D4RL -----------------------------------------------------------------------------------------


def test_a_sound_file_loses_nothing(tmp_path: Path) -> None:
    d4rl_faults.sound(tmp_path / "rows.hdf5")
    report = repair(tmp_path / "rows.hdf5", tmp_path / "out")
    assert (report.rows, report.lost, report.whole, report.lost_rows) == (ROWS, (), True, 0)
    assert (report.kind, sound(tmp_path / "out")) == ("d4rl", True)
    import_dataset(tmp_path / "rows.hdf5", tmp_path / "imported", "d4rl")
    for key in (("observation",), ("next", "observation"), ("action",), ("infos", "qpos")):
        wanted = column(tmp_path / "imported", *key)
        assert column(tmp_path / "out", *key).tobytes() == wanted.tobytes()
    with open_storage(tmp_path / "out") as storage:
        assert storage.reader.runs[0]["imported_from"]["path"] == str(tmp_path / "rows.hdf5")


def test_damaged_chunks_are_gaps(tmp_path: Path) -> None:
    """A chunk of eight rows of actions cannot be decompressed. The other rows are saved."""
    place = tmp_path / "rows.hdf5"
    d4rl_faults.sound(place)
    with h5py.File(place, "r+") as file:
        values = file["actions"][()]
        del file["actions"]
        file.create_dataset("actions", data=values, chunks=(8, 2), compression="gzip")
    with h5py.File(place) as file:
        found = file["actions"].id.get_chunk_info_by_coord((24, 0))
    rewrite(place, found.byte_offset + found.size // 2, b"\xff" * 12)
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS - 8, 8)
    (lost,) = report.lost
    assert (lost.place.row, lost.rows, lost.place.file) == (24, 8, "rows.hdf5")
    kept = [*range(24), *range(32, ROWS)]
    assert column(tmp_path / "out", "action").tobytes() == actions(0, ROWS, 2)[kept].tobytes()
    ids, steps = (column(tmp_path / "out", "collector", name) for name in ("traj_ids", "step"))
    # The episode with the gap, rows 21 to 50, becomes two trajectories.
    assert ids.tolist() == [0] * 12 + [1] * 9 + [2] * 3 + [3] * 19 + [4] * 10
    assert steps[21:26].tolist() == [0, 1, 2, 0, 1]
    assert sound(tmp_path / "out")


def test_a_file_that_was_cut(tmp_path: Path) -> None:
    """Columns are contiguous, and part of the last one lies beyond the end of the file."""
    place = tmp_path / "rows.hdf5"
    columns = {
        "observations": np.concatenate([states(n)[:-1] for n in range(4)]),
        "actions": actions(0, ROWS, 2),
        "terminals": np.isin(np.arange(ROWS), ENDS),
        "rewards": walk(50, ROWS, 1)[:, 0],
    }
    with h5py.File(place, "w") as file:
        for name, values in columns.items():
            file.create_dataset(name, values.shape, values.dtype)
        for name, values in columns.items():
            file[name][...] = values
        end = file["rewards"].id.get_offset() + 20 * 4
    with place.open("r+b") as raw:
        raw.truncate(end + 2)
    report = repair(place, tmp_path / "out", "d4rl")
    # The row before the cut is in the middle of an episode, and its next observation is missing.
    assert (report.rows, report.lost_rows) == (19, ROWS - 19)
    assert {(each.place.row, each.rows) for each in report.lost} == {(20, ROWS - 20), (19, 1)}
    assert column(tmp_path / "out", "next", "reward")[:, 0].tolist() == pytest.approx(
        walk(50, ROWS, 1)[:19, 0].tolist()
    )
    valid = column(tmp_path / "out", "collector", "next_valid")
    assert np.flatnonzero(~valid).tolist() == [ENDS[0]]
    after = column(tmp_path / "out", "next", "observation")[18]
    assert after.tobytes() == columns["observations"][19].tobytes()
    assert sound(tmp_path / "out")


def test_chunks_that_were_never_written(tmp_path: Path) -> None:
    place = tmp_path / "rows.hdf5"
    with h5py.File(place, "w") as file:
        for name, width, dtype in (
            ("observations", 3, "f4"),
            ("actions", 2, "f4"),
            ("rewards", 0, "f4"),
            ("terminals", 0, "?"),
        ):
            shape = (ROWS, width) if width else (ROWS,)
            data = file.create_dataset(name, shape, dtype, chunks=(10, *shape[1:]))
            data[:30] = 1 if dtype == "?" else walk(3, 30, max(1, width)).reshape(30, *shape[1:])
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (30, ROWS - 30)
    assert [(each.place.row, each.rows) for each in report.lost] == [(30, ROWS - 30)]


def test_rows_reserved_and_never_written(tmp_path: Path) -> None:
    place = tmp_path / "rows.hdf5"
    d4rl_faults.sound(place)
    d4rl_faults.the_last_rows_never_written(place)
    report = repair(place, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (ROWS - 16, 16)
    assert report.lost[0].place.row == ROWS - 16


def test_a_writer_that_reads_may_follow_was_killed(tmp_path: Path) -> None:
    place, copy = tmp_path / "rows.hdf5", tmp_path / "copy.hdf5"
    with h5py.File(place, "w", libver="latest") as file:
        file["observations"], file["actions"] = walk(1, 20, 3), actions(1, 20, 2)
        file["rewards"], file["terminals"] = walk(2, 20, 1)[:, 0], np.arange(20) == 19
        file.flush()
        shutil.copy(place, copy)
    with pytest.raises(OSError, match=r"already open for write|consistency flag"):
        h5py.File(copy, "r")
    before = copy.read_bytes()
    report = repair(copy, tmp_path / "out", "d4rl")
    assert (report.rows, report.whole, sound(tmp_path / "out")) == (20, True, True)
    assert copy.read_bytes() == before


# --- Minari ---------------------------------------------------------------------------------------


def test_episodes_of_minari(tmp_path: Path) -> None:
    minari_faults.sound(tmp_path / "rows")
    minari_faults.an_action_missing(tmp_path / "rows")
    minari_faults.an_episode_missing(tmp_path / "rows")
    report = repair(tmp_path / "rows", tmp_path / "out")
    kept = [0, 1, 3]
    assert report.rows == sum(LENGTHS[number] for number in kept) - 1
    assert {each.place.episode for each in report.lost} == {2, 3}
    wanted = [states(number)[:-1] for number in kept]
    wanted[-1] = wanted[-1][:-1]
    found = column(tmp_path / "out", "position")
    assert found.tobytes() == np.concatenate(wanted).tobytes()
    after = column(tmp_path / "out", "next", "position")
    assert after[: LENGTHS[0]].tobytes() == states(0)[1:].tobytes()
    assert sound(tmp_path / "out")


def test_a_cut_file_of_minari_keeps_its_first_episodes(tmp_path: Path) -> None:
    minari_faults.sound(tmp_path / "rows")
    halve(tmp_path / "rows" / "data" / "main_data.hdf5")
    report = repair(tmp_path / "rows", tmp_path / "out")
    assert report.rows >= LENGTHS[0]
    assert report.lost_rows is None
    first = column(tmp_path / "out", "position")[: LENGTHS[0]]
    assert first.tobytes() == states(0)[:-1].tobytes()
    assert sound(tmp_path / "out")


# --- Tallyroll ------------------------------------------------------------------------------------


def stored(path: Path, *, finalize: bool) -> Path:
    """Write 600 rows in trajectories of 20."""
    with MemmapStorage(path) as storage:
        storage.extend(trajectory_rows(0, 600, steps=20))
        if finalize:
            storage.finalize()
    return path


def test_a_block_of_which_the_checksum_differs(tmp_path: Path) -> None:
    path = stored(tmp_path / "rows", finalize=True)
    rewrite(path / "observation.memmap", 300 * 4, b"\x55" * 8)
    assert not verify(path).sound
    report = repair(path, tmp_path / "out")
    assert (report.kind, report.rows, report.lost_rows) == ("tallyroll", 344, 256)
    assert [(each.place.row, each.rows) for each in report.lost] == [(256, 256)]
    assert column(tmp_path / "out", "observation")[:, 0].tolist() == [
        *range(256),
        *range(512, 600),
    ]
    steps = column(tmp_path / "out", "collector", "step")
    assert steps[254:260].tolist() == [14, 15, 0, 1, 2, 3]
    assert sound(tmp_path / "out")
    with open_storage(tmp_path / "out") as storage:
        assert storage.reader.runs[0]["copied_from"]


def test_a_sector_of_zeros_without_checksums(tmp_path: Path) -> None:
    path = stored(tmp_path / "rows", finalize=False)
    rewrite(path / "observation.memmap", 105 * 4, bytes(40))
    report = repair(path, tmp_path / "out")
    assert not report.whole
    # The row before them has another next observation, and either of the two may be wrong.
    assert [(each.place.row, each.rows) for each in report.lost] == [(104, 11)]
    found = column(tmp_path / "out", "observation")[:, 0]
    assert found.tolist() == sorted({*range(600)} - {*range(104, 115)})
    assert sound(tmp_path / "out")


def test_a_column_that_is_too_short(tmp_path: Path) -> None:
    path = stored(tmp_path / "rows", finalize=False)
    reward = path / "next" / "reward.memmap"
    with reward.open("r+b") as file:
        file.truncate(450 * 4)
    before = {each: each.read_bytes() for each in path.rglob("*") if each.is_file()}
    report = repair(path, tmp_path / "out")
    assert (report.rows, report.lost_rows) == (450, 150)
    assert report.lost[0].place.column == "next/reward"
    assert {each: each.read_bytes() for each in path.rglob("*") if each.is_file()} == before
    assert sound(tmp_path / "out")
    assert {each.name for each in tmp_path.iterdir()} == {"rows", "out"}


# --- refusals -------------------------------------------------------------------------------------


def test_refusals_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.hdf5").write_bytes(b"not HDF5" * 99)
    with pytest.raises(InvalidDataset, match="do not identify its library"):
        repair(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(InvalidDataset, match="HDF5 cannot open it"):
        repair(tmp_path / "text.hdf5", tmp_path / "out", "d4rl")
    with pytest.raises(InvalidDataset, match="names"):
        repair(tmp_path / "empty", tmp_path / "out", "lerobot")
    with pytest.raises(StorageMissing):
        repair(tmp_path / "nothing", tmp_path / "out")
    with pytest.raises(
        ValueError, match="kind: expected one of d4rl, lerobot, minari, rlds, tallyroll"
    ):
        repair(tmp_path / "empty", tmp_path / "out", "csv")
    d4rl_faults.sound(tmp_path / "rows.hdf5")
    with pytest.raises(PathIsTaken):
        repair(tmp_path / "rows.hdf5", tmp_path / "empty")
    assert {each.name for each in tmp_path.iterdir()} == {"empty", "text.hdf5", "rows.hdf5"}


def test_lanes_that_take_turns(tmp_path: Path) -> None:
    """Rows of two lanes have a gap. Ids still increase in each, and kept rows are unchanged."""
    rows = trajectory_rows(0, 600, steps=20)
    order = np.arange(600).reshape(2, 300).T.reshape(-1)
    taken = rows[order.tolist()]
    taken["collector", "lane"] = torch.from_numpy((order // 300).astype(np.int32))
    with MemmapStorage(tmp_path / "rows") as storage:
        storage.extend(taken)
        storage.finalize()
    rewrite(tmp_path / "rows" / "observation.memmap", 300 * 4, b"\x55" * 8)
    assert repair(tmp_path / "rows", tmp_path / "out").rows == 344
    kept = order[[*range(256), *range(512, 600)]]
    assert column(tmp_path / "out", "observation")[:, 0].tolist() == kept.tolist()
    assert sound(tmp_path / "out")
