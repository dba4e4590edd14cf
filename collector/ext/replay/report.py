"""The result of a replay."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tallyroll.collector.ext.replay.comparison import Difference
from tallyroll.storage.rows.pages import Page, PageSource, counted

_SHOWN = 10


@dataclass(frozen=True)
class ReplayReport(PageSource):
    """The result of :func:`replay`: counts of replayed trajectories, and their differences."""

    path: str
    equal: int
    """Number of trajectories equal to the stored ones bit for bit, or within ``atol``."""
    rows: int
    """Number of rows compared."""
    atol: float
    """Largest difference of two floats that count as equal."""
    largest: Mapping[str, float]
    """Largest difference in each compared column; infinite if only one of two values is NaN."""
    differing: Mapping[str, int]
    """Number of rows that differ, by column."""
    differences: tuple[Difference, ...]
    """The first difference of each trajectory that differs, ordered by id."""
    not_replayed: Mapping[str, tuple[int, ...]]
    """Requested trajectories that cannot be replayed, by reason."""
    left_out: Mapping[str, int]
    """Number of trajectories that a sample skipped because they cannot be replayed, by reason."""
    versions: Mapping[str, tuple[str, str]]
    """Packages whose version differs from the run's: the run's version and the installed one."""
    not_compared: tuple[str, ...]
    """Columns that the environment does not produce, such as those of a policy."""
    excluded: tuple[str, ...] = ()
    """Columns that the run did not store and the replay did not compare, without ``next``."""
    notes: tuple[str, ...] = ()
    frames: int = 0
    """Number of frames in the video; 0 without a video."""
    seconds: float = field(default=0.0, compare=False)
    trajectories: int = 0
    """Number of trajectories that the storage has, replayed or not."""

    @property
    def replayed(self) -> int:
        """Number of trajectories compared."""
        return self.equal + len(self.differences)

    @property
    def first_difference(self) -> Difference | None:
        """The first difference of the lowest trajectory id that differs; None if none differs."""
        return self.differences[0] if self.differences else None

    @property
    def same(self) -> bool:
        """True if all requested trajectories were replayed and are equal."""
        return not self.differences and not self.not_replayed and self.equal > 0

    @property
    def status(self) -> int:
        """Exit status of the command.

        0 means that all is equal, 1 that something differs, and 2 that something was not replayed.
        """
        if self.differences:
            return 1
        return 0 if self.same else 2

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "path": self.path,
            "same": self.same,
            "replayed": self.replayed,
            "trajectories": self.trajectories,
            "equal": self.equal,
            "rows": self.rows,
            "atol": self.atol,
            "largest": {name: _number(value) for name, value in self.largest.items()},
            "differing": dict(self.differing),
            "differences": [
                {name: _number(value) for name, value in each.to_dict().items()}
                for each in self.differences
            ],
            "not_replayed": {why: [*ids] for why, ids in self.not_replayed.items()},
            "left_out": dict(self.left_out),
            "versions": {name: [*pair] for name, pair in self.versions.items()},
            "not_compared": [*self.not_compared],
            "excluded": [*self.excluded],
            "notes": [*self.notes],
            "frames": self.frames,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Return the report as one JSON object in text form."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def __repr__(self) -> str:
        said = f"{self.equal:,} of {self.replayed:,} trajectories equal, {self.rows:,} rows"
        if first := self.first_difference:
            said += f"; first difference: {first}"
        if self.not_replayed:
            said += f"; {sum(map(len, self.not_replayed.values())):,} cannot be replayed"
        if self.versions:
            said += f"; other versions: {', '.join(self.versions)}"
        return f"ReplayReport({said})"

    def _show_on_(self, page: Page) -> None:
        show_replay(self, page)


def show_replay(found: ReplayReport, page: Page, video: str | None = None) -> None:
    """Write a report to a page; ``video`` is the path of the video."""
    within = f" within {found.atol:g}" if found.atol else ""
    if found.replayed:
        page.print(
            f"{'equal' if not found.differences else 'different'}{within}: {found.equal:,} of "
            f"{found.replayed:,} trajectories are equal; {found.replayed:,} of "
            f"{found.trajectories:,} trajectories and {counted(found.rows, 'row')} compared, "
            f"{found.seconds:.1f} s"
        )
    else:
        page.print("nothing was replayed")
    if found.differences:
        page.head("First differences")
        for each in found.differences[:_SHOWN]:
            page.print(f"  {each}")
        if more := len(found.differences) - _SHOWN:
            page.print(f"  and of {more:,} more trajectories" if more > 0 else "")
        page.head("Columns that differ (rows, largest difference)")
        for name, count in found.differing.items():
            page.print(f"  {name}: {count:,}, {found.largest[name]:g}")
    elif found.atol and found.largest:
        page.print(f"largest difference: {max(found.largest.values()):g}")
    for why, ids in found.not_replayed.items():
        page.print(f"not replayed: {_named(ids)}: {why}")
    for why, count in found.left_out.items():
        others = counted(count, "trajectory")
        page.print(f"not chosen, because they cannot be replayed: {others}: {why}")
    if found.versions:
        said = ", ".join(
            f"{name} {run}, here {here}" for name, (run, here) in found.versions.items()
        )
        page.print(f"made with other versions: {said}")
    if found.not_compared and found.replayed:
        page.print(
            "not compared, because the environment does not make them: "
            f"{', '.join(found.not_compared)}"
        )
    if found.excluded and found.replayed:
        page.print(f"not compared, for the run excluded them: {', '.join(found.excluded)}")
    for note in found.notes:
        page.print(f"note: {note}")
    if found.frames:
        page.print(f"{video or 'video'}: {found.frames:,} frames")


def _named(ids: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ids[:_SHOWN]))
    more = len(ids) - _SHOWN
    noun = "trajectory" if len(ids) == 1 else f"{len(ids):,} trajectories:"
    return f"{noun} {shown}" + (f" and {more:,} more" if more > 0 else "")


def _number(value: Any) -> Any:
    """Return ``value``, with text for values that JSON numbers cannot represent."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    strange = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if strange else value
