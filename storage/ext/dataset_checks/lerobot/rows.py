"""Checks of the rows of a LeRobot dataset, one Parquet file after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from tallyroll.storage.ext.dataset_checks.checker import (
    CheckResults,
    DatasetFolder,
    Where,
    declared_count,
)
from tallyroll.storage.ext.dataset_checks.lerobot.listing import (
    ListedEpisode,
    Listing,
    damage,
    opened_parquet,
)
from tallyroll.storage.ext.dataset_checks.values import (
    ZeroRuns,
    as_flags,
    check_finite,
    zero_rows,
)
from tallyroll.storage.ext.exchange.arrow import is_list
from tallyroll.storage.formats.optional_libraries import needed

_BATCH: Final = 2**15
_NUMBERS: Final = ("frame_index", "episode_index", "index", "task_index", "timestamp")
_NEXT_VALID: Final = "collector.next_valid"
_FOLLOWING: Final = "next.observation"
_WITHOUT_NUMBERS: Final = ("video", "image", "string", "audio")
_SLACK: Final = 1e-4
"""The tolerance, in seconds, of the step between two timestamps, as in LeRobot's own check."""
_ROUNDING: Final = 4e-7
"""The relative rounding error of two float32 timestamps."""
COUNTED_APART: Final = ("frame_index", "episode_index", "index", "task_index")
"""Columns whose values, but not statistics, LeRobot changes when it joins datasets."""


@dataclass
class FiniteStatistics:
    """Statistics of the finite values of a column."""

    count: int = 0
    """The number of rows."""
    finite: Any = 0
    """The number of finite values of each element."""
    low: Any = None
    high: Any = None
    total: Any = 0.0
    squares: Any = 0.0

    def add(self, values: np.ndarray) -> None:
        """Add rows [n, k]."""
        each = values.astype(np.float64)
        finite = np.isfinite(each)
        known = np.where(finite, each, 0.0)
        with np.errstate(all="ignore"):  # squares may be infinite
            sums = known.sum(0), (known * known).sum(0)
        low = np.where(finite, each, np.inf).min(0)
        high = np.where(finite, each, -np.inf).max(0)
        self._join(FiniteStatistics(len(each), np.count_nonzero(finite, axis=0), low, high, *sums))

    def merge(self, other: FiniteStatistics) -> None:
        """Add the statistics of other rows."""
        if other.count:
            self._join(other)

    def _join(self, other: FiniteStatistics) -> None:
        self.count += other.count
        self.finite = self.finite + other.finite
        self.low = other.low if self.low is None else np.minimum(self.low, other.low)
        self.high = other.high if self.high is None else np.maximum(self.high, other.high)
        with np.errstate(all="ignore"):
            self.total = self.total + other.total
            self.squares = self.squares + other.squares


def _is_judged(column: str) -> bool:
    """Return True if a column is an observation, an action or the reward."""
    return column.removeprefix("next.").split(".")[0] in ("observation", "action", "reward")


@dataclass
class _EpisodeRowsRead:
    """The rows of an episode that were read so far."""

    rows: int = 0
    first: int | None = None
    """The number of the episode's first row among all rows."""
    files: set[str] = field(default_factory=set)


