"""The writer of Tallyroll's own files, which checks, appends and commits rows."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NoReturn

from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.columns import ArrayRows, NewRows, TensorRows
from tallyroll.storage.engine.ring import in_use, require_slots
from tallyroll.storage.errors import ReadOnlyStorage, StorageFull
from tallyroll.storage.files.checksums import checksums
from tallyroll.storage.files.paths import translates_errors
from tallyroll.storage.files.record_slots import check_record_size
from tallyroll.storage.readers.row_reader import RowReader, SlotColumn
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.origin import RowOrigin, origin_of
from tallyroll.storage.rows.origin import came_from as came_from_rows
from tallyroll.storage.rows.progress import MoreDone
from tallyroll.storage.rows.slot_order import oldest_first
from tallyroll.storage.stores.input_rows import InputRows, schema_of, with_new_ids
from tallyroll.storage.stores.opened_files import OpenedFiles
from tallyroll.storage.stores.run_claim import RunClaim
from tallyroll.storage.stores.run_entries import RunEntries
from tallyroll.storage.trajectories.columns import missing
from tallyroll.storage.trajectories.content import NAMING
from tallyroll.storage.trajectories.id_checks import IdChecks, Ids
from tallyroll.storage.trajectories.leaves import hash_of


class FirstRows:
    """The first rows of a new storage, which determine its schema and the checks of later rows.

    Args:
        opened: the files of the storage, which do not exist yet.
        rows: a TensorDict, or arrays by key.
        without: a column to leave out.
        ids: see `DiskStorage.extend`.
        items: True if the rows come from a replay buffer; each may then consist of several
            transitions.

    Raises:
        InvalidSchema: the storage cannot hold the columns.
        WriteError: the rows cannot be written, not even one by one.
        StorageFull: the rows do not fit on the disk.
    """

    def __init__(
        self, opened: OpenedFiles, rows: Any, without: Key | None, ids: Ids, *, items: bool
    ) -> None:
        self._reader = reader = opened.reader
        reader.require_open()
        self.schema = schema = schema_of(rows, without, items=items)
        reader.format.check(schema)
        self.input_rows, self.id_checks = InputRows(reader, schema), IdChecks.of(reader, schema)
        self.checked = self.input_rows.checked(rows, without)
        if ids != "fresh" and self.id_checks is not None:
            self.id_checks.admit(self.checked)
        opened.require_room(schema, self.checked.count)

    def require_capacity(self, record: bytes | None) -> None:
        """Raise unless the rows fit in the ring and ``record`` fits in its slot.

        Raises:
            BatchTooLong: the ring has fewer slots than there are rows.
            RecordTooLarge: the record is larger than its slot.
        """
        require_slots(self._reader.format.path, self._reader.ring, self.checked.count)
        if record is not None:
            check_record_size(record)


class RowWriter:
    """Writer of rows to opened files; the ``writer`` of a storage."""

    # __del__ also runs if the constructor raised.
    _is_made = False

    def __init__(self, opened: OpenedFiles) -> None:
        self.opened, self.reader = opened, opened.reader
        self.path, self.durability = opened.path, opened.durability
        self.files = self.reader.format
        """The format, which names the files."""
        self.grows = self.files.grows
        """True if the storage can grow while it is open."""
        self.runs, self.claim = RunEntries(opened), RunClaim(opened)
        self.temporary = False
        """True for a temporary storage, which ends with its process and need not be closed."""
        self.tell: Callable[[range], None] | None = None
        """Callback that replay buffers set to receive the row numbers of each :meth:`append`."""
        self.closing: list[Callable[[], None]] = []
        """Callbacks that :meth:`close` calls to write files alongside the rows."""
        self._staged: bytes | None = None
        self._fresh_in: int | None = None
        """The id of the thread inside :meth:`fresh_ids`, whose trajectory ids are not checked."""
        self._is_made = True
        _open.add(self)

    def mark_temporary(self) -> None:
        """Let the storage end with its process, even if it is not closed."""
        self.temporary = True

    def call_after_appends(self, callback: Callable[[range], None]) -> None:
        """Pass the row numbers of each append to ``callback``."""
        self.tell = callback

    @property
    def in_one_call(self) -> bool:
        """True if the C extension can store a few slots in this writer's files in one call."""
        return not self.opened.once

    @property
    def turn(self) -> threading.RLock:
        """Lock that is held while rows are written and while files are created or replaced."""
        return self.opened.turn

    # --- rows -------------------------------------------------------------------------------------

    def append(self, rows: NewRows, record: bytes | None = None) -> range:
        """Append rows that fit the schema and whose trajectory ids need no check.

        Collectors, which assign the ids themselves, call this method. A staged record is dropped.

        Args:
            rows: the rows, of any kind.
            record: see `DiskStorage.extend`.

        Returns:
            The numbers of the rows; see `Engine.append`.

        Raises:
            WriteError: the write was refused and nothing was written.
        """
        reader = self.reader
        with self.opened.turn:
            index, engine = reader.trajectory_index, reader.engine or reader.running()
            if index.counted is not None and reader.ring:
                index.make_way(reader, range(rows.count))
            span = engine.append(rows, record)
            self._staged = None
        if self.tell is not None:
            self.tell(span)
        return span

    def write(
        self,
        rows: Any,
        record: bytes | None = None,
        without: Key | None = None,
        ids: Ids = "check",
        *,
        items: bool = False,
    ) -> range:
        """Implement `DiskStorage.extend`.

        Args:
            rows: see `DiskStorage.extend`.
            record: see `DiskStorage.extend`; None: the staged record, if there is one.
            without: a column to leave out.
            ids: see `DiskStorage.extend`.
            items: True if the rows come from a replay buffer; each may then consist of several
                transitions.
        """
        kind, came_from = type(rows), None
        if kind is TensorDict or (kind is not dict and isinstance(rows, TensorDictBase)):
            came_from, rows = origin_of(rows), oldest_first(rows)
        with self.opened.turn:
            claim, copied = self.claim, self.runs.copied
            if ids != "fresh":
                claim.require_none()
            record = self._staged if record is None else record
            own = record is not None or (ids == "fresh" and claim.is_taken)
            if came_from is None and not copied.needs_new_entry(own):
                return self._write(rows, record, without, ids, None, items)
            if copied.goes_on(came_from):
                span = self._write(rows, record, without, ids, None, items)
                copied.count(came_from)
                return span
            with self.runs.noted(came_from, own):
                return self._write(rows, record, without, ids, came_from, items)

    def write_items(self, rows: TensorDictBase, without: Key | None) -> None:
        """Implement `DiskStorage.set`: write items from a replay buffer as `write` does.

        More rows than a ring has slots are written in pieces, so that the last rows remain. Errors
        are raised before the first piece is written.
        """
        ids: Ids = "fresh" if self._fresh_in == threading.get_ident() else "check"
        ring = self.reader.ring
        if not 0 < ring < len(rows):
            self.write(rows, None, without, ids, items=True)
            return
        came_from, rows = origin_of(rows), oldest_first(rows)
        with self.opened.turn:
            if self.reader.engine is None:
                self._begin(FirstRows(self.opened, rows, without, ids, items=True), came_from)
            else:
                self._checked(rows, without, ids)
            for start in range(0, len(rows), ring):
                piece = rows[start : start + ring]
                if came_from is not None:
                    came_from_rows(piece, *came_from)
                self.write(piece, None, without, ids)

    @contextmanager
    def fresh_ids(self) -> Iterator[None]:
        """Write rows from a replay buffer without checking their ids, within the context.

        The caller numbers trajectories as collectors do: see ``extend(..., ids="fresh")``.
        """
        self._fresh_in = threading.get_ident()
        try:
            yield
        finally:
            self._fresh_in = None

    def _write(
        self,
        rows: Any,
        record: bytes | None,
        without: Key | None,
        ids: Ids,
        came_from: RowOrigin,
        items: bool,
    ) -> range:
        reader = self.reader
        if ids == "renumber":
            checks = None if reader.engine is None else self._id_checks
            rows = with_new_ids(rows, reader, checks)
        if reader.ring and reader.trajectory_index.counted is not None:
            reader.trajectory_index.make_way(reader, rows)
        if reader.engine is None:
            first = FirstRows(self.opened, rows, without, ids, items=items)
            first.require_capacity(record)
            checked = self._begin(first, came_from)
        else:
            checked = self._checked(rows, without, ids)
        assert reader.engine is not None
        span = reader.engine.append(checked, record)
        if ids != "fresh" and (watch := self._id_checks) is not None:
            watch.settle(span.stop)
        self._staged = None
        return span

    def _begin(self, first: FirstRows, came_from: RowOrigin) -> ArrayRows | TensorRows:
        """Create the files of a new storage for its first rows, and return the checked rows."""
        self.runs.begin(first.schema, self.runs.copied.first_entry(came_from))
        self.input_rows, self._id_checks = first.input_rows, first.id_checks
        return first.checked

    def _checked(self, rows: Any, without: Key | None, ids: Ids) -> ArrayRows | TensorRows:
        """Return the rows in a writable form; check the right to write, the rows and the ids."""
        engine = self.reader.engine
        assert engine is not None
        if not engine.right.look_at:
            engine.right.require()
        checked = self.input_rows.checked(rows, without)
        if ids != "fresh" and (watch := self._id_checks) is not None:
            watch.admit(checked)
        return checked

    @cached_property
    def input_rows(self) -> InputRows:
        """The converter of callers' rows to `NewRows`."""
        return InputRows(self.reader, self.reader.schema)

    @cached_property
    def _id_checks(self) -> IdChecks | None:
        """The checks of callers' trajectory ids, or None if the rows have no ids."""
        return IdChecks.of(self.reader, self.reader.schema)

    def rows_changed(self) -> None:
        """Drop cached state about rows that have been replaced."""
        self.__dict__.pop("_id_checks", None)
        self.runs.copied.forget()
        self._staged = None

    def empty(self) -> None:
        """Invalidate every row of a ring. Later rows continue the numbering."""
        reader = self.reader
        with self.opened.turn:
            engine = reader.running()
            engine.right.require()
            reader.trajectory_index.make_way(reader, range(reader.ring))
            engine.empty()

    # --- the record -------------------------------------------------------------------------------

    def put_record(self, payload: bytes) -> None:
        """Commit a record without rows.

        Raises:
            RecordTooLarge: the record is larger than its slot.
            NotInitialised: the storage has no schema, and hence no files, yet.
        """
        with self.opened.turn:
            self.reader.running().put_record(payload)
            self._staged = None

    def stage_record(self, payload: bytes) -> None:
        """Stage a record that the next commit of rows, by any caller, also writes.

        Raises:
            RecordTooLarge: the record is larger than its slot.
        """
        self.reader.require_open()
        check_record_size(payload)
        self._staged = bytes(payload)

    # --- the end ----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Implement `DiskStorage.flush`."""
        self.opened.flush()

    def finalize(self, progress: MoreDone | None = None) -> None:
        """Implement `DiskStorage.finalize`."""
        reader = self.reader
        with self.opened.turn:
            engine = reader.running()
            engine.right.require()
            columns = {key: SlotColumn(reader, key) for key in engine.schema.keys}
            rows = in_use(engine.counts.head, reader.ring)
            done = {
                "at": datetime.now(UTC).isoformat(timespec="seconds"),
                "head": engine.counts.head,
                "checksums": checksums(columns, rows, progress),
            }
            if not missing(engine.schema, NAMING):
                done["content"] = hash_of(reader, progress=progress)
            try:
                reader.write_manifest({**reader.manifest, "finalized": done})
            except StorageFull:
                self.close()
                raise
            schema = engine.schema
            self.close(lambda: self.files.finish(schema, rows))

    @translates_errors
    def close(self, finish: Callable[[], None] | None = None) -> None:
        """Trim the files, call ``finish``, and release the writer lock."""
        reader = self.reader
        with self.opened.turn:
            try:
                if reader.engine is not None and reader.engine.right.may_write:
                    reader.trajectory_index.save(reader, synced=self.durability == "power")
                    self.runs.settle()
                    for each in self.closing:
                        each()
            finally:
                self.opened.leave(finish)

    def close_unclosed(self) -> None:
        """Close a storage that the user did not close, and issue a ResourceWarning."""
        if not self._is_made or (engine := self.reader.engine) is None:
            return
        if engine.right.may_write and not self.temporary:
            warnings.warn(
                f"unclosed storage {self.path}", ResourceWarning, stacklevel=3, source=self
            )
        self.opened.leave()

    def __del__(self) -> None:
        self.close_unclosed()


