"""Finished episodes of a run, kept in columns that grow."""

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
    ]
)


@dataclass(frozen=True)
class Episode:
    """One episode that ended. ``total_return`` and ``length`` are of the whole episode.

    ``end`` is ``"terminated"`` or ``"truncated"``; where an environment reports both, it is
    ``"terminated"``. ``policy_versions`` are those of its first and its last action.
    """

    traj_id: int
    lane: int
    total_return: float
    length: int
    end: str
    policy_versions: tuple[int, int]


def episodes_of(*columns: NDArray[Any]) -> NDArray[np.void]:
    """Records of columns, which are those of `EPISODE`."""
    records = np.empty(len(columns[0]), EPISODE)
    for name, column in zip(EPISODE.names or (), columns, strict=True):
        records[name] = column
    return records


class EpisodeLog(Sequence[Episode]):
    """The finished episodes in the order in which they were delivered; 45 bytes each.

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

    def extend(self, episodes: NDArray[np.void]) -> None:
        """Add `EPISODE` records."""
        stop = self._count + len(episodes)
        self._rows = grown(self._rows, stop)
        self._rows[self._count : stop] = episodes
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


def _episode(row: np.void) -> Episode:
    return Episode(
        int(row["traj_id"]),
        int(row["lane"]),
        float(row["return"]),
        int(row["length"]),
        ENDS[int(row["terminated"])],
        (int(row["first_version"]), int(row["last_version"])),
    )
