"""Write batches to a storage, a TorchRL replay buffer, both, or nowhere."""

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, Storage, TensorStorage

from tallyroll.collector.batches.resume import (
    LastRun,
    Resume,
    checked_resume,
    has_begun,
    last_run_of,
    opened_or_created,
)
from tallyroll.collector.batches.rows import Rows, as_tensordict
from tallyroll.collector.counting.ledger import COUNTS, Ledger
from tallyroll.collector.errors import ArgumentError, ItemsDiffer, LedgerError, StateError
from tallyroll.collector.slab.names import require_storable
from tallyroll.storage import Schema
from tallyroll.storage.engine.fixed_rows import FixedRows, IndexedRows, RowIndex
from tallyroll.storage.engine.slot_rows import RunCounts, SlotRows
from tallyroll.storage.errors import (
    InvalidSchema,
    NotInitialised,
    StorageClosed,
    StorageExists,
    StorageMissing,
)
from tallyroll.storage.files.run_record import RunRecord, record_bytes, record_template
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import (
    DONE,
    POLICY_VERSION,
    RANDOM_VERSION,
    TRAJ_IDS,
    Key,
    spell,
)
from tallyroll.storage.rows.row_refs import RowRefs
from tallyroll.storage.storages import DiskStorage, storage_class

_GO_ON = (
    "To go on after them, open the storage again and give it to a collector with resume=True: it "
    "has the counts of the last commit, and counts what waited then as lost. Close a collector "
    "before its storage: put its `with` block inside the storage's"
)

StorageLike = str | Path | DiskStorage
Columns = Mapping[Key, torch.Tensor | RowRefs]
_MOST_IDS = 2**62  # so that those of any run fit after them
_LARGEST_ID = 2**63 - 2  # a larger one of a postproc has no next


class ClosedFirstWarning(UserWarning):
    """Warning: a storage was closed before the collector that wrote to it; says what is missing."""


class CutItemWarning(UserWarning):
    """Warning: a run ended within an item of a TorchRL buffer; says which rows are missing."""


