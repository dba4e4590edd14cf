"""Faults of Minari datasets, injected with h5py and json alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from fault_kit import LENGTHS, ROWS, Faults, actions, halve, walk

FAULTS = Faults()
_BOX = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-99.0] * 3, "high": [99.0] * 3}
_MODE = {"type": "Discrete", "dtype": "int64", "start": 0, "n": 4}
_ACTION = {"type": "Box", "dtype": "float32", "shape": [2], "low": [-1.0] * 2, "high": [1.0] * 2}


def sound(place: Path) -> None:
    """Write a sound folder, as Minari does."""
    data = place / "data"
    data.mkdir(parents=True)
    with h5py.File(data / "main_data.hdf5", "w", track_order=True) as file:
        for number, count in enumerate(LENGTHS):
            group = file.create_group(f"episode_{number}")
            group.attrs.update(id=number, total_steps=count, seed=100 + number)
            ended = np.arange(count) == count - 1
            last = number % 2 == 0
            for name, values in {
                "observations/position": walk(number, count + 1, 3),
                "observations/mode": np.arange(count + 1) % 4,
                "actions": actions(number, count, 2),
                "rewards": walk(number + 50, count, 1)[:, 0].astype(np.float64),
                "terminations": ended & last,
                "truncations": ended & (not last),
                "infos/energy": walk(number + 70, count + 1, 1)[:, 0],
            }.items():
                size = (None, *values.shape[1:])
                group.create_dataset(name, data=values, chunks=True, maxshape=size)
    observed = {"type": "Dict", "subspaces": {"position": _BOX, "mode": _MODE}}
    said = {
        "total_episodes": len(LENGTHS),
        "total_steps": ROWS,
        "data_format": "hdf5",
        "observation_space": json.dumps(observed),
        "action_space": json.dumps(_ACTION),
        "jpeg_encoding": False,
        "dataset_id": "walk/test-v0",
        "minari_version": "0.5.3",
        "dataset_size": 0.1,
    }
    (data / "metadata.json").write_text(json.dumps(said))


def say(place: Path, **more: Any) -> None:
    """Change the metadata."""
    path = place / "data" / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def opened(place: Path) -> Any:
    """Open the file for writing."""
    return h5py.File(place / "data" / "main_data.hdf5", "r+")


def changed(place: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Rewrite a dataset."""
    with opened(place) as file:
        values = change(file[name][()])
        del file[name]
        file.create_dataset(name, data=values)


def set_rows(place: Path, name: str, rows: Any, value: Any) -> None:
    """Write some rows of a dataset."""
    with opened(place) as file:
        file[name][rows] = value


@FAULTS("metadata")
def total_steps_too_many(place: Path) -> None:
    say(place, total_steps=ROWS + 5)


@FAULTS("metadata")
def total_episodes_too_few(place: Path) -> None:
    say(place, total_episodes=3)


@FAULTS("metadata")
def total_steps_not_said(place: Path) -> None:
    path = place / "data" / "metadata.json"
    said = json.loads(path.read_text())
    del said["total_steps"]
    path.write_text(json.dumps(said))


@FAULTS("files", file="metadata.json")
def metadata_missing(place: Path) -> None:
    (place / "data" / "metadata.json").unlink()


@FAULTS("files", file="metadata.json")
def metadata_torn(place: Path) -> None:
    halve(place / "data" / "metadata.json")


@FAULTS("metadata")
def a_space_that_is_none(place: Path) -> None:
    say(place, observation_space="Box(-inf, inf, (3,))")


@FAULTS("files", file="main_data.hdf5")
def data_missing(place: Path) -> None:
    (place / "data" / "main_data.hdf5").unlink()


@FAULTS("files", file="main_data.hdf5")
def data_cut_in_the_middle(place: Path) -> None:
    halve(place / "data" / "main_data.hdf5")


@FAULTS("files", file="main_data.hdf5")
def data_is_a_link(place: Path) -> None:
    path = place / "data" / "main_data.hdf5"
    shutil.move(path, place / "elsewhere.hdf5")
    os.symlink(place / "elsewhere.hdf5", path)


@FAULTS("episodes", episode=2)
def an_episode_missing(place: Path) -> None:
    with opened(place) as file:
        del file["episode_2"]


@FAULTS("episodes", episode=9)
def an_episode_of_another_number(place: Path) -> None:
    with opened(place) as file:
        file.move("episode_3", "episode_9")


@FAULTS("episodes")
def something_that_is_no_episode(place: Path) -> None:
    with opened(place) as file:
        file.create_group("trash")


@FAULTS("metadata", episode=1)
def an_episode_says_other_steps(place: Path) -> None:
    with opened(place) as file:
        file["episode_1"].attrs["total_steps"] = 8


@FAULTS("episodes", episode=1)
def an_episode_says_another_number(place: Path) -> None:
    with opened(place) as file:
        file["episode_1"].attrs["id"] = 3


@FAULTS("episodes", episode=1)
def an_episode_without_steps(place: Path) -> None:
    with opened(place) as file:
        for name in ("actions", "rewards", "terminations", "truncations"):
            file["episode_1"][name].resize(0, 0)
        file["episode_1/observations/position"].resize(1, 0)
        file["episode_1/observations/mode"].resize(1, 0)
        file["episode_1/infos/energy"].resize(1, 0)
        file["episode_1"].attrs["total_steps"] = 0
    say(place, total_steps=ROWS - 9)


