"""The writer of our own files, one at a time: it checks, appends and commits rows."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.creation import create_new
from tallyroll.storage.engine.new_rows import ArrayRows, NewRows, TensorRows
from tallyroll.storage.engine.slot_rows import SlotRows
from tallyroll.storage.errors import (
    ReadOnlyStorage,
    RunUnderWay,
    SchemaMismatch,
    StorageFull,
)
from tallyroll.storage.files.checksums import Progress, checksums
from tallyroll.storage.files.manifest import run_of
from tallyroll.storage.files.paths import told
from tallyroll.storage.files.record_slots import check_record_size
from tallyroll.storage.formats.base import Format
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.origin import Told, origin_of
from tallyroll.storage.rows.origin import came_from as came_from_rows
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.slot_order import oldest_first
from tallyroll.storage.stores.copied_rows import CopiedRows
from tallyroll.storage.stores.given_rows import GivenRows, with_new_ids
from tallyroll.storage.trajectories.id_checks import IdChecks, Ids
from tallyroll.storage.trajectories.index import says_whose


class RowWriter:
    """Writes the rows that a `FileReader` reads, and closes both.

    Args:
        reader: of the files.
        capacity: rows to reserve space for at once, 0 for none.
        max_size: slots of a ring, None where every row is kept.
        durability: what a commit survives.
        accept_copy: open a copy of a storage that was open for writing.
    """

    # __del__ also runs after a constructor that raised.
    _files: FileReader | None = None

    @told
    def __init__(
        self,
        reader: FileReader,
        *,
        capacity: int = 0,
        max_size: int | None = None,
        durability: Durability = "process",
        accept_copy: bool = False,
    ) -> None:
        self.path, self.reader = reader.path, reader
        self._capacity, self.durability = capacity, durability
        self.turn = threading.RLock()
        """The lock that is held while rows are written, and while files are made or replaced."""
        self.provenance: Mapping[str, Any] = {}
        """Entries that are added to every run's entry: the command that writes it."""
        self.temporary = False
        """True for a storage that ends with its process, and that users need not close."""
        self._staged: bytes | None = None
        self._run: weakref.ref[object] | None = None
        self._run_begun = False
        self._given, self._copied = GivenRows(reader), CopiedRows(self)
        if reader.mode == "create":
            self.files.refuse_existing()
            reader.ring = max_size or 0
        else:
            reader.open(writable=reader.mode == "append", accept_copy=accept_copy, **self._options)
            try:
                self._make_ready(max_size)
            except BaseException:
                reader.close()
                raise
        self._files = reader
        _open.add(self)

    @property
    def _options(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "durability": self.durability}

    def _make_ready(self, wanted: int | None) -> None:
        reader = self.reader
        if wanted and wanted != reader.ring:
            raise ValueError(
                f"max_size={wanted} was given, and {self.path} "
                + (f"is a ring of {reader.ring} rows." if reader.ring else "keeps every row.")
                + " Leave max_size out when opening."
            )
        if reader.ring and reader.mode == "append" and "finalized" in reader.manifest:
            # Drop checksums of rows that will be overwritten.
            kept = {k: v for k, v in reader.manifest.items() if k != "finalized"}
            reader.write_manifest(kept)

    @property
    def files(self) -> Format:
        """The format, which has the files."""
        return self.reader.format

    @property
    def grows(self) -> bool:
        """True if space for more rows can be added while the storage is open."""
        return self.files.grows

    @told
    def initialise(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Implement `DiskStorage.initialise`."""
        reader = self.reader
        with self.turn:
            reader.require_open()
            run = run_of(reader.head, {**(provenance or {}), **self.provenance})
            if reader.engine is None:
                self.create(schema, [run])
                return
            self.require_schema(schema)
            self.write_runs([*self._copied.settled(), run])

    def require_schema(self, schema: Schema) -> None:
        """Implement `DiskStorage.require_schema`."""
        reader = self.reader
        reader.running().right.require()
        if different := reader.schema.differences(schema):
            raise SchemaMismatch(
                f"{self.path} has other columns than the data: {'; '.join(different)}. Nothing "
                "was written; make the data fit, or create another storage."
            )

    def withdraw_run(self, run: Mapping[str, Any]) -> None:
        """Implement `DiskStorage.withdraw_run`."""
        with self.turn:
            runs = self.reader.runs
            if run in runs:
                at = runs.index(dict(run))
                self.write_runs([*runs[:at], *runs[at + 1 :]])

    @told
    def create(self, schema: Schema, runs: list[Any], id: str | None = None) -> None:
        """Make the files; a copy of another storage gets its ``id``."""
        ring = self.reader.ring
        self.reader.use(*create_new(self.files, schema, runs, id=id, ring=ring, **self._options))
        self._copied.forget()

    def write_runs(self, runs: list[Any]) -> None:
        """Replace the runs in the manifest."""
        self.reader.write_manifest({**self.reader.manifest, "runs": runs})
        self._copied.forget()

    @told
    def reserve(self, rows: int) -> None:
        """Implement `DiskStorage.reserve`."""
        with self.turn:
            self.reader.require_open()
            engine = self.reader.engine
            if engine is None:
                self._capacity = max(self._capacity, rows)
                return
            engine.right.require()
            if self.grows or rows <= engine.space.columns.room:
                engine.space.reserve(rows)
            else:
                self._reopen(engine, rows)

    def _reopen(self, engine: Engine, capacity: int) -> None:
        reader, head = self.reader, engine.counts.head
        try:
            engine.close()
            reader.open(writable=True, **{**self._options, "capacity": capacity})
        except BaseException:
            try:
                reader.open(writable=True, durability=self.durability)
            except BaseException:
                reader.lose(head)
                raise
            raise

    def finalize(self, progress: Progress | None = None) -> None:
        """Implement `DiskStorage.finalize`."""
        reader = self.reader
        with self.turn:
            engine = reader.running()
            engine.right.require()
            columns = dict(zip(engine.schema.keys, engine.space.committed(), strict=True))
            rows = len(next(iter(columns.values())))
            done = {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "head": engine.counts.head,
                "checksums": checksums(columns, rows, progress),
            }
            try:
                reader.write_manifest({**reader.manifest, "finalized": done})
            except StorageFull:
                self.close()
                raise
            schema = engine.schema
            self.close(lambda: self.files.finish(schema, rows))

    @told
    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Trim the files, call ``finish``, and let the next writer in."""
        reader = self.reader
        with self.turn:
            try:
                if reader.engine is not None and reader.engine.right.held:
                    reader.trajectory_index.save(reader, synced=self.durability == "power")
                    if (runs := self._copied.settled()) is not reader.runs:
                        self.write_runs(runs)
            finally:
                self._leave(finish)

    @told
    def _leave(self, finish: Callable[[], None] | None) -> None:
        if (engine := self.reader.let_go()) is not None:
            engine.close(finish)

    @told
    def flush(self) -> None:
        """Implement `DiskStorage.flush`."""
        with self.turn:
            self.reader.require_open()
            if self.reader.engine is not None:
                self.reader.engine.flush()

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Close a storage that the user did not close, and warn of it."""
        if self._files is None or (engine := self._files.engine) is None:
            return
        if engine.right.held and not self.temporary:
            warnings.warn(
                f"unclosed storage {self.path}", ResourceWarning, stacklevel=3, source=self
            )
        self._leave(None)

    def copy(self, rows: Mapping[Key, np.ndarray]) -> None:
        """Append rows of the storage that this one becomes a copy of."""
        self.reader.running().append(self._given.checked(rows))

    def replace(self, source: RowReader) -> None:
        """Take over all rows of a ring of the same size and schema, and their numbers."""
        span, ring = source.span, source.ring
        slots = min(span.stop, ring)
        columns = [source.in_slots(key, 0, slots) for key in source.keys]
        reserve = span.start + ring if span.start else span.stop
        self.reader.running().replace(columns, span.stop, reserve, source.floor)
        self.__dict__.pop("_id_checks", None)  # it knew other rows

    def empty(self) -> None:
        """Make every row of a ring invalid, and go on after them."""
        reader = self.reader
        with self.turn:
            engine = reader.running()
            engine.right.require()
            reader.trajectory_index.make_way(reader, range(reader.ring))
            engine.empty()

    def put_record(self, payload: bytes) -> None:
        """Implement `DiskStorage.put_record`."""
        with self.turn:
            self.reader.running().put_record(payload)
            self._staged = None

    def stage_record(self, payload: bytes) -> None:
        """Implement `DiskStorage.stage_record`."""
        self.reader.require_open()
        check_record_size(payload)
        self._staged = bytes(payload)

    # --- runs -------------------------------------------------------------------------------------

    def claim(self, run: object, *, begins: bool = True) -> bool:
        """Implement `DiskStorage.claim`."""
        with self.turn:
            other = self._other_than(run)
            if other and self._run_begun and begins:
                gc.collect()  # a run that was dropped may be part of a cycle
                if self._other_than(run):
                    raise RunUnderWay(
                        f"another collector is writing a run to {self.path}: rows of two runs, one "
                        "between the other, would be counted as either's. Nothing was written. Let "
                        "that run end, or call that collector's shutdown(), before this one "
                        "begins; or give it a storage of its own."
                    )
            if other and not begins:
                return False
            self._run, self._run_begun = weakref.ref(run), begins
            return True

    def _other_than(self, run: object) -> bool:
        return self._run is not None and self._run() not in (None, run)

    def has_claimed(self, run: object) -> bool:
        """Implement `DiskStorage.has_claimed`."""
        return self._run is not None and self._run() is run

    def release(self, run: object) -> None:
        """Implement `DiskStorage.release`."""
        if self._run is not None and self._run() is run:
            self._run = None

    def require_no_run(self) -> None:
        """Raise `RunUnderWay` while a collector's run is written."""
        if self._run_lives:
            raise RunUnderWay(
                f"a collector is writing a run to {self.path}, and rows from elsewhere in the "
                "middle of it would be counted as its own. Nothing was written. Add them when the "
                "run is over, or after the collector's shutdown()."
            )

    # --- rows -------------------------------------------------------------------------------------

    def write(
        self,
        rows: Any,
        record: bytes | None = None,
        without: Key | None = None,
        ids: Ids = "fresh",
        *,
        items: bool = False,
    ) -> range:
        """Append and commit rows; ``without`` names a column that they may have, left out.

        With ``items`` they come from a replay buffer, and each may be several transitions.
        """
        kind, came_from = type(rows), None
        if kind is TensorDict or (kind is not dict and isinstance(rows, TensorDictBase)):
            came_from, rows = origin_of(rows), oldest_first(rows)
        with self.turn:
            if ids != "fresh":
                self.require_no_run()
            record = self._staged if record is None else record
            own = record is not None or (ids == "fresh" and (came_from is None or self._run_lives))
            copied = self._copied
            if came_from is None and not copied.is_of_others(own):
                return self._append(rows, record, without, ids, items=items)
            if copied.goes_on(came_from):
                span = self._append(rows, record, without, ids, items=items)
                copied.count(came_from)
                return span
            with self._noted(came_from, own):
                return self._append(rows, record, without, ids, came_from, items=items)

    def _append(
        self,
        rows: Any,
        record: bytes | None,
        without: Key | None,
        ids: Ids,
        came_from: Told = None,
        *,
        items: bool = False,
    ) -> range:
        reader = self.reader
        if ids == "renumber":
            checks = None if reader.engine is None else self._id_checks
            rows = with_new_ids(rows, reader, checks)
        if reader.ring and reader.trajectory_index.counted is not None:
            reader.trajectory_index.make_way(reader, rows)
        checked = self._checked(rows, without, ids, came_from, items=items)
        assert reader.engine is not None
        span = reader.engine.append(checked, record)
        if ids != "fresh" and self._id_checks is not None:
            self._id_checks.settle(span.stop)
        self._staged = None
        return span

    def _checked(
        self, rows: Any, without: Key | None, ids: Ids, came_from: Told, *, items: bool
    ) -> ArrayRows | TensorRows:
        """Return rows that can be written with these ids; a new storage gets its files first."""
        if (engine := self.reader.engine) is None:
            self.reader.require_open()
            schema = self._given.schema(rows, without, items=items)
            self.initialise(schema, self._copied.first_entry(came_from))
        else:
            engine.right.look()
        checked = self._given.checked(rows, without)
        if ids != "fresh" and self._id_checks is not None:
            self._id_checks.admit(checked.values)
        return checked

    def write_more(self, rows: TensorDictBase, without: Key | None, ids: Ids) -> None:
        """Write more rows than a ring has, in pieces, of which the last ones stay.

        The rows are items of a replay buffer. An error is raised before the first piece is
        written.
        """
        came_from, rows = origin_of(rows), oldest_first(rows)
        with self.turn:
            self._checked(rows, without, ids, came_from, items=True)
            size = self.reader.ring
            for start in range(0, len(rows), size):
                piece = rows[start : start + size]
                if came_from is not None:
                    came_from_rows(piece, *came_from)
                self.write(piece, None, without, ids)

    def append(self, rows: NewRows, record: bytes | None = None) -> range:
        """Append the rows of a collector's run, of which it made the ids; see `Engine.append`."""
        reader = self.reader
        with self.turn:
            index = reader.trajectory_index
            if index.counted is not None and reader.ring:
                index.make_way(reader, range(rows.count))
            span = reader.running().append(rows, record)
            self._staged = None
            return span

    def write_slot(self, slot: SlotRows, version: int, *, watched: bool) -> int:
        """Implement `DiskStorage.extend_slot`."""
        with self.turn:
            reader = self.reader
            engine, index = reader.engine, reader.trajectory_index
            if engine is None or self._staged is not None:
                return -1
            if index.counted is not None and reader.ring:
                index.make_way(reader, range(slot.count))
            return engine.append_slot(slot, version, watched=watched)

    @contextmanager
    def _noted(self, came_from: Told, own: bool) -> Iterator[None]:
        """Record where the rows come from that the context writes; undo it if they are refused."""
        engine, copied, known = self.reader.engine, self._copied, self._copied.copy
        if engine is not None:
            engine.right.require()
            runs = self.reader.runs
        changed = copied.note(came_from, own=own)
        try:
            yield
        except BaseException:
            if changed:
                self.write_runs(runs)
            if engine is not None:
                copied.copy = known
            raise

    @property
    def _run_lives(self) -> bool:
        return self._run is not None and self._run() is not None

    @cached_property
    def _id_checks(self) -> IdChecks | None:
        """The checks of ids that callers write; None if rows have no ids."""
        return IdChecks(self.reader) if says_whose(self.reader.schema) else None


class NoWriter:
    """Stands in the place of a writer over a reader that is none of our own files.

    Whatever would write raises `ReadOnlyStorage`.
    """

    grows = False
    provenance: Mapping[str, Any] = {}

    temporary = False

    def __init__(self, reader: RowReader) -> None:
        self.reader, self.turn = reader, threading.RLock()

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise `ReadOnlyStorage`."""
        reader = self.reader
        raise ReadOnlyStorage(
            f"{reader.path} is read by {type(reader).__name__}, and nothing writes to it here. "
            "Write to another storage."
        )

    def require_no_run(self) -> None:
        """No run writes here."""

    def flush(self) -> None:
        """Nothing is to be shown."""

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()


# What is never closed is closed before the interpreter takes itself apart.
_open: weakref.WeakSet[RowWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for writer in list(_open):
        with writer.turn:  # a thread may still write
            writer.let_go()


def _renew_turns() -> None:
    # In a forked child, where a thread that held one may not exist.
    for writer in list(_open):
        writer.turn = threading.RLock()


os.register_at_fork(after_in_child=_renew_turns)
