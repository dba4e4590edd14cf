"""One cache for all packed members of a union; one call per array copies rows of all members."""
# ruff: noqa: D102 - `States` documents the methods of states

from __future__ import annotations

import resource
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.columns import Places
from tallyroll.storage.ext.joined.members import UnionMember
from tallyroll.storage.ext.packed.chunk_cache import CachedArray, Chunks, Workers, budgets
from tallyroll.storage.ext.packed.columns import (
    PackedColumn,
    RowRequest,
    RowsColumn,
    StateColumn,
    States,
    Tables,
    copied,
)
from tallyroll.storage.ext.packed.packed_reader import PackedReader, usual_cache_nbytes
from tallyroll.storage.rows.schema import Schema

_SHARE: Final = 4
_MOST_OPEN: Final = 4096
"""Maximum number of files that a union keeps open.

The limit is lower if 1 / `_SHARE` of the files that this process may open is less.
"""


class JoinedChunks:
    """Concatenation of the chunks that several storages have of one array.

    Args:
        parts: the chunks of each storage.
        most: the maximum number of storages whose files stay open.
    """

    def __init__(self, parts: Sequence[Chunks], most: int) -> None:
        counts = [each.layout.chunks for each in parts]
        layout = parts[0].layout
        self.layout = layout.with_rows(sum(counts) * layout.chunk_rows)
        self.nbytes = sum(each.nbytes for each in parts)
        self._parts, self._most, self._stops = parts, most, [*accumulate(counts)]
        self._used: dict[int, None] = {}
        """The parts that may have files open, in order of last use."""

    @property
    def firsts(self) -> list[int]:
        """The position of the first row of each storage. A chunk belongs to one storage only."""
        size = self.layout.chunk_rows
        return [0, *(stop * size for stop in self._stops[:-1])]

    def prepared(self, chunk: int) -> tuple[Chunks, Any, int]:
        """Return the part that has a chunk, the part's ``where``, and the chunk's number in it."""
        number = bisect_right(self._stops, chunk)
        part = self._parts[number]
        own = chunk - self._stops[number] + part.layout.chunks
        self._used.pop(number, None)
        self._used[number] = None
        return part, part.prepared(own), own

    def load(self, where: tuple[Chunks, Any, int], chunk: int) -> np.ndarray:
        """Decompress a chunk."""
        part, prepared, own = where
        return part.load(prepared, own)

    def done(self, *, idle: bool = False) -> None:
        """Close the files of the least recently used parts; if ``idle``, close all files."""
        gone = [*self._used] if idle else [*self._used][: -self._most]
        for number in gone:
            del self._used[number]
            self._parts[number].done(idle=True)
        for number in self._used:
            self._parts[number].done()

    def another(self) -> JoinedChunks:
        """Return the same chunks with separate file handles."""
        return JoinedChunks([each.another() for each in self._parts], self._most)

    def close(self) -> None:
        """Close all files."""
        for each in self._parts:
            each.close()


class JoinedStates(States):
    """Concatenation of the states of several storages.

    Args:
        own: the states of each storage.
        rows: the number of the first row of each storage.
        frames: the frames of all storages.
        places: the position of each storage's first frame in ``frames``.
    """

    def __init__(
        self, own: Sequence[States], rows: Sequence[int], frames: CachedArray, places: Sequence[int]
    ) -> None:
        super().__init__(own[0].path, own[0].layout, lambda _: frames, 0)
        counts = [each.layout.states for each in own]
        self._own, self._rows_before, self._places = own, rows, np.array(places, np.int64)
        self._states_before = np.array([0, *accumulate(counts[:-1])], np.int64)

    def frame_of(self, states: np.ndarray) -> np.ndarray:
        of = self._states_before.searchsorted(states, "right") - 1
        found: np.ndarray = states + (self._places - self._states_before)[of]
        return found

    def _read(self) -> Tables:
        breaks, starts = [], []
        moves = zip(self._rows_before, self._states_before, self._places, strict=True)
        for each, (rows, states, frames) in zip(self._own, moves, strict=True):
            own_breaks, own_starts = each.tables()
            if own_breaks is not None:
                breaks.append(own_breaks + rows)
            if own_starts is not None:
                starts.append(own_starts + np.array([states, frames, 0, 0]))
        return (
            np.concatenate(breaks) if breaks else None,
            np.concatenate(starts) if starts else None,
        )


