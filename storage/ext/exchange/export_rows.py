"""Read the rows of a reader for an export: in order, as blocks or as whole trajectories."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.ext.storage_copy import trajectory_order
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import DONE, NEXT, TRAJ_IDS, TRUNCATED, Key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.columns import numbers_of
from tallyroll.storage.user_code import user_callback

BLOCK_NBYTES: Final = 2**25
"""The size in bytes of the rows that are read at a time."""


@dataclass(frozen=True, slots=True)
class ExportEpisode:
    """The rows of a trajectory, in time order."""

    rows: dict[Key, np.ndarray]
    seed: int
    """The seed of the reset that started the trajectory; -1 if unknown."""


class ExportRows:
    """The rows and columns of a reader that an export writes.

    Args:
        reader: the reader of the rows.
        span: the numbers of the rows in ``reader``.
        schema: the columns to export.
        about: metadata of the rows, as JSON.
        title: the name of the export.
        table: the trajectory table of the rows; None if the rows do not record trajectories.
        ends: the numbers, in ascending order, of the rows whose ``truncated`` and ``done`` flags
            the export sets.
        sorted: True to order rows by trajectory.
        progress: called with the number of bytes read and the total.
    """

    def __init__(
        self,
        reader: RowReader,
        span: range,
        schema: Schema,
        about: Mapping[str, Any],
        title: str,
        table: np.ndarray | None,
        ends: np.ndarray,
        *,
        sorted: bool,
        progress: Progress | None = None,
    ) -> None:
        self.schema, self.about, self.title = schema, about, title
        self._reader, self._table, self._ends, self._span = reader, table, ends, span
        self._order = trajectory_order(reader, self._span) if sorted else None
        self._flags = {each.key for each in schema.columns if is_end_flag(each)}
        self._progress, self._done = progress, 0

    def __len__(self) -> int:
        return len(self._span)

    @property
    def trajectories(self) -> int:
        """The number of trajectories; 0 if the rows do not record trajectories."""
        return 0 if self._table is None else len(self._table)

    def blocks(self, keys: Sequence[Key] | None = None) -> Iterator[dict[Key, np.ndarray]]:
        """Yield all rows in order, in blocks of at most `BLOCK_NBYTES`.

        A row that is larger is a separate block.
        """
        wanted = [each for each in self.schema.columns if keys is None or each.key in keys]
        size = max(1, BLOCK_NBYTES // sum(each.row_nbytes for each in wanted))
        for start in range(0, len(self), size):
            yield self._read(start, min(start + size, len(self)), [each.key for each in wanted])

    def episodes(self) -> Iterator[ExportEpisode]:
        """Yield one trajectory after another. Several short trajectories share one read."""
        assert self._table is not None
        ids = self._ids()
        stops = _stops(ids)
        seeds = dict(self._table[["id", "reset_seed"]].tolist())
        size = max(1, BLOCK_NBYTES // self.schema.row_nbytes)
        start = begin = end = 0
        rows = dict[Key, np.ndarray]()
        for number, stop in enumerate(stops):
            if stop > end:
                begin, end = start, stops[max(number, bisect_right(stops, start + size) - 1)]
                if end - begin > size:
                    nbytes = 2 * (end - begin) * self.schema.row_nbytes
                    require_memory(
                        nbytes,
                        f"a trajectory of {end - begin:,} rows",
                        "Export the other trajectories, or use a machine with more memory.",
                    )
                rows = self._read(begin, end, self.schema.keys)
            part = {key: values[start - begin : stop - begin] for key, values in rows.items()}
            yield ExportEpisode(part, seeds.get(int(ids[start]), -1))
            start = stop

    def stops(self) -> list[int]:
        """Return the end of each trajectory, in order, as a cumulative number of rows."""
        return _stops(self._ids())

    def _ids(self) -> np.ndarray:
        assert self._order is not None
        return numbers_of(self._reader.copies(self._order, [TRAJ_IDS])[0])

    def _read(self, start: int, stop: int, keys: Sequence[Key]) -> dict[Key, np.ndarray]:
        reader, span = self._reader, self._span
        if self._order is None and not reader.ring:
            first, last = span[start], span[start] + stop - start
            found = {key: reader.column(key).slice(first, last) for key in keys}
            rows = np.arange(first, last) if self._flags and len(self._ends) else None
        else:
            order = self._order
            rows = np.asarray(span[start:stop]) if order is None else order[start:stop]
            found = dict(zip(keys, reader.copies(rows, keys), strict=True))
            if reader.ring and len(rows) and int(rows.min()) < reader.span.start:
                raise reader.overrun(f"{len(rows):,} rows")
        if rows is not None and len(self._ends):
            marked = np.isin(rows, self._ends)
            for key in self._flags & {*keys} if marked.any() else ():
                found[key] = found[key].copy()
                found[key][marked] = True
        if self._progress is not None:
            self._done += sum(values.nbytes for values in found.values())
            with user_callback("progress"):
                self._progress(self._done, len(self) * self.schema.row_nbytes)
        return found


def is_end_flag(column: Column) -> bool:
    """Return True if a column is an end flag that a truncation sets in a trajectory's last row."""
    key = column.key
    return key[0] == NEXT and key[-1] in (TRUNCATED[-1], DONE[-1]) and column.dtype is torch.bool


def _stops(ids: np.ndarray) -> list[int]:
    """Return the cumulative number of rows at the end of each run of equal ids [n]."""
    return [*(np.flatnonzero(np.diff(ids)) + 1).tolist(), *([len(ids)] if len(ids) else [])]
