"""The result of a replay."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tallyroll.collector.ext.replay.comparison import Difference


@dataclass(frozen=True)
class ReplayReport:
    """The result of :func:`replay`: what was stepped again, and whether it came out the same."""

    path: str
    equal: int
    """Trajectories that came out bit for bit as they are stored, or within ``atol``."""
    rows: int
    """Rows that were compared."""
    atol: float
    """Floats that differ by no more were taken as equal."""
    largest: Mapping[str, float]
    """The largest difference in each column that was compared; infinite: one alone is NaN."""
    differing: Mapping[str, int]
    """Rows that differ, by column."""
    differences: tuple[Difference, ...]
    """The first difference of each trajectory that differs, by their ids."""
    not_replayed: Mapping[str, tuple[int, ...]]
    """Trajectories that were wanted and cannot be replayed, by the reason."""
    left_out: Mapping[str, int]
    """How many others cannot be replayed, by the reason; they were not asked for by their ids."""
    versions: Mapping[str, tuple[str, str]]
    """Packages of another version than the run's: its version, and the one here."""
    not_compared: tuple[str, ...]
    """Columns that the environment does not make: a policy's, numbers of rows."""
    notes: tuple[str, ...] = ()
    frames: int = 0
    """Frames of the film, where there is one."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def replayed(self) -> int:
        """Trajectories that were compared."""
        return self.equal + len(self.differences)

    @property
    def first_difference(self) -> Difference | None:
        """The first difference of the lowest trajectory that differs; None if none does."""
        return self.differences[0] if self.differences else None

    @property
    def same(self) -> bool:
        """True if all that was wanted was replayed, and is equal."""
        return not self.differences and not self.not_replayed and self.equal > 0

    @property
    def status(self) -> int:
        """0 equal, 1 something differs, 2 something could not be replayed: as of the command."""
        if self.differences:
            return 1
        return 0 if self.same else 2

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "path": self.path,
            "same": self.same,
            "replayed": self.replayed,
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
            "notes": [*self.notes],
            "frames": self.frames,
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Return one JSON object as text."""
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


def _number(value: Any) -> Any:
    """``value``, with text where JSON has no number for it."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    strange = isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if strange else value
