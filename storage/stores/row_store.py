"""The users' face over a reader and a writer of rows. Knows nothing of replay buffers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.engine.commit_engine import Durability
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import told, user_path
from tallyroll.storage.formats.base import Format
from tallyroll.storage.readers.file_reader import FileReader, Mode
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, Keys, as_key
from tallyroll.storage.rows.progress import MoreDone
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles
from tallyroll.storage.stores.row_writer import NoWriter, RowWriter
from tallyroll.storage.trajectories.mapping import Trajectories

if TYPE_CHECKING:
    from tallyroll.storage.ext.overlays.overlay import Overlay
    from tallyroll.storage.ext.overlays.overlay_set import Overlays
    from tallyroll.storage.ext.overlays.storage_overlays import StorageOverlays


class RowStore:
    """Rows on disk; the arguments are those of `DiskStorage`."""

    mode: Mode
    reader: RowReader

    _format_class: ClassVar[type[Format]]

    @told
    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: Mode,
        capacity: int | None,
        durability: Durability,
        max_size: int | None = None,
        accept_copy: bool = False,
    ) -> None:
        _check_choice("mode", mode, ("create", "append", "read"))
        _check_choice("durability", durability, ("process", "power"))
        _check_rows("capacity", capacity)
        _check_rows("max_size", max_size)
        self.path = user_path(path)
        self.mode = mode
        if max_size is not None and not self._format_class.rings:
            raise ValueError(
                f"max_size={max_size} asks for a ring, and {type(self).__name__} keeps every row. "
                "Use MemmapStorage(path, max_size=...), or leave it out."
            )
        files = FileReader(self._format_class(self.path.absolute()), self.path, mode)
        self.reader = files
        opened = OpenedFiles(
            files,
            capacity=capacity or 0,
            max_size=max_size,
            durability=durability,
            accept_copy=accept_copy,
        )
        self.writer: RowWriter | NoWriter = RowWriter(opened)

    def initialise(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Make a new storage's files, or check that an existing one has these columns.

        A run's entry, ``{**provenance, "first_row": rows so far}``, joins the
        manifest. Nothing changes if this raises.

        Raises:
            SchemaMismatch: the storage has other columns; every difference is named.
            InvalidSchema: the format cannot hold them.
            InvalidProvenance: ``provenance`` is not JSON.
            StorageFull: no room for ``capacity`` rows.
        """
        self.writer.runs.begin(schema, provenance)

    def reserve(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in all, those that are there included.

        If a format cannot grow in place, its file is replaced by a larger one.

        Raises:
            StorageFull: there is no space; nothing was changed.
        """
        _check_rows("rows", rows)
        self.writer.opened.reserve(rows)

    def finalize(self, progress: MoreDone | None = None) -> None:
        """Leave exactly the committed rows, with checksums in the manifest, and close.

        The hash of the content is kept there too, where the rows say which they are; see
        `content_hash`.

        An HDF5 file is replaced by one without the reserved space, which takes its size
        once more meanwhile. The storage can be opened again, also to append to it.

        Args:
            progress: called with the number of bytes that were read since the last call.

        Raises:
            StorageFull: no space; the storage is closed as it was.
        """
        self.writer.finalize(progress)

    def close(self) -> None:
        """Trim the files to the committed rows and let the next writer in. Twice is harmless.

        Another thread's write is finished first.
        """
        if "_overlays" in self.__dict__:
            self._overlays.close()
        self.writer.close()

    def flush(self) -> None:
        """Show all committed rows to other libraries; with durability="power", sync them too."""
        self.writer.flush()
        syncs = isinstance(self.writer, RowWriter) and self.writer.durability == "power"
        if syncs and "_overlays" in self.__dict__:
            self._overlays.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True if it was closed."""
        return self.reader.closed

    @property
    def last_head(self) -> int:
        """`head`, of a writer that was closed too: what it was then."""
        return self.reader.last_head

    @property
    def head(self) -> int:
        """Rows ever committed."""
        return self.reader.head

    @property
    def span(self) -> range:
        """The numbers of the valid rows, counted over all rows ever written.

        It begins above 0 where a ring has overwritten rows.
        """
        return self.reader.span

    @property
    def ring(self) -> int:
        """Slots of the ring, ``max_size``; 0 where every row is kept."""
        return self.reader.ring

    @property
    def grows(self) -> bool:
        """True if space for more rows can be added to it while it is open."""
        return self.writer.grows

    @property
    def trajectories(self) -> Trajectories:
        """The trajectories that the rows belong to, by id."""
        return Trajectories(self.reader, self)

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return slots of rows by number [*]: the index of `column`.

        It is the one that `get` takes, too, but in a ring that was emptied.
        """
        return self.reader.slots_of(rows)

    def index_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the index by which `get` finds rows by number [*], which must be there."""
        return self.reader.index_of(rows)

    def __len__(self) -> int:
        return len(self.reader.span)

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.reader.schema

    @property
    def manifest(self) -> Manifest:
        """The manifest: identity, schema, and the runs that wrote the rows."""
        return self.reader.manifest

    @property
    def nbytes(self) -> int:
        """Bytes of the committed rows."""
        return len(self) * self.schema.row_nbytes if self.head else 0

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record: the rows committed when it was written, and its payload."""
        return self.reader.record

    @property
    def record_damaged(self) -> bool:
        """True if the newest record was damaged, so that `record` is an older one or None."""
        return self.reader.record_damaged

    @property
    def left_open(self) -> bool:
        """True if a writer has the storage open, or did not close it: it was killed.

        A storage of version 2 does not say, and this is False.
        """
        return self.reader.left_open

    def column(self, key: str | Key) -> np.ndarray:
        """Return the committed rows of one column, [rows, ...], read-only, read when used.

        In a ring row r is at index ``slots_of(r)``, later writes to the ring may show in the
        array, and rows that `empty()` removed stay in it until they are overwritten. bfloat16
        comes as the ``uint16`` of its bits. Changes that you make all the same, through a tensor
        of its memory, show in that array alone.

        Raises:
            KeyError: there is no such column.
        """
        array = self.reader_with([key]).shown(as_key(key))
        array.flags.writeable = False
        return array

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        """Return rows by int, slice, range, list, array or tensor of ints, or one bool a row.

        An int gives one row, batch size []; row numbers of shape S give new tensors, batch size
        S; a slice gives tensors of its own, too, batch size [n], which are read when they are
        used (a small slice is copied at once). Changes to them show in them alone. In a slice of
        a ring, later rows of the writer may show until you have used it; so where rows are taken
        back, as by a checkpoint that is loaded.

        Nested TensorDicts have the further batch dimensions of the rows that made the storage,
        after these; so has the root, if each row is an item with a time dimension.

        ``keys`` are the columns that are wanted, such as ``["observation", ("next", "reward")]``;
        None: all. Others are not read. They may be overlays, too, whose values are copied.

        Raises:
            IndexOutOfRange: a row that is not there.
            ColumnsMissing: a column that is not there.
        """
        return (self.reader if keys is None else self.reader_with(keys)).get(index, keys)

    def in_order(self, keys: Keys | None = None) -> TensorDict:
        """Return all rows, the oldest first, batch size [rows]; those of a ring are copied.

        `get` returns the rows of a ring slot by slot, in index order. ``keys`` as in `get`.

        Raises:
            ColumnsMissing: a column that is not there.
        """
        return (self.reader if keys is None else self.reader_with(keys)).in_order(keys)

    def overlay(
        self,
        name: str | Key,
        dtype: torch.dtype | np.dtype[Any] | str | None = None,
        shape: Sequence[int] | int = (),
        fill: bool | int | float | complex = 0,
        *,
        writable: bool | None = None,
    ) -> Overlay:
        """Return a column beside the rows that may be written again; make it if there is none.

        Its values are in a file of their own, and rows are read as before: with its values by
        ``get(index, keys=[..., name])``, `column`, `n_step`'s ``reward_key``, and
        `DiskStorage.with_overlays` for slices and replay buffers. It has one writer at a time,
        from the first value that is set until the storage is closed.

        Args:
            name: a name, or a tuple of names, that is no column of the rows.
            dtype: of the values. None opens one that is there, whatever it keeps.
            shape: of one row's value.
            fill: the number that rows without a value have.
            writable: whether values may be set here. None: unless the storage was opened with
                mode="read". There, True writes to the overlay, and never to rows.

        Raises:
            SchemaMismatch: there is one of another dtype, shape or fill.
            InvalidSchema: a column has that name, or the overlay cannot be beside the rows.
            ColumnsMissing: there is none, and ``dtype`` is None.
            DamagedOverlay: its file cannot be used; `drop_overlay` removes it.
            ReadOnlyStorage: there is none, and it is not ``writable``.
            NotInitialised: the storage has no schema yet.
        """
        return self._overlays.overlay(name, dtype, shape, fill, writable)

    @property
    def overlays(self) -> list[str | Key]:
        """The names of all overlays: of one that has several, a tuple."""
        return self._overlays.names()

    def drop_overlay(self, name: str | Key) -> None:
        """Remove an overlay and its values. A damaged one can be removed, too.

        Raises:
            ColumnsMissing: there is none of that name.
            StorageLocked: another process writes to it.
            ReadOnlyStorage: the storage was opened with mode="read".
        """
        self._overlays.drop(name)

    def reader_with(self, keys: Keys) -> RowReader:
        """Return the reader of the rows, together with those of ``keys`` that are overlays."""
        wanted = (keys,) if isinstance(keys, str) else tuple(keys)
        known = self.reader.keys
        if all(as_key(each) in known for each in wanted):
            return self.reader
        return self._overlays.reader_with(wanted)

    @property
    def overlay_files(self) -> Overlays:
        """The files of the overlays."""
        return self._overlays.files

    @cached_property
    def _overlays(self) -> StorageOverlays:
        from tallyroll.storage.ext.overlays.storage_overlays import StorageOverlays

        return StorageOverlays(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}, mode={self.mode!r}, {_state_of(self)})"


def _state_of(store: RowStore) -> str:
    if store.closed:
        return "closed"
    each = f" of {store.schema.row_nbytes:,} bytes" if store.head else ""
    ring = f", the newest of {store.head:,}, in a ring of {store.ring:,}" if store.ring else ""
    return f"{len(store):,} rows{each}{ring}"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_rows(name: str, rows: object) -> None:
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"{name} is a positive number of rows or None, got {rows!r}.")
