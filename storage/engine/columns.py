"""Rows to append, and the memory-mapped columns to which they are copied."""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Final

import numpy as np
import torch

from tallyroll.storage.engine.kernel import Kernel, compiled, copy_table
from tallyroll.storage.engine.pool import ColumnMemory
from tallyroll.storage.errors import RowsMismatch
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.files.mapping import Area
from tallyroll.storage.files.paths import failed
from tallyroll.storage.formats.base import Format
from tallyroll.storage.rows.batch_check import BatchCheck
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.row_refs import LARGE_NBYTES, RowRefs
from tallyroll.storage.rows.schema import Schema


class NewRows:
    """Rows to append, which have a value for every column and were checked against the schema."""

    __slots__ = ("count",)

    count: int
    """The number of rows."""

    in_one_call = False
    """True if :meth:`commit` may perform the whole append."""

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Perform an append in one compiled call: reserve, copy, write the record and the head.

        The slots from ``slot`` on must satisfy `Columns.in_place`. Return True if the append is
        done. Return False, with nothing changed, if the append needs more than one call.
        """
        return False

    def without_overlap(self, lent: PrivateRows) -> NewRows:
        """Return the rows, copied if they are in slots that the append will overwrite."""
        return self


class StepwiseRows(NewRows, ABC):
    """Rows that can also be appended step by step, without `NewRows.commit`."""

    __slots__ = ()

    @abstractmethod
    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows to slots from ``slot`` on.

        Unless the rows are `ArrayRows`, the slots must satisfy `Columns.in_place`.
        """

    @abstractmethod
    def as_arrays(self) -> ArrayRows:
        """Return the rows as arrays, which can be split and written through files."""


class ArrayRows(StepwiseRows):
    """Rows as one array [count, ...], or references to large rows, per column, in column order."""

    __slots__ = ("values",)

    addresses: None = None
    """The values are read as arrays; see `TensorRows`."""

    def __init__(self, values: Sequence[np.ndarray | RowRefs]) -> None:
        self.values, self.count = values, len(values[0])

    def part(self, first: int, count: int) -> ArrayRows:
        """Return rows ``[first, first + count)``."""
        return ArrayRows([value[first : first + count] for value in self.values])

    def as_arrays(self) -> ArrayRows:
        """Return the rows themselves."""
        return self

    def without_overlap(self, lent: PrivateRows) -> ArrayRows:
        """Return the rows, with copies of the arrays that are in lent memory."""
        return ArrayRows(lent.copied(self.values))

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows to mapped slots from ``slot`` on; write large arrays through the file."""
        to = slice(slot, slot + self.count)
        if not columns.has_large and columns.in_place(slot, self.count):
            for column, value in zip(columns.arrays, self.values, strict=False):
                column[to] = value
            return
        for place, (column, value) in enumerate(zip(columns.arrays, self.values, strict=False)):
            if not columns.goes_through_map(value.nbytes) and (
                isinstance(value, RowRefs) or value.flags.c_contiguous
            ):
                columns.write(place, slot, value)
            elif isinstance(value, RowRefs):
                value.copy_to(column[to])
            else:
                column[to] = value


class TensorRows(StepwiseRows):
    """Rows as tensors with the layout of an earlier batch, which are copied by their addresses."""

    __slots__ = ("_check", "addresses", "values")

    def __init__(
        self, values: list[torch.Tensor], addresses: list[int], count: int, check: BatchCheck
    ) -> None:
        self.values, self.count = values, count
        self.addresses, self._check = addresses, check
        """The addresses of the values, in column order."""

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the memory of each tensor."""
        columns.copy_memory(slot, self.count, self.addresses)

    def as_arrays(self) -> ArrayRows:
        """Return arrays over the same memory."""
        arrays = self._check.tensors(self.values)
        assert arrays is not None  # earlier tensors with the same layout could be converted
        return ArrayRows(arrays)

    def without_overlap(self, lent: PrivateRows) -> NewRows:
        """Return the rows, converted to arrays if one of the tensors must be copied first."""
        if lent.hold(self.addresses).any():
            return self.as_arrays().without_overlap(lent)
        return self


_COPIED_NBYTES: Final = 2**16
"""Size in bytes up to which a slice is copied. Such a copy takes no longer than maps would."""
_MOST_MAPS: Final = 2**14
"""The maximum number of maps that slices hold in a process, out of the 65,000 or so that the system
permits (see `maps_left`). Further slices are copied."""
_KEPT_AREAS: Final = 2

_lent: dict[int, int] = {}
"""The number of maps of each living lease, by the ``id()`` of the lease."""


