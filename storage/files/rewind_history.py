"""The number of rows that remained after each rewind, as a manifest records it. Pure."""

from __future__ import annotations

from typing import Any

from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.record_slots import Rewind
from tallyroll.storage.files.run_events import before_row

_HISTORY = "rewinds"


def least_rows_after_rewinds(manifest: Manifest, since: int, until: int) -> int | None:
    """Return the smallest number of rows that remained after some rewinds, or None without rewinds.

    Args:
        manifest: the manifest, which has the number of remaining rows of each rewind, in order.
        since: the number of rewinds to skip.
        until: the number of rewinds in total, including those to skip.
    """
    left = _history_of(manifest)
    # If a damaged manifest lacks a number, assume that the rewind left no row.
    found = [each if type(each) is int else 0 for each in left[since:until]]
    if since < until and len(left) < until:
        found.append(0)
    return min(found, default=None)


def _history_of(manifest: Manifest) -> list[Any]:
    history = manifest.get(_HISTORY)
    return history if isinstance(history, list) else []


def rewind_fault(manifest: Manifest, done: int, undone: Rewind | None) -> str | None:
    """Return a sentence on rewinds that the header counts and the manifest lacks, or None.

    Args:
        manifest: the manifest, which has the number of remaining rows of each rewind.
        done: the number of rewinds in the header.
        undone: the rewind that is committed and not finished, or None. Its number is expected to be
            ``done`` or ``done + 1``.
    """
    known = len(_history_of(manifest))
    if done > known:
        return f"the header counts {done} rewinds, but the manifest lists {known}"
    if undone is not None and not max(1, done) <= undone.number <= done + 1:
        return f"the record of a rewind is number {undone.number}, after {done} rewinds"
    return None


def settled(manifest: Manifest, rewind: Rewind) -> Manifest:
    """Return the manifest with the rewind, and without the runs that have no rows left.

    The number of the rewind must be one that `rewind_fault` accepts.
    """
    before = _history_of(manifest)[: rewind.number - 1]
    return {**without_runs_from(manifest, rewind.rows), _HISTORY: [*before, rewind.rows]}


def without_runs_from(manifest: Manifest, row: int) -> Manifest:
    """Return the manifest without runs that have no rows before ``row``, and without later events.

    Events that occurred when ``row`` was the next row are later events.
    """
    runs: list[Any] = manifest["runs"]
    # A storage keeps at least one entry.
    left = [run for run in runs if run["first_row"] < row] or runs[:1]
    return {**manifest, "runs": [before_row(run, row) for run in left]}


def with_history_of(manifest: Manifest, source: Manifest) -> Manifest:
    """Return a manifest with the rewind history of another one."""
    return {**manifest, _HISTORY: _history_of(source)}
