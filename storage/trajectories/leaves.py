"""The hash of a storage's content, computed from the hashes of its leaves.

The content hash is the SHA-256 of a description of the columns, followed by the SHA-256 of each
leaf. A leaf is a stretch of rows in the order of the content, from a few thousand bytes to 1 MiB:
the rows of some trajectories with consecutive ids, or a part of a long trajectory. The boundaries
of leaves follow from ids and steps alone, so that they do not depend on how rows are stored. A row
that is added or lost changes the leaf that it belongs to, and few others.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from tallyroll.storage.engine.kernel import compiled, copy_table
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.keys import TRAJ_IDS, format_key
from tallyroll.storage.rows.progress import MoreDone
from tallyroll.storage.rows.readable_rows import ReadableRows, ReadColumn
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.content import (
    Content,
    Numbering,
    compared_columns,
    expanded,
)
from tallyroll.storage.trajectories.leaf_hashes import LEAF, LeafHashes, UnusableLeaves


class LeafMemory:
    """Memory in which parts of the rows are packed, column by column within each part.

    Args:
        reader: the reader of the rows.
        columns: the columns of a part, in order, each with the size of a value in bytes.
        rows: the number of the first row of each run, int64 [runs].
        counts: the number of contiguous rows of each run, int64 [runs].
        most: the number of rows to allocate memory for.
    """

    def __init__(
        self,
        reader: ReadableRows,
        columns: Sequence[tuple[ReadColumn, int]],
        rows: np.ndarray,
        counts: np.ndarray,
        most: int,
    ) -> None:
        self._columns, self._rows, self._counts, self._most = columns, rows, counts, most
        sizes = [nbytes for _, nbytes in columns]
        self._room, self._row_nbytes = np.empty(most * sum(sizes), np.uint8), sum(sizes)
        # Referenced here, because the table does not keep the arrays alive.
        self._arrays = [column.array for column, _ in columns]
        arrays = [each for each in self._arrays if each is not None and each.flags.c_contiguous]
        self._kernel = compiled() if len(arrays) == len(columns) else None
        if self._kernel is not None:
            self._slots = min(map(len, arrays))
            self._table = copy_table([self._room] * len(arrays), arrays, sizes)
            self._runs = np.stack([reader.slots_of(rows), counts], axis=1)

    def parts(
        self, runs: slice, parts: np.ndarray, bounds: Sequence[int]
    ) -> Iterator[bytes | memoryview]:
        """Yield the bytes of each part, which are valid until the next part is requested.

        If the writer of a ring overwrites the rows meanwhile, the bytes are undefined.

        Args:
            runs: the runs that the parts consist of.
            parts: the number of runs of each part, one or more, int64 [parts].
            bounds: the number of rows before each part, and after the last one, [parts + 1].
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


_MAGIC: Final = "tallyroll content 1"
_LEAF_NBYTES: Final = 2**16
"""The maximum number of bytes of the steps of one trajectory in a leaf, unless one row is larger.
The overhead of one hash equals the time to hash 2 KiB of rows."""
_LEAF_IDS: Final = 2**4
"""The number of ids of short trajectories in a leaf."""
_MOST_NBYTES: Final = 2**20
"""The largest leaf in bytes, except for a larger single row or rows with the same step."""
_CACHED_NBYTES: Final = 2**18
"""Bytes that are copied at a time, except for larger leaves, to fit in the CPU cache."""
_HASH_NBYTES: Final = 32


def hash_of(
    reader: ReadableRows,
    ids: Numbering = "kept",
    progress: MoreDone | None = None,
    kept: LeafHashes | None = None,
) -> str:
    """Return the SHA-256 of the current rows of a reader; see `content_hash`.

    Args:
        reader: the reader.
        ids: the numbering of trajectories.
        progress: callback that is called with the number of bytes hashed since its last call.
        kept: cached leaf hashes, which are used and updated. Only the newest cached leaf is
            compared with its rows, so other changes to covered rows are not detected.
    """
    if not reader.initialised:
        return hashlib.sha256(_MAGIC.encode()).hexdigest()
    leaves = Leaves(reader, ids)
    if kept is None:
        hashes = leaves.hashes(progress=progress)
    else:
        hashes = _with(kept, leaves, progress)
    return hashlib.sha256(about(reader.schema) + hashes.tobytes()).hexdigest()


def about(schema: Schema) -> bytes:
    """Return the prefix of the content hash's input, which describes the columns of the rows."""
    columns = [
        [format_key(column.key), column.dtype_name, list(column.shape)]
        for column in compared_columns(schema)
    ]
    return f"{_MAGIC}\n{json.dumps(columns)}\n".encode()


def leaf_hashes_of(reader: ReadableRows, files: Format) -> LeafHashes:
    """Return the cached leaf hashes of a reader's storage, whose files are ``files``."""
    columns = about(reader.schema)
    return LeafHashes(files, reader.id, columns, lambda: reader.head, reader.rewinds)


def _with(kept: LeafHashes, leaves: Leaves, progress: MoreDone | None) -> np.ndarray:
    """Return the hashes of all leaves, using the cached ones and caching the others."""
    lines = leaves.lines()
    known = np.zeros(len(lines), np.bool_)
    with contextlib.suppress(UnusableLeaves):  # recompute from the rows; `verify` reports it
        if (found := kept.read()) is not None:
            known = kept.fill(lines, found)
    if len(places := np.flatnonzero(known)):
        # Detect rows that were replaced without a record of it.
        newest = places[[lines["newest"][places].argmax()]]
        if leaves.hashes(newest).tobytes() != lines["sha256"][newest].tobytes():
            known[:] = False
    if progress is not None:
        progress(int(lines["rows"][known].sum()) * leaves.reader.schema.row_nbytes)
    others = np.flatnonzero(~known)
    if len(others):
        lines["sha256"][others] = leaves.hashes(others, progress)
    if len(others) or kept.seen != leaves.content.span.stop:
        kept.write(lines, leaves.content.span.stop)
    return lines["sha256"]


