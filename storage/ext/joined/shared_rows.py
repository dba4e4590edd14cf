"""Detection of rows that two members of a union share, based on manifests or on content."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from tallyroll.storage.errors import RowsDoubled
from tallyroll.storage.ext.joined.members import UnionMember
from tallyroll.storage.files.copied_runs import (
    COPIED,
    LEFT_OUT,
    MOVED,
    PACKED,
    REWINDS,
    SOURCES,
    copied_runs,
    is_copied,
    is_unchanged,
    rows_copied,
    sources_of,
)
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import DONE, NEXT, STEP, TRAJ_IDS, TRUNCATED, Key
from tallyroll.storage.trajectories.columns import missing, numbers_of

_UNKNOWN: Final = range(2**62)
_CHUNK_NBYTES: Final = 2**24
_CHUNK_ROWS: Final = 2**20
_NARROW_NBYTES: Final = 64
"""Columns of at most this many bytes per row are compared first."""
_LOOKS: Final = 256
"""Maximum number of row pairs with equal hashes that are compared bit for bit."""
_IMPORTED: Final = "imported_from"
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)

_STEPS: Final = np.dtype([("id", np.int64), ("step", np.int64), ("row", np.int64)])

Readers: TypeAlias = tuple[RowReader, RowReader]
Pairs: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Corresponding row numbers of two readers."""


@dataclass(frozen=True, slots=True)
class _MemberStretch:
    """Rows of a member that come, or may come, from one storage: the member itself or a source."""

    rows: range
    """Row numbers in the member."""
    id: str | None
    """The id of the source storage; None if it is unknown."""
    span: range
    """A range of row numbers of the source storage that contains these rows."""
    moved: int | None
    """The trajectory ids of these rows minus the ids in the source; None if unknown."""
    direct: bool = False
    """True if one copy took all these rows directly from the source."""
    complete: bool = False
    """True if these rows are all rows of `span`."""
    rewinds: int = 0
    """The number of rewinds of the source storage at the time of the copy."""


def refuse_shared_rows(members: Sequence[UnionMember]) -> None:
    """Raise `RowsDoubled` if two members contain the same row of one storage.

    The manifests record which rows of a member were copied from which storage. Rows are read only
    if the manifests do not decide the question. The comparison then uses trajectory ids and steps,
    or the other columns if ids or steps were changed.

    Args:
        members: storages whose ids differ.

    Raises:
        RowsDoubled: two members share a row. The message names them.
    """
    if len(members) < 2:
        return
    stretches = [list(_stretches(each.reader.manifest, each.span)) for each in members]
    if not any(len(each) > 1 for each in stretches):
        return  # no member has rows of another storage
    rows = _MemberRows([each.reader for each in members])
    by_id: dict[str, list[tuple[int, _MemberStretch]]] = {}
    unknown: list[tuple[int, _MemberStretch]] = []
    for number, each in enumerate(stretches):
        for stretch in each:
            if stretch.id is None:
                unknown.append((number, stretch))
                continue
            there = by_id.setdefault(stretch.id, [])
            for other, before in there:
                if other != number and rows.shared((other, before), (number, stretch)):
                    raise _doubled(members[other], members[number], stretch.id)
            there.append((number, stretch))
    for number, stretch in unknown:
        for other, (own, *_) in enumerate(stretches):
            if other != number and rows.shared((other, own), (number, stretch)):
                raise _doubled(members[other], members[number], None)


def _doubled(one: UnionMember, other: UnionMember, id: str | None) -> RowsDoubled:
    if id in (one.id, other.id):
        copy, source = (other, one) if id == one.id else (one, other)
        got = f"rows that were copied from {source.path}, another of them"
    else:
        copy, got = other, f"rows that {one.path} has too"
    return RowsDoubled(
        f"{copy.path}: expected rows that no other of these storages has, got {got}. Leave one of "
        "the two out, or use parts without common rows, such as the parts that `split` makes."
    )


# --- manifests ------------------------------------------------------------------------------------


def _stretches(manifest: Mapping[str, Any], span: range) -> Iterator[_MemberStretch]:
    """Yield a stretch for each storage that the rows ``span`` come from, this storage first."""
    yield _MemberStretch(
        span, manifest["id"], span, 0, True, True, len(manifest.get(REWINDS) or ())
    )
    packed = isinstance(manifest.get(PACKED), Mapping)
    for number, each in enumerate(_of_sources(sources_of(manifest), span, 0)):
        direct = packed and number == 0  # the other entries are the sources of the first one
        yield replace(each, direct=direct, complete=direct and _count_of(each.span) == len(span))
    for entry, rows in _entries(manifest["runs"], span):
        yield from _of_entry(entry, rows, 0, direct=True)


