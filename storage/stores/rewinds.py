"""Rewinds, which restore a storage to the state of an earlier commit.

One store to the head decides a rewind. If this writer is killed, the next one repeats the steps
that follow here. The manifest records, for each rewind in turn, how many rows it left. A state of
earlier rows can thus determine whether its rows are still the same.
"""

from __future__ import annotations

from tallyroll.storage.errors import RunUnderWay, StateMismatch
from tallyroll.storage.files.paths import told
from tallyroll.storage.files.record_slots import Rewind
from tallyroll.storage.files.rewind_history import least_rows_after_rewinds, settled
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.stores.row_writer import NoWriter, RowWriter


def require_not_rewound(reader: RowReader, rows: int, rewinds: int, what: str) -> None:
    """Raise `StateMismatch` if some of the first ``rows`` rows have been replaced since.

    Args:
        reader: the reader of the storage.
        rows: the number of rows of the state.
        rewinds: the number of rewinds at the time of the state.
        what: the name of the state, for the message.
    """
    now = reader.rewinds
    left = least_rows_after_rewinds(reader.manifest, rewinds, now) if rewinds < now else None
    if rewinds > now or (left is not None and left < rows):
        why = (
            f"rows were taken back from row {left} on since, and others may stand there"
            if left is not None
            else "it was written after rows had been taken back, and here they were not"
        )
        raise StateMismatch(
            f"{what} has {rows} rows that are not those of {reader.path} any more: {why}. Use a "
            "state that is older, or newer."
        )


@told
def take_back(
    writer: RowWriter | NoWriter, rows: int, record: tuple[int, bytes] | None, run: object = None
) -> int:
    """Remove all rows from number ``rows`` on and restore the record; return how many were removed.

    The contents that readers in other processes hold of these rows change when later rows arrive.
    In a ring, rows that were overwritten in the meantime are not restored.

    Args:
        writer: the writer of the storage.
        rows: the number of committed rows after the rewind.
        record: the number of rows at which the restored record was written, and its payload; None:
            there was no record.
        run: a collector's run that holds the claim.

    Raises:
        StateMismatch: fewer rows are committed, or the storage was finalized with more.
        RunUnderWay: another run is being written.
        WriteError: this process may not write.
    """
    if isinstance(writer, NoWriter):
        writer.refuse()
    reader = writer.reader
    with writer.turn:
        engine, head = reader.running(), reader.head
        require_rewindable(writer, rows, run)
        if rows == head:
            return 0
        reader.require_numbered_rewinds()
        at, payload = (-1, b"") if record is None else record
        rewind = Rewind(reader.rewinds + 1, rows, at, payload)
        writer.runs.settle()
        remove_sidecars(
            writer, rewound=True
        )  # first, since these files describe rows that disappear
        engine.rewind(rewind, lambda: reader.write_manifest(settled(reader.manifest, rewind)))
        writer.rows_changed()
        return head - rows


@told
def remove_sidecars(writer: RowWriter, *, rewound: bool = False) -> None:
    """Remove the files alongside the rows, because they describe rows that are replaced.

    After a rewind (``rewound``) two files may stay: the file of priorities says which rows it
    belongs to, and the file of drawn rows contains only counts.
    """
    writer.reader.running().right.require()
    for path in writer.files.beside:
        if not rewound or path not in (writer.files.priorities_path, writer.files.drawn_path):
            writer.files.inside.remove(path)


def require_rewindable(writer: RowWriter | NoWriter, rows: int, run: object = None) -> None:
    """Raise the errors of `take_back` if it would fail; change nothing."""
    if isinstance(writer, NoWriter):
        writer.refuse()
    writer.reader.running().right.require()
    if run is None or not writer.claim.is_of(run):
        try:
            writer.claim.require_none()
        except RunUnderWay as error:
            raise RunUnderWay(
                f"a collector is writing a run to {writer.path}, and its rows cannot be taken back "
                "under its feet. Give the checkpoint that collector, or shut it down before."
            ) from error
    reader = writer.reader
    if not 0 <= rows <= reader.head:
        raise StateMismatch(
            f"{rows} rows are to be left in {reader.path}, and it has {reader.head}. Restore the "
            "storage from a copy that is as new as the state."
        )
    done = reader.manifest.get("finalized")
    least = done.get("head") if isinstance(done, dict) else None
    if isinstance(least, int) and rows < least:
        raise StateMismatch(
            f"{reader.path} was finalized with {least} rows and cannot be rewound to {rows}. Copy "
            "the rows that you want to another storage."
        )
