"""Write batches to a storage, a TorchRL replay buffer, both, or nowhere."""

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, TensorStorage

from tallyroll.collector.batches.rows.rows import Rows, as_tensordict
from tallyroll.collector.batches.stored.buffer_items import (
    BufferIds,
    extend_buffer,
    for_buffer,
    require_items,
    require_takes,
    warn_of_cut_item,
)
from tallyroll.collector.batches.stored.resume import (
    Resume,
    checked_resume,
    has_begun,
    opened_target,
)
from tallyroll.collector.batches.stored.sinks import accepts_tensors, sink_of, sink_under
from tallyroll.collector.batches.stored.stored_run import StoredRun
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.errors import ArgumentError, ItemsDiffer, LedgerError
from tallyroll.collector.native.slot_rows import SlotRows
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.slab.names import require_storable
from tallyroll.collector.user_code import user_code
from tallyroll.storage import Schema
from tallyroll.storage.engine.columns import ArrayRows, FixedRows, IndexedRows, RowIndex
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.batch_check import BatchCheck, fitting_tensors
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.keys import TRAJ_IDS, Key, as_key
from tallyroll.storage.rows.row_refs import RowRefs
from tallyroll.storage.rows.transfers import HOST, move_columns
from tallyroll.storage.storages import DiskStorage, is_sharded, storage_class
from tallyroll.storage.stores.row_sink import RowSink

StorageLike = str | Path | RowSink
Columns = Mapping[Key, torch.Tensor | RowRefs]


class ClosedFirstWarning(UserWarning):
    """A storage was closed before its collector; the message names the missing data."""


