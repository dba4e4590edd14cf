"""Lay rows out for a storage, for a replay buffer, and as a batch.

Small batches do not pass through `BatchLayout`: `SmallBatches` (``batches/rows/slab_output.py``)
copies them from the slab, and ``lay_out`` in ``native/_store.c`` does so while it stores them. Both
must yield the same columns, order and marks of cuts.

`EpisodeBatches` (``ext/episode_batches.py``) and `WholeTrajectories` (``ext/torchrl/iteration.py``)
regroup batches that a collector has yielded.
"""

from typing import NamedTuple

import torch
from tensordict import TensorDictBase

from tallyroll.collector.batches.layouts.cuts import (
    own_flags,
    with_beginnings,
    with_cuts,
    without_cuts,
)
from tallyroll.collector.batches.layouts.torchrl_layout import Flags, TorchrlLayout
from tallyroll.collector.batches.layouts.trajectories import by_lane, split_trajectories
from tallyroll.collector.batches.rows.rows import (
    ArrayBatch,
    Rows,
    RowSource,
    as_tensordict,
    inner_dims_of,
)
from tallyroll.collector.batches.stored.writer import BatchWriter, Columns
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.interrupts import pause_on_signal, until_exit
from tallyroll.collector.options import Options, Postproc
from tallyroll.collector.user_code import user_code
from tallyroll.storage.engine.pool import BufferPool
from tallyroll.storage.rows.batch_dims import Shapes, batch_dims_of
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import CUT, DONE, LANE, TRAJ_IDS, as_key, format_key


class LaidOut(NamedTuple):
    """Rows to store, and the batch to yield."""

    rows: Rows
    large: Columns
    """Large columns that are stored and not yielded."""
    shaped: list[TensorDictBase] | None
    """Batches that a replay buffer gets instead of ``rows``; None if it gets ``rows``."""
    inner_dims: Shapes
    """The batch size after the rows of each nested TensorDict that has one."""
    batch: TensorDictBase | None
    """The batch; None if no batch is yielded."""


class BatchLayout:
    """Lays rows out for a storage, for a replay buffer, and as batches.

    Args:
        options: the options of the run.
        source: turns blocks into rows.
        lanes: the lanes of this collector, numbered over the run.
        writer: stores the rows.
        torchrl: lays batches out for ``layout="torchrl"``.
    """

    def __init__(
        self,
        options: Options,
        source: RowSource,
        lanes: range,
        writer: BatchWriter,
        torchrl: TorchrlLayout | None,
    ) -> None:
        self._options, self._source, self._lanes = options, source, lanes
        self.torchrl = torchrl
        self._shapes = torchrl is not None and writer.shapes
        """True if a replay buffer of TorchRL gets batches in the layout of the run."""
        if torchrl is not None and self._shapes:
            items = options.postproc is None and writer.makes_items(torchrl.dims)
            torchrl.require_rectangles(items)
        self.arranges = options.layout.name != "rows"
        """True if batches have a layout other than one row after the other."""
        self.marks = torchrl is None
        """True if done flags are True at the last row of a trajectory in a batch."""
        self.inits = source.plan.inits if torchrl is None else ()
        """Keys that mark a trajectory's first row; none in TorchRL's layout."""
        yields = options.columns.yield_large
        hidden = () if yields else source.large
        self.keys = [key for key in source.no_rows if key not in hidden]
        """Columns that are yielded."""
        large = [source.plan.layout[key] for key in source.large] if yields else []
        # A column of a dtype that NumPy lacks was copied with the small columns.
        self._pool = BufferPool(
            [(NUMPY[c.dtype], c.shape) for c in large if c.dtype is not torch.bfloat16]
        )

    def of(self, part: ArrayBatch, flags: Flags, *, yields: bool) -> LaidOut:
        """Lay out the rows of ``part``, and also as a batch if ``yields`` is True."""
        rows, large = self._parted(part)
        shaped = None
        if self.torchrl is not None and self._shapes:
            shaped = self.torchrl.for_buffer(self._as_batch(rows), flags)
        batch = self._as_batch(rows) if yields else None
        return LaidOut(rows, large, shaped, self._source.inner_dims, batch)

    def arranged(self, batch: TensorDictBase, flags: Flags) -> TensorDictBase:
        """Return the rows of ``batch`` in the layout of the run."""
        if self.torchrl is not None:
            return self.torchrl(batch, flags)
        if self._options.layout.name == "lanes":
            return by_lane(batch, self._lanes)
        return split_trajectories(batch) if self._options.layout.name == "trajectories" else batch

    def _parted(self, part: ArrayBatch) -> tuple[Rows, Columns]:
        """Return the rows to yield, and the large columns that are only stored."""
        if not self._source.large:
            return part.rows, {}
        rows = dict(part.rows)
        if not self._options.columns.yield_large:
            copied = {key: rows.pop(key) for key in self._source.large if key in rows}
            return rows, {**part.large, **copied}
        if part.large:
            # Reusing memory takes a fifth of the time of allocating it.
            arrays = self._pool.arrays((len(part),))
            for (key, gathered), array in zip(part.large.items(), arrays, strict=True):
                gathered.copy_to(array)
                rows[key] = torch.from_numpy(array)
            rows = {key: rows[key] for key in self._source.no_rows}
        return rows, {}

    def _as_batch(self, rows: Rows) -> TensorDictBase:
        marked = with_cuts(rows, self._source.plan.dones, marks=self.marks)
        marked = with_beginnings(marked, self.inits)
        return as_tensordict(marked, self._options.storing_device, self._source.inner_dims)


