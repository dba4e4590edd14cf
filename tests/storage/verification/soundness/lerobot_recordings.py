"""Sound datasets of LeRobot, v2.1 and v3.0, written with pyarrow, json and PyAV alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fault_kit import BEGINS, LENGTHS, ROWS, actions, walk

FPS = 10
CAMERA = "observation.images.top"
TASKS = ("push the block", "lift the block")
_OWN = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def columns(number: int) -> dict[str, np.ndarray]:
    """Return the columns of an episode's rows."""
    count = LENGTHS[number]
    frames = np.arange(count)
    return {
        "observation.state": walk(number, count, 3),
        "action": actions(number, count, 2),
        "next.reward": walk(number + 50, count, 1)[:, 0],
        "next.done": frames == count - 1,
        "timestamp": (frames / FPS).astype(np.float32),
        "frame_index": frames,
        "episode_index": np.full(count, number),
        "index": BEGINS[number] + frames,
        "task_index": np.full(count, number % 2),
    }


def features() -> dict[str, Any]:
    """Return the description of the columns for ``info.json``."""
    found: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [3], "names": ["x", "y", "z"]},
        "action": {"dtype": "float32", "shape": [2], "names": ["left", "right"]},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        CAMERA: {
            "dtype": "video",
            "shape": [32, 48, 3],
            "names": ["height", "width", "channels"],
            "info": {
                "video.height": 32,
                "video.width": 48,
                "video.codec": "h264",
                "video.pix_fmt": "yuv420p",
                "video.is_depth_map": False,
                "video.fps": FPS,
                "video.channels": 3,
                "has_audio": False,
            },
        },
    }
    for name in _OWN:
        dtype = "float32" if name == "timestamp" else "int64"
        found[name] = {"dtype": dtype, "shape": [1], "names": None}
    return found