class BatchWriter:
    """Writes batches before they are yielded.

    Args:
        storage: a Tallyroll storage, or a path at which one is made: an HDF5 file where it ends
            in ``.h5`` or ``.hdf5``, a Zarr group where it ends in ``.zarr``, or else a
            memory-mapped one.
        replay_buffer: a TorchRL replay buffer; what it stores is up to it.
        resume: continue the last run in the storage instead of beginning another; ``"auto"``
            begins one where there is none.
        frames: transitions of the whole run, for which space is reserved; None if unknown.
        batch: transitions of the largest batch, which a ring must have room for.

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
    ) -> None:
        if replay_buffer is not None and not isinstance(replay_buffer, ReplayBuffer):
            raise ArgumentError(
                "replay_buffer: expected a torchrl ReplayBuffer, got "
                f"{type(replay_buffer).__name__}; a storage goes to storage="
            )
        checked_resume(resume)
        self.owned = isinstance(storage, (str, Path))
        if isinstance(storage, (str, Path)):
            storage = _opened(storage, resume, frames)
        if storage is not None and not isinstance(storage, DiskStorage):
            raise ArgumentError(
                f"storage: expected a path or a tallyroll storage, got {type(storage).__name__}; "
                "a torchrl storage goes into a ReplayBuffer, passed as replay_buffer="
            )
        self.replay_buffer = replay_buffer
        behind = None if replay_buffer is None else replay_buffer.storage
        # A buffer over this very storage writes to it: writing twice would store each row twice.
        self.target = None if storage is behind else storage
        self.storage = storage if storage is not None else behind
        if not isinstance(self.storage, DiskStorage):
            self.storage = None
        if self.storage is not None and self.storage.mode == "read":
            raise ArgumentError(
                f'{self.storage.path} is open for reading; open it with mode="append" to collect'
            )
        self.require_room(batch)
        if resume and self.storage is None:
            raise ArgumentError(
                f"resume={resume!r} needs a storage that holds the run to be continued"
            )
        self.stores = self.storage is not None or replay_buffer is not None
        """There is a storage or a replay buffer."""
        self.shapes = replay_buffer is not None and not isinstance(behind, DiskStorage)
        """The replay buffer keeps batches as they are laid out, and no rows."""
        self._reader = None if self.storage is None else self.storage.reader
        if resume == "auto" and self.storage is not None:
            resume = has_begun(self.storage)
        self._resume, self._frames = bool(resume), frames
        self._last: LastRun | None = None
        self.ready = False
        """:meth:`open` was called."""
        self._behind: Shapes = {}
        self._stored_before = 0
        self._run = RunCounts()
        self._drawn_at = -1
        """Rows in the storage when the next id was looked for."""
        self.begun = self.storage is None
        """:meth:`begin` was called."""
        self._entry: Mapping[str, Any] | None = None
        """The run's entry in the manifest, while the run has no rows."""
        self.id_range = -1
        """Index of the run's range of ids, if others write to the same TorchRL storage."""
        self._loaded: Ledger | None = None
        """The ledger of a loaded state that the run goes on from."""
        self._stored_elsewhere = 0
        """Transitions that the run had stored by then."""
        if self.storage is not None:
            self.storage.writer.claim.take(self, begins=self._resume)

    def require_room(self, batch: int) -> None:
        """Refuse batches of so many transitions, where a ring is smaller.

        Raises:
            ArgumentError: says how large it is.
        """
        if self.storage is not None and 0 < self.storage.ring < batch:
            raise ArgumentError(
                f"frames_per_batch: {self.storage.path} is a ring of {self.storage.ring} rows, and "
                f"a batch has {batch}; make batches smaller, or max_size larger"
            )

    def resumed(self) -> Ledger | None:
        """The ledger of the run to be continued, up to its last row; None: a new one begins."""
        if not self._resume or self.storage is None:
            return None
        if self.storage.mode == "create" and not self.storage.head:
            raise StateError(
                f'{self.storage.path} was opened with mode="create", which has no run yet; open '
                'the one to be continued with mode="append"'
            )
        storage = self.storage
        self._last = last = last_run_of(storage.manifest["runs"], storage.path, storage.head)
        ledger, at = Ledger(seed=last.seed, incarnation=last.incarnation), last.first_row
        record = self._last_record()
        if record is not None and record.first_row == last.first_row:
            at, self._stored_before = record.at, record.stored_before
            ledger.load({**record.ledger, "incarnation": last.incarnation})
            # A killed process left its trajectories unfinished.
            ledger.episodes_cut += record.open
            if record.incarnation >= last.incarnation:
                ledger.seed, ledger.incarnation = record.seed, record.incarnation
        ledger.incarnation += 1
        # The record may be older than the rows, or newer.
        stored = self._stored_before + storage.head - last.first_row
        unknown, ledger.stored = stored - ledger.stored, stored
        ledger.slots += max(0, unknown)
        ledger.executed += max(0, unknown)
        # Transitions that waited for the next batch when the run stopped were lost.
        ledger.lost += max(0, -unknown) + ledger.carried
        ledger.carried = 0
        # In a ring, only the rows that it still has.
        rows = np.arange(max(at, storage.span.start), storage.span.stop)
        ended = storage.reader.column(DONE).take(rows) if len(rows) else rows
        ledger.episodes_complete += int(ended.sum())
        return ledger

    def _last_record(self) -> RunRecord | None:
        record = None if self.storage is None else RunRecord.parse(self.storage.record)
        return record if record is not None and record.is_whole else None

    def last_version(self) -> int:
        """The largest policy version of the run to be continued; -1 where there is none."""
        storage, last = self.storage, self._last
        if storage is None or last is None:
            return RANDOM_VERSION
        rows = np.arange(max(last.first_row, storage.span.start), storage.span.stop)
        own = storage.reader.column(POLICY_VERSION).take(rows)
        return int(own.max()) if len(own) else RANDOM_VERSION

    def next_id(self) -> int:
        """One more than the largest trajectory id that was ever stored."""
        ids: Any = None
        next_id = self._run.next_id
        if self.storage is not None:
            self._drawn_at = self.storage.head
            if self.storage.head:
                ids = self.storage.column(TRAJ_IDS)
            # Of a ring the rows with the largest ids may be gone.
            record = self._last_record()
            next_id = max(next_id, 0 if record is None else record.next_id)
        elif self.replay_buffer is not None:
            next_id = max(next_id, _own_range(self.replay_buffer, self))
            if len(self.replay_buffer):
                held = self.replay_buffer.storage.get(slice(0, len(self.replay_buffer)))
                ids = held.get(TRAJ_IDS, None) if isinstance(held, TensorDictBase) else None
        if ids is not None and len(ids):
            next_id = max(next_id, int(ids.max()) + 1)
        if next_id > _MOST_IDS:
            raise StateError(
                f"expected trajectory ids below {_MOST_IDS}, got {next_id - 1} in what is "
                "stored: there is no room for more after it; begin another storage"
            )
        self._run.next_id = next_id
        return next_id

    def open(self, rows: Rows, provenance: Mapping[str, Any], behind: Shapes) -> None:
        """Make the files, or check that the storage fits; nothing is written before it does.

        ``rows`` are like those to come; ``behind`` are the batch dimensions behind the rows of
        nested TensorDicts.
        """
        self._behind = behind
        if self.replay_buffer is not None:
            _require_takes(self.replay_buffer.storage, rows)
        if self.storage is not None:
            self._open_files(self.storage, rows, provenance)
        self.ready = True

    def _open_files(self, storage: DiskStorage, rows: Rows, provenance: Mapping[str, Any]) -> None:
        require_storable(rows)
        self._first_row = storage.head
        if self._last is not None:
            self._first_row = self._last.first_row
            _same_source(self._last.environment, provenance["environment"])
        try:
            self._make_files(Schema.of(as_tensordict(rows, None, self._behind)), provenance)
        except InvalidSchema as error:
            error.add_note("tallyroll: rename= gives a column of an environment another name")
            raise

    def _make_files(self, schema: Schema, provenance: Mapping[str, Any]) -> None:
        storage = self.storage
        assert storage is not None
        self._reserve(schema)
        if storage.reader.initialised:
            storage.writer.opened.require_schema(schema)
            if not storage.writer.claim.is_of(self):
                return
        self._begin_entry(schema, provenance)

    def _reserve(self, schema: Schema) -> None:
        storage = self.storage
        assert storage is not None
        if self._frames is not None and _fits(storage, schema):
            stored = self._stored_before + storage.head - self._first_row
            storage.reserve(max(1, storage.head + self._frames - stored))

    def begin(self, provenance: Mapping[str, Any]) -> int | None:
        """Begin the run in the storage, which is its own until it is over.

        Returns:
            The first id of a trajectory, where it is another than :meth:`next_id` was before.

        Raises:
            RunUnderWay: another collector's run is not over.
        """
        storage, drawn_at = self.storage, self._drawn_at
        if storage is None:
            return None
        held = storage.writer.claim.is_of(self)
        storage.writer.claim.take(self)
        noted = held and self._entry is not None and storage.head == drawn_at
        if self.ready and not noted:
            self._begin_entry(storage.schema, provenance)
        self.begun = True
        return None if storage.head == drawn_at else self.next_id()

    def _begin_entry(self, schema: Schema, provenance: Mapping[str, Any]) -> None:
        """Note in the manifest at which row the run begins, or goes on."""
        storage = self.storage
        assert storage is not None
        if self._last is None:
            self._first_row = storage.head
        if self._loaded is not None:
            self._stored_before = self._stored_elsewhere - (storage.head - self._first_row)
        if self._entry is not None:
            storage.writer.runs.withdraw(self._entry)
            self._entry = None
        if storage.reader.initialised and storage.head != self._drawn_at:
            self._reserve(schema)
        storage.writer.runs.begin(schema, {**provenance, "first_row_of_run": self._first_row})
        self._entry = storage.manifest["runs"][-1]
        ledger, record = self._loaded, self._last_record()
        fresh = ledger is None and self._last is None
        if fresh and record is not None and record.first_row == self._first_row:
            # A run had begun here that has no rows: what it counted is not this one's.
            ledger = Ledger(seed=provenance["seed"], incarnation=provenance["incarnation"])
        if ledger is not None:
            storage.writer.put_record(self._record(ledger, 0))

    @property
    def head(self) -> int:
        """Rows that were ever committed to the storage, which may be closed by now."""
        return 0 if self._reader is None else self._reader.last_head

    def rows_of(self, before: int, stored: int) -> range | None:
        """Return the absolute rows in the storage of the run's rows from ``before`` on.

        ``stored``: all rows of the run so far. None if there is no storage.
        """
        if self.storage is None:
            return None
        # Computed from the run's own counts: to read the header takes four calls a batch.
        behind = self._first_row - self._stored_before if self.ready else self.head - stored
        return range(behind + before, behind + stored)

    def committed_after(self, stored: int) -> int:
        """Return how many rows are committed beyond the first ``stored`` ones of the run."""
        rows = self.rows_of(stored, stored)
        return 0 if rows is None else self.head - rows.start

    def require_open(self) -> None:
        """Raise `StorageClosed` where the storage was closed under the run's feet."""
        if self._reader is not None and self._reader.closed:
            raise StorageClosed(
                f"{self._reader.path} was closed while its collector goes on: nothing more of the "
                f"run can be stored. {self.committed}. {_GO_ON}"
            )

    @property
    def committed(self) -> str:
        """A sentence that says which rows of the run are stored."""
        if self.storage is None:
            return "Rows of this run were yielded, or put into a replay buffer"
        head = self.head
        first = self._first_row if self.ready else head
        if head <= first:
            return f"No rows of this run are committed in {self.storage.path}"
        return f"Rows {first:,} to {head - 1:,} of {self.storage.path} are committed, of this run"

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
            largest = min(int(rows[TRAJ_IDS].max()), _LARGEST_ID)
            self._run.next_id = max(self._run.next_id, largest + 1)
        # What an error left may be more than a batch.
        ring = self.storage.ring if self.storage is not None else 0
        pieces = _pieces({**rows, **large}, ring)
        _require("what stores them", sum(len(piece[TRAJ_IDS]) for piece in pieces), count)
        buffer, direct = self.replay_buffer, self.target
        if buffer is not None and shaped is not None:
            try:
                for batch in shaped:
                    require_items(buffer.storage, batch)
            except ItemsDiffer as error:
                if direct is None or not last:
                    raise
                warn_of_cut_item(
                    count, "which the storage has, are not in the replay buffer", error
                )
                shaped = ()
        for number, piece in enumerate(pieces, start=1):
            batches: Sequence[TensorDictBase] = ()
            if buffer is not None and shaped is None:
                batches = [_for_buffer(piece, buffer, self._behind)]  # type: ignore[arg-type]
            elif shaped is not None and number == 1:
                batches = shaped
            arrays = {} if direct is None else {key: _array(c) for key, c in piece.items()}
            if self.storage is not None and number == len(pieces):
                self.storage.writer.stage_record(self._record(ledger, open_lanes))
            # The storage last: what it has committed is counted, and nothing can fail after it.
            if buffer is not None:
                behind = buffer.storage
                with (
                    behind.writer.fresh_ids() if isinstance(behind, DiskStorage) else nullcontext()
                ):
                    for batch in batches:
                        buffer.extend(batch)
            if direct is not None:
                written = direct.extend(arrays, ids="fresh")
                _require("the storage", len(written), len(piece[TRAJ_IDS]))

    def makes_items(self, batch_dims: int) -> bool:
        """Return whether a TorchRL buffer stores such a batch as items of several rows."""
        behind = None if self.replay_buffer is None else self.replay_buffer.storage
        return self.shapes and isinstance(behind, TensorStorage) and batch_dims > behind.ndim

    @property
    def direct(self) -> DiskStorage | None:
        """The storage to which rows of a slab may go directly; None: there is none."""
        return self.target if self.ready else None

    @property
    def schema(self) -> Schema | None:
        """The schema of :attr:`direct`; None: there is no such storage."""
        return None if self.direct is None else self.direct.schema

    @property
    def most(self) -> int:
        """Rows that can be written at once."""
        return (self._reader is not None and self._reader.ring) or sys.maxsize

    def write_fixed(
        self, rows: FixedRows, index: RowIndex, next_id: int, ledger: Ledger, open_lanes: int
    ) -> None:
        """Write rows of fixed memory as :meth:`write` does; their ids are below ``next_id``.

        Raises:
            LedgerError: the ledger does not balance; nothing is stored.
        """
        direct = self.target
        assert direct is not None
        if next_id > self._run.next_id:
            self._run.next_id = next_id
        record = self._record(ledger, open_lanes, ledger.check())
        written = direct.writer.append(IndexedRows(rows, index), record)
        if len(written) != len(index):
            _require("the storage", len(written), len(index))

    def slot(self, rows: FixedRows, count: int, ledger: Ledger, **tables: Any) -> SlotRows:
        """The first ``count`` of ``rows``, for a storage. ``tables`` are those of `SlotRows`."""
        return SlotRows(
            rows,
            count,
            record=record_template(COUNTS, self._first_row, self._stored_before, ledger.seed),
            run=self._run,
            ledger=ledger.block,
            **tables,
        )

    def goes_on_from(self, ledger: Ledger, provenance: Mapping[str, Any], next_id: int) -> None:
        """Go on from a loaded state: the run's earlier rows are not of this storage's run.

        Ids below ``next_id`` may be those of such rows.
        """
        if self.storage is None:
            return
        self._run.next_id, self._loaded = max(self._run.next_id, next_id), ledger
        self._stored_elsewhere = ledger.stored
        if self.ready and self.storage.writer.claim.is_of(self):
            self._begin_entry(self.storage.schema, provenance)

    def finish(self, ledger: Ledger, left: int) -> None:
        """Commit the final ledger, and update the files that other programs read.

        The run is over.

        ``left`` transitions were collected and are in no batch.

        Raises:
            StorageClosed: it was closed before; the message says what is not stored.
        """
        if self.replay_buffer is not None:
            _writers.get(self.replay_buffer.storage, weakref.WeakSet()).discard(self)
        if self.storage is not None and self.ready and self.storage.writer.claim.is_of(self):
            if self.storage.closed:
                raise StorageClosed(
                    f"{self.storage.path} was closed before its collector. Not stored: the final "
                    f"ledger of the run, in the storage's record, and {left:,} transitions that "
                    f"waited for the next batch. {self.committed}. {_GO_ON}"
                )
            self.storage.writer.put_record(self._record(ledger, 0))
            self.storage.flush()
            self.storage.writer.claim.end(self)

    def close(self) -> None:
        """Close the storage if it was opened here."""
        if self.storage is not None:
            self.storage.writer.claim.end(self)
        if self.owned and self.target is not None:
            self.target.close()

    def _record(
        self, ledger: Ledger, open_lanes: int, values: tuple[int, ...] | None = None
    ) -> bytes:
        return record_bytes(COUNTS) % (
            self._first_row,
            self._stored_before,
            -1 if ledger.seed is None else ledger.seed,
            ledger.incarnation,
            *(ledger.values if values is None else values),
            open_lanes,
            self._run.next_id,
        )


