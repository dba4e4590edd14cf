"""The rows that a checkpoint belongs to: named in it, copied beside it, and gone back to."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tallyroll.collector.batches.state.saved_state import Since
from tallyroll.collector.batches.stored.resume import newest_version
from tallyroll.collector.batches.stored.stored_run import StoredRun
from tallyroll.collector.errors import StateError
from tallyroll.storage.errors import StateMismatch
from tallyroll.storage.files.run_record import RunRecord, is_count, record_after
from tallyroll.storage.replay import buffers
from tallyroll.storage.replay.checkpoint import DiskStorageCheckpointer
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.rewinds import require_kept, require_rewindable, take_back


@dataclass(frozen=True)
class RowsAt:
    """Which rows a storage had, by their number, and the record that went with them."""

    path: str
    id: str
    rows: int
    rewinds: int
    first: int
    """The first row that was there: of a ring, the oldest."""
    first_row: int
    """The first row of the collector's run; -1 without one."""
    record: tuple[int, bytes] | None

    @classmethod
    def of(cls, storage: DiskStorage, run: StoredRun | None) -> "RowsAt":
        """Return those of a storage, which are on the disk when this returns."""
        reader, writer = storage.reader, storage.writer
        with writer.turn:
            if storage.mode != "read":
                writer.opened.settle()  # a power cut must not leave a checkpoint without them
            return cls(
                str(storage.path),
                reader.id or "",
                reader.head,
                reader.rewinds,
                reader.span.start,
                -1 if run is None else run.first_row,
                reader.record,
            )

    def as_state(self) -> dict[str, Any]:
        """Return plain values."""
        return {**vars(self), "record": None if self.record is None else list(self.record)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "RowsAt":
        """Return a result of :meth:`as_state`.

        Raises:
            StateError: it is none.
        """
        try:
            numbers = [state[name] for name in ("rows", "rewinds", "first")]
            record, first = state["record"], state["first_row"]
            sound = all(is_count(each) and each >= 0 for each in numbers) and is_count(first)
            sound &= isinstance(state["id"], str)
            if record is not None:
                at, payload = record
                sound &= is_count(at) and 0 <= at <= numbers[0] and isinstance(payload, bytes)
                record = at, payload
        except (KeyError, TypeError, ValueError):
            sound = False
        if not sound:
            raise StateError("the checkpoint's storage is described by other values than it wrote")
        rows, rewinds, oldest = numbers
        return cls(str(state["path"]), state["id"], rows, rewinds, oldest, first, record)

    # --- going back -------------------------------------------------------------------------------

    def require_same(self, storage: DiskStorage, run: StoredRun | None, *, keep: bool) -> None:
        """Refuse another storage, or one whose rows cannot be gone back to; nothing changes.

        ``keep``: its rows stay as they are. ``run`` is that of the collector.

        Raises:
            StateMismatch: says why.
            RunUnderWay: another collector writes to it.
            WriteError: this process may not write to it.
        """
        reader = storage.reader
        if not self.id:  # it had no rows and no files yet
            return
        if not reader.initialised:
            raise StateMismatch(
                f"the checkpoint belongs to {self.rows} rows of the storage that was at "
                f"{self.path}, and there are none at {storage.path}. Open that storage; or save "
                "with copy_rows=True, which takes them along."
            )
        if reader.id != self.id:
            raise StateMismatch(
                f"the checkpoint belongs to the storage that was at {self.path}, and "
                f"{storage.path} is another one. Open that one."
            )
        if keep:
            return
        if reader.head < self.rows:
            raise StateMismatch(
                f"the checkpoint has {self.rows} rows and {storage.path} has {reader.head}. "
                "Restore the storage from a copy that is as new as the checkpoint."
            )
        require_kept(reader, self.rows, self.rewinds, "the checkpoint")
        require_rewindable(storage.writer, self.rows, run)

    def go_back(self, storage: DiskStorage, run: StoredRun | None) -> tuple[int, int, Since]:
        """Take back the rows that came later.

        Return how many, how many of a ring's earlier rows they had replaced, and the numbers that
        only grow.
        """
        if not storage.reader.initialised or not self.id:
            return 0, 0, Since(0)
        first_row = max(self.first_row, 0)
        since = _today(storage, first_row)
        record = self.record
        if record is not None:
            next_id = -1 if run is None else run.next_id()
            known = RunRecord.parse(storage.record)
            payload = record_after(
                record[1],
                next_id=max(next_id, -1 if known is None else known.next_id),
                incarnation=since.incarnation,
                policy_version=since.policy_version,
            )
            record = record[0], payload
        back = take_back(storage.writer, self.rows, record, run)
        buffers.seat_writers(storage)
        return back, min(storage.span.start, self.rows) - self.first, since


def _today(storage: DiskStorage, first_row: int) -> Since:
    """Return the numbers of a run that only grow, as they are now."""
    known = [-1]
    for entry in storage.manifest["runs"]:
        if is_count(entry.get("incarnation")):
            known.append(entry["incarnation"])
    if (record := RunRecord.parse(storage.record)) is not None:
        known.append(record.incarnation)
    collected = storage.head and record is not None
    version = newest_version(storage.reader, first_row) if collected else -1
    return Since(first_row, max(known), version)


def copy_of_rows(storage: DiskStorage, path: Path) -> None:
    """Copy the committed rows to a storage at ``path``."""
    DiskStorageCheckpointer().dumps(storage, path)


def restore_rows(storage: DiskStorage, path: Path) -> bool:
    """Fill a storage that has no files yet from a copy; whether there was one to fill it from."""
    if storage.reader.initialised or not path.exists():
        return False
    if path.is_symlink():
        raise StateError(f"{path} is a link, and a checkpoint holds its rows itself")
    DiskStorageCheckpointer().loads(storage, path)
    return True
