"""Faults of TorchRL's memory-mapped storages, injected with numpy and json alone."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fault_kit import BEGINS, ENDS, LENGTHS, ROWS, Faults, actions, halve, walk

FAULTS = Faults()
_TYPE = "<class 'tensordict._td.TensorDict'>"
_DTYPES = {"float32": np.float32, "int64": np.int64, "bool": np.bool_}
SPARE = 8
"""Unused rows of the maps, as in a buffer that is not full."""


def sound(place: Path) -> None:
    """Write a sound folder, as `ReplayBuffer.dumps` writes its storage."""
    states = [walk(number, count + 1, 3) for number, count in enumerate(LENGTHS)]
    ids = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    steps = np.concatenate([np.arange(count) for count in LENGTHS])
    ended = np.isin(np.arange(ROWS), ENDS)
    terminated = ended & (ids % 2 == 0)
    columns = {
        "observation": np.concatenate([each[:-1] for each in states]),
        "action": actions(0, ROWS, 2),
        "done": np.zeros((ROWS, 1), bool),
        "step_count": steps[:, None],
        "collector/traj_ids": ids,
        "next/observation": np.concatenate([each[1:] for each in states]),
        "next/reward": walk(50, ROWS, 1),
        "next/done": ended[:, None],
        "next/terminated": terminated[:, None],
        "next/truncated": (ended & ~terminated)[:, None],
        "next/step_count": steps[:, None] + 1,
    }
    for name, values in columns.items():
        put(
            place,
            name,
            np.concatenate([values, np.zeros((SPARE, *values.shape[1:]), values.dtype)]),
        )
    said = {"metadata": {}, "is_pytree": False, "len": ROWS}
    (place / "storage_metadata.json").write_text(json.dumps(said))


def meta_of(place: Path, folder: str = "") -> dict[str, Any]:
    """Return a folder's description of its columns."""
    path = place / folder / "meta.json"
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    return {"shape": [ROWS + SPARE], "device": "cpu", "_type": _TYPE}


def say(place: Path, folder: str, meta: dict[str, Any]) -> None:
    """Write a folder's description of its columns."""
    (place / folder).mkdir(parents=True, exist_ok=True)
    (place / folder / "meta.json").write_text(json.dumps(meta))


def put(place: Path, name: str, values: np.ndarray) -> None:
    """Write a column and its description."""
    *above, leaf = name.split("/")
    folder = "/".join(above)
    if above:
        say(place, "", meta_of(place) | {folder: {"type": "TensorDict"}})
    each = {"device": "cpu", "shape": list(values.shape), "is_nested": False}
    meta = meta_of(place, folder) | {leaf: each | {"dtype": f"torch.{values.dtype}"}}
    say(place, folder, meta)
    values.tofile(place / folder / f"{leaf}.memmap")


def changed(place: Path, name: str, change: Callable[[np.ndarray], Any]) -> None:
    """Change the values of a column in place. A result that is not None is written in full."""
    *above, leaf = name.split("/")
    said = meta_of(place, "/".join(above))[leaf]
    path = place / f"{name}.memmap"
    dtype = np.dtype(_DTYPES[said["dtype"].removeprefix("torch.")])
    values = np.fromfile(path, dtype).reshape(said["shape"])
    found = change(values)
    (values if found is None else found).tofile(path)


def set_rows(place: Path, name: str, rows: Any, value: Any) -> None:
    """Write some rows of a column."""

    def put_in(values: np.ndarray) -> None:
        values[rows] = value

    changed(place, name, put_in)


def every(place: Path, order: Any) -> None:
    """Reorder the rows of all columns, without the spare ones."""
    names = [str(each.relative_to(place).with_suffix("")) for each in place.rglob("*.memmap")]
    for name in names:
        changed(place, name, lambda values: np.concatenate([values[order], values[len(order) :]]))


@FAULTS("files", file="meta.json")
def meta_missing(place: Path) -> None:
    (place / "meta.json").unlink()


@FAULTS("files", file="next/meta.json")
def meta_of_a_folder_missing(place: Path) -> None:
    (place / "next" / "meta.json").unlink()


@FAULTS("files", file="meta.json")
def meta_torn(place: Path) -> None:
    halve(place / "meta.json")


@FAULTS("files", file="action.memmap")
def a_column_missing(place: Path) -> None:
    (place / "action.memmap").unlink()


@FAULTS("files", file="next/observation.memmap")
def a_column_cut(place: Path) -> None:
    halve(place / "next" / "observation.memmap")


@FAULTS("files", file="action.memmap")
def a_column_too_long(place: Path) -> None:
    with (place / "action.memmap").open("ab") as file:
        file.write(bytes(16))


@FAULTS("files", file="action.memmap")
def a_column_is_a_link(place: Path) -> None:
    shutil.move(place / "action.memmap", place.with_name("elsewhere"))
    os.symlink(place.with_name("elsewhere"), place / "action.memmap")


@FAULTS("files")
def a_name_that_leads_outside(place: Path) -> None:
    meta = meta_of(place)
    say(place, "", meta | {"../outside": meta["action"]})


@FAULTS("rows", column="action")
def a_column_of_more_rows(place: Path) -> None:
    meta = meta_of(place)
    meta["action"]["shape"][0] += 4
    say(place, "", meta)


@FAULTS("files", file="observation.memmap")
def another_dtype_said(place: Path) -> None:
    meta = meta_of(place)
    meta["observation"]["dtype"] = "torch.float64"
    say(place, "", meta)