_writers: weakref.WeakKeyDictionary[Storage, weakref.WeakSet[BatchWriter]] = (
    weakref.WeakKeyDictionary()
)
"""Whose runs are not over, by TorchRL's storage, which collectors may fill in turn."""
_RANGE = 2**40
"""Ids of a run into one of these beside another's: more than there will be trajectories."""


def _own_range(buffer: ReplayBuffer, writer: BatchWriter) -> int:
    """The first id of a range that none of the others has, which write to ``buffer`` now."""
    writers = _writers.setdefault(buffer.storage, weakref.WeakSet())
    writers.add(writer)
    ranges = [each.id_range for each in writers if each is not writer]
    if writer.id_range < 0:
        writer.id_range = 1 + max(ranges, default=-1)
    return writer.id_range * _RANGE


def _opened(path: str | Path, resume: Resume, frames: int | None) -> DiskStorage:
    kind = storage_class(path)
    try:
        if resume == "auto":
            storage = opened_or_created(lambda mode: kind(path, mode=mode))
        else:
            storage = kind(path, mode="append" if resume else "create")
    except StorageExists as error:
        raise StorageExists(
            f"storage: {path} holds a storage already; pass resume=True to continue its run, "
            f'storage={kind.__name__}(path, mode="append") to add another run to it, or another '
            "path"
        ) from error
    except StorageMissing as error:
        raise StorageMissing(
            f"storage: resume=True wants the storage of the run to be continued, and there is none "
            f'at {path}; leave resume out to begin one, or pass resume="auto" to begin it where '
            "there is none"
        ) from error
    if frames is None and not storage.grows:
        storage.close()
        raise ArgumentError(
            f"storage: {path} is to be a {kind.__name__}, which needs to know how many rows will "
            "come: give total_frames, or pass a storage made with capacity="
        )
    return storage


