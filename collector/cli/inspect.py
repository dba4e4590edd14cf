"""``tallyroll inspect``: what a storage holds, what made it, and how its episodes went."""

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from rich.console import Console
from rich.table import Table

from tallyroll.collector.cli.report import plain_console, readable_bytes, text_of, times
from tallyroll.collector.cli.streams import emit
from tallyroll.storage import CorruptStorage, open_storage
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.files.checksums import rows_covered
from tallyroll.storage.files.run_record import RunRecord
from tallyroll.storage.rows.keys import REWARD, spell
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import (
    END_CUT,
    END_OPEN,
    END_TERMINATED,
    END_TRUNCATED,
)

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def run(args: argparse.Namespace) -> int:
    """Carry out ``tallyroll inspect``; returns the exit status."""
    try:
        with open_storage(args.path, accept_copy=args.accept_copy) as storage:
            facts = examine(storage, args.rows)
    except KeyboardInterrupt:
        return 130
    if args.json:
        emit(json.dumps(facts, indent=2, allow_nan=False) + "\n")
    else:
        emit(as_text(facts))
    return 0


# --- facts ----------------------------------------------------------------------------------------


def examine(storage: DiskStorage, rows: int) -> dict[str, Any]:
    """Everything that is shown, as JSON values.

    Rows that are committed meanwhile do not count: all of it is about the same rows.
    """
    span, manifest = storage.span, storage.manifest
    found = _episodes(storage, span)
    nbytes = len(span) * storage.schema.row_nbytes
    return {
        "path": str(storage.path),
        "format": manifest["format"],
        "created": manifest["created"],
        "rows": len(span),
        "first_row": span.start,
        "ring": storage.ring or None,
        "finalized": _finalized(manifest),
        "bytes": nbytes,
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
        "runs": runs_of(manifest["runs"], span),
        "trajectories": found and found.trajectories,
        "returns": found and _spread(found.returns),
        "lengths": found and _spread(found.lengths),
        "ledger": _ledger(storage),
        "first_rows": first_rows(storage, span[:rows]),
    }


