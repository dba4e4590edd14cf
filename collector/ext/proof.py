"""`prove`: verify, replay and hash the runs of an experiment, for one statement to a reviewer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from tallyroll.collector.envs.setup.make import CreateEnv
from tallyroll.collector.errors import ArgumentError, CollectorError
from tallyroll.collector.ext.replay.replay import replay
from tallyroll.collector.ext.replay.report import ReplayReport
from tallyroll.collector.ext.report.run_reader import Run, runs_in
from tallyroll.collector.ext.report.storage_search import distinct, storages_at
from tallyroll.collector.ext.report.stored_runs import part
from tallyroll.storage.errors import CorruptStorage, StorageError
from tallyroll.storage.ext.joined.shards import recorded_shard
from tallyroll.storage.ext.verification.content import content_hash
from tallyroll.storage.ext.verification.copied_rows import (
    added_columns,
    first_difference,
    source_rows,
)
from tallyroll.storage.ext.verification.findings import Report
from tallyroll.storage.ext.verification.storage_checks import verify
from tallyroll.storage.files.copied_runs import (
    COPIED,
    MOVED,
    REWINDS,
    is_unchanged,
    rows_copied,
)
from tallyroll.storage.files.manifest import policy_of
from tallyroll.storage.package.versions import versions
from tallyroll.storage.rows.pages import Page, PageSource, counted, times
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import open_storage

Verdict: TypeAlias = Literal["proved", "incomplete", "refuted"]
"""``"refuted"`` if a check found a fault, ``"incomplete"`` if a check was not possible."""

STATUS: Mapping[Verdict, int] = {"proved": 0, "refuted": 1, "incomplete": 2}
"""Exit status of the command for each verdict."""

_LEDGER = ("slots", "executed", "reset_slots", "stored", "discarded", "carried", "lost")
_Copied: TypeAlias = tuple[range, Mapping[str, Any]]
"""Rows of a storage that were copied, and their entry in the manifest."""
_MOST_MOVED = 2**62
"""The limit of offsets of trajectory ids, with which ids cannot overflow."""
PARTS = 1000
"""Units of progress of one check of one storage."""


@dataclass(frozen=True)
class StorageProof(PageSource):
    """The checks of one storage, and their results."""

    path: str
    runs: tuple[Run, ...]
    """The runs that collected the rows. Copied rows have none."""
    verification: Report | None
    """The report of `verify`; None if the storage could not be opened."""
    content: str | None
    """The hash of all rows by `content_hash`; None if the rows could not be hashed."""
    replay: ReplayReport | None
    """The report of `replay`; None if the environment could not be created or stepped."""
    faults: tuple[str, ...]
    """Sentences about faults that a check found."""
    gaps: tuple[str, ...]
    """Sentences about checks that were not possible, with the reason."""
    notes: tuple[str, ...] = ()
    """Sentences that do not change the verdict."""
    id: str | None = None
    """The id of the storage, which copies of its files share."""
    sources: tuple[str, ...] = ()
    """The storages whose rows these are, if all rows are copies and their sources were given."""

    @property
    def verdict(self) -> Verdict:
        """The verdict on this storage."""
        return "refuted" if self.faults else "incomplete" if self.gaps else "proved"

    @property
    def balanced(self) -> bool:
        """True if the ledger of the last commit balances and matches the rows."""
        found = self.verification
        return (
            found is not None
            and "record" in found.checked
            and all(each.check != "record" for each in found.findings)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        found = self.verification
        return {
            "path": self.path,
            "verdict": self.verdict,
            "faults": [*self.faults],
            "gaps": [*self.gaps],
            "notes": [*self.notes],
            "sources": [*self.sources],
            "rows": None
            if found is None
            else {
                "sound": found.sound,
                "rows": found.rows,
                "checked": [*found.checked],
                "skipped": dict(found.skipped),
                "findings": [asdict(each) for each in found.findings],
                "notes": [asdict(each) for each in found.notes],
            },
            "runs": [
                {
                    "run": run.path,
                    "environment": run.environment,
                    "seed": run.seed,
                    "asked": run.asked,
                    "asked_episodes": run.asked_episodes,
                    "stored": run.stored,
                    "state": run.state,
                    "ledger": run.counts and dict(run.counts),
                    "versions": part(run.entry, "versions"),
                }
                for run in self.runs
            ],
            "ledger_balanced": self.balanced,
            "content": self.content,
            "replay": self.replay and self.replay.to_dict(),
        }

    def _show_on_(self, page: Page) -> None:
        page.head(f"{self.path}: {self.verdict}")
        for run in self.runs:
            page.print(f"  run      {_run_line(run)}")
        if (found := self.verification) is not None:
            sound = "sound" if found.sound else "not sound"
            page.print(
                f"  rows     {sound}: {found.rows:,} rows ({found.format}), "
                f"{len(found.checked)} checks"
            )
        for run in self.runs:
            page.print(f"  budget   {_budget(run)[0]}")
        ledger = next((run.counts for run in reversed(self.runs) if run.counts), None)
        if ledger is not None:
            balanced = "balanced" if self.balanced else "not balanced"
            page.print(f"  ledger   {balanced}: {_sums(ledger)}")
        if self.content is not None:
            page.print(f"  content  sha256 {self.content}")
        if self.sources and not self.faults:
            page.print(
                f"  sources  each row is equal to a row of its source, bit for bit: "
                f"{', '.join(self.sources)}"
            )
        if (again := self.replay) is not None and again.replayed:
            page.print(
                f"  replay   {again.equal:,} of {again.replayed:,} trajectories equal, "
                f"bit for bit; {again.replayed:,} of {again.trajectories:,} trajectories and "
                f"{again.rows:,} of {found.rows if found else 0:,} rows compared"
            )
        for run in self.runs:
            page.print(f"  made by  {_made_by(run)}")
        for fault in self.faults:
            page.print(f"  fault    {fault}")
        for gap in self.gaps:
            page.print(f"  gap      {gap}")
        for note in self.notes:
            page.print(f"  note     {note}")


@dataclass(frozen=True)
class Proof(PageSource):
    """The statement of `prove`."""

    storages: tuple[StorageProof, ...]
    versions: Mapping[str, str]
    """Versions of the packages that made the checks."""

    @property
    def verdict(self) -> Verdict:
        """``"proved"`` if all storages are proved; otherwise the worst verdict."""
        found = {each.verdict for each in self.storages}
        return next(each for each in ("refuted", "incomplete", "proved") if each in found)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "verdict": self.verdict,
            "versions": dict(self.versions),
            "storages": [each.to_dict() for each in self.storages],
        }

    def _show_on_(self, page: Page) -> None:
        for each in self.storages:
            each._show_on_(page)
        counts = [
            f"{sum(each.verdict == name for each in self.storages):,} {name}" for name in STATUS
        ]
        page.head(f"verdict: {self.verdict} ({', '.join(counts)})")
        reports = [each.verification for each in self.storages if each.verification is not None]
        checked = dict.fromkeys(name for each in reports for name in each.checked)
        page.print(f"checks of rows: {', '.join(checked)}")
        skipped: dict[tuple[str, str], int] = {}
        for name, why in (pair for each in reports for pair in each.skipped.items()):
            skipped[name, why] = skipped.get((name, why), 0) + 1
        for (name, why), count in skipped.items():
            page.print(f"without {name} in {count:,} of {counted(len(reports), 'storage')}: {why}")
        page.print(f"checked with {_named(self.versions)}")


def prove(
    paths: Sequence[str],
    *,
    trajectories: Literal["all"] | None = None,
    sample: int = 20,
    create_env_fn: CreateEnv | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> Proof:
    """Check storages with `verify`, `content_hash` and `replay`, and compare rows with budgets.

    A storage is proved if `verify` finds no fault, each run has exactly the transitions or episodes
    of its budget, the ledger balances, and the replayed trajectories are equal bit for bit. Two
    storages with the same content are a fault, because they are not two runs of an experiment; if
    they are separate runs with the same seed, such as of settings without an effect, it is noted.
    A storage of copied rows whose sources are among ``paths`` is not replayed. It is proved if each
    row is equal to a row of its source and the sources are proved.

    Args:
        paths: storages of any format, or folders that contain storages.
        trajectories: see `replay`; None replays a ``sample`` of each storage.
        sample: the number of trajectories to replay.
        create_env_fn: the environment of all runs; None creates it from each run's manifest.
        env_kwargs: keyword arguments for an id, in addition to those of the run.
        progress: function called with the progress and its total, in arbitrary units.
        accept_copy: see `open_storage`.

    Raises:
        ArgumentError: no storage can be read.
    """
    found = [each for path in distinct(paths) for each in storages_at(path, accept_copy)]
    by_path = dict(found)
    places = distinct(by_path)
    by_id = _by_id(places, accept_copy=accept_copy)
    total = 3 * PARTS * len(places)

    def stage_of(check: int) -> Progress:
        def report_stage(done: int, of: int) -> None:
            if progress is not None:
                progress(min(total, check * PARTS + PARTS * done // max(1, of)), total)

        return report_stage

    proofs = []
    for number, path in enumerate(places):
        error = by_path[path]
        if error is not None and not isinstance(error, CorruptStorage):
            proofs.append(StorageProof(path, (), None, None, None, (), (f"not read: {error}",)))
            continue
        options: dict[str, Any] = {
            "trajectories": trajectories,
            "sample": sample,
            "env_kwargs": env_kwargs,
        }
        options |= {"create_env_fn": create_env_fn, "accept_copy": accept_copy}
        stages = [stage_of(3 * number + each) for each in range(3)]
        proofs.append(_proof_of(path, options, stages, by_id))
    if all(each.verification is None for each in proofs):
        reasons = "; ".join(gap.rstrip(".") for each in proofs for gap in each.gaps)
        raise ArgumentError(
            f"paths: expected storages that can be read, got none: {reasons or 'no path'}."
        )
    return Proof(tuple(_with_cross_checks(proofs)), versions())


def _by_id(places: Sequence[str], *, accept_copy: bool) -> dict[str, str]:
    """Return the first path of each storage id, without storages that cannot be opened."""
    found: dict[str, str] = {}
    for path in places:
        with (
            suppress(StorageError, OSError),
            open_storage(path, accept_copy=accept_copy) as storage,
        ):
            found.setdefault(str(storage.manifest["id"]), path)
    return found


def _proof_of(
    path: str, options: dict[str, Any], stages: Sequence[Progress], by_id: Mapping[str, str]
) -> StorageProof:
    faults: list[str] = []
    gaps: list[str] = []
    accept_copy = options["accept_copy"]
    checked = _attempt(
        "verified", gaps, lambda: verify(path, progress=stages[0], accept_copy=accept_copy)
    )
    runs: list[Run] = []
    copies: list[_Copied] = []
    sources: tuple[str, ...] = ()
    content = again = id = None
    if checked is not None:
        faults += [str(each) for each in checked.findings]
        gaps += [f"{each}: {checked.healing}" for each in checked.notes[:1]]
    if checked is not None and checked.format is not None:
        content = _attempt(
            "hashed", gaps, lambda: content_hash(path, progress=stages[1], accept_copy=accept_copy)
        )
        runs, id = _attempt(
            "read", gaps, lambda: _runs_of(path, gaps, copies, accept_copy=accept_copy)
        ) or ([], None)
        sources = () if runs or gaps else _sources_of(copies, by_id)
        if sources:  # they are replayed
            _attempt(
                "compared with its sources",
                gaps,
                lambda: _compare_copies(path, copies, by_id, faults, gaps, accept_copy=accept_copy),
            )
        else:
            gaps += [
                f"rows {rows.start:,} to {rows.stop - 1:,} were copied from other storages. Give "
                "the original storages, also together with this one"
                for rows, _ in copies
            ]
            again = _attempt("replayed", gaps, lambda: replay(path, progress=stages[2], **options))
    if again is not None:
        differing = [f"replay: {each}" for each in again.differences[:1]]
        refused = {why: len(ids) for why, ids in again.not_replayed.items()} | dict(again.left_out)
        gaps += [f"not replayed: {counted(n, 'trajectory')}: {why}" for why, n in refused.items()]
        if again.versions and differing:  # equality is guaranteed for the same versions only
            other = _named({name: was for name, (was, _) in again.versions.items()})
            gaps += [*differing, f"the differing rows were made with other versions: {other}"]
        else:
            faults += differing
    for run in runs:
        _, fault, gap = _budget(run)
        faults += [fault] if fault else []
        gaps += [gap] if gap else []
        if run.begins_late:
            gaps.append(f"{run.path}: the ring has overwritten the oldest rows")
        if run.unversioned:
            gaps.append(f"{run.path}: {run.unversioned}")
    return StorageProof(
        path,
        tuple(runs),
        checked,
        content,
        again,
        tuple(faults),
        tuple(gaps),
        id=id,
        sources=sources,
    )


def _sources_of(copies: Sequence[_Copied], by_id: Mapping[str, str]) -> tuple[str, ...]:
    """Return the paths of the sources of copies, or an empty tuple if one was not given."""
    found = [rows_copied(entry) for _, entry in copies]
    paths = [None if each is None else by_id.get(each[0]) for each in found]
    return () if None in paths else tuple(dict.fromkeys(path for path in paths if path))


def _compare_copies(
    path: str,
    copies: Sequence[_Copied],
    by_id: Mapping[str, str],
    faults: list[str],
    gaps: list[str],
    *,
    accept_copy: bool,
) -> None:
    """Compare copied rows with their sources; add a fault or a gap for each copy that differs.

    A difference is a fault only if the copy is certain to have the rows and the ids of the source,
    and the source still has these rows.
    """
    for rows, entry in copies:
        found = rows_copied(entry)
        assert found is not None
        id, first, last = found
        moved, place = entry[COPIED].get(MOVED, 0), by_id[id]
        with (
            open_storage(path, accept_copy=accept_copy) as copy,
            open_storage(place, accept_copy=accept_copy) as source,
        ):
            one, other = copy.reader, source.reader
            span = range(first, other.span.stop if last is None else last + 1)
            numbers = None
            if type(moved) is int and abs(moved) < _MOST_MOVED:
                numbers = source_rows(one, rows, other, span, moved)
            if numbers is None:
                gaps.append(
                    f"rows {rows.start:,} to {rows.stop - 1:,} are not numbered as in {place}"
                )
                continue
            is_rewound = other.rewinds != entry[COPIED].get(REWINDS, 0)
            is_certain = is_unchanged(entry) and not is_rewound and span.start >= other.span.start
            lacking = np.flatnonzero(numbers < 0)
            if len(lacking):
                said = f"row {rows.start + int(lacking[0]):,} is not a row of {place}"
            elif (differs := first_difference(one, rows, other, numbers)) is not None:
                said = f"row {differs[0]:,} differs from {place} in {differs[1]}"
            else:
                gaps += [f"{place} has no column {name}" for name in added_columns(one, other)]
                continue
            if is_rewound:
                said += ", from which rows were removed after the copy"
            (faults if is_certain else gaps).append(said)


def _runs_of(
    path: str, gaps: list[str], copies: list[_Copied], *, accept_copy: bool
) -> tuple[list[Run], str | None]:
    """Return the runs of a storage, and its id; add its copies to ``copies``."""
    with open_storage(path, accept_copy=accept_copy) as storage:
        runs = runs_in(
            storage,
            path,
            lambda rows: None,
            gaps.append,
            lambda rows, entry: copies.append((rows, entry)),
        )
        return [*runs], storage.reader.id


def _attempt(what: str, gaps: list[str], check: Callable[[], Any]) -> Any:
    """Return the result of a check; if it is not possible, add the reason to ``gaps``."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  environments may raise anything
        ours = isinstance(error, StorageError | CollectorError)
        gaps.append(f"not {what}: {error if ours else f'{type(error).__name__}: {error}'}")
    return None