class PostprocLayout(BatchLayout):
    """Applies ``postproc`` to rows before they are stored and yielded.

    Args:
        postproc: takes a batch and returns the batch to store and yield.
        options, source, lanes, writer, torchrl: as for `BatchLayout`.
    """

    def __init__(
        self,
        postproc: Postproc,
        options: Options,
        source: RowSource,
        lanes: range,
        writer: BatchWriter,
        torchrl: TorchrlLayout | None,
    ) -> None:
        super().__init__(options, source, lanes, writer, torchrl)
        self._postproc = postproc
        self._marked = source.plan.dones if torchrl is None else torchrl.marked
        self._stores, self._has_storage = writer.stores, writer.storage is not None

    def of(self, part: ArrayBatch, flags: Flags, *, yields: bool) -> LaidOut:
        """Lay out the result of ``postproc``, which gets a batch even if none is yielded.

        Raises:
            ArgumentError: the result lacks rows or columns that have to be stored.
        """
        rows, _ = self._parted(part)
        own = own_flags(rows, self._marked, self.inits) if self._stores else []
        batch, torchrl = self._as_batch(rows), self.torchrl
        if torchrl is not None:
            batch = torchrl(batch, flags)
        with pause_on_signal(until_exit), user_code("postproc"):
            batch = self._postproc(batch)
        stored, shaped = batch, None
        if torchrl is not None:
            if not isinstance(batch, TensorDictBase):
                raise ArgumentError(
                    f"postproc: expected a TensorDict as its result, got {type(batch).__name__}"
                )
            if self._shapes:
                shaped = torchrl.processed_for_buffer(batch)
            if not self._has_storage:  # return the rows as they were before postproc
                return LaidOut(rows, {}, shaped, self._source.inner_dims, batch if yields else None)
            stored = torchrl.rows_of(batch)
        _require_rows(stored, len(part))
        kept = without_cuts({as_key(key): leaf for key, leaf in stored.items(True, True)}, own)
        inner_dims = inner_dims_of(kept, batch_dims_of(stored))
        return LaidOut(kept, {}, shaped, inner_dims, batch if yields else None)

    def arranged(self, batch: TensorDictBase, flags: Flags) -> TensorDictBase:
        """Return ``batch`` in the layout of the run; ``postproc`` already got TorchRL's layout."""
        return batch if self.torchrl is not None else super().arranged(batch, flags)


def _require_rows(stored: TensorDictBase, count: int) -> None:
    """Refuse a result of ``postproc`` that lacks rows or the columns that number them.

    It must have ``count`` rows.
    """
    if not isinstance(stored, TensorDictBase) or stored.batch_size != torch.Size([count]):
        got = list(getattr(stored, "batch_size", [])) or type(stored).__name__
        raise ArgumentError(f"postproc: expected a result of batch size [{count}], got {got}")
    missing = [format_key(k) for k in (CUT, DONE, LANE, TRAJ_IDS) if stored.get(k, None) is None]
    if missing:
        raise ArgumentError(
            f"postproc: expected a result with the columns {missing}, got one without them. Keep "
            "these columns."
        )
