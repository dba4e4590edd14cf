"""Lay out rows as TorchRL's collectors do: ``[lanes, time]``, with a dimension named "time".

The batch size of the environment comes before ``time``, so a batch of an environment without a
batch size is ``[time]``. A batch is ``[workers, *batch size, time]`` if each worker calls a
factory. If such workers do not wait for one another, each batch comes from one worker.

Done flags are the environment's own, also at the root, so ``("next", "done")`` marks the ends of
episodes. If lanes differ in length, shorter lanes are padded with zeros. Only then are the done
flags True at the last row of each lane too, because value estimators step through time by them.
"""

import warnings
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase

from tallyroll.collector.batches.layouts.cuts import last_rows
from tallyroll.collector.batches.layouts.trajectories import padded
from tallyroll.collector.batches.rows.rows import ArrayBatch
from tallyroll.collector.batches.rows.slab_rows import SlabBatch
from tallyroll.collector.errors import ArgumentError, ItemsDiffer
from tallyroll.collector.options import Options
from tallyroll.collector.rollout.slab_plan import SlabPlan
from tallyroll.storage.rows.keys import (
    CUT,
    DONE,
    LANE,
    MASK,
    NEXT,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)

Shape = tuple[int, ...]
Flags = Mapping[Key, torch.Tensor]
NO_FLAGS: Flags = {}
"""The flags of rows in other layouts: none."""


class PaddedBatchWarning(UserWarning):
    """Batches in TorchRL's layout are not full rectangles; the message has a remedy."""