def _finalized(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """When the storage was finalized, and how many rows have checksums since."""
    if "finalized" not in manifest:
        return None
    try:
        done = manifest["finalized"]
        return {"at": str(done["at"]), "rows": rows_covered(done["checksums"])}
    except (TypeError, KeyError, CorruptStorage):
        return {"at": "?", "rows": None}


def runs_of(entries: list[dict[str, Any]], span: range) -> list[dict[str, Any]]:
    """One entry a run: those that a resume added are put together.

    ``rows`` are those of ``span`` that it wrote.
    """
    runs: list[dict[str, Any]] = []
    for entry in entries:
        first = _whole(entry, "first_row_of_run", entry["first_row"])
        if runs and runs[-1]["first_row"] == first and _whole(entry, "incarnation") > 0:
            runs.pop()
        runs.append({**entry, "first_row": first})
    ends = [run["first_row"] for run in runs[1:]] + [span.stop]
    return [
        {
            **{name: value for name, value in run.items() if name != "first_row_of_run"},
            "rows": max(0, min(end, span.stop) - max(run["first_row"], span.start)),
            "resumed": _resumed(run),
        }
        for run, end in zip(runs, ends, strict=True)
    ]


# What a manifest says is shown as far as it can be: `verify` says what is wrong with it.


def _whole(run: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = run.get(name)
    return value if _is_count(value) else default


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and abs(value) < 2**63


def _resumed(counts: Mapping[str, Any]) -> int:
    """Number of times that a run was resumed: not every start of a lane was that."""
    return max(0, _whole(counts, "incarnation") - _whole(counts, "respawned"))


def _part(run: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = run.get(name)
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class _Episodes:
    """Counts of trajectories, and returns and lengths of whole episodes, [episodes]."""

    trajectories: dict[str, int]
    returns: np.ndarray[Any, Any]
    lengths: np.ndarray[Any, Any]


def _episodes(storage: DiskStorage, span: range) -> _Episodes | None:
    """The trajectories of the rows ``span``; None if the rows do not say theirs."""
    try:
        table = storage.trajectories.table
    except (ColumnsMissing, CorruptStorage):  # `verify` says what is wrong
        return None
    table = table[(table["first_row"] < span.stop) & (table["last_row"] >= span.start)]
    # A writer may have committed more rows meanwhile: those trajectories were open.
    end = np.where(table["last_row"] >= span.stop, END_OPEN, table["end"])
    ended = (end == END_TERMINATED) | (end == END_TRUNCATED)
    whole = ended & (table["first_row"] >= span.start) & (table["first_step"] == 0)
    counts = {
        "total": len(table),
        "terminated": int((end == END_TERMINATED).sum()),
        "truncated": int((end == END_TRUNCATED).sum()),
        "cut": int((end == END_CUT).sum()),
        "open": int((end == END_OPEN).sum()),
        "begun_earlier": int((ended & ~whole).sum()),
    }
    scalar = REWARD in storage.schema and table["return"].ndim == 1
    returns = table["return"][whole] if scalar else np.empty(0)
    return _Episodes(counts, returns, table["length"][whole])


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
    return {name: _finite(value) for name, value in found.items()}


def _finite(value: Any) -> Any:
    """``value``, as text where JSON has no number for it."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _ledger(storage: DiskStorage) -> dict[str, Any] | None:
    """The last run's ledger at its last commit, None where no collector wrote one."""
    record = RunRecord.parse(storage.record)
    return None if record is None else record.ledger


def first_rows(storage: DiskStorage, rows: range) -> list[dict[str, Any]]:
    """Some rows, by spell column name."""
    slots = storage.slots_of(np.arange(rows.start, rows.stop))
    columns = {
        spell(c.key): storage.column(c.key)[slots].astype(_shown_as(c.dtype_name))
        for c in storage.schema.columns
    }
    return [
        {name: _json(column[at].tolist()) for name, column in columns.items()}
        for at in range(len(rows))
    ]


def _shown_as(dtype: str) -> str:
    # A complex number, and the bits of a bfloat16, have no JSON of their own.
    return "str" if dtype.startswith("complex") else dtype.replace("bfloat16", "uint16")


def _json(value: Any) -> Any:
    return [_json(each) for each in value] if isinstance(value, list) else _finite(value)


# --- showing --------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """``facts`` for people."""
    console = plain_console()
    _show(facts, console)
    return text_of(console)


def _show(facts: Mapping[str, Any], console: Console) -> None:

    def say(text: str) -> None:
        console.print(text, soft_wrap=True)

    say(
        f"{facts['path']}: {facts['rows']:,} rows of {facts['row_bytes']:,} bytes, "
        f"{readable_bytes(facts['bytes'])} ({facts['format']}, created {facts['created']})"
    )
    if facts["ring"]:
        say(f"a ring of {facts['ring']:,} rows: it holds those from row {facts['first_row']:,} on")
    if facts["finalized"]:
        done = facts["finalized"]
        say(f"finalized {done['at']}, with checksums of {_count(done['rows'])} rows")
    _head(console, "Columns")
    console.print(_columns_table(facts["columns"]))
    _head(console, "Runs")
    for number, each in enumerate(facts["runs"]):
        say(f"{number}  {_run_line(each)}")
        say(f"   {_versions_line(each)}")
    if facts["trajectories"] is not None:
        _head(console, "Trajectories")
        say(_trajectories_line(facts["trajectories"]))
        if facts["returns"] is not None:
            console.print(_spread_table(facts["returns"], facts["lengths"]))
    if facts["ledger"] is not None:
        _head(console, "Ledger of the last run, at its last commit")
        say(_ledger_line(facts["ledger"]))
    if facts["first_rows"]:
        _head(console, "First rows")
        console.print(_rows_table(facts["first_rows"]))


def _count(value: int | None) -> str:
    return "?" if value is None else f"{value:,}"


def _head(console: Console, text: str) -> None:
    console.print()
    console.print(text, style="bold", soft_wrap=True)


def _table(label: str, *headers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(label, no_wrap=True)
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    return table


def _columns_table(columns: list[dict[str, Any]]) -> Table:
    table = _table("column", "dtype", "shape", "bytes a row")
    for each in columns:
        table.add_row(each["name"], each["dtype"], str(each["shape"]), f"{each['row_bytes']:,}")
    return table


def _run_line(run: Mapping[str, Any]) -> str:
    environment = _part(run, "environment")
    parts = [
        str(environment.get("id") or environment.get("type") or "unknown environment"),
        f"{run['rows']:,} rows from row {run['first_row']:,}",
        f"{run.get('lanes', '?')} lanes{_workers(run)}",
        f"seed {run.get('seed', '?')}",
    ]
    if environment.get("kwargs"):
        parts.insert(1, f"kwargs {json.dumps(environment['kwargs'])}")
    if run["resumed"]:
        parts.append(f"resumed {times(run['resumed'])}")
    asked = {**_part(run, "call"), **_part(run, "command")}
    parts += [
        f"{name.replace('_', ' ')} {asked[name]}"
        for name in ("total_frames", "total_episodes", "frames_per_batch", "max_frames_per_traj")
        if asked.get(name) is not None
    ]
    return ", ".join([*parts, f"policy {asked.get('policy') or 'random'}"])


def _workers(run: Mapping[str, Any]) -> str:
    call = _part(run, "call")
    workers = _whole(call, "num_workers")
    return f" in {workers} {call.get('mode', '')} workers" if workers else ""


def _versions_line(run: Mapping[str, Any]) -> str:
    versions = _part(run, "versions")
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "no versions"


def _trajectories_line(found: Mapping[str, int]) -> str:
    return (
        f"{found['total']:,}: {found['terminated']:,} terminated, {found['truncated']:,} "
        f"truncated, {found['cut']:,} cut, {found['open']:,} open"
        + (
            f"; {found['begun_earlier']:,} began before the oldest row"
            if found["begun_earlier"]
            else ""
        )
    )


def _spread_table(returns: Mapping[str, Any], lengths: Mapping[str, Any]) -> Table:
    names = [name for name in returns if name != "episodes"]
    table = _table(f"{returns['episodes']:,} that ended", *names)
    for label, values in (("return", returns), ("length", lengths)):
        table.add_row(label, *(_number(values[name]) for name in names))
    return table


def _ledger_line(ledger: Mapping[str, Any]) -> str:
    shown = [
        f"{name.replace('_', ' ')} {count:,}"
        for name, count in ledger.items()
        if name != "incarnation" and (count or name == "lost")
    ]
    if resumed := _resumed(ledger):
        shown.append(
            f"resumed {times(resumed)} (of a process that was killed, the counts are those of its "
            "last commit)"
        )
    return ", ".join(shown)


def _rows_table(rows: list[dict[str, Any]]) -> Table:
    table = _table("", *(f"row {number}" for number in range(len(rows))))
    for name in rows[0]:
        table.add_row(name, *(_cell(row[name]) for row in rows))
    return table


def _cell(value: Any) -> str:
    """A value in a few characters."""
    flat = np.asarray(value, dtype=object).reshape(-1).tolist()
    shown = " ".join(_number(each) for each in flat[:4])
    if not isinstance(value, list) or len(flat) == 1:
        return shown
    return f"[{shown}]" if len(flat) <= 4 else f"[{shown} …{len(flat)}]"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
