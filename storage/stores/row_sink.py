"""Protocol of a sink, the storage that a collector writes its run to.

`RowReader` defines the read side, for rows of any kind. This module adds the members that a run
needs to write rows. The storages on disk satisfy the protocol. A storage of another package
satisfies it by having these members; it need not derive from a class of Tallyroll.
``tests/support/storages/ram_ring.py`` is an in-memory sink in a hundred lines.

The steps of a run, in order:

1. The constructor of a collector takes the claim. It searches `RowReader.manifest`, ``record`` and
   the rows for a run to continue, reserves space, and begins an entry with the schema.
2. Each batch is one `RunWriter.append`, which stores the rows and the record that counts them, or
   nothing. If rows are on a device, a `TensorWriter` gets them by ``append_tensors`` instead.
3. A call that changes environments is an event of the run's entry.
4. At the end the last record is written, files are flushed, and the claim ends.

A collector writes from one thread at a time. An exception of a sink propagates to the caller. Rows
of earlier calls count as stored. Rows of the call that raised do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from tallyroll.storage.engine.columns import StepwiseRows
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.run_claim import RunClaim


class RowSink(Protocol):
    """Storage that a collector can append rows to. Pass it to the collector as ``storage=``."""

    @property
    def mode(self) -> Mode:
        """The mode in which the sink was opened. A collector refuses ``"read"``.

        With ``"create"``, the sink has no run before its first row.
        """

    @property
    def reader(self) -> RowReader:
        """The reader of the rows, which sees each row as soon as it is appended.

        A collector continues a run from ``manifest``, ``record``, ``span`` and ``column``. ``path``
        names the sink in messages, and a batch must fit in ``ring``. ``initialised`` is False until
        there is a schema. A collector also reads ``last_head`` and ``closed`` after the sink is
        closed.
        """

    @property
    def writer(self) -> RunWriter:
        """The writer of the rows, which may be the sink itself."""

    def reserve(self, rows: int) -> None:
        """Ensure that ``rows`` rows in all fit, including existing rows.

        Raises:
            StorageFull: the rows do not fit; nothing was changed.
        """

    def flush(self) -> None:
        """Make all rows visible to other programs. A collector calls this when a run is over."""


class RunWriter(Protocol):
    """Writer of collectors' runs, one at a time."""

    @property
    def claim(self) -> RunClaim:
        """The claim of the run that is being written. The claim uses the sink's lock and path."""

    @property
    def runs(self) -> RunsOfSink:
        """The entries of the runs, ``manifest["runs"]``."""

    @property
    def in_one_call(self) -> bool:
        """True for a `RowWriter`, for which the C extension can store a few slots in one call.

        Other sinks return False. All their rows come through :meth:`append`, which is a little
        slower, or through `TensorWriter.append_tensors`.
        """

    def append(self, rows: StepwiseRows, record: bytes | None = None) -> range:
        """Append rows and the record atomically.

        Args:
            rows: ``rows.count`` rows of the schema, never more than a ring has slots.
                ``rows.as_arrays().values`` has an array [count, ...] for each column, in the order
                of the schema and with its ``numpy_dtype``. Large ones may be `RowRefs`, which copy
                themselves with ``copy_to(array)``. The caller may reuse their memory after the
                call.
            record: the payload that ``reader.record`` returns from now on, with the number of rows
                after the append; None keeps the last record.

        Returns:
            The numbers of the rows, starting at the previous ``reader.head``.

        Raises:
            WriteError: the write was refused and nothing was written (see the subclass).
        """

    def put_record(self, payload: bytes) -> None:
        """Replace the record without writing rows."""


class TensorWriter(RunWriter, Protocol):
    """Writer that also accepts rows as tensors on a device. The method is optional for a sink."""

    def append_tensors(
        self, columns: Mapping[Key, torch.Tensor], at: int, record: bytes | None = None
    ) -> range:
        """Append rows and the record atomically, as :meth:`append` does.

        A collector calls this method instead of :meth:`append` if a column of the rows is on a
        device. The columns fit the schema. Flags and the columns of ``"collector"`` are on the
        host.

        Args:
            columns: a tensor [count, ...] for each column of the schema, in its order, with its
                dtype. The device may still be computing them. The caller may reuse the memory of
                those on the host after the call.
            at: the number of the first row, which is ``reader.head``.
            record: see :meth:`append`.

        Returns:
            The numbers of the rows.

        Raises:
            NotAnAppend: the next row has another number than ``at``; nothing was written.
            WriteError: the write was refused and nothing was written.
        """


class RunsOfSink(Protocol):
    """JSON entries of runs, one for each start or continuation of a run."""

    def require_schema(self, schema: Schema) -> None:
        """Raise `SchemaMismatch` if the sink has a schema that rows of ``schema`` do not fit."""

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Append the entry ``{**provenance, "first_row": rows so far}``, as the last entry.

        A new sink adopts the schema.

        Raises:
            SchemaMismatch: the sink has another schema; nothing was changed.
        """

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove the entry ``run``, which has no rows, if it exists."""

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add an environment call to the entry ``run``; return the updated entry."""


class BufferedWriter(RunWriter, Protocol):
    """Writer that also accepts rows from a replay buffer. A sink under a buffer needs one.

    The collector passes rows to the buffer, which writes them to the sink.
    """

    def stage_record(self, payload: bytes) -> None:
        """Stage a record that the next commit of rows, by any caller, also writes."""

    def fresh_ids(self) -> AbstractContextManager[None]:
        """Write rows from a replay buffer without checking their ids, within the context."""


def absent(kind: type, found: object) -> list[str]:
    """Return the members of the protocol ``kind`` that ``found`` lacks.

    Members are looked up but not called, because a property may raise until there is a schema.
    """
    there = dir(found)
    names = [name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if name not in there and not hasattr(found, name)]
