"""Runs and episodes of a storage, as its manifest and its table of trajectories have them."""

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

# What a manifest says is taken as far as it can be: `verify` says what is wrong with it.


def part(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A mapping in a run's entry, empty where there is none, or something else."""
    value = run.get(name)
    return value if isinstance(value, dict) else {}


def whole_number(run: Mapping[str, Any], name: str, default: int = 0) -> int:
    """A whole number in a run's entry, ``default`` where there is none."""
    value: Any = run.get(name)
    return value if is_count(value) else default


def runs_of(entries: Sequence[Mapping[str, Any]], span: range) -> list[dict[str, Any]]:
    """Return one entry a run: those that a resume added are put together.

    ``rows`` are those of ``span`` that it wrote, ``resumed`` is how often it went on,
    ``resumed_at`` at which rows, and ``events`` are those of all entries, where there are some.
    """
    runs: list[dict[str, Any]] = []
    for entry in entries:
        first = whole_number(entry, FIRST_ROW_OF_RUN, entry["first_row"])
        run = {**entry, "first_row": first}
        run.pop(FIRST_ROW_OF_RUN, None)
        at: list[int] = []
        events = events_of(entry)
        if runs and runs[-1]["first_row"] == first and whole_number(run, "incarnation") > 0:
            before = runs.pop()
            at = [*before["resumed_at"], entry["first_row"]]
            events = [*before.get(EVENTS, []), *events]
            if note := part(before, UNVERSIONED):
                run[UNVERSIONED] = note
        run.pop(EVENTS, None)
        run.update({EVENTS: events} if events else {})
        resumed = max(0, whole_number(run, "incarnation") - whole_number(run, "respawned"))
        runs.append({**run, "resumed": resumed, "resumed_at": at})
    ends = [*(run["first_row"] for run in runs), span.stop][1:]
    for run, end in zip(runs, ends, strict=True):
        run["rows"] = len(range(max(run["first_row"], span.start), min(end, span.stop)))
    return runs


def unversioned(run: Mapping[str, Any]) -> str:
    """Say where weights changed and the policy's version did not; empty: the run noted nothing."""
    note = part(run, UNVERSIONED)
    if not note:
        return ""
    at, version = whole_number(note, "at"), whole_number(note, "policy_version")
    return (
        f"the policy's weights changed after {at:,} transitions without update_policy_weights_(): "
        f"policy_version {version} names several sets of weights"
    )


def lines_of(storage: DiskStorage, span: range) -> tuple[Table, Table] | None:
    """Return the table of the rows ``span``, and which lines are of whole episodes that ended.

    None if rows do not say which trajectory they belong to, or the table is damaged.
    """
    try:
        table = storage.trajectories.table
    except (ColumnsMissing, CorruptStorage):  # `verify` says what is wrong
        return None
    return table_of(table, span)


def table_of(table: Table, span: range) -> tuple[Table, Table]:
    """Return the lines of ``table`` with rows of ``span``, and which are whole episodes' ends."""
    table = table[(table["first_row"] < span.stop) & (table["last_row"] >= span.start)]
    # A writer may have committed more rows meanwhile: those trajectories were open.
    table["end"][table["last_row"] >= span.stop] = END_OPEN
    ended = np.isin(table["end"], (END_TERMINATED, END_TRUNCATED))
    return table, ended & (table["first_row"] >= span.start) & (table["first_step"] == 0)
