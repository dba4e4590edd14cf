"""Checks of the manifest's runs and of the last commit record against the rows. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.files.copied_runs import all_makers, goes_on
from tallyroll.storage.files.run_record import RunRecord
from tallyroll.storage.readers.spaces import agreed_spaces
from tallyroll.storage.rows.spaces import UNCHECKED
from tallyroll.storage.trajectories.lane_stretches import MOST_LANES

_SUMS = {
    "slots": ("executed", "reset_slots"),
    "executed": ("stored", "discarded", "carried", "lost"),
}
_COUNTED = {"episodes_complete", *_SUMS, *(part for parts in _SUMS.values() for part in parts)}


@dataclass(frozen=True, slots=True)
class RunEntry:
    """A run's entry in the manifest, for the rows from ``first_row`` up to the next entry."""

    first_row: int
    lanes: int | None = None
    """The number of lanes; None if the entry does not record it."""
    origin: int | None = None
    """The first row of the run, or of the run that it continues; None if no collector wrote it."""
    finals_kept: bool = False
    """True if final observations are right, even if they equal the next episode's first ones."""
    unobserved: Sequence[Any] = ()
    """Keys, as lists, of columns that look like observations but are not."""
    goes_on: bool = False
    """True if trajectories of the previous entry may continue in this one."""
    spaces: Mapping[str, Any] = field(default_factory=dict)
    """The spaces of columns that are valid for all rows, as JSON, by column name."""


def check_runs(entries: list[Mapping[str, Any]], head: int, findings: Findings) -> list[RunEntry]:
    """Parse the manifest's ``entries``; return the valid runs in row order."""
    runs: list[RunEntry] = []
    if not entries:
        findings.add("runs", "the manifest names no run")
    for number, entry in enumerate(entries):
        problem = _problem_of(entry, runs[-1].first_row if runs else 0, head)
        if number == 0 and not problem and entry["first_row"] != 0:
            problem = f"its first row is {entry['first_row']}, and the first run begins at row 0"
        if problem:
            place = Place(what=f"run {number}: {problem}")
            findings.add("runs", "a run in the manifest does not fit the rows", place)
        else:
            more = number > 0 and goes_on(entries[number - 1], entry)
            runs.append(replace(_entry_of(entry), goes_on=more))
    return runs


def _entry_of(entry: Mapping[str, Any]) -> RunEntry:
    lanes, origin = entry.get("lanes"), entry.get("first_row_of_run")
    made = all_makers(entry)
    calls = [_call_of(run) for run in made]
    kept = bool(calls) and all(call.get("finals") == "kept" for call in calls)
    unobserved = [call.get("unobserved") for call in calls]
    # For a copy, use the unobserved columns only if all of its original runs agree on them.
    same = unobserved and all(each == unobserved[0] for each in unobserved)
    keys = unobserved[0] if same and isinstance(unobserved[0], list) else ()
    as_made = all_makers(entry, unchanged=True)
    spaces = {} if any(UNCHECKED in run for run in as_made) else agreed_spaces(as_made)
    return RunEntry(entry["first_row"], lanes, origin, kept, keys, spaces=spaces)


def _call_of(run: Mapping[str, Any]) -> Mapping[str, Any]:
    call = run.get("call")
    return call if isinstance(call, dict) else {}


def _problem_of(entry: Mapping[str, Any], least: int, head: int) -> str | None:
    first, origin, lanes = entry["first_row"], entry.get("first_row_of_run"), entry.get("lanes")
    if not least <= first <= head:
        return f"its first row is {first}, not from {least} to {head}"
    if origin is not None and (type(origin) is not int or not 0 <= origin <= first):
        return f"it continues a run from row {origin!r} on, and begins at row {first}"
    if lanes is not None and (type(lanes) is not int or not 1 <= lanes <= MOST_LANES):
        return f"it has {lanes!r} lanes"
    seeds = entry.get("lane_seeds")
    if seeds is not None and (not isinstance(seeds, list) or len(seeds) != (lanes or len(seeds))):
        return f"its lane_seeds are not a list with one seed for each of {lanes} lanes"
    return None


def check_record(
    record: tuple[int, bytes] | None, runs: list[RunEntry], head: int, findings: Findings
) -> RunRecord | None:
    """Return the newest record, checked against the runs; None if no collector wrote one.

    ``head`` is the number of rows committed when the record was read.
    """
    # Find the run of the last commit. A run without rows begins after all committed rows.
    last = next((run for run in reversed(runs) if run.first_row < head), None)
    collected = last is not None and last.origin is not None
    value = RunRecord.parse(record)
    if value is None or not value.ledger.keys() >= _COUNTED:
        if collected:
            kind = "commit record of a collector" if record is not None else "intact commit record"
            findings.add("record", f"no {kind}, although a collector wrote the last rows")
        return None
    if last is None or not collected:
        return value
    if value.at != head:
        findings.add(
            "record",
            "the newest intact record does not belong to the last commit",
            Place(what=f"it was written with {value.at:,} rows, and {head:,} are committed"),
        )
    origins = [run.origin for run in runs[runs.index(last) :]]
    if value.first_row not in origins:
        what = f"its run began at row {value.first_row:,}, and the last run at row {last.origin}"
        findings.add(
            "record", "the record belongs to another run than the last rows", Place(what=what)
        )
    _check_sums(value, findings)
    return value


def check_ledger(
    record: RunRecord, episodes: int | None, largest_id: int, findings: Findings
) -> None:
    """Compare the counts in the record of a run with its rows.

    ``episodes`` is the number of episodes that ended in the run's rows; None if it is unknown.
    """
    if record.next_id != -1 and record.next_id <= largest_id:
        what = f"the next id is {record.next_id}, and the largest used id is {largest_id}"
        findings.add("record", "the next trajectory id was already used", Place(what=what))
    wanted = {"stored": record.stored_before + record.at - record.first_row}
    if episodes is not None and not record.stored_before:
        wanted["episodes_complete"] = episodes
    for name, count in wanted.items():
        if record.ledger[name] != count:
            findings.add(
                "record",
                "the ledger does not match the rows",
                Place(what=f"{name} is {record.ledger[name]:,}, and by the rows {count:,}"),
            )


def _check_sums(record: RunRecord, findings: Findings) -> None:
    ledger = record.ledger
    for name, parts in _SUMS.items():
        total = sum(ledger[part] for part in parts)
        if ledger[name] != total:
            what = f"{name} is {ledger[name]:,}, and {' + '.join(parts)} is {total:,}"
            findings.add("record", "the ledger does not balance", Place(what=what))
    for name, count in ledger.items():
        if count < 0:
            findings.add("record", "the ledger does not balance", Place(what=f"{name} is {count}"))
