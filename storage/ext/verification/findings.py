"""Findings of `verify`: frozen records, their collection, and rows that report them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from tallyroll.storage.rows.pages import Page, PageSource

PLACES = 5
"""Maximum number of places that a finding names."""


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a fault. Fields that do not apply are None."""

    row: int | None = None
    """The row's number."""
    lane: int | None = None
    trajectory: int | None = None
    step: int | None = None
    column: str | None = None
    """The column's name in messages, such as ``next/observation``."""
    what: str = ""
    """The actual value and the expected value."""
    file: str | None = None
    """The file, in a dataset of another library."""
    episode: int | None = None
    """The episode, in a dataset of another library. In this case ``row`` counts within it."""

    def __str__(self) -> str:
        parts = [] if self.file is None else [self.file]
        parts += [] if self.episode is None else [f"episode {self.episode}"]
        parts += [] if self.row is None else [f"row {self.row:,}"]
        for name in ("lane", "trajectory", "step", "column"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name} {value}")
        where = ", ".join(parts)
        return f"{where}: {self.what}" if where and self.what else where or self.what


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that occurs at one or many places."""

    check: str
    """The check that found the fault, one of `CHECKS`."""
    message: str
    """The fault, in one sentence."""
    count: int
    """The total number of places."""
    places: tuple[Place, ...]
    """The first few places."""

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count:,} times)"
        return f"{self.check}: {self.message}{times}"


@dataclass(frozen=True, slots=True)
class Report(PageSource):
    """The checks that `verify` ran, and their findings."""

    path: str
    format: str | None
    """The name of the format; None if the storage is too damaged to be opened."""
    rows: int
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    """The checks that ran."""
    skipped: Mapping[str, str]
    """The checks that did not run, with the reasons."""
    notes: tuple[Finding, ...] = ()
    """Faults that affect no row, and that ``healing`` repairs.

    A power failure or a kill left the storage open and interrupted a write.
    """
    healing: str | None = None
    """Instructions for repairing the notes; None without notes."""

    @property
    def sound(self) -> bool:
        """True if there are no findings; there may be notes."""
        return not self.findings

    def __repr__(self) -> str:
        found = "; ".join(str(each) for each in self.findings) or "sound"
        noted = "".join(f", note: {each}" for each in self.notes)
        left = f", skipped: {', '.join(self.skipped)}" if self.skipped else ""
        made = f"{len(self.checked)} checks made"
        return f"Report({self.path!r}, {self.rows:,} rows, {found}{noted}, {made}{left})"

    def _show_on_(self, page: Page) -> None:
        show_report(self, page)


def show_report(report: Report, page: Page, seconds: float | None = None) -> None:
    """Write a report to a page; ``seconds`` is the duration of the checks."""
    page.print(_summary(report, seconds))
    for before, found in (("", report.findings), ("note: ", report.notes)):
        for finding in found:
            page.print()
            page.print(f"{before}{finding}")
            for place in finding.places:
                page.print(f"    {place}")
            more = finding.count - len(finding.places)
            if finding.places and more > 0:
                page.print(f"    and {more:,} more")
    if report.healing is not None:
        page.print(report.healing)
    by_reason: dict[str, list[str]] = {}
    for name, why in report.skipped.items():
        by_reason.setdefault(why, []).append(name)
    if (report.findings or report.notes) and by_reason:
        page.print()
    for why, names in by_reason.items():
        page.print(f"not checked: {', '.join(names)} ({why})")


def _summary(report: Report, seconds: float | None) -> str:
    if report.format is None:
        return f"{report.path} cannot be read"
    said = "sound" if report.sound else "not sound"
    for what, found in (("finding", report.findings), ("note", report.notes)):
        if count := len(found):
            said += f", {count} {what}{'s' if count > 1 else ''}"
    took = "" if seconds is None else f", {seconds:.1f} s"
    return (
        f"{report.path}: {said}; {report.rows:,} rows ({report.format}), "
        f"{len(report.checked)} checks{took}"
    )


class Findings:
    """Collection of findings, each with the count of its places and the first `PLACES` of them."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def add(self, check: str, message: str, *places: Place, count: int = 1) -> None:
        """Add ``count`` to a finding, and keep ``places`` up to a total of `PLACES`."""
        if (known := self._found.get((check, message))) is not None:
            places, count = known.places + places, known.count + count
        self._found[check, message] = Finding(check, message, count, places[:PLACES])

    def add_rows(
        self, check: str, message: str, rows: np.ndarray, place_of: Callable[[int], Place]
    ) -> None:
        """Add a finding at each of ``rows`` [n], the lowest first.

        ``place_of`` returns the place for an index into ``rows``.
        """
        if len(rows):
            lowest = np.argsort(rows, kind="stable")[:PLACES].tolist()
            self.add(check, message, *map(place_of, lowest), count=len(rows))

    def merge(self, other: Findings) -> None:
        """Append the findings of ``other``."""
        for each in other:
            self.add(each.check, each.message, *each.places, count=each.count)


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Consecutive rows of a storage, of which only the numbers are known."""

    start: int
    """The number of the first row."""

    def place(self, at: int, what: str, column: str | None = None) -> Place:
        """Return the place of entry ``at``."""
        return Place(row=self.start + at, column=column, what=what)

    def report(
        self,
        findings: Findings,
        check: str,
        message: str,
        wrong: np.ndarray,
        what: Callable[[int], str],
        at: np.ndarray | None = None,
        column: str | None = None,
    ) -> None:
        """Add a finding for the entries that the mask ``wrong`` [n] selects.

        ``what`` returns a description of an entry, given its index.

        ``at`` [n] are the entries' indices among the rows; None: entry i is row i.
        """
        where = np.flatnonzero(wrong)
        places = where if at is None else at[where]
        findings.add_rows(
            check,
            message,
            places,
            lambda i: self.place(int(places[i]), what(int(where[i])), column),
        )
