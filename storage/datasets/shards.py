"""The shards of one run among the members of a union: which are there, and which are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tallyroll.storage.datasets.members import Member
from tallyroll.storage.files.copied_runs import copied_runs

SHARD: Final = "shard"
"""The entry of a shard's run in its manifest: ``index`` of ``of``, the transitions that were
``asked`` of all together, and ``run``, an id that they have in common."""


@dataclass(frozen=True, slots=True)
class Shards:
    """The shards that a union has of one run."""

    run: str
    of: int
    """The number of shards that the run was divided into."""
    asked: int | None
    """The transitions that were asked of all of them; None if the run does not say."""
    rows: int
    """The rows of the shards that are there, each counted once."""
    missing: tuple[int, ...]
    doubled: Mapping[int, tuple[str, ...]]
    """The paths of each shard that several members are."""
    foreign: tuple[str, ...]
    """The paths of members that are no shards of this run."""

    @property
    def problems(self) -> list[str]:
        """Differences from exactly all shards, one sentence each."""
        found = []
        if self.missing:
            found.append(f"shards {_listed(self.missing)} of {self.of} are missing")
        found += [
            f"shard {index} of {self.of} is there more than once: {', '.join(paths)}"
            for index, paths in self.doubled.items()
        ]
        found += [f"{path} is no shard of run {self.run}" for path in self.foreign]
        if self.asked is not None and self.rows != self.asked and not self.missing:
            found.append(
                f"the shards have {self.rows:,} rows, and {self.asked:,} were asked of them"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {
            "run": self.run,
            "of": self.of,
            "asked": self.asked,
            "rows": self.rows,
            "missing": list(self.missing),
            "doubled": {str(index): list(paths) for index, paths in self.doubled.items()},
            "foreign": list(self.foreign),
            "complete": not self.problems,
        }


def shards_of(members: Iterable[Member]) -> Shards | None:
    """Return the shards among members, of the run that most of them are of; None without any.

    A member is a shard if all its runs say that it is the same one.
    """
    members = list(members)
    said = [_shard_of(each) for each in members]
    counts: dict[tuple[str, int], int] = {}
    for each in said:
        if each is not None:
            counts[each[0], each[2]] = counts.get((each[0], each[2]), 0) + 1
    if not counts:
        return None
    run, of = max(counts, key=lambda key: counts[key])
    paths: dict[int, list[str]] = {}
    asked, rows, foreign = None, 0, []
    for member, each in zip(members, said, strict=True):
        if each is None or (each[0], each[2]) != (run, of):
            foreign.append(str(member.path))
            continue
        index = each[1]
        rows += 0 if index in paths else len(member.rows)
        paths.setdefault(index, []).append(str(member.path))
        asked = each[3] if asked is None else asked
    return Shards(
        run,
        of,
        asked,
        rows,
        tuple(index for index in range(of) if index not in paths),
        {index: tuple(those) for index, those in sorted(paths.items()) if len(those) > 1},
        tuple(foreign),
    )


def _shard_of(member: Member) -> tuple[str, int, int, int | None] | None:
    """Return the run, the index, the number of shards and what was asked of all."""
    runs = [made for run in member.reader.runs for made in (copied_runs(run) or [run])]
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
