"""Rows that fit a storage and are appended to it: each kind copies itself in its quickest way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from tallyroll.storage.engine.columns import Columns
from tallyroll.storage.engine.private_rows import PrivateRows
from tallyroll.storage.files.commit_header import Header
from tallyroll.storage.rows.batch_check import BatchCheck
from tallyroll.storage.rows.row_refs import RowRefs


class NewRows:
    """Rows to append, one value a column, that were checked against the schema."""

    __slots__ = ("count",)

    count: int
    """The number of rows."""

    in_one_call = False
    """True if :meth:`commit` may do the whole append."""

    def commit(self, columns: Columns, header: Header, slot: int, record: bytes | None) -> bool:
        """Reserve, copy, and write record and head, in one compiled call, and return True.

        The rows are to lie `Columns.in_place` from ``slot`` on. Return False, with nothing done,
        if that takes more calls.
        """
        return False

    def apart_from(self, lent: PrivateRows) -> NewRows:
        """Return the rows, copied if they lie in slots that the append is to overwrite."""
        return self


class CopiedInSteps(NewRows, ABC):
    """Rows that can be appended step by step, and not only by `NewRows.commit`."""

    __slots__ = ()

    @abstractmethod
    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows to slots from ``slot`` on, `Columns.in_place` unless they are arrays."""

    @abstractmethod
    def as_arrays(self) -> ArrayRows:
        """Return the rows as arrays, which can be parted, and written through files."""


class ArrayRows(CopiedInSteps):
    """Arrays [count, ...], or references to large rows, in the order of the columns."""

    __slots__ = ("values",)

    def __init__(self, values: Sequence[np.ndarray | RowRefs]) -> None:
        self.values, self.count = values, len(values[0])

    def part(self, first: int, count: int) -> ArrayRows:
        """Return rows ``[first, first + count)``."""
        return ArrayRows([value[first : first + count] for value in self.values])

    def as_arrays(self) -> ArrayRows:
        """Return the rows themselves."""
        return self

    def apart_from(self, lent: PrivateRows) -> ArrayRows:
        """Return the rows, those that lie in lent memory copied."""
        return ArrayRows(lent.copied(self.values))

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the rows to slots from ``slot`` on that are mapped; large ones through the file."""
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


class TensorRows(CopiedInSteps):
    """Tensors that look like those of an earlier batch, by the addresses of their values."""

    __slots__ = ("_addresses", "_check", "values")

    def __init__(
        self, values: list[torch.Tensor], addresses: list[int], count: int, check: BatchCheck
    ) -> None:
        self.values, self.count = values, count
        self._addresses, self._check = addresses, check

    def copy_to(self, columns: Columns, slot: int) -> None:
        """Copy the memory of each tensor."""
        columns.copy_memory(slot, self.count, self._addresses)

    def as_arrays(self) -> ArrayRows:
        """Return arrays over the same memory."""
        arrays = self._check.tensors(self.values)
        assert arrays is not None  # as of those that they look like
        return ArrayRows(arrays)

    def apart_from(self, lent: PrivateRows) -> NewRows:
        """Return the rows, as arrays if one of them must be copied first."""
        if lent.hold(self._addresses).any():
            return self.as_arrays().apart_from(lent)
        return self