class _Lease:
    """Array of bytes over a lent area, which returns the area once nothing refers to the array."""

    def __init__(self, area: Area, lender: PrivateRows) -> None:
        region = area.region
        self._area, self._lender = area, lender
        self.begin, self.end = region.address, region.address + region.mapped
        self.__array_interface__ = {
            "version": 3,
            "shape": (region.mapped,),
            "typestr": "|u1",
            "data": (region.address, False),
        }
        _lent[id(self)] = region.maps

    def __del__(self) -> None:
        _lent.pop(id(self), None)
        self._lender.reclaim(self._area)


class PrivateRows:
    """Lends callers the rows of a storage as private memory, which they may change.

    Args:
        format: the files of the storage.
        schema: the schema of the storage.
    """

    def __init__(self, format: Format, schema: Schema) -> None:
        self._format = format
        self._columns = [(c.numpy_dtype, c.shape, c.row_nbytes) for c in schema.columns]
        self._free: list[Area] = []
        self._leases: list[weakref.ref[_Lease]] = []
        self._begin = self._end = np.empty(0, np.uintp)
        self._closed = False
        self.watches = False
        """True if `hold` may find an address in a lent area."""

    def rows(
        self, columns: Sequence[np.ndarray], slots: slice, only: Places | None, *, watched: bool
    ) -> list[np.ndarray]:
        """Return ``slots`` of the columns as arrays that the caller may change.

        ``only`` selects some of the ``columns``. If ``watched`` is True, `hold` recognises the
        memory of the arrays.
        """
        places = range(len(columns)) if only is None else only
        start, _, step = slots.indices(len(columns[0]))
        count = len(range(len(columns[0]))[slots])
        chosen = [self._columns[place] for place in places]
        nbytes = count * sum(row_nbytes for _, _, row_nbytes in chosen)
        if nbytes <= _COPIED_NBYTES or sum(list(_lent.values())) >= _MOST_MAPS:
            return [columns[place][slots].copy() for place in places]
        area = self._area(start + (count - 1) * step + 1)
        if area is None:
            return [columns[place][slots].copy() for place in places]
        lease = _Lease(area, self)
        if watched:
            self._watch(lease)
        memory = np.asarray(lease)
        found = []
        for place, (dtype, shape, row_nbytes) in zip(places, chosen, strict=True):
            at = area.starts[place] + start * row_nbytes
            if step == 1:
                found.append(np.ndarray((count, *shape), dtype, memory, at))
            else:
                rows = np.ndarray(((count - 1) * step + 1, *shape), dtype, memory, at)
                found.append(rows[::step])
        return found

    def _area(self, rows: int) -> Area | None:
        """Return an area of ``rows`` rows, or None if the files have been deleted."""
        try:
            free = self._free.pop()
        except IndexError:
            free = None
        if free is not None and free.room >= rows:
            return free
        try:
            return self._format.private(rows, free)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(self._format.path, error, 0) from error

    def reclaim(self, area: Area) -> None:
        """Discard the changes to an unreferenced area, and keep it for reuse or drop it."""
        if not self._closed and len(self._free) < _KEPT_AREAS and area.region.renew():
            self._free.append(area)

    def close(self) -> None:
        """Stop lending. Lent areas stay valid."""
        self._closed = True
        self._free.clear()

    # --- rings: rows in slots that are about to be overwritten ------------------------------------

    def _watch(self, lease: _Lease) -> None:
        living = [one for ref in self._leases if (one := ref()) is not None] + [lease]
        self._leases = [weakref.ref(one) for one in living]
        self.watches = True
        # Leases that end later stay in these arrays, which causes at most a needless copy.
        self._begin = np.array([one.begin for one in living], np.uintp)
        self._end = np.array([one.end for one in living], np.uintp)

    def hold(self, addresses: Sequence[int]) -> np.ndarray:
        """Return a mask of the ``addresses`` that are in a lent area, bool [addresses]."""
        at = np.array(addresses, np.uintp)[:, None]
        within: np.ndarray = np.any((at >= self._begin) & (at < self._end), axis=1)
        return within

    def copied(self, arrays: Sequence[np.ndarray | RowRefs]) -> list[np.ndarray | RowRefs]:
        """Return ``arrays``, with copies of those that are in a lent area."""
        # References to rows point to memory that is not lent. Address 0 is in no area.
        addresses = [a.ctypes.data if isinstance(a, np.ndarray) else 0 for a in arrays]
        held = self.hold(addresses)
        return [np.array(a, order="C") if own else a for a, own in zip(arrays, held, strict=True)]


