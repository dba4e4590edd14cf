"""Store rows and lay out small batches directly from the memory of a slab."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from tallyroll.collector.batches.layouts.batch_layout import BatchLayout
from tallyroll.collector.batches.rows.rows import RowSource
from tallyroll.collector.batches.rows.slab_rows import SlabBatch, SlabTable, rows_of_slab
from tallyroll.collector.batches.state.run_state import RunState
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.native.kernel import in_order, require_names
from tallyroll.collector.rollout.source import Block
from tallyroll.collector.run_plan import FEW_SLOTS
from tallyroll.collector.slab.slab import Slab
from tallyroll.storage.engine.columns import FixedRows
from tallyroll.storage.engine.kernel import compiled, copy_table, table_of
from tallyroll.storage.engine.pool import BufferPool, ColumnMemory
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

    def _fill(self, arrays: list[np.ndarray], room: ColumnMemory, part: SlabBatch) -> None:
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


class SlabOutput:
    """Stores rows that stay in their slab, and lays out small batches from the slab.

    Args:
        source: turns blocks into rows.
        run: the state of the run, whose writer stores the rows.
        laying_out: the layout of batches.
        batches: True if small batches too are laid out from a slab.
    """

    def __init__(
        self,
        source: RowSource,
        run: RunState,
        laying_out: BatchLayout,
        *,
        batches: bool,
    ) -> None:
        self._source, self._writer, self._laying_out = source, run.writer, laying_out
        self._device = run.options.storing_device
        self._most_slots = FEW_SLOTS if batches else 0
        self._tables: dict[Slab, SlabTable] = {}
        """The row table of each slab."""
        self._small: dict[SlabTable, SmallBatches] = {}

    def takes(self, block: Block, *, yields: bool) -> bool:
        """Return True if the rows of ``block`` stay in their slab instead of being gathered."""
        return not yields or block.used <= self._most_slots

    def table_of(self, slab: Slab) -> SlabTable:
        """Return the row table of ``slab``."""
        table = self._tables.get(slab)
        if table is None:
            table = self._tables[slab] = rows_of_slab(slab, self._source.plan)
        return table

    def store(self, part: SlabBatch, ledger: Ledger, open_lanes: int) -> None:
        """Commit the rows of ``part``, and the ledger that includes them."""
        rows = part.table.as_stored or self._fixed(part.table)
        if rows is not None:
            self._writer.write_fixed(rows, part.index, part.next_id, ledger, open_lanes)

    def _fixed(self, table: SlabTable) -> FixedRows | None:
        schema = self._writer.schema
        return None if schema is None else table.fixed(schema)

    def batch(self, part: SlabBatch) -> TensorDictBase:
        """Lay ``part`` out, one row after the other."""
        batch = self.batches_of(part.table).batch(part)
        return batch if self._device is None else batch.to(self._device)

    def batches_of(self, table: SlabTable) -> SmallBatches:
        """Return the `SmallBatches` of ``table``."""
        batches = self._small.get(table)
        if batches is None:
            laying_out, source = self._laying_out, self._source
            batches = self._small[table] = SmallBatches(
                table,
                laying_out.keys,
                source.plan.dones,
                source.inner_dims,
                marks=laying_out.marks,
                inits=laying_out.inits,
            )
        return batches