def _budget(run: Run) -> tuple[str, str, str]:
    """Compare a run with its budget; return a sentence, a fault or "", and a gap or ""."""
    call = part(run.entry, "call")
    if call.get("budget_unit") == "agent_transitions":
        have = (run.counts or {}).get("agent_transitions", 0)
        said = f"{have:,} of {call.get('total_frames')} agent transitions, in whole rows"
        gap = "" if run.state == "complete" else f"{run.path}: {run.state} at {said}"
        return f"{run.state}: {said}", "", gap
    have, asked, unit = run.stored, run.asked, "transitions"
    if run.asked_episodes is not None:
        have = run.episodes if run.counts is None else run.counts.get("episodes_complete", 0)
        asked, unit = run.asked_episodes, "episodes"
    if asked is None:
        said = f"{run.stored:,} transitions; the run recorded no budget of transitions or episodes"
        return said, "", f"{run.path}: the run recorded no budget to compare with"
    said = f"{have:,} of {asked:,} {unit}"
    if have == asked and run.state == "complete":
        return f"exact: {said}", "", ""
    if have > asked:
        return f"exceeded: {said}", f"{run.path}: {said}", ""
    return f"{run.state}: {said}", "", f"{run.path}: {run.state} at {said}"


def _are_one_run(one: StorageProof, other: StorageProof) -> bool:
    """Return True if equal rows cannot come from two runs with the same seed."""
    seeds = [[run.seed for run in each.runs] for each in (one, other)]
    return one.id == other.id or seeds[0] != seeds[1] or None in seeds[0]


