"""Read the run to be continued from a manifest, and check every value."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.setup.make import NOT_JSON
from tallyroll.collector.errors import ArgumentError, StateError
from tallyroll.collector.options.sharding import Shard
from tallyroll.collector.policies.several.openings import Counts
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.storage.errors import NotAStorage, StorageExists, StorageMissing
from tallyroll.storage.files.run_record import RunRecord, is_count
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import DONE, LANE, POLICY_ID, POLICY_VERSION, RANDOM_VERSION
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.stores.row_sink import RowSink

Resume: TypeAlias = bool | Literal["auto"]
"""True to continue a run, False to begin one; ``"auto"`` continues the run if there is one."""


def checked_resume(resume: Resume) -> Resume:
    """Return ``resume`` if it is an allowed value."""
    if type(resume) is bool or resume == "auto":
        return resume
    raise ArgumentError(f'resume: expected True, False or "auto", got {resume!r}')


def opened_or_created(open: Callable[[Literal["append", "create"]], DiskStorage]) -> DiskStorage:
    """Return the existing storage, to append to it, or a new one; ``open`` takes the mode."""
    try:
        return open("append")
    except (StorageMissing, NotAStorage):
        # "create" accepts the files of a process that was killed before it wrote the manifest. If
        # "create" refuses, the manifest is another program's, and the first error describes it
        # best.
        with suppress(StorageExists):
            return open("create")
        raise


def opened_target(path: str | Path, resume: Resume, frames: int | None, kind: Any) -> DiskStorage:
    """Open or create the storage of class ``kind`` at the path that was given to a collector.

    Raises:
        ArgumentError: the format of the storage requires ``frames``.
        StorageError: the storage exists but ``resume`` is False, it does not exist but ``resume``
            is True, or it cannot be opened.
    """
    storage: DiskStorage
    try:
        if resume == "auto":
            storage = opened_or_created(lambda mode: kind(path, mode=mode))
        else:
            storage = kind(path, mode="append" if resume else "create")
    except StorageExists as error:
        raise StorageExists(
            f"storage: {path} holds a storage already. Pass resume=True to continue its run "
            '(resume="auto" begins it the first time), '
            f'storage={kind.__name__}(path, mode="append") to add another run, or another path.'
        ) from error
    except StorageMissing as error:
        raise StorageMissing(
            f"storage: resume=True needs the storage of an earlier run, but {path} does not exist. "
            'Leave resume out to start a run, or pass resume="auto" to resume a run if there is '
            "one and to start it otherwise."
        ) from error
    if frames is None and not storage.grows:
        storage.close()
        raise ArgumentError(
            f"storage: {path} is of class {kind.__name__}, which needs a fixed number of rows. "
            "Give total_frames, or pass a storage made with capacity=."
        )
    return storage


def has_begun(storage: RowSink) -> bool:
    """Return True if ``storage`` holds rows or a run."""
    if storage.reader.head:
        return True
    return storage.mode != "create" and bool(storage.reader.manifest["runs"])


@dataclass(frozen=True)
class LastRun:
    """A run's entry in a manifest."""

    first_row: int
    """The first row of the run, however often the run has been resumed since then."""
    seed: int
    incarnation: int
    environment: Mapping[str, Any]
    lanes: int | None
    """The number of lanes of the run; None if its entry does not say."""
    shard: str | None = None
    """The shard that the run is, such as "2/8"; None if it is a whole run."""
    weights: str | None = None
    """The hash of the weights that the shard began with; None if its entry does not say."""
    classes: Sequence[str] = ()
    """Names of the environment's classes, or of its factory; empty if unknown."""


def last_run_of(entries: Sequence[Mapping[str, Any]], path: Path, rows: int) -> LastRun:
    """Return the last of ``entries``, the runs in the manifest of the storage at ``path``.

    Raises:
        StateError: there is no entry, a collector did not write the last one, or it is damaged.
    """
    if not entries:
        raise StateError(f"{path} holds no run of a collector. Append to the storage instead.")
    last = entries[-1]
    if last.get("seed") is None or "first_row_of_run" not in last:
        raise StateError(
            f"{path} was not written by a collector: its last run has no seed. Append "
            "to the storage instead."
        )
    for name, most in (("seed", 2**63), ("incarnation", 2**63), ("first_row_of_run", rows + 1)):
        value = last.get(name)
        if type(value) is not int or not 0 <= value < most:
            raise _damaged(path, name, value)
    environment = last.get("environment", {})
    if not isinstance(environment, dict):
        raise _damaged(path, "environment", environment)
    found = last.get("lanes")
    lanes = found if type(found) is int and found > 0 else None
    shard = _shard_of(last, path)
    weights = last["shard"].get("weights") if shard else None
    first, seed, incarnation = (last[name] for name in ("first_row_of_run", "seed", "incarnation"))
    weights = weights if isinstance(weights, str) else None
    made = last.get("made")
    named = made.get("environment") if isinstance(made, dict) else None
    classes = [each for each in named if isinstance(each, str)] if isinstance(named, list) else ()
    return LastRun(first, seed, incarnation, environment, lanes, shard, weights, classes)


