"""Read the runs of a storage for a report: budgets, counts and returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.ext.report.group_fields import shortened
from tallyroll.collector.ext.report.stored_runs import (
    Table,
    part,
    runs_of,
    table_of,
    unversioned,
    whole_number,
)
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.files.copied_runs import LEFT_OUT, is_copied
from tallyroll.storage.files.manifest import environment_of, exported
from tallyroll.storage.files.run_record import RunRecord, is_count
from tallyroll.storage.rows.keys import REWARD
from tallyroll.storage.storages import DiskStorage, open_storage

COUNTS: Final = (
    "executed",
    "discarded",
    "carried",
    "lost",
    "reset_slots",
    "episodes_complete",
    "episodes_cut",
)
"""Counts of a ledger that a report shows, in addition to stored transitions."""


@dataclass(frozen=True)
class Run:
    """A run of a storage.

    Arrays have one entry per episode. They are empty if the returns are unknown.
    """

    path: str
    """Path of the storage, followed by the run's number if the storage has several."""
    place: str
    """Path of the storage."""
    environment: str
    entry: Mapping[str, Any]
    """The newest entry of the run in the manifest."""
    identity: tuple[Any, ...]
    """Key that is equal for two runs if one is a copy of the other."""
    seed: int | None
    asked: int | None
    """Number of requested transitions; None if the budget has another unit or is absent."""
    asked_episodes: int | None
    stored: int
    """Stored transitions, including those that a ring has overwritten."""
    counts: Mapping[str, int] | None
    """Counts of the ledger at its last commit; None if the storage has another run's counts."""
    resumed: int
    resumed_at: tuple[int, ...]
    """Numbers of transitions at which the run resumed."""
    replaced: int
    """Number of workers that were replaced."""
    state: str
    """State of the run.

    ``"complete"``, ``"stopped"`` before the budget was met, ``"running"``, ``"killed"``, or
    ``"closed"`` if the run had no budget.
    """
    episodes: int
    """Number of complete episodes in the rows that exist."""
    ended_at: NDArray[np.int64]
    """Number of each episode's last row among the rows of the run, counted from 1, ascending.

    Rows of a batch may be ordered by lane. The number is then in the same batch as
    `Episode.ended_at`, but may differ from it.
    """
    returns: NDArray[np.float64]
    """The return of each episode, in the same order."""
    without_returns: str = ""
    """Reason why there are no returns."""
    begins_late: bool = False
    """True if a ring has overwritten the oldest rows of the run."""
    unversioned: str = ""
    """Sentence about weights that changed without a new policy version; empty without any."""


def read_runs(
    path: str,
    progress: Callable[[int], object],
    problem: Callable[[str], object],
    *,
    accept_copy: bool = False,
) -> Iterator[Run]:
    """Yield the runs of a storage.

    Args:
        path: path of the storage.
        progress: function called with the number of rows read so far.
        problem: function called with a sentence for each item that cannot be read.
        accept_copy: see `open_storage`.

    Raises:
        StorageError: the storage cannot be opened or read.
    """
    with open_storage(path, accept_copy=accept_copy) as storage:
        yield from runs_in(storage, path, progress, problem)


def runs_in(
    storage: DiskStorage,
    path: str,
    progress: Callable[[int], object],
    problem: Callable[[str], object],
    copied: Callable[[range, Mapping[str, Any]], object] | None = None,
) -> Iterator[Run]:
    """Yield the runs of an open storage; see `read_runs`.

    ``copied`` is called with the rows and the entry of each copy; None calls ``problem``.
    """
    span = storage.span
    # Entries are shown to others, so they omit the host, as in other formats.
    runs = runs_of([exported(run) for run in storage.runs], span)
    if not storage.head:
        problem("the storage has no rows yet")
    elif not runs:
        problem("the manifest does not contain the run that made the rows")
    lines, why = _episodes(storage, span, progress)
    record = RunRecord.parse(storage.record)
    last_state = _state(storage)
    for number, run in enumerate(runs):
        stop = runs[number + 1]["first_row"] if number + 1 < len(runs) else span.stop
        last = number + 1 == len(runs)
        if copied is not None and is_copied(run):
            copied(range(run["first_row"], stop), run)
            continue
        if is_copied(run) or LEFT_OUT in run:
            problem(
                f"rows {run['first_row']:,} to {stop - 1:,} were copied from other storages. "
                "Give the original storages"
            )
            continue
        own = record if last and record and record.first_row == run["first_row"] else None
        yield _run_of(
            path if len(runs) == 1 else f"{path} (run {number})",
            path,
            str(storage.manifest["id"]),
            run,
            stop,
            own,
            last_state if last else "stopped",
            lines[(lines["first_row"] >= run["first_row"]) & (lines["first_row"] < stop)],
            why,
            begins_late=run["first_row"] < span.start,
        )


