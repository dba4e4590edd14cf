"""Conversion of an index to row numbers. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import IndexOutOfRange, NotAnAppend


def resolve(index: Any, length: int) -> int | slice | np.ndarray:
    """Return an index as a row number, a forward slice, or an int64 array of any shape.

    Integers may be negative, as in a list. A boolean index needs one value per row.

    Raises:
        IndexOutOfRange: a row does not exist.
        TypeError: the value is not an index of rows.
    """
    if (plain := _plain(index, length)) is not None:
        return plain
    if isinstance(index, tuple):
        if len(index) != 1:
            raise TypeError(
                f"a storage has one dimension, its rows: expected one index, got {len(index)}. "
                "Index the rows first, then their columns."
            )
        index = index[0]
    if isinstance(index, slice):
        return _forward(*index.indices(length), length)
    if isinstance(index, range):
        index = _numbers(index, length)
    elif isinstance(index, torch.Tensor):
        index = _array_of(index)
    elif type(index) is int and not -length <= index < length:  # may exceed 64 bits
        raise _out_of_range(index, length)
    array = np.asarray(index if not isinstance(index, list) or index else np.empty(0, np.int64))
    if array.dtype == np.bool_:
        array = _selected(array, length)
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"rows are indexed by whole numbers, got {type(index).__name__}: {index!r}."
        )
    if array.dtype == np.uint64 and array.size and (high := int(array.max())) >= length:
        raise _out_of_range(high, length)  # int64 might not hold the number
    rows = _within(array.astype(np.int64, copy=False), length)
    return int(rows) if rows.ndim == 0 else rows


def _array_of(index: torch.Tensor) -> np.ndarray:
    try:
        array: np.ndarray = index.numpy(force=True)
    except (RuntimeError, TypeError) as error:
        raise TypeError(
            f"rows are indexed by whole numbers, got a tensor of {index.dtype} on {index.device}, "
            f"{index.layout}: {error}"
        ) from error
    return array


def plain_numbers(index: Any) -> np.ndarray | None:
    """Return an index as an array, without a copy, if it is an int64 array or CPU tensor [n].

    The result is None for any other index.
    """
    if isinstance(index, torch.Tensor) and index.is_cpu and index.dtype is torch.int64:
        try:
            index = index.numpy()
        except (RuntimeError, TypeError):  # not dense
            return None
    if type(index) is not np.ndarray or index.dtype != np.int64 or index.ndim != 1:
        return None
    numbers: np.ndarray = index
    return numbers


def _plain(index: Any, length: int) -> np.ndarray | None:
    """Return valid nonnegative int64 numbers [n], as samplers draw them, or None."""
    numbers = plain_numbers(index)
    if numbers is None:
        return None
    # As unsigned integers, negative numbers are the largest. argmax is twice as fast as max.
    unsigned = numbers.view(np.uint64)
    if not len(numbers) or unsigned.item(unsigned.argmax()) >= length:
        return None
    return numbers


def _numbers(rows: range, length: int) -> np.ndarray:
    """Return the numbers of a range as an array; raise if one of them is out of range.

    The numbers of the range may exceed 64 bits.
    """
    for row in (rows[0], rows[-1]) if rows else ():
        if not -length <= row < length:
            raise _out_of_range(row, length)
    few = len(rows) < 2  # then the bounds and the step may exceed 64 bits
    return np.array(rows, np.int64) if few else np.arange(rows.start, rows.stop, rows.step)


def _forward(start: int, stop: int, step: int, length: int) -> slice | np.ndarray:
    # A longer step selects the same rows, and may exceed 64 bits.
    step = max(-length, min(step, length)) or 1
    # Tensors have no negative strides, so rows in reverse are gathered.
    return slice(start, stop, step) if step > 0 else np.arange(start, stop, step)


def _selected(mask: np.ndarray, length: int) -> np.ndarray:
    if mask.shape != (length,):
        raise IndexOutOfRange(
            f"a boolean index needs one value for each of the {length} rows, got shape "
            f"{list(mask.shape)}."
        )
    return np.flatnonzero(mask)


def _within(rows: np.ndarray, length: int) -> np.ndarray:
    if not rows.size:
        return rows
    low, high = int(rows.min()), int(rows.max())
    if low < -length or high >= length:
        wrong = low if low < -length else high
        raise _out_of_range(wrong, length)
    return np.where(rows < 0, rows + length, rows) if low < 0 else rows


def _out_of_range(row: int, length: int) -> IndexOutOfRange:
    return IndexOutOfRange(f"row {row} is out of range: the storage has {length} rows.")


def consecutive(cursor: Any, ring: int = 0) -> range:
    """Return the slots in a writer's cursor, if they are consecutive.

    TorchRL's writers pass an int or an arange tensor. In a ring of ``ring`` slots, slot 0 follows
    the last one, and the range continues beyond the last slot.

    Raises:
        NotAnAppend: the slots are not consecutive.
    """
    if isinstance(cursor, torch.Tensor):
        cursor = cursor.numpy(force=True)
    if isinstance(cursor, slice):
        return _range_of_slice(cursor)
    if isinstance(cursor, range) and (cursor.step == 1 or len(cursor) < 2):
        return cursor
    rows = np.asarray(cursor)
    if rows.dtype == np.int64 and rows.ndim == 1 and len(rows):
        first = int(rows[0])
        if (rows - first).tobytes() == _counting(len(rows)):
            return range(first, first + len(rows))
    if rows.dtype.kind not in "iu" or not rows.size:
        raise NotAnAppend(f"expected whole numbers as row numbers, got {cursor!r}.")
    if rows.ndim == 0:
        return range(int(rows), int(rows) + 1)
    first, last = int(rows.flat[0]), int(rows.flat[-1])
    steps = np.diff(rows) if rows.ndim == 1 else np.zeros(1)
    if ring:
        steps, last = steps % ring, first + rows.size - 1
        steps[:] = 1 if ring == 1 else steps
    if last - first + 1 != rows.size or not (steps == 1).all():
        raise NotAnAppend(
            "rows on disk are written one after the other, and these indices are not "
            "consecutive. Committed rows cannot be changed; write to another storage instead."
        )
    return range(first, last + 1)


@lru_cache(maxsize=4)
def _counting(count: int) -> bytes:
    """Return the bytes of 0, 1, 2, ..., which are compared faster than differences are computed."""
    return np.arange(count).tobytes()


def _range_of_slice(cursor: slice) -> range:
    if cursor.start is None or cursor.stop is None or cursor.step not in (None, 1):
        raise NotAnAppend(
            f"append: expected a slice with a start, a stop and a step of 1, got {cursor!r}."
        )
    return range(cursor.start, cursor.stop)
