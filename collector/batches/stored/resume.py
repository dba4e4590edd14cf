"""The run to be continued: read from a manifest, with every value checked."""

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
"""Whether a run is continued; ``"auto"``: if there is one, or else a run begins."""


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
        # "create" accepts the files of a process that was killed before it wrote the manifest.
        # If it refuses, the manifest is another program's: the first message says that best.
        with suppress(StorageExists):
            return open("create")
        raise


def opened_target(path: str | Path, resume: Resume, frames: int | None, kind: Any) -> DiskStorage:
    """Return the storage of a ``kind`` at the path that a collector was given, opened or made.

    Raises:
        ArgumentError: its format wants to know ``frames``.
        StorageError: it exists and is not resumed, or the reverse; or it cannot be opened.
    """
    storage: DiskStorage
    try:
        if resume == "auto":
            storage = opened_or_created(lambda mode: kind(path, mode=mode))
        else:
            storage = kind(path, mode="append" if resume else "create")
    except StorageExists as error:
        raise StorageExists(
            f"storage: {path} holds a storage already; pass resume=True to continue its run, "
            f'storage={kind.__name__}(path, mode="append") to add another run to it, or another '
            "path"
        ) from error
    except StorageMissing as error:
        raise StorageMissing(
            "storage: resume=True needs the storage of an earlier run, and there is none at "
            f"{path}. "
            'Leave resume out to start a run, or pass resume="auto" to resume a run if there is '
            "one and to start it otherwise."
        ) from error
    if frames is None and not storage.grows:
        storage.close()
        raise ArgumentError(
            f"storage: {path} is to be a {kind.__name__}, which needs to know how many rows will "
            "come: give total_frames, or pass a storage made with capacity="
        )
    return storage


def has_begun(storage: RowSink) -> bool:
    """Return whether ``storage`` holds rows or a run."""
    if storage.reader.head:
        return True
    return storage.mode != "create" and bool(storage.reader.manifest["runs"])


@dataclass(frozen=True)
class LastRun:
    """A run's entry in a manifest."""

    first_row: int
    """The first row of the run, however often it was resumed since."""
    seed: int
    incarnation: int
    environment: Mapping[str, Any]
    lanes: int | None
    """The number of its lanes; None if its entry does not say one."""
    shard: str | None = None
    """The shard that it is, as "2/8"; None: it is whole."""
    weights: str | None = None
    """The hash of the weights that the shard began with; None: it does not say one."""
    classes: Sequence[str] = ()
    """Names of the environment's classes, or of its factory; empty where they are not known."""


