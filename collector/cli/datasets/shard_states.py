"""The shards of a run, waited for: which are complete, which are not, and which are not there."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tallyroll.collector.cli.output import CommandError
from tallyroll.collector.counting.shards import among_first

SHARD: Final = "shard"
"""The entry of a shard's run in its manifest, as `storage.datasets.joined.shards` reads it."""
_SECONDS: Final = 1.0
"""Between two looks."""


@dataclass(frozen=True, slots=True)
class _Shard:
    path: Path
    run: str
    of: int
    asked: int | None
    rows: int
    wanted: int | None
    """The rows that it is to have; None if its run does not say."""


@dataclass(slots=True)
class ShardStates:
    """The state of the shards of a run, as a look at their places has found it."""

    of: int
    shards: dict[int, _Shard] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why a place is no storage, or none yet."""

    @property
    def asked(self) -> int | None:
        """The transitions that were asked of all."""
        return next((each.asked for each in self.shards.values()), None)

    @property
    def missing(self) -> list[int]:
        """The shards of which there is no storage."""
        return [index for index in range(self.of) if index not in self.shards]

    @property
    def unfinished(self) -> dict[int, tuple[int, int | None]]:
        """The rows that a shard has, and is to have, of each that has not all."""
        shards = sorted(self.shards.items())
        return {n: (each.rows, each.wanted) for n, each in shards if each.rows != each.wanted}

    @property
    def paths(self) -> list[Path]:
        """The storages, in the order of shards."""
        return [self.shards[index].path for index in sorted(self.shards)]

    def as_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
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
        """Return what is not complete, as a part of a sentence."""
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
    """Return what is there when all shards are complete, or when the time is up.

    Args:
        sources: storages and patterns, of which some may not be there yet.
        of: the number of shards.
        seconds: how long to wait; 0 looks once.
        shown: called with each look.

    Raises:
        CommandError: what is there can never become the shards of one run.
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
    from tallyroll.storage.ext.joined.members import expanded
    from tallyroll.storage.ext.joined.shards import shard_said

    found = ShardStates(of)
    places: list[Path] = []
    for source in sources:
        try:
            places += [each for each in expanded(source) if each.exists()]
        except StorageMissing:
            continue  # nothing matches the pattern yet
    for place in dict.fromkeys(places):
        try:
            with open_storage(place) as storage:
                runs, rows = storage.runs, len(storage)
        except StorageError as error:  # it is being made just now, perhaps
            found.unreadable[str(place)] = str(error).partition(": ")[0]
            continue
        if (said := shard_said(runs)) is None:
            raise CommandError(f"{place} is no shard of any run. Leave it out of the pattern.")
        run, index, number, asked = said
        shard = _Shard(place, run, number, asked, rows, _wanted(runs[-1], asked))
        other = next(iter(found.shards.values()), shard)
        if number != of or (run, asked) != (other.run, other.asked):
            raise CommandError(
                f"{place} is shard {index}/{number} of run {run}, of {asked} transitions, and "
                f"expected were {of} shards of one run"
                + (f", as {other.path} of run {other.run}" if other is not shard else "")
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
    """Return the rows that a shard is to have of all that were asked for."""
    lanes, own = run.get("lanes"), run[SHARD].get("lanes")
    if not isinstance(own, list) or [type(n) for n in (asked, lanes, *own)] != [int] * 4:
        return None
    assert isinstance(asked, int) and isinstance(lanes, int)
    return among_first(asked, max(1, lanes), range(*own))
