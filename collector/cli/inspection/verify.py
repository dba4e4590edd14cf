"""``tallyroll verify``: read every row of a storage or dataset, and report problems."""

import argparse
import dataclasses
import json
import os
import time
from typing import Any

from tallyroll.collector.cli.output import CommandError, emit
from tallyroll.collector.cli.page import Page
from tallyroll.collector.cli.progress import shown_progress
from tallyroll.storage import Finding, NotAStorage, Report, verify, verify_dataset
from tallyroll.storage.ext.dataset_checks.verify_dataset import kind_at, kinds


def run(args: argparse.Namespace) -> int:
    """Run ``tallyroll verify`` and return the exit status."""
    began = time.monotonic()
    with shown_progress("verified", args.quiet) as progress:
        report = _report(args, progress)
    if args.json:
        emit(json.dumps(as_json(report), indent=2) + "\n")
    elif not args.quiet:
        emit(as_text(report, time.monotonic() - began))
    return 0 if report.sound else 1


def _report(args: argparse.Namespace, progress: Any) -> Report:
    skip, paths = args.skip or (), args.path
    if any(_parts(path) for path in paths) and len(paths) > 1:
        raise CommandError("datasets of other libraries are checked one at a time. Give one path.")
    if (there := _parts(paths[0])) is not None:
        kind, path = there
        return verify_dataset(path, kind, skip=skip, progress=progress)
    one = paths[0] if len(paths) == 1 else paths
    try:
        return verify(one, skip=skip, progress=progress, accept_copy=args.accept_copy)
    except NotAStorage:
        found = None if len(paths) > 1 else kind_at(paths[0])
        if found is None:
            raise
        return verify_dataset(paths[0], found, skip=skip, progress=progress)


def _parts(path: str) -> tuple[str, str] | None:
    """Return the kind and the path of a dataset.

    Return None for a storage, even with a colon in its name.
    """
    kind, colon, rest = path.partition(":")
    return (kind, rest) if colon and kind in kinds() and not os.path.lexists(path) else None


def as_json(report: Report) -> dict[str, object]:
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
    page.print(_head(report, seconds))
    for before, found in (("", report.findings), ("note: ", report.notes)):
        for finding in found:
            _show(finding, before, page)
    if report.healing is not None:
        page.print(report.healing)
    by_reason: dict[str, list[str]] = {}
    for name, why in report.skipped.items():
        by_reason.setdefault(why, []).append(name)
    if (report.findings or report.notes) and by_reason:
        page.print()
    for why, names in by_reason.items():
        page.print(f"not checked: {', '.join(names)} ({why})")
    return page.text


def _head(report: Report, seconds: float) -> str:
    if report.format is None:
        return f"{report.path} cannot be read"
    said = "sound" if report.sound else "not sound"
    for what, found in (("finding", report.findings), ("note", report.notes)):
        if count := len(found):
            said += f", {count} {what}{'s' if count > 1 else ''}"
    return (
        f"{report.path}: {said}; {report.rows:,} rows ({report.format}), "
        f"{len(report.checked)} checks, {seconds:.1f} s"
    )


def _show(finding: Finding, before: str, page: Page) -> None:
    page.print()
    page.print(f"{before}{finding}")
    for place in finding.places:
        page.print(f"    {place}")
    more = finding.count - len(finding.places)
    if finding.places and more > 0:
        page.print(f"    and {more:,} more")
