"""User interface over a reader and a writer of rows, independent of replay buffers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.engine.commit_engine import Durability
from tallyroll.storage.engine.frame_pools import PoolUsage
from tallyroll.storage.engine.once_columns import plan_once, plan_once_auto
from tallyroll.storage.errors import StorageExists
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import translates_errors, user_path
from tallyroll.storage.formats.base import Format
from tallyroll.storage.readers.file_reader import FileReader, Mode
from tallyroll.storage.readers.row_reader import RowReader, index_of, rows_in_order
from tallyroll.storage.rows.frame_stacks import FrameStack, frames_declared
from tallyroll.storage.rows.keys import Key, Keys, as_key, format_key
from tallyroll.storage.rows.progress import MoreDone
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles, PlanOnce
from tallyroll.storage.stores.row_writer import ReadOnlyWriter, RowWriter
from tallyroll.storage.trajectories.mapping import Trajectories

if TYPE_CHECKING:
    from tallyroll.storage.ext.overlays.overlay import Overlay
    from tallyroll.storage.ext.overlays.overlay_set import Overlays
    from tallyroll.storage.ext.overlays.storage_overlays import StorageOverlays


Once: TypeAlias = bool | Literal["auto"]
"""The storages and columns whose frames are stored once; see `DiskStorage`."""
OpenMode: TypeAlias = Mode | Literal["auto"]
"""``"auto"`` appends to an existing storage and creates any other; see `DiskStorage`."""


class RowFacts:
    """The facts about the rows that ``reader`` reads."""

    reader: RowReader

    def __len__(self) -> int:
        return len(self.reader.span)

    @property
    def schema(self) -> Schema:
        """The schema of the rows."""
        return self.reader.schema

    @property
    def manifest(self) -> Manifest:
        """The manifest: identity, schema, and the runs that wrote the rows."""
        return self.reader.manifest

    @property
    def closed(self) -> bool:
        """True if the storage is closed."""
        return self.reader.closed

    @property
    def head(self) -> int:
        """The number of rows ever written and committed."""
        return self.reader.head

    @property
    def span(self) -> range:
        """The numbers of the valid rows, counted over all rows ever written.

        It begins above 0 if a ring has overwritten rows.
        """
        return self.reader.span

    @property
    def ring(self) -> int:
        """The number of slots of the ring, ``max_size``; 0 if every row is kept."""
        return self.reader.ring

    @property
    def trajectories(self) -> Trajectories:
        """The trajectories that the rows belong to, by id."""
        return Trajectories(self.reader, self)


class RowStore(RowFacts):
    """Store of rows on disk; see `DiskStorage` for the arguments."""

    mode: Mode
    reader: RowReader

    _format_class: ClassVar[type[Format]]

    @translates_errors
    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: OpenMode,
        capacity: int | None,
        durability: Durability,
        max_size: int | None = None,
        accept_copy: bool = False,
        once: Once = "auto",
        stacks: Sequence[FrameStack] = (),
    ) -> None:
        _check_choice("mode", mode, ("create", "append", "read", "auto"))
        _check_choice("durability", durability, ("process", "power"))
        _check_rows("capacity", capacity)
        _check_rows("max_size", max_size)
        self.path = user_path(path)
        is_auto, kind = mode == "auto", self._format_class(self.path.absolute())
        self.mode = mode = _mode_at(kind) if mode == "auto" else mode
        if max_size is not None and not self._format_class.rings:
            raise ValueError(
                f"max_size={max_size} requests a ring, but {type(self).__name__} keeps every row. "
                "Use MemmapStorage(path, max_size=...), or leave max_size out."
            )
        existing = is_auto and mode == "append"
        if existing:
            _check_once(once, stacks)
        plan = None if existing else self._plan_of(once, stacks)
        files = FileReader(kind, self.path, mode)
        self.reader = files
        opened = OpenedFiles(
            files,
            capacity=capacity or 0,
            max_size=max_size or 0 if is_auto else max_size,
            durability=durability,
            accept_copy=accept_copy,
            once=plan,
            declared_once=plan_once_auto
            if once == "auto" and max_size and files.format.pools
            else None,
        )
        self.writer: RowWriter | ReadOnlyWriter = RowWriter(opened)
        if existing:
            try:
                _require_layout(files, once, stacks)
            except ValueError:
                self.writer.close()
                raise

    def _plan_of(self, once: Once, stacks: Sequence[FrameStack]) -> PlanOnce | None:
        """Return the plan of the columns that a new storage with any rows stores once."""
        _check_once(once, stacks)
        if once == "auto":
            return None
        if once and not self._format_class.pools:
            raise ValueError(
                f"once: expected a MemmapStorage or ZarrStorage, got {type(self).__name__}. Its "
                "file cannot grow while it is open, and the size of a frame pool is not known in "
                'advance. Use MemmapStorage(path, once=True), or pack(format="hdf5") after the run.'
            )
        if once and self.mode != "create":
            raise ValueError(
                f'once: expected mode="create", got mode={self.mode!r}. An existing storage keeps '
                "its layout. Leave once out."
            )
        return partial(plan_once, stacks=tuple(stacks)) if once else None

    def initialise(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Create the files of a new storage, or check that an existing one has these columns.

        The entry of a run, ``{**provenance, "first_row": rows so far}``, is appended to the
        manifest. Nothing changes if the call raises.

        Raises:
            SchemaMismatch: the storage has other columns; the message names every difference.
            InvalidSchema: the format cannot hold the columns.
            InvalidProvenance: ``provenance`` cannot be serialized as JSON.
            StorageFull: the disk has no room for ``capacity`` rows.
        """
        self.writer.runs.begin(schema, provenance)

    def reserve(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in all, including existing rows.

        If the format cannot grow in place, a larger file replaces the file.

        Raises:
            StorageFull: the disk has no space; nothing was changed.
        """
        _check_rows("rows", rows)
        self.writer.opened.reserve(rows)

    def finalize(self, progress: MoreDone | None = None) -> None:
        """Trim the files to the committed rows, add checksums to the manifest, and close.

        The manifest also gets the hash of the content if the rows have the required columns; see
        `content_hash`.

        An HDF5 file is replaced by a copy without reserved space. Until then, both files take up
        disk space. The storage can be opened again, also for appending.

        Args:
            progress: callback that is called with the number of bytes read since the last call.

        Raises:
            StorageFull: the disk has no space; the storage is closed unchanged.
        """
        self.writer.finalize(progress)

    def close(self) -> None:
        """Trim the files to the committed rows and release the writer lock.

        A second call has no effect. A write by another thread is finished first.
        """
        if "_overlays" in self.__dict__:
            self._overlays.close()
        self.writer.close()

    def flush(self) -> None:
        """Make committed rows visible to other libraries; sync them if durability="power"."""
        self.writer.flush()
        syncs = isinstance(self.writer, RowWriter) and self.writer.durability == "power"
        if syncs and "_overlays" in self.__dict__:
            self._overlays.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def last_head(self) -> int:
        """The value of `head`; after a writer has closed, the value at that time."""
        return self.reader.last_head

    @property
    def grows(self) -> bool:
        """True if the storage can grow while it is open."""
        return self.writer.grows

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the slots of the rows with these numbers [*]; slots are indices of `column`.

        Slots are also valid indices of `get`, except in a ring that was emptied.
        """
        return self.reader.slots_of(rows)

    def index_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices by which `get` finds the rows with these numbers [*]."""
        return index_of(self.reader, rows)

    @property
    def nbytes(self) -> int:
        """The size of the committed rows in bytes, as if each value were stored on its own."""
        return len(self) * self.schema.row_nbytes if self.head else 0

    @property
    def stores_once(self) -> bool:
        """True if the frames of some columns are stored once; see ``once`` of `DiskStorage`."""
        return isinstance(self.writer, RowWriter) and self.writer.opened.once

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record: the number of rows when it was written, and its payload."""
        return self.reader.record

    @property
    def record_damaged(self) -> bool:
        """True if the newest record was damaged, so that `record` is an older one or None."""
        return self.reader.record_damaged

    @property
    def left_open(self) -> bool:
        """True if a writer has the storage open or was killed before it closed the storage.

        A storage of version 2 does not record this, and the value is False.
        """
        return self.reader.left_open

    def pool_usage(self) -> list[PoolUsage]:
        """Return the number of frames and the size of each frame pool.

        The list is empty if no column is stored once. A union, and a sharded storage, adds up the
        pools of its members that have the same key and layout. The call reads the positions of all
        valid rows.
        """
        return self.reader.pool_usage()

    def column(self, key: str | Key) -> np.ndarray:
        """Return the committed rows of one column, [rows, ...], as a lazy read-only array.

        In a ring, row r is at index ``slots_of(r)``, later writes to the ring may become visible in
        the array, and rows that `empty()` removed stay in it until they are overwritten. bfloat16
        is returned as the ``uint16`` of its bits. If you change the array nevertheless, through a
        tensor over its memory, the change is visible only in that array.

        Raises:
            KeyError: the column does not exist.
        """
        array = self.reader_with([key]).shown(as_key(key))
        array.flags.writeable = False
        return array

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        """Return the rows at ``index``: an int, a slice, a range, several ints, or bools.

        Several ints are a list, an array or a tensor. Bools are a mask with one bool per row. An
        int gives one row with batch size []. Row numbers of shape S give new tensors with batch
        size S. A slice gives private tensors with batch size [n], which are read on first use; a
        small slice is copied at once. Changes to the result are visible only in the result. In a
        slice of a ring, later rows of the writer may become visible while you use the slice. The
        same applies when rows are rewound, for example by loading a checkpoint.

        Nested TensorDicts have additional batch dimensions after these dimensions, if they had them
        in the rows that created the storage. The same applies to the root if each row is an item
        with a time dimension.

        ``keys`` selects columns, such as ``["observation", ("next", "reward")]``; None: all. Other
        columns are not read. Keys may name overlays, whose values are copied.

        Raises:
            IndexOutOfRange: a row does not exist.
            ColumnsMissing: a column does not exist.
        """
        return (self.reader if keys is None else self.reader_with(keys)).get(index, keys)

    def in_order(self, keys: Keys | None = None) -> TensorDict:
        """Return all rows, oldest first, with batch size [rows]. The rows of a ring are copied.

        `get`, by contrast, returns the rows of a ring in index order. See `get` for ``keys``.

        Raises:
            ColumnsMissing: a column does not exist.
        """
        return rows_in_order(self.reader if keys is None else self.reader_with(keys), keys)

    def overlay(
        self,
        name: str | Key,
        dtype: torch.dtype | np.dtype[Any] | str | None = None,
        shape: Sequence[int] | int = (),
        fill: bool | int | float | complex = 0,
        *,
        writable: bool | None = None,
    ) -> Overlay:
        """Return an overlay, a rewritable column of the rows; create it if it does not exist.

        The values are in a separate file, and the rows are read as before. Read the values with
        ``get(index, keys=[..., name])``, `column` or `n_step`'s ``reward_key``. Use
        `DiskStorage.with_overlays` for slices and replay buffers. An overlay has one writer at a
        time, from the first value that is set until the storage is closed.

        Args:
            name: a name, or a tuple of names, that is not a column of the rows.
            dtype: the dtype of the values. None opens an existing overlay of any dtype.
            shape: the shape of a row's value.
            fill: the value of rows that have not been set.
            writable: whether values may be set here. None: True unless the storage was opened with
                mode="read". In that mode, True permits writes to the overlay but never to the rows.

        Raises:
            SchemaMismatch: an overlay of another dtype, shape or fill exists.
            InvalidSchema: a column has that name, or the rows cannot have an overlay.
            ColumnsMissing: the overlay does not exist and ``dtype`` is None.
            DamagedOverlay: the file of the overlay cannot be used; `drop_overlay` removes the file.
            ReadOnlyStorage: the overlay does not exist and ``writable`` is False.
            NotInitialised: the storage has no schema yet.
        """
        return self._overlays.overlay(name, dtype, shape, fill, writable)

    @property
    def overlays(self) -> list[str | Key]:
        """The names of all overlays; a nested name is a tuple."""
        return self._overlays.names()

    def drop_overlay(self, name: str | Key) -> None:
        """Remove an overlay and its values, even if it is damaged.

        Raises:
            ColumnsMissing: no overlay has that name.
            StorageLocked: another process writes to the overlay.
            ReadOnlyStorage: the storage was opened with mode="read".
        """
        self._overlays.drop(name)

    def reader_with(self, keys: Keys) -> RowReader:
        """Return the reader of the rows, extended by the overlays among ``keys``."""
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


def _mode_at(files: Format) -> Mode:
    """Return the mode that appends to an existing storage, or creates one.

    Raises:
        OpenError: something else is at the path.
    """
    try:
        files.refuse_existing()
    except StorageExists:
        return "append"
    return "create"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_once(once: object, stacks: Sequence[FrameStack]) -> None:
    if type(once) is not bool and once != "auto":
        raise ValueError(f'once: expected "auto", True or False, got {once!r:.80}.')
    if stacks and once is not True:
        raise ValueError(
            f"stacks: expected once=True, got once={once!r}. Pass once=True, or leave stacks out."
        )


def _require_layout(files: FileReader, once: Once, stacks: Sequence[FrameStack]) -> None:
    """Raise `ValueError` if an existing storage has another layout than ``once`` and ``stacks``."""
    if type(once) is bool and once != bool(files.once):
        raise ValueError(
            f"once={once} was given, but {files.path} exists and has "
            f"{'whole observations' if once else 'frames stored once'}. Leave once out, or "
            "give another path."
        )
    frames = {each.key: each.layout.stack for each in files.once}
    for key, (n, axis) in frames_declared(files.schema, stacks).items():
        if key in frames and (n, axis) != (frames[key], 0):
            raise ValueError(
                f"stacks: {n} frames of {format_key(key)} along axis {axis} were given, but "
                f"{files.path} exists and stores {frames[key]} along axis 0. Leave stacks out, or "
                "give another path."
            )


def _check_rows(name: str, rows: object) -> None:
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"{name}: expected a positive number of rows or None, got {rows!r}.")
