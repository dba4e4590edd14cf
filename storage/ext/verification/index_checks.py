"""Compare the index of trajectories that is kept beside the rows with the rows."""

from __future__ import annotations

from tallyroll.storage.ext.verification.findings import Findings
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.trajectories.blocks.kept import RebuiltBlocks
from tallyroll.storage.trajectories.columns import RowOrder
from tallyroll.storage.trajectories.lane_file import UnusableIndex

_DELETE = "Delete it: the index is built again from the rows."


def check_index(reader: RowReader, findings: Findings) -> str | None:
    """Build the index again, and compare all its numbers. Return why not, where that is not done.

    Args:
        reader: the reader of the rows.
        findings: where a difference is added.
    """
    try:
        kept = reader.kept_index(whole=True)
        if kept is None:
            return "no index is kept beside the rows"
        says = kept.state(reader.span.start)
        if not says.by_block.size:
            return "a ring went on past the index, which is written when a writer closes"
        order = RowOrder(reader.schema)
        made = RebuiltBlocks(reader.ring, says).is_made_of(
            lambda first, stop: order.chunk(reader, first, stop)
        )
    except UnusableIndex as error:
        findings.add("index", f"{error} {_DELETE}")
        return None
    except (IndexError, ValueError):  # numbers that cannot be
        made = False
    if made is None:
        return "another process writes to this ring; wait for it"
    if not made:
        findings.add("index", f"the index beside the rows is not that of the rows. {_DELETE}")
    return None
