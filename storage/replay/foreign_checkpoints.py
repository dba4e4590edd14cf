"""Adapter that lets TorchRL's own checkpointers save and load a storage on disk."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.replay_buffers.storages import TensorStorage

from tallyroll.storage.compat import INITIALISE, LAST_INDEX, ROWS, STORED
from tallyroll.storage.errors import NotInitialised, RowsMismatch, StateMismatch
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.readers.row_reader import RowReader, index_of
from tallyroll.storage.stores.row_store import RowStore
from tallyroll.storage.stores.row_writer import ReadOnlyWriter, RowWriter

if TYPE_CHECKING:
    from torchrl.data.replay_buffers.checkpointers import StorageCheckpointerBase


def dump(checkpointer: StorageCheckpointerBase, storage: RowStore, path: Any) -> None:
    """Write the rows to ``path`` with a checkpointer of TorchRL.

    The checkpointer receives a `TensorStorage`. A storage that keeps every row is written as a full
    `TensorStorage`.

    Raises:
        NotInitialised: the storage has no rows yet.
    """
    reader = storage.reader
    if not len(reader):
        raise NotInitialised(f"{reader.path} has no rows to dump yet. Write some first.")
    rows = reader.get(slice(None))
    shown = TensorStorage(_with_free_slots(rows, reader.ring))
    setattr(shown, STORED, len(rows))
    setattr(shown, LAST_INDEX, int(index_of(reader, np.array(reader.head - 1))))
    checkpointer.dumps(shown, user_path(path))


def _with_free_slots(rows: TensorDict, ring: int) -> TensorDictBase:
    """Return rows followed by a ring's free slots, whose memory is uninitialized."""
    if len(rows) >= ring:
        return rows
    slots: TensorDictBase = torch.empty_like(rows[0].expand(ring, *rows.batch_size[1:]))
    slots[: len(rows)] = rows
    return slots


def load(checkpointer: StorageCheckpointerBase, storage: RowStore, path: Any) -> None:
    """Append the rows that a checkpointer of TorchRL finds at ``path`` to an empty storage.

    Each row gets its former index. If the checkpoint is of a whole buffer, a full ring continues at
    its former position: the oldest row is overwritten next.

    Raises:
        StateMismatch: the storage already has rows, or is a ring that is too small for the
            checkpoint.
        RowsMismatch: the checkpoint holds no rows.
        RunUnderWay: a collector is writing to ``storage``.
    """
    writer, reader = storage.writer, storage.reader
    if isinstance(writer, RowWriter):
        writer.claim.require_none()
    if len(reader):
        raise StateMismatch(
            f"{reader.path} already has {len(reader)} rows, which a checkpoint of "
            f"{type(checkpointer).__name__} would replace. Load the checkpoint into a new storage."
        )
    found = _ReceivedStorage()
    checkpointer.loads(found, user_path(path))
    if not isinstance(found.rows, TensorDictBase):
        raise RowsMismatch(
            f"{path}: expected a checkpoint with rows of TensorDicts, got one without. A storage "
            "on disk holds only TensorDicts."
        )
    _append(writer, reader, found.rows[: getattr(found, STORED)], _next_index(path))


class _ReceivedStorage:
    """Stand-in for a new TorchRL storage that keeps the rows that a checkpointer loads."""

    initialized = False
    rows: Any = None

    def __init__(self) -> None:
        setattr(self, ROWS, self)
        setattr(self, STORED, 0)
        setattr(self, INITIALISE, lambda row: None)

    def update_(self, rows: Any) -> None:
        self.rows = rows


def _next_index(path: Any) -> int:
    """Return the next write index of the checkpoint's buffer, or 0 if it is not recorded."""
    beside = user_path(path).parent / "writer" / "metadata.json"
    try:
        cursor = json.loads(beside.read_bytes())["cursor"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0
    return cursor if type(cursor) is int else 0


def _append(
    writer: RowWriter | ReadOnlyWriter, reader: RowReader, rows: TensorDictBase, next_index: int
) -> None:
    if reader.ring and len(rows) > reader.ring:
        raise StateMismatch(
            f"the checkpoint has {len(rows)} rows, but {reader.path} is a ring of {reader.ring} "
            "rows. Create a larger ring."
        )
    with writer.turn:
        writer.write(rows, ids="fresh")
        if reader.ring == len(rows) and 0 < next_index < len(rows):
            # The first rows are the newest. Writing them a second time puts them in the same slots.
            writer.write(rows[:next_index], ids="fresh")
