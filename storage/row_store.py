"""Rows on disk: opened in a mode, written, read, closed. Knows nothing of replay buffers."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.creation import create_new, manifest_of, open_existing
from tallyroll.storage.engine.engine import Durability, Engine
from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.errors import (
    ColumnsMissing,
    IndexOutOfRange,
    InvalidSchema,
    NotInitialised,
    RowsMismatch,
    RunUnderWay,
    SchemaMismatch,
    StorageClosed,
    StorageFull,
)
from tallyroll.storage.files.checksums import Progress, checksums
from tallyroll.storage.files.commit_header import check_record_size
from tallyroll.storage.files.manifest import Manifest, run_of
from tallyroll.storage.files.paths import told
from tallyroll.storage.files.run_record import RunRecord, is_count
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import TRAJ_IDS, Key, spell
from tallyroll.storage.rows.nesting import Nest, array_of, leaves, require_rows
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.id_checks import IdChecks, Ids, renumbered
from tallyroll.storage.trajectories.index import TrajectoryIndex, says_whose
from tallyroll.storage.trajectories.mapping import Trajectories

Mode: TypeAlias = Literal["create", "append", "read"]


class RowStore:
    """Rows on disk; the arguments are those of `DiskStorage`."""

    _format_class: ClassVar[type[Format]]

    # __del__ also runs after a constructor that raised.
    _engine: Engine | None = None
    _closed = True
    _last_head = 0
    _provenance: Mapping[str, Any] = {}
    """Joins the entry of every run: the command that writes it."""

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
        self.path = Path(path)
        self.mode: Mode = mode
        self._capacity, self._durability = capacity or 0, durability
        self._format = self._format_class(Path(os.path.abspath(path)))
        self._ring = max_size or 0
        self._index = TrajectoryIndex()
        if max_size is not None and not self._format_class.rings:
            raise ValueError(
                f"max_size={max_size} asks for a ring, and {type(self).__name__} keeps every row. "
                "Use MemmapStorage(path, max_size=...), or leave it out."
            )
        self._turn = threading.RLock()
        """Held while rows are written, and while what they are written to is made or replaced."""
        self._manifest: Manifest | None = None
        self._staged: bytes | None = None
        self._run: weakref.ref[object] | None = None
        if mode == "create":
            self._format.refuse_existing()
        else:
            self._engine, self._manifest = open_existing(
                self._format, writable=mode == "append", accept_copy=accept_copy, **self._options
            )
            try:
                self._make_ready()
            except BaseException:
                self._leave(None)
                raise
        self._closed = False
        _open.add(self)

    @property
    def _options(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "durability": self._durability}

    def _make_ready(self) -> None:
        assert self._engine is not None
        wanted, self._ring = self._ring, (got := self._engine.ring)
        if wanted and wanted != got:
            raise ValueError(
                f"max_size={wanted} was given, and {self.path} "
                + (f"is a ring of {got} rows." if got else "keeps every row.")
                + " Leave max_size out when opening."
            )
        if self.ring and self.mode == "append" and "finalized" in self.manifest:
            # Checksums of rows that are about to be overwritten.
            kept = {k: v for k, v in self.manifest.items() if k != "finalized"}
            self._write_manifest(kept)

    @told
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
        with self._turn:
            self._require_open()
            run = run_of(self.head, {**(provenance or {}), **self._provenance})
            if self._engine is None:
                self._create(schema, [run])
                return
            self._engine.require_writer()
            if different := self._engine.schema.differences(schema):
                raise SchemaMismatch(
                    f"{self.path} has other columns than the data: {'; '.join(different)}. Nothing "
                    "was written; make the data fit, or create another storage."
                )
            self._write_runs([*self.manifest["runs"], run])

    @told
    def _create(self, schema: Schema, runs: list[Any], id: str | None = None) -> None:
        self._engine, self._manifest = create_new(
            self._format, schema, runs, id=id, ring=self._ring, **self._options
        )

    def _write_runs(self, runs: list[Any]) -> None:
        self._write_manifest({**self.manifest, "runs": runs})

    @told
    def _write_manifest(self, manifest: Manifest) -> None:
        self._format.write_manifest(manifest)
        self._manifest = manifest

    @told
    def reserve(self, rows: int) -> None:
        """Reserve space for ``rows`` rows in all, those that are there included.

        A format that cannot grow in place is written anew, into a larger file.

        Raises:
            StorageFull: there is no space; nothing was changed.
        """
        _check_rows("rows", rows)
        with self._turn:
            self._require_open()
            engine = self._engine
            if engine is None:
                self._capacity = max(self._capacity, rows)
            elif self._format.grows or rows <= engine.room:
                engine.require_writer()
                engine.reserve_rows(rows)
            else:
                engine.require_writer()
                self._reopen(engine, rows)

    def _reopen(self, engine: Engine, capacity: int) -> None:
        self._last_head = engine.head
        try:
            engine.close()
            self._engine, self._manifest = open_existing(
                self._format, writable=True, **{**self._options, "capacity": capacity}
            )
        except BaseException:
            try:
                self._engine, self._manifest = open_existing(
                    self._format, writable=True, durability=self._durability
                )
            except BaseException:
                self._engine, self._closed = None, True
                raise
            raise

    def finalize(self, progress: Progress | None = None) -> None:
        """Leave exactly the committed rows, with checksums in the manifest, and close.

        HDF5 files are written anew without the space that was reserved, which takes
        their size once more while it lasts. The storage can be opened again, to be
        appended to as well.

        Args:
            progress: called with the number of bytes that were read since the last call.

        Raises:
            StorageFull: no space; the storage is closed as it was.
        """
        with self._turn:
            engine = self._running()
            engine.require_writer()
            columns = dict(zip(engine.schema.keys, engine.committed(), strict=True))
            rows = len(next(iter(columns.values())))
            done = {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "head": engine.head,
                "checksums": checksums(columns, rows, progress),
            }
            try:
                self._write_manifest({**self.manifest, "finalized": done})
            except StorageFull:
                self._close(None)
                raise
            schema = engine.schema
            self._close(lambda: self._format.finish(schema, rows))

    def close(self) -> None:
        """Trim the files to the committed rows and let the next writer in. Twice is harmless.

        What another thread is writing is written first.
        """
        self._close(None)

    @told
    def _close(self, finish: Callable[[], None] | None) -> None:
        with self._turn:
            try:
                if self._engine is not None and self._engine.owns_lock:
                    self._index.save(self)
            finally:
                self._leave(finish)

    @told
    def _leave(self, finish: Callable[[], None] | None) -> None:
        engine, self._engine, self._closed = self._engine, None, True
        if engine is not None:
            if engine.owns_lock:
                self._last_head = engine.head
            engine.close(finish)

    @told
    def flush(self) -> None:
        """Show all committed rows to other libraries; with durability="power", sync them too."""
        with self._turn:
            self._require_open()
            if self._engine is not None:
                self._engine.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        engine = self._engine
        if engine is not None:
            if engine.owns_lock:
                warnings.warn(
                    f"unclosed storage {self.path}", ResourceWarning, stacklevel=3, source=self
                )
            self._leave(None)

    def _require_open(self) -> None:
        if self._closed:
            raise StorageClosed(f"{self.path} was closed. Open it again.")

    def _running(self) -> Engine:
        engine = self._engine
        if engine is None:
            self._require_open()
            raise NotInitialised(
                f"{self.path} has no rows and no schema yet. Call initialise(schema), or write "
                "rows first."
            )
        return engine

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._closed

    @property
    def last_head(self) -> int:
        """`head`, of a writer that was closed too: what it was then."""
        return self._last_head if self._closed else self.head

    @property
    def head(self) -> int:
        """Rows ever committed."""
        if self._engine is None:
            self._require_open()
            return 0
        return self._engine.head

    @property
    def span(self) -> range:
        """The numbers of the valid rows, counted over all rows ever written.

        It begins above 0 where a ring has overwritten rows.
        """
        if self._engine is None:
            self._require_open()
            return range(0)
        return self._engine.span

    @property
    def ring(self) -> int:
        """Slots of the ring, ``max_size``; 0 where every row is kept."""
        return self._ring

    @property
    def grows(self) -> bool:
        """Whether space for more rows can be added to it while it is open."""
        return self._format.grows

    @property
    def inside(self) -> Inside:
        """The way to its files."""
        return self._format.inside

    @property
    def lock_path(self) -> Path:
        """The file on which its writer holds a lock."""
        return self._format.lock_path

    @property
    def trajectories(self) -> Trajectories:
        """The trajectories that the rows belong to, by id."""
        return Trajectories(self)

    @property
    def episodes_path(self) -> Path:
        """The file of the table of episodes, written when a writer closes the storage."""
        return self._format.episodes_path

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Slots of rows by number [*]: the index that `get` takes, and that of `column`."""
        return slots_of(rows, self._ring)

    def __len__(self) -> int:
        return len(self.span)

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self._running().schema

    @property
    @told
    def manifest(self) -> Manifest:
        """The manifest: identity, schema, and the runs that wrote the rows."""
        self._running()
        if self._manifest is None or self.mode == "read":
            self._manifest = manifest_of(self._format)
        return self._manifest

    @property
    def nbytes(self) -> int:
        """Bytes of the committed rows."""
        return len(self) * self.schema.row_nbytes if self.head else 0

    @property
    def record(self) -> tuple[int, bytes] | None:
        """The newest intact record: the rows committed when it was written, and its payload."""
        self._require_open()
        return None if self._engine is None else self._engine.record

    @property
    def record_damaged(self) -> bool:
        """Whether the newest record was damaged, so that `record` is an older one or None."""
        return self._running().record_damaged

    @property
    def left_open(self) -> bool:
        """Whether a writer has the storage open, or did not close it: it was killed.

        A storage of version 2 does not say, and this is False.
        """
        return self._running().left_open

    def put_record(self, payload: bytes) -> None:
        """Commit a record without rows.

        Raises:
            RecordTooLarge: beyond its slot.
            NotInitialised: a new storage without schema has no place for it yet.
        """
        with self._turn:
            self._running().put_record(payload)
            self._staged = None

    def stage_record(self, payload: bytes) -> None:
        """Keep a record that the next commit writes, whoever makes it.

        Raises:
            RecordTooLarge: beyond its slot.
        """
        self._require_open()
        check_record_size(payload)
        self._staged = bytes(payload)

    def _write(
        self,
        rows: Any,
        record: bytes | None = None,
        without: Key | None = None,
        ids: Ids = "fresh",
    ) -> range:
        """Append and commit; ``without`` names a column that may be there and is left out."""
        with self._turn:
            if ids != "fresh":
                self._require_no_run()
            record = self._staged if record is None else record
            if ids != "fresh" and record is None and self._last_is_collected():
                return self._write_as_a_run(rows, without, ids)
            if ids == "renumber":
                rows = self._renumbered(rows)
            if self._ring:
                self._index.make_way(self, rows)
            engine, span, kind = self._engine, None, type(rows)
            tensors = kind is TensorDict or (kind is not dict and isinstance(rows, TensorDictBase))
            watch = None
            if engine is not None and ids != "fresh":
                watch = self._id_checks
            if tensors and engine is not None:
                span = engine.append_tensors(rows, record, without, watch)
            if span is None:
                arrays = self._arrays(rows, without)
                if engine is None and ids != "fresh":
                    watch = self._id_checks
                span = self._running().append(arrays, record, watch)
            if watch is not None:
                watch.settle(span.stop)
            self._staged = None
            return span

    def _last_is_collected(self) -> bool:
        """The last run is a collector's, whose record counts its rows."""
        return self._engine is not None and "first_row_of_run" in self.manifest["runs"][-1]

    def _write_as_a_run(self, rows: Any, without: Key | None, ids: Ids) -> range:
        """Write behind a collector's run: these rows are none of it."""
        runs = self.manifest["runs"]
        self._running().require_writer()
        self._write_runs([*runs, run_of(self.head, {})])
        try:
            return self._write(rows, None, without, ids)
        except BaseException:
            self._write_runs(runs)
            raise

    def claim(self, run: object) -> None:
        """From here on rows are written with ``ids="fresh"`` alone, until :meth:`release`.

        A collector's run numbers its trajectories and counts its rows: others in between would
        be counted as its own. The claim ends with ``run`` itself, too.
        """
        self._run = weakref.ref(run)

    def release(self, run: object) -> None:
        """End what :meth:`claim` began, unless another run has begun since."""
        if self._run is not None and self._run() is run:
            self._run = None

    def _require_no_run(self) -> None:
        if self._run is not None and self._run() is not None:
            raise RunUnderWay(
                f"a collector is writing a run to {self.path}, and rows from elsewhere in the "
                "middle of it would be counted as its own. Nothing was written. Add them when the "
                "run is over, or after the collector's shutdown()."
            )

    @cached_property
    def _id_checks(self) -> IdChecks | None:
        """The checks of ids that are written; None if rows have no ids."""
        return IdChecks(self) if says_whose(self.schema) else None

    def _renumbered(self, rows: Any) -> Any:
        """The rows with ids behind those that are stored or were given away."""
        tensors = isinstance(rows, TensorDictBase)
        found = rows.get(TRAJ_IDS, None) if tensors or isinstance(rows, Mapping) else None
        nobodys = self._engine is not None and self._id_checks is None
        if found is None or not _whole(found) or nobodys:
            raise ColumnsMissing(
                f'ids="renumber" changes whole numbers in the column {spell(TRAJ_IDS)}, which '
                f"these rows or {self.path} do not have. Leave it out."
            )
        record = RunRecord.parse(self.record)
        base = max(0, record.next_id) if record is not None and is_count(record.next_id) else 0
        if self._engine is not None and self._id_checks is not None:
            base = max(base, self._id_checks.largest(self._engine) + 1)
        ids = renumbered(found.numpy(force=True) if tensors else np.asarray(found), base)
        if not tensors:
            return {**rows, TRAJ_IDS: ids}
        return rows.copy().set(TRAJ_IDS, torch.from_numpy(ids))

    def _arrays(self, rows: Any, without: Key | None = None) -> Mapping[Key, np.ndarray]:
        if type(rows) is not dict and isinstance(rows, TensorDictBase):
            return self._arrays_of(rows, without)
        if not isinstance(rows, Mapping):
            raise RowsMismatch(
                f"rows are a TensorDict or arrays by key, got {type(rows).__name__}."
            )
        if self._engine is None:
            schema = Schema.of(rows)
            require_rows(rows, len(next(iter(rows.values()))))
            self.initialise(schema)
        return rows

    def _arrays_of(self, rows: TensorDictBase, without: Key | None) -> dict[Key, np.ndarray]:
        if not rows.batch_dims:
            raise RowsMismatch("rows have a batch size [N], got []. Use unsqueeze(0) for one row.")
        try:
            found = leaves(rows)
            if without is not None:
                found.pop(without, None)
            require_rows(found, rows.batch_size[0])
            if self._engine is None:
                self.initialise(Schema.of_leaves(found, batch_dims_of(rows)))
            arrays = {key: array_of(key, leaf) for key, leaf in found.items()}
        except InvalidSchema as error:
            if self._engine is None:
                raise
            raise RowsMismatch(f"these rows do not fit {self.path}: {error}") from error
        if self._sixteen_bits:
            self._check_sixteen_bits(found)
        return arrays

    @cached_property
    def _sixteen_bits(self) -> list[Column]:
        return [column for column in self.schema.columns if column.numpy_dtype == np.uint16]

    def _check_sixteen_bits(self, found: dict[Key, torch.Tensor]) -> None:
        # bfloat16 and uint16 are the same array: tell them apart while they are tensors.
        for column in self._sixteen_bits:
            if column.key in found and (got := found[column.key].dtype) != column.dtype:
                raise RowsMismatch(
                    f"these rows do not fit {self.path}: {spell(column.key)} has {got}, expected "
                    f"{column.dtype}. Nothing was written."
                )

    def column(self, key: str | Key) -> np.ndarray:
        """The committed rows of one column, [rows, ...], read-only and without a copy.

        In a ring slot by slot: row r at ``slots_of(r)``, and while another process writes
        it may be overwritten as you look. bfloat16 comes as the ``uint16`` of its bits.

        Raises:
            KeyError: there is no such column.
        """
        key = (key,) if isinstance(key, str) else key
        engine = self._running()
        if key not in engine.schema:
            names = ", ".join(map(spell, engine.schema.keys))
            raise KeyError(f"{self.path} has no column {key!r}; it has {names}.")
        return engine.committed()[engine.schema.keys.index(key)]

    def get(self, index: Any) -> TensorDict:
        """Rows by number: int, slice, range, list, array or tensor of ints, or one bool a row.

        An int gives one row, batch size []; row numbers of shape S give new
        tensors, batch size S; a slice gives views of the files, batch size [n],
        nothing read until it is used. What is written to such a view stays in
        this process.

        Nested TensorDicts, and the root where each row is an item with a time dimension, have the
        further batch dimensions of the rows that made the storage, behind these.

        Raises:
            IndexOutOfRange: a row that is not there.
        """
        engine = self._running()
        span = engine.span
        try:
            where = resolve(index, len(span))
        except IndexOutOfRange:
            # There a moment ago, and again when a writer is done with a batch: take waits.
            if (rows := engine.most_rows(span)) == len(span):
                raise
            where = resolve(index, rows)
        if isinstance(where, slice):
            if engine.shows_slots(span):
                return self._nest([view[where] for view in engine.views()])
            where = np.arange(where.start, where.stop, where.step)
        if isinstance(where, int):
            return self._nest(engine.take(np.array([where])))[0]
        return self._nest(engine.take(where), where.shape)

    def _nest(self, arrays: list[np.ndarray], batch: tuple[int, ...] | None = None) -> TensorDict:
        return self._put_together(arrays, (len(arrays[0]),) if batch is None else batch)

    @cached_property
    def _put_together(self) -> Nest:
        schema = self.schema
        columns = [(column.key, column.dtype) for column in schema.columns]
        return Nest(columns, schema.batch_shapes)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.head} rows"
        return f"{type(self).__name__}({str(self.path)!r}, mode={self.mode!r}, {state})"


# What is never closed is closed before the interpreter takes itself apart.
_open: weakref.WeakSet[RowStore] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for store in list(_open):
        with store._turn:  # a thread may still write
            store._let_go()


def _renew_turns() -> None:
    # In a forked child, where a thread that held one may not exist.
    for store in list(_open):
        store._turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turns)


def _whole(numbers: Any) -> bool:
    if isinstance(numbers, torch.Tensor):
        return not (numbers.is_floating_point() or numbers.is_complex())
    return np.asarray(numbers).dtype.kind in "iu"


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_rows(name: str, rows: object) -> None:
    if rows is not None and (type(rows) is not int or rows < 1):
        raise ValueError(f"{name} is a positive number of rows or None, got {rows!r}.")
