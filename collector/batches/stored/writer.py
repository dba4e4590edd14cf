"""Write batches to a storage, a TorchRL replay buffer, both, or nowhere."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from tallyroll.collector.batches.stored.sinks import sink_of, sink_under
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
from tallyroll.storage.rows.batch_check import BatchCheck
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.keys import TRAJ_IDS, Key
from tallyroll.storage.rows.row_refs import RowRefs
from tallyroll.storage.storages import DiskStorage, is_sharded, storage_class
from tallyroll.storage.stores.row_sink import RowSink

StorageLike = str | Path | RowSink
Columns = Mapping[Key, torch.Tensor | RowRefs]


class ClosedFirstWarning(UserWarning):
    """Warning: a storage was closed before the collector that wrote to it; says what is missing."""


class BatchWriter:
    """Writes batches before they are yielded.

    Args:
        storage: a Tallyroll storage or another `RowSink`, or a path at which a storage is made:
            an HDF5 file where it ends in ``.h5`` or ``.hdf5``, a Zarr group where it ends in
            ``.zarr``, or else a memory-mapped one.
        replay_buffer: a TorchRL replay buffer; what it stores is up to it.
        resume: continue the last run in the storage instead of beginning another; ``"auto"``
            begins one where there is none.
        frames: transitions of the whole run, for which space is reserved; None if unknown.
        batch: transitions of the largest batch, which a ring must have room for.
        part: the shard that the run is; None: it is whole.
        sharded: rows are in shards of workers, and the storage takes their counts.

    Raises:
        ArgumentError: neither a path nor a storage; a storage that cannot be written; a path of
            a format that wants to know ``frames``; a ring smaller than a ``batch``.
        StorageError: the path exists, is a file, is not writable, or is another format.
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
                f"{type(replay_buffer).__name__}; a storage goes to storage="
            )
        checked_resume(resume)
        under, self.replay_buffer = sink_under(replay_buffer), replay_buffer
        self._opened: DiskStorage | None = None
        """The storage that was opened here."""
        if isinstance(storage, (str, Path)):
            if not sharded and is_sharded(storage):
                raise ArgumentError(
                    f"storage: {storage} is a sharded storage; give sharded=True to go on with it"
                )
            kind = _sharded_class() if sharded else storage_class(storage)
            self._opened = storage = opened_target(storage, resume, frames, kind)
        elif sharded is not getattr(storage, "sharded", False):
            raise ArgumentError(
                f"storage: expected a path with sharded=True, and only then a ShardedStorage, got "
                f"{storage!r:.200}"
            )
        given = None if storage is None else sink_of(storage)
        # A buffer over this very storage writes to it: writing twice would store each row twice.
        self.target = None if given is under else given
        self.storage = under if given is None else given
        self.require_room(batch)
        if resume and self.storage is None:
            raise ArgumentError(
                f"resume={resume!r} needs a storage that holds the run to be continued"
            )
        self.stores = self.storage is not None or replay_buffer is not None
        """There is a storage or a replay buffer."""
        self.shapes = replay_buffer is not None and under is None
        """The replay buffer keeps batches as they are laid out, and no rows."""
        if resume == "auto" and self.storage is not None:
            resume = has_begun(self.storage)
        only_buffer = self.storage is None and replay_buffer is not None
        self._buffer_ids = BufferIds(replay_buffer) if only_buffer else None
        self.stored_run = StoredRun(
            self.storage, self._buffer_ids, resumes=bool(resume), frames=frames, part=part
        )
        self._behind: Shapes = {}
        self._check: BatchCheck | None = None

    def require_room(self, batch: int) -> None:
        """Refuse batches of so many transitions, where a ring is smaller.

        Raises:
            ArgumentError: says how large it is.
        """
        reader = None if self.storage is None else self.storage.reader
        if reader is not None and 0 < reader.ring < batch:
            raise ArgumentError(
                f"frames_per_batch: {reader.path} is a ring of {reader.ring} rows, and "
                f"a batch has {batch}; make batches smaller, or max_size larger"
            )

    def open(self, rows: Rows, provenance: Mapping[str, Any], behind: Shapes) -> None:
        """Make the files, or check that the storage fits; nothing is written before it does.

        ``rows`` are like those to come; ``behind`` are the batch dimensions behind the rows of
        nested TensorDicts.
        """
        self._behind = behind
        if self.replay_buffer is not None:
            require_takes(self.replay_buffer.storage, rows)
        if self.storage is not None:
            require_storable(rows)
            try:
                schema = Schema.of(as_tensordict(rows, None, behind))
                self.stored_run.open(schema, provenance)
            except InvalidSchema as error:
                error.add_note("tallyroll: rename= gives a column of an environment another name")
                raise
        self.stored_run.ready = True

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
        """Commit ``rows``, of which ``count`` were counted, and the ledger that includes them.

        ``open_lanes`` trajectories go on after them. ``large`` are further columns of them, of
        which only the storage knows. ``shaped`` is what a replay buffer gets in their place. With
        the ``last`` rows of a run it gets nothing where they make no item, if a storage gets them.

        Raises:
            LedgerError: other than ``count`` rows would be stored; nothing is.
            ItemsDiffer: the buffer's items have another length; nothing is stored.
        """
        if len(rows[TRAJ_IDS]):
            self.stored_run.count_ids(int(rows[TRAJ_IDS].max()))
        # What an error left may be more than a batch.
        ring = 0 if self.storage is None else self.storage.reader.ring
        pieces = _pieces({**rows, **large}, ring)
        _require("what stores them", sum(len(piece[TRAJ_IDS]) for piece in pieces), count)
        buffer, direct = self.replay_buffer, self.target
        if buffer is not None and shaped is not None:
            shaped = _items(buffer, shaped, count, may_leave=direct is not None and last)
        for number, piece in enumerate(pieces, start=1):
            batches: Sequence[TensorDictBase] = ()
            if buffer is not None and shaped is None:
                batches = [for_buffer(piece, buffer, self._behind)]  # type: ignore[arg-type]
            elif shaped is not None and number == 1:
                batches = shaped
            new = None if direct is None else self._checked(direct, piece)
            record = None
            if self.storage is not None and number == len(pieces):
                record = self.stored_run.record(ledger, open_lanes)
            # The storage last: what it has committed is counted, and nothing can fail after it.
            if buffer is not None:
                with user_code("the replay buffer"):
                    extend_buffer(buffer, batches, record if direct is None else None)
            if direct is not None and new is not None:
                with user_code("the storage"):
                    written = direct.writer.append(new, record)
                _require("the storage", len(written), new.count)

    def _checked(self, sink: RowSink, rows: Columns) -> ArrayRows:
        """Return rows as a storage takes them, if they fit it."""
        if self._check is None:
            self._check = BatchCheck(sink.reader.schema, sink.reader.path)
        return ArrayRows(self._check.arrays({key: _on_host(c) for key, c in rows.items()}))

    def makes_items(self, batch_dims: int) -> bool:
        """Return whether a TorchRL buffer stores such a batch as items of several rows."""
        behind = None if self.replay_buffer is None else self.replay_buffer.storage
        return self.shapes and isinstance(behind, TensorStorage) and batch_dims > behind.ndim

    @property
    def direct(self) -> RowSink | None:
        """The storage to which rows of a slab may go directly; None: there is none."""
        return self.target if self.stored_run.ready else None

    @property
    def schema(self) -> Schema | None:
        """The schema of :attr:`direct`; None: there is no such storage."""
        return None if self.direct is None else self.direct.reader.schema

    @property
    def most(self) -> int:
        """Rows that can be written at once."""
        return (self.storage is not None and self.storage.reader.ring) or sys.maxsize

    def write_fixed(
        self, rows: FixedRows, index: RowIndex, next_id: int, ledger: Ledger, open_lanes: int
    ) -> None:
        """Write rows of fixed memory as :meth:`write` does; their ids are below ``next_id``.

        Raises:
            LedgerError: the ledger does not balance; nothing is stored.
        """
        direct = self.target
        assert direct is not None
        if next_id > self.stored_run.counts.next_id:
            self.stored_run.counts.next_id = next_id
        record = self.stored_run.record(ledger, open_lanes, ledger.check())
        written = direct.writer.append(IndexedRows(rows, index), record)
        if len(written) != len(index):
            _require("the storage", len(written), len(index))

    def slots(self, rows: FixedRows, ledger: Ledger, **parts: Any) -> SlotRows:
        """The first of ``rows``, for a storage. ``parts`` are the others of `SlotRows`."""
        return SlotRows(
            rows,
            record=self.stored_run.record_template(ledger),
            run=self.stored_run.counts,
            ledger=ledger.block,
            shown=ledger.shown,
            **parts,
        )

    def finish(self, ledger: Ledger, left: int) -> None:
        """End the run as `StoredRun.finish` does; ``left`` transitions are in no batch."""
        if self._buffer_ids is not None:
            self._buffer_ids.end()
        self.stored_run.finish(ledger, left)

    def close(self) -> None:
        """Close the storage if it was opened here."""
        self.stored_run.end()
        if self._opened is not None:
            self._opened.close()