def _with_cross_checks(proofs: Sequence[StorageProof]) -> list[StorageProof]:
    """Add faults and gaps that only several storages show: equal content, and missing shards."""
    first: dict[str, StorageProof] = {}
    shards: dict[tuple[object, int], set[int]] = {}
    found = []
    for each in proofs:
        if each.content is not None and each.runs:
            before = first.setdefault(each.content, each)
            if before is not each and _are_one_run(before, each):
                fault = f"it has the same rows as {before.path}, so the two are one run"
                each = replace(each, faults=(*each.faults, fault))
            elif before is not each:
                note = f"it has the same rows as {before.path}, a run with the same seed"
                each = replace(each, notes=(*each.notes, note))
        for run in each.runs:
            if (said := recorded_shard([run.entry])) is not None:
                shards.setdefault((said[0], said[2]), set()).add(said[1])
        found.append(each)
    for at, each in enumerate(found):
        for run in each.runs:
            if (said := recorded_shard([run.entry])) is None:
                continue
            lacking = sorted({*range(said[2])} - shards[said[0], said[2]])
            if lacking:
                gap = f"shards {', '.join(map(str, lacking))} of {said[2]} were not given"
                found[at] = replace(found[at], gaps=(*found[at].gaps, gap))
    return _with_verdicts_of_sources(found)


