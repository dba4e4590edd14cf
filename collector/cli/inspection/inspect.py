"""``tallyroll inspect``: show the contents, origin and episodes of a storage."""

import argparse
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.filesize import decimal

from tallyroll.collector.cli.inspection.trajectories import (
    by_version,
    count_rows,
    show,
    spreads,
)
from tallyroll.collector.cli.output import as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.selection import chosen_rows, chosen_trajectories
from tallyroll.collector.counting.ledger import known_ticks, show_ledger
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.collector.ext.report.stored_runs import (
    lines_of,
    part,
    runs_of,
    unversioned,
    whole_number,
)
from tallyroll.storage import CorruptStorage, content_hash, open_storage
from tallyroll.storage.errors import ColumnsMissing, StorageError
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.files.checksums import rows_covered
from tallyroll.storage.files.copied_runs import (
    LEFT_OUT,
    copied_runs,
    is_copied,
    rows_copied,
    runs_left_out,
)
from tallyroll.storage.files.excluded_columns import excluded_by
from tallyroll.storage.files.manifest import SHARD, environment_of, exported, policy_of
from tallyroll.storage.files.run_events import EVENTS
from tallyroll.storage.files.run_record import RunRecord
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.pages import counted, times
from tallyroll.storage.rows.spaces import spelled
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import (
    END_NAMES,
    END_TERMINATED,
    END_TRUNCATED,
)

_MOST_VERSIONS = 12
"""Maximum number of policy versions to show. --json shows all of them."""
_MOST_EVENTS = 3
"""Largest number of environment calls in the line of a run."""
_LONGEST = 60
"""Largest number of characters for the arguments of a call."""
_MOST_MAKERS = 3
"""Largest number of runs in the line of copied rows."""


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll inspect`` and return the exit status."""
    path = args.path[0] if len(args.path) == 1 else args.path
    with open_storage(path, accept_copy=args.accept_copy) as storage:
        with contextlib.suppress(ColumnsMissing, CorruptStorage):  # show as much as can be read
            count_rows(storage)
        if args.trajectories:
            show(storage, chosen_trajectories(storage, args), as_object=args.json)
            return 0
        storage = chosen_rows(storage, args)
        facts = examine(storage, args.rows, hosts=args.runs)
        if args.hash:
            with shown_progress("hashed", args.json) as progress:
                facts["content"] = content_hash(storage, progress=progress)
    if args.runs:
        facts = {name: facts[name] for name in ("path", "content", "runs") if name in facts}
    text = runs_as_text if args.runs else as_text
    emit(json.dumps(as_json(facts), indent=2, allow_nan=False) + "\n" if args.json else text(facts))
    return 0


# --- facts ----------------------------------------------------------------------------------------


def examine(storage: DiskStorage, rows: int, *, hosts: bool = False) -> dict[str, Any]:
    """Collect the facts as JSON values; ``hosts`` includes the hosts and folders of the runs.

    Rows that are committed during the call do not count, so that all facts are about the same rows.
    """
    span, manifest = storage.span, storage.manifest
    record = RunRecord.parse(storage.record)
    entries = manifest["runs"] if hosts else [exported(run) for run in manifest["runs"]]
    runs, spaces = runs_of(entries, span), spaces_of(manifest["runs"], storage.schema)
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
                "name": format_key(column.key),
                "dtype": column.dtype_name,
                "shape": list(column.shape),
                "row_bytes": column.row_nbytes,
                "space": spaces.get(column.key),
            }
            for column in storage.schema.columns
        ],
        "once": _stored_once(storage),
        **_stored_bytes(storage),
        "excluded": excluded_by(manifest["runs"]),
        "overlays": _overlays(storage),
        **_members(storage),
        "runs": runs,
        **_episodes(storage, span, runs),
        "ledger": record
        and record.ledger
        and {**record.ledger, "ticks": known_ticks(record.ledger)},
        "first_rows": _first_rows(storage, span[:rows]),
    }


def _stored_bytes(storage: DiskStorage) -> dict[str, int | None]:
    size = storage.reader.stored_size()
    return {"stored_row_bytes": size.row_nbytes, "full_ring_bytes": size.ring_nbytes}


def _stored_once(storage: DiskStorage) -> list[dict[str, Any]]:
    """Describe the pools of columns whose frames are stored once."""
    return [
        {
            "name": format_key(each.key),
            "stack": each.stack,
            "delta": each.delta,
            "frames": each.frames,
            "used_bytes": each.used_nbytes,
            "bytes": each.nbytes,
        }
        for each in storage.pool_usage()
    ]


def _overlays(storage: DiskStorage) -> list[dict[str, Any]]:
    """Describe the overlays. The entry of an overlay that cannot be used has the error."""
    found: list[dict[str, Any]] = []
    for name in storage.overlays:
        said: dict[str, Any] = {"name": format_key(name)}
        try:
            overlay = storage.overlay(name)
            dtype = str(overlay.dtype).removeprefix("torch.")
            said |= {"dtype": dtype, "shape": list(overlay.shape), "fill": str(overlay.fill)}
        except StorageError as error:
            said |= {"dtype": "?", "shape": None, "fill": None, "error": str(error)}
        found.append(said)
    return found


def _members(storage: DiskStorage) -> dict[str, Any]:
    """Describe the members of a union and its shards; {} for a single storage."""
    if not isinstance(union := storage.reader, UnionReader):
        return {}
    members = [
        {
            "path": str(each.path),
            "format": each.format,
            "id": each.id,
            "rows": len(each.rows),
            "first_row": each.rows.start,
            "ids_moved_by": moved,
        }
        for each, moved in zip(union.members, union.ids_moved_by, strict=True)
    ]
    shards = union.shards
    return {"members": members} | ({} if shards is None else {"shards": shards.as_json()})


def _finalized(manifest: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return when the storage was finalized, and the number of rows with checksums."""
    if "finalized" not in manifest:
        return None
    try:
        done = manifest["finalized"]
        at, rows = str(done["at"]), rows_covered(done["checksums"])
    except (TypeError, KeyError, CorruptStorage):
        return {"at": "?", "rows": None, "content": None}
    content = done.get("content")
    return {"at": at, "rows": rows, "content": content if type(content) is str else None}