def _fits(storage: DiskStorage, schema: Schema) -> bool:
    try:
        return not storage.schema.differences(schema)
    except NotInitialised:
        return True


def warn_of_cut_item(count: int, what: str, error: ItemsDiffer) -> None:
    """Warn about the fate of the last ``count`` transitions of a run."""
    warnings.warn(f"the last {count} transitions, {what}: {error}", CutItemWarning, stacklevel=3)


def require_items(behind: Storage, batch: TensorDictBase) -> None:
    """Refuse items of other lengths than a TorchRL storage has: it would keep zeros for them.

    Raises:
        ItemsDiffer: says how long they are.
    """
    if not isinstance(behind, TensorStorage) or batch.ndim <= behind.ndim or not len(behind):
        return
    wanted, got = list(behind.get(0).batch_size), list(batch.shape[behind.ndim :])
    if got != wanted:
        raise ItemsDiffer(
            f"replay_buffer: its items are {wanted} long, and these are {got}; make batches as "
            "long, and total_frames a multiple of frames_per_batch, or give the buffer one of "
            "tallyroll's storages, which take rows"
        )


def _require_takes(behind: Storage, rows: Rows) -> None:
    """Refuse columns that torch cannot write to a TorchRL storage."""
    if isinstance(behind, DiskStorage) or not isinstance(behind, TensorStorage):
        return
    for key, column in rows.items():
        if column.dtype in SIGNED:
            name = str(column.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"replay_buffer: expected columns that {type(behind).__name__} can write, got "
                f"{spell(key)} of {name}, for which torch has no such operation; give the buffer "
                "one of tallyroll's storages (MemmapStorage(max_size=…)), or cast in a wrapper of "
                "the environment"
            )