def _pieces(rows: Columns, ring: int) -> list[Columns]:
    """``rows`` in pieces that a ring takes at once; 0 takes all."""
    count = len(rows[TRAJ_IDS])
    if not ring or count <= ring:
        return [rows]
    pieces = [slice(start, start + ring) for start in range(0, count, ring)]
    return [{key: column[piece] for key, column in rows.items()} for piece in pieces]


def _items(
    buffer: ReplayBuffer, shaped: Sequence[TensorDictBase], count: int, *, may_leave: bool
) -> Sequence[TensorDictBase]:
    """Return what is laid out for a buffer; nothing, with a warning, if it may be left out."""
    try:
        for batch in shaped:
            require_items(buffer.storage, batch)
    except ItemsDiffer as error:
        if not may_leave:
            raise
        warn_of_cut_item(count, "which the storage has, are not in the replay buffer", error)
        return ()
    return shaped


def _require(where: str, rows: int, count: int) -> None:
    if rows != count:
        raise LedgerError(
            f"expected to hand {count} rows, as many as were counted, to {where}, got {rows}; "
            "this is a fault of tallyroll: report it. Rows committed before are sound"
        )


def _on_host(column: torch.Tensor | RowRefs) -> Any:
    """A column as a storage takes it: NumPy has no bfloat16, so that it is its bits."""
    if isinstance(column, RowRefs):
        return column
    column = column.cpu()
    return (column.view(torch.uint16) if column.dtype is torch.bfloat16 else column).numpy()


def _sharded_class() -> type[DiskStorage]:
    from tallyroll.storage.ext.sharded.sharded_storage import ShardedStorage

    return ShardedStorage
