"""Keep TorchRL's replay buffers and writers in step with a storage of ours."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection, is_tensorclass, stack
from torchrl.data.replay_buffers.writers import (
    RoundRobinWriter,
    TensorDictMaxValueWriter,
    TensorDictRoundRobinWriter,
    Writer,
)

from tallyroll.storage.compat import (
    COLLATE,
    CURSOR,
    WRITER,
    WRITER_MAKER,
    attached_buffers,
    counts_in_64_bits,
)
from tallyroll.storage.errors import CursorOverflow, NotAnAppend, RowsMismatch
from tallyroll.storage.readers.row_reader import index_of
from tallyroll.storage.replay.tensor_storage import IN_PLACE, AsTensorStorage
from tallyroll.storage.rows.indexing import consecutive
from tallyroll.storage.rows.keys import Key

_INDEX: Key = ("index",)
_CURSOR_LIMIT = 2**31 - 1


def attach(storage: AsTensorStorage, buffer: Any) -> None:
    """Keep an attached buffer in step with the storage from now on."""
    storage.writer.call_after_appends(partial(_notify, weakref.ref(storage)))
    join(storage, buffer)


def _notify(storage: weakref.ref[AsTensorStorage], rows: range) -> None:
    if (found := storage()) is not None:
        notify_buffers(found, rows)


def join(storage: AsTensorStorage, buffer: Any) -> None:
    """Set the cursor of the buffer's writer to the next row of the storage.

    A new buffer attaches to its storage before it makes its writer. In that case, the cursor is set
    when the writer is made. The buffer also chooses its collate function later. It knows only
    TorchRL's own storages, so this function supplies a collate function.
    """
    if (writer := getattr(buffer, WRITER, None)) is not None:
        _seat(writer, storage)
        return
    maker = getattr(buffer, WRITER_MAKER, None)

    def make() -> Writer:
        made = maker if isinstance(maker, Writer) else maker() if maker else RoundRobinWriter()
        _seat(made, storage)
        return made

    setattr(buffer, WRITER_MAKER, make)
    if getattr(buffer, COLLATE, None) is None:
        setattr(buffer, COLLATE, as_it_is)


def as_it_is(batch: Any) -> Any:
    """Return the batch unchanged. Used as the collate function, since storages return batches."""
    return batch


def seat_writers(storage: AsTensorStorage) -> None:
    """Set the cursor of every attached writer to the index after the last row."""
    at = _next_index(storage)
    for writer in _writers(storage):
        if at <= _limit(writer):
            setattr(writer, CURSOR, at)


def notify_buffers(storage: AsTensorStorage, rows: range) -> None:
    """Notify attached buffers of rows that were not written through them."""
    seat_writers(storage)
    index = torch.from_numpy(index_of(storage.reader, np.arange(rows.start, rows.stop)))
    for buffer in attached_buffers(storage):
        if rows and hasattr(buffer, "mark_update"):
            buffer.mark_update(index)


def write_at(storage: AsTensorStorage, cursor: Any, data: Any, *, set_cursor: bool) -> None:
    """Implement `DiskStorage.set`."""
    storage.reader.require_open()
    try:
        if not set_cursor:
            raise NotAnAppend(f"storage[i] = rows is not supported: {IN_PLACE}")
        rows = consecutive(cursor, storage.reader.ring)
        check_cursor(storage, rows)
        data = as_batch(data, single=isinstance(cursor, int))
        _require_length(data, rows)
        storage.writer.write_items(data, writers_index(storage))
    except BaseException:
        # TorchRL's writers advance their cursor before they write.
        seat_writers(storage)
        raise
    if len(attached_buffers(storage)) > 1:
        seat_writers(storage)


def on_host(storage: AsTensorStorage, cursor: Any) -> Any:
    """Return a writer's cursor, which may be a tensor on a device, without waiting for the device.

    The cursor is known if an attached writer has advanced to the index behind these rows.
    """
    if not isinstance(cursor, torch.Tensor) or cursor.is_cpu:
        return cursor
    at, ring = _next_index(storage), storage.reader.ring
    rows = range(at, at + cursor.numel())
    after = rows.stop % ring if ring else rows.stop
    known = any(getattr(writer, CURSOR) == after for writer in _writers(storage))
    return rows if known else cursor


def _require_length(data: TensorDictBase, rows: range) -> None:
    """Raise `NotAnAppend` unless ``data`` has a row for each of ``rows``."""
    if len(data) != len(rows):
        raise NotAnAppend(
            f"data: expected {len(rows)} rows, one per index of cursor, got {len(data)}."
        )


def check_cursor(storage: AsTensorStorage, rows: range) -> None:
    """Raise unless a write goes directly after the last row.

    Args:
        storage: the storage.
        rows: the slots of the write. In a ring, the numbers continue past the last slot.

    Raises:
        NotAnAppend: the write starts at another index.
        CursorOverflow: the write ends beyond the range of an attached writer's cursor.
    """
    at = _next_index(storage)
    if rows.start != at:
        raise NotAnAppend(
            f"expected a write directly after the last row, at row {at}, got a write at row "
            f"{rows.start}. Stored rows can only be appended. If the buffer did not create its "
            "writer itself, call storage.attach(buffer)."
        )
    if rows.stop > min(map(_limit, _writers(storage)), default=rows.stop):
        raise CursorOverflow(
            f"TorchRL's writers count rows in 32 bits, up to {_CURSOR_LIMIT}, but this write ends "
            f"at row {rows.stop}. Write with storage.extend, or give the buffer a writer made "
            "with compilable=True."
        )


def as_batch(data: Any, *, single: bool) -> TensorDictBase:
    """Return data from a TorchRL writer as a TensorDict [N].

    Raises:
        RowsMismatch: the data is neither a TensorDict nor a list of TensorDicts.
    """
    if isinstance(data, list) and data and all(map(is_tensor_collection, data)):
        data = stack(data)
    if is_tensorclass(data):
        data = data.to_tensordict()
    if not isinstance(data, TensorDictBase):
        raise RowsMismatch(
            f"a storage holds TensorDicts, got {type(data).__name__}. Give each tensor a name, as "
            'in TensorDict({"data": tensor}, [len(tensor)]).'
        )
    return data.unsqueeze(0) if single else data


def writers_index(storage: AsTensorStorage) -> Key | None:
    """Return the key of the column that an attached TensorDict writer adds, or None.

    The column holds the index of the row, and the buffer adds it to every sample. The result is
    None if the storage itself has a column of that name.
    """
    reader = storage.reader
    if reader.initialised and _INDEX in reader.keys:
        return None
    adds = any(isinstance(writer, TensorDictRoundRobinWriter) for writer in _writers(storage))
    return _INDEX if adds else None


def _next_index(storage: AsTensorStorage) -> int:
    reader = storage.reader
    return (reader.head - reader.floor) % reader.ring if reader.ring else reader.head


def _writers(storage: AsTensorStorage) -> list[Any]:
    found = (getattr(buffer, WRITER, None) for buffer in attached_buffers(storage))
    return [writer for writer in found if isinstance(writer, RoundRobinWriter)]


def _limit(writer: Any) -> int:
    return torch.iinfo(torch.int64).max if counts_in_64_bits(writer) else _CURSOR_LIMIT


def _seat(writer: Any, storage: AsTensorStorage) -> None:
    if isinstance(writer, TensorDictMaxValueWriter):
        raise NotAnAppend(
            f"a {type(writer).__name__} replaces the stored rows of the least value, but stored "
            "rows never change. Give the buffer another writer, or a storage of TorchRL, such as "
            "LazyTensorStorage."
        )
    if not isinstance(writer, RoundRobinWriter):
        return  # a writer without a cursor, such as that of an immutable dataset
    if (at := _next_index(storage)) > _limit(writer):
        raise CursorOverflow(
            f"TorchRL's writers count rows in 32 bits, up to {_CURSOR_LIMIT}, but the next row of "
            f"{storage.reader.path} is row {at}. Give the buffer a writer made with "
            "compilable=True."
        )
    setattr(writer, CURSOR, at)
