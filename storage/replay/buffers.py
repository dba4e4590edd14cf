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
    """Seat the buffer's writer at the storage's head, now or when the buffer makes it.

    A buffer attaches to its storage before it makes its writer and chooses its
    collate function, for which it knows TorchRL's own storages only.
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
    """Return the collate function: rows come out of a storage as a batch already."""
    return batch


def seat_writers(storage: RowStore) -> None:
    """Let every attached writer go on after the last row."""
    at = _next_index(storage)
    for writer in _writers(storage):
        if at <= _limit(writer):
            setattr(writer, CURSOR, at)


def tell_buffers(storage: RowStore, rows: range) -> None:
    """Let attached buffers know of rows that did not come through them."""
    seat_writers(storage)
    index = torch.from_numpy(storage.reader.index_of(np.arange(rows.start, rows.stop)))
    for buffer in attached_buffers(storage):
        if rows and hasattr(buffer, "mark_update"):
            buffer.mark_update(index)


def check_cursor(storage: RowStore, rows: range) -> None:
    """Refuse a write anywhere but after the last row, ``rows`` being slots, counted on.

    Raises:
        NotAnAppend: it is not an append.
        CursorOverflow: an attached writer could not count on.
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
    """Return the data that a TorchRL writer hands over, as a TensorDict [N].

    Raises:
        RowsMismatch: not a TensorDict, nor a list of them.
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
    """Return the column that an attached TensorDict writer adds, if it is none of ours.

    It holds the row's own number, and the buffer adds it again to every sample.
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