class LeRobotRowChecks:
    """Checks all data files, and keeps a few numbers per episode.

    Args:
        folder: the files of the dataset.
        info: the content of ``info.json``.
        listing: the lists of the dataset.
        found: the object that collects the findings.
    """

    def __init__(
        self, folder: DatasetFolder, info: Mapping[str, Any], listing: Listing, found: CheckResults
    ) -> None:
        self._folder, self._found, self._listing = folder, found, listing
        self._rate = info["fps"]
        self._features = {
            name: said for name, said in info["features"].items() if isinstance(said, dict)
        }
        self._episodes = {each.number: each for each in listing.episodes}
        self._seen: dict[int, _EpisodeRowsRead] = {}
        self._before: dict[str, float] | None = None
        """The numbers of the previous row, which is in the episode `_current`."""
        self._current: int | None = None
        self._zeros = ZeroRuns(found)
        self._unread: set[str] = set()
        self.rows = 0
        self.counted: dict[int, dict[str, FiniteStatistics]] = {}
        """The statistics by episode and column."""

    def check(self) -> None:
        """Read all rows, and compare them with the lists."""
        files = self._listing.files
        for done, name in enumerate(files):
            self._file(name)
            self._found.tell(done + 1, len(files))
        self._zeros.finish()
        for episode in self._listing.episodes:
            self._against_list(episode)

    def _file(self, name: str) -> None:
        arrow = needed("pyarrow", "arrow", "Parquet needs")
        with opened_parquet(self._folder, name, self._found) as file:
            if file is None:
                self._unread.add(name)
                return
            numbers = self._columns(arrow, file.schema_arrow, name)
            if not {"episode_index", "frame_index", "index"} <= {*numbers}:
                return
            try:
                for batch in file.iter_batches(_BATCH, columns=numbers, use_threads=False):
                    self._batch(arrow, batch, name)
            except damage(arrow) as error:
                self._unread.add(name)
                message = "a Parquet file is damaged"
                self._found.add("files", message, Where(name), f"{error!s:.200}")

    def _columns(self, arrow: Any, schema: Any, name: str) -> list[str]:
        """Compare all columns with ``info.json``, and return the names of the numeric ones."""
        found, numbers = self._found, []
        where = Where(name)
        for column, said in self._features.items():
            dtype = said.get("dtype")
            at = schema.get_field_index(column)
            if dtype == "video":
                continue
            if at < 0:
                found.add("columns", "a column is missing", where, column=column)
            elif dtype not in _WITHOUT_NUMBERS:
                kind = schema.field(at).type
                while arrow.types.is_fixed_size_list(kind) or is_list(arrow, kind):
                    kind = kind.value_type
                if isinstance(kind, arrow.ExtensionType) or kind == arrow.from_numpy_dtype(
                    _dtype(dtype)
                ):
                    numbers.append(column)
                else:
                    what = f"it is {kind}, expected {dtype}"
                    found.add("columns", "a column has the wrong dtype", where, what, column)
        for column in schema.names:
            if column not in self._features:
                found.add("columns", "a column is not named in info.json", where, column=column)
        return numbers

    def _batch(self, arrow: Any, batch: Any, name: str) -> None:
        values: dict[str, np.ndarray] = {}
        for column in batch.schema.names:
            array = self._values(arrow, batch.column(column), column, batch.num_rows, name)
            if array is not None:
                values[column] = array
        if not {"episode_index", "frame_index", "index"} <= {*values}:
            self.rows += batch.num_rows
            return
        of = values["episode_index"][:, 0]
        edges = [0, *(np.flatnonzero(np.diff(of)) + 1).tolist(), len(of)]
        for start, stop in itertools.pairwise(edges):
            if stop > start:
                part = {column: each[start:stop] for column, each in values.items()}
                self._part(int(of[start]), part, name)

    def _values(
        self, arrow: Any, array: Any, column: str, count: int, name: str
    ) -> np.ndarray | None:
        """Return a column's numbers [rows, k]. If they are invalid, return None.

        Invalid numbers are reported as a finding.
        """
        shape = self._features[column].get("shape")
        size = math.prod(shape) if isinstance(shape, list) and _counts(shape) else -1
        found, where = self._found, Where(name)
        if isinstance(array.type, arrow.ExtensionType):
            array = array.storage
        while arrow.types.is_fixed_size_list(array.type) or is_list(arrow, array.type):
            if array.null_count:
                found.add("columns", "rows have no value", where, column=column)
                return None
            array = array.flatten()
        if array.null_count:
            found.add("columns", "rows have no value", where, column=column)
            return None
        if size < 0 or len(array) != count * size:
            what = f"{len(array):,} numbers in {count:,} rows, expected {shape!r:.60} each"
            found.add("columns", "a column has the wrong shape", where, what, column)
            return None
        flat: np.ndarray = array.to_numpy(zero_copy_only=False)
        return flat.reshape(count, size)

    def _part(self, number: int, values: Mapping[str, np.ndarray], name: str) -> None:
        """Check consecutive rows of one episode."""
        found, count = self._found, len(values["index"])
        seen = self._seen.setdefault(number, _EpisodeRowsRead())
        goes_on = number == self._current
        if seen.rows and not goes_on:
            message = "rows of an episode are not consecutive"
            found.add("episodes", message, Where(name), f"episode {number}", row=self.rows)
        elif number not in self._episodes:
            message = "rows belong to an episode that is not listed"
            found.add("episodes", message, Where(name, number))
        if not goes_on:
            self._before = None
        where = Where(name, number, seen.rows)
        if seen.first is None:
            seen.first = self.rows
            first = values["frame_index"][0, 0]
            if first != 0:
                what = f"the first index is {first}"
                found.add(
                    "steps", "the frame indices of an episode do not start at 0", where, what, row=0
                )
        self._follow(values, where)
        self._alone(values, where, number)
        self._before = {each: float(values[each][-1, 0]) for each in _NUMBERS if each in values}
        self._current = number
        seen.rows += count
        seen.files.add(name)
        self.rows += count

    def _follow(self, values: Mapping[str, np.ndarray], where: Where) -> None:
        """Compare each row with the previous one."""
        found = self._found
        for column in ("frame_index", "index"):
            steps, after = self._steps(values, column, where)
            found.add_rows("steps", f"{column} does not increase by one", steps != 1, after, column)
        if self._rate is not None and "timestamp" in values:
            with np.errstate(all="ignore"):  # an infinite timestamp is a finding
                steps, after = self._steps(values, "timestamp", where)
                late = np.abs(values["timestamp"][-len(steps) :, 0]) if len(steps) else steps
                wrong = np.abs(steps - 1 / self._rate) > _SLACK + _ROUNDING * late
            message = "the time between timestamps does not match the frame rate"
            found.add_rows(
                "timestamps", message, wrong, after, None, lambda row: f"{steps[row]:.6g} s later"
            )

    def _steps(
        self, values: Mapping[str, np.ndarray], column: str, where: Where
    ) -> tuple[np.ndarray, Where]:
        """Return the difference of each row from the previous row, and the place of the first."""
        each = values[column][:, 0].astype(np.float64 if column == "timestamp" else np.int64)
        if self._before is None:
            return np.diff(each), Where(where.file, where.episode, where.start + 1)
        before = np.asarray([self._before[column]], each.dtype)
        return np.diff(np.concatenate([before, each])), where

    def _alone(self, values: Mapping[str, np.ndarray], where: Where, number: int) -> None:
        """Make the checks that look at each row on its own."""
        found, episode = self._found, self._episodes.get(number)
        counted, parts = self.counted.setdefault(number, {}), []
        floats = False
        for column, each in values.items():
            valid = values.get(_NEXT_VALID) if column.startswith(_FOLLOWING) else None
            infinity = _is_judged(column)
            check_finite(found, each, where, column, infinity=infinity, valid=valid)
            if each.dtype.kind in "iuf" and len(each):
                counted.setdefault(column, FiniteStatistics()).add(each)
            if column not in _NUMBERS and each.dtype.kind == "f":
                parts.append(each)
                floats = True
        if floats:
            self._zeros.advance(zero_rows(parts), where)
        if "task_index" in values:
            self._tasks(values["task_index"][:, 0], where, episode)
        if "next.done" in values:
            flags = as_flags(found, values["next.done"], where, "next.done")
            if flags is not None and episode is not None:
                early = flags & (where.start + np.arange(len(flags)) < episode.length - 1)
                message = "rows of the episode follow its end"
                found.add_rows("ends", message, early, where, "next.done")

    def _tasks(self, tasks: np.ndarray, where: Where, episode: ListedEpisode | None) -> None:
        known = np.isin(tasks, [*self._listing.tasks])
        message = "a row names a task that does not exist"
        self._found.add_rows(
            "tasks", message, ~known, where, None, lambda row: f"task {tasks[row]}"
        )
        if episode is not None and episode.tasks is not None:
            own = [n for n, text in self._listing.tasks.items() if text in episode.tasks]
            wrong = known & ~np.isin(tasks, own)
            message = "a row names a task that its episode does not have"
            self._found.add_rows(
                "tasks", message, wrong, where, None, lambda row: f"task {tasks[row]}"
            )

    def _against_list(self, episode: ListedEpisode) -> None:
        """Compare the rows of an episode with its entry in the lists."""
        found, seen = self._found, self._seen.get(episode.number)
        where = Where(episode.listed_in, episode.number)
        if episode.data in self._unread:
            return
        if seen is None:
            found.add("episodes", "an episode has no rows", where, f"expected in {episode.data}")
            return
        if seen.rows != episode.length:
            what = f"expected {episode.length:,} rows, got {seen.rows:,}"
            found.add("episodes", "an episode does not have its listed length", where, what)
        if seen.files != {episode.data}:
            what = f"{', '.join(sorted(seen.files))}, expected {episode.data}"
            found.add("episodes", "rows are in another file than listed", where, what)
        if episode.begin is not None and not self._unread and seen.first != episode.begin:
            what = f"expected row {episode.begin}, got {seen.first}"
            found.add("episodes", "an episode does not begin at its listed row", where, what)
        if None not in (episode.begin, episode.end):
            assert episode.begin is not None and episode.end is not None
            if episode.end - episode.begin != episode.length:
                what = f"from {episode.begin} to {episode.end}, with {episode.length} rows"
                found.add(
                    "episodes",
                    "the listed end of an episode does not match its length",
                    where,
                    what,
                )


def _counts(shape: list[Any]) -> bool:
    return (
        all(declared_count(each) is not None and each < 2**31 for each in shape) and len(shape) < 9
    )


def _dtype(name: Any) -> np.dtype[Any]:
    try:
        return np.dtype(str(name))
    except TypeError:
        return np.dtype(np.void)