class ReadOnlyWriter:
    """Writer stub for a reader of files that Tallyroll does not write.

    Every write raises `ReadOnlyStorage`.
    """

    grows = False
    temporary = False

    def __init__(self, reader: RowReader) -> None:
        self.reader, self.turn = reader, threading.RLock()
        self.tell: Callable[[range], None] | None = None

    def call_after_appends(self, callback: Callable[[range], None]) -> None:
        """Pass the row numbers of each append to ``callback``."""
        self.tell = callback

    def __getattr__(self, name: str) -> Any:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise `ReadOnlyStorage`."""
        reader = self.reader
        raise ReadOnlyStorage(
            f"{reader.path} is read by {type(reader).__name__}, and nothing writes to it here. "
            "Write to another storage."
        )

    def flush(self) -> None:
        """Do nothing, because there are no rows to make visible."""

    def close(self) -> None:
        """Close the reader."""
        self.reader.close()


# Close open storages before the interpreter shuts down.
_open: weakref.WeakSet[RowWriter] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for writer in list(_open):
        with writer.turn:  # a thread may still write
            writer.close_unclosed()


def _renew_turns() -> None:
    # In a forked child, the thread that held a lock may not exist.
    for writer in list(_open):
        writer.opened.renew_turn()


os.register_at_fork(after_in_child=_renew_turns)
