"""The interface of a sink: what a collector asks of a storage that its run is written to.

`RowReader` says what can be read, of any rows; this adds what a run needs to write them. The
storages on disk satisfy it as they are, and a storage of another package does that has these
members: no class of ours need be a base of it. ``tests/support/storages/ram_ring.py`` is one in
memory, in a hundred lines.

In the order of a run:

1. a collector is made: it takes the claim, looks at `RowReader.manifest`, ``record`` and rows for a
   run to be continued, reserves space, and begins an entry with the schema;
2. each batch is one `RunWriter.append`: the rows and the record that counts them, all or nothing;
3. a call that changes environments is an event of the run's entry;
4. at the end the last record is put, files are flushed, and the claim ends.

A collector writes from one thread at a time. An exception of a sink reaches its caller: rows that
were appended before count as stored, those of the call that raised do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from tallyroll.storage.engine.columns import CopiedInSteps
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.run_claim import RunClaim


class RowSink(Protocol):
    """Rows that a collector may add to: pass one as ``storage=``."""

    @property
    def mode(self) -> Mode:
        """``"read"`` is refused; in ``"create"`` no run is there before the first row."""

    @property
    def reader(self) -> RowReader:
        """The reader of the rows, which sees each of them as soon as it is appended.

        A run is continued from its ``manifest``, ``record``, ``span`` and ``column``. ``path``
        names the sink in messages, and a batch must fit in ``ring``. ``initialised`` is False
        until there is a schema. ``last_head`` and ``closed`` are asked after the end, too.
        """

    @property
    def writer(self) -> RunWriter:
        """The writer of the rows; it may be the sink itself."""

    def reserve(self, rows: int) -> None:
        """Make sure that ``rows`` rows fit in all, those that are there included.

        Raises:
            StorageFull: they do not, and nothing was changed.
        """

    def flush(self) -> None:
        """Show all rows to other programs; called when a run is over."""


class RunWriter(Protocol):
    """Writes the runs of collectors, one at a time."""

    @property
    def claim(self) -> RunClaim:
        """The claim of the run that is being written, made with the sink's lock and path."""

    @property
    def runs(self) -> RunsOfSink:
        """The entries of the runs, ``manifest["runs"]``."""

    @property
    def in_one_call(self) -> bool:
        """True of a `RowWriter`, to whose files the extension stores few slots in one call.

        Elsewhere False: all rows come as :meth:`append` says, which is a little slower.
        """

    def append(self, rows: CopiedInSteps, record: bytes | None = None) -> range:
        """Append rows, and the record with them: all of it is there afterwards, or nothing.

        Args:
            rows: ``rows.count`` of them, of the schema and never more than a ring has.
                ``rows.as_arrays().values`` has an array [count, ...] for each column, in the
                schema's order, of its ``numpy_dtype``; large ones may be `RowRefs`, which copy
                themselves by ``copy_to(array)``. Their memory is the caller's again afterwards.
            record: what ``reader.record`` returns from now on, with the number of rows then; None
                leaves the last one.

        Returns:
            The rows' numbers, from ``reader.head`` before on.

        Raises:
            WriteError: refused, with nothing written (its subclasses say why).
        """

    def put_record(self, payload: bytes) -> None:
        """Replace the record, without rows."""


class RunsOfSink(Protocol):
    """Keeps an entry of JSON for each run, and each time that one was continued."""

    def require_schema(self, schema: Schema) -> None:
        """Raise `SchemaMismatch` unless rows of ``schema`` fit a sink that has a schema."""

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Add the entry ``{**provenance, "first_row": rows so far}``; it is the last one then.

        A new sink has this schema from now on.

        Raises:
            SchemaMismatch: it has another one; nothing was changed.
        """

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove the entry ``run``, which got no rows, if it is there."""

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add a call of environments to the entry ``run``; return the entry as it is then."""


class BufferedWriter(RunWriter, Protocol):
    """Writes what comes through a replay buffer, too: asked of a sink that is under one.

    The collector gives rows to the buffer, which writes them to the sink.
    """

    def stage_record(self, payload: bytes) -> None:
        """Keep a record that the next commit of rows writes, by any caller."""

    def fresh_ids(self) -> AbstractContextManager[None]:
        """Write rows that a replay buffer gives with their ids unchecked, within the context."""


def absent(kind: type, found: object) -> list[str]:
    """Return which members of one of these protocols an object does not have.

    It is looked for, and never called: a property may raise until there is a schema.
    """
    there = dir(found)
    names = [name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if name not in there and not hasattr(found, name)]
