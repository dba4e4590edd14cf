"""Faults of RLDS datasets, written byte by byte."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rlds_kit as kit
from fault_kit import LENGTHS, Faults, actions, halve, rewrite, walk
from rlds_kit import Episode

FAULTS = Faults()
_STEP = {
    "observation": kit.dictionary(
        position=kit.tensor("float32", 3), mode=kit.tensor("uint8"), camera=kit.picture(8, 9, 3)
    ),
    "action": kit.tensor("float32", 2),
    "reward": kit.tensor("float32"),
    "discount": kit.tensor("float32"),
    "timestamp": kit.tensor("float32"),
    "torque": kit.tensor("float64", 2, encoding="bytes"),
    "language_instruction": kit.text(),
    **kit.FLAGS,
}
FEATURES = kit.dictionary(
    steps=kit.dataset(kit.dictionary(**_STEP)),
    episode_metadata=kit.dictionary(file_path=kit.text(), seed=kit.tensor("int64")),
)
_SHARDS = ((0, 1), (2, 3))
"""The episodes of each shard."""
_FILES = [f"walk-train.tfrecord-{number:05d}-of-00002" for number in range(2)]

Change = Callable[[list[list[Episode]]], Any]


def episode(number: int) -> Episode:
    """Return an episode: a random walk, with one step more than transitions."""
    count = LENGTHS[number]
    terminal = number % 2 == 0
    rewards = np.append(walk(number + 50, count, 1)[:, 0], np.float32(0))
    torque = walk(number + 70, count + 1, 2).astype("<f8")
    images = np.random.default_rng(number).integers(0, 256, (count + 1, 8, 9, 3), np.uint8)
    discount = np.ones(count + 1, np.float32)
    discount[-2] = 0 if terminal else 1
    return {
        "steps/observation/position": walk(number, count + 1, 3),
        "steps/observation/mode": np.arange(count + 1) % 4,
        "steps/observation/camera": [kit.png(image) for image in images],
        "steps/action": np.concatenate([actions(number, count, 2), np.zeros((1, 2), np.float32)]),
        "steps/reward": rewards,
        "steps/discount": discount,
        "steps/timestamp": (np.arange(count + 1) / 10).astype(np.float32),
        "steps/torque": [each.tobytes() for each in torque],
        "steps/language_instruction": [b"walk"] * (count + 1),
        "episode_metadata/file_path": [b"walk.npy"],
        "episode_metadata/seed": np.array([100 + number]),
        **kit.flags(count + 1, terminal=terminal),
    }


def shards() -> list[list[Episode]]:
    """Return the episodes of each file."""
    return [[episode(number) for number in numbers] for numbers in _SHARDS]


def sound(place: Path) -> None:
    """Write a sound folder of two files."""
    kit.write(place, shards(), FEATURES)


def changed(place: Path, change: Change) -> None:
    """Write the files again with changed episodes. Metadata and checksums are right."""
    found = shards()
    change(found)
    kit.write(place, found, FEATURES)


def set_rows(place: Path, number: int, name: str, rows: Any, value: Any) -> None:
    """Overwrite some steps of an episode."""

    def change(found: list[list[Episode]]) -> None:
        found[number // 2][number % 2][f"steps/{name}"][rows] = value

    changed(place, change)


def without(place: Path, number: int, name: str) -> None:
    """Write an episode without one of its features."""
    changed(place, lambda found: found[number // 2][number % 2].pop(f"steps/{name}"))


def shortened(place: Path, number: int, name: str) -> None:
    """Drop the last step of a feature."""

    def change(found: list[list[Episode]]) -> None:
        steps = found[number // 2][number % 2]
        steps[f"steps/{name}"] = steps[f"steps/{name}"][:-1]

    changed(place, change)


def say(place: Path, **more: Any) -> None:
    """Change entries of the metadata."""
    path = place / "dataset_info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | more))


def say_split(place: Path, **more: Any) -> None:
    """Change the split's entries in the metadata."""
    (split,) = json.loads((place / "dataset_info.json").read_text())["splits"]
    say(place, splits=[split | more])


