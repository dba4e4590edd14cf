"""Rewinds, which restore a storage to the state of an earlier commit.

A rewind takes effect with one store to the head. If the writer is killed after that store, the next
writer repeats the remaining steps. For each rewind, the manifest records the number of rows that
were left. A state that was saved earlier can thus be compared with the rows that are stored now.
"""

from __future__ import annotations

from tallyroll.storage.errors import RunUnderWay, StateMismatch
from tallyroll.storage.files.paths import translates_errors
from tallyroll.storage.files.record_slots import Rewind
from tallyroll.storage.files.rewind_history import least_rows_after_rewinds, settled
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.stores.row_writer import ReadOnlyWriter, RowWriter


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
            f"rows from {left} on were removed by a rewind since then, and other rows may have "
            "replaced them"
            if left is not None
            else "the state was written after a rewind that this storage does not have"
        )
        raise StateMismatch(
            f"{what} has {rows} rows that no longer match those of {reader.path}: {why}. Use an "
            "older state, or a newer one."
        )


@translates_errors
def rewind_to(
    writer: RowWriter | ReadOnlyWriter,
    rows: int,
    record: tuple[int, bytes] | None,
    run: object = None,
) -> int:
    """Remove all rows from number ``rows`` on, restore the record, and return the number removed.

    Readers in other processes that still hold these rows see other values once later rows arrive.
    In a ring, rows that were overwritten in the meantime are not restored.

    Args:
        writer: the writer of the storage.
        rows: the number of committed rows after the rewind.
        record: the number of rows at which the restored record was written, and its payload; None:
            there was no record.
        run: the run of a collector, if that run may hold the claim.

    Raises:
        StateMismatch: the storage has fewer than ``rows`` rows, or was finalized with more.
        RunUnderWay: another run is being written.
        WriteError: this process may not write.
    """
    if isinstance(writer, ReadOnlyWriter):
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


@translates_errors
def remove_sidecars(writer: RowWriter, *, rewound: bool = False) -> None:
    """Remove the files alongside the rows, because they describe rows that are replaced.

    With ``rewound``, after a rewind, two files stay: the file of priorities records the rows that
    it belongs to, and the file of drawn rows contains only counts.
    """
    writer.reader.running().right.require()
    for path in writer.files.beside:
        if not rewound or path not in (writer.files.priorities_path, writer.files.drawn_path):
            writer.files.inside.remove(path)


def require_rewindable(writer: RowWriter | ReadOnlyWriter, rows: int, run: object = None) -> None:
    """Raise the errors of `rewind_to` if it would fail; change nothing."""
    if isinstance(writer, ReadOnlyWriter):
        writer.refuse()
    writer.reader.running().right.require()
    if run is None or not writer.claim.is_of(run):
        try:
            writer.claim.require_none()
        except RunUnderWay as error:
            raise RunUnderWay(
                f"a collector is writing a run to {writer.path}, so its rows cannot be rewound. "
                "Give the checkpoint that collector, or shut down the collector first."
            ) from error
    reader = writer.reader
    if not 0 <= rows <= reader.head:
        raise StateMismatch(
            f"{reader.path} cannot be rewound to {rows} rows: it has only {reader.head}. Restore "
            "the storage from a copy that is as new as the state."
        )
    done = reader.manifest.get("finalized")
    least = done.get("head") if isinstance(done, dict) else None
    if isinstance(least, int) and rows < least:
        raise StateMismatch(
            f"{reader.path} was finalized with {least} rows and cannot be rewound to {rows}. "
            "Copy the rows to keep to another storage."
        )
