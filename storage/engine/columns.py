"""Columns in memory maps: when rows are copied into the map, and when written to the file."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tallyroll.storage.engine.kernel import Kernel, compiled, copy_table
from tallyroll.storage.engine.pool import Room
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.row_refs import LARGE_NBYTES, RowRefs
from tallyroll.storage.rows.schema import Schema

if TYPE_CHECKING:
    from tallyroll.storage.engine.fixed_rows import FixedRows

_WRITE_NBYTES = 2**14
"""Arrays from this size on are written through the file. Through the map every new page costs
a fault: 0.7 to 1.6 GB/s were measured on new pages, and 5 to 8 GB/s with `os.pwrite`."""
_GATHER_NBYTES = 2**18
"""Gathered rows are written through the file in pieces that stay in the processor's cache."""
_ALONE_NBYTES = 2**14
"""Larger copies let other threads run; letting them costs as much as copying a small array."""


Places = tuple[int, ...]
"""Some of the columns, by their places in the schema."""


def _memmove(library: type[ctypes.CDLL]) -> Callable[[int, int, ctypes.c_size_t], None]:
    move = library(None).memmove
    move.argtypes, move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return move


_move, _move_alone = _memmove(ctypes.CDLL), _memmove(ctypes.PyDLL)


class Columns:
    """The columns of a storage, mapped.

    Args:
        format: its files.
        schema: its columns.
        arrays: one [room, ...] a column, over maps of the files.
        warm: as the attribute.
        one_call: rows may be committed in one call, if there is an extension for it.
    """

    def __init__(
        self,
        format: Format,
        schema: Schema,
        arrays: list[np.ndarray],
        *,
        warm: bool,
        one_call: bool,
    ) -> None:
        self.arrays = arrays
        self.kernel: Kernel | None = compiled()
        self.one_call = self.kernel if one_call else None
        """The extension, while this process may commit rows in one call of it."""
        self.room = len(arrays[0])
        """Slots that are mapped."""
        self.warm = warm
        """Every slot was written by this process, so that its pages are mapped."""
        self._format = format
        self.row_nbytes = [column.row_nbytes for column in schema.columns]
        self._widest = max(self.row_nbytes)
        self.has_large = self._widest >= LARGE_NBYTES
        """Some rows are large, so that they may come as references."""
        self._count = -1
        self._moves: list[tuple[int, int, ctypes.c_size_t]] = []
        self._move = _move
        self._tables: dict[FixedRows, bytes] = {}

    def in_place(self, slot: int, count: int) -> bool:
        """Return whether ``count`` rows fit into the map from ``slot`` on, and go through it."""
        # A few go through the map although its pages are new.
        few = count * self._widest < _WRITE_NBYTES
        return (few or self.warm) and slot + count <= self.room

    def copy_memory(self, slot: int, count: int, addresses: Sequence[int]) -> None:
        """Copy ``count`` rows of each column to slots from ``slot`` on, which must be `in_place`.

        The rows of a column lie one after the other, from its address on.
        """
        if count != self._count:
            self._plan(count)
        move = self._move
        for (base, row_nbytes, nbytes), address in zip(self._moves, addresses, strict=True):
            move(base + slot * row_nbytes, address, nbytes)

    def goes_through_map(self, nbytes: int) -> bool:
        """Return whether an array of so many bytes goes through the map, and not the file."""
        return self.warm or nbytes < _WRITE_NBYTES

    def write(self, place: int, slot: int, values: np.ndarray | RowRefs) -> None:
        """Write the values of a column to slots from ``slot`` on, through the file."""
        if isinstance(values, np.ndarray):
            self._format.write(place, slot, values)
            return
        step = max(1, _GATHER_NBYTES // self._widest)
        for at in range(0, len(values), step):
            self._format.write(place, slot + at, np.asarray(values[at : at + step]))

    def table_of(self, rows: FixedRows) -> bytes:
        """Return the table of `Kernel.copy_rows` for ``rows``, made once."""
        table = self._tables.get(rows)
        if table is None:
            table = copy_table(self._bases, rows.addresses, self.row_nbytes)
            self._tables[rows] = table
        return table

    def take_compiled(
        self,
        slots: np.ndarray,
        room: Room,
        only: Places | None = None,
        below: int | None = None,
    ) -> bool:
        """Copy slots of each column, or of some, to the arrays [*slots.shape, ...] of ``room``.

        Return False, with nothing copied, without a kernel or if a slot does not exist, or is not
        below ``below``.
        """
        kernel = self.kernel
        if kernel is None or slots.dtype != np.intp or not slots.flags.c_contiguous:
            return False
        if room.table is None or room.of is not self:
            sources, row_nbytes = self._bases, self.row_nbytes
            if only is not None:
                sources = [sources[place] for place in only]
                row_nbytes = [row_nbytes[place] for place in only]
            room.table, room.of = copy_table(room.addresses, sources, row_nbytes), self
        try:
            kernel.gather_rows(room.table, 0, slots, self.room if below is None else below)
        except IndexError:  # from links in a damaged storage
            return False
        return True

    @cached_property
    def _bases(self) -> list[int]:
        assert all(array.flags.c_contiguous for array in self.arrays)
        return [array.ctypes.data for array in self.arrays]

    def _plan(self, count: int) -> None:
        self._count = -1  # after an interrupt the next call plans again
        self._moves = [
            (base, nbytes, ctypes.c_size_t(count * nbytes))
            for base, nbytes in zip(self._bases, self.row_nbytes, strict=True)
        ]
        self._move = _move_alone if count * self._widest < _ALONE_NBYTES else _move
        self._count = count
