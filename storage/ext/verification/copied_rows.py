"""Compare the rows of a copy with the rows of its source, bit for bit."""

from __future__ import annotations

from typing import Final

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import TRAJ_IDS, format_key
from tallyroll.storage.trajectories.columns import missing, numbers_of
from tallyroll.storage.trajectories.content import NAMING, compared_columns

_CHUNK_NBYTES: Final = 2**24
_ROW_NBYTES: Final = 120
"""Memory for each row whose source row is searched, in bytes."""


def source_rows(
    copy: RowReader, rows: range, source: RowReader, span: range, moved: int
) -> np.ndarray | None:
    """Return the number of the source row with the trajectory and step of each row of a copy.

    Args:
        copy: the reader of the copy.
        rows: the rows of the copy.
        source: the reader of the source.
        span: the rows of the source that contain the copied rows.
        moved: the trajectory ids in the copy minus those in the source.

    Returns:
        int64 [rows], with -1 for a row that the source does not have; None if the rows of one
        storage are not numbered by trajectory and step.
    """
    if missing(copy.schema, NAMING) or missing(source.schema, NAMING):
        return None
    there = source.span
    start = min(max(span.start, there.start), there.stop)
    span = range(start, max(start, min(span.stop, there.stop)))
    require_memory(
        _ROW_NBYTES * (len(span) + len(rows)),
        "the comparison of a copy with its source",
        "Prove the sources alone.",
    )
    both = (source, span), (copy, rows)
    ids, steps = (
        np.concatenate(
            [numbers_of(reader.column(key).slice(at.start, at.stop)) for reader, at in both],
            dtype=np.int64,
        )
        for key in NAMING
    )
    ids[len(span) :] -= moved
    is_copied = np.arange(len(ids)) >= len(span)
    # In this order, a source row directly precedes the copies of it.
    order = np.lexsort((is_copied, steps, ids))
    places = np.arange(len(order))
    last = np.maximum.accumulate(np.where(is_copied[order], 0, places))
    before = order[last]
    same = (ids[before] == ids[order]) & (steps[before] == steps[order]) & ~is_copied[before]
    found = np.full(len(ids), -1, np.int64)
    found[order] = np.where(same, before + span.start, -1)
    return found[len(span) :]


def first_difference(
    copy: RowReader, rows: range, source: RowReader, numbers: np.ndarray
) -> tuple[int, str] | None:
    """Return the first row of a copy that differs from its source row, and the column's name.

    Not compared are trajectory ids, columns that the source lacks, and ``collector/cut``, which
    records how rows were committed. ``numbers`` has the number of the source row of each row, int64
    [rows].
    """
    theirs = {each.key: each for each in source.schema.columns}
    columns = [each for each in compared_columns(copy.schema) if each.key in theirs]
    columns = [each for each in columns if each.key != TRAJ_IDS]
    for column in columns:
        if theirs[column.key] != column:
            return rows.start, format_key(column.key)
    size = max(1, _CHUNK_NBYTES // max(1, sum(each.row_nbytes for each in columns)))
    for start in range(0, len(rows), size):
        own = np.arange(rows.start + start, rows.start + min(start + size, len(rows)))
        wrong = []
        for column in columns:
            values, others = (
                np.ascontiguousarray(reader.column(column.key).take(at)).reshape(len(own), -1)
                for reader, at in ((copy, own), (source, numbers[start : start + size]))
            )
            if values.tobytes() != others.tobytes():
                differs = (values.view(np.uint8) != others.view(np.uint8)).any(axis=1)
                wrong.append((int(own[differs.argmax()]), format_key(column.key)))
        if wrong:
            return min(wrong)
    return None


def added_columns(copy: RowReader, source: RowReader) -> list[str]:
    """Return the names of the columns of a copy that its source lacks, such as overlays."""
    theirs = set(source.schema.keys)
    return [format_key(e.key) for e in compared_columns(copy.schema) if e.key not in theirs]
