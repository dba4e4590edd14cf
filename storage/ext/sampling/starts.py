"""The rows at which sequences may start."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from tallyroll.storage.readers.row_reader import RowReader

_CHUNK_NUMBERS: Final = 2**20


class Starts:
    """Rows from which ``length`` consecutive steps of one trajectory are stored, themselves first.

    Args:
        reader: of the rows, which say to which trajectory they belong.
        length: rows of a sequence.
    """

    def __init__(self, reader: RowReader, length: int) -> None:
        self._reader, self.length = reader, length
        self._chunk = max(1, _CHUNK_NUMBERS // length)

    def sequences(self, starts: np.ndarray) -> np.ndarray:
        """Return the rows of the sequences from ``starts`` [n] on, [n, length]."""
        index = self._reader.trajectory_index
        with index.lock:
            onward = index.rows(self._reader).onward(starts, self.length)
        return np.ascontiguousarray(onward.T)

    def which(self, rows: np.ndarray) -> np.ndarray:
        """Return which of ``rows`` [n] are starts, bool [n]."""
        found = np.zeros(len(rows), np.bool_)
        for begin in range(0, len(rows), self._chunk):
            part = self.sequences(rows[begin : begin + self._chunk])
            found[begin : begin + self._chunk] = _goes_on(part)
        return found

    def ended_in(self, rows: range, first: int) -> Iterator[np.ndarray]:
        """Yield the starts, from ``first`` on, of sequences whose last row is one of ``rows``."""
        index = self._reader.trajectory_index
        for begin in range(rows.start, rows.stop, self._chunk):
            ends = np.arange(begin, min(begin + self._chunk, rows.stop))
            with index.lock:
                known = index.rows(self._reader)
                starts = known.windows(ends, self.length)[:, 0]
                if ring := self._reader.ring:  # below, slots hold later rows
                    first = max(first, known.seen - ring)
                there = np.flatnonzero(starts >= first)
                starts, ends = starts[there], ends[there]
                onward = known.onward(starts, self.length)
            # No step is missing in between.
            yield starts[_goes_on(onward.T) & (onward[-1] == ends)]


def _goes_on(sequences: np.ndarray) -> np.ndarray:
    """Return which of the sequences [n, length] have as many rows: at an end, one is repeated."""
    return np.asarray((np.diff(sequences, axis=1) > 0).all(axis=1))
