"""The file names of a LeRobot folder, and helpers that read its metadata."""

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
"""The maximum number of files in a folder."""
DATA_MB, VIDEO_MB = 100, 200
"""The file sizes, in MB, at which the next episode starts a new file."""


def read_lines(inside: Inside, name: str, place: Path, limit: int) -> list[Any]:
    """Return the values of a JSON Lines file."""
    try:
        return [json.loads(line) for line in read_text(inside, name, place, limit).splitlines()]
    except (ValueError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


def files_below(inside: Inside, folder: str, place: Path, end: str, most: int) -> list[Path]:
    """Return the sorted files ``<folder>/*/*<end>``. None of their folders may be a link."""
    import os

    found = sorted(place.glob(f"{folder}/*/*{end}"))[: most + 1]
    if len(found) > most:
        raise refused(place, f"it has more than {most} files {folder}/*/*{end}")
    for above in sorted({each.parent for each in found}):
        os.close(inside.open_directory(above))
    return found
