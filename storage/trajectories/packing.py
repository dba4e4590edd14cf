"""Stretches of rows copied to one place, each column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from tallyroll.storage.engine.kernel import compiled, copy_table
from tallyroll.storage.rows.reading import ReadColumn, Reading
from tallyroll.storage.trajectories.content import expanded


class Packing:
    """Memory in which parts of the rows are packed: each has its columns one after the other.

    Args:
        reader: the reader of the rows.
        columns: the columns of a part, in order, and the bytes of a value of each.
        rows: the number of the first row of each run, int64 [runs].
        counts: how many rows each run has, which lie side by side, int64 [runs].
        most: how many rows there is memory for.
    """

    def __init__(
        self,
        reader: Reading,
        columns: Sequence[tuple[ReadColumn, int]],
        rows: np.ndarray,
        counts: np.ndarray,
        most: int,
    ) -> None:
        self._columns, self._rows, self._counts, self._most = columns, rows, counts, most
        sizes = [nbytes for _, nbytes in columns]
        self._room, self._row_nbytes = np.empty(most * sum(sizes), np.uint8), sum(sizes)
        # Held here, for the table does not keep them alive.
        self._arrays = [column.array for column, _ in columns]
        arrays = [each for each in self._arrays if each is not None and each.flags.c_contiguous]
        self._kernel = compiled() if len(arrays) == len(columns) else None
        if self._kernel is not None:
            self._slots = min(map(len, arrays))
            here = [self._room.ctypes.data] * len(arrays)
            self._table = copy_table(here, (each.ctypes.data for each in arrays), sizes)
            self._runs = np.stack([reader.slots_of(rows), counts], axis=1)

    def parts(
        self, runs: slice, parts: np.ndarray, bounds: Sequence[int]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of each part, which are there until the next call.

        Of a ring these may be any bytes where its writer overwrites the rows meanwhile.

        Args:
            runs: which runs the parts have together.
            parts: how many each has, one or more, int64 [parts].
            bounds: the rows before each part, and after the last one, [parts + 1].
        """
        if self._kernel is not None:
            self._kernel.pack_runs(self._table, self._runs[runs], parts, self._slots, self._most)
            values = [(self._room.data, self._row_nbytes)]
        else:
            rows = expanded(self._rows[runs], self._counts[runs])
            values = [
                (np.ascontiguousarray(column.take(rows)).reshape(-1).view(np.uint8).data, size)
                for column, size in self._columns
            ]
        first = bounds[0]
        for start, stop in pairwise(bounds):
            found = [each[(start - first) * size : (stop - first) * size] for each, size in values]
            yield found[0] if len(found) == 1 else b"".join(found)