def _episodes(
    storage: DiskStorage, span: range, progress: Callable[[int], object]
) -> tuple[Table, str]:
    """Return the lines of complete episodes, and the reason why they lack returns, or ""."""
    reader = storage.reader
    if not storage.head:
        return storage.trajectories.table[:0], "the storage has no rows"
    try:
        reader.trajectory_index.episodes(reader, progress)
        table, whole = table_of(storage.trajectories.table, span)
    except ColumnsMissing:
        nothing = np.zeros(0, [("first_row", "i8"), ("last_row", "i8"), ("length", "i8")])
        return nothing, "the rows have no trajectory ids"
    lines = table[whole]
    lines = lines[np.argsort(lines["last_row"])]
    if REWARD not in storage.schema:
        return lines, "the rows have no column next/reward"
    if lines["return"].ndim > 1:
        return lines, "the rows have several rewards each"
    return lines, ""


def _state(storage: DiskStorage) -> str:
    """Return "running" if a process writes, "killed" if the writer died, or "stopped"."""
    if storage.reader.is_written:
        return "running"
    return "killed" if storage.left_open else "stopped"


def _run_of(
    path: str,
    place: str,
    id: str,
    run: Mapping[str, Any],
    stop: int,
    record: RunRecord | None,
    state: str,
    lines: Table,
    why: str,
    *,
    begins_late: bool,
) -> Run:
    call = {**part(run, "call"), **_command(part(run, "command"))}
    before = record.stored_before if record is not None else 0
    first = run["first_row"] - before
    counts = None if record is None else record.ledger
    stored, asked, episodes = stop - first, _count(call, "total_frames"), None
    if asked is None:
        episodes = _count(call, "total_episodes")
    done = counts.get("episodes_complete", 0) if counts else len(lines)
    done_frames = asked is not None and stored >= asked
    if call.get("budget_unit") == "agent_transitions":  # the report has no column for them
        agents = counts.get("agent_transitions", 0) if counts else 0
        done_frames = asked is not None and agents >= asked
    if asked is None and episodes is None:
        state = "closed" if state == "stopped" else state
    elif (done_frames if asked is not None else done >= (episodes or 0)) and state != "running":
        state = "complete"
    if not why and not len(lines):
        why = "the run has no complete episode"
    ended = len(lines)
    returns = np.empty(0) if why else lines["return"].astype(np.float64)
    if strange := int(np.count_nonzero(~np.isfinite(returns))):
        why = f"{strange:,} of {len(returns):,} returns are not finite numbers"
    lines = lines[: 0 if why else None]
    returns = returns[: 0 if why else None]
    seed = whole_number(run, "seed", -1)
    return Run(
        path=path,
        place=place,
        environment=_environment(run),
        entry=run,
        identity=(id, run["first_row"], seed, str(part(run, "made").get("at"))),
        seed=None if seed < 0 else seed,
        asked=None if call.get("budget_unit") == "agent_transitions" else asked,
        asked_episodes=episodes,
        stored=stored,
        counts=counts,
        resumed=run["resumed"],
        resumed_at=tuple(row - first for row in run["resumed_at"]),
        replaced=whole_number(run, "respawned"),
        state=state,
        episodes=ended,
        ended_at=(lines["last_row"] - first + 1).astype(np.int64),
        returns=returns,
        without_returns=why,
        begins_late=begins_late,
        unversioned=unversioned(run),
    )


def _count(call: Mapping[str, Any], name: str) -> int | None:
    value = whole_number(call, name)
    return value if value > 0 else None


def _command(command: Mapping[str, Any]) -> dict[str, Any]:
    """Return the budget of a command under the names of a collector's arguments."""
    names = {"frames": "total_frames", "episodes": "total_episodes"}
    return {ours: command[name] for name, ours in names.items() if is_count(command.get(name))}


def _environment(run: Mapping[str, Any]) -> str:
    return shortened(environment_of(run) or "unknown environment")
