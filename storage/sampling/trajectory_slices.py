"""Sampler of trajectory slices for TorchRL's replay buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tallyroll.storage.errors import NoSlices, ShortTrajectory
from tallyroll.storage.readers.row_reader import RowReader, index_of
from tallyroll.storage.replay.tensor_storage import AsTensorStorage
from tallyroll.storage.rows.keys import MASK, Key
from tallyroll.storage.sampling.sampled_storage import (
    StatelessSampler,
    require_slots_stay,
    require_storage,
)
from tallyroll.storage.trajectories.mapping import draw
from tallyroll.storage.trajectories.slice_columns import done_keys, init_keys, slice_marks
from tallyroll.storage.trajectories.windows import By, Short, Slices, Windows


class TrajectorySliceSampler(StatelessSampler):
    """Sampler that draws slices of trajectories uniformly, with replacement.

    For a replay buffer over a Tallyroll storage::

        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(16), batch_size=32 * 16
        )
        slices = buffer.sample().reshape(32, 16)

    A slice is ``slice_len`` consecutive steps of one trajectory, wherever its rows are stored.
    Slices cross batches, but never lanes, trajectories or restarts. Shorter trajectories are
    skipped unless ``short`` says otherwise. The cost of a sample does not depend on the number of
    stored rows.

    A sample is flat, slice after slice. At the last row of a slice, ``("next", "done")`` is True,
    at the root and in each group of agents, so that TorchRL's value estimators stop there and
    bootstrap. ``("collector", "cut")`` is True there if the trajectory continues. Terminated and
    truncated keep their values. Columns ``"is_init"``, at the root and in groups, are True at the
    first row of a slice: recurrent modules in recurrent mode begin there from the stored state.
    Random numbers come from the buffer's ``generator``.

    With ``short="pad"`` or ``burn_in``, ``("collector", "mask")`` is False where a slice has no
    row. All other values are zero there, and ``"index"`` names a row of the same slice. (A plain
    ReplayBuffer returns these values in its info, while the batch holds other rows.)

    Args:
        slice_len: the number of rows of a slice. Batch sizes are multiples of it, or of
            ``burn_in + slice_len``.
        short, by, from_start, burn_in: see `Trajectories.sample_slices`.
    """

    def __init__(
        self,
        slice_len: int,
        *,
        short: Short = "skip",
        by: By = "window",
        from_start: bool = False,
        burn_in: int = 0,
    ) -> None:
        self.windows = Windows(slice_len, short, by, from_start, burn_in)
        self.slice_len = slice_len

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[Key, Any]]:
        """Return the index of ``batch_size`` rows, and values that differ from the stored ones.

        Raises:
            TypeError: the storage is not a Tallyroll storage.
            ValueError: ``batch_size`` is not a multiple of the number of rows of a slice.
            NoSlices: no trajectory is long enough.
            ShortTrajectory: with ``short="error"``, a drawn trajectory is shorter than a slice.
            SlotsMayChange: the storage is a ring that this process only reads.
        """
        self._check(storage)
        length = self.windows.length
        if batch_size < 1 or batch_size % length:
            raise ValueError(
                f"batch_size: expected a multiple of the slice length {length}, got {batch_size}. "
                f"Use {length} times the number of slices."
            )
        reader = storage.reader
        slices = draw(reader, batch_size // length, self.windows, self._rng)
        rows = slices.rows.reshape(-1)
        return torch.from_numpy(index_of(reader, rows)), self._info(reader, rows, slices)

    def _info(self, reader: RowReader, rows: np.ndarray, slices: Slices) -> dict[Key, Any]:
        info: dict[Key, Any] = {}
        if slices.mask is not None and self.windows.padded:
            mask = slices.mask.reshape(-1)
            if not mask.all():
                info |= _emptied(reader, rows, mask)
            info[MASK] = torch.from_numpy(mask)
        return info | end_marks(reader, slices)

    def _check(self, storage: Any) -> None:
        others = "For a storage of TorchRL, use its SliceSampler."
        require_storage(storage, "TrajectorySliceSampler", others, AsTensorStorage)
        require_slots_stay(
            storage,
            "Draw with storage.trajectories.sample_slices(num_slices, slice_len): it draws again "
            "if rows were overwritten.",
        )

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        self._check(storage)
        reader = storage.reader
        if not len(reader.span):
            return 0
        if not self.windows.plain:
            try:
                draw(reader, 1, self.windows, torch.Generator())  # not the generator of the buffer
            except NoSlices:
                return 0
            except ShortTrajectory:
                pass
            return 1
        index = reader.trajectory_index
        with index.lock:
            count: int = index.rows(reader).count_slices(self.slice_len, reader.span.start)
            return count

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.windows})"


def _emptied(reader: RowReader, rows: np.ndarray, mask: np.ndarray) -> dict[Key, torch.Tensor]:
    """Return all columns of rows [n], set to zero where the mask is False."""
    arrays = reader.gather(rows)
    for array in arrays:
        array[~mask] = 0
    found = reader.nest(arrays, rows.shape)
    return {key: found.get(key) for key in reader.keys}


def end_marks(reader: RowReader, slices: Slices) -> dict[Key, Any]:
    """Return the flags [n * length] of slices, by key, with the starts and ends of slices marked.

    Flags are False where there is no row.
    """
    count, length = slices.rows.shape
    rows = slices.rows.reshape(-1)

    def copies(keys: list[Key]) -> dict[Key, np.ndarray]:
        found = reader.copies(rows, keys)
        if slices.mask is not None:
            empty = ~slices.mask.reshape(-1)
            for array in found:
                array[empty] = False
        return dict(zip(keys, found, strict=True))

    marks: dict[Key, Any] = {**slice_marks(copies(done_keys(reader.schema)), slices)}
    for key, begins in copies(init_keys(reader.schema)).items():
        begins.reshape(count, length, *begins.shape[1:])[slices.first] = True
        marks[key] = torch.from_numpy(begins)
    return marks
