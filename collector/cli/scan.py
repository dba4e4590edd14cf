"""One pass over the rows of a storage: which trajectories ended, and how."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.keys import DONE, REWARD, TERMINATED, TRAJ_IDS
from tallyroll.storage import MemmapStorage

CHUNK_ROWS = 2**18

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


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


@dataclass
class _Open:
    """Trajectories that have rows and have not ended, ``[trajectory]``."""

    ids: Int64
    returns: Float64
    lengths: Int64


def scan(storage: MemmapStorage, rows: int) -> Scan | None:
    """Go through the first ``rows`` rows; None where they are not a collector's.

    Reads :data:`CHUNK_ROWS` rows at a time, of four columns; what is kept are 16 bytes for each
    trajectory.
    """
    wanted = (TRAJ_IDS, REWARD, DONE, TERMINATED)
    if not all(key in storage.schema for key in wanted) or not _are_scalars(storage, wanted):
        return None
    open_ = _Open(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))
    returns, lengths, terminated = [np.zeros(0)], [np.zeros(0, np.int64)], 0
    for start in range(0, rows, CHUNK_ROWS):
        stop = min(start + CHUNK_ROWS, rows)
        ids, reward, done, by_end = (
            storage.column(key)[start:stop].reshape(stop - start) for key in wanted
        )
        ended = _advance(open_, ids, reward, done)
        returns.append(ended.returns)
        lengths.append(ended.lengths)
        terminated += int((by_end & done).sum())
    every = np.concatenate(returns)
    return Scan(every, np.concatenate(lengths), terminated, len(every) - terminated, len(open_.ids))


def _are_scalars(storage: MemmapStorage, keys: tuple[tuple[str, ...], ...]) -> bool:
    shapes = {column.key: column.shape for column in storage.schema.columns}
    return all(shapes[key] in ((), (1,)) for key in keys)


def _advance(open_: _Open, ids: NDArray[Any], reward: NDArray[Any], done: NDArray[Any]) -> _Open:
    """Move ``open_`` past a chunk of rows; returns the trajectories that ended in it."""
    every, place = np.unique(np.concatenate([open_.ids, ids]), return_inverse=True)
    before, here = place[: len(open_.ids)], place[len(open_.ids) :]
    size = len(every)
    returns = np.asarray(np.bincount(here, reward, size), np.float64)
    lengths = np.bincount(here, minlength=size).astype(np.int64)
    returns[before] += open_.returns
    lengths[before] += open_.lengths
    ended = np.zeros(size, np.bool_)
    ended[here[done]] = True
    open_.ids, open_.returns, open_.lengths = every[~ended], returns[~ended], lengths[~ended]
    return _Open(every[ended], returns[ended], lengths[ended])
