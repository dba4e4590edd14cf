"""Respect the limits of TorchRL's replay buffers: equal item lengths, supported dtypes, and ids."""

import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, Storage, TensorStorage

from tallyroll.collector.batches.rows.rows import ArrayBatch, Rows, as_tensordict
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.batches.stored.sinks import accepts_rows
from tallyroll.collector.counting.ledger import LedgerEntry
from tallyroll.collector.counting.numbering import LaneState
from tallyroll.collector.errors import ArgumentError, ItemsDiffer
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import DONE, STEP, TRAJ_IDS, format_key


class CutItemWarning(UserWarning):
    """A run ended within an item of a TorchRL buffer; the message names the missing rows."""


def warn_of_cut_item(count: int, what: str, error: ItemsDiffer) -> None:
    """Warn about the fate of the last ``count`` transitions of a run."""
    warnings.warn(f"the last {count} transitions {what}: {error}", CutItemWarning, stacklevel=3)


def require_items(storage: Storage, batch: TensorDictBase) -> None:
    """Refuse items that differ in length from those in a TorchRL storage, which would pad them.

    Raises:
        ItemsDiffer: the lengths differ; the message names both.
    """
    if not isinstance(storage, TensorStorage) or batch.ndim <= storage.ndim or not len(storage):
        return
    wanted, got = list(storage.get(0).batch_size), list(batch.shape[storage.ndim :])
    if got != wanted:
        raise ItemsDiffer(
            f"replay_buffer: expected items of length {wanted}, like those in the buffer, got "
            f"{got}. Make batches of this length and total_frames a multiple of frames_per_batch, "
            "or give the buffer one of tallyroll's storages, which accept rows."
        )


def require_takes(storage: Storage, rows: Rows) -> None:
    """Refuse columns of dtypes that torch cannot write to a TorchRL storage."""
    if accepts_rows(storage) or not isinstance(storage, TensorStorage):
        return
    for key, column in rows.items():
        if column.dtype in SIGNED:
            name = str(column.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"replay_buffer: expected columns that {type(storage).__name__} can write, got "
                f"{format_key(key)} of {name}, which torch cannot write. Give the buffer one of "
                "tallyroll's storages (MemmapStorage(max_size=…)), or cast the column in a wrapper "
                "of the environment."
            )


def for_buffer(rows: Rows, buffer: ReplayBuffer, inner_dims: Shapes) -> TensorDictBase:
    """Return a batch for the buffer, on its device if that is not the host."""
    device: Any = getattr(buffer.storage, "device", None)
    on_host = not isinstance(device, torch.device) or device.type == "cpu"
    return as_tensordict(rows, None if on_host else device, inner_dims)


def extend_buffer(
    buffer: ReplayBuffer, batches: Sequence[TensorDictBase], record: bytes | None = None
) -> None:
    """Add batches, whose trajectories already have ids, to a buffer.

    If the storage of the buffer takes rows, it commits ``record`` with the next rows.
    """
    store = buffer.storage
    if record is not None:
        store.writer.stage_record(record)
    with store.writer.fresh_ids() if accepts_rows(store) else nullcontext():
        for batch in batches:
            buffer.extend(batch)


# --- ids ------------------------------------------------------------------------------------------

_RANGE = 2**40
"""Number of ids reserved for each run of a buffer, more than a run will ever use."""


class BufferIds:
    """Trajectory ids for a run that writes to a TorchRL storage, which other runs may share."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self.range = -1
        """Index of the run's range of ids."""

    def next(self) -> int:
        """Return one more than the largest id in the buffer, in a range that no other run has."""
        runs = _runs.setdefault(self._buffer.storage, weakref.WeakSet())
        runs.add(self)
        if self.range < 0:
            self.range = 1 + max((each.range for each in runs if each is not self), default=-1)
        ids: Any = None
        if len(self._buffer):
            held = self._buffer.storage.get(slice(0, len(self._buffer)))
            ids = held.get(TRAJ_IDS, None) if isinstance(held, TensorDictBase) else None
        largest = int(ids.max()) if ids is not None and len(ids) else -1
        return max(self.range * _RANGE, largest + 1)

    def end(self) -> None:
        """Release the range for other runs."""
        _runs.get(self._buffer.storage, weakref.WeakSet()).discard(self)


_runs: weakref.WeakKeyDictionary[Storage, weakref.WeakSet[BufferIds]] = weakref.WeakKeyDictionary()
"""The runs that are not over, by the TorchRL storage to which they write."""


class CutItems:
    """Discards last rows that do not fill an item, and warns about them when the run is over."""

    def __init__(self) -> None:
        self._count = 0
        """Number of discarded transitions, which did not fill an item."""
        self._why: ItemsDiffer | None = None

    def discard(
        self, part: ArrayBatch | SlabBatch, state: LaneState, error: ItemsDiffer
    ) -> LedgerEntry:
        """Return the changes of the ledger's counts if the rows of ``part`` are discarded.

        ``error`` has the reason why the rows do not fill an item.
        """
        ids = part.array(TRAJ_IDS)
        begun, ended = ids[part.array(STEP) == 0], ids[part.array(DONE).reshape(-1)]
        cut = len(np.setdiff1d(ended, begun))  # open trajectories are cut at the end,
        state.cut(np.isin(state.traj_id, begun))  # except these, which have no rows
        self._count, self._why = self._count + len(part), error
        return LedgerEntry(discarded=len(part), episodes_cut=cut)

    def warn(self) -> None:
        """Warn once about the discarded rows."""
        if self._why is not None:
            why, self._why = self._why, None
            warn_of_cut_item(
                self._count,
                "are discarded, because they do not fill an item of the replay buffer",
                why,
            )
