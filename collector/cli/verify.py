"""``tallyroll verify``: read every row of a storage, and say what is wrong with it."""

import argparse
import dataclasses
import json
import time

from tallyroll.collector.cli.escaped_text import visible
from tallyroll.collector.cli.progress import reading_progress
from tallyroll.collector.cli.streams import emit
from tallyroll.storage import Finding, Report, verify


def run(args: argparse.Namespace) -> int:
    """Carry out ``tallyroll verify``; returns the exit status."""
    began = time.monotonic()
    try:
        with reading_progress("verifying", args.quiet) as progress:
            report = verify(
                args.path,
                skip=args.skip or (),
                progress=progress,
                accept_copy=args.accept_copy,
            )
    except KeyboardInterrupt:
        return 130
    if args.json:
        emit(json.dumps(as_json(report), indent=2) + "\n")
    elif not args.quiet:
        emit(as_text(report, time.monotonic() - began))
    return 0 if report.sound else 1


def as_json(report: Report) -> dict[str, object]:
    """The report as JSON values; places without what does not apply."""
    value = dataclasses.asdict(report) | {"sound": report.sound}
    for finding in (*value["findings"], *value["notes"]):
        finding["places"] = [
            {name: each for name, each in place.items() if each not in (None, "")}
            for place in finding["places"]
        ]
    return value


def as_text(report: Report, seconds: float) -> str:
    """The report for people."""
    lines = [_head(report, seconds)]
    for finding in report.findings:
        lines += ["", *_finding(finding)]
    for note in report.notes:
        first, *rest = _finding(note)
        lines += ["", f"note: {first}", *rest]
    if report.healing is not None:
        lines += [report.healing]
    by_reason: dict[str, list[str]] = {}
    for name, why in report.skipped.items():
        by_reason.setdefault(why, []).append(name)
    lines += [""] if (report.findings or report.notes) and by_reason else []
    lines += [f"not checked: {', '.join(names)} ({why})" for why, names in by_reason.items()]
    return "\n".join(map(visible, lines)) + "\n"


def _head(report: Report, seconds: float) -> str:
    if report.format is None:
        return f"{report.path} cannot be read"
    count = len(report.findings)
    said = "sound" if not count else f"not sound, {count} finding{'s' if count > 1 else ''}"
    if notes := len(report.notes):
        said += f", {notes} note{'s' if notes > 1 else ''}"
    return (
        f"{report.path}: {said}; {report.rows:,} rows ({report.format}), "
        f"{len(report.checked)} checks, {seconds:.1f} s"
    )


def _finding(finding: Finding) -> list[str]:
    more = finding.count - len(finding.places)
    lines = [str(finding), *(f"    {place}" for place in finding.places)]
    return [*lines, f"    and {more:,} more"] if finding.places and more > 0 else lines
