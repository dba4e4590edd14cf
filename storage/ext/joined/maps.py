"""Files of many storages, mapped consecutively so that each column is one array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.columns import Columns, Places
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.engine.ring import in_use
from tallyroll.storage.errors import StorageError
from tallyroll.storage.ext.joined.members import UnionMember
from tallyroll.storage.files.mapping import PAGE_NBYTES, Region, maps_left
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.schema import Schema

_APART: Final = PAGE_NBYTES
"""Each member begins at a multiple of this number of rows.

The files of a member then begin at a page boundary for any row size.
"""


class JoinedMaps:
    """The columns of memory-mapped members, each as one array with gaps between the members.

    One call of the C extension can then copy rows of any members. The gaps use address space
    only.

    Args:
        members: the storages.
        schema: the selected columns.
        regions: the address space of each column, into which the files of all members are mapped.
        begins: the first slot of each member.
    """

    def __init__(
        self,
        members: Sequence[UnionMember],
        schema: Schema,
        regions: list[Region],
        begins: list[int],
    ) -> None:
        slots = max(1, begins[-1] + _slots_of(members[-1]))
        arrays = [
            region.array(column.numpy_dtype, (slots, *column.shape))
            for region, column in zip(regions, schema.columns, strict=True)
        ]
        reader = members[0].reader
        assert isinstance(reader, FileReader)
        self._columns = Columns(reader.format, schema, arrays, warm=False, one_call=False)
        self._schema = schema
        self._pools: dict[Places | None, BufferPool] = {}
        self._begins = np.array(begins, np.int64)
        self._moves = np.array([each.moved_by for each in members], np.int64)
        self._to_slots = self._begins - self._moves
        rings = np.array([each.reader.ring for each in members], np.int64)
        self._rings = rings if rings.any() else None

    @classmethod
    def of(cls, members: Sequence[UnionMember], schema: Schema) -> JoinedMaps | None:
        """Map the members; return None if one of them is not memory-mapped, or mapping fails."""
        formats = []
        for each in members:
            reader = each.reader
            if not isinstance(reader, FileReader) or reader.once:
                return None
            if not isinstance(files := reader.format, MemmapFormat):
                return None
            formats.append(files)
        columns = sum(len(files.schema.columns) for files in formats)
        if 2 * columns > maps_left():
            return None
        begins, slot = [], 0
        for each in members:
            begins.append(slot)
            slot += -(-_slots_of(each) // _APART) * _APART
        try:
            wanted = {c.key: Region(max(1, slot) * c.row_nbytes, "read") for c in schema.columns}
            for each, files, begin in zip(members, formats, begins, strict=True):
                if slots := _slots_of(each):
                    own = files.schema.columns
                    files.map_into(
                        [wanted.get(c.key) for c in own],
                        slots,
                        [begin * c.row_nbytes for c in own],
                    )
            if not wanted or not slot:
                return None
            return cls(members, schema, [wanted[key] for key in schema.keys], begins)
        except (OSError, ValueError, StorageError):
            return None  # members are then read separately, and a faulty member raises its error

    def _slots_of(self, rows: np.ndarray, member: np.ndarray) -> Any:
        """Convert row numbers [*] of the union to slots, given the ``member`` [*] of each row."""
        if self._rings is None:
            return rows + self._to_slots[member]
        own, rings = rows - self._moves[member], self._rings[member]
        own = np.where(rings > 0, own % np.maximum(rings, 1), own)
        return own + self._begins[member]

    def gather(
        self, rows: np.ndarray, member: np.ndarray, only: Places | None = None
    ) -> list[np.ndarray]:
        """Return copies [*rows.shape, ...] of rows, in buffers from a pool.

        Args:
            rows: row numbers in the union.
            member: the member of each row.
            only: the positions of the columns to copy; None: all columns.
        """
        slots = self._slots_of(rows, member)
        columns, arrays = self._schema.columns, self._columns.arrays
        if only is not None:
            columns = tuple(columns[place] for place in only)
            arrays = [arrays[place] for place in only]
        pool = self._pools.get(only)
        if pool is None:
            pool = BufferPool([(each.numpy_dtype, each.shape) for each in columns])
            self._pools[only] = pool
        found, room = pool.room(slots.shape)
        if not self._columns.take_compiled(slots, room, only):
            for array, out in zip(arrays, found, strict=True):
                array.take(slots, axis=0, out=out, mode="clip")
        return found

    def take(
        self, place: int, rows: np.ndarray, member: np.ndarray, out: np.ndarray | None
    ) -> np.ndarray:
        """Return the values of one column for rows [*]."""
        slots = self._slots_of(rows, member)
        found: np.ndarray = self._columns.arrays[place].take(slots, axis=0, out=out, mode="clip")
        return found


def _slots_of(member: UnionMember) -> int:
    return in_use(member.span.stop, member.reader.ring)
