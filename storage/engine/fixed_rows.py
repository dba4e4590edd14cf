"""Rows whose memory stays where it is, so that it is checked once and copied by address."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tallyroll.storage.engine.columns import Columns
from tallyroll.storage.engine.new_rows import ArrayRows, CopiedInSteps
from tallyroll.storage.errors import RowsMismatch
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.rows.keys import Key, spell
from tallyroll.storage.rows.row_refs import LARGE_NBYTES, RowRefs
from tallyroll.storage.rows.schema import Schema

RowIndex = range | np.ndarray
"""Which rows, in which order: a range of step 1, or intp [n]. The caller keeps it in bounds."""


class FixedRows:
    """Arrays [rows, ...], one a column, of which some rows at a time are appended to a storage.

    Args:
        schema: of the storage.
        columns: C-contiguous arrays by key. Their memory must not move; what is in it may change
            between two appends.

    Raises:
        RowsMismatch: not exactly the schema's columns, or another dtype or shape.
    """

    def __init__(self, schema: Schema, columns: Mapping[Key, np.ndarray]) -> None:
        self.arrays: list[np.ndarray] = []
        wrong = [f"{spell(key)} is not a column" for key in columns if key not in schema.keys]
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
                wrong.append(f"{spell(column.key)} is {got}, expected {wanted}, contiguous")
                continue
            self.arrays.append(array)
        if wrong:
            raise RowsMismatch(f"rows do not fit their storage: {'; '.join(wrong)}.")

    @cached_property
    def addresses(self) -> list[int]:
        """The address of the first row of each column."""
        return [array.ctypes.data for array in self.arrays]

    def taken(self, index: RowIndex) -> list[np.ndarray | RowRefs]:
        """Return some rows of each column: a view of a range, else a copy, or references to
        large rows.
        """
        if isinstance(index, range):
            return [array[index.start : index.stop] for array in self.arrays]
        return [
            RowRefs([array], index)
            if array.nbytes >= LARGE_NBYTES * len(array)
            else array.take(index, axis=0)
            for array in self.arrays
        ]


class IndexedRows(CopiedInSteps):
    """The rows of fixed memory that an index names."""

    __slots__ = ("_index", "_memory")

    in_one_call = True

    def __init__(self, memory: FixedRows, index: RowIndex) -> None:
        self._memory, self._index, self.count = memory, index, len(index)

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Commit a range of rows and a record in one call, if the last commit was not cut off."""
        index, kernel = self._index, columns.one_call
        if not record or type(index) is not range or kernel is None:
            return False
        table, known = columns.table_of(self._memory), header.known
        places, first = header.addresses, index.start
        return kernel.commit_rows(table, slot, first, self.count, places, known.address, record)

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows of each column, in the order of the index."""
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
                # The index is within bounds: "clip" is the mode in which NumPy writes to out
                # directly.
                array.take(index, axis=0, out=column[to], mode="clip")

    def as_arrays(self) -> ArrayRows:
        """Return views or copies of the rows, or references to large ones."""
        return ArrayRows(self._memory.taken(self._index))
