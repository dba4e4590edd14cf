"""Slices of trajectories for TorchRL's replay buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import Sampler

from tallyroll.storage.errors import SlotsMayChange
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.mapping import (
    check_positive,
    done_keys,
    draw,
    init_keys,
    slice_marks,
)


class TrajectorySliceSampler(Sampler):
    """Draws slices of trajectories uniformly, with replacement, among all that there are.

    For a replay buffer over a Tallyroll storage::

        buffer = TensorDictReplayBuffer(
            storage=storage, sampler=TrajectorySliceSampler(16), batch_size=32 * 16
        )
        slices = buffer.sample().reshape(32, 16)

    A slice is ``slice_len`` consecutive steps of one trajectory, wherever its rows lie: slices
    cross batches, never lanes, trajectories or restarts. Trajectories that are shorter are
    not drawn from. A sample costs the same however many rows there are.

    A sample is flat, slice after slice. At the last row of a slice ``("next", "done")``, and that
    of each group of agents, is True, so that TorchRL's value estimators stop there and
    bootstrap, and ``("collector", "cut")`` where the trajectory goes on; terminated and truncated
    stay as they are. Columns ``"is_init"``, at the root and of groups, are True at the first row of
    a slice: recurrent modules in recurrent mode begin there, from the state that is stored. Random
    numbers come from the buffer's ``generator``.

    Args:
        slice_len: rows a slice; batch sizes are multiples of it.
    """

    def __init__(self, slice_len: int) -> None:
        check_positive("slice_len", slice_len)
        self.slice_len = slice_len

    def sample(self, storage: Any, batch_size: int) -> tuple[torch.Tensor, dict[Key, Any]]:
        """Return the index of ``batch_size`` rows, and values that differ from the stored ones.

        Raises:
            TypeError: not a Tallyroll storage.
            ValueError: ``batch_size`` is not a multiple of ``slice_len``.
            NoSlices: no trajectory is that long.
            SlotsMayChange: a ring that this process only reads.
        """
        self._check(storage)
        if batch_size < 1 or batch_size % self.slice_len:
            raise ValueError(
                f"a batch of slices of {self.slice_len} rows has a multiple of as many rows, got "
                f"batch_size={batch_size}. Use {self.slice_len} times the number of slices."
            )
        num_slices = batch_size // self.slice_len
        reader = storage.reader
        rows = draw(reader, num_slices, self.slice_len, self._rng).reshape(-1)
        return torch.from_numpy(reader.index_of(rows)), self._info(reader, rows, num_slices)

    def _info(self, reader: RowReader, rows: np.ndarray, num_slices: int) -> dict[Key, Any]:
        keys = done_keys(reader.schema)
        dones = dict(zip(keys, reader.copies(rows, keys), strict=True))
        info: dict[Key, Any] = {**slice_marks(dones, num_slices, self.slice_len)}
        inits = init_keys(reader.schema)
        for key, begins in zip(inits, reader.copies(rows, inits), strict=True):
            begins[:: self.slice_len] = True
            info[key] = torch.from_numpy(begins)
        return info

    def _check(self, storage: Any) -> None:
        if not isinstance(storage, DiskStorage):
            raise TypeError(
                "TrajectorySliceSampler draws from the storages of tallyroll.storage, got "
                f"{type(storage).__name__}. TorchRL's SliceSampler draws from TorchRL's."
            )
        if storage.ring and storage.mode == "read":
            raise SlotsMayChange(
                f"{storage.path} is a ring that another process may write, so that rows change "
                "between drawing and reading them through a replay buffer. Draw with "
                "storage.trajectories.sample_slices(num_slices, slice_len), which looks again."
            )

    def _sampleable_count(self, storage: Any, batch_size: int) -> int:
        self._check(storage)
        reader = storage.reader
        if not len(reader.span):
            return 0
        index = reader.trajectory_index
        with index.lock:
            count: int = index.links(reader).count_slices(self.slice_len, reader.span.start)
            return count

    def _empty(self) -> None:
        """Nothing is kept here."""

    def dumps(self, path: Any) -> None:
        """Nothing is kept here."""

    def loads(self, path: Any) -> None:
        """Nothing is kept here."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing is kept here: the random numbers are the buffer's, and the rows the storage's."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing is kept here."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(slice_len={self.slice_len})"