RowIndex = range | np.ndarray
"""Row numbers in the order of copying: a range of step 1, or intp [n], which must be in bounds."""


class FixedRows:
    """Arrays [rows, ...], one per column, whose rows are appended to a storage a few at a time.

    Args:
        schema: the schema of the storage.
        columns: C-contiguous arrays by key. Their memory must not move, but its contents may change
            between two appends.

    Raises:
        RowsMismatch: the columns, dtypes or shapes differ from the schema.
    """

    def __init__(self, schema: Schema, columns: Mapping[Key, np.ndarray]) -> None:
        self.arrays: list[np.ndarray] = []
        wrong = [f"{format_key(key)} is not a column" for key in columns if key not in schema.keys]
        for column in schema.columns:
            array = columns.get(column.key)
            if (
                array is None
                or array.dtype != column.numpy_dtype
                or array.shape[1:] != column.shape
                or not array.flags.c_contiguous
            ):
                got = None if array is None else f"{array.dtype} {list(array.shape[1:])}"
                wanted = f"{column.numpy_dtype} {list(column.shape)}"
                wrong.append(
                    f"{format_key(column.key)} is {got}, expected a contiguous array of {wanted}"
                )
                continue
            self.arrays.append(array)
        if wrong:
            raise RowsMismatch(f"rows do not fit their storage: {'; '.join(wrong)}.")

    @cached_property
    def addresses(self) -> list[int]:
        """The address of the first row of each column."""
        return [array.ctypes.data for array in self.arrays]

    def gather(self, index: RowIndex) -> list[np.ndarray | RowRefs]:
        """Return the rows ``index`` of each column.

        The rows are views if ``index`` is a range, and otherwise copies, or references to large
        rows.
        """
        if isinstance(index, range):
            return [array[index.start : index.stop] for array in self.arrays]
        return [
            RowRefs([array], index)
            if array.nbytes >= LARGE_NBYTES * len(array)
            else array.take(index, axis=0)
            for array in self.arrays
        ]


class IndexedRows(StepwiseRows):
    """Rows of a `FixedRows`, selected by an index."""

    __slots__ = ("_index", "_memory")

    in_one_call = True

    def __init__(self, memory: FixedRows, index: RowIndex) -> None:
        self._memory, self._index, self.count = memory, index, len(index)

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Commit a range of rows and a record in one call, unless the last commit was interrupted.

        Return False, with nothing done, in other cases.
        """
        index, kernel = self._index, columns.one_call
        if not record or type(index) is not range or kernel is None:
            return False
        table, known = columns.table_of(self._memory), header.known
        places, first = header.addresses, index.start
        return kernel.commit_rows(table, slot, first, self.count, places, known.address, record)

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows of each column in the order of the index."""
        kernel, memory, index = columns.kernel, self._memory, self._index
        if kernel is not None:
            table = columns.table_of(memory)
            if isinstance(index, range):
                kernel.copy_rows(table, slot, index.start, self.count)
            else:
                kernel.gather_rows(table, slot, index, len(memory.arrays[0]))
        elif isinstance(index, range):
            starts = zip(memory.addresses, columns.row_nbytes, strict=True)
            first = index.start
            columns.copy_memory(slot, self.count, [at + first * nbytes for at, nbytes in starts])
        else:
            to = slice(slot, slot + self.count)
            for column, array in zip(columns.arrays, memory.arrays, strict=True):
                # The index is within bounds. With mode "clip", NumPy writes directly to out.
                array.take(index, axis=0, out=column[to], mode="clip")

    def as_arrays(self) -> ArrayRows:
        """Return views or copies of the rows, or references to large ones."""
        return ArrayRows(self._memory.gather(self._index))


_WRITE_NBYTES = 2**14
"""Size in bytes from which on arrays are written through the file. Through the map, every new page
causes a fault: we measured 0.7 to 1.6 GB/s on new pages, and 5 to 8 GB/s with `os.pwrite`."""
_GATHER_NBYTES = 2**18
"""Size in bytes of the pieces in which gathered rows are written, which fit into the CPU cache."""
_ALONE_NBYTES = 2**14
"""Size in bytes from which on copies release the GIL, which costs as much as a small copy."""


Places = tuple[int, ...]
"""A selection of columns, by their positions in the schema."""


def _memmove(library: type[ctypes.CDLL]) -> Callable[[int, int, ctypes.c_size_t], None]:
    move = library(None).memmove
    move.argtypes, move.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return move


_move, _move_alone = _memmove(ctypes.CDLL), _memmove(ctypes.PyDLL)


