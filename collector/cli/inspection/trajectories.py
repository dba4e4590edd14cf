"""Count, list and group the trajectories of a storage."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.report.stored_runs import Table, lines_of, table_of
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.rows.keys import POLICY_ID, POLICY_VERSION, REWARD
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import END_NAMES

_AT_ONCE = 5_000
"""Number of lines formatted at once, which bounds the memory for a million of them."""
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def count_rows(storage: DiskStorage) -> None:
    """Update the trajectory table to the newest rows, with a progress bar on stderr."""
    reader = storage.reader
    if not reader.head:
        return
    with shown_progress("rows counted", False, "{:,}".format) as progress:
        reader.trajectory_index.episodes(reader, lambda rows: progress(rows, reader.head))


def spreads(storage: DiskStorage, lines: Table) -> dict[str, Any]:
    """Return statistics of returns and lengths of episodes.

    Both are None if there are no episodes. The statistics of returns are also None unless each row
    has one reward.
    """
    scalar = REWARD in storage.schema and lines["return"].ndim == 1
    return {
        "returns": _spread(lines["return"]) if scalar else None,
        "lengths": _spread(lines["length"]),
    }


def by_version(storage: DiskStorage, lines: Table) -> list[dict[str, Any]]:
    """Return the statistics of `spreads` by the policy's version at the last action.

    The list is empty if rows have no version. If several policies act in their own lanes, the
    groups are by policy and version.
    """
    if POLICY_VERSION not in storage.schema or not len(lines):
        return []
    names, told = ["policy_version"], [lines["version_last"]]
    if POLICY_ID in storage.schema:
        names.insert(0, "policy_id")
        told.insert(0, storage.reader.column(POLICY_ID).take(lines["last_row"]).astype(np.int64))
    order = np.lexsort(told[::-1])
    keys = np.stack(told, axis=1)[order]
    begin = np.flatnonzero(np.any(keys[1:] != keys[:-1], axis=1)) + 1
    parts = zip(keys[[0, *begin]].tolist(), np.split(lines[order], begin), strict=True)
    return [{**dict(zip(names, key, strict=True)), **spreads(storage, own)} for key, own in parts]


def _spread(values: Table) -> dict[str, Any] | None:
    """Return count, mean, deviation and quantiles; None if there are no values."""
    if not len(values):
        return None
    with np.errstate(all="ignore"):  # returns may be infinite
        quantiles = np.quantile(values, _QUANTILES)
        mean, std = float(values.mean()), float(values.std())
    found = {
        "episodes": len(values),
        "mean": mean,
        "std": std,
        "min": float(values.min()),
        **{f"q{100 * q:02.0f}": float(v) for q, v in zip(_QUANTILES, quantiles, strict=True)},
        "max": float(values.max()),
    }
    return {name: as_json(value) for name, value in found.items()}


def show(storage: DiskStorage, chosen: np.ndarray | None, *, as_object: bool) -> None:
    """Write one line per trajectory to stdout, or one JSON object, in chunks.

    ``chosen`` is a part of ``storage.trajectories.table``; None stands for all trajectories.
    """
    span = storage.span
    found = lines_of(storage, span) if chosen is None else table_of(chosen, span)
    if found is None:
        raise ColumnsMissing(
            f"{storage.path}: its rows have no trajectory ids, or the ids are damaged. "
            "`tallyroll verify` reports what is wrong."
        )
    table, between = found[0], ""
    if as_object:
        emit(f'{{"path": {json.dumps(str(storage.path))}, "trajectories": [')
    for start in range(0, len(table), _AT_ONCE):
        lines = [*_dicts(table[start : start + _AT_ONCE])]
        if as_object:
            emit(between + ",\n".join(json.dumps(each, allow_nan=False) for each in lines))
            between = ",\n"
        else:
            page = Page()
            rows = ((each.pop("id"), *map(_cell, each.values())) for each in map(dict, lines))
            page.table([*lines[0]], rows)
            emit(page.text)
    if as_object:
        emit("]}\n")
    elif not len(table):
        emit("no trajectories\n")


def _dicts(table: Table) -> Iterator[Mapping[str, Any]]:
    names = table.dtype.names or ()
    columns = [table[name].tolist() for name in names]
    for values in zip(*columns, strict=True):
        line = dict(zip(names, map(as_json, values), strict=True))
        yield {**line, "end": END_NAMES[line["end"]]}


def _cell(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value
