"""Keep TorchRL's replay buffers and writers in step with a storage on disk."""

from __future__ import annotations

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
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.stores.row_store import RowStore

_INDEX: Key = ("index",)
_CURSOR_LIMIT = 2**31 - 1


def join(storage: RowStore, buffer: Any) -> None:
    """Set the cursor of the buffer's writer to the next row of the storage.

    A buffer attaches to its storage before it makes its writer. In that case the cursor is set when
    the writer is made. The buffer also chooses its collate function later and knows only TorchRL's
    own storages, so this function supplies one.
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
    """Return the batch unchanged. Used as collate function, since storages return batches."""
    return batch


def seat_writers(storage: RowStore) -> None:
    """Set the cursor of every attached writer to the index after the last row."""
    at = _next_index(storage)
    for writer in _writers(storage):
        if at <= _limit(writer):
            setattr(writer, CURSOR, at)


def tell_buffers(storage: RowStore, rows: range) -> None:
    """Notify attached buffers of rows that were not written through them."""
    seat_writers(storage)
    index = torch.from_numpy(storage.reader.index_of(np.arange(rows.start, rows.stop)))
    for buffer in attached_buffers(storage):
        if rows and hasattr(buffer, "mark_update"):
            buffer.mark_update(index)


def check_cursor(storage: RowStore, rows: range) -> None:
    """Raise unless a write goes directly after the last row.

    Args:
        storage: the storage.
        rows: the slots of the write. In a ring they count on past the last slot.

    Raises:
        NotAnAppend: the write starts at another index.
        CursorOverflow: the cursor of an attached writer cannot count that far.
    """
    at = _next_index(storage)
    if rows.start != at:
        raise NotAnAppend(
            f"rows on disk are only added after the last one, at row {at}, and this write is "
            f"at row {rows.start}. A buffer that did not make its writer itself goes on at the "
            "right row after storage.attach(buffer)."
        )
    if rows.stop > min(map(_limit, _writers(storage)), default=rows.stop):
        raise CursorOverflow(
            f"TorchRL's writers count rows in 32 bits, up to {_CURSOR_LIMIT}, and this write ends "
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
            f"a storage holds TensorDicts, got {type(data).__name__}. Give what it holds names, as "
            'in TensorDict({"data": tensor}, [len(tensor)]).'
        )
    return data.unsqueeze(0) if single else data


def writers_index(storage: RowStore) -> Key | None:
    """Return the key of the column that an attached TensorDict writer adds, or None.

    The column holds the index of the row, and the buffer adds it to every sample. The result is
    None if the storage has a column of that name itself.
    """
    reader = storage.reader
    if reader.initialised and _INDEX in reader.keys:
        return None
    adds = any(isinstance(writer, TensorDictRoundRobinWriter) for writer in _writers(storage))
    return _INDEX if adds else None


def _next_index(storage: RowStore) -> int:
    reader = storage.reader
    return (reader.head - reader.floor) % reader.ring if reader.ring else reader.head


def _writers(storage: RowStore) -> list[Any]:
    found = (getattr(buffer, WRITER, None) for buffer in attached_buffers(storage))
    return [writer for writer in found if isinstance(writer, RoundRobinWriter)]


def _limit(writer: Any) -> int:
    return torch.iinfo(torch.int64).max if counts_in_64_bits(writer) else _CURSOR_LIMIT


def _seat(writer: Any, storage: RowStore) -> None:
    if isinstance(writer, TensorDictMaxValueWriter):
        raise NotAnAppend(
            f"a {type(writer).__name__} replaces the stored rows of the least value, and rows on "
            "disk never change. Give the buffer another writer, or a storage of TorchRL's, such as "
            "LazyTensorStorage."
        )
    if not isinstance(writer, RoundRobinWriter):
        return  # a writer without a cursor, such as that of an immutable dataset
    if (at := _next_index(storage)) > _limit(writer):
        raise CursorOverflow(
            f"TorchRL's writers count rows in 32 bits, up to {_CURSOR_LIMIT}, and {storage.path} "
            f"has {at}. Give the buffer a writer made with compilable=True."
        )
    setattr(writer, CURSOR, at)
