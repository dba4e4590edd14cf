"""The files of a folder of LeRobot: names, and what its metadata say. Pure, but for reading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.ext.exchange.base import refused
from tallyroll.storage.ext.exchange.folders import read_text
from tallyroll.storage.files.safe_files import Inside

VERSION: Final = "v3.0"
INFO, STATS, TASKS, ABOUT = (
    "meta/info.json",
    "meta/stats.json",
    "meta/tasks.parquet",
    "meta/tallyroll.json",
)
EPISODES: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
DATA: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEOS: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
CHUNK: Final = 1000
"""Files of a folder."""
DATA_MB, VIDEO_MB = 100, 200
"""Megabytes of a file, after which the next episode begins another."""


def read_lines(inside: Inside, name: str, place: Path, limit: int) -> list[Any]:
    """Return the values of a file that has one a line."""
    try:
        return [json.loads(line) for line in read_text(inside, name, place, limit).splitlines()]
    except (ValueError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


def files_below(inside: Inside, folder: str, place: Path, end: str, most: int) -> list[Path]:
    """Return the files ``folder/*/*END``, sorted; no folder of them may be a link."""
    import os

    found = sorted(place.glob(f"{folder}/*/*{end}"))[: most + 1]
    if len(found) > most:
        raise refused(place, f"it has more than {most} files {folder}/*/*{end}")
    for above in sorted({each.parent for each in found}):
        os.close(inside.open_directory(above))
    return found
