"""Writer of rows to the memory of a device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.storage.engine.columns import ArrayRows, StepwiseRows
from tallyroll.storage.engine.ring import require_slots
from tallyroll.storage.errors import NotAnAppend, RowsMismatch, SchemaMismatch
from tallyroll.storage.ext.device.device_rows import DeviceRows, as_tensor
from tallyroll.storage.ext.device.mirror import Mirror
from tallyroll.storage.files.copied_runs import is_collected
from tallyroll.storage.files.manifest import run_of
from tallyroll.storage.rows.batch_check import fitting_tensors
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.slot_order import oldest_first
from tallyroll.storage.rows.tensordict_builder import leaves
from tallyroll.storage.rows.transfers import HOST, move_columns
from tallyroll.storage.stores.input_rows import schema_of
from tallyroll.storage.stores.run_claim import RunClaim


class DeviceWriter:
    """`BufferedWriter` of a `DeviceRows`, and the entries of its runs."""

    in_one_call = False

    def __init__(self, reader: DeviceRows, mirror: Mirror | None = None) -> None:
        self.reader, self.mirror = reader, mirror
        self.claim = RunClaim(reader) if mirror is None else mirror.writer.claim
        self._tell: Callable[[range], None] | None = None
        self._staged: bytes | None = None
        self._fresh_in: int | None = None
        """The id of the thread inside :meth:`fresh_ids`."""

    @property
    def runs(self) -> DeviceWriter:
        """The writer itself, which keeps the entries of runs."""
        return self

    def call_after_appends(self, callback: Callable[[range], None]) -> None:
        """Pass the row numbers of each append to ``callback``."""
        self._tell = callback

    # --- rows -------------------------------------------------------------------------------------

    def append(self, rows: StepwiseRows, record: bytes | None = None) -> range:
        """Append rows of a run as `RunWriter.append` does."""
        arrays = [np.asarray(value) for value in rows.as_arrays().values]
        with self.reader.turn:
            self.reader.require_open()
            span = self._commit(list(map(as_tensor, arrays)), record, rows)
        if self._tell is not None:
            self._tell(span)
        return span

    def append_tensors(
        self, columns: Mapping[Key, torch.Tensor], at: int, record: bytes | None = None
    ) -> range:
        """Append rows of a run as `TensorWriter.append_tensors` does."""
        reader = self.reader
        with reader.turn:
            reader.require_open()
            if at != reader.head:
                raise NotAnAppend(
                    f"at: expected {reader.head:,}, the number of the next row of {reader.path}, "
                    f"got {at:,}. Nothing was written. Append after the last row."
                )
            span = self._commit(fitting_tensors(columns, reader.schema, reader.path), record)
        if self._tell is not None:
            self._tell(span)
        return span

    def extend(self, rows: TensorDictBase) -> range:
        """Implement `DeviceStorage.extend`."""
        with self.reader.turn:
            span = self._write(rows, None)
        if self._tell is not None:
            self._tell(span)
        return span

    def write_items(self, rows: TensorDictBase, without: Key | None) -> None:
        """Append rows from a replay buffer, in pieces if there are more rows than slots.

        ``without`` is a column to leave out.
        """
        ring, rows = self.reader.ring, oldest_first(rows)
        with self.reader.turn:
            for start in range(0, len(rows), ring):
                self._write(rows[start : start + ring], without)

    def _write(self, rows: TensorDictBase, without: Key | None) -> range:
        reader = self.reader
        reader.require_open()
        own = self._fresh_in == threading.get_ident()
        if not own:
            self.claim.require_none()
        if not isinstance(rows, TensorDictBase):
            raise RowsMismatch(f"rows: expected a TensorDict [N], got {type(rows).__name__}.")
        schema = reader.schema if reader.initialised else schema_of(rows, without)
        values = self._values_of(rows, without, schema)
        require_slots(reader.path, reader.ring, len(values[0]))
        if not reader.initialised:
            self.begin(schema)
        elif self.mirror is None and not own and is_collected(reader.entries[-1]):
            reader.entries.append(run_of(reader.head, {}))  # the rows are not of that run
        if self.mirror is None:
            return self._commit(values, self._staged)
        record, writer = self._staged, self.mirror.writer
        arrays = dict(zip(schema.keys, _arrays_of(values), strict=True))
        return self._commit_to_mirror_first(
            values, record, lambda: writer.write(arrays, record, ids="fresh")
        )

    def _values_of(
        self, rows: TensorDictBase, without: Key | None, schema: Schema
    ) -> list[torch.Tensor]:
        """Return the columns of a TensorDict [N], in the order of the schema.

        Raises:
            RowsMismatch: the columns, dtypes or shapes differ from the schema.
        """
        if not rows.batch_dims:
            raise RowsMismatch(
                "rows: expected a batch size [N], got []. Use unsqueeze(0) for one row."
            )
        found = leaves(rows)
        if without is not None:
            found.pop(without, None)
        return fitting_tensors(found, schema, self.reader.path)

    def _commit(
        self,
        values: Sequence[torch.Tensor],
        record: bytes | None,
        rows: StepwiseRows | None = None,
    ) -> range:
        """Append rows with the record, to the mirror too. ``rows`` are the same rows in arrays."""
        mirror = self.mirror
        require_slots(self.reader.path, self.reader.ring, len(values[0]))
        if mirror is None:
            return self._write_to_device(values, record)
        if len(values[0]) > mirror.lag:
            new = ArrayRows(_arrays_of(values)) if rows is None else rows
            return self._commit_to_mirror_first(
                values, record, lambda: mirror.writer.append(new, record)
            )
        # The caller may reuse the memory of arrays after the call.
        arrays = [
            each.copy() if value.device.type == "cpu" else each
            for each, value in zip(_arrays_of(values), values, strict=True)
        ]
        mirror.admit(len(values[0]))
        span = self._write_to_device(values, record)
        mirror.put(ArrayRows(arrays), span.start, record)
        return span

    def _commit_to_mirror_first(
        self, values: Sequence[torch.Tensor], record: bytes | None, commit: Callable[[], range]
    ) -> range:
        """Commit rows to the mirror by ``commit``, and then write them to the device.

        If the device fails, the rows count as written, because the disk has them.
        """
        reader, mirror = self.reader, self.mirror
        assert mirror is not None
        mirror.wait()
        mirror.require_next(start := reader.head)
        try:
            commit()
            return self._write_to_device(values, record)
        except BaseException:
            if start < mirror.committed:
                reader.skip_to(mirror.committed)
            raise

    def _write_to_device(self, values: Sequence[torch.Tensor], record: bytes | None) -> range:
        """Write rows with the record to the device."""
        reader = self.reader
        found = reader.moved(values)
        reader.trajectory_index.make_way(reader, range(len(found[0])))
        span = reader.write(found)
        if record is not None:
            reader.newest = reader.head, bytes(record)
        self._staged = None
        return span

    def empty(self) -> None:
        """Invalidate every row. Later rows continue the numbering."""
        reader = self.reader
        with reader.turn:
            reader.require_open()
            if self.mirror is not None:
                self.mirror.wait()
                self.mirror.writer.empty()
            reader.trajectory_index.make_way(reader, range(reader.ring))
            reader.empty()

    # --- the record -------------------------------------------------------------------------------

    def put_record(self, payload: bytes) -> None:
        """Replace the record without writing rows."""
        if self.mirror is not None:
            self.mirror.wait()
            self.mirror.writer.put_record(payload)
        self.reader.newest = self.reader.head, bytes(payload)

    def stage_record(self, payload: bytes) -> None:
        """Stage a record that the next commit of rows, by any caller, also writes."""
        self._staged = bytes(payload)

    @contextmanager
    def fresh_ids(self) -> Iterator[None]:
        """Write rows of a run from a replay buffer, within the context."""
        self._fresh_in = threading.get_ident()
        try:
            yield
        finally:
            self._fresh_in = None

    # --- the entries of runs ----------------------------------------------------------------------

    def require_schema(self, schema: Schema) -> None:
        """Raise `SchemaMismatch` if rows of ``schema`` do not fit."""
        if found := self.reader.schema.differences(schema):
            raise SchemaMismatch(
                f"these rows do not fit {self.reader.path}: {'; '.join(found)}. Make another "
                "DeviceStorage for them."
            )

    def begin(self, schema: Schema, provenance: Mapping[str, Any] | None = None) -> None:
        """Append an entry; a new storage adopts the schema and allocates its memory.

        Raises:
            NotEnoughMemory: the ring does not fit on the device; nothing was changed.
            SchemaMismatch: the storage has another schema; nothing was changed.
        """
        reader, mirror = self.reader, self.mirror
        entry = run_of(reader.head, provenance or {})
        with reader.turn:
            if is_new := not reader.initialised:
                reader.allocate(schema)
            else:
                self.require_schema(schema)
            if mirror is None:
                reader.entries.append(entry)
                return
            try:
                mirror.wait()
                mirror.require_next(reader.head)
                mirror.writer.runs.begin(schema, provenance)
            except BaseException:
                if is_new:
                    reader.release()
                raise

    def withdraw(self, run: Mapping[str, Any]) -> None:
        """Remove the entry ``run``, which has no rows, if it exists."""
        if self.mirror is not None:
            self.mirror.writer.runs.withdraw(run)
            return
        entries = self.reader.entries
        entries[:] = [each for each in entries if each != run]

    def add_event(self, run: Mapping[str, Any], event: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add an environment call to the entry ``run``; return the updated entry."""
        if self.mirror is not None:
            return self.mirror.writer.runs.add_event(run, event)
        entry = next(each for each in self.reader.entries if each is run)
        entry.setdefault("events", []).append(dict(event))
        return entry


def _arrays_of(values: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return columns as arrays on the host; of bfloat16, the bits."""
    moved = move_columns(dict(enumerate(values)), HOST, staged=True)
    return [
        (each.view(torch.uint16) if each.dtype is torch.bfloat16 else each).numpy()
        for each in moved.values()
    ]
