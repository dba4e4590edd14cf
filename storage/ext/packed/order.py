"""The order of packed rows: run by run, and trajectory by trajectory within each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.storage.engine.memory_left import require_memory
from tallyroll.storage.files.copied_runs import FIRST_ROW_OF_RUN, Entry
from tallyroll.storage.files.run_events import without_name
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import LANE, TRAJ_IDS
from tallyroll.storage.trajectories.columns import numbers_of
from tallyroll.storage.trajectories.content import expanded
from tallyroll.storage.trajectories.index import says_whose

_NBYTES_OF_A_ROW = 56


def packed_order(reader: RowReader, span: range) -> np.ndarray:
    """Return the numbers of the rows of ``span`` in the order in which they are packed.

    Trajectories come in the order of their first rows. A run's rows stay together, so that a
    trajectory that goes on in the next run is in two parts. Rows that say no trajectory stay in
    their order.

    Raises:
        NotEnoughMemory: there is not enough memory for the numbers.
        Overrun: a ring's writer overwrites rows meanwhile.
    """
    rows = np.arange(span.start, span.stop)
    if not len(rows) or not says_whose(reader.schema):
        return rows
    require_memory(len(rows) * _NBYTES_OF_A_ROW, f"the order of {len(rows):,} rows")
    ids, lane = (
        numbers_of(reader.column(key).slice(span.start, span.stop)) for key in (TRAJ_IDS, LANE)
    )
    if reader.ring:
        ids, lane = ids.copy(), lane.copy()
        if reader.span.start > span.start:
            raise reader.overrun(f"{len(rows):,}")
    at = np.argsort(lane, kind="stable")
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (np.diff(lane[at]) != 0) | (np.diff(ids[at]) != 0)
    firsts = np.array([run["first_row"] for run in reader.runs], np.int64) - span.start
    run = np.searchsorted(firsts, at, side="right")
    begins[1:] |= np.diff(run) != 0
    start = np.flatnonzero(begins)
    count = np.diff(start, append=len(rows))
    # By the first row: within a run that is the order of trajectories, and runs are in theirs.
    order = np.argsort(at[start], kind="stable")
    found: np.ndarray = rows[at[expanded(start[order], count[order])]]
    return found


def packed_runs(runs: Sequence[Mapping[str, Any]], *, counted: bool) -> list[Entry]:
    """Return the entries of runs for their packed rows.

    Unless a record that a collector wrote has ``counted`` these rows, they are none of a
    collector's, whose rows a record counts.
    """
    if not counted:
        runs = [{name: run[name] for name in run if name != FIRST_ROW_OF_RUN} for run in runs]
    return [without_name(run) for run in runs]
