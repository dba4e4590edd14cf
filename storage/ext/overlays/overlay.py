"""Public interface of one overlay: values by storage index or by row number."""

from __future__ import annotations

import time
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.errors import IndexOutOfRange, RowsMismatch
from tallyroll.storage.ext.overlays.header import as_array, as_tensor
from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import numbers_of
from tallyroll.storage.rows.dtypes import exact_tensor
from tallyroll.storage.rows.keys import Key, format_key

_PATIENCE_SECONDS: Final = 1.0


class Overlay:
    """Column that can be rewritten row by row, next to rows that never change.

    `DiskStorage.overlay` creates or opens an overlay. ``overlay[index]`` reads values and
    ``overlay[index] = values`` writes them. A value belongs to one row permanently. A row without
    a value has the fill. So has a row that replaced another row in the same slot of a ring.
    After the process is killed, each row has the value of its last completed write, or the value
    of the write in progress.

    Examples:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from tallyroll.storage import MemmapStorage
        >>> storage = MemmapStorage(max_size=4)
        >>> rows = storage.extend(TensorDict({"x": torch.arange(3)}, [3]))
        >>> value = storage.overlay("value", torch.float32, fill=-1)
        >>> value[1:] = torch.tensor([0.5, 0.25])
        >>> print(value[:], storage.get([0, 1], keys=["x", "value"])["value"])
        tensor([-1.0000,  0.5000,  0.2500]) tensor([-1.0000,  0.5000])
        >>> storage.close()
    """

    def __init__(self, reader: FileReader, file: OverlayFile) -> None:
        self._reader, self._file = reader, file

    @property
    def key(self) -> Key:
        """The key as a tuple of names."""
        return self._file.key

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._file.header.column.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one row's value."""
        return self._file.header.column.shape

    @property
    def fill(self) -> bool | int | float | complex:
        """The value of a row for which no value has been written."""
        return self._file.header.fill_value

    @property
    def writable(self) -> bool:
        """True if this object may write values."""
        return self._file.writable

    def __len__(self) -> int:
        return len(self._reader.span)

    def get(self, index: Any = None, *, rows: Any = None) -> torch.Tensor:
        """Return copies of values, one per row, by index or by row number.

        Args:
            index: an index as for `DiskStorage.get`.
            rows: row numbers, to use instead of ``index``. They count all rows that were ever
                written, as ``storage.span`` does.

        Raises:
            IndexOutOfRange: a row does not exist.
            Overrun: a writer overwrites the ring, or the values, faster than they are read.
        """
        self._reader.require_open()
        if rows is not None:
            _require_one(index)
            numbers = _numbers(rows)
            found = self._file.take(numbers)
            self._require_there(numbers)
            return as_tensor(found, self._file.header.column)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            numbers = numbers_of(self._reader, index)
            found = self._file.take(numbers)
            if _are_in(numbers, self._reader.span):
                return as_tensor(found, self._file.header.column)
            if time.monotonic() > deadline:
                raise self._reader.overrun(f"these {numbers.size} rows")

    def set(self, index: Any = None, values: Any = None, *, rows: Any = None) -> int:
        """Write values of some rows, and return the number of rows written.

        Args:
            index: an index as for `DiskStorage.get`.
            values: a tensor or array on any device with one value per row and the overlay's dtype.
                One number for all rows and a sequence of numbers are also accepted. Floats are
                rounded to the precision of the dtype. A number that the dtype cannot represent is
                refused, because it is out of range, has a fraction, is NaN, or is an integer that
                would be rounded. If a row occurs twice, its last value wins.
            rows: row numbers as for `get`. Rows that are gone from a ring are skipped and not
                counted, because the writer may have overwritten them since they were sampled.

        Raises:
            IndexOutOfRange: a row does not exist, or does not exist yet.
            RowsMismatch: the dtype or the shape of ``values`` does not match the overlay.
            ReadOnlyStorage: the overlay was opened read-only.
            StorageLocked: another process, or another storage object, writes to the overlay.
            StorageFull: there is no space. No value has changed.
        """
        self._reader.require_open()
        self._file.require_right()
        if rows is None:
            numbers = numbers_of(self._reader, index)
            given = self._as_array(values, numbers.shape)
            self._file.put(numbers.reshape(-1), given)
            return int(numbers.size)
        _require_one(index)
        numbers = _numbers(rows)
        given = self._as_array(values, numbers.shape)
        numbers = numbers.reshape(-1)
        span = self._reader.span
        if numbers.size and (int(numbers.max()) >= span.stop or int(numbers.min()) < 0):
            self._require_there(numbers)
        left = numbers >= span.start
        if not left.all():
            numbers, given = numbers[left], given[left]
        self._file.put(numbers, given)
        return len(numbers)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.get(index)

    def __setitem__(self, index: Any, values: Any) -> None:
        self.set(index, values)

    def flush(self) -> None:
        """Flush all values to the disk, so that they survive a power failure."""
        self._reader.require_open()
        self._file.flush()

    def _require_there(self, numbers: np.ndarray) -> None:
        span = self._reader.span
        if not _are_in(numbers, span):
            raise IndexOutOfRange(
                f"rows: expected row numbers of {self._reader.path} from {span.start} to "
                f"{span.stop - 1}, got {numbers.min()} to {numbers.max()}."
            )

    def _as_array(self, values: Any, batch: tuple[int, ...]) -> np.ndarray:
        """Validate ``values`` and return them as one array [n, *shape]."""
        column, name = self._file.header.column, format_key(self.key)
        if isinstance(values, np.ndarray | np.generic):
            values = torch.as_tensor(np.asarray(values))
        if not isinstance(values, torch.Tensor):
            try:
                values = exact_tensor(values, column.dtype)
            except (TypeError, ValueError, RuntimeError, OverflowError) as error:
                raise RowsMismatch(
                    f"overlay {name}: expected values of {column.dtype_name}, got "
                    f"{type(values).__name__}: {error}. Nothing was written. Convert the values."
                ) from error
        elif values.dtype != column.dtype:
            got = str(values.dtype).removeprefix("torch.")
            raise RowsMismatch(
                f"overlay {name}: expected values of {column.dtype_name}, got {got}. Nothing was "
                "written. Convert the values."
            )
        wanted = (*batch, *column.shape)
        if values.ndim and tuple(values.shape) != wanted:
            raise RowsMismatch(
                f"overlay {name}: expected values of shape {list(wanted)}, got "
                f"{list(values.shape)}. Nothing was written. Give one value per row, or one "
                "number for all rows."
            )
        array = np.broadcast_to(as_array(values, column), wanted)
        return array.reshape((-1, *column.shape))

    def __repr__(self) -> str:
        column = self._file.header.column
        return (
            f"{type(self).__name__}({format_key(self.key)!r}, {column.dtype_name}, "
            f"{list(column.shape)}, fill={self.fill!r}, {self._reader.path})"
        )


def _require_one(index: Any) -> None:
    if index is not None:
        raise TypeError("expected an index or rows=, got both. Give one of them.")


def _are_in(numbers: np.ndarray, span: range) -> bool:
    return not numbers.size or bool(numbers.min() >= span.start and numbers.max() < span.stop)


def _numbers(rows: Any) -> np.ndarray:
    """Return row numbers as int64 [*]."""
    if isinstance(rows, torch.Tensor):
        rows = rows.numpy(force=True)
    found = np.asarray(rows)
    if found.size == 0:
        return found.astype(np.int64)
    if found.dtype.kind not in "iu":
        raise TypeError(f"rows: expected whole numbers, got {found.dtype}.")
    return found.astype(np.int64, copy=False)