def _entries(
    entries: Sequence[Mapping[str, Any]], span: range
) -> Iterator[tuple[Mapping[str, Any], range]]:
    """Yield the entries that have rows within ``span``, and these rows."""
    firsts = [first if type(first := each.get("first_row")) is int else 0 for each in entries]
    for entry, (start, stop) in zip(entries, pairwise([*firsts, _UNKNOWN.stop]), strict=True):
        rows = range(max(start, span.start), min(stop, span.stop))
        if len(rows):
            yield entry, rows


def _of_entry(
    entry: Mapping[str, Any], rows: range, moved: int | None, *, direct: bool
) -> Iterator[_MemberStretch]:
    """Yield a stretch for each storage that the rows of an entry come from.

    ``moved`` is the offset of the member's trajectory ids from the ids in the storage that has the
    entry; None if it is unknown.
    """
    if entry.get(LEFT_OUT) is True:
        yield _MemberStretch(rows, None, _UNKNOWN, None)
    if not is_copied(entry):
        return
    said, unchanged = entry[COPIED], is_unchanged(entry)
    own = said.get(MOVED, 0 if unchanged and _IMPORTED not in entry else None)
    moved = _sum(moved, own)
    for stretch in _of_source(said, rows, moved):
        complete = direct and unchanged and _count_of(stretch.span) == len(rows)
        yield _MemberStretch(
            rows, stretch.id, stretch.span, moved, direct, complete, _count(said.get(REWINDS))
        )
        if SOURCES in said:
            yield from _of_sources(said[SOURCES], rows, moved)
        for run, _ in _entries(copied_runs(entry), stretch.span):
            yield from _of_entry(run, rows, moved, direct=False)


def _of_sources(sources: Any, rows: range, moved: int | None) -> Iterator[_MemberStretch]:
    """Yield a stretch for each source storage of a union or of a view."""
    if not isinstance(sources, list):
        yield _MemberStretch(rows, None, _UNKNOWN, None)
        return
    for each in sources:
        if isinstance(each, Mapping):
            own = _sum(moved, each.get(MOVED, 0))
            yield from _of_source(each, rows, own)
            yield from _of_sources(each.get(SOURCES, []), rows, own)


def _of_source(said: Mapping[str, Any], rows: range, moved: int | None) -> Iterator[_MemberStretch]:
    found = rows_copied({COPIED: said})
    if found is None:
        return
    id, first, last = found
    span = range(first, _UNKNOWN.stop if last is None else last + 1)
    yield _MemberStretch(rows, id, span, moved, rewinds=_count(said.get(REWINDS)))
    base, _, view = id.partition("-")
    if view and SOURCES not in said:  # a view that an earlier release copied
        yield _MemberStretch(rows, base, _UNKNOWN, moved)


def _count_of(span: range) -> int:
    return span.stop - span.start  # len() raises for the huge ranges of a damaged manifest


def _sum(one: Any, other: Any) -> int | None:
    """Add two id offsets; return None if one is unknown or invalid."""
    if type(one) is not int or type(other) is not int or abs(one + other) >= _UNKNOWN.stop:
        return None
    return one + other


def _count(number: Any) -> int:
    return number if type(number) is int else 0


# --- rows -----------------------------------------------------------------------------------------


class _MemberRows:
    """Comparison of the rows of members, with cached results.

    Args:
        readers: the readers of the members.
    """

    def __init__(self, readers: Sequence[RowReader]) -> None:
        self._readers = readers
        self._numbered = [not missing(each.schema, (TRAJ_IDS, STEP)) for each in readers]
        self._ids: dict[tuple[int, range], np.ndarray] = {}
        self._compared: dict[tuple[Any, ...], bool] = {}

    def shared(self, one: tuple[int, _MemberStretch], other: tuple[int, _MemberStretch]) -> bool:
        """Return True if two stretches, which name the same storage, have a common row."""
        (first, a), (second, b) = one, other
        if a.span.start >= b.span.stop or b.span.start >= a.span.stop:
            return False
        if not a.rows or not b.rows:
            return False
        if a.direct and b.direct and a.rewinds == b.rewinds:
            if a.complete and b.complete:
                return True
            for whole, part in ((a, b), (b, a)):
                within = part.span.start >= whole.span.start and part.span.stop <= whole.span.stop
                if whole.complete and within:
                    return True
        move = None if a.moved is None or b.moved is None else b.moved - a.moved
        if not (self._numbered[first] and self._numbered[second]):
            move = None
        key = (first, a.rows, second, b.rows, move)
        if key not in self._compared:
            if move is None:
                readers = self._readers[first], self._readers[second]
                found = _equal_content(readers, (a.rows, b.rows))
            else:
                found = self._equal_steps((first, a.rows), (second, b.rows), move)
            self._compared[key] = found
        return self._compared[key]

    def _equal_steps(self, one: tuple[int, range], other: tuple[int, range], move: int) -> bool:
        """Return True if two members have a row with the same trajectory, step and values.

        ``move`` is a trajectory id of the other member minus the same trajectory's id in this one.
        """
        ids = np.intersect1d(self._ids_of(*one), self._ids_of(*other) - move, assume_unique=True)
        if not len(ids):
            return False
        found = self._steps(*one, ids), self._steps(*other, ids + move)
        found[1]["id"] -= move
        names, others = (each[["id", "step"]] for each in found)
        _, at, there = np.intersect1d(names, others, return_indices=True)
        readers = self._readers[one[0]], self._readers[other[0]]
        return _any_equal(readers, (found[0]["row"][at], found[1]["row"][there]))

    def _ids_of(self, number: int, rows: range) -> np.ndarray:
        """Return the unique trajectory ids of a member's rows in ascending order."""
        if (number, rows) not in self._ids:
            parts = [np.unique(part) for _, part in _ids(self._readers[number], rows)]
            self._ids[number, rows] = np.unique(np.concatenate(parts))
        return self._ids[number, rows]

    def _steps(self, number: int, rows: range, ids: np.ndarray) -> np.ndarray:
        """Return the ids, steps and numbers of the rows of some trajectories."""
        reader, parts = self._readers[number], []
        for start, part in _ids(reader, rows):
            at = np.flatnonzero(np.isin(part, ids))
            steps = numbers_of(reader.column(STEP).slice(start, start + len(part)))
            found = np.empty(len(at), _STEPS)
            found["id"], found["step"], found["row"] = part[at], steps[at], at + start
            parts.append(found)
        return np.concatenate(parts)


