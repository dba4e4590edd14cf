"""Findings of `verify`: frozen records, and the list that gathers them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

__all__ = ["PLACES", "Finding", "Findings", "Place", "Report"]

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
        names = ("row", "lane", "trajectory", "step", "column")
        parts = [f"{n} {_spell(n, v)}" for n in names if (v := getattr(self, n)) is not None]
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


@dataclass
class _Tally:
    count: int = 0
    places: list[Place] = field(default_factory=list)


class Findings:
    """Gathers findings: counts them, and keeps the first `PLACES` places of each."""

    def __init__(self) -> None:
        self._tallies: dict[tuple[str, str], _Tally] = {}

    def add(self, check: str, message: str, place: Place | None = None, count: int = 1) -> None:
        """Count ``message`` up, and keep ``place`` if it is among the first."""
        tally = self._tallies.setdefault((check, message), _Tally())
        tally.count += count
        if place is not None and len(tally.places) < PLACES:
            tally.places.append(place)

    def add_rows(
        self, check: str, message: str, rows: np.ndarray, place_of: Callable[[int], Place]
    ) -> None:
        """As `add` for every one of ``rows`` [n], the lowest first.

        ``place_of`` takes an index into ``rows``.
        """
        if not len(rows):
            return
        tally = self._tallies.setdefault((check, message), _Tally())
        tally.count += len(rows)
        wanted = PLACES - len(tally.places)
        if wanted > 0:
            tally.places += [place_of(int(i)) for i in np.argsort(rows, kind="stable")[:wanted]]

    def merge(self, other: Findings) -> None:
        """Add what ``other`` gathered behind what is here."""
        for key, theirs in other._tallies.items():
            mine = self._tallies.setdefault(key, _Tally())
            mine.count += theirs.count
            mine.places = (mine.places + theirs.places)[:PLACES]

    def listed(self, order: Iterable[str]) -> tuple[Finding, ...]:
        """All findings, by the place of their check in ``order``."""
        rank = {check: place for place, check in enumerate(order)}
        found = [
            Finding(check, message, tally.count, tuple(tally.places))
            for (check, message), tally in self._tallies.items()
        ]
        return tuple(sorted(found, key=lambda each: rank.get(each.check, len(rank))))


def _spell(name: str, value: int | str) -> str:
    # Numbers of rows are long, and the others are names.
    return f"{value:,}" if name == "row" else str(value)
