"""Rows in the memory of a device, and their reader."""
# ruff: noqa: D102 - `RowReader` and `ColumnReader` document these methods

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.engine.available_memory import available_bytes
from tallyroll.storage.engine.ring import first_valid, pieces
from tallyroll.storage.errors import IndexOutOfRange, NotEnoughMemory, NotInitialised, StorageClosed
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader, columns_of
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.indexing import resolve
from tallyroll.storage.rows.keys import Key, Keys
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.rows.transfers import HOST, move_columns, same_place
from tallyroll.storage.trajectories.index import TrajectoryIndex

FORMAT: Final = "tallyroll.device"


class DeviceColumn(ColumnReader):
    """Column of a ring on a device, read by the host."""

    def __init__(self, rows: DeviceRows, key: Key) -> None:
        self._rows, self._key = rows, key

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        (found,) = self._rows.copies(rows, [self._key])
        if out is None:
            return found
        np.copyto(out, found)
        return out

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self.take(np.arange(start, stop))


class DeviceRows(RowReader):
    """Ring of columns in the memory of a device, and the counts of its rows.

    Row r is in slot ``r % ring`` of each column. The methods of `RowReader` return arrays on the
    host. `at_slots` returns tensors on the device.
    """

    def __init__(self, ring: int, device: torch.device, durable: RowReader | None = None) -> None:
        """Make a ring of ``ring`` slots; ``durable`` reads the rows of its mirror."""
        self.path, self.ring, self.device = Path(f"DeviceStorage on {device}"), ring, device
        self.turn = threading.RLock()
        """Lock that is held while rows are written, and while rows are read on the device."""
        self.durable = durable
        self.entries: list[dict[str, Any]] = []
        self.newest: tuple[int, bytes] | None = None
        # Torch has few operations on unsigned integers, so columns hold their bits as signed ones.
        self._columns: dict[Key, torch.Tensor] = {}
        self._schema: Schema | None = None
        self._head = self._reserve = self._floor = self._emptied = 0
        self._drawn: torch.Tensor | None = None
        """The index that was drawn last, which is known to be in range."""
        self._identity = {
            "format": FORMAT,
            "id": uuid.uuid4().hex,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    # --- facts ------------------------------------------------------------------------------------

    @property
    def schema(self) -> Schema:
        if self._schema is None:
            raise NotInitialised(f"{self.path} has no rows and no schema yet. Collect some first.")
        return self._schema

    @property
    def span(self) -> range:
        return range(max(self._floor, first_valid(self._reserve, self.ring)), self._head)

    @property
    def manifest(self) -> Manifest:
        if self.durable is not None and self.durable.initialised:
            return self.durable.manifest
        return {**self._identity, "runs": self.entries}

    @property
    def initialised(self) -> bool:
        return self._schema is not None

    @property
    def record(self) -> tuple[int, bytes] | None:
        if self.newest is None and self.durable is not None:
            return self.durable.record
        return self.newest

    @property
    def is_written(self) -> bool:
        return not self.closed

    @property
    def floor(self) -> int:
        return self._floor

    @property
    def revision(self) -> int:
        return self._head + self._emptied

    def require_open(self) -> None:
        if self.closed:
            raise StorageClosed(f"{self.path} was closed, and its rows are gone. Make another one.")

    def close(self) -> None:
        """Release the memory."""
        with self.turn:
            super().close()
            self._columns, self._drawn = {}, None

    # --- writing ----------------------------------------------------------------------------------

    def allocate(self, schema: Schema) -> None:
        """Adopt the schema of a new storage, and allocate the ring.

        Raises:
            NotEnoughMemory: the device has less free memory; nothing was allocated.
        """
        row, free = schema.row_nbytes, free_bytes(self.device)
        if free is not None and self.ring * row > free:
            raise NotEnoughMemory(
                f"max_size: expected at most {free // row:,} rows, because a row takes {row:,} "
                f"bytes and {free:,} bytes are free on {self.device}, got {self.ring:,} rows, "
                f"which take {self.ring * row:,} bytes. {_REMEDY}"
            )
        try:
            self._columns = {
                each.key: torch.empty(
                    (self.ring, *each.shape), dtype=stored_dtype(each), device=self.device
                )
                for each in schema.columns
            }
        except RuntimeError as error:
            raise NotEnoughMemory(
                f"max_size: {self.ring:,} rows take {self.ring * row:,} bytes, which {self.device} "
                f"cannot allocate ({error!s:.200}). {_REMEDY}"
            ) from error
        self._schema = schema

    def write(self, values: Sequence[torch.Tensor]) -> range:
        """Append rows, given by one tensor [n, ...] on the device for each column.

        ``n`` is at most the size of the ring. After an error, the rows that were being overwritten
        are no longer valid.
        """
        start, count = self._head, len(values[0])
        self._reserve = stop = start + count
        try:
            for slot, first, length in pieces(start, stop, self.ring):
                for column, value in zip(self._columns.values(), values, strict=True):
                    column[slot : slot + length].copy_(value[first : first + length])
        except BaseException:
            self._floor, self._reserve = max(self._floor, stop - self.ring), start
            self._drawn = None
            raise
        self._head = stop
        return range(start, stop)

    def refill(self) -> None:
        """Replace all rows by the newest rows of the mirror."""
        durable = self.durable
        assert durable is not None
        self.newest, self._drawn, self.trajectory_index = None, None, TrajectoryIndex()
        if not durable.initialised:
            return
        if self._schema is None:
            self.allocate(durable.schema)
        span = durable.span
        first = max(span.start, span.stop - self.ring)
        # Indices are those of the mirror, unless a kill has torn rows of its ring.
        same = first == max(durable.floor, span.stop - self.ring)
        self._floor = durable.floor if same else first
        self._head = self._reserve = first
        self._emptied += 1
        count = max(1, _REFILL_NBYTES // self.schema.row_nbytes)
        for start in range(first, span.stop, count):
            rows = np.arange(start, min(start + count, span.stop))
            self.write(self.moved([as_tensor(each) for each in durable.copies(rows)]))

    def moved(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the columns of rows on the device, in the dtypes of the ring."""
        moved = move_columns(dict(enumerate(values)), self.device)
        return [
            value.view(stored_dtype(column))
            for value, column in zip(moved.values(), self.schema.columns, strict=True)
        ]

    def release(self) -> None:
        """Release the memory of a storage without rows, which may then adopt another schema."""
        self._columns, self._schema = {}, None

    def skip_to(self, head: int) -> None:
        """Invalidate every row, and continue at the number ``head``."""
        self._head = self._reserve = self._floor = head
        self._drawn, self._emptied = None, self._emptied + 1

    def empty(self) -> None:
        """Invalidate every row. Later rows continue the numbering."""
        self._floor, self._drawn, self._emptied = self._head, None, self._emptied + 1

    # --- reading on the device --------------------------------------------------------------------

    def draw(self, count: int, generator: torch.Generator | None) -> torch.Tensor:
        """Return ``count`` random indices on the device, without waiting for it.

        Raises:
            IndexOutOfRange: there are no rows.
            ValueError: ``count`` is not a number of rows.
        """
        if not isinstance(count, (int, np.integer)) or count < 0:
            raise ValueError(f"count: expected a number of rows, 0 or more, got {count!r}.")
        rows = len(self.span)
        if not rows:
            raise IndexOutOfRange(f"{self.path} has no rows yet to draw from. Collect some first.")
        at = self.device if generator is None else generator.device
        index = torch.randint(rows, (int(count),), generator=generator, device=at)
        index = move_columns({0: index}, self.device)[0]
        self._drawn = index
        return index

    def slots_at(self, index: Any) -> torch.Tensor:
        """Return the slots that an index of `DeviceStorage.get` selects, int64 on the device."""
        rows = len(self.span)
        if isinstance(index, torch.Tensor) and index.device.type != "cpu":
            found = self._checked(index, rows)
        else:
            where = resolve(index, rows)
            if isinstance(where, slice):
                found = torch.arange(where.start, where.stop, where.step, device=self.device)
            elif isinstance(where, int):
                found = torch.full((), where, device=self.device)
            else:
                found = move_columns({0: torch.tensor(where)}, self.device)[0]
        return (found + self._floor) % self.ring if self._floor else found

    def _checked(self, index: torch.Tensor, rows: int) -> torch.Tensor:
        """Return an index on the device as nonnegative integers.

        The call waits for the device, unless `draw` has returned this index.
        """
        if not same_place(index.device, self.device):
            raise ValueError(
                f"index: expected a tensor on {self.device} or the CPU, got one on {index.device}. "
                f"Move it to {self.device}."
            )
        if index is self._drawn:
            return index
        if index.dtype is torch.bool or index.is_floating_point() or not index.numel():
            return move_columns({0: torch.tensor(resolve(index, rows))}, self.device)[0]
        index = index.long()
        extremes = torch.stack(index.aminmax()).cpu()
        resolve(extremes, rows)  # raises if a row does not exist
        return torch.where(index < 0, index + rows, index)

    def at_slots(self, slots: torch.Tensor, keys: Keys | None) -> TensorDict:
        """Copy the rows in ``slots`` [*] to a TensorDict [*] on the device."""
        only, nest = columns_of(self, keys)
        columns = self.schema.columns
        chosen = columns if only is None else [columns[place] for place in only]
        found = [_taken(self._columns[each.key], slots).view(each.dtype) for each in chosen]
        return nest.of_tensors(found, tuple(slots.shape), self.device)

    # --- reading on the host ----------------------------------------------------------------------

    def column(self, key: Key) -> ColumnReader:
        if key not in self._columns:
            raise KeyError(key)
        return DeviceColumn(self, key)

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        self.require_open()
        at = move_columns({0: torch.from_numpy(rows % self.ring)}, self.device)[0]
        wanted = self.keys if keys is None else keys
        found = dict(enumerate(_taken(self._columns[key], at) for key in wanted))
        moved = move_columns(found, HOST)
        dtypes = {each.key: each.numpy_dtype for each in self.schema.columns}
        arrays = (_bits_of(each).numpy() for each in moved.values())
        return [array.view(dtypes[key]) for key, array in zip(wanted, arrays, strict=True)]


_REMEDY: Final = (
    "Make max_size smaller, or store fewer columns (Columns(exclude=...)). MemmapStorage(max_size="
    "...) keeps a ring on the disk."
)


_REFILL_NBYTES: Final = 2**24


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Return a column of rows as a tensor; of bfloat16, the bits."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def stored_dtype(column: Column) -> torch.dtype:
    """Return the dtype in which a ring holds a column: signed integers for unsigned ones."""
    return SIGNED.get(column.dtype, column.dtype)


def _taken(column: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copy the values in ``slots`` [*] without waiting for the device."""
    found = column.index_select(0, slots.reshape(-1))
    return found if slots.ndim == 1 else found.view((*slots.shape, *column.shape[1:]))


def _bits_of(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int16) if values.dtype is torch.bfloat16 else values


def free_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that can still be allocated on a device; None if unknown.

    Memory that torch has reserved and does not use counts as free.
    """
    if device.type == "cpu":
        return available_bytes()
    module: Any = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    free: int = module.mem_get_info(device)[0]
    if hasattr(module, "memory_reserved"):
        free += module.memory_reserved(device) - module.memory_allocated(device)
    return free
