"""The lists of a LeRobot dataset: its episodes, its tasks, and their files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.ext.dataset_checks.checker import (
    CheckResults,
    DatasetFolder,
    Where,
    declared_count,
)
from tallyroll.storage.ext.exchange.parquet import has_footer, limited_file, row_group_sizes
from tallyroll.storage.formats.optional_libraries import needed

_MOST_EPISODES: Final = 2**24
_FIELD: Final = re.compile(r"\{(\w+)(?::0?(\d{1,2})d)?\}")
_STATISTICS: Final = "stats/"


@dataclass
class ListedVideo:
    """The part of a video that belongs to an episode, for one camera."""

    file: str
    begin: float | None = None
    """The start in seconds, or None if the video holds only this episode."""
    end: float | None = None


@dataclass
class ListedEpisode:
    """An episode, as the lists describe it."""

    number: int
    length: int
    data: str
    """The data file of the episode."""
    tasks: tuple[str, ...] | None
    begin: int | None = None
    """The index of the first row, or None if the list does not record it."""
    end: int | None = None
    films: dict[str, ListedVideo] = field(default_factory=dict)
    statistics: Mapping[str, Any] | None = None
    listed_in: str = ""


@dataclass
class Listing:
    """The episodes, tasks and data files that the lists of a dataset name."""

    version: str
    episodes: list[ListedEpisode]
    tasks: dict[int, str]
    cameras: tuple[str, ...]
    files: list[str]
    """The data files, in the order of episodes."""


def listing_of(
    folder: DatasetFolder, info: Mapping[str, Any], found: CheckResults
) -> Listing | None:
    """Read the lists and report errors in them. Return None if there are no lists."""
    version = str(info["codebase_version"])
    features = info["features"]
    cameras = tuple(
        name
        for name, said in features.items()
        if isinstance(said, dict) and said.get("dtype") == "video"
    )
    if version == "v3.0":
        tasks, entries = _tasks_v3(folder, found), _entries_v3(folder, found)
    else:
        tasks, entries = _tasks_v2(folder, found), _entries_v2(folder, version, found)
    if entries is None:
        for name in folder.below("data", ".parquet"):
            with opened_parquet(folder, name, found):
                pass  # a finding reports an unfinished file
        return None
    names = _Names(info, cameras, version, found)
    episodes: list[ListedEpisode] = []
    seen: set[int] = set()
    for where, entry in entries:
        episode = names.episode(entry, where)
        if episode is None:
            continue
        if episode.number in seen:
            found.add("episodes", "an episode is listed twice", Where(where, episode.number))
            continue
        seen.add(episode.number)
        episodes.append(episode)
    episodes.sort(key=lambda each: each.number)
    if episodes:
        for number in range(min(episodes[-1].number + 1, _MOST_EPISODES)):
            if number not in seen:
                found.add("episodes", "an episode is not listed", Where(episode=number))
    files = list(dict.fromkeys(each.data for each in episodes))
    for name in folder.below("data", ".parquet"):
        if name not in files:
            found.add("files", "a file of rows belongs to no episode", Where(name))
    return Listing(version, episodes, tasks or {}, cameras, files)


class _Names:
    """Expands the file name templates of ``info.json``."""

    def __init__(
        self, info: Mapping[str, Any], cameras: tuple[str, ...], version: str, found: CheckResults
    ) -> None:
        self._info, self._cameras, self._version, self._found = info, cameras, version, found
        self._bad: set[str] = set()

    def episode(self, entry: Any, where: str) -> ListedEpisode | None:
        number = declared_count(entry.get("episode_index")) if isinstance(entry, dict) else None
        length = declared_count(entry.get("length")) if isinstance(entry, dict) else None
        if number is None or length is None:
            self._found.add("episodes", "an episode has no number, or no length", Where(where))
            return None
        values = self._values(entry, number, "data/")
        data = self._named("data_path", values)
        if data is None:
            return None
        tasks = entry.get("tasks")
        names = tuple(map(str, tasks)) if isinstance(tasks, list) else None
        episode = ListedEpisode(number, length, data, names, listed_in=where)
        if self._version == "v3.0":
            episode.begin = declared_count(entry.get("dataset_from_index"))
            episode.end = declared_count(entry.get("dataset_to_index"))
        episode.statistics = _statistics(entry)
        for camera in self._cameras:
            top = f"videos/{camera}/"
            name = self._named(
                "video_path", {**self._values(entry, number, top), "video_key": camera}
            )
            if name is not None:
                begin, end = entry.get(f"{top}from_timestamp"), entry.get(f"{top}to_timestamp")
                episode.films[camera] = ListedVideo(name, begin, end)
        return episode

    def _values(self, entry: Mapping[str, Any], number: int, top: str) -> dict[str, Any]:
        size = declared_count(self._info.get("chunks_size")) or 1000
        return {
            "episode_index": number,
            "episode_chunk": number // size,
            "chunk_index": entry.get(f"{top}chunk_index"),
            "file_index": entry.get(f"{top}file_index"),
        }

    def _named(self, pattern: str, values: Mapping[str, Any]) -> str | None:
        """Return the file name for a template. If it is invalid, add a finding and return None.

        Each template causes at most one finding.
        """
        text: Any = self._info.get(pattern)
        try:
            name = _FIELD.sub(lambda match: _filled(match, values), text)
            if {"{", "}"} & {*name} or PurePosixPath(name).is_absolute() or ".." in name.split("/"):
                raise ValueError("the path leads out of the dataset, or has an unknown field")
            return name
        except (TypeError, ValueError, KeyError) as error:
            if pattern not in self._bad:
                self._bad.add(pattern)
                message = "the names of files cannot be derived"
                what = f"{pattern} is {text!r:.100}: {error!s:.100}"
                self._found.add("files", message, Where("meta/info.json"), what)
            return None


def _filled(match: re.Match[str], values: Mapping[str, Any]) -> str:
    value, width = values[match[1]], match[2]
    if width is None:
        return str(value)
    if declared_count(value) is None:
        raise ValueError(f"{match[1]} is {value!r:.40}, expected a count")
    return f"{value:0{int(width)}d}"


def _statistics(entry: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the statistics of an episode, by column."""
    if isinstance(entry.get("stats"), dict):
        found: Mapping[str, Any] = entry["stats"]
        return found
    columns: dict[str, dict[str, Any]] = {}
    for name, value in entry.items():
        if name.startswith(_STATISTICS):
            column, _, what = name[len(_STATISTICS) :].rpartition("/")
            columns.setdefault(column, {})[what] = value
    return columns or None


