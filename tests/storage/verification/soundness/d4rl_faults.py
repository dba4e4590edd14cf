"""Faults of D4RL's HDF5 files, injected with h5py alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from fault_kit import BEGINS, ENDS, LENGTHS, ROWS, Faults, actions, halve, rewrite, walk

FAULTS = Faults()
TERMINAL = (0, 2)
"""Episodes that end with a terminal. The others end with a timeout."""


def sound(place: Path) -> None:
    """Write a sound file, as D4RL's scripts do."""
    states = [walk(number, count + 1, 3) for number, count in enumerate(LENGTHS)]
    flags = {"terminals": np.zeros(ROWS, bool), "timeouts": np.zeros(ROWS, bool)}
    for number, end in enumerate(ENDS):
        flags["terminals" if number in TERMINAL else "timeouts"][end] = True
    data = {
        "observations": np.concatenate([each[:-1] for each in states]),
        "next_observations": np.concatenate([each[1:] for each in states]),
        "actions": actions(0, ROWS, 2),
        "rewards": walk(50, ROWS, 1)[:, 0],
        **flags,
        "infos/qpos": walk(60, ROWS, 4).astype(np.float64),
    }
    with h5py.File(place, "w") as file:
        for name, values in data.items():
            file.create_dataset(name, data=values, compression="gzip", fletcher32=name == "rewards")
        file["metadata/algorithm"] = np.bytes_("SAC")


def changed(name: str, change: Callable[[np.ndarray], Any], place: Path, **options: Any) -> None:
    """Rewrite a dataset."""
    with h5py.File(place, "r+") as file:
        values = change(file[name][()])
        del file[name]
        file.create_dataset(name, data=values, **options)


def set_rows(name: str, rows: Any, value: Any, place: Path) -> None:
    """Write some rows of a dataset."""
    with h5py.File(place, "r+") as file:
        values = file[name][()]
        values[rows] = value
        file[name][...] = values


