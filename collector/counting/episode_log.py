"""Finished episodes of a run, kept in an array that grows."""

import csv
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.counting.episode_ring import EPISODE, EpisodeRing
from tallyroll.storage.trajectories.lane_stretches import grown

ENDS = ("truncated", "terminated")


@dataclass(frozen=True)
class Episode:
    """One finished episode; ``total_return`` and ``length`` describe the whole episode.

    ``numbering.py`` computes the return.

    ``end`` is ``"terminated"`` or ``"truncated"``; if an environment reports both, it is
    ``"terminated"``. ``policy_versions`` are the versions that chose the first and the last action.

    ``ended_at`` is the number of the last transition of the episode among all stored transitions of
    the run, counted from 1 in slot order: earlier slot first, then lower lane. It does not depend
    on the size or the layout of batches, and it is the same in one process and with workers in
    ``mode="sync"``. A resumed run continues the count. With ``mode="async"``, transitions are
    counted in order of arrival: one worker's piece after the other, and in slot order within a
    piece. If an environment returns its lanes in any order, the order within a slot is the order of
    return.
    """

    traj_id: int
    lane: int
    total_return: float
    length: int
    end: str
    policy_versions: tuple[int, int]
    ended_at: int


def episodes_of(*columns: NDArray[Any]) -> NDArray[np.void]:
    """Return `EPISODE` records of these columns."""
    records = np.empty(len(columns[0]), EPISODE)
    for name, column in zip(EPISODE.names or (), columns, strict=True):
        records[name] = column
    return records


class _LogContent(NamedTuple):
    """The content of a log, replaced as a whole, so that no thread sees it half changed."""

    rows: NDArray[np.void]
    size: int
    """Number of leading records that are episodes; these are never overwritten."""
    total: int
    ring: EpisodeRing | None = None
    taken: int = 0
    """Number of records that were taken from the ring."""

    def plus(self, episodes: NDArray[np.void], limit: int | None) -> "_LogContent":
        """Return the content with further records; at least the last ``limit`` records are kept."""
        new, stop = len(episodes), self.size + len(episodes)
        rows, total = grown(self.rows, stop), self.total + new
        rows[self.size : stop] = episodes
        if limit is not None and stop >= 2 * limit:
            # Keep as many as if the records had come one by one, whatever the size of blocks.
            kept = limit + (stop % limit if limit else 0)
            newest = np.empty(2 * limit, EPISODE)
            newest[:kept] = rows[stop - kept : stop]
            rows, stop = newest, kept
        return self._replace(rows=rows, size=stop, total=total)


class EpisodeLog(Sequence[Episode]):
    """The finished episodes, in the order in which they were stored; each takes 53 bytes.

    Episodes that the extension records wait in a ring until they are read or the ring is half full.

    Args:
        limit: the log keeps at least this many of the most recent episodes, and fewer than twice as
            many, so that a long run needs a bounded amount of memory; None keeps all episodes. A
            storage holds the rows of every episode.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._kept = _LogContent(np.zeros(64, EPISODE), 0, 0)
        self._turn = threading.RLock()

    def ring(self, most: int) -> EpisodeRing:
        """Return a ring for calls in which at most ``most`` episodes end.

        After this, the extension must not write to an earlier ring.
        """
        with self._turn:
            kept = self.take()
            ring = kept.ring
            if ring is None or ring.counts.room < 2 * most:
                ring = EpisodeRing(most)
                self._kept = kept._replace(ring=ring, taken=0)
            return ring

    def take(self) -> _LogContent:
        """Take the records that wait in the ring, and return the whole content.

        Threads take turns. A signal handler may run at any point and take the same records, but
        they are kept only once.
        """
        kept = self._kept
        if kept.ring is None or kept.ring.counts.noted == kept.ring.counts.taken:
            return kept
        with self._turn:
            kept = self._kept
            assert kept.ring is not None
            episodes = kept.ring.since(kept.taken)
            if self._kept is kept:  # otherwise a signal handler has taken records
                after = kept.plus(episodes, self._limit)
                after = after._replace(taken=kept.taken + len(episodes))
                if self._kept is kept:
                    self._kept = after
            kept = self._kept
            assert kept.ring is not None
            kept.ring.free(kept.taken)
            return kept

    def extend(self, episodes: NDArray[np.void], counted: int) -> None:
        """Add `EPISODE` records of a block; ``counted`` transitions were stored before it."""
        added = episodes.copy()
        added["ended_at"] += counted
        with self._turn:
            self._kept = self.take().plus(added, self._limit)

    def forget_after(self, stored: int) -> None:
        """Drop the newest episodes whose last transition is not among the first ``stored``."""
        with self._turn:
            kept = self.take()
            rows = kept.rows[: kept.size]
            gone = int(np.count_nonzero(rows["ended_at"] > stored))
            if gone:
                rows, size = rows[: kept.size - gone].copy(), kept.size - gone
                self._kept = kept._replace(rows=rows, size=size, total=kept.total - gone)

    def newest(self, count: int, before: int) -> NDArray[np.void]:
        """Return records of the last ``count`` episodes, for `extend` of another log.

        ``before`` is the number of transitions that were stored before the lease of these episodes.
        """
        rows = self._rows
        found = rows[max(0, len(rows) - count) :].copy()
        found["ended_at"] -= before
        return found

    @property
    def total(self) -> int:
        """Number of episodes ever added, including those that are no longer kept."""
        return self.take().total

    @property
    def _rows(self) -> NDArray[np.void]:
        """The records of the kept episodes."""
        kept = self.take()
        return kept.rows[: kept.size]

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copy and pickle; a copy has the kept episodes and gets no further ones."""
        kept = self.take()
        alone = _LogContent(kept.rows[: kept.size].copy(), kept.size, kept.total)
        return type(self), (self._limit,), {"_kept": alone}

    def __repr__(self) -> str:
        rows = self._rows
        newest = f", the newest: {_episode(rows[-1])}" if len(rows) else ""
        return f"{type(self).__name__}({len(rows):,} episodes{newest})"

    def __len__(self) -> int:
        """Return the number of kept episodes."""
        return self.take().size

    @overload
    def __getitem__(self, index: int) -> Episode: ...
    @overload
    def __getitem__(self, index: slice) -> list[Episode]: ...
    def __getitem__(self, index: int | slice) -> Episode | list[Episode]:
        """Return one episode, or a list of episodes for a slice."""
        rows = self._rows
        if isinstance(index, slice):
            return [_episode(row) for row in rows[index]]
        if not -len(rows) <= index < len(rows):
            raise IndexError(f"episode {index} is out of range: the log has {len(rows)} episodes")
        return _episode(rows[index])

    @property
    def returns(self) -> NDArray[np.float64]:
        """Return of each episode, ``[episode]``."""
        return self._rows["return"].copy()

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Length of each episode in transitions, ``[episode]``."""
        return self._rows["length"].copy()

    def to_dict(self) -> dict[str, list[Any]]:
        """Return the kept episodes as lists by name, in the form that ``pandas.DataFrame`` takes.

        The names are the attributes of :class:`Episode`, except that ``first_version`` and
        ``last_version`` replace ``policy_versions``.
        """
        rows = self._rows
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
        """Write the kept episodes to a CSV file with a header line; replace an existing file.

        Raises:
            OSError: the file cannot be written; an existing file is unchanged.
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