def _pieces(rows: Columns, ring: int) -> list[Columns]:
    """``rows`` in pieces that a ring takes at once; 0 takes all."""
    count = len(rows[TRAJ_IDS])
    if not ring or count <= ring:
        return [rows]
    pieces = [slice(start, start + ring) for start in range(0, count, ring)]
    return [{key: column[piece] for key, column in rows.items()} for piece in pieces]


def _for_buffer(rows: Rows, buffer: ReplayBuffer, behind: Shapes) -> TensorDictBase:
    """A batch where the buffer's storage wants it; to a GPU it goes at once, from pinned memory."""
    device = getattr(buffer.storage, "device", None)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return as_tensordict(rows, None, behind)
    pinned = {k: c.pin_memory() if c.device.type == "cpu" else c for k, c in rows.items()}
    return as_tensordict(pinned, None, behind).to(device, non_blocking=True)


def _require(where: str, rows: int, count: int) -> None:
    if rows != count:
        raise LedgerError(
            f"expected to hand {count} rows, as many as were counted, to {where}, got {rows}; "
            "this is a fault of tallyroll: report it. Rows committed before are sound"
        )


def _array(column: torch.Tensor | RowRefs) -> Any:
    """A column as a storage takes it: NumPy has no bfloat16, so that it is its bits."""
    if isinstance(column, RowRefs):
        return column
    column = column.cpu()
    return (column.view(torch.uint16) if column.dtype is torch.bfloat16 else column).numpy()


def _same_source(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse another environment for a continued run."""
    if before != after:
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        raise StateError(
            "the run to be continued was made by another environment: "
            + "; ".join(f"{n} was {before.get(n)!r}, is {after.get(n)!r}" for n in names)
            + "; append a new run instead"
        )
