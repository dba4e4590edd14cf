"""Findings of `verify`: frozen records, what gathers them, and rows that report them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

PLACES = 5
"""A finding names that many places, the first ones."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place where something is wrong. Fields that do not apply are None."""

    row: int | None = None
    """The row's number."""
    lane: int | None = None
    trajectory: int | None = None
    step: int | None = None
    column: str | None = None
    """As messages spell it: ``next/observation``."""
    what: str = ""
    """What is there, and what was wanted."""

    def __str__(self) -> str:
        parts = [] if self.row is None else [f"row {self.row:,}"]
        for name in ("lane", "trajectory", "step", "column"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name} {value}")
        where = ", ".join(parts)
        return f"{where}: {self.what}" if where and self.what else where or self.what


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, at one or many places."""

    check: str
    """The check that found it, one of `CHECKS`."""
    message: str
    """What is wrong, in one sentence."""
    count: int
    """At how many places."""
    places: tuple[Place, ...]
    """The first few of them."""

    def __str__(self) -> str:
        times = "" if self.count == 1 else f" ({self.count:,} times)"
        return f"{self.check}: {self.message}{times}"


@dataclass(frozen=True, slots=True)
class Report:
    """The checks that `verify` made, and their findings."""

    path: str
    format: str | None
    """None where the storage is too damaged to be opened."""
    rows: int
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    """The checks that were made."""
    skipped: Mapping[str, str]
    """The checks that were not, and why."""
    notes: tuple[Finding, ...] = ()
    """What is not as it should be, hurts no row, and goes as ``healing`` says: a power cut, or a
    kill, left the storage open, and what was being written was cut short."""
    healing: str | None = None
    """How notes go; None where there is none."""

    @property
    def sound(self) -> bool:
        """Nothing is wrong as far as it was checked; there may be notes."""
        return not self.findings


class Findings:
    """Gathers findings: counts their places, and keeps the first `PLACES` of each."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._found.values())

    def add(self, check: str, message: str, *places: Place, count: int = 1) -> None:
        """Count ``message`` up, and keep those of ``places`` that are among the first."""
        if (known := self._found.get((check, message))) is not None:
            places, count = known.places + places, known.count + count
        self._found[check, message] = Finding(check, message, count, places[:PLACES])

    def add_rows(
        self, check: str, message: str, rows: np.ndarray, place_of: Callable[[int], Place]
    ) -> None:
        """As `add` for every one of ``rows`` [n], the lowest first.

        ``place_of`` takes an index into ``rows``.
        """
        if len(rows):
            lowest = np.argsort(rows, kind="stable")[:PLACES].tolist()
            self.add(check, message, *map(place_of, lowest), count=len(rows))

    def merge(self, other: Findings) -> None:
        """Add what ``other`` gathered behind what is here."""
        for each in other:
            self.add(each.check, each.message, *each.places, count=each.count)


@dataclass(frozen=True, slots=True)
class NumberedRows:
    """Rows that follow one another in a storage, of which no more than their numbers is known."""

    start: int
    """The first row's number."""

    def place(self, at: int, what: str, column: str | None = None) -> Place:
        """The place of entry ``at``."""
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
        """Add the entries that are ``wrong`` [n]; ``what`` takes an entry's index.

        ``at`` [n] says where among the rows they are, if not one behind the other.
        """
        where = np.flatnonzero(wrong)
        places = where if at is None else at[where]
        findings.add_rows(
            check,
            message,
            places,
            lambda i: self.place(int(places[i]), what(int(where[i])), column),
        )
