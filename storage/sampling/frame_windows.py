"""Windows of frames: stacks with their next stacks, in which each frame occurs once."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.storage.engine.available_memory import is_small_allocation, require_memory
from tallyroll.storage.engine.once_columns import guess_stack
from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.readers.row_reader import RowReader, columns_of, numbers_of
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import NEXT, Key, as_key, format_key
from tallyroll.storage.rows.transfers import move_batch, move_columns

if TYPE_CHECKING:
    from tallyroll.storage.rows.keys import Keys
    from tallyroll.storage.rows.schema import Column
    from tallyroll.storage.sampling.n_steps import ReadableStorage

_PATIENCE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class FrameWindows:
    """Rows whose stacks of n frames and next stacks are views of windows of n + 1 frames.

    `frame_windows` makes them. A window has the n frames of the observation and the last frame of
    the next observation. `to` copies each frame once to a device, where `observation` and
    `next_observation` are views. All values equal those of ``storage.get``, bit for bit.

    A next observation usually is the observation moved by one frame. In rows where it is not, such
    as after frames were skipped, the window contains its last frame only, and the whole next stack
    is in ``unshifted_next``. So are stacks that share no frames in a pool. If there are such rows,
    `next_observation` is a copy instead of a view.
    """

    key: Key
    """Key of the observation."""
    stack: int
    """Number of frames of a value, n; 1 if a value is one frame without an axis of frames."""
    windows: torch.Tensor
    """The windows, ``[*batch, n + 1, *frame]``, with the dtype of the column."""
    unshifted: torch.Tensor
    """Indices into the flattened batch of the rows whose next stack is not in their window, int64
    [m], ascending."""
    unshifted_next: torch.Tensor
    """The next observations of these rows, ``[m, *shape of a value]``."""
    others: TensorDict
    """The other columns, with batch size ``[*batch]``."""

    def to(self, device: torch.device | str | int) -> FrameWindows:
        """Return the rows on ``device``.

        A copy to a device that takes pinned memory does not wait for the device.
        """
        device = torch.device(device)
        tensors = {
            "windows": self.windows,
            "unshifted": self.unshifted,
            "unshifted_next": self.unshifted_next,
        }
        moved: dict[str, Any] = {
            name: each.to(device) for name, each in tensors.items() if not each.numel()
        }
        moved |= move_columns({k: each for k, each in tensors.items() if each.numel()}, device)
        others = cast(TensorDict, move_batch(self.others, device))
        return replace(self, others=others, **moved)

    @property
    def observation(self) -> torch.Tensor:
        """The observations, a view ``[*batch, n, *frame]`` of ``windows``, or ``[*batch, *frame]``
        if values are not stacks."""
        return self._part(0)

    @property
    def next_observation(self) -> torch.Tensor:
        """The next observations, with the shape of `observation`. A view of ``windows``, or a copy
        if ``unshifted`` is not empty."""
        found = self._part(1)
        if not len(self.unshifted):
            return found
        found = found.clone(memory_format=torch.contiguous_format)
        found.view(-1, *self.unshifted_next.shape[1:])[self.unshifted] = self.unshifted_next
        return found

    @property
    def rows(self) -> TensorDict:
        """The rows as a new TensorDict ``[*batch]``, with `observation` and `next_observation`."""
        found = self.others.copy()
        found.set(self.key, self.observation)
        found.set((NEXT, *self.key), self.next_observation)
        return found

    def _part(self, first: int) -> torch.Tensor:
        dim = self.others.batch_dims
        if self.unshifted_next.dim() - 1 == self.windows.dim() - dim:
            return self.windows.narrow(dim, first, self.stack)
        return self.windows.select(dim, first)


def frame_windows(
    storage: ReadableStorage,
    index: Any,
    key: str | Key = "observation",
    *,
    keys: Keys | None = None,
    stack: int | None = None,
) -> FrameWindows:
    """Read rows as windows of frames, so that each frame of a row is copied to a device only once.

    For stacks of n frames, the result has windows of n + 1 frames. Any storage may be read. If
    its frames are stored once, only n + 1 frames of each row are decoded. The next observation is
    that of one step; `n_step` reads those of later steps.

    Args:
        storage: the storage of the rows.
        index: rows as ``storage.get`` accepts them, an array or tensor ``[*batch]``.
        key: the observation. ``next`` must have a column of the same dtype and shape.
        keys: the other columns to read, which may be overlays; None: all.
        stack: the number of frames of a value, along its first axis; 1 if the value is one frame.
            None: the number of frames in the pool of the column, or, if the column is stored
            whole, those that ``once=True`` would assume.

    Raises:
        ColumnsMissing: a column does not exist.
        IndexOutOfRange: a row does not exist.
        NotEnoughMemory: the windows would take more than the available memory allows.
        Overrun: another process overwrites a ring faster than it is read.
        TypeError: ``index`` is not an index of rows.
        ValueError: the column in ``next`` has another dtype or shape, or ``stack`` is neither 1 nor
            the length of the first axis.
    """
    if isinstance(index, TensorDictBase):
        raise TypeError(
            "index: expected rows as storage.get accepts them, got a TensorDict. For a sampled "
            'batch, pass its "index". For the next observations of n steps, use n_step instead.'
        )
    key, reader = as_key(key), storage.reader
    if keys is not None:
        reader = storage.reader_with([*reader.keys, *_as_sequence(keys)])
    column = _observation(reader, key)
    frames = stack if stack is not None else reader.column(key).stack or guess_stack(column)
    if frames != 1 and column.shape[:1] != (frames,):
        raise ValueError(
            f"stack: expected 1, or the {column.shape[0] if column.shape else 1} entries of the "
            f"first axis of {format_key(key)}, got {stack!r}."
        )
    asked = reader.keys if keys is None else [as_key(each) for each in _as_sequence(keys)]
    if asked:
        columns_of(reader, asked)  # raises if a column does not exist
    chosen = tuple(each for each in asked if each not in (key, (NEXT, *key)))
    return read_consistently(reader, lambda: _read(reader, index, column, frames, chosen))


def _as_sequence(keys: Keys) -> Sequence[str | Key]:
    return (keys,) if isinstance(keys, str) else tuple(keys)


def _observation(reader: RowReader, key: Key) -> Column:
    columns = {each.key: each for each in reader.schema.columns}
    missing = [each for each in (key, (NEXT, *key)) if each not in columns]
    if missing:
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(map(format_key, missing))}. Windows need an "
            f"observation and its next one.{excluded_note(reader.runs, missing)}"
        )
    column, after = columns[key], columns[NEXT, *key]
    if (column.dtype, column.shape) != (after.dtype, after.shape):
        raise ValueError(
            f"key: expected a column like {format_key(after.key)}, with {after.dtype} "
            f"{list(after.shape)}, got {format_key(key)}, with {column.dtype} "
            f"{list(column.shape)}."
        )
    return column


def _read(
    reader: RowReader, index: Any, column: Column, stack: int, chosen: tuple[Key, ...]
) -> FrameWindows:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        rows = numbers_of(reader, index)
        found = _read_rows(reader, rows, column, stack, chosen)
        # If rows were overwritten during the read, repeat it with the current rows.
        if not rows.size or rows.min() >= reader.span.start:
            return found
        if time.monotonic() > deadline:
            raise reader.overrun(f"these {rows.size} rows")


def _read_rows(
    reader: RowReader, rows: np.ndarray, column: Column, stack: int, chosen: tuple[Key, ...]
) -> FrameWindows:
    key, flat = column.key, rows.reshape(-1)
    frame = column.shape if stack == 1 else column.shape[1:]
    nbytes = rows.size * column.row_nbytes // stack * (stack + 1)
    if not is_small_allocation(nbytes):
        require_memory(nbytes, f"{rows.size} windows", "Choose fewer rows.")
    first, after = reader.column(key), reader.column((NEXT, *key))
    windows = np.empty((len(flat), stack + 1, *frame), column.numpy_dtype)
    if first.stack == stack:
        shifts = first.take_windows(flat, windows)
    else:
        begins, ends = first.take(flat), after.take(flat)
        if stack > 1:
            windows[:, :-1], windows[:, -1] = begins, ends[:, -1]
        else:
            windows[:, 0], windows[:, 1] = begins, ends
        size = column.row_nbytes // stack
        shifts = (_bytes_of(begins)[:, size:] == _bytes_of(ends)[:, :-size]).all(axis=1)
    left = np.flatnonzero(~shifts)
    others = TensorDict({}, list(rows.shape))
    if chosen:
        nest = columns_of(reader, chosen)[1]
        arrays = reader.copies(flat, chosen)
        others = nest([each.reshape(rows.shape + each.shape[1:]) for each in arrays], rows.shape)
    return FrameWindows(
        key,
        stack,
        _tensor(windows.reshape(rows.shape + windows.shape[1:]), column),
        torch.from_numpy(left),
        _tensor(after.take(flat[left]), column),
        others,
    )


def _bytes_of(values: np.ndarray) -> np.ndarray:
    """Return the bytes of each row, uint8 [rows, *]."""
    return values.reshape(len(values), math.prod(values.shape[1:])).view(np.uint8)


def _tensor(values: np.ndarray, column: Column) -> torch.Tensor:
    found = torch.from_numpy(values)
    return found.view(column.dtype) if column.dtype is torch.bfloat16 else found
