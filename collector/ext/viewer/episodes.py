"""The rows of one episode, and the episode table of a storage, which a thread fills."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from tallyroll.storage.errors import StorageError, UnknownTrajectory
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import LANE, TERMINATED, TRAJ_IDS, TRUNCATED, Key
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.columns import flags_of, numbers_of
from tallyroll.storage.trajectories.episodes import table_dtype

_PATIENCE_SECONDS: Final = 0.3
"""The time that a call waits for the thread, so that small storages are complete at once."""
_BETWEEN_SECONDS: Final = 0.5


@dataclass(frozen=True)
class EpisodeCount:
    """The trajectories that have been counted so far."""

    table: np.ndarray
    """The lines of `Trajectories.table`."""
    rows: int = 0
    """The number of rows ever written that are counted."""
    head: int = 0
    """The number of rows to count."""
    rewinds: int = -1
    error: str | None = None
    """The reason why the rows cannot be counted, or None."""

    @property
    def complete(self) -> bool:
        """True if all rows are counted, or if an error has ended the count."""
        return self.error is not None or self.rows >= self.head


class ViewerStop(Exception):
    """Ends a thread of a viewer that was closed."""


class EpisodeTable:
    """Counts the trajectories of a storage in a thread.

    Args:
        storage: a handle that nothing else uses. The table closes it.
    """

    def __init__(self, storage: DiskStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._counted = EpisodeCount(np.empty(0, table_dtype()))
        self._published = 0.0

    def counted(self) -> EpisodeCount:
        """Return the trajectories counted so far. Count rows that are new, in the thread."""
        reader = self._storage.reader
        with self._lock:
            if self._closing:
                return self._counted
            before, thread = self._counted, self._thread
            if before.rewinds != reader.rewinds:  # its rows may be other ones now
                self._counted = EpisodeCount(
                    np.empty(0, table_dtype()), 0, reader.head, reader.rewinds
                )
            is_new = before.rewinds != reader.rewinds or before.rows != reader.head
            if is_new and (thread is None or not thread.is_alive()):
                thread = threading.Thread(target=self._count, name="count episodes", daemon=True)
                self._thread = thread
                thread.start()
        if thread is not None:
            thread.join(_PATIENCE_SECONDS)
        return self._counted

    def close(self) -> None:
        """Stop the thread and close the storage."""
        with self._lock:
            self._closing = True
        if self._thread is not None:
            self._thread.join()
        self._storage.close()

    def _count(self) -> None:
        reader = self._storage.reader
        try:
            self._counted = read_consistently(reader, self._whole)
        except ViewerStop:
            pass
        except (StorageError, OSError) as error:
            head = reader.head
            lines = np.empty(0, table_dtype())
            self._counted = EpisodeCount(lines, head, head, reader.rewinds, str(error))

    def _whole(self) -> EpisodeCount:
        reader = self._storage.reader
        rewinds, head = reader.rewinds, reader.head
        if not head:
            return EpisodeCount(np.empty(0, table_dtype()), 0, 0, rewinds)
        reader.trajectory_index.episodes(reader, lambda rows: self._publish(rows, head, rewinds))
        return EpisodeCount(self._storage.trajectories.table, head, head, rewinds)

    def _publish(self, rows: int, head: int, rewinds: int) -> None:
        """Publish a part of the table. The thread that counts calls this and holds the lock."""
        if self._closing:
            raise ViewerStop
        reader, now = self._storage.reader, time.monotonic()
        episodes = reader.trajectory_index.counted
        if episodes is None or now < self._published + _BETWEEN_SECONDS or rows >= head:
            return
        self._published = now
        table = episodes.table(reader.span.start, active_from=0)
        self._counted = EpisodeCount(table, rows, head, rewinds)


_CHUNK_ROWS: Final = 2**16


def first_id(reader: RowReader) -> int:
    """Return the id of the trajectory of the first valid row."""
    span = reader.span
    return int(_ids(reader, span.start, span.start + 1)[0])


def rows_of_episode(
    reader: RowReader, id: int, first: int | None = None, last: int | None = None
) -> np.ndarray:
    """Return the numbers of the rows of a trajectory in time order, int64 [rows].

    No index is read or built. Without ``first`` and ``last``, the scan begins at the first valid
    row, and ends when the trajectory ends or its lane begins another one.

    Args:
        reader: the reader of the rows.
        id: the trajectory.
        first: its first row, if known.
        last: its last row, if known.

    Raises:
        UnknownTrajectory: there is no such row.
    """
    span = reader.span
    begin = span.start if first is None else max(first, span.start)
    stop = span.stop if last is None else min(last + 1, span.stop)
    found: list[np.ndarray] = []
    lane = -1
    while begin < stop:
        end = min(begin + _CHUNK_ROWS, stop)
        ids = _ids(reader, begin, end)
        here = np.flatnonzero(ids == id)
        if len(here):
            lane = int(
                numbers_of(_values(reader, LANE, begin + int(here[0]), begin + int(here[0]) + 1))[0]
            )
            found.append(here + begin)
        if last is None and found and _has_ended(reader, found[-1][-1], lane, begin, end):
            break
        begin = end
    rows = np.concatenate(found) if found else np.empty(0, np.int64)
    rows = rows[rows >= reader.span.start]
    if not len(rows):
        raise UnknownTrajectory(
            f"{reader.path} has no rows of trajectory {id}. They may have been removed or "
            "overwritten since the page was loaded. Go back to the table of episodes."
        )
    return rows


def _has_ended(reader: RowReader, last: int, lane: int, begin: int, end: int) -> bool:
    """Return True if a trajectory whose newest known row is ``last`` has no row from ``end`` on."""
    if any(flag_at(reader, key, last) for key in (TERMINATED, TRUNCATED)):
        return True
    lanes = numbers_of(_values(reader, LANE, begin, end))
    later = np.arange(begin, end) > last
    return bool((later & (lanes == lane)).any())


def flag_at(reader: RowReader, key: Key, row: int) -> bool:
    """Return True if the column exists and is set at a row."""
    if key not in reader.keys:
        return False
    return bool(flags_of(reader.column(key).take(np.array([row], np.int64)))[0])


def _ids(reader: RowReader, start: int, stop: int) -> np.ndarray:
    return numbers_of(_values(reader, TRAJ_IDS, start, stop))


def _values(reader: RowReader, key: Key, start: int, stop: int) -> np.ndarray:
    found = reader.column(key).slice(start, stop)
    return found.copy() if reader.ring else found
