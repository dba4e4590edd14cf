"""Rows whose memory stays where it is, so that it is checked once and copied by address."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tallyroll.storage.errors import RowsMismatch
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