class JoinedPacks:
    """The columns of packed members; arrays of the same path are concatenated.

    All members therefore share one cache, which has the budget of a single storage.

    Args:
        members: the storages.
        schema: the selected columns.
    """

    def __init__(self, members: Sequence[UnionMember], schema: Schema) -> None:
        there = [(number, each) for number, each in enumerate(members) if len(each.rows)]
        readers = [_packed(each) for _, each in there]
        self._workers = Workers(max(each.threads for each in readers))
        own = [[each.column(key) for each in readers] for key in schema.keys]
        self._arrays = self._joined(own)
        rows = [each.rows.start for _, each in there]
        moves: dict[int, np.ndarray] = {}
        states: dict[CachedArray, JoinedStates] = {}
        self._columns: list[PackedColumn] = []
        self._moves: list[np.ndarray | None] = []
        """Offsets to add to row numbers, by column and member; None if there is nothing to add."""
        for column, of_members in zip(schema.columns, own, strict=True):
            array = self._arrays[of_members[0].source.layout.path]
            firsts = _chunks(array).firsts
            if isinstance(first := of_members[0], StateColumn):
                if array not in states:
                    every = [_states(each) for each in of_members]
                    states[array] = JoinedStates(every, rows, array, firsts)
                self._columns.append(StateColumn(states[array], column, first.is_next, 0))
                self._moves.append(None)
                continue
            if (size := array.layout.chunk_rows) not in moves:
                moves[size] = np.zeros(len(members), np.int64)
                moves[size][[number for number, _ in there]] = np.subtract(firsts, rows)
            self._columns.append(RowsColumn(array, 0))
            self._moves.append(moves[size])

    @classmethod
    def of(cls, members: Sequence[UnionMember], schema: Schema) -> JoinedPacks | None:
        """Join the columns; return None if a member is not packed, or the layouts differ."""
        kinds = set()
        for each in members:
            if len(each.rows):
                if not isinstance(each.reader, PackedReader):
                    return None
                kinds.add(tuple(_kind(each.reader.column(key)) for key in schema.keys))
        return cls(members, schema) if len(kinds) == 1 else None

    def _joined(self, own: Sequence[Sequence[PackedColumn]]) -> dict[tuple[str, ...], CachedArray]:
        """Return the concatenated arrays by path, each with a share of the cache budget."""
        parts = {each[0].source.layout.path: each for each in own}
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // _SHARE
        most = max(1, min(files, _MOST_OPEN) // len(parts))
        chunks = [
            JoinedChunks([each.source.chunks.another() for each in columns], most)
            for columns in parts.values()
        ]
        sizes = [each.layout.chunks * each.layout.chunk_nbytes for each in chunks]
        arrays = [
            CachedArray(each, nbytes, self._workers)
            for each, nbytes in zip(
                chunks, budgets(sizes, usual_cache_nbytes(sum(sizes))), strict=True
            )
        ]
        return dict(zip(parts, arrays, strict=True))

    def gather(
        self, rows: np.ndarray, member: np.ndarray, only: Places | None = None
    ) -> list[np.ndarray]:
        """Return copies [*rows.shape, ...] of rows.

        Args:
            rows: row numbers in the union.
            member: the member of each row.
            only: the positions of the columns to copy; None: all columns.
        """
        moved: dict[int, np.ndarray] = {}
        wanted: list[RowRequest] = []
        for place in range(len(self._columns)) if only is None else only:
            move, at = self._moves[place], rows
            if move is not None:
                if id(move) not in moved:
                    moved[id(move)] = rows + move[member]
                at = moved[id(move)]
            wanted.append(self._columns[place].wanted(at))
        return copied(wanted)

    def take(
        self, place: int, rows: np.ndarray, member: np.ndarray, out: np.ndarray | None
    ) -> np.ndarray:
        """Return the values of one column for rows [*]."""
        move = self._moves[place]
        return self._columns[place].take(rows if move is None else rows + move[member], out)

    def slice(self, place: int, rows: range, member: int) -> np.ndarray:
        """Return the values of one column for consecutive rows of one member."""
        move = self._moves[place]
        by = 0 if move is None else int(move[member])
        return self._columns[place].slice(rows.start + by, rows.stop + by)

    def close(self) -> None:
        """Close all files and stop the threads."""
        self._workers.close()
        for each in self._arrays.values():
            each.close()


def _packed(member: UnionMember) -> PackedReader:
    assert isinstance(member.reader, PackedReader)
    return member.reader


def _chunks(array: CachedArray) -> JoinedChunks:
    assert isinstance(array.chunks, JoinedChunks)
    return array.chunks


def _states(column: PackedColumn) -> States:
    assert isinstance(column, StateColumn)
    return column.states


def _kind(column: PackedColumn) -> tuple[object, ...]:
    """Return the properties of a column that must be the same in all members."""
    layout = column.source.layout
    found = (layout.path, layout.dtype, layout.shape, layout.chunk_rows)
    if not isinstance(column, StateColumn):
        return found
    states = column.states.layout
    nothing = states.breaks is None, states.starts is None
    return (*found, column.is_next, states.n, states.axis, *nothing)
