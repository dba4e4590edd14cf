"""Runs and episodes of a storage, from its manifest and its table of trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.storage.errors import ColumnsMissing, CorruptStorage
from tallyroll.storage.files.copied_runs import FIRST_ROW_OF_RUN
from tallyroll.storage.files.manifest import UNVERSIONED
from tallyroll.storage.files.run_events import EVENTS, events_of
from tallyroll.storage.files.run_record import is_count
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import END_OPEN, END_TERMINATED, END_TRUNCATED

Table = np.ndarray[Any, Any]

# These functions accept invalid values in a manifest, because `verify` reports them.


def part(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping in a run's entry, or {} if it is absent or of another type."""
    value = run.get(name)
    return value if isinstance(value, dict) else {}


def whole_number(run: Mapping[str, Any], name: str, default: int = 0) -> int:
    """Return a whole number in a run's entry, or ``default`` if there is none."""
    value: Any = run.get(name)
    return value if is_count(value) else default


def runs_of(entries: Sequence[Mapping[str, Any]], span: range) -> list[dict[str, Any]]:
    """Return one entry per run, with the entries that a resume added merged into it.

    ``rows`` is the number of rows of ``span`` that the run wrote. ``resumed`` counts the rows at
    which a later start continues the run, and ``resumed_at`` lists those that ``entries`` record. A
    start whose rows were rewound does not count. A start that loads a checkpoint counts once.
    ``events`` has the events of all entries, if there are any.
    """
    runs: list[dict[str, Any]] = []
    for entry in entries:
        first = whole_number(entry, FIRST_ROW_OF_RUN, entry["first_row"])
        run = {**entry, "first_row": first}
        run.pop(FIRST_ROW_OF_RUN, None)
        # Earlier rows may be in another storage, whose entries are unknown.
        at: list[int] = []
        resumed = max(0, whole_number(run, "incarnation") - whole_number(run, "respawned"))
        events = events_of(entry)
        if runs and runs[-1]["first_row"] == first and whole_number(run, "incarnation") > 0:
            before = runs.pop()
            at, resumed = [*before["resumed_at"], entry["first_row"]], before["resumed"] + 1
            events = [*before.get(EVENTS, []), *events]
            if note := part(before, UNVERSIONED):
                run[UNVERSIONED] = note
        run.pop(EVENTS, None)
        run.update({EVENTS: events} if events else {})
        runs.append({**run, "resumed": resumed, "resumed_at": at})
    ends = [*(run["first_row"] for run in runs), span.stop][1:]
    for run, end in zip(runs, ends, strict=True):
        run["rows"] = len(range(max(run["first_row"], span.start), min(end, span.stop)))
    return runs


def unversioned(run: Mapping[str, Any]) -> str:
    """Return a sentence about weights that changed without a new policy version.

    The result is empty if the run recorded no such change.
    """
    note = part(run, UNVERSIONED)
    if not note:
        return ""
    at, version = whole_number(note, "at"), whole_number(note, "policy_version")
    return (
        f"the policy's weights changed after {at:,} transitions without update_policy_weights_(): "
        f"policy_version {version} names several sets of weights"
    )


def lines_of(storage: DiskStorage, span: range) -> tuple[Table, Table] | None:
    """Return the trajectories with rows in ``span``, and a mask of complete episodes.

    The result is None if rows do not name their trajectory, or if the table is damaged.
    """
    try:
        table = storage.trajectories.table
    except (ColumnsMissing, CorruptStorage):  # `verify` reports the reason
        return None
    return table_of(table, span)


def table_of(table: Table, span: range) -> tuple[Table, Table]:
    """Return the lines of ``table`` with rows in ``span``, and a mask of complete episodes."""
    table = table[(table["first_row"] < span.stop) & (table["last_row"] >= span.start)]
    # A writer may have added rows after ``span``. Trajectories with such rows were still open.
    table["end"][table["last_row"] >= span.stop] = END_OPEN
    ended = np.isin(table["end"], (END_TERMINATED, END_TRUNCATED))
    return table, ended & (table["first_row"] >= span.start) & (table["first_step"] == 0)
