"""Finished episodes of a run, kept in columns that grow."""

import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from tallyroll.storage.trajectories.by_lane import grown

ENDS = ("truncated", "terminated")
EPISODE = np.dtype(
    [
        ("traj_id", np.int64),
        ("lane", np.int32),
        ("return", np.float64),
        ("length", np.int64),
        ("terminated", np.bool_),
        ("first_version", np.int64),
        ("last_version", np.int64),
        ("ended_at", np.int64),
    ]
)
"""The fields of an episode; while its rows are not counted, ``ended_at`` is within their block."""


@dataclass(frozen=True)
class Episode:
    """One episode that ended. ``total_return`` and ``length`` are of the whole episode.

    ``end`` is ``"terminated"`` or ``"truncated"``; where an environment reports both, it is
    ``"terminated"``. ``policy_versions`` are those of its first and its last action.

    ``ended_at`` is the number of its last transition among all that the run stored, from 1 on, in
    slot order: earlier slot first, within a slot the lower lane first. So it is the count of stored
    transitions when that one was counted, whatever the size and the layout of batches, in one
    process and with workers in ``mode="sync"``. A resumed run counts on from what it has. With
    ``mode="async"`` transitions are in order of arrival: those of one worker's piece after those
    that came before, and within a piece in slot order. (An environment that returns its lanes in
    any order has them in that order within a slot.)
    """

    traj_id: int
    lane: int
    total_return: float
    length: int
    end: str
    policy_versions: tuple[int, int]
    ended_at: int


def episodes_of(*columns: NDArray[Any]) -> NDArray[np.void]:
    """Records of columns, which are those of `EPISODE`."""
    records = np.empty(len(columns[0]), EPISODE)
    for name, column in zip(EPISODE.names or (), columns, strict=True):
        records[name] = column
    return records


class EpisodeLog(Sequence[Episode]):
    """The finished episodes in the order in which they were delivered; 53 bytes each.

    Args:
        limit: how many are kept, the most recent ones, so that a long run's memory stays flat;
            None keeps all. A storage holds the rows of every one.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._rows: NDArray[np.void] = np.zeros(64, EPISODE)
        self._count = 0
        self._limit = limit
        self.total = 0
        """Episodes ever added, those that are no longer kept included."""

    def extend(self, episodes: NDArray[np.void], counted: int) -> None:
        """Add `EPISODE` records of a block; ``counted`` transitions were stored before it."""
        stop = self._count + len(episodes)
        self._rows = grown(self._rows, stop)
        self._rows[self._count : stop] = episodes
        self._rows["ended_at"][self._count : stop] += counted
        self._count = stop
        self.total += len(episodes)
        if self._limit is not None and stop >= 2 * self._limit:
            self._rows[: self._limit] = self._rows[stop - self._limit : stop].copy()
            self._count = self._limit

    def __repr__(self) -> str:
        newest = f", the newest: {self[-1]}" if len(self) else ""
        return f"{type(self).__name__}({len(self):,} episodes{newest})"

    def __len__(self) -> int:
        """Episodes that are kept."""
        return self._count

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        """One episode, or a list of them."""
        if isinstance(index, slice):
            return [_episode(row) for row in self._rows[: self._count][index]]
        if not -self._count <= index < self._count:
            raise IndexError(f"episode {index} of {self._count}")
        return _episode(self._rows[index % self._count])

    @property
    def returns(self) -> NDArray[np.float64]:
        """Return of each episode, ``[episode]``."""
        return self._rows["return"][: self._count].copy()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each episode in transitions, ``[episode]``."""
        return self._rows["length"][: self._count].copy()

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the episodes as lists by name, as ``pandas.DataFrame`` takes them.

        The names are those of :class:`Episode`, with ``first_version`` and ``last_version`` for
        its ``policy_versions``.
        """
        rows = self._rows[: self._count]
        return {
            "ended_at": rows["ended_at"].tolist(),
            "traj_id": rows["traj_id"].tolist(),
            "lane": rows["lane"].tolist(),
            "total_return": rows["return"].tolist(),
            "length": rows["length"].tolist(),
            "end": [ENDS[ended] for ended in rows["terminated"].tolist()],
            "first_version": rows["first_version"].tolist(),
            "last_version": rows["last_version"].tolist(),
        }

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the episodes that are kept, with a line of names first; replace a file there.

        Raises:
            OSError: it cannot be written; a file that was there stays as it is.
        """
        columns, place = self.to_dict(), os.fspath(path)
        aside = f"{place}.tmp"
        try:
            with open(aside, "w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(zip(*columns.values(), strict=True))
            os.replace(aside, place)
        except BaseException:
            if os.path.isfile(aside):
                os.unlink(aside)
            raise


def _episode(row: np.void) -> Episode:
    return Episode(
        int(row["traj_id"]),
        int(row["lane"]),
        float(row["return"]),
        int(row["length"]),
        ENDS[int(row["terminated"])],
        (int(row["first_version"]), int(row["last_version"])),
        int(row["ended_at"]),
    )
