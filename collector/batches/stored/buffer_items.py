"""Limits of TorchRL's replay buffers: items of one length, dtypes that torch writes, and ids."""

import warnings
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer, Storage, TensorStorage

from tallyroll.collector.batches.rows.rows import Rows, as_tensordict
from tallyroll.collector.batches.stored.sinks import takes_rows
from tallyroll.collector.errors import ArgumentError, ItemsDiffer
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import TRAJ_IDS, format_key


class CutItemWarning(UserWarning):
    """Warning: a run ended within an item of a TorchRL buffer; says which rows are missing."""


def warn_of_cut_item(count: int, what: str, error: ItemsDiffer) -> None:
    """Warn about the fate of the last ``count`` transitions of a run."""
    warnings.warn(f"the last {count} transitions, {what}: {error}", CutItemWarning, stacklevel=3)


def require_items(behind: Storage, batch: TensorDictBase) -> None:
    """Refuse items of other lengths than a TorchRL storage has: it would keep zeros for them.

    Raises:
        ItemsDiffer: says how long they are.
    """
    if not isinstance(behind, TensorStorage) or batch.ndim <= behind.ndim or not len(behind):
        return
    wanted, got = list(behind.get(0).batch_size), list(batch.shape[behind.ndim :])
    if got != wanted:
        raise ItemsDiffer(
            f"replay_buffer: its items are {wanted} long, and these are {got}; make batches as "
            "long, and total_frames a multiple of frames_per_batch, or give the buffer one of "
            "tallyroll's storages, which take rows"
        )


def require_takes(behind: Storage, rows: Rows) -> None:
    """Refuse columns that torch cannot write to a TorchRL storage."""
    if takes_rows(behind) or not isinstance(behind, TensorStorage):
        return
    for key, column in rows.items():
        if column.dtype in SIGNED:
            name = str(column.dtype).removeprefix("torch.")
            raise ArgumentError(
                f"replay_buffer: expected columns that {type(behind).__name__} can write, got "
                f"{format_key(key)} of {name}, for which torch has no such operation; give the "
                "buffer one of tallyroll's storages (MemmapStorage(max_size=…)), or cast in a "
                "wrapper of the environment"
            )


def for_buffer(rows: Rows, buffer: ReplayBuffer, behind: Shapes) -> TensorDictBase:
    """A batch where the buffer's storage wants it; to a GPU it goes at once, from pinned memory."""
    device = getattr(buffer.storage, "device", None)
    if not isinstance(device, torch.device) or device.type != "cuda":
        return as_tensordict(rows, None, behind)
    pinned = {k: c.pin_memory() if c.device.type == "cpu" else c for k, c in rows.items()}
    return as_tensordict(pinned, None, behind).to(device, non_blocking=True)


def extend_buffer(
    buffer: ReplayBuffer, batches: Sequence[TensorDictBase], record: bytes | None = None
) -> None:
    """Add batches, whose trajectories are numbered, to a buffer.

    The storage under it, which takes rows, commits ``record`` with the next of them.
    """
    store = buffer.storage
    if record is not None:
        store.writer.stage_record(record)
    with store.writer.fresh_ids() if takes_rows(store) else nullcontext():
        for batch in batches:
            buffer.extend(batch)


# --- ids ------------------------------------------------------------------------------------------

_RANGE = 2**40
"""Ids of a run into one of these beside another's: more than there will be trajectories."""


class BufferIds:
    """Trajectory ids for a run that writes to a TorchRL storage, as other runs may in turn."""

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self.range = -1
        """Index of the run's range of ids."""

    def next(self) -> int:
        """One more than the largest id that the buffer holds, in a range that no other run has."""
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
        """Leave the range to other runs."""
        _runs.get(self._buffer.storage, weakref.WeakSet()).discard(self)


_runs: weakref.WeakKeyDictionary[Storage, weakref.WeakSet[BufferIds]] = weakref.WeakKeyDictionary()
"""The runs that are not over, by TorchRL's storage."""