def _episodes(storage: DiskStorage, span: range, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Count the trajectories of the rows ``span``, and add the statistics of each of ``runs``.

    The counts are None if the rows have no trajectory ids.
    """
    if (found := lines_of(storage, span)) is None:
        nothing = {"returns": None, "lengths": None}
        for run in runs:
            run.update(nothing)
        return {"trajectories": None, **nothing, "by_policy_version": []}
    table, whole = found
    lines, end = table[whole], table["end"]
    stops = [*(run["first_row"] for run in runs), span.stop][1:]
    for run, stop in zip(runs, stops, strict=True):
        own = (lines["first_row"] >= run["first_row"]) & (lines["first_row"] < stop)
        run.update(spreads(storage, lines[own]))
    ended = np.isin(end, (END_TERMINATED, END_TRUNCATED))
    return {
        "trajectories": {
            "total": len(table),
            **{name: int((end == code).sum()) for code, name in enumerate(END_NAMES)},
            "begun_earlier": int((ended & ~whole).sum()),
        },
        **spreads(storage, lines),
        "by_policy_version": by_version(storage, lines),
    }


def _first_rows(storage: DiskStorage, rows: range) -> list[dict[str, Any]]:
    """Return some rows as values by column name; bfloat16 values are shown as their bits."""
    reader, numbers = storage.reader, np.arange(rows.start, rows.stop)
    columns = {format_key(key): reader.column(key).take(numbers).tolist() for key in reader.keys}
    return [
        {name: as_json(column[at]) for name, column in columns.items()} for at in range(len(rows))
    ]


# --- output ---------------------------------------------------------------------------------------


def as_text(facts: Mapping[str, Any]) -> str:
    """Format ``facts`` as text."""
    page = Page()
    page.print(
        f"{facts['path']}: {facts['rows']:,} rows of {_size(facts)} ({facts['format']}, created "
        f"{facts['created']})"
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
    _show_columns(page, facts["columns"])
    _show_stored(page, facts)
    if overlays := facts["overlays"]:
        page.head("Overlays")
        lines = ((each["name"], each["dtype"], each["shape"], each["fill"]) for each in overlays)
        page.table(("overlay", "dtype", "shape", "fill"), lines)
        for each in overlays:
            if "error" in each:
                page.print(f"{each['name']}: {each['error']}")
    _show_members(page, facts)
    _show_runs(page, facts["runs"])
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
    if len(found := facts["by_policy_version"]) > 1:
        page.head("Returns by the policy's version at the last action")
        policies = list(dict.fromkeys(each.get("policy_id") for each in found))
        most = max(1, _MOST_VERSIONS // len(policies))
        of_each = [[each for each in found if each.get("policy_id") == id] for id in policies]
        newest = [each for own in of_each for each in own[-most:]]
        if (left := len(found) - len(newest)) > 0:
            of = " of each policy" if len(policies) > 1 else ""
            page.print(f"the newest {most}{of}; {left:,} more with --json")
        named = ("policy",) if "policy_id" in found[0] else ()
        page.table(
            (*named, "version", "episodes", "mean", "std", "min", "max", "mean length"),
            (_version_line(each) for each in newest),
        )
    if facts["ledger"] is not None:
        page.head("Ledger of the last run, at its last commit")
        show_ledger(page, facts["ledger"])
    if rows := facts["first_rows"]:
        page.head("First rows")
        page.table(
            ("", *(f"row {number}" for number in range(len(rows)))),
            ((name, *(_cell(row[name]) for row in rows)) for name in rows[0]),
        )
    return page.text


def _show_columns(page: Page, columns: Sequence[Mapping[str, Any]]) -> None:
    heads: tuple[str, ...] = ("column", "dtype", "shape", "bytes a row")
    lines = [[each[name] for name in ("name", "dtype", "shape", "row_bytes")] for each in columns]
    if any(each["space"] for each in columns):
        heads = (*heads, "space")
        for line, each in zip(lines, columns, strict=True):
            line.append(spelled(each["space"]) if each["space"] else "")
    page.table(heads, lines)


def _size(facts: Mapping[str, Any]) -> str:
    """Describe the size of a row and of all rows."""
    whole = f"{facts['row_bytes']:,} bytes, {decimal(facts['bytes'])}"
    if not facts["once"]:
        return whole
    each = facts["stored_row_bytes"]
    stored = f"{each:,} bytes, {decimal(each * facts['rows'])}"
    return f"{stored}; {whole} if observations were stored whole"


def _show_stored(page: Page, facts: Mapping[str, Any]) -> None:
    """Show the size of rows in the files, the columns stored once, and the excluded ones."""
    if ring := facts["full_ring_bytes"]:
        how = "once" if facts["once"] else "whole"
        page.print(
            f"observations stored {how}: {facts['stored_row_bytes']:,} bytes a row, "
            f"{decimal(ring)} in the full ring"
        )
    for each in facts["once"]:
        kind = "differences from the frame before" if each["delta"] else "whole frames"
        pool = "the pools of its members" if "members" in facts else "its pool"
        page.print(
            f"{each['name']}: stored once, {each['frames']:,} frames as {kind}, "
            f"{decimal(each['used_bytes'])} of {decimal(each['bytes'])} in {pool}"
        )
    if excluded := facts["excluded"]:
        page.print(f"excluded by the run that collected the rows: {', '.join(excluded)}")


def _show_members(page: Page, facts: Mapping[str, Any]) -> None:
    if "members" in facts:
        page.head("Members")
        names = ("path", "format", "first_row", "rows", "ids_moved_by")
        lines = (tuple(each[name] for name in names) for each in facts["members"])
        page.table(("path", "format", "first row", "rows", "ids moved by"), lines)
    shards: Mapping[str, Any] = facts.get("shards", {"runs": (), "foreign": ()})
    for run in shards["runs"]:
        there = run["of"] - len(run["missing"])
        whole = "exactly all" if run["complete"] else "not exactly all"
        of = "" if run["asked"] is None else f" of {run['asked']:,}"
        page.head(f"Shards of run {run['run']}")
        page.print(f"{there} of {run['of']}, {run['rows']:,} rows{of}: {whole}")
        if run["missing"]:
            page.print(f"missing: {', '.join(map(str, run['missing']))}")
        for index, paths in run["doubled"].items():
            page.print(f"doubled: {index} is {', '.join(paths)}")
    if shards["foreign"]:
        page.print(f"foreign: {', '.join(shards['foreign'])}")


def runs_as_text(facts: Mapping[str, Any]) -> str:
    """Format the runs of ``facts`` as text, with the place and the code that made each."""
    page = Page()
    if "content" in facts:
        page.print(f"content {facts['content']}")
    _show_runs(page, facts["runs"], made=True)
    return page.text


def _show_runs(page: Page, runs: list[dict[str, Any]], *, made: bool = False) -> None:
    page.head("Runs")
    for number, run in enumerate(runs):
        if is_copied(run) or LEFT_OUT in run:
            page.print(f"{number}  {_copy_line(run)}")
        else:
            versions = [f"{name} {version}" for name, version in part(run, "versions").items()]
            page.print(f"{number}  {_run_line(run)}")
            page.print(f"   {', '.join(versions) or 'no versions'}")
            if note := unversioned(run):
                page.print(f"   {note}")
            if made:
                page.print(f"   {_made_line(part(run, 'made'))}")
                if run.get(EVENTS):
                    page.print(f"   {_events_line(run[EVENTS])}")
        if (returns := run["returns"]) is not None and (made or len(runs) > 1):
            mean, length = _number(returns["mean"]), _number(run["lengths"]["mean"])
            page.print(
                f"   {counted(returns['episodes'], 'episode')} ended, mean return {mean} "
                f"({_number(returns['min'])} to {_number(returns['max'])}), mean length {length}"
            )


def _made_line(made: Mapping[str, Any]) -> str:
    """Describe time, host, commit and policy hashes of a run."""
    git, policy = part(made, "git"), part(made, "policy")
    changed = " and changes" if git.get("changed") else ""
    words = {
        "made": made.get("at"),
        "on": made.get("host"),
        "at commit": git.get("commit") and f"{git['commit']}{changed}",
        "policy": policy.get("name"),
        "policy's code": policy.get("code"),
        "policy's weights": policy.get("weights"),
    }
    known = [f"{name} {value}" for name, value in words.items() if value]
    return ", ".join(known) or "no record of where it was made"


def _events_line(events: Sequence[Mapping[str, Any]]) -> str:
    """Describe the environment calls of a run: their number, and the last few by name."""
    shown = [
        f"{each['call']} {each['name']}({_arguments(each)})"
        + ("" if each["lanes"] is None else f" of lanes {str(each['lanes'])[1:-1]:.40}")
        + f" at {each['at']:,}"
        for each in events[-_MOST_EVENTS:]
    ]
    more = "…, " if len(events) > len(shown) else ""
    return f"{len(events):,} calls of environments: {more}{', '.join(shown)}"


def _arguments(event: Mapping[str, Any]) -> str:
    """Format the arguments of a call, truncated."""
    if event["args"] is None:
        said = str(event.get("repr", "?"))
    else:
        named = [f"{name}={json.dumps(value)}" for name, value in event["kwargs"].items()]
        said = ", ".join([*map(json.dumps, event["args"]), *named])
    return said if len(said) <= _LONGEST else f"{said[: _LONGEST - 1]}…"


def _version_line(found: Mapping[str, Any]) -> tuple[object, ...]:
    returns, lengths = found["returns"], found["lengths"]
    numbers = [returns and _number(returns[name]) for name in ("mean", "std", "min", "max")]
    cells = ["" if each is None else each for each in numbers]
    policy = (str(found["policy_id"]),) if "policy_id" in found else ()
    return (
        *policy,
        str(found["policy_version"]),
        lengths["episodes"],
        *cells,
        _number(lengths["mean"]),
    )


def _copy_line(run: Mapping[str, Any]) -> str:
    """Describe copied rows in one line, with the newest runs that made them."""
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
    """Describe the newest runs that made copied rows, each together with its resumptions."""
    told = [
        f"rows copied from {_copied_from(each)}" if is_copied(each) else _describe_run(each)
        for each in copied_runs(run)
    ]
    told = [*dict.fromkeys(told)]
    shown = told[-_MOST_MAKERS:]
    if more := len(told) - len(shown) + runs_left_out(run):
        shown.append(f"{more} more")
    return "; ".join(shown) or "unknown runs"


def _run_line(run: Mapping[str, Any]) -> str:
    span = f"{run['rows']:,} rows from row {run['first_row']:,}"
    return _describe_run(run, span, _resumed(run) if run["resumed"] else None)


def _describe_run(
    run: Mapping[str, Any], span: str | None = None, resumed: str | None = None
) -> str:
    """Describe a run's environment, lanes, seed, budget and policy."""
    environment, call = part(run, "environment"), part(run, "call")
    workers = whole_number(call, "num_workers")
    asked, mode = {**call, **part(run, "command")}, str(call.get("mode", ""))
    names = ["total_frames", "budget_unit", "total_episodes", "frames_per_batch"]
    names.append("max_frames_per_traj")
    parts = [
        environment_of(run) or "unknown environment",
        f"kwargs {json.dumps(environment['kwargs'])}" if environment.get("kwargs") else None,
        span,
        counted(run.get("lanes", "?"), "lane")
        + (f" in {counted(workers, mode + ' worker')}" if workers else ""),
        _recorded(call) or f"seed {run.get('seed', '?')}",
        _shard_words(part(run, SHARD)),
        resumed,
        *(f"{n.replace('_', ' ')} {asked[n]}" for n in names if asked.get(n) is not None),
        f"policy {policy_of(run) or 'unknown'}",
    ]
    return ", ".join(str(each) for each in parts if each is not None)


def _recorded(call: Mapping[str, Any]) -> str:
    """Describe the environment of a recorded run, which has no seed. Other runs: ""."""
    layers = call.get("recorded")
    if not isinstance(layers, list):
        return ""
    if layers == ["Recorder.manual"]:
        return "recorded without an environment"
    return f"recorded around {' around '.join(map(str, layers))}"


def _shard_words(said: Mapping[str, Any]) -> str | None:
    if not said:
        return None
    index, of, asked = (whole_number(said, name) for name in ("index", "of", "asked"))
    lanes = said.get("lanes")
    if not isinstance(lanes, list) or [type(each) for each in lanes] != [int, int]:
        return "a shard whose entry is damaged"
    return (
        f"shard {index}/{of}: lanes {lanes[0]} to {lanes[1] - 1}, {asked:,} frames in all shards "
        f"of run {said.get('run')!s:.16}"
    )


def _resumed(run: Mapping[str, Any]) -> str:
    at = [f"{row:,}" for row in run["resumed_at"][-3:]]
    more = "…, " if len(run["resumed_at"]) > len(at) else ""
    return f"resumed {times(run['resumed'])}" + (f" (at row {more}{', '.join(at)})" if at else "")


def _cell(value: Any) -> str:
    """Format a value in a few characters."""
    flat = np.asarray(value, dtype=object).reshape(-1).tolist()
    shown = " ".join(_number(each) for each in flat[:4])
    if not isinstance(value, list) or len(flat) == 1:
        return shown
    return f"[{shown}]" if len(flat) <= 4 else f"[{shown} …{len(flat)}]"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
