"""The files that a writer has open: create, enlarge, flush and close them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.creation import create_new
from tallyroll.storage.engine.once_columns import OnceColumn, stored_schema
from tallyroll.storage.engine.ring import in_use
from tallyroll.storage.errors import SchemaMismatch, StorageFull
from tallyroll.storage.files.paths import translates_errors
from tallyroll.storage.files.rewind_history import settled
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.schema import Schema

PlanOnce: TypeAlias = Callable[[Schema], Sequence[OnceColumn]]
"""Function that returns the columns of a new storage to store once."""


def plan_once_like(*sources: RowReader) -> PlanOnce | None:
    """Return the plan of a copy that stores the columns once that all ``sources`` store once."""
    first, *others = [each.once if isinstance(each, FileReader) else () for each in sources]
    once = [each for each in first if all(each in other for other in others)]
    if not once:
        return None

    def plan(schema: Schema) -> list[OnceColumn]:
        return [each for each in once if {each.key, each.next_key} <= {*schema.keys}]

    return plan


class OpenedFiles:
    """The files of a `FileReader`, open for a writer.

    Args:
        reader: the reader of the files.
        capacity: the number of rows to reserve space for, or 0.
        max_size: the number of slots of a ring, or 0 to keep every row. With None, new files keep
            every row, and existing files keep their own setting.
        durability: the failures that a commit survives; see `DiskStorage`.
        accept_copy: True to open a copy of a storage that was open for writing.
        once: function that selects the columns that a new storage stores once. None selects none.
        declared_once: like ``once``, but for a schema that a collector declares. Ignored if
            ``once`` is given.
    """

    @translates_errors
    def __init__(
        self,
        reader: FileReader,
        *,
        capacity: int = 0,
        max_size: int | None = None,
        durability: Durability = "process",
        accept_copy: bool = False,
        once: PlanOnce | None = None,
        declared_once: PlanOnce | None = None,
    ) -> None:
        self.path, self.reader, self._plan_once = reader.path, reader, once
        self._plan_declared = once or declared_once
        self._capacity, self.durability = capacity, durability
        self.turn = threading.RLock()
        """Lock that is held while rows are written and while files are created or replaced."""
        if reader.mode == "create":
            reader.format.refuse_existing()
            reader.plan_ring(max_size or 0)
            return
        reader.open(writable=reader.mode == "append", accept_copy=accept_copy, **self._options)
        try:
            self._make_ready(max_size)
        except BaseException:
            reader.close()
            raise

    def renew_turn(self) -> None:
        """Replace the lock in a forked child, where the thread that held it may not exist."""
        self.turn = threading.RLock()

    @property
    def once(self) -> bool:
        """True if the storage has columns that are stored once, or must have some."""
        engine = self.reader.engine
        return self._plan_once is not None if engine is None else bool(engine.once)

    @property
    def _options(self) -> dict[str, Any]:
        return {"capacity": self._capacity, "durability": self.durability}

    def _make_ready(self, wanted: int | None) -> None:
        reader = self.reader
        if wanted is not None and wanted != reader.ring:
            given = f"max_size={wanted} was given" if wanted else "max_size was not given"
            there, remedy = "keeps every row", "Leave max_size out"
            if ring := reader.ring:
                there, remedy = f"is a ring of {ring} rows", f"Give max_size={ring}"
            raise ValueError(f"{given}, but {self.path} {there}. {remedy}, or give another path.")
        if reader.mode == "append":
            self._finish_rewind()
        if reader.ring and reader.mode == "append" and "finalized" in reader.manifest:
            # Drop checksums of rows that will be overwritten.
            kept = {k: v for k, v in reader.manifest.items() if k != "finalized"}
            reader.write_manifest(kept)

    def _finish_rewind(self) -> None:
        """Complete the rewind of a writer that was killed after it had committed the rewind."""
        reader, engine = self.reader, self.reader.running()
        if (rewind := engine.counts.undone) is not None:
            reader.require_numbered_rewinds()
            engine.finish_rewind(lambda: reader.write_manifest(settled(reader.manifest, rewind)))

    @translates_errors
    def create(
        self, schema: Schema, runs: list[Any], id: str | None = None, *, declared: bool = False
    ) -> None:
        """Create the files; a copy of another storage gets its ``id``.

        ``declared`` is True if a collector declares the schema.
        """
        reader = self.reader
        options = {"once": self._planned(schema, declared=declared), **self._options}
        made = create_new(reader.format, schema, runs, id=id, ring=reader.ring, **options)
        reader.use(*made)

    @translates_errors
    def require_room(self, schema: Schema, rows: int) -> None:
        """Raise unless the disk has room for ``rows`` rows, or for the capacity if it is larger.

        Raises:
            StorageFull: the rows do not fit. The message states the missing space.
        """
        reader, capacity = self.reader, self._capacity
        if not reader.format.grows and 0 < capacity < rows:
            raise StorageFull(
                f"{self.path} would be created for {capacity} rows, but {rows} are needed. Nothing "
                f"was written. Give capacity={rows} or more, or call reserve({rows})."
            )
        rows = in_use(max(rows, capacity), reader.ring)
        require_room(reader.format, stored_schema(schema, self._planned(schema)), rows)

    def _planned(self, schema: Schema, *, declared: bool = False) -> Sequence[OnceColumn]:
        plan = self._plan_declared if declared else self._plan_once
        return () if plan is None else plan(schema)

    def require_schema(self, schema: Schema) -> None:
        """Raise `SchemaMismatch` unless rows of ``schema`` fit."""
        reader = self.reader
        reader.running().right.require()
        if different := reader.schema.differences(schema):
            raise SchemaMismatch(
                f"{self.path} has other columns than the data: {'; '.join(different)}. Nothing was "
                "written. Change the data, or create another storage."
            )

    @translates_errors
    def reserve(self, rows: int) -> None:
        """Implement `DiskStorage.reserve`."""
        with self.turn:
            self.reader.require_open()
            engine = self.reader.engine
            if engine is None:
                self._capacity = max(self._capacity, rows)
                return
            engine.right.require()
            if self.reader.format.grows or rows <= engine.space.columns.room:
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

    @translates_errors
    def flush(self) -> None:
        """Implement `DiskStorage.flush`."""
        with self.turn:
            self.reader.require_open()
            if self.reader.engine is not None:
                self.reader.engine.flush()

    @translates_errors
    def settle(self) -> None:
        """Wait until all committed rows are on the disk."""
        with self.turn:
            self.reader.running().settle()

    @translates_errors
    def leave(self, finish: Callable[[], None] | None = None) -> None:
        """Close the files; see `Engine.close`."""
        if (engine := self.reader.detach_engine()) is not None:
            engine.close(finish)
