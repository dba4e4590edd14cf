"""The `verify` function, which checks a storage for damage and for implausible rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import (
    CorruptStorage,
    DamagedTable,
    MissingLibrary,
    Overrun,
    RowsDoubled,
    StorageError,
)
from tallyroll.storage.ext.joined.duplicates import doubled_trajectories
from tallyroll.storage.ext.joined.members import PathLike, UnionMember
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.ext.overlays.overlay_set import Overlays
from tallyroll.storage.ext.statistics.comparison import differences
from tallyroll.storage.ext.statistics.computation import ColumnAccumulator
from tallyroll.storage.ext.statistics.statistics_file import (
    ForeignStatistics,
    Unusable,
    place_of,
    read_whole,
)
from tallyroll.storage.ext.verification.findings import PLACES, Finding, Findings, Place, Report
from tallyroll.storage.ext.verification.record_checks import check_ledger, check_record, check_runs
from tallyroll.storage.ext.verification.row_checks import RowChecks
from tallyroll.storage.files.checksums import mismatches
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import failed, translated
from tallyroll.storage.files.rewind_history import without_runs_from
from tallyroll.storage.files.run_events import EVENTS, LEFT_OUT, events_of, is_event
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader, SlotColumn, newest_rows
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import REWARD, TERMINATED, Key, format_key
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.storages import open_storage
from tallyroll.storage.trajectories.blocks.saved_blocks import RebuiltBlocks
from tallyroll.storage.trajectories.columns import WHOSE, RowOrder, missing
from tallyroll.storage.trajectories.content import NAMING
from tallyroll.storage.trajectories.episodes import table_dtype
from tallyroll.storage.trajectories.index_file import UnusableIndex
from tallyroll.storage.trajectories.leaf_hashes import LeafHashes, UnusableLeaves
from tallyroll.storage.trajectories.leaves import Leaves, leaf_hashes_of
from tallyroll.storage.user_code import user_callback

_AT_ONCE: Final = 2**20
_MESSAGE: Final = "an entry names a row that was never written, or has another position"


def check_overlays(reader: FileReader, findings: Findings) -> bool:
    """Add a finding for each unusable or invalid overlay; return True if there are overlays."""
    with closing(Overlays(reader)) as overlays:
        keys = overlays.keys()
        for key in keys:
            try:
                _check(reader, overlays.open(key), findings)
            except StorageError as error:  # includes an overlay that was dropped meanwhile
                findings.add("overlays", str(error), Place(column=format_key(key)))
        return bool(keys)


def _check(reader: FileReader, file: OverlayFile, findings: Findings) -> None:
    for start, stop in file.stretches(_AT_ONCE):
        rows, most = file.rows_in(start, stop), file.most_rows
        slots = np.arange(start, start + len(rows))
        lie = rows % reader.ring if reader.ring else rows
        wrong = (rows < -1) | ((rows >= 0) & ((lie != slots) | (rows >= most)))
        where = np.flatnonzero(wrong)

        for entry in where[:PLACES].tolist():
            what = f"entry {start + entry}"
            place = Place(row=int(rows[entry]), column=format_key(file.key), what=what)
            findings.add("overlays", _MESSAGE, place)
        if len(where) > PLACES:
            findings.add("overlays", _MESSAGE, count=len(where) - PLACES)


_DELETE = "Delete it: the index is built again from the rows."


def check_index(reader: RowReader, findings: Findings) -> str | None:
    """Rebuild the index and compare it with the stored one; return a reason if this is impossible.

    Args:
        reader: the reader of the rows.
        findings: the collection to which a difference is added.
    """
    try:
        kept = reader.kept_index(whole=True)
        if kept is None:
            return "no index is stored with the rows"
        says = kept.state(reader.span.start)
        if not says.by_block.size:
            return (
                "the index is older than the rows of the ring; a writer updates it when it closes"
            )
        order = RowOrder(reader.schema)
        made = RebuiltBlocks(reader.ring, says).is_made_of(
            lambda first, stop: order.chunk(reader, first, stop)
        )
    except UnusableIndex as error:
        findings.add("index", f"{error} {_DELETE}")
        return None
    except (IndexError, ValueError):  # invalid numbers
        made = False
    if made is None:
        return "another process writes to this ring; wait for it"
    if not made:
        findings.add("index", f"the stored index does not match the rows. {_DELETE}")
    return None


def check_events(entries: Sequence[Mapping[str, Any]], head: int, findings: Findings) -> None:
    """Add findings about the events of each run.

    Args:
        entries: the runs of the manifest, with their events.
        head: the number of committed rows.
        findings: the collection to which findings are added.
    """
    firsts = [_count(entry.get("first_row")) for entry in entries]
    for number, (entry, first) in enumerate(zip(entries, firsts, strict=True)):
        stop = firsts[number + 1] if number + 1 < len(entries) else head
        for place, problem in _problems(entry, first, stop):
            findings.add(
                "events",
                "a call of environments does not fit its run",
                Place(what=f"run {number}, event {place}: {problem}"),
            )


def _problems(entry: Mapping[str, Any], first: int, stop: int) -> Iterator[tuple[int, str]]:
    """Yield the index of each invalid event, and the reason."""
    found = entry.get(EVENTS, [])
    if not isinstance(found, list):
        yield 0, f"expected a list of events, got {type(found).__name__}"
        return
    most, before = _count(entry.get("lanes"), 2**62), 0
    apart: int | None = None
    for place, raw in enumerate(found):
        if not is_event(raw):
            yield place, "it is not an event"
            continue
        (event,) = events_of({**entry, EVENTS: [raw]})
        at, row = event["at"], event["row"]
        if not max(first, before) <= row <= stop:
            yield place, f"its row is {row:,}, not from {max(first, before):,} to {stop:,}"
        elif apart is not None and row - at != apart:
            yield place, f"it has {at:,} earlier transitions, but its row implies {row - apart:,}"
        before, apart = max(before, row), row - at
        lanes, failed, firsts = event["lanes"], event.get("failed"), event.get("first")
        if not _are_lanes(lanes, most) or not _are_lanes(failed, most):
            yield place, f"its lanes are not different numbers from 0 to {most - 1:,}"
        elif firsts is not None and not _are_firsts(firsts, most if lanes is None else len(lanes)):
            yield place, "it does not name a trajectory and a step for each of its lanes"


def _count(value: object, otherwise: int = 0) -> int:
    return value if type(value) is int else otherwise


def _are_lanes(lanes: Any, most: int) -> bool:
    if lanes is None:
        return True
    if not isinstance(lanes, list) or not all(type(each) is int for each in lanes):
        return False
    return len({*lanes}) == len(lanes) and all(0 <= each < most for each in lanes)


def _are_firsts(firsts: Any, count: int) -> bool:
    return (
        isinstance(firsts, list)
        and len(firsts) == count
        and all(
            isinstance(each, list)
            and len(each) == 2
            and all(type(n) is int and n >= 0 for n in each)
            for each in firsts
        )
    )


def check_content(
    reader: RowReader,
    kept: LeafHashes,
    lines: np.ndarray,
    findings: Findings,
    tell: Callable[[int], None],
) -> None:
    """Recompute the hashes of rows, and compare them with the stored ones.

    Args:
        reader: the reader of the rows.
        kept: the store of hashes.
        lines: the leaves that were read from ``kept``.
        findings: the collection to which differences are added.
        tell: a callback that receives the number of bytes read since its last call.

    Raises:
        Overrun: a ring's writer overwrites rows while they are read.
    """
    leaves = Leaves(reader)
    now = leaves.lines()
    known = np.flatnonzero(kept.fill(now, lines))
    found = leaves.hashes(known, tell)
    wrong = known[(found != now["sha256"][known]).any(1)]
    rows, counts = now["first"][wrong], now["rows"][wrong]

    def place(at: int) -> Place:
        id = int(leaves.content.run_ids[leaves.starts[wrong[at]]])
        what = f"or one of the {counts[at] - 1:,} rows after it, by trajectory and step"
        return Place(row=int(rows[at]), trajectory=id, what=what)

    findings.add_rows("content", "rows do not match their stored hash", rows, place)


def check_statistics(
    reader: RowReader,
    kept: Mapping[Key, ColumnAccumulator],
    findings: Findings,
    tell: Callable[[int], None],
) -> None:
    """Recompute the statistics of columns, and compare them with the stored ones.

    Args:
        reader: the reader of the rows.
        kept: the stored statistics by column.
        findings: the collection to which differences are added.
        tell: a callback that receives the number of bytes read since its last call.
    """
    columns = {column.key: column for column in reader.schema.columns}
    for key, counted in kept.items():
        wrong = [*differences(reader, columns[key], counted, tell)]
        places = [Place(column=format_key(key), what=each) for each in wrong[:PLACES]]
        if wrong:
            message = "stored statistics do not match the rows"
            findings.add("statistics", message, *places, count=len(wrong))


CHECKS: Mapping[str, str] = {
    "files": "header, manifest and files can be opened and are long enough",
    "metadata": "the metadata for other libraries is as Tallyroll wrote it",
    "runs": "the manifest's runs follow one another within the rows",
    "events": "calls of environments are complete, and lie within the rows of their run",
    "record": "the record of the last commit balances, and matches the rows",
    "lanes": "every row belongs to a lane of its run",
    "ids": "every trajectory id belongs to one lane, and is used once",
    "steps": "every trajectory has the steps 0, 1, 2 ...",
    "ends": "done is terminated or truncated, and no row of the trajectory follows",
    "versions": "policy versions never go back within a lane",
    "observations": "each observation is the next observation of the row before",
    "finals": "final observations are stored, or marked as lost",
    "nan": "no NaN, and no infinity in observations and rewards",
    "spaces": "values are within the spaces that the environment declared",
    "zeros": "no rows that look as if they were never written",
    "episodes": "the table of episodes matches the rows",
    "index": "the index of trajectories matches the rows",
    "checksums": "the bytes match the checksums of a finalized storage",
    "content": "the rows match the hashes that `content_hash` stored",
    "overlays": "every overlay can be used, and refers only to rows that were written",
    "statistics": "the stored statistics of columns match the rows",
}
"""The checks by name, with the rule of each, in the order of the report."""

_MEMBERS = "members"
"""The check of a union: no rows occur twice, and no shard is missing."""

_PATIENCE = 1000
_HEALING = (
    "A writer was killed before it closed the storage, the power failed, or a writer has the "
    "storage open. Committed rows are intact. The next writer repairs this when it closes the "
    'storage: open_storage(path, mode="append").close() or `tallyroll collect --resume`.'
)


def verify(
    path: PathLike | Sequence[PathLike],
    *,
    skip: Collection[str] = (),
    progress: Progress | None = None,
    accept_copy: bool = False,
) -> Report:
    """Read every committed row of a storage, and report damaged and implausible rows.

    If a writer did not close a storage, for example because of a power failure, the files for other
    libraries, the table of episodes and the last record may be incomplete. `verify` reports this as
    a note instead of a finding, because it affects no row and the next writer repairs it.

    Most checks keep a few numbers per lane in memory, independent of the number of rows. The check
    of the table of episodes keeps a line per trajectory, and the check of stored hashes keeps a few
    numbers per row. Another process may write during the check: the rows that were committed at the
    start are checked.

    Args:
        path: a storage of any format, or several as in `open_storage`. For several storages,
            `verify` checks each one, and also that no two have the same rows and that all shards of
            a run are present.
        skip: names of `CHECKS` to skip.
        progress: a callback that is called periodically with the number of bytes read and the total
            number of bytes.
        accept_copy: check a copy that was made while a writer had the storage open.

    Raises:
        CopyOfOpenStorage: the storage is such a copy, and ``accept_copy`` is False.
        OpenError: there is no storage at ``path``, or it may not be read.
        ValueError: ``skip`` contains an unknown name.
    """
    if unknown := sorted(set(skip) - set(CHECKS)):
        raise ValueError(f"skip: expected some of {', '.join(CHECKS)}, got {', '.join(unknown)}.")
    try:
        with open_storage(path, accept_copy=accept_copy) as storage:
            reader = storage.reader
            if isinstance(reader, UnionReader):
                return _union_report(reader, skip, progress)
            return read_consistently(
                reader, lambda: _Verification(reader, skip, progress).report(str(path))
            )
    except RowsDoubled as error:
        found = Finding(_MEMBERS, str(error), 1, ())
        rest = dict.fromkeys(CHECKS, "the same rows occur twice")
        return Report(str(path), None, 0, (found,), (_MEMBERS,), rest)
    except CorruptStorage as error:
        found = Finding("files", str(error), 1, ())
        rest = {name: "the storage cannot be read" for name in CHECKS if name != "files"}
        return Report(str(path), None, 0, (found,), ("files",), rest)


def _union_report(union: UnionReader, skip: Collection[str], progress: Progress | None) -> Report:
    """Return one report on all members, and on faults that involve several members."""
    check = _MemberChecks([each.reader for each in union.members], skip, progress)
    reports = [check(each) for each in union.members]
    findings, notes = Findings(), Findings()
    shards = union.shards
    for problem in shards.problems if shards else ():
        findings.add(_MEMBERS, problem)
    if not missing(union.schema, (*WHOSE, TERMINATED)):
        _add_duplicates(union, findings, notes)
    of_all = [name for name in CHECKS if all(name in report.checked for report in reports)]
    skipped = {name: why for report in reports for name, why in report.skipped.items()}
    return Report(
        str(union.path),
        union.manifest["format"],
        sum(report.rows for report in reports),
        (*(_named(r, each) for r in reports for each in r.findings), *findings),
        (*of_all, _MEMBERS),
        {name: skipped[name] for name in CHECKS if name in skipped},
        (*(_named(r, each) for r in reports for each in r.notes), *notes),
        next((report.healing for report in reports if report.healing is not None), None),
    )


def _add_duplicates(union: UnionReader, findings: Findings, notes: Findings) -> None:
    """Report trajectories that occur in two members, with the ids and rows of each storage.

    A few short trajectories may be equal by chance, but not more than half of those of a member.
    """
    found = doubled_trajectories(union, PLACES)
    starts = [each.rows.start for each in union.members]
    of = np.searchsorted(starts, union.trajectories.table["first_row"], "right") - 1
    for each in found:
        own, before = union.members[each.member], union.members[each.before]
        doubled = sum(other.count for other in found if other.member == each.member)
        whole = 2 * doubled > int((of == each.member).sum())
        (findings if whole else notes).add(
            _MEMBERS,
            f"trajectories of {own.path} have the same rows as trajectories of {before.path}"
            f"{_explained(own, before)}",
            *(
                Place(row=row, trajectory=id, what=f"the same rows as trajectory {earlier} there")
                for row, id, earlier in each.pairs
            ),
            count=each.count,
        )


def _explained(own: UnionMember, before: UnionMember) -> str:
    """Return a likely reason for equal trajectories: runs that have the same seed."""
    ours, theirs = (
        {run["seed"] for run in each.reader.manifest["runs"] if type(run.get("seed")) is int}
        for each in (own, before)
    )
    if not (same := sorted(ours & theirs)):
        return ""
    return f"; both have a run with the seed {same[0]}, so equal starts are likely"


def _named(report: Report, finding: Finding) -> Finding:
    return replace(finding, message=f"{finding.message} ({report.path})")


class _MemberChecks:
    """Verification of the members of a union, which reports progress over all members."""

    def __init__(
        self, members: Sequence[RowReader], skip: Collection[str], progress: Progress | None
    ) -> None:
        self._skip, self._progress = skip, progress
        self._done, self._total = 0, sum(len(m) * m.schema.row_nbytes for m in members)

    def __call__(self, member: UnionMember) -> Report:
        """Verify a member and return its report."""
        reader, before = member.reader, self._done
        own = len(reader) * reader.schema.row_nbytes

        def tell(done: int, total: int) -> None:
            self._done = before + own * done // max(1, total)
            if self._progress is not None:
                with user_callback("progress"):
                    self._progress(self._done, self._total)

        report = read_consistently(
            reader, lambda: _Verification(reader, self._skip, tell).report(str(member.path))
        )
        self._done = before + own
        return report


class _Verification:
    """One verification of an open storage."""

    def __init__(self, reader: RowReader, skip: Collection[str], progress: Progress | None) -> None:
        self._reader, self._progress = reader, progress
        self._left_open = reader.left_open
        self._findings, self._notes = Findings(), Findings()
        # Findings that an interrupted write explains, and that the next writer repairs.
        self._cut_short = self._notes if self._left_open else self._findings
        self._skip, self._skipped = skip, dict.fromkeys(skip, "not wanted")
        self._done = self._total = 0

    def report(self, path: str) -> Report:
        """Run all checks."""
        reader, findings = self._reader, self._findings
        at, record = self._last_commit()
        manifest = self._manifest(at)
        if "metadata" not in self._skip:
            self._check_metadata()
        runs = check_runs(manifest["runs"], at, findings)
        if "events" not in self._skip:
            self._check_events(manifest["runs"], at)
        table = None if "episodes" in self._skip else self._table()
        rows = RowChecks(reader, runs, nan="nan" not in self._skip, table=table)
        # A record that is being written looks damaged once, but not three times.
        if all(reader.record_damaged for _ in range(3)):
            what = "was cut short" if self._left_open else "is damaged"
            message = f"the newest commit record {what}; the previous one was used"
            self._cut_short.add("record", message)
        known = check_record(record, runs, at, findings)
        sums = self._sums(manifest)
        hashes = None if "content" in self._skip else self._hashes()
        statistics = {} if "statistics" in self._skip else self._statistics()
        passes = 1 + bool(sums) + (hashes is not None)
        self._total = len(rows.span) * reader.schema.row_nbytes * passes
        nbytes = {column.key: column.row_nbytes for column in reader.schema.columns}
        self._total += sum(each.stop * nbytes[key] for key, each in statistics.items())
        if not self._chunks_whole():
            return self._cut_off(path, manifest)
        rows.run(findings, self._report_bytes)
        if known is None:
            self._skipped.setdefault("record", "no collector wrote a record")
        else:
            # The record does not cover later rows that no collector wrote.
            newest = known.at == rows.span.stop
            whole = newest and known.first_row >= rows.span.start and not rows.overtaken
            ended = rows.ended.get(known.first_row, 0) if whole else None
            check_ledger(known, ended, rows.largest_id if newest else -1, findings)
        self._skipped = rows.unavailable | self._skipped
        if sums is not None:
            self._check_sums(sums)
        if statistics:
            check_statistics(reader, statistics, findings, self._report_bytes)
        if hashes is not None:
            self._check_content(*hashes)
        if "index" not in self._skip and (why := check_index(reader, self._cut_short)):
            self._skipped.setdefault("index", why)
        if "overlays" not in self._skip and not (
            isinstance(reader, FileReader) and check_overlays(reader, findings)
        ):
            self._skipped.setdefault("overlays", "there are no overlays")
        notes = self._listed(self._notes)
        return Report(
            path,
            manifest["format"],
            len(rows.span),
            self._listed(findings),
            tuple(name for name in CHECKS if name not in self._skipped),
            {name: self._skipped[name] for name in CHECKS if name in self._skipped},
            notes,
            _HEALING if notes else None,
        )

    def _chunks_whole(self) -> bool:
        """Return True if the rows are readable, according to the checksums of chunks."""
        if "checksums" in self._skip:
            return True
        found = self._reader.damaged_chunks(lambda nbytes: None)
        if found is None:
            return True
        self._skipped.pop("checksums", None)
        whole = True
        for column, message in found:
            self._findings.add("checksums", "rows are damaged", Place(column=column, what=message))
            whole = False
        return whole

    def _cut_off(self, path: str, manifest: Manifest) -> Report:
        """Return the report for rows that are not all readable."""
        for name in CHECKS:
            if name not in ("files", "metadata", "runs", "events", "record", "checksums"):
                self._skipped.setdefault(name, "rows are damaged")
        return Report(
            path,
            manifest["format"],
            len(self._reader.span),
            self._listed(self._findings),
            tuple(name for name in CHECKS if name not in self._skipped),
            {name: self._skipped[name] for name in CHECKS if name in self._skipped},
            self._listed(self._notes),
        )

    def _manifest(self, head: int) -> Manifest:
        """Return the manifest; after an unfinished rewind, as the next writer will leave it."""
        reader = self._reader
        if not reader.rewinding:
            return reader.manifest
        self._cut_short.add("runs", "rows were rewound, but the manifest still names their runs")
        return without_runs_from(reader.manifest, head)

    def _last_commit(self) -> tuple[int, tuple[int, bytes] | None]:
        """Return the number of committed rows, and the record that was written with them."""
        for _ in range(_PATIENCE):
            head, record = self._reader.head, self._reader.record
            if self._reader.head == head:
                break
        return head, record

    def _check_metadata(self) -> None:
        reader = self._reader
        try:
            with translated(reader.path):
                for wrong in reader.shown_wrongly():
                    self._cut_short.add("metadata", wrong)
                for wrong in reader.made_wrongly():
                    self._findings.add("metadata", wrong)
        except MissingLibrary as error:
            self._skipped.setdefault("metadata", str(error))

    def _check_events(self, entries: list[Mapping[str, Any]], head: int) -> None:
        reader = self._reader
        if not any(EVENTS in entry or LEFT_OUT in entry for entry in entries):
            self._skipped.setdefault("events", "no environment was called")
            return
        for fault in reader.event_faults():
            self._findings.add("events", fault)
        if reader.events_torn:
            self._cut_short.add("events", "the last line of the file of events was cut short")
        check_events(entries, head, self._findings)

    def _table(self) -> np.ndarray | None:
        """Return the table of episodes; None if there is none, or it cannot be read."""
        columns = self._reader.schema.columns
        reward = next((each.shape for each in columns if each.key == REWARD), ())
        try:
            table = self._reader.episode_lines(table_dtype(reward))
        except DamagedTable as error:
            self._cut_short.add("episodes", str(error))
            return None
        if table is None:
            self._skipped.setdefault(
                "episodes", "there is no table yet; it is written when a writer closes"
            )
        return table

    def _hashes(self) -> tuple[LeafHashes, np.ndarray] | None:
        """Return the stored content hashes; None if there are none, or they cannot be used."""
        reader = self._reader
        lines = None
        if isinstance(reader, FileReader) and not missing(reader.schema, NAMING):
            kept = leaf_hashes_of(reader, reader.format)
            try:
                lines = kept.read()
            except UnusableLeaves as error:
                what = "Delete it: the hashes are computed again from the rows."
                self._cut_short.add("content", f"{error} {what}")
                return None
        if lines is None:
            self._skipped.setdefault("content", "no hashes are stored with the rows")
            return None
        return kept, lines

    def _statistics(self) -> Mapping[Key, ColumnAccumulator]:
        """Return the stored statistics of columns, if there are any and they can be used."""
        reader, why = self._reader, "no statistics are stored with the rows"
        if (place := place_of(reader)) is not None:
            try:
                return read_whole(reader, place)
            except ForeignStatistics:
                why = "the stored statistics are of other rows, and are not used"
            except Unusable:
                what = "is damaged, or rows have changed. Delete it: new statistics are computed."
                self._cut_short.add("statistics", f"{place.path} {what}")
                return {}
            except FileNotFoundError:
                pass
            except PermissionError as error:
                why = f"the stored statistics cannot be read: {error.strerror}"
            except OSError as error:
                raise failed(place.path, error, 0) from error
        self._skipped.setdefault("statistics", why)
        return {}

    def _check_content(self, kept: LeafHashes, lines: np.ndarray) -> None:
        try:
            check_content(self._reader, kept, lines, self._findings, self._report_bytes)
        except Overrun:
            why = "another process writes to this ring; wait for it"
            self._skipped.setdefault("content", why)
        self._report_bytes(self._total)  # include rows without a stored hash

    def _report_bytes(self, nbytes: int) -> None:
        self._done = min(self._total, self._done + nbytes)
        if self._progress is not None:
            with user_callback("progress"):
                self._progress(self._done, self._total)

    def _listed(self, gathered: Findings) -> tuple[Finding, ...]:
        """Return the findings of the selected checks, in the order of the checks."""
        wanted = [name for name in CHECKS if name not in self._skip]
        return tuple(found for name in wanted for found in gathered if found.check == name)

    def _sums(self, manifest: Mapping[str, Any]) -> Any:
        if "finalized" not in manifest:
            self._skipped.setdefault("checksums", "the storage was not finalized")
        elif "checksums" not in self._skip:
            done = manifest["finalized"]
            return done.get("checksums", {}) if isinstance(done, dict) else {}
        return None

    def _check_sums(self, recorded: Any) -> None:
        reader = self._reader
        columns = {key: SlotColumn(reader, key) for key in reader.keys}
        message = "the bytes of a block of rows do not match its checksum"
        try:
            for each in mismatches(columns, recorded, self._report_bytes):
                rows = newest_rows(reader, np.arange(each.start, each.stop))
                what = f"or one of the {len(rows) - 1:,} rows after it"
                place = Place(row=int(rows.min()), column=format_key(each.key), what=what)
                self._findings.add("checksums", message, place)
        except CorruptStorage as error:
            self._findings.add("checksums", str(error))
