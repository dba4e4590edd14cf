"""Shards of runs among the members of a union, and the shards that are missing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tallyroll.storage.files.copied_runs import copied_runs
from tallyroll.storage.files.manifest import SHARD


@dataclass(frozen=True, slots=True)
class RunShards:
    """The shards of one run that a union contains."""

    run: str
    of: int
    """The number of shards that the run was divided into."""
    asked: int | None
    """The number of transitions requested from all shards; None if the run does not record it."""
    rows: int
    """The rows of the present shards, each shard counted once."""
    missing: tuple[int, ...]
    doubled: Mapping[int, tuple[str, ...]]
    """The paths of each shard that occurs more than once, by the index of the shard."""

    @property
    def problems(self) -> list[str]:
        """The differences from a complete set of shards, one sentence each."""
        found = []
        if self.missing:
            found.append(f"shards {_listed(self.missing)} of {self.of} are missing")
        found += [
            f"shard {index} of {self.of} occurs more than once: {', '.join(paths)}"
            for index, paths in self.doubled.items()
        ]
        if self.asked is not None and self.rows != self.asked and not self.missing:
            found.append(f"the shards have {self.rows:,} rows, expected {self.asked:,}")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            "run": self.run,
            "of": self.of,
            "asked": self.asked,
            "rows": self.rows,
            "missing": list(self.missing),
            "doubled": {str(index): list(paths) for index, paths in self.doubled.items()},
            "complete": not self.problems,
        }


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards among the members of a union, grouped by run."""

    runs: tuple[RunShards, ...]
    """The runs that have at least one shard here, in the order of their first shards."""
    foreign: tuple[str, ...]
    """The paths of members that are not shards."""

    @property
    def problems(self) -> list[str]:
        """The differences from a complete set of shards for each run, one sentence each."""
        one = len(self.runs) == 1
        found = [
            problem if one else f"run {run.run}: {problem}"
            for run in self.runs
            for problem in run.problems
        ]
        whose = f" of run {self.runs[0].run}" if one else ""
        return [*found, *(f"{path} is not a shard{whose}" for path in self.foreign)]

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {
            "runs": [run.as_json() for run in self.runs],
            "foreign": list(self.foreign),
            "complete": not self.problems,
        }


_Shard = tuple[str, int, int, int | None]
"""The path, the index, the number of rows, and the transitions requested from all shards."""


def shards_of(
    members: Iterable[tuple[str | os.PathLike[str], Sequence[Mapping[str, Any]], int]],
) -> Shards | None:
    """Return the shards among storages; None if there are none.

    A storage is a shard if all its runs record the same shard.

    Args:
        members: the path, the runs and the number of rows of each storage.
    """
    of_runs: dict[tuple[str, int], list[_Shard]] = {}
    foreign = []
    for path, runs, rows in members:
        if (said := recorded_shard(runs)) is None:
            foreign.append(str(path))
        else:
            run, index, of, asked = said
            of_runs.setdefault((run, of), []).append((str(path), index, rows, asked))
    if not of_runs:
        return None
    found = tuple(_shards_of_run(run, of, shards) for (run, of), shards in of_runs.items())
    return Shards(found, tuple(foreign))


def _shards_of_run(run: str, of: int, found: Sequence[_Shard]) -> RunShards:
    paths: dict[int, list[str]] = {}
    total = 0
    for path, index, rows, _ in found:
        total += 0 if index in paths else rows
        paths.setdefault(index, []).append(path)
    return RunShards(
        run,
        of,
        next((asked for *_, asked in found if asked is not None), None),
        total,
        tuple(index for index in range(of) if index not in paths),
        {index: tuple(those) for index, those in sorted(paths.items()) if len(those) > 1},
    )


def recorded_shard(runs: Iterable[Mapping[str, Any]]) -> tuple[str, int, int, int | None] | None:
    """Return the run id, the index, the number of shards and the total number of transitions.

    Return None if the runs of a storage do not all record the same shard.
    """
    runs = [made for run in runs for made in (copied_runs(run) or [run])]
    found = {_read(run.get(SHARD)) for run in runs}
    return found.pop() if len(found) == 1 else None


def _read(said: Any) -> tuple[str, int, int, int | None] | None:
    if not isinstance(said, dict):
        return None
    run, index, of, asked = (said.get(name) for name in ("run", "index", "of", "asked"))
    if type(index) is not int or type(of) is not int or not 0 <= index < of <= 2**20:
        return None
    if not isinstance(run, str):
        return None
    return run, index, of, asked if type(asked) is int else None


def _listed(numbers: Iterable[int]) -> str:
    numbers = list(numbers)
    shown = ", ".join(map(str, numbers[:10]))
    return shown if len(numbers) <= 10 else f"{shown} and {len(numbers) - 10} more"