# --- metadata -------------------------------------------------------------------------------------


@FAULTS("metadata", file="dataset_info.json")
def a_shard_says_more_episodes(place: Path) -> None:
    say_split(place, shardLengths=["2", "3"])


@FAULTS("metadata", file="dataset_info.json")
def bytes_of_another_dataset(place: Path) -> None:
    say_split(place, numBytes="123")


@FAULTS("files", file="dataset_info.json")
def metadata_missing(place: Path) -> None:
    (place / "dataset_info.json").unlink()


@FAULTS("files", file="dataset_info.json")
def metadata_torn(place: Path) -> None:
    halve(place / "dataset_info.json")


@FAULTS("files", file="features.json")
def features_missing(place: Path) -> None:
    (place / "features.json").unlink()


@FAULTS("files", file="features.json")
def features_torn(place: Path) -> None:
    halve(place / "features.json")


@FAULTS("metadata", file="features.json")
def features_without_steps(place: Path) -> None:
    (place / "features.json").write_text(json.dumps(kit.dictionary(image=kit.picture(8, 9, 3))))


@FAULTS("columns", file="features.json", column="steps/is_last")
def features_without_a_flag(place: Path) -> None:
    step = {name: each for name, each in _STEP.items() if name != "is_last"}
    features = kit.dictionary(steps=kit.dataset(kit.dictionary(**step)))
    (place / "features.json").write_text(json.dumps(features))


@FAULTS("metadata", file="dataset_info.json")
def files_of_another_format(place: Path) -> None:
    say(place, fileFormat="array_record")


@FAULTS("metadata", file="dataset_info.json")
def a_split_twice(place: Path) -> None:
    (split,) = json.loads((place / "dataset_info.json").read_text())["splits"]
    say(place, splits=[split, split])


@FAULTS("metadata", file="dataset_info.json")
def names_that_lead_out(place: Path) -> None:
    say_split(place, filepathTemplate="../{SPLIT}.{SHARD_X_OF_Y}")


@FAULTS("metadata", file="dataset_info.json")
def a_shard_of_minus_one_episode(place: Path) -> None:
    say_split(place, shardLengths=["2", "-1"])


# --- files ----------------------------------------------------------------------------------------


@FAULTS("files", file=_FILES[1])
def a_shard_missing(place: Path) -> None:
    (place / _FILES[1]).unlink()


@FAULTS("files", file=_FILES[0])
def a_shard_is_a_link(place: Path) -> None:
    shutil.move(place / _FILES[0], place / "elsewhere")
    os.symlink(place / "elsewhere", place / _FILES[0])


@FAULTS("files", file="walk-train.tfrecord-00002-of-00003")
def a_shard_that_no_split_has(place: Path) -> None:
    shutil.copy(place / _FILES[0], place / "walk-train.tfrecord-00002-of-00003")


@FAULTS("files", file=_FILES[1], episode=0)
def a_shard_cut_within_a_record(place: Path) -> None:
    halve(place / _FILES[1])


@FAULTS("files", file=_FILES[1], episode=1)
def a_shard_cut_within_a_checksum(place: Path) -> None:
    with (place / _FILES[1]).open("r+b") as file:
        file.truncate((place / _FILES[1]).stat().st_size - 2)


@FAULTS("files", file=_FILES[0], episode=0)
def a_byte_of_a_record(place: Path) -> None:
    rewrite(place / _FILES[0], 400, b"\x55\xaa\x55")


@FAULTS("files", file=_FILES[0], episode=0)
def a_byte_of_a_length(place: Path) -> None:
    rewrite(place / _FILES[0], 1, b"\xee")


@FAULTS("files", file=_FILES[0], episode=0)
def a_length_of_terabytes(place: Path) -> None:
    content = kit.framed(b"", 2**44)
    (place / _FILES[0]).write_bytes(content + (place / _FILES[0]).read_bytes())


