"""``tallyroll verify``: read every row of a storage or dataset, and report problems."""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from tallyroll.collector.cli.output import CommandError, as_json, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.ext.progress import shown_progress
from tallyroll.storage import NotAStorage, Report, open_storage, verify, verify_dataset
from tallyroll.storage.errors import SchemaMismatch, StorageError
from tallyroll.storage.ext.dataset_checks.verify_dataset import kind_at, kinds
from tallyroll.storage.ext.joined.members import expand_paths
from tallyroll.storage.ext.joined.shards import shards_of
from tallyroll.storage.ext.verification.findings import show_report
from tallyroll.storage.ext.verification.storage_checks import CHECKS
from tallyroll.storage.files.paths import is_pattern
from tallyroll.storage.rows.pages import counted

_UNREADABLE = (StorageError, OSError, ValueError)


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll verify`` and return the exit status."""
    began = time.monotonic()
    with shown_progress("verified", args.quiet) as progress:
        try:
            report = _report(args, progress)
        except (NotAStorage, SchemaMismatch):
            places = expand_paths(args.path)
            if len(places) == 1:
                raise
            return _run_each(args, [*map(str, places)], progress)
    if args.json:
        emit(json.dumps(report_facts(report), indent=2) + "\n")
    elif not args.quiet:
        emit(as_text(report, time.monotonic() - began))
    return 0 if report.sound else 1


def _run_each(args: argparse.Namespace, places: Sequence[str], progress: Any) -> int:
    """Check storages and datasets that cannot be read as one, each alone."""
    reports: list[Report] = []
    unchecked: dict[str, str] = {}
    storages: list[tuple[str, Sequence[Mapping[str, Any]], int]] = []
    for place in places:
        began = time.monotonic()
        try:
            reports.append(_report(argparse.Namespace(**{**vars(args), "path": [place]}), progress))
        except _UNREADABLE as error:
            unchecked[place] = str(error)
            continue
        with suppress(*_UNREADABLE), open_storage(place, accept_copy=args.accept_copy) as storage:
            storages.append((place, storage.runs, len(storage)))
        if not (args.json or args.quiet):
            emit(as_text(reports[-1], time.monotonic() - began))
    if not reports:
        raise CommandError(next(iter(unchecked.values())))
    shards = shards_of(storages)
    runs = () if shards is None else shards.runs
    sound = all(each.sound for each in reports) and not any(each.problems for each in runs)
    if args.json:
        facts = {
            "sound": sound,
            "datasets": [*map(report_facts, reports)],
            "shards": [each.as_json() for each in runs],
            "unchecked": unchecked,
        }
        emit(json.dumps(as_json(facts), indent=2) + "\n")
    elif not args.quiet:
        page = Page()
        page.head(
            f"{counted(len(reports), 'dataset')} checked one by one, because their columns or "
            "formats differ. Rows that two of them share are not detected"
        )
        for each in runs:
            for problem in each.problems:
                page.print(f"run {each.run}: {problem}")
        for place, why in unchecked.items():
            page.print(f"not checked: {place}: {why.removeprefix(f'{place} ')}")
        emit(page.text)
    return 1 if not sound else 2 if unchecked else 0


def _report(args: argparse.Namespace, progress: Any) -> Report:
    skip, paths = args.skip or (), args.path
    if any(_parts(path) for path in paths) and len(paths) > 1:
        raise CommandError("datasets of other libraries are checked one at a time. Give one path.")
    if (there := _parts(paths[0])) is not None:
        kind, path = there
        return verify_dataset(path, kind, skip=skip, progress=progress)
    one = paths[0] if len(paths) == 1 else paths
    ours = [name for name in skip if name in CHECKS]  # others are checks of other datasets
    try:
        return verify(one, skip=ours, progress=progress, accept_copy=args.accept_copy)
    except NotAStorage:
        found = None if len(paths) > 1 or is_pattern(paths[0]) else kind_at(paths[0])
        if found is None:
            raise
        return verify_dataset(paths[0], found, skip=skip, progress=progress)


def _parts(path: str) -> tuple[str, str] | None:
    """Return the kind and the path of a dataset.

    Return None for a storage, even with a colon in its name.
    """
    kind, colon, rest = path.partition(":")
    return (kind, rest) if colon and kind in kinds() and not os.path.lexists(path) else None


def report_facts(report: Report) -> dict[str, object]:
    """Return the report as JSON values, without empty fields of places."""
    value = dataclasses.asdict(report) | {"sound": report.sound}
    for finding in (*value["findings"], *value["notes"]):
        finding["places"] = [
            {name: each for name, each in place.items() if each not in (None, "")}
            for place in finding["places"]
        ]
    return value


def as_text(report: Report, seconds: float) -> str:
    """Format the report as text."""
    page = Page()
    show_report(report, page, seconds)
    return page.text
