"""A run in its storage: its claim, its entry in the manifest, its rows, ids and record."""

from collections.abc import Mapping, Sequence
from typing import Any

from tallyroll.collector.batches.stored.buffer_items import BufferIds
from tallyroll.collector.batches.stored.resume import (
    LastRun,
    changed_arguments,
    last_run_of,
    resumed_ledger,
    same_lanes,
    same_shard,
    same_source,
    whole_record,
    without_rows,
)
from tallyroll.collector.batches.stored.run_events import RunEvents
from tallyroll.collector.counting.ledger import COUNTS, Ledger
from tallyroll.collector.counting.shards import first_id
from tallyroll.collector.errors import StateError
from tallyroll.collector.native.slot_rows import RunCounts
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.storage import Schema
from tallyroll.storage.errors import NotInitialised, SchemaMismatch, StorageClosed
from tallyroll.storage.files.run_record import record_bytes, record_template
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import TRAJ_IDS
from tallyroll.storage.stores.row_sink import RowSink
from tallyroll.storage.stores.run_entries import RunEntries

_GO_ON = (
    "To go on after them, open the storage again and give it to a collector with resume=True: it "
    "has the counts of the last commit, and counts what waited then as lost. Close a collector "
    "before its storage: put its `with` block inside the storage's"
)
_MOST_IDS = 2**62  # so that those of any run fit after them
_LARGEST_ID = 2**63 - 2  # a larger one of a postproc has no next


