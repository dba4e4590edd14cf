"""Wait for the shards of a run; report complete, unfinished and missing ones."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tallyroll.collector.cli.output import CommandError
from tallyroll.collector.counting.shards import among_first
from tallyroll.storage.files.manifest import SHARD

_SECONDS: Final = 1.0
"""Seconds between two checks."""


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    run: str
    of: int
    asked: int | None
    rows: int
    wanted: int | None
    """Number of rows that the shard will have; None if its run does not record it."""


@dataclass(slots=True)
class ShardStates:
    """State of the shards of a run at one check."""

    of: int
    shards: dict[int, _Shard] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Reason why each path cannot be opened as a storage, at least for now."""

    @property
    def asked(self) -> int | None:
        """Number of transitions requested from all shards together."""
        return next((each.asked for each in self.shards.values()), None)

    @property
    def missing(self) -> list[int]:
        """Indices of shards without a storage."""
        return [index for index in range(self.of) if index not in self.shards]

    @property
    def unfinished(self) -> dict[int, tuple[int, int | None]]:
        """Current and final number of rows of each incomplete shard, by index."""
        shards = sorted(self.shards.items())
        return {n: (each.rows, each.wanted) for n, each in shards if each.rows != each.wanted}

    @property
    def paths(self) -> list[Path]:
        """Paths of the storages, in the order of the shards."""
        return [self.shards[index].path for index in sorted(self.shards)]

    def as_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "complete": not self.missing and not self.unfinished,
            "of": self.of,
            "asked": self.asked,
            "missing": self.missing,
            "unfinished": {
                str(index): {"rows": rows, "wanted": wanted, "path": str(self.shards[index].path)}
                for index, (rows, wanted) in self.unfinished.items()
            },
            "unreadable": self.unreadable,
        }

    def in_words(self) -> str:
        """Describe the missing and incomplete shards as part of a sentence."""
        found = []
        if self.missing:
            found.append(f"shards {', '.join(map(str, self.missing))} of {self.of} are missing")
        for index, (rows, wanted) in self.unfinished.items():
            of = "" if wanted is None else f" of {wanted:,}"
            found.append(f"shard {index} ({self.shards[index].path}) has {rows:,}{of} rows")
        return "; ".join(found + [f"{path}: {why}" for path, why in self.unreadable.items()])


def waited_for(
    sources: Sequence[str], of: int, seconds: float, shown: Callable[[ShardStates], object]
) -> ShardStates:
    """Return the state once all shards are complete, or at the timeout.

    Args:
        sources: storages and patterns. Some may not exist yet.
        of: number of shards.
        seconds: timeout. 0 checks once.
        shown: function called with the state at each check.

    Raises:
        CommandError: the existing storages can never become the shards of one run.
    """
    end = time.monotonic() + seconds
    while True:
        found = _look(sources, of)
        shown(found)
        left = end - time.monotonic()
        if (not found.missing and not found.unfinished) or left <= 0:
            return found
        time.sleep(min(_SECONDS, left))


def _look(sources: Sequence[str], of: int) -> ShardStates:
    from tallyroll.storage import StorageError, StorageMissing, open_storage
    from tallyroll.storage.ext.joined.members import expand_paths
    from tallyroll.storage.ext.joined.shards import recorded_shard

    found = ShardStates(of)
    places: list[Path] = []
    for source in sources:
        try:
            places += [each for each in expand_paths(source) if each.exists()]
        except StorageMissing:
            continue  # nothing matches the pattern yet
    for place in dict.fromkeys(places):
        try:
            with open_storage(place) as storage:
                runs, rows = storage.runs, len(storage)
        except StorageError as error:  # the storage may be in creation
            found.unreadable[str(place)] = str(error).partition(": ")[0]
            continue
        if (said := recorded_shard(runs)) is None:
            raise CommandError(f"{place} is not a shard of a run. Leave it out of the pattern.")
        run, index, number, asked = said
        shard = _Shard(place, run, number, asked, rows, _wanted(runs[-1], asked))
        other = next(iter(found.shards.values()), shard)
        if number != of or (run, asked) != (other.run, other.asked):
            raise CommandError(
                f"{place}: expected one of {of} shards of one run, got shard {index}/{number} of "
                f"run {run}, of {asked} transitions"
                + (f"; {other.path} is of run {other.run}" if other is not shard else "")
                + ". Give the shards of one run."
            )
        if index in found.shards:
            raise CommandError(
                f"{found.shards[index].path} and {place} are both shard {index}/{of}. Leave one "
                "out."
            )
        found.shards[index] = shard
    return found


def _wanted(run: Mapping[str, Any], asked: int | None) -> int | None:
    """Return the number of rows of a shard once all requested transitions are collected."""
    lanes, own = run.get("lanes"), run[SHARD].get("lanes")
    if not isinstance(own, list) or [type(n) for n in (asked, lanes, *own)] != [int] * 4:
        return None
    assert isinstance(asked, int) and isinstance(lanes, int)
    return among_first(asked, max(1, lanes), range(*own))