def statistics(values: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the statistics of columns, as JSON."""
    found = {}
    for name, column in values.items():
        each = column.reshape(len(column), -1).astype(np.float64)
        found[name] = {
            "min": each.min(0).tolist(),
            "max": each.max(0).tolist(),
            "mean": each.mean(0).tolist(),
            "std": each.std(0).tolist(),
            "count": [len(each)],
        }
    return found


def joined() -> dict[str, np.ndarray]:
    """Return the columns of all rows."""
    parts = [columns(number) for number in range(len(LENGTHS))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def table(values: dict[str, np.ndarray]) -> pa.Table:
    """Return columns as a table."""
    arrays = {}
    for name, column in values.items():
        flat = pa.array(column.reshape(-1))
        arrays[name] = (
            pa.FixedSizeListArray.from_arrays(flat, column.shape[1]) if column.ndim > 1 else flat
        )
    return pa.table(arrays)


def write_video(
    path: Path, frames: int, *, fps: int = FPS, size: tuple[int, int] = (32, 48)
) -> None:
    """Write a small video."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.height, stream.width, stream.pix_fmt = *size, "yuv420p"
        for number in range(frames):
            picture = np.full((*size, 3), number % 250, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, "rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def sound_v3(place: Path) -> None:
    """Write a sound dataset of v3.0: two episodes per data file, all in one video."""
    info = {
        "codebase_version": "v3.0",
        "robot_type": "block",
        "total_episodes": len(LENGTHS),
        "total_frames": ROWS,
        "total_tasks": len(TASKS),
        "chunks_size": 1000,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "fps": FPS,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
        "features": features(),
    }
    write_json(place / "meta" / "info.json", info)
    write_json(place / "meta" / "stats.json", statistics(joined()))
    tasks = pa.table({"task_index": [0, 1], "__index_level_0__": list(TASKS)})
    write_table(place / "meta" / "tasks.parquet", tasks)
    entries = []
    for number, count in enumerate(LENGTHS):
        begin = BEGINS[number]
        entry: dict[str, Any] = {
            "episode_index": number,
            "tasks": [TASKS[number % 2]],
            "length": count,
            "data/chunk_index": 0,
            "data/file_index": number // 2,
            "dataset_from_index": begin,
            "dataset_to_index": begin + count,
            f"videos/{CAMERA}/chunk_index": 0,
            f"videos/{CAMERA}/file_index": 0,
            f"videos/{CAMERA}/from_timestamp": begin / FPS,
            f"videos/{CAMERA}/to_timestamp": (begin + count) / FPS,
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
        }
        for name, each in statistics(columns(number)).items():
            entry |= {f"stats/{name}/{what}": value for what, value in each.items()}
        entries.append(entry)
    write_table(place / EPISODES, pa.Table.from_pylist(entries))
    for file in range(2):
        parts = [table(columns(number)) for number in (2 * file, 2 * file + 1)]
        write_table(place / data_v3(file), pa.concat_tables(parts))
    write_video(place / VIDEO_V3, ROWS)


EPISODES = Path("meta", "episodes", "chunk-000", "file-000.parquet")
VIDEO_V3 = Path("videos", CAMERA, "chunk-000", "file-000.mp4")


def data_v3(file: int) -> Path:
    """Return the path of a file of rows."""
    return Path("data", "chunk-000", f"file-{file:03d}.parquet")


def sound_v2(place: Path) -> None:
    """Write a sound dataset of v2.1: a file and a video for each episode."""
    info = {
        "codebase_version": "v2.1",
        "robot_type": "block",
        "total_episodes": len(LENGTHS),
        "total_frames": ROWS,
        "total_tasks": len(TASKS),
        "total_videos": len(LENGTHS),
        "total_chunks": 1,
        "chunks_size": 1000,
        "fps": FPS,
        "splits": {"train": f"0:{len(LENGTHS)}"},
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/"
        "episode_{episode_index:06d}.mp4",
        "features": features(),
    }
    write_json(place / "meta" / "info.json", info)
    numbers = range(len(LENGTHS))
    lines = {
        "tasks": [{"task_index": n, "task": each} for n, each in enumerate(TASKS)],
        "episodes": [
            {"episode_index": n, "tasks": [TASKS[n % 2]], "length": LENGTHS[n]} for n in numbers
        ],
        "episodes_stats": [{"episode_index": n, "stats": statistics(columns(n))} for n in numbers],
    }
    for name, entries in lines.items():
        write_lines(place / "meta" / f"{name}.jsonl", entries)
    for number in numbers:
        write_table(place / data_v2(number), table(columns(number)))
        write_video(place / video_v2(number), LENGTHS[number])


def data_v2(number: int) -> Path:
    """Return the path of an episode's rows."""
    return Path("data", "chunk-000", f"episode_{number:06d}.parquet")


def video_v2(number: int) -> Path:
    """Return the path of an episode's video."""
    return Path("videos", "chunk-000", CAMERA, f"episode_{number:06d}.mp4")


def write_json(path: Path, value: Any) -> None:
    """Write JSON, and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4))


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change JSON. A result that is not None replaces it."""
    value = json.loads(path.read_text())
    found = change(value)
    write_json(path, value if found is None else found)


def write_lines(path: Path, entries: list[Any]) -> None:
    """Write JSON, one value per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in entries))


def change_lines(path: Path, change: Callable[[list[Any]], Any]) -> None:
    """Change the lines of JSON. A result that is not None replaces them."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    found = change(entries)
    write_lines(path, entries if found is None else found)


def write_table(path: Path, rows: pa.Table) -> None:
    """Write Parquet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows, path, write_page_checksum=True)


def change_column(path: Path, name: str, change: Callable[[list[Any]], Any]) -> None:
    """Change a column as a list. A result that is not None replaces it."""
    rows = pq.read_table(path)
    at = rows.schema.get_field_index(name)
    values = rows.column(at).to_pylist()
    found = change(values)
    kind = rows.schema.field(at).type
    write_table(path, rows.set_column(at, name, pa.array(values if found is None else found, kind)))


def set_value(path: Path, name: str, row: int, value: Any) -> None:
    """Write one value."""

    def put(values: list[Any]) -> None:
        values[row] = value

    change_column(path, name, put)


def take(path: Path, rows: list[int]) -> None:
    """Take rows of a file, by their numbers in it."""
    write_table(path, pq.read_table(path).take(rows))
