"""The files of a storage as its one writer has them open: create, enlarge, flush and close."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from tallyroll.storage.engine.commit_engine import Durability, Engine
from tallyroll.storage.engine.creation import create_new
from tallyroll.storage.engine.ring import in_use
from tallyroll.storage.errors import SchemaMismatch, StorageFull
from tallyroll.storage.files.paths import told
from tallyroll.storage.files.rewind_history import settled
from tallyroll.storage.formats.space import require_room
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.schema import Schema


class OpenedFiles:
    """The files of a `FileReader`, open for a writer.

    Args:
        reader: the reader of the files.
        capacity: the number of rows to reserve space for, or 0.
        max_size: the number of slots of a ring; None keeps every row.
        durability: the failures that a commit survives; see `DiskStorage`.
        accept_copy: open a copy of a storage that was open for writing.
    """

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
        """Lock that is held while rows are written and while files are created or replaced."""
        if reader.mode == "create":
            reader.format.refuse_existing()
            reader.ring = max_size or 0
            return
        reader.open(writable=reader.mode == "append", accept_copy=accept_copy, **self._options)
        try:
            self._make_ready(max_size)
        except BaseException:
            reader.close()
            raise

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

    @told
    def create(self, schema: Schema, runs: list[Any], id: str | None = None) -> None:
        """Create the files; a copy of another storage gets its ``id``."""
        reader = self.reader
        made = create_new(reader.format, schema, runs, id=id, ring=reader.ring, **self._options)
        reader.use(*made)

    @told
    def require_room(self, schema: Schema, rows: int) -> None:
        """Raise unless the disk has room for so many rows, or for the capacity if it is larger.

        Raises:
            StorageFull: the rows do not fit. The message states the missing space.
        """
        reader, capacity = self.reader, self._capacity
        if not reader.format.grows and 0 < capacity < rows:
            raise StorageFull(
                f"{self.path} is to be made for {capacity} rows, and {rows} are wanted. Nothing "
                f"was written; give capacity={rows} or more, or call reserve({rows})."
            )
        rows = in_use(max(rows, capacity), reader.ring)
        require_room(reader.format, schema, rows)

    def require_schema(self, schema: Schema) -> None:
        """Raise `SchemaMismatch` unless rows of ``schema`` fit."""
        reader = self.reader
        reader.running().right.require()
        if different := reader.schema.differences(schema):
            raise SchemaMismatch(
                f"{self.path} has other columns than the data: {'; '.join(different)}. Nothing "
                "was written; make the data fit, or create another storage."
            )

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

    @told
    def flush(self) -> None:
        """Implement `DiskStorage.flush`."""
        with self.turn:
            self.reader.require_open()
            if self.reader.engine is not None:
                self.reader.engine.flush()

    @told
    def settle(self) -> None:
        """Wait until all committed rows are on the disk."""
        with self.turn:
            self.reader.running().settle()

    @told
    def leave(self, finish: Callable[[], None] | None = None) -> None:
        """Close the files; see `Engine.close`."""
        if (engine := self.reader.let_go()) is not None:
            engine.close(finish)