class Leaves:
    """The leaves of the current rows of a reader; see `Content` for the errors.

    A leaf ends where the ids reach the next multiple of one number, or the steps reach the next
    multiple of another. Both numbers are powers of two that depend on the size of a row.
    """

    def __init__(self, reader: ReadableRows, ids: Numbering = "kept") -> None:
        columns = compared_columns(reader.schema)
        self._row_nbytes = sum(column.row_nbytes for column in columns)
        shift = max(1, _LEAF_NBYTES // self._row_nbytes).bit_length() - 1
        self.reader, self.content = reader, Content(reader, ids, shift)
        numbers, steps = self.content.run_ids, self.content.run_steps
        apart = (numbers[1:] ^ numbers[:-1]) >> min(shift, _LEAF_IDS.bit_length() - 1)
        apart |= (steps[1:] ^ steps[:-1]) >> shift
        end = [len(numbers)] if len(numbers) else []
        bounds = np.concatenate(([0], np.flatnonzero(apart) + 1, end)).astype(np.int64)
        self.starts, self.runs = bounds[:-1], np.diff(bounds)
        """The first run of each leaf and its number of runs, int64 [leaves]."""
        self._columns = [(self._column(each), each.row_nbytes) for each in columns]

    def _column(self, column: Column) -> ReadColumn:
        content = self.content
        if not content.relative or column.key != TRAJ_IDS:
            return self.reader.column(column.key)
        return _RenumberedIds(self.reader, content.rows, content.ids.astype(column.numpy_dtype))

    def lines(self) -> np.ndarray:
        """Return the leaves, [n] of `LEAF`, without their hashes."""
        lines = np.zeros(len(self.starts), LEAF)
        if len(lines):
            rows, counts = self.content.run_rows, self.content.run_counts
            last = rows + counts - 1
            lines["first"], lines["last"] = rows[self.starts], last[self.starts + self.runs - 1]
            lines["newest"] = np.maximum.reduceat(last, self.starts)
            lines["rows"] = np.add.reduceat(counts, self.starts)
        return lines

    def hashes(
        self, wanted: np.ndarray | None = None, progress: MoreDone | None = None
    ) -> np.ndarray:
        """Return the SHA-256 of each leaf, or of the ``wanted`` ones, uint8 [leaves, 32].

        Raises:
            Overrun: the writer of a ring overwrites rows while they are read.
        """
        starts, runs = self.starts, self.runs
        rows, counts = self.content.run_rows, self.content.run_counts
        if wanted is not None:
            starts, runs = starts[wanted], runs[wanted]
            those = expanded(starts, runs)
            rows, counts, starts = rows[those], counts[those], np.cumsum(runs) - runs
        if not len(starts):
            return np.empty((0, _HASH_NBYTES), np.uint8)
        found = b"".join(self._each(rows, counts, starts, runs, progress))
        return np.frombuffer(found, np.uint8).reshape(-1, _HASH_NBYTES)

    def _each(
        self,
        rows: np.ndarray,
        counts: np.ndarray,
        starts: np.ndarray,
        runs: np.ndarray,
        progress: MoreDone | None,
    ) -> Iterator[bytes]:
        """Yield the hash of each leaf."""
        sizes = np.add.reduceat(counts, starts)
        ends = [0, *np.cumsum(sizes).tolist()]
        cached, most = (max(1, n // self._row_nbytes) for n in (_CACHED_NBYTES, _MOST_NBYTES))
        read_nbytes, sha256 = self.reader.schema.row_nbytes, hashlib.sha256
        room = min(most, max(cached, int(sizes.max())), ends[-1])
        packing, at = LeafMemory(self.reader, self._columns, rows, counts, room), 0
        while at < len(starts):
            stop = max(at + 1, bisect_right(ends, ends[at] + min(cached, room)) - 1)
            these = slice(int(starts[at]), int(starts[stop - 1] + runs[stop - 1]))
            if ends[stop] - ends[at] > room:
                yield self._of_large(expanded(rows[these], counts[these]))
            else:
                for part in packing.parts(these, runs[at:stop], ends[at : stop + 1]):
                    yield sha256(part).digest()
            self.content.check()
            if progress is not None:
                progress((ends[stop] - ends[at]) * read_nbytes)
            at = stop

    def _of_large(self, rows: np.ndarray) -> bytes:
        """Return the hash of a large leaf, which is read in parts."""
        found = hashlib.sha256()
        for column, size in self._columns:
            step = max(1, _CACHED_NBYTES // size)
            for at in range(0, len(rows), step):
                values = np.ascontiguousarray(column.take(rows[at : at + step]))
                found.update(values.reshape(-1).view(np.uint8).data)
        return found.digest()


class _RenumberedIds:
    """Column of trajectory ids under another numbering."""

    def __init__(self, reader: ReadableRows, rows: np.ndarray, ids: np.ndarray) -> None:
        self._reader, slots = reader, reader.slots_of(rows)
        self.array = np.zeros(int(slots.max(initial=-1)) + 1, ids.dtype)
        self.array[slots] = ids

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Implement `ReadColumn.take`."""
        return np.take(self.array, self._reader.slots_of(rows), out=out)

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Implement `ReadColumn.slice`."""
        return self.take(np.arange(start, stop))