# --- version 2 ------------------------------------------------------------------------------------


def _lines(folder: DatasetFolder, name: str) -> list[Any] | None:
    text = folder.text(name)
    if text is None:
        return None
    values = [
        folder.parsed(line, name, row) for row, line in enumerate(text.splitlines()) if line.strip()
    ]
    return [value for value in values if isinstance(value, dict)]


def _tasks_v2(folder: DatasetFolder, found: CheckResults) -> dict[int, str] | None:
    name = "meta/tasks.jsonl"
    lines = _lines(folder, name)
    pairs = [(each.get("task_index"), each.get("task")) for each in lines or ()]
    return None if lines is None else _numbered(pairs, name, found)


def _numbered(pairs: list[tuple[Any, Any]], name: str, found: CheckResults) -> dict[int, str]:
    tasks: dict[int, str] = {}
    for row, (number, task) in enumerate(pairs):
        if declared_count(number) is None or number in tasks:
            found.add(
                "tasks",
                "a task has no number, or the number of another task",
                Where(name),
                repr(number),
                row=row,
            )
        else:
            tasks[number] = str(task)
    return tasks


def _entries_v2(
    folder: DatasetFolder, version: str, found: CheckResults
) -> list[tuple[str, Any]] | None:
    name, kept = "meta/episodes.jsonl", "meta/episodes_stats.jsonl"
    lines = _lines(folder, name)
    if lines is None:
        return None
    if version == "v2.0":
        return [(name, each) for each in lines]
    of_each = {
        each["episode_index"]: each.get("stats")
        for each in _lines(folder, kept) or ()
        if declared_count(each.get("episode_index")) is not None
    }
    for each in lines:
        number = each.get("episode_index")
        if declared_count(number) is not None:
            each["stats"] = of_each.get(number)
            if of_each.get(number) is None:
                found.add("statistics", "an episode has no statistics", Where(kept, number))
    return [(name, each) for each in lines]


# --- version 3 ------------------------------------------------------------------------------------


def _tasks_v3(folder: DatasetFolder, found: CheckResults) -> dict[int, str] | None:
    name = "meta/tasks.parquet"
    with opened_parquet(folder, name, found) as file:
        if file is None:
            return None
        rows = _whole(file, None, name, found)
    if rows is None:
        return None
    columns = rows.to_pydict()
    if "task_index" not in columns:
        found.add("tasks", "the list of tasks has no column task_index", Where(name))
        return None
    numbers = columns.pop("task_index")
    texts = next((each for each in columns.values()), [None] * len(numbers))
    return _numbered(list(zip(numbers, texts, strict=True)), name, found)


def _entries_v3(folder: DatasetFolder, found: CheckResults) -> list[tuple[str, Any]] | None:
    names = folder.below("meta/episodes", ".parquet")
    if not names:
        found.add("files", "a file is missing", Where("meta/episodes"), "no list of episodes")
        return None
    entries: list[tuple[str, Any]] = []
    for name in names:
        with opened_parquet(folder, name, found) as file:
            rows = None if file is None else _whole(file, None, name, found)
        if rows is not None:
            entries += [(name, each) for each in rows.to_pylist()]
    return entries or None


def _whole(file: Any, columns: list[str] | None, name: str, found: CheckResults) -> Any:
    arrow = needed("pyarrow", "arrow", "Parquet needs")
    try:
        return file.read(columns=columns, use_threads=False)
    except damage(arrow) as error:
        found.add("files", "a Parquet file is damaged", Where(name), f"{error!s:.200}")
        return None


def damage(arrow: Any) -> tuple[type[Exception], ...]:
    """Return the errors that a damaged Parquet file raises."""
    return (OSError, ValueError, LookupError, TypeError, arrow.ArrowException)


@contextmanager
def opened_parquet(folder: DatasetFolder, name: str, found: CheckResults) -> Iterator[Any]:
    """Yield a Parquet file. If it cannot be opened, add a finding and yield None."""
    arrow = needed("pyarrow", "arrow", "Parquet needs")
    parquet = needed("pyarrow.parquet", "arrow", "Parquet needs")
    raw, where = folder.opened(name), Where(name)
    if raw is None:
        yield None
        return
    with raw:
        try:
            complete = has_footer(raw)
        except OSError as error:
            found.add("files", "a Parquet file cannot be read", where, str(error))
            complete = False
        if not complete:
            message = "a Parquet file has no footer: it is truncated, or its writer was killed"
            found.add("files", message, where)
            yield None
            return
        try:
            file = limited_file(parquet, raw, page_checksum_verification=True)
            for nbytes in row_group_sizes(file):
                require_memory(
                    2 * nbytes, f"a row group of {name}", "Use a machine with more memory."
                )
        except damage(arrow) as error:
            message = "a Parquet file cannot be opened"
            found.add("files", message, where, f"{error!s:.200}")
            yield None
            return
        with file:
            yield file