class TorchrlLayout:
    """Lays out batches as TorchRL's collectors do.

    Args:
        options: the options of the run.
        plan: the plan of the slab, which lists the flags.
        shapes: the batch size of each worker's environment, or of the only environment.
        stacked: True if batches have a dimension of workers; all workers then have the same shape.
        apart: True if each batch has the rows of one worker.

    Raises:
        ArgumentError: ``set_truncated`` is True, but the environment declares no ``truncated``.
    """

    def __init__(
        self,
        options: Options,
        plan: SlabPlan,
        shapes: Sequence[Shape],
        *,
        stacked: bool = False,
        apart: bool = False,
    ) -> None:
        self.apart = apart
        self._shapes, self._split = list(shapes), options.layout.split_trajs
        sizes = [prod(shape) for shape in shapes]
        self._starts = list(accumulate(sizes, initial=options.first_lane))
        """The first lane of each worker, and the lane after the last worker."""
        self._lead: Shape = shapes[0] if len(shapes) == 1 else (sum(sizes),)
        if stacked and len(set(shapes)) == 1:
            self._lead = (len(shapes), *shapes[0])
        self._stacked = stacked and not apart
        self._options, self._reset_slots = options, plan.reset_slots
        self._flags = plan.flags
        self._nested = [key for key in plan.flags if len(key) > 1]
        self._dones = [(NEXT, *key) for key in plan.flags if key[-1] == DONE[-1]]
        self._no_truncated = TRUNCATED[1:] not in plan.flags
        self._truncated = [(NEXT, *k) for k in plan.flags if k[-1] == TRUNCATED[-1]]
        if not options.layout.set_truncated:
            self._truncated = []
        elif not self._truncated:
            raise ArgumentError(
                "set_truncated=True: expected an environment that declares 'truncated', got "
                f"{sorted(map(format_key, plan.flags))}. Leave the option out, or call the "
                "environment's add_truncated_keys()."
            )
        self._last: dict[Key, NDArray[np.bool_]] = {}
        """The flags below the root in the last delivered row of each lane ``[lane, ...]``."""
        self._warned = False

    @property
    def lanes(self) -> int:
        """Number of lanes of all workers together."""
        return self._starts[-1] - self._starts[0]

    @property
    def follows(self) -> bool:
        """True if there are flags below the root. The layout must then read every row."""
        return bool(self._nested)

    @property
    def marked(self) -> tuple[Key, ...]:
        """Flags that may be True in a batch although the environment set them to False."""
        return (*self._dones, *self._truncated)

    @property
    def dims(self) -> int:
        """Number of dimensions of a worker's rows, ``time`` included."""
        return 1 + max(map(len, self._shapes))

    def require_rectangles(self, items: bool = False) -> None:
        """Refuse a TorchRL buffer unless all batches are full rectangles, because it has no mask.

        ``items`` is True if the buffer keeps the rows that a lane has in a batch as one item, whose
        length never changes.

        Raises:
            ArgumentError: a batch may not be a full rectangle; the message gives the reason.
        """
        if all(shape == () for shape in self._shapes):
            return
        lanes = [prod(shape) for shape in self._shapes] if self.apart else [self.lanes]
        for name in ("frames_per_batch", "total_frames"):
            count = getattr(self._options, name)
            if count is not None and any(count % each for each in lanes):
                raise ArgumentError(
                    f"{name}: expected a multiple of {max(lanes)} lanes, got {count}, because "
                    'layout="torchrl" gives a TorchRL replay buffer [lanes, time]. Or give the '
                    "buffer one of tallyroll's storages, which accept any number of rows."
                )
        options = self._options
        if items and options.total_frames and options.total_frames % options.largest_batch:
            raise ArgumentError(
                "total_frames: expected a multiple of "
                f"frames_per_batch={options.frames_per_batch}, got {options.total_frames}. An item "
                "of the replay buffer is a part of a batch. Change total_frames, or give the "
                "buffer one of tallyroll's storages, which accept single rows."
            )
        if self._reset_slots or self._options.total_episodes is not None:
            what = "reset slots" if self._reset_slots else "total_episodes"
            raise ArgumentError(
                'replay_buffer: layout="torchrl" writes items [lanes, time] to a TorchRL buffer, '
                f"but with {what}, the lanes of an item differ in length. Give the buffer one of "
                "tallyroll's storages, which accept any rows."
            )

    # --- root flags -------------------------------------------------------------------------------

    def root_flags(self, part: ArrayBatch | SlabBatch) -> Flags:
        """Return the done flags at the root ``[row, ...]``: the state before the step of each row.

        Call it for every delivered part, in order: a group of agents may be done before its lane,
        and its flag carries over to the next part.
        """
        count = len(part)
        flags = {key: torch.zeros((count, 1), dtype=torch.bool) for key in self._flags}
        if not self._nested:
            return flags
        lane, step = part.array(LANE) - self._starts[0], part.array(STEP)
        first = np.diff(lane, prepend=-1) != 0
        last = np.diff(lane, append=-1) != 0
        for key in self._nested:
            after = part.array((NEXT, *key))
            before = np.zeros_like(after)
            before[1:] = after[:-1]
            if key not in self._last:
                self._last[key] = np.zeros((self.lanes, *after.shape[1:]), np.bool_)
            before[first] = self._last[key][lane[first]]
            before[step == 0] = False
            self._last[key][lane[last]] = after[last]
            flags[key] = torch.from_numpy(before)
        return flags

    # --- batches ----------------------------------------------------------------------------------

    def __call__(self, rows: TensorDictBase, flags: Flags) -> TensorDictBase:
        """Lay out ``rows``, which are ordered by lane, as a batch with ``flags`` at the root."""
        rows = self._with_flags(rows, flags)
        lanes, lead = range(self._starts[0], self._starts[-1]), self._lead
        if self.apart:
            worker = bisect_right(self._starts, int(rows.get(LANE)[0])) - 1
            lanes, lead = self._lanes_of(worker), self._shapes[worker]
        batch, lengths = self._laid_out(rows, lanes, lead)
        if len(set(lengths)) > 1 and not self._split:
            self._warn(lengths)
        return batch

    def for_buffer(self, rows: TensorDictBase, flags: Flags) -> list[TensorDictBase]:
        """Return the batches that TorchRL's workers would put into a buffer, without marks of cuts.

        Raises:
            ItemsDiffer: lanes differ in length, which the buffer does not support.
        """
        rows = self._with_flags(rows, flags).exclude(CUT)
        lane, found = rows.get(LANE).cpu().numpy(), []
        for worker, shape in enumerate(self._shapes):
            lanes = self._lanes_of(worker)
            start, stop = np.searchsorted(lane, [lanes.start, lanes.stop])
            if start == stop:
                continue
            batch, lengths = self._laid_out(rows[start:stop], lanes, shape)
            if len(set(lengths)) > 1 and not self._split:
                raise ItemsDiffer(
                    "replay_buffer: expected lanes of equal length for a TorchRL buffer in "
                    f'layout="torchrl", got {lengths.min()} to {lengths.max()} rows, because a '
                    "lane was cut. Give the buffer one of tallyroll's storages, which accept any "
                    "rows."
                )
            found.append(batch)
        return found

    def processed_for_buffer(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """Return the batches for a buffer, taken from a yielded batch or the result of a postproc.

        For environments without a batch size, they contain only the rows in the mask.
        """
        if not self._stacked or batch.batch_size[:1] != (len(self._shapes),):
            return [batch]
        found = list(batch.unbind(0))
        if batch.get(MASK, None) is None or self._shapes[0]:
            return found
        return [each[each.get(MASK)].exclude(MASK) for each in found]

    def rows_of(self, batch: TensorDictBase) -> TensorDictBase:
        """Return the rows in a batch as they are stored, without the flags at the root."""
        mask = batch.get(MASK, None)
        rows = batch.reshape(-1) if mask is None else batch[mask].exclude(MASK)
        rows = rows.exclude(*self._flags)
        if self._no_truncated:
            rows.set(TRUNCATED, rows.get(DONE) & ~rows.get(TERMINATED))
        return rows

    def _lanes_of(self, worker: int) -> range:
        return range(self._starts[worker], self._starts[worker + 1])

    def _with_flags(self, rows: TensorDictBase, flags: Flags) -> TensorDictBase:
        rows = rows.copy()
        device = rows.get(DONE).device
        for key, flag in flags.items():
            rows.set(key, flag.to(device))
        if self._no_truncated:
            del rows[TRUNCATED]
        return rows

    def _laid_out(
        self, rows: TensorDictBase, lanes: range, lead: Shape
    ) -> tuple[TensorDictBase, NDArray[np.intp]]:
        """Return ``rows`` of ``lanes`` as a batch, and the number of rows of each lane."""
        of_lanes = np.bincount(rows.get(LANE).cpu().numpy() - lanes.start, minlength=len(lanes))
        lengths = of_lanes
        ends = np.cumsum(lengths)[lengths > 0] - 1
        if self._truncated:
            dones = [(*key[:-1], DONE[-1]) for key in self._truncated]
            self._mark(rows, ends, [*self._truncated, *dones])
        if self._split:
            ends = np.flatnonzero(last_rows({TRAJ_IDS: rows.get(TRAJ_IDS).cpu()}))
            lengths, lead = np.diff(ends, prepend=-1), (len(ends),)
        full = bool((lengths == lengths.max(initial=0)).all())
        if not full:
            self._mark(rows, ends, self._dones)
        batch = padded(rows, lengths, lead)
        if full and not self._split:
            del batch[MASK]
        batch.refine_names(..., "time")
        return batch, of_lanes

    @staticmethod
    def _mark(rows: TensorDictBase, ends: NDArray[Any], keys: Sequence[Key]) -> None:
        at = torch.from_numpy(ends)
        for key in dict.fromkeys(keys):
            flag = rows.get(key).clone()
            flag[at.to(flag.device)] = True
            rows.set(key, flag)

    def _warn(self, lengths: NDArray[np.intp]) -> None:
        if self._warned:
            return
        self._warned = True
        lanes = len(lengths)
        why = f"make frames_per_batch and total_frames multiples of {lanes} lanes"
        if self._reset_slots:
            why = (
                'avoid reset slots, which hold no rows, with reset_slots="avoid" or '
                f"AutoresetMode.DISABLED, and {why}"
            )
        elif self._options.total_episodes is not None:
            why = "give total_frames, because with total_episodes lanes end at different steps"
        warnings.warn(
            f'layout="torchrl": the lanes of this batch have {lengths.min()} to {lengths.max()} '
            'rows. Shorter lanes are padded with zeros, and ("next", "done") is True at the last '
            f'row of each lane. Ignore positions where ("collector", "mask") is False, or {why}',
            PaddedBatchWarning,
            stacklevel=2,
        )
