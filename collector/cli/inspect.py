"""``tallyroll inspect``: what a storage holds, what made it, and how its episodes went."""

import argparse
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.filesize import decimal

from tallyroll.collector.cli.output import emit
from tallyroll.collector.cli.plan import part
from tallyroll.collector.cli.progress import shown_progress
from tallyroll.collector.cli.report import Page, times
from tallyroll.storage import CorruptStorage, content_hash, open_storage
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.files.checksums import rows_covered
from tallyroll.storage.files.copied_runs import (
    LEFT_OUT,
    copied_runs,
    is_copied,
    rows_copied,
    runs_left_out,
)
from tallyroll.storage.files.run_record import RunRecord, is_count
from tallyroll.storage.rows.keys import REWARD, spell
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import (
    END_NAMES,
    END_OPEN,
    END_TERMINATED,
    END_TRUNCATED,
)

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_MOST_MAKERS = 3
"""Runs of copied rows that their line names."""


def run(args: argparse.Namespace) -> int:
    """Carry out ``tallyroll inspect``; returns the exit status."""
    with open_storage(args.path, accept_copy=args.accept_copy) as storage:
        facts = examine(storage, args.rows)
        if args.hash:
            with shown_progress("hashed", args.json) as progress:
                facts["content"] = content_hash(storage, progress=progress)
    emit(json.dumps(facts, indent=2, allow_nan=False) + "\n" if args.json else as_text(facts))
    return 0


# --- facts ----------------------------------------------------------------------------------------


def examine(storage: DiskStorage, rows: int) -> dict[str, Any]:
    """Everything that is shown, as JSON values.

    Rows that are committed meanwhile do not count: all of it is about the same rows.
    """
    span, manifest = storage.span, storage.manifest
    record = RunRecord.parse(storage.record)
    return {
        "path": str(storage.path),
        "format": manifest["format"],
        "created": manifest["created"],
        "rows": len(span),
        "first_row": span.start,
        "ring": storage.ring or None,
        "finalized": _finalized(manifest),
        "bytes": len(span) * storage.schema.row_nbytes,
        "row_bytes": storage.schema.row_nbytes,
        "columns": [
            {
                "name": spell(column.key),
                "dtype": column.dtype_name,
                "shape": list(column.shape),
                "row_bytes": column.row_nbytes,
            }
            for column in storage.schema.columns
        ],
        "runs": _runs(manifest["runs"], span),
        **_episodes(storage, span),
        "ledger": record and record.ledger,
        "first_rows": _first_rows(storage, span[:rows]),
    }


