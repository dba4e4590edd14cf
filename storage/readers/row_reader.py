"""The reader interface: access to rows by number, from any source."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from tensordict import TensorDict

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.engine.columns import Places
from tallyroll.storage.engine.frame_pools import PoolUsage, StoredSize
from tallyroll.storage.engine.pool import ColumnMemory
from tallyroll.storage.engine.ring import in_use, index_at, overrun, rows_in, slots_at
from tallyroll.storage.engine.ring import slots_of as ring_slots
from tallyroll.storage.errors import ColumnsMissing, IndexOutOfRange, Overrun, StorageClosed
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.rows.origin import Origin, came_from
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder, array_of
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.index import TrajectoryIndex
from tallyroll.storage.trajectories.mapping import Trajectories

_PATIENCE_SECONDS: Final = 1.0


class ColumnReader(ABC):
    """Values of one column, by row number.

    Arrays have the column's ``numpy_dtype``, which is ``uint16`` for bfloat16. Callers request rows
    in the reader's span. In a ring, a writer may overwrite rows during the read, and their values
    are then undefined.
    """

    @property
    def array(self) -> np.ndarray | None:
        """All values as one read-only array [rows, ...], or None if no such array is in memory.

        Row r is at index ``slots_of(r)`` of the reader.
        """
        return None

    @property
    def stack(self) -> int | None:
        """The number of frames of a value if frames are stored once; otherwise None."""
        return None

    @abstractmethod
    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy the values of ``rows`` [*], in any order.

        The result is an array [*rows.shape, *shape of a value].

        Args:
            rows: row numbers, int64.
            out: a C-contiguous array to copy to, of that shape and the column's dtype.
        """

    @abstractmethod
    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the values of the rows ``[start, stop)``, C-contiguous. Do not write to the array.

        The array may be a view of the stored rows, in which case changes to a ring appear in it.
        """

    def take_windows(self, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Copy the frames of observations, and the last frame of each next observation.

        A column whose `stack` is None does not implement this.

        Args:
            rows: row numbers, int64 [rows].
            out: a C-contiguous array [rows, stack + 1, *frame] to copy to.

        Returns:
            bool [rows], True if the next observation is the observation moved by one frame.
        """
        raise NotImplementedError


