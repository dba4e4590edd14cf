"""Lay out batches of a few slots from the columns of a slab."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.collector.batches.rows.slab_rows import SlabBatch, SlabTable
from tallyroll.collector.native.kernel import in_order, require_names
from tallyroll.storage.engine.kernel import compiled, copy_table, table_of
from tallyroll.storage.engine.pool import BufferPool, Room
from tallyroll.storage.rows.batch_dims import Shapes
from tallyroll.storage.rows.keys import CUT, DONE, TRAJ_IDS, Key
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder

MARKS = ("none", "last", "first", "cut")
"""The marks of a column; the table of `StepKernel.store_slots` refers to them by index."""
require_names("MARKS", MARKS)


class SmallBatches:
    """Lays out rows of a slab as batches, with marks of cuts.

    Args:
        table: the columns of the slab.
        keys: keys of the yielded columns, in their order.
        dones: done keys below the root, which are also True at the last row of a trajectory.
        inner_dims: further batch dimensions of nested TensorDicts, parents first.
        marks: False if no done flag is marked at the last row of a trajectory.
        inits: keys that are also True at the first row of a trajectory.
    """

    def __init__(
        self,
        table: SlabTable,
        keys: Sequence[Key],
        dones: Sequence[Key],
        inner_dims: Shapes,
        *,
        marks: bool = True,
        inits: Sequence[Key] = (),
    ) -> None:
        self._kernel = compiled()
        self._columns = [table.columns[key] for key in keys]
        rows = [(each.dtype, each.shape[1:]) for each in self._columns]
        self._pool = BufferPool([*rows, (np.dtype(np.bool_), ())])
        self._done = keys.index(DONE)
        self._marked = [keys.index(key) for key in (DONE, *dones)] if marks else []
        self._inits = [keys.index(key) for key in inits]
        self._ids = keys.index(TRAJ_IDS)
        dtypes = [torch.from_numpy(each[:0]).dtype for each in self._columns]
        self._nest = TensorDictBuilder(
            [*zip(keys, dtypes, strict=True), (CUT, torch.bool)], inner_dims
        )
        self._table = self._table_of(self._columns)

    def _table_of(self, columns: Sequence[np.ndarray]) -> bytes:
        """Return the table of a batch for `StepKernel.store_slots`."""
        words: list[Any] = in_order("BATCH", ids=self._ids, done=self._done)
        for index, column in enumerate(columns):
            marks = "last" if index in self._marked else "first" if index in self._inits else "none"
            words += _copy(column, column[:1].nbytes, marks)
        return table_of([*words, *_copy(0, 1, "cut")])

    def empty(self, count: int) -> tuple[bytes, Any, TensorDict]:
        """Return an uninitialised batch of ``count`` rows, which `StepKernel.store_slots` fills."""
        arrays, room = self._pool.room((count,))
        tensors = list(map(torch.from_numpy, arrays))
        if room.words is None:
            room.keep_words(array("q", map(torch.Tensor.data_ptr, tensors)))
        return self._table, room.words, self._nest.of_tensors(tensors, (count,))

    def batch(self, part: SlabBatch) -> TensorDict:
        """Return the rows of ``part`` as a TensorDict ``[row]``, marked as in `cuts`."""
        arrays, room = self._pool.room((len(part.index),))
        self._fill(arrays, room, part)
        ids = arrays[self._ids]
        last = np.ones(len(ids), np.bool_)
        np.not_equal(ids[1:], ids[:-1], out=last[:-1])
        np.greater(last, arrays[self._done].reshape(-1), out=arrays[-1])
        for index in self._marked:
            done = arrays[index]
            done |= last.reshape(len(last), *[1] * (done.ndim - 1))
        for index in self._inits:
            init = arrays[index]
            init |= np.roll(last, 1).reshape(len(last), *[1] * (init.ndim - 1))
        return self._nest(arrays, (len(ids),))

    def _fill(self, arrays: list[np.ndarray], room: Room, part: SlabBatch) -> None:
        index = part.index
        kernel = self._kernel
        if kernel is None:
            for to, column in zip(arrays, self._columns, strict=False):  # the last array marks cuts
                some = slice(index.start, index.stop) if isinstance(index, range) else index
                to[...] = column[some]
            return
        table = room.table
        if table is None or room.of is not self:
            row_nbytes = [column[:1].nbytes for column in self._columns]
            table = copy_table(room.arrays[:-1], self._columns, row_nbytes)
            room.keep_table(table, self)
        if isinstance(index, range):
            kernel.copy_rows(table, 0, index.start, len(index))
        else:
            kernel.gather_rows(table, 0, index, len(self._columns[0]))


def _copy(source: int | np.ndarray, row_nbytes: int, marks: str) -> list[int | np.ndarray]:
    return in_order("COPY", source=source, row_nbytes=row_nbytes, marks=MARKS.index(marks))
