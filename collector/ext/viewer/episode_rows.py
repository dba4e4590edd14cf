"""The rows of one episode, found by scanning the rows from its first to its last."""

from __future__ import annotations

from typing import Final

import numpy as np

from tallyroll.storage.errors import UnknownTrajectory
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import LANE, TERMINATED, TRAJ_IDS, TRUNCATED, Key
from tallyroll.storage.trajectories.columns import flags_of, numbers_of

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
        if last is None and found and _has_ended(reader, found[-1][-1], lane, ids, begin, end):
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


def _has_ended(
    reader: RowReader, last: int, lane: int, ids: np.ndarray, begin: int, end: int
) -> bool:
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
