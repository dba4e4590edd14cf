"""Access to the trajectory columns of rows, in the order of row numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Final, Protocol, TypeVar

import numpy as np
import torch

from tallyroll.storage.rows.keys import (
    LANE,
    POLICY_VERSION,
    RESET_SEED,
    REWARD,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)
from tallyroll.storage.rows.readable_rows import ReadableRows
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.episodes import EpisodeRows
from tallyroll.storage.trajectories.lane_stretches import RowChunk

WHOSE: Final = (TRAJ_IDS, STEP, LANE)
"""The columns that assign a row to a trajectory."""
_NUMBERS = (*WHOSE, POLICY_VERSION, RESET_SEED)

Chunk = TypeVar("Chunk", bound=RowChunk)

_CHUNK_ROWS = 2**18
_LOOKS = 8


class RowFollower(Protocol):
    """An object that has processed the rows up to some number."""

    @property
    def seen(self) -> int:
        """The number of rows that it has processed."""


def unread(reader: ReadableRows, counted: RowFollower) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that ``counted`` has not processed, none longer than a ring.

    The writer of a ring may go on during the iteration and overwrite rows that were read first. The
    iteration is therefore repeated a few times. Each repetition takes a fraction of the time of the
    previous one.
    """
    size = min(_CHUNK_ROWS, reader.ring or _CHUNK_ROWS)
    for _ in range(_LOOKS if reader.ring else 1):
        head = reader.head
        while counted.seen < head:
            start = max(counted.seen, reader.span.start)
            if start >= head:
                break
            yield start, min(start + size, head)


class RowOrder:
    """Reads the trajectory columns of ranges of rows, from any reader with the same schema."""

    def __init__(self, schema: Schema) -> None:
        self._keys = set(schema.keys)
        self._sixteen_bits = {c.key for c in schema.columns if c.dtype is torch.bfloat16}
        self._optional = {
            key for key in (POLICY_VERSION, RESET_SEED) if not missing(schema, (key,))
        }

    def chunk(self, reader: ReadableRows, start: int, stop: int) -> RowChunk:
        """Return the ids, steps and lanes of rows ``[start, stop)``, without overwritten rows."""
        return _left(reader, RowChunk(start, *self._whose(reader, start, stop)))

    def episode_rows(self, reader: ReadableRows, start: int, stop: int) -> EpisodeRows:
        """Return the rows that episodes are counted from, without overwritten rows."""
        count = stop - start
        terminated, truncated = (
            flags_of(self._column(reader, key, start, stop))
            if key in self._keys
            else np.zeros(count, np.bool_)
            for key in (TERMINATED, TRUNCATED)
        )
        reward = np.full(count, np.nan)
        if REWARD in self._keys:
            reward = self._column(reader, REWARD, start, stop)
            reward = reward.reshape(count) if reward.size == count else reward
        version, seed = (
            numbers_of(self._column(reader, key, start, stop))
            if key in self._optional
            else np.full(count, -1)
            for key in (POLICY_VERSION, RESET_SEED)
        )
        # Read these last, so that rows that were overwritten by then are left out.
        ids, steps, lane = self._whose(reader, start, stop)
        rows = EpisodeRows(start, ids, steps, lane, terminated, truncated, reward, version, seed)
        return _left(reader, rows)

    def _whose(self, reader: ReadableRows, start: int, stop: int) -> list[np.ndarray]:
        return [numbers_of(self._column(reader, key, start, stop)) for key in WHOSE]

    def _column(self, reader: ReadableRows, key: Key, start: int, stop: int) -> np.ndarray:
        """Return rows of one column, [stop - start, ...]."""
        found = reader.column(key).slice(start, stop)
        if reader.ring:  # copy before `_left` checks which rows were overwritten
            found = found.copy()
        return floats_of(found) if key in self._sixteen_bits else found


def _left(reader: ReadableRows, rows: Chunk) -> Chunk:
    """Return the rows without leading rows that a writer overwrote during the copy."""
    gone = min(max(0, reader.span.start - rows.start), len(rows.ids)) if reader.ring else 0
    return rows.part(gone) if gone else rows


def missing(schema: Schema, keys: Iterable[Key]) -> list[str]:
    """Return the names of columns that are missing or unsuitable.

    Flags must be bools. Every other column must be one integer per row.
    """
    columns = {column.key: column for column in schema.columns}
    return [
        format_key(key)
        for key in keys
        if key not in columns
        or (key in _NUMBERS and math.prod(columns[key].shape) != 1)
        or columns[key].numpy_dtype.kind not in ("iu" if key in _NUMBERS else "b")
    ]


def numbers_of(column: np.ndarray) -> np.ndarray:
    """Return integers [n, ...], one per row, as int64 [n]."""
    column = column if column.ndim == 1 else column.reshape(len(column))
    return column if column.dtype == np.int64 else column.astype(np.int64)


def flags_of(column: np.ndarray) -> np.ndarray:
    """Return flags [n, ...], bools or numbers, as bools [n]: True if any flag of a row is set."""
    flags: np.ndarray = column if column.dtype == np.bool_ else column != 0
    if flags.ndim > 1:
        flags = flags.reshape(len(flags), math.prod(flags.shape[1:]))
        flags = flags[:, 0] if flags.shape[1] == 1 else np.any(flags, axis=1)
    return flags


def floats_of(bits: np.ndarray) -> np.ndarray:
    """Return the values of a bfloat16 column as float32, given their bits as ``uint16``."""
    found: np.ndarray = (bits.astype(np.uint32) << 16).view(np.float32)
    return found
