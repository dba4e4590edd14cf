"""Read the lengths and files of the episodes in a LeRobot folder of version v2 or v3."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import refused
from tallyroll.storage.ext.exchange.folders import expand_template
from tallyroll.storage.ext.exchange.lerobot import layout, tables
from tallyroll.storage.ext.exchange.parquet import damage_of, opened_parquet
from tallyroll.storage.files.safe_files import Inside

_MOST_EPISODES: Final = 2**22
_MOST_ROWS: Final = 2**48
_MOST_FILES: Final = 2**14
_LINES_NBYTES: Final = 2**26
_LONGEST_NAME: Final = 4096


@dataclass(frozen=True)
class LeRobotInfo:
    """The validated fields of ``info.json`` that a reader needs."""

    version: str
    features: dict[str, dict[str, Any]]
    fps: float
    chunk: int
    data_path: Any
    video_path: Any
    tasks: int
    rows: int | None
    """``total_frames``, or None if the file has no such number."""

    @classmethod
    def of(cls, said: Any) -> LeRobotInfo:
        """Return the fields of a parsed ``info.json``.

        Raises:
            InvalidDataset: the value is invalid, or of an unsupported version.
        """
        if not isinstance(said, dict):
            raise InvalidDataset(f"{layout.INFO} is not a JSON object")
        version, features = said.get("codebase_version"), said.get("features")
        fps: Any = said.get("fps")
        chunk: Any = said.get("chunks_size", layout.CHUNK)
        if not isinstance(version, str) or version[:2] not in ("v2", "v3"):
            raise InvalidDataset(f"its version is {version!r:.40}, expected v2 or v3")
        if not isinstance(features, dict) or not all(
            isinstance(each, dict) and 0 < len(name) <= _LONGEST_NAME
            for name, each in features.items()
        ):
            raise InvalidDataset(f"{layout.INFO} has no features")
        if type(fps) not in (int, float) or not 0 < fps < 2**20:
            raise InvalidDataset(f"its fps is {fps!r:.40}, expected a number above 0")
        if type(chunk) is not int or not 0 < chunk < 2**31:
            raise InvalidDataset(
                f"its chunks_size is {chunk!r:.40}, expected a whole number above 0"
            )
        tasks = said.get("total_tasks", 0)
        tasks = tasks if type(tasks) is int and tasks > 0 else 0
        rows = said.get("total_frames")
        rows = rows if type(rows) is int else None
        paths = said.get("data_path"), said.get("video_path")
        return cls(version, features, float(fps), chunk, *paths, tasks, rows)


@dataclass
class LeRobotEpisodes:
    """The episodes of a folder, in order."""

    lengths: np.ndarray
    data: list[str]
    """The data file of each episode."""
    videos: dict[str, list[str]] = field(default_factory=dict)
    """The video file of each episode, by feature."""
    begins: dict[str, np.ndarray] = field(default_factory=dict)
    """The start of each episode in its video file, in seconds, by feature."""

    @property
    def rows(self) -> int:
        """The total number of rows."""
        return int(self.lengths.sum())


def episodes_of(
    inside: Inside, info: LeRobotInfo, videos: Sequence[str], place: Path
) -> LeRobotEpisodes:
    """Return the episodes that the metadata lists.

    Raises:
        InvalidDataset: the metadata is damaged, or a path leads out of the folder.
    """
    try:
        if info.version.startswith("v3"):
            found = _of_tables(inside, info, videos, place)
        else:
            found = _of_lines(inside, info, videos, place)
    except (KeyError, TypeError, OverflowError) as error:
        raise refused(place, f"its episodes cannot be read ({error!r:.200})") from error
    if info.rows not in (None, found.rows):
        raise InvalidDataset(
            f"{layout.INFO} counts {info.rows:,} frames, but the episodes have {found.rows:,}. "
            "`tallyroll repair` saves the readable rows"
        )
    return found


def _lengths(values: Any) -> np.ndarray:
    if isinstance(values, list) and not all(type(each) is int for each in values):
        raise InvalidDataset("an episode's length is not a whole number")
    lengths = np.asarray(values, np.int64).reshape(-1)
    if len(lengths) and (lengths.min() < 1 or lengths.max() >= _MOST_ROWS // len(lengths)):
        raise InvalidDataset("an episode has no rows, or too many")
    return lengths


def _of_lines(
    inside: Inside, info: LeRobotInfo, videos: Sequence[str], place: Path
) -> LeRobotEpisodes:
    lines = layout.read_lines(inside, "meta/episodes.jsonl", place, _LINES_NBYTES)
    if len(lines) > _MOST_EPISODES:
        raise InvalidDataset(f"it has {len(lines):,} episodes, expected at most {_MOST_EPISODES:,}")
    if [line["episode_index"] for line in lines] != list(range(len(lines))):
        raise InvalidDataset("its episodes are not numbered from 0")
    numbers = range(len(lines))

    def paths(template: Any, **more: str) -> list[str]:
        return [
            expand_template(template, episode_chunk=n // info.chunk, episode_index=n, **more)
            for n in numbers
        ]

    return LeRobotEpisodes(
        _lengths([line["length"] for line in lines]),
        paths(info.data_path),
        {name: paths(info.video_path, video_key=name) for name in videos},
        {name: np.zeros(len(lines)) for name in videos},
    )


def _of_tables(
    inside: Inside, info: LeRobotInfo, videos: Sequence[str], place: Path
) -> LeRobotEpisodes:
    own = ["episode_index", "length", "data/chunk_index", "data/file_index"]
    of_videos = [
        f"videos/{name}/{each}"
        for name in videos
        for each in ("chunk_index", "file_index", "from_timestamp")
    ]
    found: dict[str, list[np.ndarray]] = {name: [] for name in (*own, *of_videos)}
    count = 0
    for path in layout.files_below(inside, "meta/episodes", place, ".parquet", _MOST_FILES):
        with contextlib.ExitStack() as stack:
            count += _read(inside, path, place, found, stack)
            if count > _MOST_EPISODES:
                raise InvalidDataset(f"it has more than {_MOST_EPISODES:,} episodes")
    columns = {n: np.concatenate(each) if each else np.empty(0) for n, each in found.items()}
    order = np.argsort(columns["episode_index"], kind="stable")
    columns = {name: values[order] for name, values in columns.items()}
    if (columns["episode_index"] != np.arange(count)).any():
        raise InvalidDataset("its episodes are not numbered from 0")

    def paths(template: Any, begin: str, **more: str) -> list[str]:
        chunks, files = (columns[f"{begin}/{each}_index"].tolist() for each in ("chunk", "file"))
        pairs = [*zip(chunks, files, strict=True)]
        made = dict[tuple[int, int], str]()
        for chunk, file in pairs:
            if (chunk, file) not in made:
                made[chunk, file] = expand_template(
                    template, chunk_index=chunk, file_index=file, **more
                )
        return [made[pair] for pair in pairs]

    return LeRobotEpisodes(
        _lengths(columns["length"]),
        paths(info.data_path, "data"),
        {n: paths(info.video_path, f"videos/{n}", video_key=n) for n in videos},
        {n: columns[f"videos/{n}/from_timestamp"].astype(np.float64) for n in videos},
    )


def _read(
    inside: Inside,
    path: Path,
    place: Path,
    found: dict[str, list[np.ndarray]],
    stack: contextlib.ExitStack,
) -> int:
    """Append the columns of a file to ``found`` and return the number of episodes in it."""
    import os

    arrow = tables.arrow_module()
    file = opened_parquet(os.fdopen(inside.open(path, os.O_RDONLY), "rb"), path.name, place, stack)
    if file.metadata.num_rows > _MOST_EPISODES:
        raise InvalidDataset(
            f"{path.name} has {file.metadata.num_rows:,} episodes, expected at most "
            f"{_MOST_EPISODES:,}"
        )
    try:
        table = file.read(columns=[*found], use_threads=False)
        for name, values in found.items():
            column = table.column(name)
            if column.null_count:
                raise InvalidDataset(f"{name} of an episode is missing")
            array = column.to_numpy()
            if array.dtype.kind not in ("f" if name.endswith("timestamp") else "iu"):
                raise InvalidDataset(f"{name} of the episodes has the wrong dtype {array.dtype}")
            if len(array) and not (array.min() >= 0 and array.max() < _MOST_ROWS):
                raise InvalidDataset(
                    f"{name} of the episodes: expected values from 0 to below {_MOST_ROWS:,}, got "
                    f"{array.min()} to {array.max()}"
                )
            values.append(array)
    except damage_of(arrow) as error:
        raise refused(place, f"{path.name}: {error}") from error
    return int(table.num_rows)