def _ids(reader: RowReader, rows: range) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the first row of each chunk, and the chunk's trajectory ids."""
    column = reader.column(TRAJ_IDS)
    for start in range(rows.start, rows.stop, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, rows.stop)
        yield start, numbers_of(column.slice(start, stop)).astype(np.int64)


def _any_equal(readers: Readers, pairs: Pairs) -> bool:
    """Return True if the two rows of at least one pair have the same values."""
    keys = _compared(readers)
    size = max(1, _CHUNK_NBYTES // max(1, _nbytes(readers[0], keys)))
    for start in range(0, len(pairs[0]), size):
        same = np.ones(len(pairs[0][start : start + size]), np.bool_)
        for key in keys:
            one, other = (
                _octets(reader.column(key).take(rows[start : start + size]))
                for reader, rows in zip(readers, pairs, strict=True)
            )
            same &= (one == other).all(axis=1)
        if same.any():
            return True
    return False


def _equal_content(readers: Readers, rows: tuple[range, range]) -> bool:
    """Return True if two members have a row with the same values, ignoring ids and steps."""
    keys = _compared(readers)
    narrow = [key for key in keys if _nbytes(readers[0], [key]) <= _NARROW_NBYTES]
    left = [np.arange(each.start, each.stop) for each in rows]
    hashes: list[np.ndarray] = []
    for columns in [narrow, keys] if narrow and narrow != keys else [keys]:
        hashes = [_hashes(*each, columns) for each in zip(readers, left, strict=True)]
        common = np.intersect1d(hashes[0], hashes[1])
        for number in range(2):
            kept = np.isin(hashes[number], common)
            left[number], hashes[number] = left[number][kept], hashes[number][kept]
        if not len(common):
            return False
    firsts = [np.unique(each, return_index=True)[1][:_LOOKS] for each in hashes]
    return _any_equal(readers, (left[0][firsts[0]], left[1][firsts[1]]))


def _hashes(reader: RowReader, rows: np.ndarray, keys: Sequence[Key]) -> np.ndarray:
    """Return a 64-bit hash of the values of each row [n]."""
    found = np.zeros(len(rows), np.uint64)
    size = max(1, _CHUNK_NBYTES // max(1, _nbytes(reader, keys)))
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        for key in keys:
            octets = _octets(reader.column(key).take(part))
            words = np.zeros((len(part), -(-octets.shape[1] // 8) * 8), np.uint8)
            words[:, : octets.shape[1]] = octets
            for word in words.view(np.uint64).T:
                mixed = (found[start : start + size] ^ word) * _MULTIPLIER
                found[start : start + size] = mixed ^ (mixed >> np.uint64(29))
    return found


def _compared(readers: Readers) -> list[Key]:
    """Return the common columns that copies do not change.

    Copies may change the columns of the collector and the flags for ends.
    """
    one, other = ({each.key: each for each in reader.schema.columns} for reader in readers)
    return [
        key
        for key, column in one.items()
        if other.get(key) == column and key[0] != TRAJ_IDS[0] and not _is_end_flag(key)
    ]


def _is_end_flag(key: Key) -> bool:
    return key[0] == NEXT and key[-1] in (TRUNCATED[-1], DONE[-1])


def _nbytes(reader: RowReader, keys: Sequence[Key]) -> int:
    return sum(each.row_nbytes for each in reader.schema.columns if each.key in keys)


def _octets(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each row, uint8 [n, row_nbytes]."""
    flat = np.ascontiguousarray(values).reshape(len(values), -1)
    found: np.ndarray = flat.view(np.uint8)
    return found
