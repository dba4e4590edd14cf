"""How many rows each rewind of a storage left, as its manifest keeps it. Pure."""

from __future__ import annotations

from typing import Any

from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.record_slots import Rewind
from tallyroll.storage.files.run_events import before_row

_HISTORY = "rewinds"


def least_kept(manifest: Manifest, since: int, until: int) -> int | None:
    """Return the least number of rows that rewinds left; None if there was none.

    Args:
        manifest: has the numbers, of the first rewind first.
        since: rewinds that are not asked for.
        until: rewinds that there were.
    """
    left = _history_of(manifest)
    # What a damaged manifest does not say may have left no row.
    found = [each if type(each) is int else 0 for each in left[since:until]]
    if since < until and len(left) < until:
        found.append(0)
    return min(found, default=None)


def _history_of(manifest: Manifest) -> list[Any]:
    history = manifest.get(_HISTORY)
    return history if isinstance(history, list) else []


def numbers_fault(manifest: Manifest, done: int, undone: Rewind | None) -> str | None:
    """Return a sentence if the header counts rewinds that the manifest cannot follow, or None.

    Args:
        manifest: has the rows that each rewind left.
        done: rewinds that the header counts.
        undone: the rewind that is decided and not finished, whose number is one more at most.
    """
    known = len(_history_of(manifest))
    if done > known:
        return f"the header counts {done} rewinds, and the manifest knows {known}"
    if undone is not None and not max(1, done) <= undone.number <= done + 1:
        return f"the record of a rewind is number {undone.number}, after {done} rewinds"
    return None


def settled(manifest: Manifest, rewind: Rewind) -> Manifest:
    """Return the manifest without the runs that have no rows left, and with the rewind.

    Its number is one that `numbers_fault` accepts.
    """
    before = _history_of(manifest)[: rewind.number - 1]
    return {**without_runs_from(manifest, rewind.rows), _HISTORY: [*before, rewind.rows]}


def without_runs_from(manifest: Manifest, row: int) -> Manifest:
    """Return the manifest without the runs that have no rows before ``row``, and later events."""
    runs: list[Any] = manifest["runs"]
    # A storage has one entry at least.
    left = [run for run in runs if run["first_row"] < row] or runs[:1]
    return {**manifest, "runs": [before_row(run, row) for run in left]}


def with_history_of(manifest: Manifest, source: Manifest) -> Manifest:
    """Return a manifest with the history of another storage's."""
    return {**manifest, _HISTORY: _history_of(source)}
