"""Reader that presents several storages as one, with their rows in member order."""
# ruff: noqa: D102 - `RowReader` documents the methods of all readers

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from tensordict import TensorDict

from tallyroll.storage.engine.columns import Places
from tallyroll.storage.engine.frame_pools import PoolUsage, StoredSize, summed
from tallyroll.storage.errors import (
    NotInitialised,
    Overrun,
    RowsDoubled,
    StateMismatch,
    TrajectoryIdTaken,
)
from tallyroll.storage.ext.joined.maps import JoinedMaps
from tallyroll.storage.ext.joined.members import UnionMember, joined_runs, joined_schema
from tallyroll.storage.ext.joined.packs import JoinedPacks
from tallyroll.storage.ext.joined.shards import Shards, shards_of
from tallyroll.storage.ext.joined.shared_rows import refuse_shared_rows
from tallyroll.storage.files.copied_runs import SOURCES, source_of
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader, columns_of
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import TRAJ_IDS, Key, Keys, format_key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import missing, numbers_of
from tallyroll.storage.trajectories.episodes import END_CUT, END_OPEN

_SECONDS: Final = 0.02


class RewindCounter:
    """Counter of the rewinds of all members.

    Only a writer can rewind a storage. Members that have a writer are checked on each call. The
    others are checked periodically, together with the check whether they have a writer.
    """

    def __init__(self, members: Sequence[UnionMember]) -> None:
        self._members = members
        self._open: list[UnionMember] = []
        self._others = 0
        self._next = -1.0

    @property
    def count(self) -> int:
        """The sum of the rewinds of all members."""
        if time.monotonic() >= self._next:
            self._look()
        return self._others + sum([each.reader.rewinds for each in self._open])

    def _look(self) -> None:
        self._open = [each for each in self._members if each.reader.left_open]
        open_ones = {id(each) for each in self._open}
        self._others = sum(
            each.reader.rewinds for each in self._members if id(each) not in open_ones
        )
        self._next = time.monotonic() + _SECONDS

    def require(self, count: int) -> None:
        """Raise `StateMismatch` unless the sum is still ``count``."""
        if self.count != count:
            for each in self._members:
                require_not_rewound(each)


def require_not_rewound(member: UnionMember) -> None:
    """Raise `StateMismatch` if a member has been rewound since the union was opened."""
    if member.reader.rewinds != member.rewinds:
        raise StateMismatch(
            f"{member.path} was rewound since this union was opened, so row numbers may mean other "
            "rows now. Open the union again."
        )


_BLOCKS: Final = 2**13
"""Maximum number of entries in the lookup table."""


