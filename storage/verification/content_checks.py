"""Compare the hashes of the content that are kept beside the rows with the rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.trajectories.kept_leaves import KeptLeaves
from tallyroll.storage.trajectories.leaves import Leaves
from tallyroll.storage.verification.findings import Findings, Place


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