class BatchWriter:
    """Writes batches before they are yielded.

    Args:
        storage: a Tallyroll storage or another `RowSink`, or a path at which a storage is made: an
            HDF5 file if the path ends in ``.h5`` or ``.hdf5``, a Zarr group if it ends in
            ``.zarr``, otherwise a memory-mapped storage.
        replay_buffer: a TorchRL replay buffer, which decides itself how it stores rows.
        resume: True to continue the last run in the storage instead of beginning another;
            ``"auto"`` begins a run if there is none.
        frames: number of transitions of the whole run, for which space is reserved; None if
            unknown.
        batch: number of transitions in the largest batch, which must fit into a ring.
        part: the shard; None for a whole run.
        sharded: True if rows are in shards of workers, and the storage takes their counts.

    Raises:
        ArgumentError: ``storage`` is neither a path nor a storage, or cannot be written; the format
            of the path requires ``frames``; or a ring is smaller than a ``batch``.
        StorageError: the path exists, is a file, is not writable, or has another format.
    """

    def __init__(
        self,
        storage: StorageLike | None,
        replay_buffer: ReplayBuffer | None,
        resume: Resume,
        frames: int | None = None,
        batch: int = 1,
        part: ShardOfRun | None = None,
        *,
        sharded: bool = False,
    ) -> None:
        if replay_buffer is not None and not isinstance(replay_buffer, ReplayBuffer):
            raise ArgumentError(
                "replay_buffer: expected a torchrl ReplayBuffer, got "
                f"{type(replay_buffer).__name__}. Pass a storage as storage=."
            )
        checked_resume(resume)
        under, self.replay_buffer = sink_under(replay_buffer), replay_buffer
        self._opened: DiskStorage | None = None
        """The storage that this object opened; None if it opened none."""
        if isinstance(storage, (str, Path)):
            if not sharded and is_sharded(storage):
                raise ArgumentError(
                    f"storage: {storage} is a sharded storage. Pass sharded=True to continue it."
                )
            kind = _sharded_class() if sharded else storage_class(storage)
            self._opened = storage = opened_target(storage, resume, frames, kind)
        elif sharded is not getattr(storage, "sharded", False):
            raise ArgumentError(
                "storage: expected a path or a ShardedStorage if sharded=True, and a path or any "
                f"other storage if sharded=False, got {storage!r:.200}"
            )
        given = None if storage is None else sink_of(storage)
        # If the buffer writes to this storage too, writing to both would store each row twice.
        self.target = None if given is under else given
        self.storage = under if given is None else given
        self.require_room(batch)
        if resume and self.storage is None:
            raise ArgumentError(
                f"resume={resume!r} needs a storage that holds the run to be continued. Pass "
                "storage=."
            )
        self.stores = self.storage is not None or replay_buffer is not None
        """True if there is a storage or a replay buffer."""
        self.shapes = replay_buffer is not None and under is None
        """True if the replay buffer keeps batches in their layout, instead of rows."""
        if resume == "auto" and self.storage is not None:
            resume = has_begun(self.storage)
        only_buffer = self.storage is None and replay_buffer is not None
        self._buffer_ids = BufferIds(replay_buffer) if only_buffer else None
        self.stored_run = StoredRun(
            self.storage, self._buffer_ids, resumes=bool(resume), frames=frames, part=part
        )
        self._inner_dims: Shapes = {}
        self._excluded: Collection[Key] = ()
        self._check: BatchCheck | None = None

    def require_room(self, batch: int) -> None:
        """Refuse batches of ``batch`` transitions if the storage is a smaller ring.

        Raises:
            ArgumentError: the ring is smaller; the message says how large it is.
        """
        reader = None if self.storage is None else self.storage.reader
        if reader is not None and 0 < reader.ring < batch:
            raise ArgumentError(
                f"frames_per_batch: expected at most the {reader.ring} rows of the ring "
                f"{reader.path}, got {batch}. Make batches smaller, or max_size larger."
            )

    def open(
        self,
        rows: Rows,
        provenance: Mapping[str, Any],
        inner_dims: Shapes,
        excluded: Collection[Key] = (),
        *,
        declared: bool = True,
    ) -> None:
        """Make the files, or check that the storage fits, before anything is written.

        ``rows`` have the columns of the rows to come. ``inner_dims`` are the batch dimensions
        inside the rows of nested TensorDicts. ``excluded`` are the columns of ``rows`` that are not
        stored. ``declared`` is False if the columns were found in a first batch.
        """
        self._inner_dims, self._excluded = inner_dims, excluded
        rows = {key: column for key, column in rows.items() if key not in excluded}
        if self.replay_buffer is not None:
            require_takes(self.replay_buffer.storage, rows)
        if self.storage is not None:
            require_storable(rows)
            try:
                schema = Schema.of(as_tensordict(rows, None, inner_dims))
                self.stored_run.open(schema, provenance, declared=declared)
            except InvalidSchema as error:
                error.add_note(
                    "tallyroll: use rename= to give a column of the environment another name"
                )
                raise
        self.stored_run.mark_ready()

    def write(
        self,
        rows: Rows,
        count: int,
        ledger: Ledger,
        open_lanes: int,
        large: Columns,
        shaped: Sequence[TensorDictBase] | None = None,
        *,
        last: bool = False,
    ) -> None:
        """Commit ``rows``, which must be ``count`` rows, and the ledger that includes them.

        ``open_lanes`` trajectories continue after the rows. ``large`` are further columns, which
        only the storage gets. ``shaped`` are the batches that a replay buffer gets instead of
        ``rows``. ``last`` is True for the last rows of the run. If these do not fill an item and a
        storage gets them, the buffer gets nothing.

        Raises:
            LedgerError: a number of rows other than ``count`` would be stored; nothing is stored.
            ItemsDiffer: the items in the buffer have another length; nothing is stored.
        """
        if len(rows[TRAJ_IDS]):
            self.stored_run.count_ids(int(rows[TRAJ_IDS].max()))
        # After an error, there may be more rows than a batch has.
        ring = 0 if self.storage is None else self.storage.reader.ring
        columns = {k: c for k, c in {**rows, **large}.items() if k not in self._excluded}
        pieces = _pieces(columns, ring)
        _require(
            "the storage or replay buffer", sum(len(piece[TRAJ_IDS]) for piece in pieces), count
        )
        buffer, direct = self.replay_buffer, self.target
        if buffer is not None and shaped is not None:
            if self._excluded:
                shaped = [_without(batch, self._excluded) for batch in shaped]
            shaped = _items(buffer, shaped, count, may_leave=direct is not None and last)
        for number, piece in enumerate(pieces, start=1):
            batches: Sequence[TensorDictBase] = ()
            if buffer is not None and shaped is None:
                batches = [for_buffer(piece, buffer, self._inner_dims)]  # type: ignore[arg-type]
            elif shaped is not None and number == 1:
                batches = shaped
            new = None if direct is None else self._checked(direct, piece)
            size = len(piece[TRAJ_IDS])
            record = None
            if self.storage is not None and number == len(pieces):
                record = self.stored_run.record(ledger, open_lanes)
            # The storage comes last, because its committed rows are counted and nothing can fail
            # after it.
            if buffer is not None:
                with user_code("the replay buffer"):
                    extend_buffer(buffer, batches, record if direct is None else None)
            if direct is not None and new is not None:
                with user_code("the storage"):
                    written = _append(direct, new, record)
                _require("the storage", len(written), size)

    def _checked(self, sink: RowSink, rows: Columns) -> ArrayRows | Mapping[Key, torch.Tensor]:
        """Return rows in the form that the storage takes; raise if they do not fit it."""
        if accepts_tensors(sink.writer) and any(map(_is_on_device, rows.values())):
            tensors = {key: _tensor_of(column) for key, column in rows.items()}
            schema = sink.reader.schema
            return dict(
                zip(schema.keys, fitting_tensors(tensors, schema, sink.reader.path), strict=True)
            )
        if self._check is None:
            self._check = BatchCheck(sink.reader.schema, sink.reader.path)
        return ArrayRows(self._check.arrays(_arrays_of(rows)))

    def makes_items(self, batch_dims: int) -> bool:
        """Return True if a TorchRL buffer stores such batches as items of several rows.

        ``batch_dims`` is the number of batch dimensions.
        """
        storage = None if self.replay_buffer is None else self.replay_buffer.storage
        return self.shapes and isinstance(storage, TensorStorage) and batch_dims > storage.ndim

    @property
    def direct(self) -> RowSink | None:
        """The storage to which rows of a slab may be written directly; None if there is none."""
        return self.target if self.stored_run.ready else None

    @property
    def schema(self) -> Schema | None:
        """The schema of :attr:`direct`; None if there is no such storage."""
        return None if self.direct is None else self.direct.reader.schema

    @property
    def most(self) -> int:
        """Maximum number of rows in one write."""
        return (self.storage is not None and self.storage.reader.ring) or sys.maxsize

    def write_fixed(
        self, rows: FixedRows, index: RowIndex, next_id: int, ledger: Ledger, open_lanes: int
    ) -> None:
        """Write rows from fixed memory as :meth:`write` does; their ids are below ``next_id``.

        Raises:
            LedgerError: the ledger does not balance; nothing is stored.
        """
        direct = self.target
        assert direct is not None
        if next_id > self.stored_run.counts.next_id:
            self.stored_run.counts.next_id = next_id  # hot path: `count_ids` would be another call
        record = self.stored_run.record(ledger, open_lanes, ledger.check())
        written = direct.writer.append(IndexedRows(rows, index), record)
        if len(written) != len(index):
            _require("the storage", len(written), len(index))

    def slots(self, rows: FixedRows, ledger: Ledger, **parts: Any) -> SlotRows:
        """Return `SlotRows` that store the first ``rows``; ``parts`` are its other arguments."""
        return SlotRows(
            rows,
            record=self.stored_run.record_template(ledger),
            run=self.stored_run.counts,
            ledger=ledger.block,
            shown=ledger.shown,
            **parts,
        )

    def finish(self, ledger: Ledger, left: int) -> None:
        """End the run as `StoredRun.finish` does; ``left`` transitions are not in a batch yet."""
        if self._buffer_ids is not None:
            self._buffer_ids.end()
        self.stored_run.finish(ledger, left)

    def close(self) -> None:
        """Close the storage if this object opened it."""
        self.stored_run.end()
        if self._opened is not None:
            self._opened.close()