class MemberOf:
    """Lookup of the member that a row belongs to.

    A binary search takes 10 us for 256 random rows, because of branch mispredictions. A table
    therefore stores the member at the beginning of each block of rows. If no block contains rows
    of more than two members, one more comparison finds the member.

    Args:
        starts: the first row of each member, ascending [members].
        stop: the end of the rows (exclusive).
    """

    def __init__(self, starts: np.ndarray, stop: int) -> None:
        self._starts = starts
        self._shift = max(0, (stop // _BLOCKS).bit_length())
        begins = np.arange((stop >> self._shift) + 1) << self._shift
        self._first = self._by_halves(begins)
        last = self._by_halves(begins + (1 << self._shift) - 1)
        self._next = np.append(starts[1:], stop)
        self._by_table = bool((last - self._first <= 1).all())

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """Return the number of the member of each of ``rows`` [*], as an array [*]."""
        if not self._by_table:
            return self._by_halves(rows)
        found: np.ndarray = self._first.take(rows >> self._shift)
        found += rows >= self._next.take(found)
        return found

    def _by_halves(self, rows: np.ndarray) -> np.ndarray:
        found: np.ndarray = self._starts.searchsorted(rows, "right") - 1
        return found


MemberIds: TypeAlias = Literal["offset", "keep"]

_CHUNK_ROWS: Final = 2**20
_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class UnionPart:
    """The requested rows that belong to one member."""

    member: int
    at: np.ndarray | slice
    """Positions among the flattened requested rows."""
    rows: np.ndarray
    """Row numbers in the member's storage."""


class UnionColumn(ColumnReader):
    """One column of all members."""

    def __init__(self, union: UnionReader, key: Key) -> None:
        self._union, self.key = union, key
        self._place = union.schema.keys.index(key)
        self._column = union.schema.columns[self._place]

    @property
    def array(self) -> np.ndarray | None:
        members = self._union.members
        if len(members) > 1 or members[0].reader.ring or self.key == TRAJ_IDS:
            return None
        array = members[0].reader.column(self.key).array
        return None if array is None else array[: len(members[0].rows)]

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        found = self._union.copy_rows(self._place, rows, out)
        if out is None or found is out:
            return found
        out[...] = found
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        pieces = []
        for number, rows in self._union.stretches(start, stop):
            piece = self._union.piece(self._place, number, rows)
            if self.key == TRAJ_IDS and (move := self._union.ids_moved_by[number]):
                piece = piece + piece.dtype.type(move)
            pieces.append(piece)
            self._union.require_left(number, rows.start)
        if len(pieces) == 1:
            return pieces[0]
        if not pieces:
            return np.empty((0, *self._column.shape), self._column.numpy_dtype)
        return np.concatenate(pieces)


class UnionReader(RowReader):
    """Reader of the rows of several storages, one member after the other, numbered from 0.

    The union contains the rows that existed when it was opened. It ignores rows that writers add
    later, so a number always denotes the same row. Reading a row that was overwritten in a ring or
    rewound in the meantime raises an error.

    Args:
        members: the readers of the storages; `close` closes them.
        path: the path to show in messages.
        columns: the columns to read; None: all columns, which every member must have.
        ids: treatment of trajectory ids. ``"offset"``: if an id of a member occurs in an earlier
            member, one offset moves all ids of the member above those of the earlier members; see
            `ids_moved_by`. ``"keep"``: ids stay unchanged.
        spans: the rows of each member; None: the rows that exist now.
        owners: objects that the reader keeps alive, because their garbage collection would close
            the members.

    Raises:
        SchemaMismatch: the columns of the members differ. The message names each difference.
        ColumnsMissing: no column is selected, or none of the members has a selected column.
        RowsDoubled: two members are the same storage, or one has rows that were copied from the
            other, or both have copies of the same rows.
        NotInitialised: a member has no columns yet.
        Overrun: a ring has overwritten rows of ``spans``.
        StateMismatch: a member has fewer rows than its span.
    """

    def __init__(
        self,
        members: Sequence[RowReader],
        path: Path,
        *,
        columns: Keys | None = None,
        ids: MemberIds = "offset",
        spans: Sequence[range] | None = None,
        owners: Sequence[object] = (),
    ) -> None:
        self._owners = owners
        if ids not in ("offset", "keep"):
            raise ValueError(f"ids: expected 'offset' or 'keep', got {ids!r}.")
        self.path, self.ids = path, ids
        for each in members:
            if not each.initialised:
                raise NotInitialised(f"{each.path} has no columns yet. Write rows first.")
        self._schema = joined_schema(members, columns)
        found, first = [], 0
        for number, each in enumerate(members):
            span = each.span if spans is None else spans[number]
            rows = range(first, first + len(span))
            first = rows.stop
            manifest = each.manifest
            found.append(
                UnionMember(
                    each,
                    each.path,
                    manifest["id"],
                    manifest["format"],
                    span,
                    rows,
                    each.rewinds,
                )
            )
        _refuse_doubled(found)
        if spans is None:  # members with spans were checked before, or are shards of one run
            refuse_shared_rows(found)
        self.members: tuple[UnionMember, ...] = tuple(found)
        """The storages in order, with their rows."""
        self._span = range(first)
        self._member_of = MemberOf(np.array([each.rows.start for each in found], np.int64), first)
        self._moves = np.array([each.moved_by for each in found], np.int64)
        self._rings = [number for number, each in enumerate(found) if each.reader.ring]
        self._taken_back = RewindCounter(self.members)
        self._kept = sum(each.rewinds for each in found)
        self._runs = joined_runs(found)
        self._columns: dict[Key, UnionColumn] = {}
        self._keys = self._schema.keys
        self._all = tuple(range(len(self._keys)))
        ids_there = not missing(self._schema, (TRAJ_IDS,))
        self._ids_place = self._schema.keys.index(TRAJ_IDS) if ids_there else None
        if spans is not None:
            for number, span in enumerate(spans):
                self._require_span(number, span)

    def _require_span(self, number: int, span: range) -> None:
        self.require_left(number, span.start)
        if span.stop > (head := self.members[number].reader.head):
            raise StateMismatch(
                f"{self.members[number].path}: expected at least {span.stop} rows, got {head}. "
                "Open an up-to-date copy."
            )

    # --- contents ---------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        self.require_open()
        return self._schema

    @property
    def keys(self) -> tuple[Key, ...]:
        return self._keys

    @property
    def span(self) -> range:
        return self._span

    @property
    def rewinds(self) -> int:
        return self._taken_back.count

    @property
    def rewinding(self) -> bool:
        return any(each.reader.rewinding for each in self.members)

    @property
    def revision(self) -> int:
        return self.head + (self.rewinds << 48)

    @cached_property
    def id(self) -> str:
        """An id that unions share if they have the same rows, columns and ``ids``."""
        said = [[each.id, each.span.start, each.span.stop] for each in self.members]
        of = json.dumps([said, self.ids, [*map(format_key, self._schema.keys)]]).encode()
        return hashlib.sha256(of).hexdigest()[:32]

    def pool_usage(self) -> list[PoolUsage]:
        return summed(usage for each in self.members for usage in each.reader.pool_usage())

    def stored_size(self) -> StoredSize:
        if not self.head:
            return super().stored_size()
        sizes = [(each.reader.stored_size(), len(each.rows)) for each in self.members]
        nbytes = sum(size.row_nbytes * rows for size, rows in sizes)
        once = dict.fromkeys(key for size, _ in sizes for key in size.once)
        measured = all(size.measured for size, rows in sizes if rows)
        return StoredSize(tuple(once), -(-nbytes // self.head), measured, None)

    @property
    def manifest(self) -> Manifest:
        self.require_open()
        return {
            "format": "tallyroll.union",
            "id": self.id,
            "created": max(each.reader.manifest["created"] for each in self.members),
            "runs": self._runs,
            SOURCES: self._sources(),
        }

    def _sources(self) -> list[dict[str, Any]]:
        """Return the source storages of the rows, for the manifests of copies."""
        moves = vars(self).get("ids_moved_by")  # None until ids are read
        found = []
        for number, each in enumerate(self.members):
            if len(each.rows):
                rows: list[int | None] = [each.span.start, each.span.stop - 1]
                moved = None if moves is None else moves[number]
                found.append(
                    {"first_row": each.rows.start, **source_of(each.reader.manifest, rows, moved)}
                )
        return found

    @property
    def runs(self) -> list[dict[str, Any]]:
        return self._runs

    @property
    def shards(self) -> Shards | None:
        """The shards among the members, and the missing shards; None if no member is a shard."""
        return shards_of((each.path, each.reader.runs, len(each.rows)) for each in self.members)

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        tables = []
        for number, each in enumerate(self.members):
            reader = each.reader
            if reader.ring or each.span.start or reader.rewinds != each.rewinds:
                return None
            lines = reader.episode_lines(dtype) if len(each.rows) else np.empty(0, dtype)
            if lines is None or reader.head != each.span.stop:
                return None
            if len(each.rows) and lines["last_row"].max(initial=-1) != each.span.stop - 1:
                return None  # the table ends before the last row
            lines = lines.copy()
            for name in ("first_row", "last_row"):
                lines[name] += each.rows.start
            lines["id"] += self.ids_moved_by[number]
            if number < len(self.members) - 1:
                lines["end"][lines["end"] == END_OPEN] = END_CUT
            tables.append(lines)
        return np.concatenate(tables)

    def close(self) -> None:
        super().close()
        if isinstance(joined := vars(self).get("_joined"), JoinedPacks):
            joined.close()
        for each in self.members:
            each.reader.close()

    # --- ids of trajectories ----------------------------------------------------------------------

    @cached_property
    def ids_moved_by(self) -> tuple[int, ...]:
        """The offset that is added to the trajectory ids of each member.

        Raises:
            TrajectoryIdTaken: with ``ids="keep"``, two members have the same id.
        """
        moves = [0] * len(self.members)
        if self._ids_place is None:
            return tuple(moves)
        taken, of = np.empty(0, np.int64), np.empty(0, np.int64)
        for number in range(len(self.members)):
            own = self._ids_of(number)
            if not len(own):
                continue
            clash = np.intersect1d(taken, own, assume_unique=True)
            if len(clash) and self.ids == "keep":
                before = int(of[np.flatnonzero(taken == clash[0])[0]])
                raise TrajectoryIdTaken(
                    f"{len(clash)} trajectory ids of {self.members[number].path} also occur in "
                    f"earlier members, such as {clash[0]} in {self.members[before].path}. Open the "
                    'storages with ids="offset", which changes the ids.'
                )
            if len(clash):
                moves[number] = self._move_to(number, own, int(taken[-1]) + 1)
            own = own + moves[number]
            order = np.argsort(both := np.concatenate([taken, own]))
            of = np.concatenate([of, np.full(len(own), number)])[order]
            taken = both[order]
        return tuple(moves)

    def _move_to(self, number: int, own: np.ndarray, least: int) -> int:
        move = least - int(own[0])
        column = self._schema.columns[self._schema.keys.index(TRAJ_IDS)]
        if int(own[-1]) + move > np.iinfo(column.numpy_dtype).max:
            raise TrajectoryIdTaken(
                f"the trajectory ids of {self.members[number].path} must be moved above "
                f"{least - 1}, and {column.dtype_name} cannot hold such ids. Copy the storages one "
                "by one with other ids."
            )
        return move

    def _ids_of(self, number: int) -> np.ndarray:
        """Return the unique trajectory ids of a member in ascending order."""
        assert self._ids_place is not None
        span, found = self.members[number].span, [np.empty(0, np.int64)]
        for start in range(span.start, span.stop, _CHUNK_ROWS):
            stop = min(start + _CHUNK_ROWS, span.stop)
            ids = self.piece(self._ids_place, number, range(start, stop))
            found.append(_once(numbers_of(ids)))
        self.require_left(number, span.start)
        return np.unique(np.concatenate(found))

    # --- rows -------------------------------------------------------------------------------------

    def get(self, index: Any, keys: Keys | None = None) -> TensorDict:
        where = None if self._joined is None else resolve(index, len(self._span))
        if not isinstance(where, np.ndarray):
            return super().get(index, keys)
        only, nest = columns_of(self, keys)
        return nest(self._gathered(where, only), where.shape)

    def column(self, key: Key) -> UnionColumn:
        self.require_open()
        found = self._columns.get(key)
        if found is None:
            if key not in self._schema:
                names = ", ".join(map(format_key, self._schema.keys))
                note = excluded_note(self.runs, [key])
                raise KeyError(f"{self.path} has no column {key!r}; it has {names}.{note}")
            found = self._columns[key] = UnionColumn(self, key)
        return found

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        only = None if keys is None else tuple(self.keys.index(key) for key in keys)
        return self._gathered(rows, None if only == self._all else only)

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        if isinstance(rows, np.ndarray):
            return self._gathered(rows, None)
        alike: dict[int, list[int]] = {}  # many columns share the same array of rows
        for place, each in enumerate(rows):
            alike.setdefault(id(each), []).append(place)
        found: dict[int, np.ndarray] = {}
        for places in alike.values():
            values = self._gathered(rows[places[0]], tuple(places))
            found.update(zip(places, values, strict=True))
        return [found[place] for place in self._all]

    def _gathered(self, rows: np.ndarray, only: Places | None) -> list[np.ndarray]:
        """Copy rows of all columns, or of the columns at the positions ``only``."""
        self.require_open()
        of = self._member_of(rows)
        places = self._all if only is None else only
        if self._joined is not None:
            found = self._joined.gather(rows, of, only)
        else:
            found = self._by_member(rows, places)
        if self._ids_place in places:
            self._move_ids(found[places.index(self._ids_place)], of)
        self._require_left(rows, of)
        return found

    def _by_member(self, rows: np.ndarray, places: Places) -> list[np.ndarray]:
        """Copy rows with one call per member."""
        keys = [self._keys[place] for place in places]
        parts = self.parts(rows)
        if len(parts) == 1:
            part = parts[0]
            return self.members[part.member].reader.copies(part.rows.reshape(rows.shape), keys)
        found = [
            np.empty((rows.size, *column.shape), column.numpy_dtype)
            for column in map(self._schema.columns.__getitem__, places)
        ]
        for part in parts:
            values = self.members[part.member].reader.copies(part.rows, keys)
            for every, some in zip(found, values, strict=True):
                every[part.at] = some
        return [each.reshape(*rows.shape, *each.shape[1:]) for each in found]

    def copy_rows(self, place: int, rows: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        """Copy rows of one column, to ``out`` if possible."""
        if self._joined is None:
            return self._gathered(rows, (place,))[0]
        self.require_open()
        of = self._member_of(rows)
        found = self._joined.take(place, rows, of, out)
        if place == self._ids_place:
            self._move_ids(found, of)
        self._require_left(rows, of)
        return found

    def piece(self, place: int, number: int, rows: range) -> np.ndarray:
        """Return the values of one column for a range of a member's own row numbers."""
        if isinstance(self._joined, JoinedPacks):
            by = self.members[number].moved_by
            return self._joined.slice(place, range(rows.start + by, rows.stop + by), number)
        column = self.members[number].reader.column(self._keys[place])
        return column.slice(rows.start, rows.stop)

    def require_rows(self, rows: np.ndarray) -> None:
        """Raise an error if the union no longer has the rows that were just read.

        Raises:
            Overrun: the writer of a ring has overwritten some of the rows.
            StateMismatch: a member has been rewound.
        """
        self._require_left(rows, self._member_of(rows))

    def _move_ids(self, ids: np.ndarray, of: np.ndarray) -> None:
        if any(self.ids_moved_by):
            ids += self._id_moves[of].astype(ids.dtype, copy=False).reshape(ids.shape)

    def _require_left(self, rows: np.ndarray, of: np.ndarray) -> None:
        self._taken_back.require(self._kept)
        for number in self._rings:
            if (mine := rows[of == number]).size:
                self.require_left(number, int(mine.min() - self._moves[number]))

    @cached_property
    def _id_moves(self) -> np.ndarray:
        return np.array(self.ids_moved_by, np.int64)

    @cached_property
    def _joined(self) -> JoinedMaps | JoinedPacks | None:
        """The columns of all members joined; None if each member is read separately."""
        found = JoinedMaps.of(self.members, self._schema)
        return found or JoinedPacks.of(self.members, self._schema)

    def parts(self, rows: np.ndarray) -> list[UnionPart]:
        """Split requested rows [*] by member."""
        self.require_open()
        flat = rows.reshape(-1)
        if len(self.members) == 1:
            return [UnionPart(0, slice(None), flat - self._moves[0])]
        of = self._member_of(flat)
        own = flat - self._moves[of]
        order = of.argsort(kind="stable")
        ends = np.bincount(of, minlength=len(self.members)).cumsum()
        found, begin = [], 0
        for number, end in enumerate(ends.tolist()):
            if end > begin:
                at = order[begin:end] if end - begin < len(flat) else slice(None)
                found.append(UnionPart(number, at, own[at]))
            begin = end
        return found or [UnionPart(0, slice(None), own)]

    def stretches(self, start: int, stop: int) -> Iterator[tuple[int, range]]:
        """Yield the index of each member that has some of the rows ``[start, stop)``.

        The second item of each pair is the range of these rows in the member's own row numbers.
        """
        self.require_open()
        for number, each in enumerate(self.members):
            begin, end = max(start, each.rows.start), min(stop, each.rows.stop)
            if begin < end:
                yield number, range(begin - each.moved_by, end - each.moved_by)

    def require_left(self, number: int, first: int) -> None:
        """Raise an error unless a member still has all its rows from ``first`` on.

        Raises:
            Overrun: the writer of the ring has overwritten some of these rows.
            StateMismatch: the member has been rewound.
        """
        member = self.members[number]
        require_not_rewound(member)
        if member.reader.ring and first < (least := member.reader.span.start):
            raise Overrun(
                f"{member.path} is a ring, and its writer has overwritten row {first} since this "
                f"union was opened: the ring begins with row {least} now. Open the union again, or "
                "copy the ring when the writer is done."
            )


def _refuse_doubled(members: Sequence[UnionMember]) -> None:
    by_id: dict[str, UnionMember] = {}
    for each in members:
        if (before := by_id.setdefault(each.id, each)) is not each:
            raise RowsDoubled(
                f"{before.path} and {each.path} are the same storage, or copies of the same one, "
                "so each of its rows would occur twice. Leave one out."
            )


def _once(ids: np.ndarray) -> np.ndarray:
    """Return the unique ids, without sorting if their range is narrow."""
    if not len(ids):
        return ids
    least, most = int(ids.min()), int(ids.max())
    if most - least > 4 * len(ids):
        return np.unique(ids)
    there = np.zeros(most - least + 1, np.bool_)
    there[ids - least] = True
    return there.nonzero()[0] + least