@FAULTS("columns", column="next/observation")
def next_observations_of_another_dtype(place: Path) -> None:
    meta = meta_of(place, "next")
    meta["observation"]["dtype"] = "torch.int32"
    say(place, "next", meta)


@FAULTS("columns", column="next/observation")
def next_observations_of_another_shape(place: Path) -> None:
    put(place, "next/observation", np.zeros((ROWS + SPARE, 2), np.float32))


@FAULTS("columns", column="next/reward")
def rewards_missing(place: Path) -> None:
    meta = meta_of(place, "next")
    del meta["reward"]
    say(place, "next", meta)
    (place / "next" / "reward.memmap").unlink()


@FAULTS("columns", column="action")
def a_dtype_that_there_is_not(place: Path) -> None:
    meta = meta_of(place)
    meta["action"]["dtype"] = "torch.float12"
    say(place, "", meta)


@FAULTS("metadata")
def more_rows_said_than_there_are(place: Path) -> None:
    said = {"metadata": {}, "is_pytree": False, "len": ROWS + SPARE + 1}
    (place / "storage_metadata.json").write_text(json.dumps(said))


@FAULTS("zeros", row=ROWS - 8)
def more_rows_said_than_written(place: Path) -> None:
    for path in place.rglob("*.memmap"):
        name = str(path.relative_to(place).with_suffix(""))
        set_rows(place, name, slice(ROWS - 8, None), 0)
    said = {"metadata": {}, "is_pytree": False, "len": ROWS + SPARE}
    (place / "storage_metadata.json").write_text(json.dumps(said))


@FAULTS("nan", row=13, column="observation")
def nan_in_an_observation(place: Path) -> None:
    set_rows(place, "observation", (13, 2), np.nan)


@FAULTS("nan", row=ENDS[2], column="next/observation")
def nan_in_a_final_observation(place: Path) -> None:
    set_rows(place, "next/observation", (ENDS[2], 0), np.nan)


@FAULTS("nan", row=2, column="action")
def nan_in_an_action(place: Path) -> None:
    set_rows(place, "action", 2, np.nan)


@FAULTS("nan", row=44, column="next/reward")
def infinite_reward(place: Path) -> None:
    set_rows(place, "next/reward", 44, np.inf)


@FAULTS("ends", row=17, column="next/done")
def a_flag_that_is_no_bool(place: Path) -> None:
    def seven(values: np.ndarray) -> None:
        values.view(np.uint8)[17] = 7

    changed(place, "next/done", seven)


@FAULTS("ends", row=6)
def done_without_a_reason(place: Path) -> None:
    set_rows(place, "next/done", 6, True)


@FAULTS("ends", row=ENDS[0])
def terminated_and_not_done(place: Path) -> None:
    set_rows(place, "next/done", ENDS[0], False)


@FAULTS("ends", row=30)
def terminated_in_the_middle(place: Path) -> None:
    for name in ("next/done", "next/terminated"):
        set_rows(place, name, 30, True)


@FAULTS("ends", row=25)
def done_before_the_action(place: Path) -> None:
    set_rows(place, "done", 25, True)


@FAULTS("ends", row=ENDS[0])
def final_observations_of_the_next_episode(place: Path) -> None:
    path = place / "observation.memmap"
    first = np.fromfile(path, np.float32).reshape(-1, 3)[BEGINS[1:]]
    set_rows(place, "next/observation", ENDS[:-1], first)


@FAULTS("steps", row=30)
def a_row_left_out(place: Path) -> None:
    every(place, [*range(30), *range(31, ROWS), ROWS])
    said = {"metadata": {}, "is_pytree": False, "len": ROWS - 1}
    (place / "storage_metadata.json").write_text(json.dumps(said))


@FAULTS("steps", row=31)
def a_row_twice(place: Path) -> None:
    every(place, [*range(31), 30, *range(31, ROWS)])
    said = {"metadata": {}, "is_pytree": False, "len": ROWS + 1}
    (place / "storage_metadata.json").write_text(json.dumps(said))


@FAULTS("steps", row=25)
def two_rows_exchanged(place: Path) -> None:
    every(place, [*range(25), 26, 25, *range(27, ROWS)])


@FAULTS("steps", row=40)
def a_step_that_jumps(place: Path) -> None:
    set_rows(place, "step_count", 40, 99)


@FAULTS("steps", row=40)
def a_next_step_that_does_not_follow(place: Path) -> None:
    set_rows(place, "next/step_count", 40, 3)


@FAULTS("ids", row=50)
def a_negative_trajectory(place: Path) -> None:
    set_rows(place, "collector/traj_ids", 50, -4)


@FAULTS("ids", row=BEGINS[3])
def a_trajectory_that_comes_again(place: Path) -> None:
    set_rows(place, "collector/traj_ids", slice(BEGINS[3], ROWS), 1)


@FAULTS("observations", row=33)
def a_next_observation_of_another_row(place: Path) -> None:
    set_rows(place, "next/observation", 33, 0.25)


@FAULTS("observations", row=0)
def next_observations_are_observations(place: Path) -> None:
    shutil.copy(place / "observation.memmap", place / "next" / "observation.memmap")


@FAULTS("zeros", row=22)
def rows_never_written(place: Path) -> None:
    for name in ("observation", "action", "next/observation", "next/reward"):
        set_rows(place, name, slice(22, 42), 0)
