"""Rows at which sequences can start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tallyroll.storage.readers.row_reader import RowReader

_CHUNK_NUMBERS: Final = 2**20


class Starts:
    """The rows that start a stored sequence of ``length`` consecutive steps of one trajectory.

    Args:
        reader: the reader of the rows, which have trajectory ids.
        length: rows per sequence.
    """

    def __init__(self, reader: RowReader, length: int) -> None:
        self._reader, self.length = reader, length
        self._chunk = max(1, _CHUNK_NUMBERS // length)

    def sequences(self, starts: np.ndarray) -> np.ndarray:
        """Return the rows [n, length] of the sequences that begin at ``starts`` [n]."""
        index = self._reader.trajectory_index
        with index.lock:
            onward = index.rows(self._reader).onward(starts, self.length)
        return np.ascontiguousarray(onward.T)

    def which(self, rows: np.ndarray) -> np.ndarray:
        """Return which of ``rows`` [n] are starts, bool [n]."""
        found = np.zeros(len(rows), np.bool_)
        for begin in range(0, len(rows), self._chunk):
            part = self.sequences(rows[begin : begin + self._chunk])
            found[begin : begin + self._chunk] = _continues(part)
        return found

    def ended_in(self, rows: range, first: int) -> Iterator[np.ndarray]:
        """Yield the starts, from ``first`` on, of sequences whose last row is one of ``rows``."""
        index = self._reader.trajectory_index
        for begin in range(rows.start, rows.stop, self._chunk):
            ends = np.arange(begin, min(begin + self._chunk, rows.stop))
            with index.lock:
                known = index.rows(self._reader)
                starts = known.windows(ends, self.length)[:, 0]
                if ring := self._reader.ring:  # slots of earlier rows hold later rows now
                    first = max(first, known.seen - ring)
                there = np.flatnonzero(starts >= first)
                starts, ends = starts[there], ends[there]
                onward = known.onward(starts, self.length)
            # Require that no step in between is missing.
            yield starts[_continues(onward.T) & (onward[-1] == ends)]


def _continues(sequences: np.ndarray) -> np.ndarray:
    """Return which sequences [n, length] are complete: a short one repeats its last row."""
    return np.asarray((np.diff(sequences, axis=1) > 0).all(axis=1))