def _finalized(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """When the storage was finalized, and how many rows have checksums since."""
    if "finalized" not in manifest:
        return None
    try:
        done = manifest["finalized"]
        at, rows = str(done["at"]), rows_covered(done["checksums"])
    except (TypeError, KeyError, CorruptStorage):
        return {"at": "?", "rows": None, "content": None}
    content = done.get("content")
    return {"at": at, "rows": rows, "content": content if type(content) is str else None}


def _runs(entries: list[dict[str, Any]], span: range) -> list[dict[str, Any]]:
    """One entry a run: those that a resume added are put together.

    ``rows`` are those of ``span`` that it wrote.
    """
    runs: list[dict[str, Any]] = []
    for entry in entries:
        run = {**entry, "first_row": _whole(entry, "first_row_of_run", entry["first_row"])}
        run.pop("first_row_of_run", None)
        at: list[int] = []
        if runs and runs[-1]["first_row"] == run["first_row"] and _whole(run, "incarnation") > 0:
            at = [*runs.pop()["resumed_at"], entry["first_row"]]
        resumed = max(0, _whole(run, "incarnation") - _whole(run, "respawned"))
        runs.append({**run, "resumed": resumed, "resumed_at": at})
    ends = [run["first_row"] for run in runs[1:]] + [span.stop]
    for run, end in zip(runs, ends, strict=True):
        run["rows"] = len(range(max(run["first_row"], span.start), min(end, span.stop)))
    return runs


# What a manifest says is shown as far as it can be: `verify` says what is wrong with it.


def _whole(run: Mapping[str, Any], name: str, default: int = 0) -> int:
    value: Any = run.get(name)
    return value if is_count(value) else default


def _episodes(storage: DiskStorage, span: range) -> dict[str, Any]:
    """The trajectories of the rows ``span``, counted; None if the rows do not say theirs."""
    try:
        table = storage.trajectories.table
    except (ColumnsMissing, CorruptStorage):  # `verify` says what is wrong
        return {"trajectories": None, "returns": None, "lengths": None}
    table = table[(table["first_row"] < span.stop) & (table["last_row"] >= span.start)]
    # A writer may have committed more rows meanwhile: those trajectories were open.
    end = np.where(table["last_row"] >= span.stop, END_OPEN, table["end"])
    ended = np.isin(end, (END_TERMINATED, END_TRUNCATED))
    whole = ended & (table["first_row"] >= span.start) & (table["first_step"] == 0)
    scalar = REWARD in storage.schema and table["return"].ndim == 1
    return {
        "trajectories": {
            "total": len(table),
            **{name: int((end == code).sum()) for code, name in enumerate(END_NAMES)},
            "begun_earlier": int((ended & ~whole).sum()),
        },
        "returns": _spread(table["return"][whole]) if scalar else None,
        "lengths": _spread(table["length"][whole]),
    }


def _spread(values: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """Count, mean, deviation and quantiles, None without values."""
    if not len(values):
        return None
    quantiles = np.quantile(values, _QUANTILES)
    found = {
        "episodes": len(values),
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        **{f"q{100 * q:02.0f}": float(v) for q, v in zip(_QUANTILES, quantiles, strict=True)},
        "max": float(values.max()),
    }
    return {name: _json(value) for name, value in found.items()}


def _first_rows(storage: DiskStorage, rows: range) -> list[dict[str, Any]]:
    """Some rows, by name of column; of bfloat16 the bits."""
    reader, numbers = storage.reader, np.arange(rows.start, rows.stop)
    columns = {spell(key): reader.column(key).take(numbers).tolist() for key in reader.keys}
    return [
        {name: _json(column[at]) for name, column in columns.items()} for at in range(len(rows))
    ]


def _json(value: Any) -> Any:
    """``value``, as text where JSON has no number for it."""
    if isinstance(value, list):
        return [_json(each) for each in value]
    no_number = isinstance(value, float) and not math.isfinite(value)
    return str(value) if no_number or isinstance(value, complex) else value


# --- showing --------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """``facts`` for people."""
    page = Page()
    page.print(
        f"{facts['path']}: {facts['rows']:,} rows of {facts['row_bytes']:,} bytes, "
        f"{decimal(facts['bytes'])} ({facts['format']}, created {facts['created']})"
    )
    if facts["ring"]:
        page.print(
            f"a ring of {facts['ring']:,} rows: it holds those from row {facts['first_row']:,} on"
        )
    if done := facts["finalized"]:
        rows = "?" if done["rows"] is None else f"{done['rows']:,}"
        page.print(f"finalized {done['at']}, with checksums of {rows} rows")
    if content := facts.get("content") or (facts["finalized"] or {}).get("content"):
        page.print(f"content {content}")
    page.head("Columns")
    columns = (each.values() for each in facts["columns"])
    page.table(("column", "dtype", "shape", "bytes a row"), columns)
    page.head("Runs")
    for number, run in enumerate(facts["runs"]):
        if is_copied(run) or LEFT_OUT in run:
            page.print(f"{number}  {_copy_line(run)}")
            continue
        versions = [f"{name} {version}" for name, version in part(run, "versions").items()]
        page.print(f"{number}  {_run_line(run)}")
        page.print(f"   {', '.join(versions) or 'no versions'}")
    if found := facts["trajectories"]:
        ends = ", ".join(f"{found[name]:,} {name}" for name in END_NAMES)
        earlier = found["begun_earlier"]
        more = f"; {earlier:,} began before the oldest row" if earlier else ""
        page.head("Trajectories")
        page.print(f"{found['total']:,}: {ends}{more}")
    if facts["returns"] is not None:
        names = [name for name in facts["returns"] if name != "episodes"]
        page.table(
            (f"{facts['returns']['episodes']:,} that ended", *names),
            (
                (label, *(_number(values[name]) for name in names))
                for label, values in (("return", facts["returns"]), ("length", facts["lengths"]))
            ),
        )
    if facts["ledger"] is not None:
        page.head("Ledger of the last run, at its last commit")
        page.ledger(facts["ledger"])
    if rows := facts["first_rows"]:
        page.head("First rows")
        page.table(
            ("", *(f"row {number}" for number in range(len(rows)))),
            ((name, *(_cell(row[name]) for row in rows)) for name in rows[0]),
        )
    return page.text


def _copy_line(run: Mapping[str, Any]) -> str:
    """One line for rows that were copied, with the newest runs that made them."""
    span = f"{run['rows']:,} rows from row {run['first_row']:,}"
    if LEFT_OUT in run:
        return f"{span}, copied from elsewhere in more pieces than the manifest notes"
    return f"{span}, copied from {_copied_from(run)}: {_makers(run)}"


def _copied_from(run: Mapping[str, Any]) -> str:
    found = rows_copied(run)
    assert found is not None
    id, first, last = found
    return f"rows {first:,} {'on' if last is None else f'to {last:,}'} of storage {id}"


def _makers(run: Mapping[str, Any]) -> str:
    """The newest runs that made copied rows, what resumed one with it."""
    told = [
        f"rows copied from {_copied_from(each)}" if is_copied(each) else _told(each)
        for each in copied_runs(run)
    ]
    told = [*dict.fromkeys(told)]
    shown = told[-_MOST_MAKERS:]
    if more := len(told) - len(shown) + runs_left_out(run):
        shown.append(f"{more} more")
    return "; ".join(shown) or "unknown runs"


def _run_line(run: Mapping[str, Any]) -> str:
    span = f"{run['rows']:,} rows from row {run['first_row']:,}"
    return _told(run, span, _resumed(run) if run["resumed"] else None)


def _told(run: Mapping[str, Any], span: str | None = None, resumed: str | None = None) -> str:
    """Words on a run's environment, lanes, seed, budget and policy."""
    environment, call = part(run, "environment"), part(run, "call")
    workers = _whole(call, "num_workers")
    asked = {**call, **part(run, "command")}
    names = ("total_frames", "total_episodes", "frames_per_batch", "max_frames_per_traj")
    parts = [
        environment.get("id") or environment.get("type") or "unknown environment",
        f"kwargs {json.dumps(environment['kwargs'])}" if environment.get("kwargs") else None,
        span,
        f"{run.get('lanes', '?')} lanes"
        + (f" in {workers} {call.get('mode', '')} workers" if workers else ""),
        f"seed {run.get('seed', '?')}",
        resumed,
        *(f"{n.replace('_', ' ')} {asked[n]}" for n in names if asked.get(n) is not None),
        f"policy {asked.get('policy') or ('random' if asked else 'unknown')}",
    ]
    return ", ".join(str(each) for each in parts if each is not None)


def _resumed(run: Mapping[str, Any]) -> str:
    at = [f"{row:,}" for row in run["resumed_at"][-3:]]
    more = "…, " if len(run["resumed_at"]) > len(at) else ""
    return f"resumed {times(run['resumed'])}" + (f" (at row {more}{', '.join(at)})" if at else "")


def _cell(value: Any) -> str:
    """A value in a few characters."""
    flat = np.asarray(value, dtype=object).reshape(-1).tolist()
    shown = " ".join(_number(each) for each in flat[:4])
    if not isinstance(value, list) or len(flat) == 1:
        return shown
    return f"[{shown}]" if len(flat) <= 4 else f"[{shown} …{len(flat)}]"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
