"""The trajectory index of a storage, which every query brings up to date."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from tensordict import TensorDictBase

from tallyroll.storage.errors import ColumnsMissing, CorruptStorage, DamagedTable
from tallyroll.storage.files.copied_runs import goes_on
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import REWARD, TERMINATED, TRAJ_IDS, Key
from tallyroll.storage.rows.readable_rows import ReadableRows
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.blocks.tail import least_block
from tallyroll.storage.trajectories.columns import WHOSE, RowOrder, missing, numbers_of, unread
from tallyroll.storage.trajectories.episode_file import write_table
from tallyroll.storage.trajectories.episodes import Episodes, runs_of
from tallyroll.storage.trajectories.index_file import IndexOwner, UnusableIndex, write_index
from tallyroll.storage.trajectories.row_index import RowIndex
from tallyroll.storage.trajectories.slice_columns import SliceColumns

_COUNTED = (*WHOSE, TERMINATED)
_LANES_LOOKED_AT = 256


class TrajectoryIndex:
    """Index of the rows of trajectories, and the episode table, each built on first use.

    A reader owns its index. The index does not refer to the reader, so that both are freed
    together. Hold `lock` while you use rows or a table.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._order: RowOrder | None = None
        self._rows: RowIndex | None = None
        self.counted: Episodes | None = None
        """The episode table, up to date as of the last query; None before the first query."""
        self.slice_columns: SliceColumns | None = None
        """The columns that slices change; None before the first slice."""
        # The number of rows that the files alongside the rows cover.
        self._in_file = self._in_index = -1
        self._rewinds = 0

    def columns_of_slices(self, schema: Schema) -> SliceColumns:
        """Return the columns that slices of rows of ``schema`` change."""
        if (found := self.slice_columns) is None:
            found = self.slice_columns = SliceColumns(schema)
        return found

    def rows(self, reader: ReadableRows) -> RowIndex:
        """Return the index of all committed rows.

        Raises:
            ColumnsMissing: the rows have no trajectory columns.
            CorruptStorage: a lane number is out of range.
        """
        with self.lock:
            rows = self._begun(reader)
            if reader.head > rows.seen:
                order = self._order_of(reader)
                for start, stop in unread(reader, rows):
                    rows.extend(order.chunk(reader, start, stop))
            return rows

    def _begun(self, reader: ReadableRows) -> RowIndex:
        """Return the index without adding rows to it. Load the saved index if there is none yet."""
        self._forget_rewound(reader)
        rows = self._rows
        if rows is None or rows.damaged:
            _require(reader, WHOSE)
            rows = self._rows = RowIndex(
                reader.ring, self._load_rows(reader, again=rows is not None)
            )
        return rows

    def _load_rows(self, reader: ReadableRows, *, again: bool) -> SavedBlocks | None:
        """Return the blocks that are saved beside the rows, unless they are known to be damaged."""
        self._in_index = -1
        if again:
            return None
        try:
            kept: SavedBlocks | None = reader.kept_index()
            if kept is None or not _fits(kept, reader):
                return None
        except (UnusableIndex, CorruptStorage):
            return None  # rebuild from the rows; `verify` reports the damage
        self._in_index = kept.seen
        return kept

    def episodes(
        self, reader: ReadableRows, progress: Callable[[int], object] = lambda rows: None
    ) -> Episodes:
        """Return the episode table of all committed rows; see `rows` for the errors.

        ``progress`` is called with the number of rows counted so far, after each range of rows.
        """
        with self.lock:
            self._forget_rewound(reader)
            if self.counted is None:
                _require(reader, _COUNTED)
                self.counted = self.load_episodes(reader)
            episodes = self.counted
            if reader.head > episodes.seen:
                order, runs = self._order_of(reader), runs_of(reader.runs)
                for start, stop in unread(reader, episodes):
                    episodes.extend(order.episode_rows(reader, start, stop), runs)
                    progress(episodes.seen)
            return episodes

    def uncounted(self, reader: ReadableRows) -> int:
        """Return the number of rows that `table` would read; see `rows` for the errors."""
        with self.lock:
            self._forget_rewound(reader)
            _require(reader, _COUNTED)
            counted = self.load_episodes(reader) if self.counted is None else self.counted
            return reader.head - max(counted.seen, reader.span.start)

    def table(self, reader: ReadableRows) -> np.ndarray:
        """Return the lines of trajectories that still have rows; see `rows` for the errors."""
        with self.lock:
            return read_consistently(
                reader,
                lambda: self.episodes(reader).table(reader.span.start, _active_from(reader)),
            )

    def _forget_rewound(self, reader: ReadableRows) -> None:
        """Reset after a rewind, because row numbers may now refer to other rows."""
        seen = max(self._rows.seen if self._rows else 0, self.counted.seen if self.counted else 0)
        if (rewinds := reader.rewinds) != self._rewinds or reader.head < seen:
            self._rows = self.counted = None
            self._rewinds, self._in_file, self._in_index = rewinds, -1, -1

    def _order_of(self, reader: ReadableRows) -> RowOrder:
        if self._order is None:
            self._order = RowOrder(reader.schema)
        return self._order

    def load_episodes(self, reader: ReadableRows) -> Episodes:
        """Return a new table with the lines of the file, which the caller brings up to date."""
        shapes = {column.key: column.shape for column in reader.schema.columns}
        episodes = Episodes(reader.ring, shapes.get(REWARD, ()))
        try:
            lines = reader.episode_lines(episodes.dtype)
        except DamagedTable:
            return episodes  # recompute from the rows; `verify` reports the damage
        with self.lock:
            if lines is not None and self._belongs(lines, reader):
                episodes.resume(lines)
                self._in_file = episodes.seen
        return episodes

    def _belongs(self, lines: np.ndarray, reader: ReadableRows) -> bool:
        """Return True if the last trajectory of every lane in a table has the recorded last row."""
        last = np.full(int(lines["lane"].max(initial=-1)) + 1, -1)
        last[lines["lane"]] = np.arange(len(lines))
        line = lines[last[last >= 0]]
        line = line[line["last_row"] >= reader.span.start]
        ids = numbers_of(reader.column(TRAJ_IDS).take(line["last_row"]))
        return bool((ids == line["id"]).all())

    def make_way(self, reader: ReadableRows, rows: Any) -> None:
        """Count the rows of a ring that a batch will overwrite.

        ``rows`` is the batch or an index of its rows. Nothing is counted if no caller has needed
        the table yet.
        """
        episodes = self.counted
        if episodes is not None and reader.head + _length(rows) - episodes.seen > reader.ring:
            with contextlib.suppress(CorruptStorage):  # `table` raises the error to its caller
                self.episodes(reader)

    def save(self, reader: FileBackedReader, *, synced: bool) -> None:
        """Write the episode table and the index alongside the rows, before the writer closes.

        Neither is written if the columns for the table are missing.

        Raises:
            StorageFull: the disk has no space; an older table stays.
            NotWritable: the file system does not allow the write.
        """
        with self.lock:
            if not reader.head or missing(reader.schema, _COUNTED):
                return
            with contextlib.suppress(CorruptStorage):  # see `make_way`
                episodes = self.episodes(reader)
                if episodes.seen != self._in_file:
                    table = episodes.table(reader.span.start)
                    files = reader.format
                    write_table(files.inside, files.episodes_path, table, synced=synced)
                    self._in_file = episodes.seen
            with contextlib.suppress(CorruptStorage):
                self._save_rows(reader, synced=synced)

    def _save_rows(self, reader: FileBackedReader, *, synced: bool) -> None:
        """Write the index alongside the rows if it has blocks that the file lacks.

        An index that cannot be written is skipped.
        """
        if missing(reader.schema, WHOSE) or len(reader.span) < least_block():
            return
        rows = self._begun(reader)
        if reader.head - max(rows.in_blocks, reader.span.start) >= least_block():
            self.rows(reader)
        if rows.in_blocks > self._in_index:
            owner = IndexOwner(reader.id, reader.ring, self._rewinds)
            files = reader.format
            with contextlib.suppress(OSError):
                write_index(files.inside, files.index_path, owner, rows.state(), synced=synced)
                self._in_index = rows.in_blocks