def _pieces(rows: Columns, ring: int) -> list[Columns]:
    """Return ``rows`` in pieces that fit a ``ring`` of so many rows; 0 means no limit."""
    count = len(rows[TRAJ_IDS])
    if not ring or count <= ring:
        return [rows]
    pieces = [slice(start, start + ring) for start in range(0, count, ring)]
    return [{key: column[piece] for key, column in rows.items()} for piece in pieces]


def _without(batch: TensorDictBase, keys: Collection[Key]) -> TensorDictBase:
    """Return ``batch`` without the columns ``keys``, and without groups that become empty."""
    kept = [key for key in batch.keys(True, True) if as_key(key) not in keys]
    return batch.select(*kept)


def _items(
    buffer: ReplayBuffer, shaped: Sequence[TensorDictBase], count: int, *, may_leave: bool
) -> Sequence[TensorDictBase]:
    """Return ``shaped`` if it fits the buffer; otherwise warn and return nothing.

    If ``may_leave`` is False, raise instead of the warning.
    """
    try:
        for batch in shaped:
            require_items(buffer.storage, batch)
    except ItemsDiffer as error:
        if not may_leave:
            raise
        warn_of_cut_item(count, "are in the storage but not in the replay buffer", error)
        return ()
    return shaped


def _require(where: str, rows: int, count: int) -> None:
    if rows != count:
        raise LedgerError(
            f"{where}: expected {count} rows, as many as were counted, got {rows}. This is a bug "
            "in tallyroll: please report it. Rows committed before are intact"
        )


def _arrays_of(columns: Columns) -> dict[Key, Any]:
    """Return columns as NumPy arrays; of bfloat16, which NumPy lacks, return the bits."""
    tensors = {key: c for key, c in columns.items() if isinstance(c, torch.Tensor)}
    # The arrays live until they are written, so they may be in pinned memory.
    staged = move_columns(tensors, HOST, staged=True)
    return {key: _array_of(staged.get(key, column)) for key, column in columns.items()}


def _array_of(column: torch.Tensor | RowRefs) -> Any:
    if isinstance(column, RowRefs):
        return column
    return (column.view(torch.uint16) if column.dtype is torch.bfloat16 else column).numpy()


def _append(
    sink: RowSink, rows: ArrayRows | Mapping[Key, torch.Tensor], record: bytes | None
) -> range:
    writer = sink.writer
    if isinstance(rows, ArrayRows):
        return writer.append(rows, record)
    assert accepts_tensors(writer)
    return writer.append_tensors(rows, sink.reader.head, record)


def _is_on_device(column: torch.Tensor | RowRefs) -> bool:
    return isinstance(column, torch.Tensor) and column.device.type != "cpu"


def _tensor_of(column: torch.Tensor | RowRefs) -> torch.Tensor:
    return column if isinstance(column, torch.Tensor) else torch.from_numpy(np.asarray(column))


def _sharded_class() -> type[DiskStorage]:
    from tallyroll.storage.ext.sharded.sharded_storage import ShardedStorage

    return ShardedStorage