class RowReader(ABC):
    """Abstract reader of rows by number, counted over all rows ever written.

    Samplers, slices, n-step returns, `verify`, checkpoints, replay buffers and the command line use
    a reader and never access its source directly.

    A subclass must define `schema`, `span`, `manifest` and `column`. It overrides the optional
    members that its source supports, such as `record`. All other members are derived from these. Of
    the derived ones, `copies` and `gather` are worth overriding if the source can read several
    columns in one pass. The functions of this module, such as `take_rows`, work with any reader.

    `open_storage` finds classes that are registered as entry points in the group
    ``tallyroll.readers``: see `at`. `tallyroll.storage.testing.ReaderContract` tests a reader.
    """

    path: Path
    """The path of the rows, for messages."""

    ring: int = 0
    """The number of slots of a ring, in which new rows overwrite the oldest, or 0 if every row is
    kept. Row r is in slot r % ring."""

    closed = False

    copied_as: type[Format] = MemmapFormat
    """The format of a checkpoint of these rows."""

    @classmethod
    def at(cls, path: Path) -> RowReader | None:
        """Return a reader of ``path``, or None if this class cannot read it.

        `open_storage` calls this method of every registered class in turn, for paths that are not
        Tallyroll storages.
        """
        return None

    @property
    @abstractmethod
    def schema(self) -> Schema:
        """The schema of the rows."""

    @property
    @abstractmethod
    def span(self) -> range:
        """The numbers of the valid rows."""

    @property
    @abstractmethod
    def manifest(self) -> Manifest:
        """The manifest, with ``format``, ``id``, ``created`` and the ``runs`` that wrote the rows.

        Each run is a mapping with its ``"first_row"``. Runs are ordered by first row.
        """

    @abstractmethod
    def column(self, key: Key) -> ColumnReader:
        """Return the reader of one column.

        Raises:
            KeyError: the column does not exist.
        """

    def require_open(self) -> None:
        """Raise `StorageClosed` if this reader was closed."""
        if self.closed:
            raise StorageClosed(f"{self.path} was closed. Open it again.")

    def close(self) -> None:
        """Close all files. A second call has no effect."""
        self.closed = True

    # --- optional: the defaults are those of a read-only source without an index ------------------

    @property
    def initialised(self) -> bool:
        """True if the storage has a schema."""
        return True

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record: the number of rows when it was written, and its payload."""
        return None

    @property
    def record_damaged(self) -> bool:
        """True if the newest record is damaged, so that `record` is an older one or None."""
        return False

    @property
    def left_open(self) -> bool:
        """True if a writer has the storage open or was killed before it closed the storage."""
        return False

    @property
    def is_written(self) -> bool:
        """True if a process may currently be adding rows."""
        return False

    @property
    def floor(self) -> int:
        """The first row since a ring was last emptied, from which its indices are counted."""
        return 0

    @property
    def rewinds(self) -> int:
        """The number of rewinds, after each of which row numbers may refer to other rows."""
        return 0

    @property
    def rewinding(self) -> bool:
        """True while a writer has committed a rewind and not yet completed it."""
        return False

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Return the episode table that is stored alongside the rows, with lines of ``dtype``.

        The table may end before the last row. The result is None if there is no table.

        Raises:
            DamagedTable: the table is damaged.
        """
        return None

    def kept_index(self, *, whole: bool = False) -> SavedBlocks | None:
        """Return the trajectory index that is saved alongside the rows, or None if there is none.

        The index may end before the last row. With ``whole``, all of it is checked regardless of
        size.

        Raises:
            UnusableIndex: the index cannot be used.
        """
        return None

    def pool_usage(self) -> list[PoolUsage]:
        """Return the number of frames and the size of each frame pool."""
        return []

    def stored_size(self) -> StoredSize:
        """Return the disk space that a row takes, and that a full ring will take."""
        nbytes = self.schema.row_nbytes
        return StoredSize((), nbytes, measured=True, ring_nbytes=self.ring * nbytes or None)

    def event_faults(self) -> Iterator[str]:
        """Return the faults in the file of environment calls."""
        return iter(())

    @property
    def events_torn(self) -> bool:
        """True if the last line of the file of environment calls is truncated."""
        return False

    def shown_wrongly(self) -> Iterator[str]:
        """Return faults in metadata for other libraries that a closing writer repairs."""
        return iter(())

    def made_wrongly(self) -> Iterator[str]:
        """Return faults in metadata that only creation writes."""
        return iter(())

    def damaged_chunks(self, tell: Callable[[int], object]) -> Iterator[tuple[str, str]] | None:
        """Check all stored bytes by checksum, or return None if no checksums are stored.

        Args:
            tell: callback that is called with the number of bytes checked since its last call.

        Returns:
            An iterator over names of columns, or of their sources, each with a sentence about the
            damage and the intact rows.
        """
        return None

    # --- computed: counts and names ---------------------------------------------------------------

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the columns, in order."""
        return self.schema.keys

    @property
    def head(self) -> int:
        """The number of rows ever committed."""
        return self.span.stop

    @property
    def last_head(self) -> int:
        """The value of `head`; after `close`, its last value."""
        return self.head

    @property
    def revision(self) -> int:
        """A number that changes when rows are added or rewound."""
        return self.head

    @property
    def id(self) -> str | None:
        """The id of the storage, which its copies share."""
        found: str = self.manifest["id"]
        return found

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that wrote the rows."""
        found: list[dict[str, Any]] = self.manifest["runs"]
        return found

    @cached_property
    def origin(self) -> Origin:
        """The storage as the origin of rows that are copied from it."""
        return Origin(self)

    @property
    def trajectories(self) -> Trajectories:
        """The trajectories that the rows belong to, by id."""
        return Trajectories(self)

    @cached_property
    def trajectory_index(self) -> TrajectoryIndex:
        """The index of the rows of each trajectory, built on demand."""
        return TrajectoryIndex()

    # --- computed: rows ---------------------------------------------------------------------------

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of rows [*] in the array of a column.

        Consecutive rows have consecutive indices, except at the end of a ring.
        """
        if self.ring:
            return ring_slots(rows, self.ring)
        first = self.span.start
        return rows - first if first else rows

    def shown(self, key: Key) -> np.ndarray:
        """Return the values of a column as one array that only the caller can access.

        Row r is at index ``slots_of(r)``.
        """
        span, ring = self.span, self.ring
        slots = np.arange(min(span.stop, ring) if ring else len(span))
        return self.column(key).take(newest_rows(self, slots))

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        """Return copies [*rows.shape, ...] of rows of the span, for all columns or for ``keys``."""
        return [self.column(key).take(rows) for key in (self.keys if keys is None else keys)]

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy rows as `copies` does, to memory that is reused once the arrays are dropped.

        ``rows`` may be a sequence with one array for each column.
        """
        if isinstance(rows, np.ndarray):
            return self.copies(rows)
        return [self.column(key).take(at) for key, at in zip(self.keys, rows, strict=True)]

    def copy_into(
        self, outs: Sequence[np.ndarray], rows: Sequence[np.ndarray], keys: Sequence[Key]
    ) -> None:
        """Copy rows of the span, an array [n] for each of ``keys``, to arrays [n, ...]."""
        for out, numbers, key in zip(outs, rows, keys, strict=True):
            self.column(key).take(numbers, out=out)

    def mapped(self, keys: Sequence[Key]) -> list[np.ndarray] | None:
        """Return the arrays [slots, ...] in which these columns are stored, for compiled functions.

        Row r is at index ``slots_of(r)``, and there may be more slots than rows. The result is None
        if a column is not in such an array.
        """
        return None

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        """Return the rows at ``index``, as `DiskStorage.get` does; 0 is the first valid row.

        If rows of a ring are overwritten during the read, the read is repeated.

        Raises:
            IndexOutOfRange: a row does not exist.
            Overrun: the writer overwrites the ring faster than it is read.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            span = self.span
            rows = numbers_of(self, index, span)
            try:
                if rows.ndim == 0:
                    return take_rows(self, rows.reshape(1), keys)[0]
                found = take_rows(self, rows, keys)
                if isinstance(index, slice) and keys is None:
                    # The rows of a slice of a ring are in slot order.
                    numbers = partial(np.asarray, rows) if self.ring else span[index]
                    came_from(found, self.origin, numbers)
                return found
            except IndexOutOfRange as error:
                if time.monotonic() > deadline:
                    raise self.overrun(f"these {rows.size} rows") from error

    def get_into(self, index: Any, out: ReusedRows) -> TensorDict:
        """Copy rows to reused memory and return the TensorDict of that memory; see `get`."""
        out.fill(self.get(index, out.keys))
        return out.rows

    def overrun(self, what: str) -> Overrun:
        """Return the error for rows that a writer overwrites before they are read."""
        return overrun(self.path, self.ring, what)

    @cached_property
    def nest(self) -> TensorDictBuilder:
        """The builder that joins arrays [*batch, ...], one per column, to a TensorDict."""
        schema = self.schema
        columns = [(column.key, column.dtype) for column in schema.columns]
        return TensorDictBuilder(columns, schema.batch_shapes)

    def __len__(self) -> int:
        return len(self.span)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"


def numbers_of(reader: RowReader, index: Any, span: range | None = None) -> np.ndarray:
    """Return the numbers of the rows that an index of `RowReader.get` selects.

    ``span`` is the range of valid rows; None: the present one.
    """
    span = reader.span if span is None else span
    where = resolve(index, len(span))
    if isinstance(where, slice):
        where = np.arange(where.start, where.stop, where.step)
    return rows_at(reader, np.asarray(where), span)


def rows_at(reader: RowReader, index: np.ndarray, span: range) -> np.ndarray:
    """Return the numbers of the rows in ``span`` that `RowReader.get` finds at ``index`` [*]."""
    ring, first = reader.ring, span.start
    if not ring:
        return index + first if first else index
    reserve = first + ring if first else span.stop
    slots = slots_at(index, span.stop, reserve, ring, reader.floor)
    return rows_in(slots, span.stop, ring)


def index_of(reader: RowReader, rows: np.ndarray) -> np.ndarray:
    """Return the index by which `RowReader.get` finds each of ``rows`` [*]."""
    slots, ring = reader.slots_of(rows), reader.ring
    if not ring or not (first := (span := reader.span).start):
        return slots
    return index_at(slots, span.stop, first + ring, ring, reader.floor)


def newest_rows(reader: RowReader, slots: np.ndarray) -> np.ndarray:
    """Return the number of the newest row in each of ``slots`` [*]."""
    span = reader.span
    return rows_in(slots, span.stop, reader.ring) if reader.ring else slots + span.start


def values_in_slots(reader: RowReader, key: Key, start: int, stop: int) -> np.ndarray:
    """Return the values of a column in the slots ``[start, stop)``, C-contiguous."""
    column = reader.column(key)
    if (array := column.array) is not None:
        return array[start:stop]
    return column.take(newest_rows(reader, np.arange(start, stop)))


def columns_of(reader: RowReader, keys: Keys | None) -> tuple[Places | None, TensorDictBuilder]:
    """Return the positions of some columns (None: all), and a builder that joins their arrays.

    Raises:
        ColumnsMissing: a column does not exist, or no column is named.
    """
    if keys is None:
        return None, reader.nest
    wanted = (keys,) if isinstance(keys, str) else tuple(keys)
    cache: dict[Any, tuple[Places, TensorDictBuilder]] = vars(reader).setdefault("_columns_of", {})
    found = cache.get(wanted)
    if found is None:
        every, own = {as_key(key): None for key in wanted}, reader.keys
        if not every or not every.keys() <= {*own}:
            note = excluded_note(reader.runs, every.keys() - {*own})
            raise ColumnsMissing(
                f"keys: expected some of {', '.join(map(format_key, own))}, got "
                f"{', '.join(map(format_key, every)) or 'none'}.{note}"
            )
        only, schema = tuple(own.index(key) for key in every), reader.schema
        columns = [(schema.columns[place].key, schema.columns[place].dtype) for place in only]
        found = cache[wanted] = only, TensorDictBuilder(columns, schema.batch_shapes)
    return found


def take_rows(reader: RowReader, rows: np.ndarray, keys: Keys | None = None) -> TensorDict:
    """Copy the rows with these numbers [*] to a TensorDict [*rows.shape].

    ``keys`` selects columns; None: all.

    Raises:
        ColumnsMissing: a column does not exist.
        IndexOutOfRange: a row does not exist, or is overwritten while it is read.
    """
    return read_consistently(reader, lambda: _take(reader, rows, keys))


def _take(reader: RowReader, rows: np.ndarray, keys: Keys | None) -> TensorDict:
    least, most = (int(rows.min()), int(rows.max())) if rows.size else (reader.head, -1)
    _require_rows(reader, least, most)
    only, nest = columns_of(reader, keys)
    if only is None:
        arrays = reader.gather(rows)
    else:
        arrays = reader.copies(rows, [reader.keys[place] for place in only])
    _require_rows(reader, least, most)  # a writer may have overwritten them during the read
    return nest(arrays, rows.shape)


def _require_rows(reader: RowReader, least: int, most: int) -> None:
    span = reader.span
    if least < span.start or most >= span.stop:
        raise IndexOutOfRange(
            f"rows {least} to {most} are out of range: {reader.path} has rows {span.start} to "
            f"{span.stop - 1}."
        )


def rows_in_order(reader: RowReader, keys: Keys | None = None) -> TensorDict:
    """Return all rows, oldest first, except for rows that are overwritten during the read.

    Raises:
        ColumnsMissing: a column does not exist.
    """
    if not reader.ring:
        return reader.get(slice(None), keys)
    return read_consistently(reader, lambda: _ring_in_order(reader, keys))


def _ring_in_order(reader: RowReader, keys: Keys | None) -> TensorDict:
    only, nest = columns_of(reader, keys)
    span = reader.span
    chosen = None if only is None else [reader.keys[place] for place in only]
    arrays = reader.copies(np.arange(span.start, span.stop), chosen)
    gone = min(max(0, reader.span.start - span.start), len(span))
    found = nest([array[gone:] for array in arrays], (len(span) - gone,))
    came_from(found, reader.origin, span[gone:])
    return found


class ReusedRows:
    """Memory for a number of rows, which each ``storage.get(index, out=...)`` overwrites.

    Making a TensorDict and its tensors takes longer than copying 256 small rows. One thread at a
    time may use the memory. ``storage.reused(count, keys)`` creates it.

    Raises:
        ColumnsMissing: a column does not exist.
        NotEnoughMemory: the available memory is too small.
        ValueError: ``count`` is not a positive number.
    """

    def __init__(self, reader: RowReader, count: int, keys: Keys | None = None) -> None:
        if type(count) is not int or count < 1:
            raise ValueError(f"rows: expected a positive number, got {count!r}.")
        self.schema = reader.schema
        """The schema of the storage that the memory was made for."""
        self.places, nest = columns_of(reader, keys)
        """The positions of the selected columns in the schema; None: all columns."""
        columns = self.schema.columns
        if self.places is not None:
            columns = tuple(columns[place] for place in self.places)
        self.keys = tuple(column.key for column in columns)
        """The keys of the selected columns."""
        nbytes = count * sum(column.row_nbytes for column in columns)
        require_memory(nbytes, f"a batch of {count} rows", "Choose fewer rows.")
        self.room = ColumnMemory([np.empty((count, *c.shape), c.numpy_dtype) for c in columns])
        self.arrays: Mapping[Key, np.ndarray] = MappingProxyType(
            dict(zip(self.keys, self.room.arrays, strict=True))
        )
        """An array [count, ...] for each column; bfloat16 is the ``uint16`` of its bits."""
        self.rows: TensorDict = nest(self.room.arrays, (count,)).lock_()
        """The same memory as a TensorDict [count], locked to keep its tensors in place."""

    def __len__(self) -> int:
        return self.room.count

    def fill(self, rows: TensorDict) -> None:
        """Copy a batch that has these columns.

        Raises:
            ValueError: the number of rows, or the dtype or shape of a column, differs.
        """
        if rows.batch_size[:1] != (len(self),):
            raise ValueError(
                f"out: expected space for the {list(rows.batch_size[:1])} rows of the index, got "
                f"{len(self)}."
            )
        for key, array in self.arrays.items():
            found = array_of(key, rows[key])
            if (found.dtype, found.shape) != (array.dtype, array.shape):
                raise ValueError(
                    f"out: expected {found.dtype} {list(found.shape[1:])} in column "
                    f"{format_key(key)}, got {array.dtype} {list(array.shape[1:])}. The rows of "
                    "out were made for another storage."
                )
            np.copyto(array, found)


class SlotColumn:
    """A column in slot order, for checksums."""

    def __init__(self, reader: RowReader, key: Key) -> None:
        self._reader, self._key, self._array = reader, key, reader.column(key).array

    def __len__(self) -> int:
        if self._array is not None:
            return len(self._array)
        reader = self._reader
        return in_use(reader.head, reader.ring) if reader.ring else len(reader.span)

    def __getitem__(self, slots: slice) -> np.ndarray:
        if self._array is not None:
            return self._array[slots]
        return values_in_slots(self._reader, self._key, slots.start, slots.stop)