class Columns:
    """The mapped columns of a storage.

    Args:
        format: the files of the storage.
        schema: the schema of the storage.
        arrays: one array [room, ...] per column, over maps of the files.
        warm: the initial value of the attribute `warm`.
        one_call: permit commits in one call of the extension, if it is available.
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
        """The extension, while this process may commit rows in one call, else None."""
        self.room = len(arrays[0])
        """The number of mapped slots."""
        self.warm = warm
        """True if this process has written every slot, so that its pages are mapped."""
        self._format = format
        self.row_nbytes = [column.row_nbytes for column in schema.columns]
        self._widest = max(self.row_nbytes)
        self.has_large = self._widest >= LARGE_NBYTES
        """True if a column has large rows, which may be passed as references."""
        self._count = -1
        self._moves: list[tuple[int, int, ctypes.c_size_t]] = []
        self._move = _move
        self._tables: dict[FixedRows, bytes] = {}

    def mark_warm(self) -> None:
        """Note that this process has written every slot."""
        self.warm = True

    def refuse_one_call(self) -> None:
        """Refuse commits in one call of the extension from now on."""
        self.one_call = None

    def in_place(self, slot: int, count: int) -> bool:
        """Return True if ``count`` rows from ``slot`` on should be copied through the map."""
        # A few rows go through the map even if its pages are new.
        few = count * self._widest < _WRITE_NBYTES
        return (few or self.warm) and slot + count <= self.room

    def copy_memory(self, slot: int, count: int, addresses: Sequence[int]) -> None:
        """Copy ``count`` rows of each column to slots from ``slot`` on.

        The slots must satisfy `in_place`. ``addresses`` has the address of the first row of each
        column, and the rows of a column are contiguous.
        """
        if count != self._count:
            self._plan(count)
        move = self._move
        for (base, row_nbytes, nbytes), address in zip(self._moves, addresses, strict=True):
            move(base + slot * row_nbytes, address, nbytes)

    def goes_through_map(self, nbytes: int) -> bool:
        """Return True if arrays of ``nbytes`` bytes go through the map instead of the file."""
        return self.warm or nbytes < _WRITE_NBYTES

    def write(self, place: int, slot: int, values: np.ndarray | RowRefs) -> None:
        """Write values of a column to slots from ``slot`` on, through the file."""
        if isinstance(values, np.ndarray):
            self._format.write(place, slot, values)
            return
        step = max(1, _GATHER_NBYTES // self._widest)
        for at in range(0, len(values), step):
            self._format.write(place, slot + at, np.asarray(values[at : at + step]))

    def table_of(self, rows: FixedRows) -> bytes:
        """Return the table of `Kernel.copy_rows` for ``rows``, from a cache."""
        table = self._tables.get(rows)
        if table is None:
            table = copy_table(self.arrays, rows.arrays, self.row_nbytes)
            self._tables[rows] = table
        return table

    def take_compiled(
        self,
        slots: np.ndarray,
        room: ColumnMemory,
        only: Places | None = None,
        below: int | None = None,
    ) -> bool:
        """Copy ``slots`` of each column to the arrays [*slots.shape, ...] of ``room``, in one call.

        ``only`` selects some of the columns. Return False, with nothing copied, if there is no
        kernel, if ``slots`` is not contiguous intp, or if a slot does not exist or is not below
        ``below``.
        """
        kernel = self.kernel
        if kernel is None or slots.dtype != np.intp or not slots.flags.c_contiguous:
            return False
        table = room.table
        if table is None or room.of is not self:
            sources, row_nbytes = self.arrays, self.row_nbytes
            if only is not None:
                sources = [sources[place] for place in only]
                row_nbytes = [row_nbytes[place] for place in only]
            table = copy_table(room.arrays, sources, row_nbytes)
            room.keep_table(table, self)
        try:
            kernel.gather_rows(table, 0, slots, self.room if below is None else below)
        except IndexError:  # caused by links in a damaged storage
            return False
        return True

    @cached_property
    def _bases(self) -> list[int]:
        assert all(array.flags.c_contiguous for array in self.arrays)
        return [array.ctypes.data for array in self.arrays]

    def _plan(self, count: int) -> None:
        self._count = -1  # if interrupted, the next call plans again
        self._moves = [
            (base, nbytes, ctypes.c_size_t(count * nbytes))
            for base, nbytes in zip(self._bases, self.row_nbytes, strict=True)
        ]
        self._move = _move_alone if count * self._widest < _ALONE_NBYTES else _move
        self._count = count