def last_run_of(entries: Sequence[Mapping[str, Any]], path: Path, rows: int) -> LastRun:
    """The last of ``entries``, the runs in the manifest of the storage at ``path``.

    Raises:
        StateError: there is none, a collector did not write it, or it is damaged.
    """
    if not entries:
        raise StateError(f"{path} holds no run of a collector: append to it instead")
    last = entries[-1]
    if last.get("seed") is None or "first_row_of_run" not in last:
        raise StateError(
            f"{path} was not written by a collector: its last run has no seed; append to it instead"
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
    """Return the name of the shard that a run's entry is of; None: it is a whole run."""
    said = last.get("shard")
    if said is None:
        return None
    index, of = (said.get(each) if isinstance(said, dict) else -1 for each in ("index", "of"))
    if type(index) is not int or type(of) is not int or not 0 <= index < of:
        raise _damaged(path, "shard", said)
    return f"{index}/{of}"


def without_rows(
    reader: RowReader, lanes: int, seed: int | None
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the runs of a storage, without those at its end that do not matter; and these.

    A run at the end that has no row matters only to a collector with its lanes and its seed; or
    where its record has replaced that of the run before it, which could not go on exactly.
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
        f"the last run in the manifest of {path} is damaged: {name} is {value!r}; restore it, or "
        "append a new run instead"
    )


_ADD_COLUMNS = ("max_frames_per_traj", "info_keys", "rename", "resets", "policy", "policies")
"""Arguments of a collector by which rows have more columns, or others."""


def same_source(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuse another environment for a continued run."""
    # Runs of earlier versions do not name the arguments that JSON cannot hold.
    before, after = ({n: v for n, v in each.items() if n != NOT_JSON} for each in (before, after))
    if before != after:
        names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
        raise StateError(
            "the run to be continued was made by another environment: "
            + "; ".join(f"{n} was {before.get(n)!r}, is {after.get(n)!r}" for n in names)
            + "; append a new run instead"
        )


def differ(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether two lists of classes differ, where both are known.

    Where one run has classes of its main module, another may import them from any module.
    """
    if not before or not after:
        return False
    if any(name.startswith("__main__:") for name in (*before, *after)):
        before, after = ([name.rpartition(":")[2] for name in each] for each in (before, after))
    return {*before} != {*after}


def changed_arguments(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the arguments that add columns and differ between two runs' entries, with values."""
    calls = [each if isinstance(each := run.get("call"), dict) else {} for run in (before, after)]
    pairs = {name: tuple(call.get(name) for call in calls) for name in _ADD_COLUMNS}
    return "; ".join(
        f"{name} was {was!r:.80}, is {now!r:.80}"
        for name, (was, now) in pairs.items()
        if was != now
    )


def same_lanes(before: LastRun, lanes: int) -> None:
    """Refuse another number of lanes, which are numbered over the whole run."""
    if before.lanes not in (None, lanes):
        raise StateError(
            f"the run to be continued has {before.lanes} lanes, got {lanes}; make as many "
            f"(num_envs={before.lanes}), or append a new run instead"
        )


def same_shard(before: LastRun, part: Shard | None) -> None:
    """Refuse another part of a run than the one that is continued."""
    now = None if part is None else str(part)
    if before.shard == now:
        return
    was, got = (
        "a whole run, and no shard" if each is None else f"shard {each}"
        for each in (before.shard, now)
    )
    way_out = "leave shard out" if before.shard is None else f'give shard="{before.shard}"'
    raise StateError(
        f"the run to be continued is {was}, got {got}; {way_out}, or the storage of the other one"
    )


# --- what its last record and its rows say --------------------------------------------------------


def whole_record(reader: RowReader) -> RunRecord | None:
    """Return the newest record, if a collector wrote it and it has all numbers."""
    record = RunRecord.parse(reader.record)
    return record if record is not None and record.is_whole else None


def resumed_ledger(reader: RowReader, last: LastRun) -> tuple[Ledger, int]:
    """Return the ledger of a run up to its last row, and the rows that it has elsewhere."""
    ledger, at = Ledger(seed=last.seed, incarnation=last.incarnation), last.first_row
    record, stored_before = whole_record(reader), 0
    if record is not None and record.first_row == last.first_row:
        at, stored_before = record.at, record.stored_before
        ledger.load({**record.ledger, "incarnation": last.incarnation})
        # A killed process left its trajectories unfinished.
        ledger.episodes_cut += record.open
        if record.incarnation >= last.incarnation:
            ledger.seed, ledger.incarnation = record.seed, record.incarnation
    ledger.incarnation += 1
    # The record may be older than the rows, or newer.
    stored = stored_before + reader.head - last.first_row
    unknown, ledger.stored = stored - ledger.stored, stored
    ledger.slots += max(0, unknown)
    ledger.executed += max(0, unknown)
    # Transitions that waited for the next batch when the run stopped were lost.
    ledger.lost += max(0, -unknown) + ledger.carried
    ledger.carried = 0
    # In a ring, only the rows that it still has.
    rows = np.arange(max(at, reader.span.start), reader.span.stop)
    ended = reader.column(DONE).take(rows) if len(rows) else rows
    ledger.episodes_complete += int(ended.sum())
    return ledger, stored_before


def newest_version(reader: RowReader, first_row: int) -> int:
    """Return the largest policy version of a run's rows, also of rows taken back; -1 without any.

    ``first_row`` is the first of the run.
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
    """Return the number of rows of a run with which each of several policies began at random.

    ``first_row`` is the first of the run, and ``ledger`` has its counts.

    Raises:
        StateError: the storage is a ring that lost rows, so that it cannot be known.
    """
    openings = policies.openings
    start, stop = max(first_row, reader.span.start), reader.span.stop
    others, rows = _always_at_random(reader, first_row, policies), np.arange(start, stop)
    lane = reader.column(LANE).take(rows)
    stored, over = np.zeros_like(openings.asked), openings.asked == 0
    for policy in np.flatnonzero(~over).tolist():
        mine: Mask = openings.acts_in[policy][lane - openings.first_lane]
        if POLICY_ID in reader.keys:  # by lane: others may have acted in its lanes before
            mine = reader.column(POLICY_ID).take(rows) == policy
        for each in others[policy]:
            mine[max(0, each.start - start) : max(0, each.stop - start)] = False
        version = reader.column(openings.versions[policy]).take(rows)
        drawn = mine & (version == RANDOM_VERSION)
        stored[policy], over[policy] = np.count_nonzero(drawn), np.any(mine & ~drawn)
    if start == first_row:
        return stored
    # Of the rows that are gone those of an opening came first: it is over where its policy acted.
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
            f"the ring has lost rows with random actions of the policies {going.tolist()}, so that "
            "nothing says how many init_random_frames are left of each; load a checkpoint or a "
            "state of the run, or leave them out"
        )
    return stored


def _always_at_random(
    reader: RowReader, first_row: int, policies: SeveralPolicies
) -> list[list[range]]:
    """Return for each policy the rows of the run in whose entries it has no weights."""
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