@FAULTS("files", file=_FILES[1], episode=2)
def bytes_after_the_last_record(place: Path) -> None:
    with (place / _FILES[1]).open("ab") as file:
        file.write(b"end")


@FAULTS("files", file=_FILES[1], episode=1)
def a_record_that_is_no_example(place: Path) -> None:
    records = [kit.example(each) for each in shards()[1]]
    records[1] = b"\xff" * len(records[1])
    (place / _FILES[1]).write_bytes(b"".join(map(kit.framed, records)))


@FAULTS("metadata", file="dataset_info.json")
def an_episode_missing(place: Path) -> None:
    records = [kit.example(each) for each in shards()[0]]
    (place / _FILES[0]).write_bytes(kit.framed(records[0]))


@FAULTS("files", file=_FILES[0], episode=1, column="steps/observation/camera")
def an_image_damaged(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        images = found[0][1]["steps/observation/camera"]
        images[4] = images[4][:60] + b"\0\0\0\0" + images[4][64:]

    changed(place, change)


# --- columns --------------------------------------------------------------------------------------


@FAULTS("columns", file=_FILES[0], episode=1, column="steps/reward")
def rewards_missing(place: Path) -> None:
    without(place, 1, "reward")


@FAULTS("columns", file=_FILES[1], episode=0, column="steps/observation/camera")
def images_missing(place: Path) -> None:
    without(place, 2, "observation/camera")


@FAULTS("columns", file=_FILES[1], episode=1, column="steps/reward")
def rewards_of_another_kind(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[1][1]["steps/reward"] = found[1][1]["steps/reward"].astype(int)

    changed(place, change)


@FAULTS("columns", file=_FILES[0], episode=0, column="steps/observation/position")
def observations_of_another_width(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[0][0]["steps/observation/position"] = walk(0, LENGTHS[0] + 1, 2)

    changed(place, change)


@FAULTS("columns", file=_FILES[0], episode=0, column="steps/observation/camera")
def an_image_of_another_size(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        image = np.zeros((9, 8, 3), np.uint8)
        found[0][0]["steps/observation/camera"][3] = kit.png(image)

    changed(place, change)


@FAULTS("columns", file=_FILES[1], episode=1, column="steps/torque")
def bytes_of_another_length(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[1][1]["steps/torque"][7] += b"\0"

    changed(place, change)


@FAULTS("columns", file=_FILES[0], episode=1, column="steps/observation/mode")
def a_number_that_its_dtype_lacks(place: Path) -> None:
    set_rows(place, 1, "observation/mode", 3, 300)


@FAULTS("columns", file=_FILES[1], episode=0, column="steps/weight")
def a_column_that_is_not_named(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[1][0]["steps/weight"] = np.ones(LENGTHS[2] + 1, np.float32)

    changed(place, change)


@FAULTS("columns", file=_FILES[1], episode=1, column="episode_metadata/seed")
def two_seeds_of_an_episode(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[1][1]["episode_metadata/seed"] = np.array([3, 4])

    changed(place, change)


# --- rows and episodes ----------------------------------------------------------------------------


@FAULTS("rows", file=_FILES[1], episode=1, column="steps/action")
def an_action_missing(place: Path) -> None:
    shortened(place, 3, "action")


@FAULTS("rows", file=_FILES[0], episode=0, column="steps/observation/position")
def the_final_observation_missing(place: Path) -> None:
    shortened(place, 0, "observation/position")


@FAULTS("rows", file=_FILES[1], episode=0, column="steps/language_instruction")
def a_text_missing(place: Path) -> None:
    shortened(place, 2, "language_instruction")


@FAULTS("episodes", file=_FILES[0], episode=0)
def an_episode_without_steps(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        steps = found[0][0]
        found[0][0] = {n: each[:0] if n.startswith("steps/") else each for n, each in steps.items()}

    changed(place, change)


@FAULTS("episodes", file=_FILES[1], episode=1)
def an_episode_twice(place: Path) -> None:
    def change(found: list[list[Episode]]) -> None:
        found[1][1] = found[0][1]

    changed(place, change)


@FAULTS("episodes", file=_FILES[0], episode=1, row=0, column="steps/is_first")
def no_first_step(place: Path) -> None:
    set_rows(place, 1, "is_first", 0, 0)


@FAULTS("episodes", file=_FILES[1], episode=0, row=11, column="steps/is_first")
def a_first_step_in_the_middle(place: Path) -> None:
    set_rows(place, 2, "is_first", 11, 1)


@FAULTS("episodes", file=_FILES[1], episode=1, row=LENGTHS[3], column="steps/is_last")
def no_last_step(place: Path) -> None:
    set_rows(place, 3, "is_last", -1, 0)


@FAULTS("episodes", file=_FILES[0], episode=0, row=5, column="steps/is_last")
def a_last_step_in_the_middle(place: Path) -> None:
    set_rows(place, 0, "is_last", 5, 1)


# --- values ---------------------------------------------------------------------------------------


@FAULTS("ends", file=_FILES[1], episode=0, row=20, column="steps/is_terminal")
def terminal_in_the_middle(place: Path) -> None:
    set_rows(place, 2, "is_terminal", 20, 1)


@FAULTS("ends", file=_FILES[0], episode=1, row=2, column="steps/is_terminal")
def a_flag_of_two(place: Path) -> None:
    set_rows(place, 1, "is_terminal", 2, 2)


@FAULTS("ends", file=_FILES[0], episode=0, row=6, column="steps/discount")
def a_discount_above_one(place: Path) -> None:
    set_rows(place, 0, "discount", 6, 1.5)


@FAULTS("ends", file=_FILES[1], episode=0, row=9, column="steps/discount")
def a_discount_of_0_in_the_middle(place: Path) -> None:
    set_rows(place, 2, "discount", 9, 0)


@FAULTS("nan", file=_FILES[1], episode=0, row=5, column="steps/observation/position")
def nan_in_an_observation(place: Path) -> None:
    set_rows(place, 2, "observation/position", (5, 1), np.nan)


@FAULTS("nan", file=_FILES[0], episode=1, row=LENGTHS[1], column="steps/observation/position")
def nan_in_a_final_observation(place: Path) -> None:
    set_rows(place, 1, "observation/position", (LENGTHS[1], 0), np.nan)


@FAULTS("nan", file=_FILES[0], episode=0, row=3, column="steps/action")
def nan_in_an_action(place: Path) -> None:
    set_rows(place, 0, "action", (3, 0), np.nan)


@FAULTS("nan", file=_FILES[1], episode=1, row=8, column="steps/reward")
def infinite_reward(place: Path) -> None:
    set_rows(place, 3, "reward", 8, -np.inf)


@FAULTS("timestamps", file=_FILES[1], episode=0, row=17, column="steps/timestamp")
def time_goes_back(place: Path) -> None:
    set_rows(place, 2, "timestamp", 17, 0.5)


def unwritten(place: Path, rows: slice, count: int) -> None:
    """Overwrite steps of an episode with zeros and black images."""

    def change(found: list[list[Episode]]) -> None:
        steps = found[1][0]
        for name in ("observation/position", "observation/mode", "action", "reward"):
            steps[f"steps/{name}"][rows] = 0
        blank = kit.png(np.zeros((8, 9, 3), np.uint8))
        steps["steps/observation/camera"][rows] = [blank] * count

    changed(place, change)


@FAULTS("zeros", file=_FILES[1], episode=0, row=4)
def rows_never_written(place: Path) -> None:
    unwritten(place, slice(4, 24), 20)


@FAULTS("zeros", file=_FILES[1], episode=0, row=12)
def the_last_rows_never_written(place: Path) -> None:
    unwritten(place, slice(12, 31), 19)
