"""The shards of a run, read from storages of their own, as the one run that they are parts of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.ext.report.reading import Run
from tallyroll.collector.ext.report.stored_runs import part, whole_number
from tallyroll.storage.ext.joined.shards import SHARD, shard_said

Note = Callable[[str, str], object]
"""Called with the name of a run, and with what is to be known of it."""


def with_shards_joined(runs: Sequence[Run], problem: Note, note: Note) -> list[Run]:
    """Return the runs, of which shards of one run are one, in the place of the first.

    Args:
        runs: the runs of storages.
        problem: called of a shard that is there twice, and counts once.
        note: called of shards that are missing.
    """
    by_run: dict[Any, dict[int, Run]] = {}
    for run in runs:
        said = shard_said([run.entry])
        if said is None:
            by_run[id(run)] = {0: run}
            continue
        name, index, of, _ = said
        there = by_run.setdefault((name, of), {})
        if index in there:
            problem(
                run.path,
                f"it is shard {index} of {of}, as {there[index].path} is, which counts alone",
            )
        else:
            there[index] = run
    found = []
    for about, there in by_run.items():
        if isinstance(about, int):
            found.append(there[0])
            continue
        _, of = about
        joined = _joined([there[index] for index in sorted(there)], of)
        found.append(joined)
        if missing := [index for index in range(of) if index not in there]:
            note(joined.path, f"shards {', '.join(map(str, missing))} of {of} are missing")
    return found


def _joined(shards: Sequence[Run], of: int) -> Run:
    first = shards[0]
    said = part(first.entry, SHARD)
    asked = whole_number(said, "asked") or None
    at, resumed_at = (
        np.concatenate([_in_run(getattr(each, name), each.entry) for each in shards])
        for name in ("ended_at", "resumed_at")
    )
    returns = np.concatenate([each.returns for each in shards])
    why = first.without_returns
    if len(returns):  # one with episodes of which returns are not known makes those of all unknown
        lacking = [each for each in shards if each.episodes and each.without_returns]
        why = f"{lacking[0].path}: {lacking[0].without_returns}" if lacking else ""
    order = at.argsort(kind="stable")[: 0 if why else None]
    entry = {name: value for name, value in first.entry.items() if name != SHARD}
    return replace(
        first,
        path=f"{first.path} ({len(shards)} of {of} shards)",
        entry={**entry, "call": {**part(entry, "call"), "total_frames": asked}},
        identity=(SHARD, said.get("run"), of),
        asked=asked,
        stored=sum(each.stored for each in shards),
        counts=_sums([each.counts for each in shards]),
        resumed=sum(each.resumed for each in shards),
        resumed_at=tuple(sorted(resumed_at.tolist())),
        replaced=sum(each.replaced for each in shards),
        state=_state([each.state for each in shards], whole=len(shards) == of),
        episodes=sum(each.episodes for each in shards),
        ended_at=at[order],
        returns=returns[order],
        without_returns=why,
        begins_late=any(each.begins_late for each in shards),
    )


def _in_run(numbers: Sequence[int] | NDArray[np.int64], entry: Mapping[str, Any]) -> Any:
    """Return the numbers of a shard's transitions, from 1 on, as those in the whole run.

    In slot order, where every slot is a transition; else near that.
    """
    found, lanes = np.asarray(numbers, np.int64), part(entry, SHARD).get("lanes")
    of_run = whole_number(entry, "lanes")
    if not isinstance(lanes, list) or [type(each) for each in lanes] != [int, int]:
        return found
    first, own = lanes[0], lanes[1] - lanes[0]
    if not 0 <= first < lanes[1] <= of_run:
        return found
    return (found - 1) // own * of_run + first + (found - 1) % own + 1


def _sums(counts: Sequence[Mapping[str, int] | None]) -> dict[str, int] | None:
    there = [each for each in counts if each is not None]
    if len(there) < len(counts):
        return None
    return {name: sum(each.get(name, 0) for each in there) for name in there[0]}


def _state(states: Sequence[str], *, whole: bool) -> str:
    for name in ("running", "killed"):
        if name in states:
            return name
    return "complete" if whole and {*states} == {"complete"} else "stopped"