def _shard_of(last: Mapping[str, Any], path: Path) -> str | None:
    """Return the name of the shard in a run's entry; None if the run is a whole run."""
    said = last.get("shard")
    if said is None:
        return None
    index, of = (said.get(each) if isinstance(said, dict) else -1 for each in ("index", "of"))
    if type(index) is not int or type(of) is not int or not 0 <= index < of:
        raise _damaged(path, "shard", said)
    return f"{index}/{of}"


def relevant_runs(
    reader: RowReader, lanes: int, seed: int | None
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Split the runs of a storage into the relevant ones and the irrelevant ones after them.

    A run at the end that has no rows is relevant in only two cases: if the collector has its number
    of lanes and its seed, and so continues it; or if its record has replaced the record of the
    previous run, which cannot be continued exactly without that record.
    """
    entries, record = list(reader.manifest["runs"]), whole_record(reader)
    passed: list[Mapping[str, Any]] = []
    while entries:
        last = last_run_of(entries, reader.path, reader.head)
        mine = record is not None and record.first_row == last.first_row
        elsewhere = record.stored_before if record is not None and mine else 0
        if last.first_row < reader.head and passed and not mine:
            return [*entries, *reversed(passed)], []
        if last.first_row < reader.head or elsewhere:
            break
        if last.lanes in (None, lanes) and seed in (None, last.seed):
            break
        passed.append(entries.pop())
    return entries, passed


def _damaged(path: Path, name: str, value: Any) -> StateError:
    return StateError(
        f"the last run in the manifest of {path} is damaged: {name} is {value!r}. Restore the "
        "manifest, or append a new run instead."
    )


_CHANGE_COLUMNS = (
    *("max_frames_per_traj", "info_keys", "rename", "exclude", "resets", "policy", "policies"),
)
"""Arguments of a collector that determine the columns of rows."""


def require_same_environment(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Raise if a continued run has another environment than before."""
    # Runs of earlier versions do not name the arguments that JSON cannot hold.
    before, after = ({n: v for n, v in each.items() if n != NOT_JSON} for each in (before, after))
    if before != after:
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        raise StateError(
            "the run to be continued was made by another environment: "
            + "; ".join(f"{n} was {before.get(n)!r}, is {after.get(n)!r}" for n in names)
            + ". Append a new run instead."
        )


def differ(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return True if two lists of classes are known and differ.

    If one run has classes from its main module, another run may import them from any module, so
    only their names are compared.
    """
    if not before or not after:
        return False
    if any(name.startswith("__main__:") for name in (*before, *after)):
        before, after = ([name.rpartition(":")[2] for name in each] for each in (before, after))
    return {*before} != {*after}


def changed_arguments(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the names and values of arguments that determine columns and differ in two entries."""
    calls = [each if isinstance(each := run.get("call"), dict) else {} for run in (before, after)]
    pairs = {name: tuple(call.get(name) for call in calls) for name in _CHANGE_COLUMNS}
    return "; ".join(
        f"{name} was {was!r:.80}, is {now!r:.80}"
        for name, (was, now) in pairs.items()
        if was != now
    )


def require_same_lanes(before: LastRun, lanes: int) -> None:
    """Raise if the number of lanes has changed, because lanes are numbered over the whole run."""
    if before.lanes not in (None, lanes):
        raise StateError(
            f"the run to be continued has {before.lanes} lanes, got {lanes}. Make the collector "
            f"with num_envs={before.lanes}, or append a new run instead."
        )


def require_same_shard(before: LastRun, part: Shard | None) -> None:
    """Raise if the collector's shard is not the shard that is continued."""
    now = None if part is None else str(part)
    if before.shard == now:
        return
    was, got = ("a whole run" if each is None else f"shard {each}" for each in (before.shard, now))
    way_out = "Leave shard out" if before.shard is None else f'Give shard="{before.shard}"'
    raise StateError(
        f"shard: the run to be continued is {was}, got {got}. {way_out}, or pass the storage of "
        f"{got}."
    )


# --- the last record and the rows of the run ------------------------------------------------------


def whole_record(reader: RowReader) -> RunRecord | None:
    """Return the newest record; None unless a collector wrote it and it has all numbers."""
    record = RunRecord.parse(reader.record)
    return record if record is not None and record.is_whole else None


def resumed_ledger(reader: RowReader, last: LastRun) -> tuple[Ledger, int]:
    """Return the ledger of a run up to its last row, and the number of rows in other storages.

    The function does not check that the counts balance; the first commit does (`Ledger.check`).
    """
    ledger, at, seed = Ledger(incarnation=last.incarnation), last.first_row, last.seed
    record, stored_before, left_open = whole_record(reader), 0, 0
    incarnation = last.incarnation
    if record is not None and record.first_row == last.first_row:
        at, stored_before, left_open = record.at, record.stored_before, record.open
        ledger.load({**record.ledger, "incarnation": last.incarnation})
        if record.incarnation >= last.incarnation:
            seed, incarnation = record.seed, record.incarnation
    counts = ledger.counts()
    counts["incarnation"] = incarnation + 1
    # A killed process left its trajectories unfinished.
    counts["episodes_cut"] += left_open
    # The record may be older than the rows, or newer.
    stored = stored_before + reader.head - last.first_row
    unknown, counts["stored"] = stored - counts["stored"], stored
    counts["slots"] += max(0, unknown)
    counts["executed"] += max(0, unknown)
    # Transitions that waited for the next batch when the run stopped were lost.
    counts["lost"] += max(0, -unknown) + counts["carried"]
    counts["carried"] = 0
    # Of a ring, only the rows that it still holds can be read.
    rows = np.arange(max(at, reader.span.start), reader.span.stop)
    ended = reader.column(DONE).take(rows) if len(rows) else rows
    counts["episodes_complete"] += int(ended.sum())
    resumed: dict[str, Any] = {"seed": seed, **counts}
    return Ledger(**resumed), stored_before


def newest_version(reader: RowReader, first_row: int) -> int:
    """Return the largest policy version in a run's rows, removed rows included; -1 if unknown.

    ``first_row`` is the first row of the run.
    """
    rows = np.arange(max(first_row, reader.span.start), reader.span.stop)
    own = reader.column(POLICY_VERSION).take(rows)
    record = whole_record(reader)
    known = [RANDOM_VERSION if record is None else record.policy_version]
    for entry in reader.manifest["runs"]:
        if entry.get("first_row_of_run") == first_row and is_count(entry.get("after_version")):
            known.append(entry["after_version"])
    return max(int(own.max(initial=RANDOM_VERSION)), *known)


def opening_rows(
    reader: RowReader, first_row: int, policies: SeveralPolicies, ledger: Ledger
) -> Counts:
    """Return, for each of several policies, the number of a run's rows with opening random actions.

    ``first_row`` is the first row of the run, and ``ledger`` has the counts of the run.

    Raises:
        StateError: the storage is a ring that has overwritten rows, so that the number is unknown.
    """
    openings = policies.openings
    start, stop = max(first_row, reader.span.start), reader.span.stop
    others, rows = _always_at_random(reader, first_row, policies), np.arange(start, stop)
    lane = reader.column(LANE).take(rows)
    stored, over = np.zeros_like(openings.asked), openings.asked == 0
    for policy in np.flatnonzero(~over).tolist():
        mine: Mask = openings.acts_in[policy][lane - openings.first_lane]
        if POLICY_ID in reader.keys:  # policies by lane: others may have acted in its lanes before
            mine = reader.column(POLICY_ID).take(rows) == policy
        for each in others[policy]:
            mine[max(0, each.start - start) : max(0, each.stop - start)] = False
        version = reader.column(openings.versions[policy]).take(rows)
        drawn = mine & (version == RANDOM_VERSION)
        stored[policy], over[policy] = np.count_nonzero(drawn), np.any(mine & ~drawn)
    if start == first_row:
        return stored
    # Opening rows come first, so an opening is over if a remaining row has an action of its policy.
    stored[over], going = openings.asked[over], np.flatnonzero(~over)
    if openings.acts_in.all():  # groups of agents act in every row
        for policy in going.tolist():
            stored[policy] = stop - first_row - sum(map(len, others[policy]))
    elif (
        len(going) == 1
        and not any(others)
        and all(part.policy is not None for part in policies.parts)
    ):
        stored[going] = ledger.random - stored[over].sum()
    elif len(going):
        raise StateError(
            "init_random_frames: the number of remaining random actions of the policies "
            f"{going.tolist()} is unknown, because the ring has overwritten some of their rows. "
            "Load a checkpoint or a saved state of the run, or leave init_random_frames out."
        )
    return stored


def _always_at_random(
    reader: RowReader, first_row: int, policies: SeveralPolicies
) -> list[list[range]]:
    """Return, for each policy, the rows of the run whose entries say that it acts at random."""
    entries, found = reader.manifest["runs"], [list[range]() for _ in policies.parts]
    stops = [*(entry["first_row"] for entry in entries), reader.span.stop][1:]
    for entry, stop in zip(entries, stops, strict=True):
        if entry.get("first_row_of_run") != first_row:
            continue
        call = entry.get("call")
        known = call.get("policies") if isinstance(call, dict) else None
        known = (
            [each for each in known if isinstance(each, dict)] if isinstance(known, list) else []
        )
        drawing = [each.get("id") for each in known if each.get("policy", "") is None]
        for rows, part in zip(found, policies.parts, strict=True):
            if part.id in drawing:
                rows.append(range(entry["first_row"], stop))
    return found