@FAULTS("rows", episode=0, column="observations/position")
def the_final_observation_missing(place: Path) -> None:
    changed(place, "episode_0/observations/position", lambda values: values[:-1])


@FAULTS("rows", episode=3, column="actions")
def an_action_missing(place: Path) -> None:
    changed(place, "episode_3/actions", lambda values: values[:-1])


@FAULTS("rows", episode=3, column="rewards")
def a_reward_more(place: Path) -> None:
    changed(place, "episode_3/rewards", lambda values: np.append(values, 0.0))


@FAULTS("rows", episode=1, column="terminations")
def a_termination_missing(place: Path) -> None:
    changed(place, "episode_1/terminations", lambda values: values[:-1])


@FAULTS("rows", episode=2, column="infos/energy")
def infos_missing(place: Path) -> None:
    changed(place, "episode_2/infos/energy", lambda values: values[:7])


@FAULTS("columns", episode=2, column="truncations")
def truncations_missing(place: Path) -> None:
    with opened(place) as file:
        del file["episode_2/truncations"]


@FAULTS("columns", episode=2, column="rewards")
def rewards_missing(place: Path) -> None:
    with opened(place) as file:
        del file["episode_2/rewards"]


@FAULTS("columns", episode=0, column="observations/mode")
def a_part_of_observations_missing(place: Path) -> None:
    with opened(place) as file:
        del file["episode_0/observations/mode"]


@FAULTS("columns", episode=3, column="observations/position")
def observations_of_another_dtype(place: Path) -> None:
    changed(place, "episode_3/observations/position", lambda values: values.astype(np.float64))


@FAULTS("columns", episode=1, column="observations/position")
def observations_of_another_shape(place: Path) -> None:
    changed(place, "episode_1/observations/position", lambda values: values[:, :2])


@FAULTS("columns", episode=1, column="actions")
def actions_are_texts(place: Path) -> None:
    changed(place, "episode_1/actions", lambda values: np.full(len(values), b"left"))


@FAULTS("nan", episode=2, row=5, column="observations/position")
def nan_in_an_observation(place: Path) -> None:
    set_rows(place, "episode_2/observations/position", (5, 1), np.nan)


@FAULTS("nan", episode=1, row=LENGTHS[1], column="observations/position")
def nan_in_a_final_observation(place: Path) -> None:
    set_rows(place, "episode_1/observations/position", (LENGTHS[1], 1), np.nan)


@FAULTS("nan", episode=0, row=3, column="actions")
def nan_in_an_action(place: Path) -> None:
    set_rows(place, "episode_0/actions", (3, 0), np.nan)


@FAULTS("nan", episode=3, row=8, column="rewards")
def infinite_reward(place: Path) -> None:
    set_rows(place, "episode_3/rewards", 8, -np.inf)


@FAULTS("spaces", episode=3, row=2, column="actions")
def an_action_outside_its_box(place: Path) -> None:
    set_rows(place, "episode_3/actions", (2, 1), 1.5)


@FAULTS("spaces", episode=0, row=4, column="observations/mode")
def a_mode_that_there_is_not(place: Path) -> None:
    set_rows(place, "episode_0/observations/mode", 4, 7)


@FAULTS("spaces", episode=2, row=11, column="observations/position")
def an_observation_outside_its_box(place: Path) -> None:
    set_rows(place, "episode_2/observations/position", (11, 0), -1e6)


@FAULTS("ends", episode=2, row=10)
def terminated_in_the_middle(place: Path) -> None:
    set_rows(place, "episode_2/terminations", 10, True)


@FAULTS("ends", episode=1, row=0)
def truncated_in_the_middle(place: Path) -> None:
    set_rows(place, "episode_1/truncations", 0, True)


@FAULTS("ends", episode=0, row=6, column="terminations")
def a_termination_of_a_half(place: Path) -> None:
    def half(values: np.ndarray) -> np.ndarray:
        found = values.astype(np.float32)
        found[6] = 0.5
        return found

    changed(place, "episode_0/terminations", half)


@FAULTS("zeros", episode=2, row=4)
def rows_never_written(place: Path) -> None:
    for name in ("observations/position", "observations/mode", "actions", "rewards"):
        set_rows(place, f"episode_2/{name}", slice(4, 24), 0)


@FAULTS("files", file="main_data.hdf5")
def a_link_to_another_file(place: Path) -> None:
    shutil.copy(place / "data" / "main_data.hdf5", place / "other.hdf5")
    with opened(place) as file:
        del file["episode_1/rewards"]
        file["episode_1/rewards"] = h5py.ExternalLink("../other.hdf5", "episode_1/rewards")


@FAULTS("files", file="main_data.hdf5")
def values_in_another_file(place: Path) -> None:
    with opened(place) as file:
        del file["episode_1/rewards"]
        group = file["episode_1"]
        group.create_dataset("rewards", (9,), "u1", external=[("/etc/passwd", 0, 9)])
