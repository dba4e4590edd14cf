"""The files of a folder of LeRobot: names, and what its metadata say. Pure, but for reading."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from typing import Any, Final

from tallyroll.storage.datasets.exchange.about import LIMIT
from tallyroll.storage.datasets.exchange.door import refused
from tallyroll.storage.errors import InvalidDataset
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

_FIELD: Final = re.compile(r"\{([a-z_]{1,40})(?::0?([0-9]))?d?\}")
_MOST_PATH: Final = 4096


def filled(template: Any, **values: int | str) -> str:
    """Return a path of a template, which may name ``values``, with zeros before a number.

    It is not given to ``format``, whose fields can ask for attributes, or for gigabytes of zeros.

    Raises:
        InvalidDataset: it is no such template, or the path leads out of the folder.
    """
    if not isinstance(template, str) or len(template) > _MOST_PATH:
        raise InvalidDataset(f"a path is no text: {template!r:.80}")

    def value(found: re.Match[str]) -> str:
        name, width = found.groups()
        if name not in values:
            raise InvalidDataset(f"a path names {name}, which it may not: {template!r:.200}")
        said = values[name]
        return said if isinstance(said, str) else f"{said:0{int(width or 1)}d}"

    path = _FIELD.sub(value, template)
    parts = PurePosixPath(path).parts
    if (
        re.search(r"[{}]", _FIELD.sub("", template))
        or "\0" in path
        or path.startswith("/")
        or ".." in parts
        or not parts
    ):
        raise InvalidDataset(f"a path leads elsewhere: {template!r:.200}")
    return path


def read_text(inside: Inside, name: str, place: Path, limit: int = LIMIT) -> bytes:
    """Return the content of a small file."""
    try:
        return inside.read(place / name, limit)
    except OSError as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


def read_json(inside: Inside, name: str, place: Path, limit: int = LIMIT) -> Any:
    """Return the value in a file."""
    try:
        return json.loads(read_text(inside, name, place, limit))
    except (ValueError, RecursionError) as error:
        raise refused(place, f"{name} cannot be read ({error})") from error


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
