"""A run in its storage: its claim, manifest entry, events, rows, ids and record."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tallyroll.collector.batches.stored.buffer_items import BufferIds
from tallyroll.collector.batches.stored.resume import (
    LastRun,
    changed_arguments,
    last_run_of,
    relevant_runs,
    require_same_environment,
    require_same_lanes,
    require_same_shard,
    resumed_ledger,
    whole_record,
)
from tallyroll.collector.counting.ledger import COUNTS, Ledger
from tallyroll.collector.counting.shards import first_id
from tallyroll.collector.errors import StateError
from tallyroll.collector.native.slot_rows import RunCounts
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.storage import Schema
from tallyroll.storage.errors import NotInitialised, SchemaMismatch, StorageClosed
from tallyroll.storage.files.run_events import EVENTS, LEFT_OUT, stored_form
from tallyroll.storage.files.run_record import record_bytes, record_template
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import TRAJ_IDS
from tallyroll.storage.stores.row_sink import RowSink
from tallyroll.storage.stores.run_entries import RunEntries

_GO_ON = (
    "To continue from the last commit, open the storage again and pass it to a collector with "
    "resume=True. The transitions that waited at that commit are counted as lost. Close a "
    "collector before its storage: put its `with` block inside that of the storage"
)
_MOST_IDS = 2**62  # the ids of any further run fit after them
_LARGEST_ID = 2**63 - 2  # `postproc` may make larger ids, which have no successor


class StoredRun:
    """A run that is written to a storage, or to no storage.

    Args:
        storage: the storage; None if rows are written elsewhere.
        buffer_ids: the source of trajectory ids if rows go only to a TorchRL storage.
        resumes: True if the last run in the storage is continued.
        frames: number of transitions of the whole run, for which space is reserved; None if
            unknown.
        part: the shard, whose ids begin at a multiple of the lanes of the whole run; None for a
            whole run.
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
        """The entry of the run that is continued; None for a new run."""
        self._without_rows: Sequence[Mapping[str, Any]] = ()
        """Entries of runs without rows, which are removed when this run begins."""
        self.ready = False
        """True once the storage, or the buffer, is ready for rows."""
        self.first_row = self._stored_before = 0
        """The first row of the run, and the number of its rows in another storage."""
        self.counts = RunCounts()
        self._drawn_at = -1
        """Number of rows in the storage when the next id was determined."""
        self.begun = storage is None
        """True if :meth:`begin` was called, or if there is no storage."""
        self.events = RunEvents()
        """Calls of the run's environments; this object also has the run's entry in the manifest."""
        self._loaded: Ledger | None = None
        """The ledger of a loaded state from which the run continues; None if none was loaded."""
        self._stored_elsewhere = 0
        """Number of transitions that the run had stored in the loaded state."""
        if storage is not None:
            storage.writer.claim.take(self, begins=resumes)

    # --- continuing a run -------------------------------------------------------------------------

    def resumed(self, lanes: int, seed: int | None = None) -> Ledger | None:
        """Return the ledger of the run to be continued, up to its last row; None for a new run.

        The run must have ``lanes`` lanes. A later run is skipped if it has no rows, and has another
        number of lanes or another ``seed``.
        """
        storage = self._storage
        if not self._resumes or storage is None:
            return None
        reader = storage.reader
        if storage.mode == "create" and not reader.head:
            raise StateError(
                f'{reader.path} was opened with mode="create" and has no run yet. Open the storage '
                'of the run to be continued with mode="append".'
            )
        entries, self._without_rows = relevant_runs(reader, lanes, seed)
        if self._without_rows and not entries:
            return None
        self.last_run = last_run_of(entries, reader.path, reader.head)
        require_same_lanes(self.last_run, lanes)
        require_same_shard(self.last_run, self._part)
        ledger, self._stored_before = resumed_ledger(reader, self.last_run)
        return ledger

    @property
    def last(self) -> tuple[RowReader, int] | None:
        """The reader, and the first row of the run to be continued; None if no run is continued."""
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
                    f"the last run in {reader.path} began at row {last.first_row}, but the "
                    f"checkpoint is of the run that began at row {first_row}. Load a checkpoint of "
                    "the last run."
                )
            self.last_run, self.first_row = last, first_row
        self._drawn_at = reader.head

    @property
    def goes_on(self) -> bool:
        """True if the run began earlier in this storage."""
        return self.last_run is not None

    def goes_on_from(self, ledger: Ledger, provenance: Mapping[str, Any], next_id: int) -> None:
        """Continue from a loaded state, whose rows are not in this storage's run.

        Such rows may have ids below ``next_id``.
        """
        if self._storage is None:
            return
        self.counts.next_id, self._loaded = max(self.counts.next_id, next_id), ledger
        self._stored_elsewhere = ledger.stored
        if self.ready and self._storage.writer.claim.is_of(self):
            self._begin_entry(self._storage, self._storage.reader.schema, provenance)

    # --- ids --------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """Return one more than the largest trajectory id that was ever stored."""
        next_id, reader = self.counts.next_id, self._reader
        if reader is not None:
            self._drawn_at = reader.head
            if reader.head and TRAJ_IDS in reader.keys and len(ids := reader.shown(TRAJ_IDS)):
                next_id = max(next_id, int(ids.max()) + 1)
            # A ring may have overwritten the rows with the largest ids.
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

    # --- beginning a run --------------------------------------------------------------------------

    def open(
        self, schema: Schema, provenance: Mapping[str, Any], *, declared: bool = False
    ) -> None:
        """Make the files, or check that the storage fits, before anything is written.

        ``declared`` is True if the schema is from declared spaces, and not from a first batch.
        """
        storage, last = self._storage, self.last_run
        assert storage is not None
        self.first_row = storage.reader.head if last is None else last.first_row
        if last is not None:
            require_same_environment(last.environment, provenance["environment"])
        self._reserve(storage, schema)
        if storage.reader.initialised:
            try:
                storage.writer.runs.require_schema(schema)
            except SchemaMismatch as error:
                runs = storage.reader.manifest["runs"]
                if runs and (changed := changed_arguments(runs[-1], provenance)):
                    raise SchemaMismatch(
                        f"{error} Arguments that determine columns have changed since the last run "
                        f"of the storage: {changed}."
                    ) from error
                raise
            if not storage.writer.claim.is_of(self):
                return
        self._begin_entry(storage, schema, provenance, declared=declared)

    def _reserve(self, storage: RowSink, schema: Schema) -> None:
        if self._frames is not None and _fits(storage, schema):
            stored = self._stored_before + storage.reader.head - self.first_row
            storage.reserve(max(1, storage.reader.head + self._frames - stored))

    def begin(self, provenance: Mapping[str, Any]) -> int | None:
        """Begin the run in the storage, and keep other runs out until this run is over.

        Returns:
            The first id of a trajectory; None if :meth:`next_id` has not changed since it was
            called.

        Raises:
            RunUnderWay: the run of another collector is not over.
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

    def mark_ready(self) -> None:
        """Note that the storage, or the buffer, is ready for rows."""
        self.ready = True

    def _begin_entry(
        self,
        storage: RowSink,
        schema: Schema,
        provenance: Mapping[str, Any],
        *,
        declared: bool = False,
    ) -> None:
        """Note in the manifest at which row the run begins or continues."""
        if self.last_run is None:
            self.first_row = storage.reader.head
        if self._loaded is not None:
            self._stored_before = self._stored_elsewhere - (storage.reader.head - self.first_row)
        runs = storage.writer.runs
        if self.events.entry is not None:
            runs.withdraw(self.events.entry)
            self.events.enter(None)
        for entry in self._without_rows:
            runs.withdraw(entry)
        self._without_rows = ()
        if storage.reader.initialised and storage.reader.head != self._drawn_at:
            self._reserve(storage, schema)
        run, at = {**provenance, "first_row_of_run": self.first_row}, self._stored_before
        if storage.reader.head != (drawn_at := self._drawn_at):  # other runs have added rows
            run["first_id"] = max(run.get("first_id", 0), self.next_id())
            self._drawn_at = drawn_at
        at += storage.reader.head - self.first_row
        entry = run | self.events.at_beginning(at, storage.reader.head, run)
        if isinstance(runs, RunEntries):
            runs.begin(schema, entry, declared=declared)
        else:
            runs.begin(schema, entry)
        self.events.enter(storage.reader.manifest["runs"][-1])
        ledger, record = self._loaded, whole_record(storage.reader)
        fresh = ledger is None and self.last_run is None
        if fresh and record is not None and record.first_row == self.first_row:
            # A run without rows began at this row: its record must not count for this run.
            ledger = Ledger(seed=provenance["seed"], incarnation=provenance["incarnation"])
        if ledger is not None:
            storage.writer.put_record(self.record(ledger, 0))

    def note(self, found: Mapping[str, Any]) -> None:
        """Add ``found`` to the run's entry, if it exists and the storage supports this."""
        storage, entry = self._storage, self.events.entry
        if storage is None or entry is None or storage.reader.closed:
            return
        if isinstance(runs := storage.writer.runs, RunEntries):
            self.events.enter(runs.note(entry, found))

    # --- rows of the run --------------------------------------------------------------------------

    @property
    def head(self) -> int:
        """Number of rows ever committed to the storage, which may be closed by now."""
        return 0 if self._reader is None else self._reader.last_head

    def rows_of(self, before: int, stored: int) -> range | None:
        """Return the absolute row numbers in the storage of the run's rows from ``before`` on.

        ``stored`` is the number of all rows of the run so far. Return None if there is no storage.
        """
        if self._storage is None:
            return None
        # Computed from the run's own counts, because reading the header takes four calls per batch.
        behind = self.first_row - self._stored_before if self.ready else self.head - stored
        return range(behind + before, behind + stored)

    @property
    def committed(self) -> str:
        """A sentence about the rows of the run that are stored."""
        if self._storage is None:
            return "Rows of this run were yielded, or added to a replay buffer"
        head, path = self.head, self._storage.reader.path
        first = self.first_row if self.ready else head
        if head <= first:
            return f"No rows of this run are committed in {path}"
        return f"Rows {first:,} to {head - 1:,} of {path} are committed by this run"

    def require_open(self) -> None:
        """Raise `StorageClosed` if the storage was closed before the run ended."""
        if self._reader is not None and self._reader.closed:
            raise StorageClosed(
                f"{self._reader.path} was closed before its collector, which cannot store more "
                f"rows of the run. {self.committed}. {_GO_ON}"
            )

    # --- the record and the end of the run --------------------------------------------------------

    def record(
        self, ledger: Ledger, open_lanes: int, values: tuple[int, ...] | None = None
    ) -> bytes:
        """Return the record of the run, in which ``open_lanes`` trajectories are open."""
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

        ``left`` is the number of collected transitions that are in no batch.

        Raises:
            StorageClosed: the storage was closed first; the message lists the data that was not
                stored.
        """
        storage = self._storage
        if storage is None or not self.ready or not storage.writer.claim.is_of(self):
            return
        if storage.reader.closed:
            path = storage.reader.path
            raise StorageClosed(
                f"{path} was closed before its collector, so the final ledger of the run and "
                f"{left:,} transitions that waited for the next batch were not stored. "
                f"{self.committed}. {_GO_ON}"
            )
        storage.writer.put_record(self.record(ledger, 0))
        storage.flush()
        self.end()

    def end(self) -> None:
        """Release the storage for other runs."""
        if self._storage is not None:
            self._storage.writer.claim.end(self)


def _fits(storage: RowSink, schema: Schema) -> bool:
    try:
        return not storage.reader.schema.differences(schema)
    except NotInitialised:
        return True


class RunEvents:
    """The events of a run since its collector was made."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.entry: Mapping[str, Any] | None = None
        """The run's entry in the manifest; None before it has one."""

    def enter(self, entry: Mapping[str, Any] | None) -> None:
        """Set the run's entry in the manifest, to which future events are added.

        None if the run has no entry yet.
        """
        self.entry = entry

    def at_beginning(self, at: int, row: int, run: Mapping[str, Any]) -> dict[str, Any]:
        """Return the events before the first row, for the entry ``run``.

        ``at`` is the number of transitions of the run, and ``row`` is the number of its next row.
        """
        for event in self.all:
            event["at"] = at
        made = [stored_form({**event, "row": row}, run) for event in self.all]
        return {EVENTS: made} if made else {}

    def add(self, event: dict[str, Any], storage: RowSink | None) -> None:
        """Add an event. ``storage`` is the storage of the run, or None if nothing is stored."""
        self.all.append(event)
        if self.entry is None or storage is None or storage.reader.closed:
            return  # the entry will have it
        before = self.entry.get(LEFT_OUT)
        event = {**event, "row": storage.reader.head}
        self.entry = storage.writer.runs.add_event(self.entry, event)
        if self.entry.get(LEFT_OUT) and not before:
            warnings.warn(
                f"{storage.reader.path} holds the maximum number of events of its runs: this call "
                "and later ones reach the environments but are not recorded, so later rows cannot "
                "be replayed. Call environments less often",
                stacklevel=5,
            )
