"""One pass over the rows of a storage: which trajectories ended, and how."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.storage.rows.keys import DONE, REWARD, STEP, TERMINATED, TRAJ_IDS
from tallyroll.storage.storages import DiskStorage

CHUNK_ROWS = 2**18

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Scan:
    """What the rows say of trajectories. Arrays have one entry a trajectory that ended."""

    returns: Float64
    lengths: Int64
    terminated: int
    truncated: int
    """Ended, and not by termination."""
    unfinished: int
    """Trajectories whose last row ends nothing."""
    begun_earlier: int
    """Ended, and their first rows are overwritten: they have no return and length here."""


@dataclass
class _Open:
    """Trajectories that have rows and have not ended, ``[trajectory]``."""

    ids: Int64
    returns: Float64
    lengths: Int64
    whole: Bools
    """Their first row was there."""


def scan(storage: DiskStorage, span: range) -> Scan | None:
    """Go through the rows of ``span``; None where they are not a collector's.

    Reads :data:`CHUNK_ROWS` rows at a time, of five columns; what is kept are some bytes for each
    trajectory.
    """
    wanted = (TRAJ_IDS, STEP, REWARD, DONE, TERMINATED)
    if not all(key in storage.schema for key in wanted) or not _are_scalars(storage, wanted):
        return None
    columns = [storage.column(key) for key in wanted]
    open_ = _Open(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.bool_))
    returns, lengths, terminated, total = [np.zeros(0)], [np.zeros(0, np.int64)], 0, 0
    for slots in _chunks(span, storage.ring):
        ids, step, reward, done, by_end = (column[slots].reshape(-1) for column in columns)
        ended = _advance(open_, ids, step, reward, done)
        returns.append(ended.returns[ended.whole])
        lengths.append(ended.lengths[ended.whole])
        total += len(ended.ids)
        terminated += int((by_end & done).sum())
    every = np.concatenate(returns)
    return Scan(
        every,
        np.concatenate(lengths),
        terminated,
        total - terminated,
        len(open_.ids),
        total - len(every),
    )


def _chunks(span: range, ring: int) -> Iterator[slice]:
    """The slots of rows, in the order of the rows."""
    start = span.start
    while start < span.stop:
        stop = min(start + CHUNK_ROWS, span.stop)
        slot = start
        if ring:
            slot = start % ring
            stop = min(stop, start - slot + ring)
        yield slice(slot, slot + stop - start)
        start = stop


def _are_scalars(storage: DiskStorage, keys: tuple[tuple[str, ...], ...]) -> bool:
    shapes = {column.key: column.shape for column in storage.schema.columns}
    return all(shapes[key] in ((), (1,)) for key in keys)


def _advance(
    open_: _Open,
    ids: NDArray[Any],
    step: NDArray[Any],
    reward: NDArray[Any],
    done: NDArray[Any],
) -> _Open:
    """Move ``open_`` past a chunk of rows; returns the trajectories that ended in it."""
    held = len(open_.ids)
    every, first, place = np.unique(
        np.concatenate([open_.ids, ids]), return_index=True, return_inverse=True
    )
    before, here = place[:held], place[held:]
    size = len(every)
    returns = np.asarray(np.bincount(here, reward, size), np.float64)
    lengths = np.bincount(here, minlength=size).astype(np.int64)
    whole = np.append(open_.whole, step == 0)[first]
    returns[before] += open_.returns
    lengths[before] += open_.lengths
    ended = np.zeros(size, np.bool_)
    ended[here[done]] = True
    left = ~ended
    open_.ids, open_.returns, open_.lengths = every[left], returns[left], lengths[left]
    open_.whole = whole[left]
    return _Open(every[ended], returns[ended], lengths[ended], whole[ended])