def _with_verdicts_of_sources(proofs: Sequence[StorageProof]) -> list[StorageProof]:
    """Add a gap to each copy whose source is not proved, or is proved by the copy itself."""
    proved: set[str] = set()
    for _ in proofs:  # a copy of a copy may be given before its source
        proved |= {e.path for e in proofs if e.verdict == "proved" and proved.issuperset(e.sources)}
    verdicts = {each.path: each.verdict for each in proofs}
    found = []
    for each in proofs:
        if each.verdict == "proved" and each.path not in proved:
            source = next(path for path in each.sources if path not in proved)
            said = "not proved" if verdicts[source] == "proved" else verdicts[source]
            each = replace(each, gaps=(f"its source {source} is {said}",))
        found.append(each)
    return found


def _run_line(run: Run) -> str:
    seed = "no seed" if run.seed is None else f"seed {run.seed}"
    resumed = f", resumed {times(run.resumed)}" if run.resumed else ""
    return (
        f"{run.environment}, {counted(run.entry.get('lanes', '?'), 'lane')}, {seed}, policy "
        f"{policy_of(run.entry) or 'random'}{resumed}"
    )


def _sums(ledger: Mapping[str, int]) -> str:
    slots, executed, resets, *parts = (ledger.get(name, 0) for name in _LEDGER)
    sums = " + ".join(f"{count:,} {name}" for name, count in zip(_LEDGER[3:], parts, strict=True))
    return f"{executed:,} executed = {sums}; {slots:,} slots = executed + {resets:,} reset slots"


def _made_by(run: Run) -> str:
    commit = part(part(run.entry, "made"), "git").get("commit")
    return _named(part(run.entry, "versions")) + (f", commit {commit}" if commit else "")


def _named(found: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items()) or "no versions"