class StoredRun:
    """A run that is written to a storage, or to none.

    Args:
        storage: the storage; None: rows go elsewhere.
        buffer_ids: the ids of a run whose rows go to a TorchRL storage alone.
        resumes: the last run in the storage is continued.
        frames: transitions of the whole run, for which space is reserved; None if unknown.
        part: the shard that it is, whose ids begin at a multiple of its run's lanes.
    """

    def __init__(
        self,
        storage: RowSink | None,
        buffer_ids: BufferIds | None,
        *,
        resumes: bool,
        frames: int | None,
        part: ShardOfRun | None = None,
    ) -> None:
        self._storage, self._buffer_ids, self._frames = storage, buffer_ids, frames
        self._part = part
        self._reader = None if storage is None else storage.reader
        self._resumes = resumes
        self.last_run: LastRun | None = None
        """The entry of the run that goes on; None: it begins."""
        self._without_rows: Sequence[Mapping[str, Any]] = ()
        """Entries of runs that made no row, which are removed when this one begins."""
        self.ready = False
        """True once the storage, or the buffer, was made ready for rows."""
        self.first_row = self._stored_before = 0
        """The first row of the run; and its rows that are in another storage."""
        self.counts = RunCounts()
        self._drawn_at = -1
        """Rows in the storage when the next id was looked for."""
        self.begun = storage is None
        """:meth:`begin` was called."""
        self.events = RunEvents()
        """Calls of its environments; also has its entry in the manifest."""
        self._loaded: Ledger | None = None
        """The ledger of a loaded state that the run goes on from."""
        self._stored_elsewhere = 0
        """Transitions that the run had stored by then."""
        if storage is not None:
            storage.writer.claim.take(self, begins=resumes)

    # --- how it goes on ---------------------------------------------------------------------------

    def resumed(self, lanes: int, seed: int | None = None) -> Ledger | None:
        """The ledger of the run to be continued, up to its last row; None: a new one begins.

        ``lanes`` are as many as it has. A later run that has no rows, and other lanes or another
        ``seed``, is passed over.
        """
        storage = self._storage
        if not self._resumes or storage is None:
            return None
        reader = storage.reader
        if storage.mode == "create" and not reader.head:
            raise StateError(
                f'{reader.path} was opened with mode="create", which has no run yet; open the one '
                'to be continued with mode="append"'
            )
        entries, self._without_rows = without_rows(reader, lanes, seed)
        if self._without_rows and not entries:
            return None
        self.last_run = last_run_of(entries, reader.path, reader.head)
        same_lanes(self.last_run, lanes)
        same_shard(self.last_run, self._part)
        ledger, self._stored_before = resumed_ledger(reader, self.last_run)
        return ledger

    @property
    def last(self) -> tuple[RowReader, int] | None:
        """The rows, and the first of the run to be continued; None: there is none."""
        if self._reader is None or self.last_run is None:
            return None
        return self._reader, self.last_run.first_row

    def continues(self, first_row: int) -> None:
        """Continue the run that began at ``first_row``, after some of its rows were removed."""
        reader, self.last_run = self._reader, None
        assert reader is not None
        if reader.head > first_row:
            last = last_run_of(reader.manifest["runs"], reader.path, reader.head)
            if last.first_row != first_row:
                raise StateError(
                    f"the last run in {reader.path} began at row {last.first_row}, and the "
                    f"checkpoint is of the one that began at row {first_row}"
                )
            self.last_run, self.first_row = last, first_row
        self._drawn_at = reader.head

    @property
    def goes_on(self) -> bool:
        """True if the run was begun before, in this storage."""
        return self.last_run is not None

    def goes_on_from(self, ledger: Ledger, provenance: Mapping[str, Any], next_id: int) -> None:
        """Go on from a loaded state: the run's earlier rows are not of this storage's run.

        Ids below ``next_id`` may be those of such rows.
        """
        if self._storage is None:
            return
        self.counts.next_id, self._loaded = max(self.counts.next_id, next_id), ledger
        self._stored_elsewhere = ledger.stored
        if self.ready and self._storage.writer.claim.is_of(self):
            self._begin_entry(self._storage, self._storage.reader.schema, provenance)

    # --- ids --------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """One more than the largest trajectory id that was ever stored."""
        next_id, reader = self.counts.next_id, self._reader
        if reader is not None:
            self._drawn_at = reader.head
            if reader.head and len(ids := reader.shown(TRAJ_IDS)):
                next_id = max(next_id, int(ids.max()) + 1)
            # Of a ring the rows with the largest ids may be gone.
            record = whole_record(reader)
            next_id = max(next_id, 0 if record is None else record.next_id)
        elif self._buffer_ids is not None:
            next_id = max(next_id, self._buffer_ids.next())
        if next_id > _MOST_IDS:
            raise StateError(
                f"expected stored trajectory ids below {_MOST_IDS}, got {next_id - 1}, which "
                "leaves no ids for a new run. Start a new storage."
            )
        if self._part is not None:
            next_id = first_id(next_id, self._part.run_lanes)
        self.counts.next_id = next_id
        return next_id

    def count_ids(self, largest: int) -> None:
        """Note the largest id of rows that are about to be stored."""
        self.counts.next_id = max(self.counts.next_id, min(largest, _LARGEST_ID) + 1)

    # --- its beginning ----------------------------------------------------------------------------

    def open(self, schema: Schema, provenance: Mapping[str, Any]) -> None:
        """Make the files, or check that the storage fits; nothing is written before it does."""
        storage, last = self._storage, self.last_run
        assert storage is not None
        self.first_row = storage.reader.head if last is None else last.first_row
        if last is not None:
            same_source(last.environment, provenance["environment"])
        self._reserve(storage, schema)
        if storage.reader.initialised:
            try:
                storage.writer.runs.require_schema(schema)
            except SchemaMismatch as error:
                runs = storage.reader.manifest["runs"]
                if runs and (changed := changed_arguments(runs[-1], provenance)):
                    raise SchemaMismatch(
                        f"{error} Arguments that decide about columns have changed since its last "
                        f"run: {changed}."
                    ) from error
                raise
            if not storage.writer.claim.is_of(self):
                return
        self._begin_entry(storage, schema, provenance)

    def _reserve(self, storage: RowSink, schema: Schema) -> None:
        if self._frames is not None and _fits(storage, schema):
            stored = self._stored_before + storage.reader.head - self.first_row
            storage.reserve(max(1, storage.reader.head + self._frames - stored))

    def begin(self, provenance: Mapping[str, Any]) -> int | None:
        """Begin the run in the storage, which is its own until it is over.

        Returns:
            The first id of a trajectory, where it is another than :meth:`next_id` was before.

        Raises:
            RunUnderWay: another collector's run is not over.
        """
        storage, drawn_at = self._storage, self._drawn_at
        if storage is None:
            return None
        held = storage.writer.claim.is_of(self)
        storage.writer.claim.take(self)
        noted = held and self.events.entry is not None and storage.reader.head == drawn_at
        if self.ready and not noted:
            self._begin_entry(storage, storage.reader.schema, provenance)
        self.begun = True
        return None if storage.reader.head == drawn_at else self.next_id()

    def _begin_entry(self, storage: RowSink, schema: Schema, provenance: Mapping[str, Any]) -> None:
        """Note in the manifest at which row the run begins, or goes on."""
        if self.last_run is None:
            self.first_row = storage.reader.head
        if self._loaded is not None:
            self._stored_before = self._stored_elsewhere - (storage.reader.head - self.first_row)
        runs = storage.writer.runs
        if self.events.entry is not None:
            runs.withdraw(self.events.entry)
            self.events.entry = None
        for entry in self._without_rows:
            runs.withdraw(entry)
        self._without_rows = ()
        if storage.reader.initialised and storage.reader.head != self._drawn_at:
            self._reserve(storage, schema)
        run, at = {**provenance, "first_row_of_run": self.first_row}, self._stored_before
        if storage.reader.head != (drawn_at := self._drawn_at):  # others have added rows
            run["first_id"] = max(run.get("first_id", 0), self.next_id())
            self._drawn_at = drawn_at
        at += storage.reader.head - self.first_row
        runs.begin(schema, run | self.events.at_beginning(at, storage.reader.head, run))
        self.events.entry = storage.reader.manifest["runs"][-1]
        ledger, record = self._loaded, whole_record(storage.reader)
        fresh = ledger is None and self.last_run is None
        if fresh and record is not None and record.first_row == self.first_row:
            # A run had begun here that has no rows: what it counted is not this one's.
            ledger = Ledger(seed=provenance["seed"], incarnation=provenance["incarnation"])
        if ledger is not None:
            storage.writer.put_record(self.record(ledger, 0))

    def note(self, found: Mapping[str, Any]) -> None:
        """Add ``found`` to the run's entry, where it has one, in a storage that takes notes."""
        storage, entry = self._storage, self.events.entry
        if storage is None or entry is None or storage.reader.closed:
            return
        if isinstance(runs := storage.writer.runs, RunEntries):
            self.events.entry = runs.note(entry, found)

    # --- its rows ---------------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Rows that were ever committed to the storage, which may be closed by now."""
        return 0 if self._reader is None else self._reader.last_head

    def rows_of(self, before: int, stored: int) -> range | None:
        """Return the absolute rows in the storage of the run's rows from ``before`` on.

        ``stored``: all rows of the run so far. None if there is no storage.
        """
        if self._storage is None:
            return None
        # Computed from the run's own counts: to read the header takes four calls a batch.
        behind = self.first_row - self._stored_before if self.ready else self.head - stored
        return range(behind + before, behind + stored)

    @property
    def committed(self) -> str:
        """A sentence that says which rows of the run are stored."""
        if self._storage is None:
            return "Rows of this run were yielded, or put into a replay buffer"
        head, path = self.head, self._storage.reader.path
        first = self.first_row if self.ready else head
        if head <= first:
            return f"No rows of this run are committed in {path}"
        return f"Rows {first:,} to {head - 1:,} of {path} are committed, of this run"

    def require_open(self) -> None:
        """Raise `StorageClosed` where the storage was closed under the run's feet."""
        if self._reader is not None and self._reader.closed:
            raise StorageClosed(
                f"{self._reader.path} was closed while its collector goes on: nothing more of the "
                f"run can be stored. {self.committed}. {_GO_ON}"
            )

    # --- its record, and its end ------------------------------------------------------------------

    def record(
        self, ledger: Ledger, open_lanes: int, values: tuple[int, ...] | None = None
    ) -> bytes:
        """Return the record of the run; ``open_lanes`` is the number of its open trajectories."""
        return record_bytes(COUNTS) % (
            self.first_row,
            self._stored_before,
            -1 if ledger.seed is None else ledger.seed,
            ledger.incarnation,
            *(ledger.values if values is None else values),
            open_lanes,
            self.counts.next_id,
        )

    def record_template(self, ledger: Ledger) -> bytes:
        """Return the record with ``%d`` for each number that changes from slot to slot."""
        return record_template(COUNTS, self.first_row, self._stored_before, ledger.seed)

    def finish(self, ledger: Ledger, left: int) -> None:
        """Commit the final ledger, and update the files that other programs read.

        ``left`` transitions were collected and are in no batch.

        Raises:
            StorageClosed: it was closed before; the message says what is not stored.
        """
        storage = self._storage
        if storage is None or not self.ready or not storage.writer.claim.is_of(self):
            return
        if storage.reader.closed:
            path = storage.reader.path
            raise StorageClosed(
                f"{path} was closed before its collector. Not stored: the final ledger of "
                f"the run, in the storage's record, and {left:,} transitions that waited for the "
                f"next batch. {self.committed}. {_GO_ON}"
            )
        storage.writer.put_record(self.record(ledger, 0))
        storage.flush()
        self.end()

    def end(self) -> None:
        """Leave the storage to other runs."""
        if self._storage is not None:
            self._storage.writer.claim.end(self)


def _fits(storage: RowSink, schema: Schema) -> bool:
    try:
        return not storage.reader.schema.differences(schema)
    except NotInitialised:
        return True