class IndexedReader(ReadableRows, Protocol):
    """Reader with an index of its rows."""

    @property
    def trajectory_index(self) -> TrajectoryIndex:
        """The index of the rows of each trajectory."""


class FileBackedReader(ReadableRows, Protocol):
    """Reader of rows in Tallyroll's own files."""

    format: Format


def _fits(kept: SavedBlocks, reader: ReadableRows) -> bool:
    """Return True if kept blocks match the last rows of all lanes, or of a sample of many lanes."""
    base, _, ids, steps = kept.tail.state
    lane = np.flatnonzero(base > 0)
    lane = lane[:: max(1, len(lane) // _LANES_LOOKED_AT)]
    rows = kept.rows(lane, base[lane] - 1, np.full(len(lane), kept.seen))
    there = rows >= reader.span.start
    lane, rows = lane[there], rows[there]
    return all(
        (numbers_of(reader.column(key).take(rows)) == says).all()
        for key, says in zip(WHOSE, (ids[lane], steps[lane], kept.number_of(lane)), strict=True)
    )


def _active_from(reader: ReadableRows) -> int | None:
    """Return the first row of the run that is being written, or None if no process writes.

    Runs that were copied in parts count as one, because their trajectories may continue.
    """
    if not reader.is_written:
        return None
    runs = reader.runs
    at = len(runs) - 1
    while at > 0 and goes_on(runs[at - 1], runs[at]):
        at -= 1
    return runs[at]["first_row"] if runs else 0


def has_trajectories(schema: Schema) -> bool:
    """Return True if the schema has the columns that assign rows to trajectories."""
    return not missing(schema, WHOSE)


def _require(reader: ReadableRows, keys: tuple[Key, ...]) -> None:
    if lacking := missing(reader.schema, keys):
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(lacking)} (whole numbers, one per row; flags for "
            "ends). These columns define trajectories. Tallyroll's collectors write them; rows of "
            "other origin need them, too."
        )


def _length(rows: Any) -> int:
    """Return the number of rows of a batch, or 0 for any other object, which is refused later."""
    if not isinstance(rows, (TensorDictBase, range, np.ndarray)):
        rows = next(iter(rows.values()), ()) if isinstance(rows, Mapping) else ()
    try:
        return len(rows)
    except TypeError:
        return 0
