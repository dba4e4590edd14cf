"""Compare what is kept beside the rows with the rows: hashes of the content, and statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tallyroll.storage.ext.statistics.checking import differences
from tallyroll.storage.ext.statistics.counting import Counted
from tallyroll.storage.ext.verification.findings import PLACES, Findings, Place
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, spell
from tallyroll.storage.trajectories.kept_leaves import KeptLeaves
from tallyroll.storage.trajectories.leaves import Leaves


def check_content(
    reader: RowReader,
    kept: KeptLeaves,
    lines: np.ndarray,
    findings: Findings,
    tell: Callable[[int], None],
) -> None:
    """Hash rows again whose hashes are kept, and compare.

    Args:
        reader: the reader of the rows.
        kept: where hashes are kept.
        lines: the leaves that it read.
        findings: where differences are added.
        tell: called with the number of bytes that were read since its last call.

    Raises:
        Overrun: a ring's writer overwrites rows while they are read.
    """
    leaves = Leaves(reader)
    now = leaves.lines()
    known = np.flatnonzero(kept.fill(now, lines))
    found = leaves.hashes(known, tell)
    wrong = known[(found != now["sha256"][known]).any(1)]
    rows, counts = now["first"][wrong], now["rows"][wrong]

    def place(at: int) -> Place:
        id = int(leaves.content.run_ids[leaves.starts[wrong[at]]])
        what = f"or one of the {counts[at] - 1:,} rows after it, by trajectory and step"
        return Place(row=int(rows[at]), trajectory=id, what=what)

    findings.add_rows("content", "rows are not those whose hash was kept", rows, place)


def check_statistics(
    reader: RowReader,
    kept: Mapping[Key, Counted],
    findings: Findings,
    tell: Callable[[int], None],
) -> None:
    """Count columns again whose statistics are kept, and compare.

    Args:
        reader: the reader of the rows.
        kept: what was counted, by column.
        findings: where differences are added.
        tell: called with the number of bytes that were read since its last call.
    """
    columns = {column.key: column for column in reader.schema.columns}
    for key, counted in kept.items():
        wrong = [*differences(reader, columns[key], counted, tell)]
        places = [Place(column=spell(key), what=each) for each in wrong[:PLACES]]
        if wrong:
            message = "statistics that are kept are not those of the rows"
            findings.add("statistics", message, *places, count=len(wrong))