def every(place: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    """Apply the same change to the rows of all datasets."""
    with h5py.File(place, "r") as file:
        names = [name for name in file if name != "metadata"]
        names = [name if name != "infos" else "infos/qpos" for name in names]
    for name in names:
        changed(name, change, place)


@FAULTS("rows", column="rewards")
def rewards_lack_a_row(place: Path) -> None:
    changed("rewards", lambda values: values[:-1], place)


@FAULTS("rows", column="actions")
def actions_have_a_row_more(place: Path) -> None:
    changed("actions", lambda values: np.concatenate([values, values[-1:]]), place)


@FAULTS("rows", column="timeouts")
def timeouts_lack_rows(place: Path) -> None:
    changed("timeouts", lambda values: values[:20], place)


@FAULTS("rows", column="infos/qpos")
def an_info_lacks_rows(place: Path) -> None:
    changed("infos/qpos", lambda values: values[3:], place)


@FAULTS("rows", column="next_observations")
def next_observations_lack_a_row(place: Path) -> None:
    changed("next_observations", lambda values: values[:-1], place)


@FAULTS("rows")
def no_row_at_all(place: Path) -> None:
    every(place, lambda values: values[:0])


@FAULTS("columns", column="terminals")
def terminals_missing(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["terminals"]


@FAULTS("columns", column="actions")
def actions_missing(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["actions"]


@FAULTS("columns", column="observations")
def observations_missing(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["observations"]


@FAULTS("columns", column="rewards")
def rewards_missing(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["rewards"]


@FAULTS("columns", column="next_observations")
def next_observations_of_another_shape(place: Path) -> None:
    changed("next_observations", lambda values: values[:, :2], place)


@FAULTS("columns", column="rewards")
def rewards_of_two_numbers(place: Path) -> None:
    changed("rewards", lambda values: np.stack([values, values], 1), place)


@FAULTS("columns", column="observations")
def observations_are_texts(place: Path) -> None:
    changed("observations", lambda values: np.full(len(values), b"state"), place)


@FAULTS("columns", column="observations")
def observations_are_references(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["observations"]
        file.create_dataset("observations", (ROWS,), h5py.ref_dtype)


@FAULTS("nan", row=7, column="observations")
def nan_in_an_observation(place: Path) -> None:
    set_rows("observations", (7, 1), np.nan, place)


@FAULTS("nan", row=ENDS[0], column="next_observations")
def nan_in_a_final_observation(place: Path) -> None:
    set_rows("next_observations", (ENDS[0], 1), np.nan, place)


@FAULTS("nan", row=9, column="rewards")
def infinite_reward(place: Path) -> None:
    set_rows("rewards", 9, np.inf, place)


@FAULTS("nan", row=60, column="actions")
def nan_in_an_action(place: Path) -> None:
    set_rows("actions", (60, 0), np.nan, place)


@FAULTS("observations", row=29)
def a_row_left_out(place: Path) -> None:
    every(place, lambda values: np.delete(values, 30, 0))


@FAULTS("observations", row=30)
def a_row_twice(place: Path) -> None:
    every(place, lambda values: np.insert(values, 30, values[30], 0))


@FAULTS("observations", row=24)
def two_rows_exchanged(place: Path) -> None:
    order = [*range(25), 26, 25, *range(27, ROWS)]
    every(place, lambda values: values[order])


@FAULTS("observations", row=5)
def a_next_observation_of_another_row(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        values = file["next_observations"][()]
        values[5] = values[40]
        file["next_observations"][...] = values


@FAULTS("observations", row=0)
def next_observations_are_observations(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        file["next_observations"][...] = file["observations"][()]


@FAULTS("observations", row=ENDS[2])
def an_end_not_marked(place: Path) -> None:
    set_rows("terminals", ENDS[2], False, place)


@FAULTS("ends", row=4)
def a_terminal_in_the_middle(place: Path) -> None:
    set_rows("terminals", 4, True, place)


@FAULTS("ends", row=ENDS[0])
def final_observations_of_the_next_episode(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        values, first = file["next_observations"][()], file["observations"][()]
        values[ENDS[:-1]] = first[BEGINS[1:]]
        file["next_observations"][...] = values


@FAULTS("ends", row=3, column="terminals")
def a_terminal_of_a_half(place: Path) -> None:
    def half(values: np.ndarray) -> np.ndarray:
        found = values.astype(np.float32)
        found[3] = 0.5
        return found

    changed("terminals", half, place)


@FAULTS("ends", row=8, column="timeouts")
def a_timeout_of_two(place: Path) -> None:
    def two(values: np.ndarray) -> np.ndarray:
        found = values.astype(np.int8)
        found[8] = 2
        return found

    changed("timeouts", two, place)


@FAULTS("zeros", row=25)
def rows_never_written(place: Path) -> None:
    for name in ("observations", "next_observations", "actions", "rewards"):
        set_rows(name, slice(25, 45), 0, place)


@FAULTS("zeros", row=ROWS - 16)
def the_last_rows_never_written(place: Path) -> None:
    def emptied(values: np.ndarray) -> np.ndarray:
        values[-16:] = 0
        return values

    every(place, emptied)


@FAULTS("files", column="observations")
def a_compressed_chunk_damaged(place: Path) -> None:
    with h5py.File(place, "r") as file:
        found = file["observations"].id.get_chunk_info(0)
    rewrite(place, found.byte_offset + found.size // 2, b"\xff" * 16)


@FAULTS("files", column="rewards")
def a_checksum_wrong(place: Path) -> None:
    changed("rewards", np.asarray, place, chunks=(ROWS,), fletcher32=True)
    with h5py.File(place, "r") as file:
        found = file["rewards"].id.get_chunk_info(0)
    rewrite(place, found.byte_offset + 8, b"\x01\x02\x03")


@FAULTS("files")
def cut_in_the_middle(place: Path) -> None:
    halve(place)


@FAULTS("files")
def another_kind_of_file(place: Path) -> None:
    place.write_bytes(b"PK\x03\x04" + bytes(2000))


@FAULTS("files")
def left_open_by_a_killed_writer(place: Path) -> None:
    with h5py.File(place, "r") as file:
        data = {name: file[name][()] for name in ("observations", "actions", "rewards")}
    with h5py.File(place, "w", libver="latest") as file:
        for name, values in data.items():
            file[name] = values
        file.flush()
        shutil.copy(place, place.with_suffix(".copy"))
    place.with_suffix(".copy").replace(place)


@FAULTS("files", column="observations")
def a_link_to_another_file(place: Path) -> None:
    other = place.with_name("other.hdf5")
    shutil.copy(place, other)
    with h5py.File(place, "r+") as file:
        del file["observations"]
        file["observations"] = h5py.ExternalLink(other.name, "observations")


@FAULTS("files", column="rewards")
def a_link_to_nothing(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        del file["rewards"]
        file["rewards"] = h5py.SoftLink("/elsewhere")


@FAULTS("files", column="actions")
def values_in_another_file(place: Path) -> None:
    with h5py.File(place, "r+") as file:
        shape, dtype = file["actions"].shape, file["actions"].dtype
        del file["actions"]
        file.create_dataset("actions", shape, dtype, external=[("/etc/passwd", 0, 1000)])
