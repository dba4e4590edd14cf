"""Faults of LeRobot datasets: for both versions, for v3.0 and for v2.1."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fault_kit import LENGTHS, ROWS, Faults, halve, rewrite
from lerobot_recordings import (
    CAMERA,
    EPISODES,
    FPS,
    VIDEO_V3,
    change_column,
    change_json,
    change_lines,
    data_v2,
    data_v3,
    set_value,
    take,
    video_v2,
    write_table,
    write_video,
)

V2, V3 = Faults(), Faults()
INFO, STATS, TASKS = (Path("meta", name) for name in ("info.json", "stats.json", "tasks.parquet"))
LINES = Path("meta", "episodes.jsonl")


def both(check: str, **at: Any) -> Any:
    """Add a fault to both versions. It gets the file of episode 2, whose rows are 21 to 50."""

    def add(inject: Any) -> Any:
        for faults, data in ((V2, data_v2(2)), (V3, data_v3(1))):

            def of_version(place: Path, data: Path = data) -> None:
                inject(place, place / data)

            of_version.__name__ = inject.__name__
            faults(check, **at)(of_version)
        return inject

    return add


def info(place: Path, **more: Any) -> None:
    """Change the content of ``info.json``."""
    change_json(place / INFO, lambda found: found | more)


def feature(place: Path, name: str, **more: Any) -> None:
    """Change the description of a column in ``info.json``."""

    def change(found: Any) -> None:
        found["features"][name] |= more

    change_json(place / INFO, change)


# --- both versions --------------------------------------------------------------------------------


@both("files", file="meta/info.json")
def info_missing(place: Path, data: Path) -> None:
    (place / INFO).unlink()


@both("files", file="meta/info.json")
def info_torn(place: Path, data: Path) -> None:
    halve(place / INFO)


@both("metadata")
def a_version_that_there_is_not(place: Path, data: Path) -> None:
    info(place, codebase_version="v9.7")


@both("metadata")
def total_frames_too_many(place: Path, data: Path) -> None:
    info(place, total_frames=ROWS + 1)


@both("metadata")
def total_episodes_too_few(place: Path, data: Path) -> None:
    info(place, total_episodes=3)


@both("metadata")
def total_tasks_too_many(place: Path, data: Path) -> None:
    info(place, total_tasks=5)


@both("metadata")
def a_split_beyond_the_end(place: Path, data: Path) -> None:
    info(place, splits={"train": "0:9"})


@both("metadata")
def no_frames_a_second(place: Path, data: Path) -> None:
    info(place, fps=0)


@both("timestamps", episode=0, row=1)
def other_frames_a_second(place: Path, data: Path) -> None:
    info(place, fps=30)


@both("files")
def rows_missing(place: Path, data: Path) -> None:
    data.unlink()


@both("files")
def rows_without_a_footer(place: Path, data: Path) -> None:
    with data.open("r+b") as file:
        file.truncate(data.stat().st_size - 200)


@both("files")
def a_page_damaged(place: Path, data: Path) -> None:
    column = pq.read_metadata(data).row_group(0).column(0)
    rewrite(data, column.data_page_offset + column.total_compressed_size - 9, b"\xff" * 8)


@both("files")
def rows_are_a_link(place: Path, data: Path) -> None:
    shutil.move(data, place / "elsewhere.parquet")
    os.symlink(place / "elsewhere.parquet", data)


@both("files")
def a_path_that_leads_outside(place: Path, data: Path) -> None:
    change_json(place / INFO, lambda found: found | {"data_path": "../" + found["data_path"]})


@both("steps", episode=2, row=5)
def a_row_left_out(place: Path, data: Path) -> None:
    take(data, [*range(5), *range(6, pq.read_metadata(data).num_rows)])


@both("steps", episode=2, row=6)
def a_row_twice(place: Path, data: Path) -> None:
    take(data, [*range(6), *range(5, pq.read_metadata(data).num_rows)])


@both("steps", episode=2, row=5)
def two_rows_exchanged(place: Path, data: Path) -> None:
    take(data, [*range(5), 6, 5, *range(7, pq.read_metadata(data).num_rows)])


@both("episodes", row=21 + 4)
def a_row_of_another_episode(place: Path, data: Path) -> None:
    set_value(data, "episode_index", 4, 1)


@both("steps", episode=2, row=7)
def an_index_that_jumps(place: Path, data: Path) -> None:
    set_value(data, "index", 7, 999)


@both("steps", episode=2, row=0)
def frames_that_do_not_begin_at_zero(place: Path, data: Path) -> None:
    change_column(data, "frame_index", lambda values: [each + 1 for each in values])


@both("timestamps", episode=2, row=9)
def a_timestamp_late(place: Path, data: Path) -> None:
    set_value(data, "timestamp", 9, 0.95)


@both("timestamps", episode=2, row=9)
def a_timestamp_that_goes_back(place: Path, data: Path) -> None:
    set_value(data, "timestamp", 9, 0.1)


@both("tasks", episode=2, row=3)
def a_task_that_there_is_not(place: Path, data: Path) -> None:
    set_value(data, "task_index", 3, 7)


@both("tasks", episode=2, row=3)
def a_task_that_the_episode_has_not(place: Path, data: Path) -> None:
    set_value(data, "task_index", 3, 1)


@both("nan", episode=2, row=4, column="observation.state")
def nan_in_a_state(place: Path, data: Path) -> None:
    set_value(data, "observation.state", 4, [0.0, float("nan"), 0.0])


@both("nan", episode=2, row=4, column="action")
def infinite_action(place: Path, data: Path) -> None:
    set_value(data, "action", 4, [float("inf"), 0.0])


@both("nan", episode=2, row=29, column="next.reward")
def nan_in_a_reward(place: Path, data: Path) -> None:
    set_value(data, "next.reward", 29, float("nan"))


@both("columns", column="action")
def a_column_missing(place: Path, data: Path) -> None:
    write_table(data, pq.read_table(data).drop_columns(["action"]))


@both("columns", column="surplus")
def a_column_that_is_not_named(place: Path, data: Path) -> None:
    rows = pq.read_table(data)
    write_table(data, rows.append_column("surplus", pa.array(np.zeros(len(rows)))))


@both("columns", column="action")
def a_column_of_another_dtype(place: Path, data: Path) -> None:
    rows = pq.read_table(data)
    at = rows.schema.get_field_index("action")
    write_table(data, rows.set_column(at, "action", rows["action"].cast(pa.list_(pa.float64(), 2))))


@both("columns", column="action")
def another_shape_said(place: Path, data: Path) -> None:
    feature(place, "action", shape=[3])


@both("columns", column="next.reward")
def a_row_without_a_value(place: Path, data: Path) -> None:
    set_value(data, "next.reward", 6, None)


@both("ends", episode=2, row=11)
def done_in_the_middle(place: Path, data: Path) -> None:
    set_value(data, "next.done", 11, True)


@both("zeros", episode=2, row=5)
def rows_never_written(place: Path, data: Path) -> None:
    for name, value in (
        ("observation.state", [0.0] * 3),
        ("action", [0.0] * 2),
        ("next.reward", 0.0),
    ):
        for row in range(5, 25):
            set_value(data, name, row, value)


# --- v3.0 -----------------------------------------------------------------------------------------


@V3("files", file="meta/tasks.parquet")
def tasks_missing(place: Path) -> None:
    (place / TASKS).unlink()


@V3("tasks")
def a_number_of_a_task_twice(place: Path) -> None:
    set_value(place / TASKS, "task_index", 1, 0)


@V3("files")
def the_list_of_episodes_missing(place: Path) -> None:
    (place / EPISODES).unlink()


@V3("files", file=str(EPISODES))
def the_list_of_episodes_without_a_footer(place: Path) -> None:
    halve(place / EPISODES)


@V3("episodes", episode=1)
def an_episode_says_another_length(place: Path) -> None:
    set_value(place / EPISODES, "length", 1, 10)


@V3("episodes", episode=2)
def an_episode_begins_elsewhere(place: Path) -> None:
    set_value(place / EPISODES, "dataset_from_index", 2, 20)


@V3("episodes", episode=2)
def an_episode_ends_elsewhere(place: Path) -> None:
    set_value(place / EPISODES, "dataset_to_index", 2, 55)


@V3("episodes", episode=2)
def an_episode_not_listed(place: Path) -> None:
    take(place / EPISODES, [0, 1, 3])


@V3("episodes", episode=1)
def an_episode_listed_twice(place: Path) -> None:
    take(place / EPISODES, [0, 1, 1, 3])


@V3("episodes", episode=2)
def an_episode_in_another_file(place: Path) -> None:
    set_value(place / EPISODES, "data/file_index", 2, 0)


@V3("files")
def a_file_that_no_episode_is_in(place: Path) -> None:
    shutil.copy(place / data_v3(1), place / data_v3(2))


@V3("statistics", column="action")
def a_mean_of_other_rows(place: Path) -> None:
    def change(found: Any) -> None:
        found["action"]["mean"][1] += 0.2

    change_json(place / STATS, change)


@V3("statistics", column="observation.state")
def a_maximum_that_no_row_has(place: Path) -> None:
    def change(found: Any) -> None:
        found["observation.state"]["max"][0] += 1.0

    change_json(place / STATS, change)


@V3("statistics", column="action")
def a_count_of_fewer_rows(place: Path) -> None:
    def change(found: Any) -> None:
        found["action"]["count"] = [ROWS - 10]

    change_json(place / STATS, change)


@V3("statistics", column="action")
def a_standard_deviation_of_nothing(place: Path) -> None:
    def change(found: Any) -> None:
        found["action"]["std"] = [0.0, 0.0]

    change_json(place / STATS, change)


@V3("statistics", episode=1, column="action")
def a_minimum_of_another_episode(place: Path) -> None:
    set_value(place / EPISODES, "stats/action/min", 1, [-5.0, -5.0])


@V3("files", file="meta/stats.json")
def statistics_missing(place: Path) -> None:
    (place / STATS).unlink()


@V3("videos", file=str(VIDEO_V3))
def a_film_missing(place: Path) -> None:
    (place / VIDEO_V3).unlink()


@V3("videos", file=str(VIDEO_V3))
def a_film_of_fewer_frames(place: Path) -> None:
    write_video(place / VIDEO_V3, ROWS - 6)


@V3("videos", file=str(VIDEO_V3))
def a_film_of_more_frames(place: Path) -> None:
    write_video(place / VIDEO_V3, ROWS + 6)


@V3("videos", file=str(VIDEO_V3))
def a_film_of_another_rate(place: Path) -> None:
    write_video(place / VIDEO_V3, ROWS, fps=30)


@V3("videos", file=str(VIDEO_V3))
def a_film_of_another_size(place: Path) -> None:
    write_video(place / VIDEO_V3, ROWS, size=(64, 64))


@V3("videos", file=str(VIDEO_V3))
def a_film_cut_in_the_middle(place: Path) -> None:
    halve(place / VIDEO_V3)


@V3("videos", episode=2)
def two_episodes_of_the_same_frames(place: Path) -> None:
    set_value(place / EPISODES, f"videos/{CAMERA}/from_timestamp", 2, 1.0)


@V3("videos", episode=3)
def an_episode_that_ends_after_its_film(place: Path) -> None:
    set_value(place / EPISODES, f"videos/{CAMERA}/to_timestamp", 3, ROWS / FPS + 2)


# --- v2.1 -----------------------------------------------------------------------------------------


@V2("files", file="meta/tasks.jsonl")
def tasks_missing_(place: Path) -> None:
    (place / "meta" / "tasks.jsonl").unlink()


@V2("tasks")
def a_number_of_a_task_twice_(place: Path) -> None:
    def change(lines: Any) -> None:
        lines[1]["task_index"] = 0

    change_lines(place / "meta" / "tasks.jsonl", change)


@V2("files", file="meta/episodes.jsonl")
def the_list_of_episodes_missing_(place: Path) -> None:
    (place / LINES).unlink()


@V2("files", file="meta/episodes.jsonl")
def a_torn_line(place: Path) -> None:
    with (place / LINES).open("r+b") as file:
        file.truncate((place / LINES).stat().st_size - 9)


@V2("episodes", episode=1)
def an_episode_says_another_length_(place: Path) -> None:
    def change(lines: Any) -> None:
        lines[1]["length"] = 10

    change_lines(place / LINES, change)


@V2("episodes", episode=2)
def an_episode_not_listed_(place: Path) -> None:
    change_lines(place / LINES, lambda lines: [*lines[:2], lines[3]])


@V2("episodes", episode=1)
def an_episode_listed_twice_(place: Path) -> None:
    change_lines(place / LINES, lambda lines: [*lines[:2], lines[1], lines[3]])


@V2("files", file=str(data_v2(4)))
def a_file_that_no_episode_is_in_(place: Path) -> None:
    shutil.copy(place / data_v2(1), place / data_v2(4))


@V2("metadata")
def total_videos_too_many(place: Path) -> None:
    info(place, total_videos=9)


@V2("metadata")
def total_chunks_too_many(place: Path) -> None:
    info(place, total_chunks=3)


@V2("statistics", episode=1, column="action")
def a_mean_of_another_episode(place: Path) -> None:
    def change(lines: Any) -> None:
        lines[1]["stats"]["action"]["mean"] = lines[2]["stats"]["action"]["mean"]

    change_lines(place / "meta" / "episodes_stats.jsonl", change)


@V2("statistics", episode=1, column="observation.state")
def a_maximum_that_no_row_has_(place: Path) -> None:
    def change(lines: Any) -> None:
        lines[1]["stats"]["observation.state"]["max"][2] += 2.0

    change_lines(place / "meta" / "episodes_stats.jsonl", change)


@V2("statistics", episode=1, column="action")
def a_count_of_fewer_rows_(place: Path) -> None:
    def change(lines: Any) -> None:
        lines[1]["stats"]["action"]["count"] = [LENGTHS[1] - 4]

    change_lines(place / "meta" / "episodes_stats.jsonl", change)


@V2("statistics", episode=3)
def an_episode_without_statistics(place: Path) -> None:
    change_lines(place / "meta" / "episodes_stats.jsonl", lambda lines: lines[:3])


@V2("videos", file=str(video_v2(1)))
def a_film_missing_(place: Path) -> None:
    (place / video_v2(1)).unlink()


@V2("videos", episode=1, file=str(video_v2(1)))
def a_film_of_fewer_frames_(place: Path) -> None:
    write_video(place / video_v2(1), LENGTHS[1] - 2)


@V2("videos", episode=1, file=str(video_v2(1)))
def a_film_of_another_episode(place: Path) -> None:
    shutil.copy(place / video_v2(2), place / video_v2(1))


@V2("videos", file=str(video_v2(1)))
def a_film_of_another_rate_(place: Path) -> None:
    write_video(place / video_v2(1), LENGTHS[1], fps=30)


@V2("videos", file=str(video_v2(1)))
def a_film_of_another_size_(place: Path) -> None:
    write_video(place / video_v2(1), LENGTHS[1], size=(64, 64))


@V2("videos", file=str(video_v2(1)))
def a_film_cut_in_the_middle_(place: Path) -> None:
    halve(place / video_v2(1))
