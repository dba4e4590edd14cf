"""Rows in the layout of TorchRL's collectors: ``[lanes, time]``, with time named.

The batch size of the environment comes before ``time``: one without a batch size gives
``[time]``, and workers that each call a factory give ``[workers, *batch size, time]``, or a batch
of its own each, if they do not wait for one another.

Done flags are the environment's own, at the root as well, so that ``("next", "done")`` says which
episodes ended. Only if lanes differ in length, so that zeros follow, are they True at each lane's
last row too, because value estimators step through time by them.
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
from tallyroll.collector.batches.rows.rows import Part
from tallyroll.collector.batches.rows.slab_rows import SlabPart
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
"""Flags of rows in other layouts."""


class PaddedBatchWarning(UserWarning):
    """Batches in TorchRL's layout are no full rectangles; says why, and the way out."""


class TorchrlLayout:
    """Lays batches out.

    Args:
        options: of the run.
        plan: which flags there are.
        shapes: the batch size of each worker's environment, or of the only one.
        stacked: batches have a dimension of workers, where these have equal lanes.
        apart: a batch is of one worker.

    Raises:
        ArgumentError: ``set_truncated`` of an environment that knows no truncation.
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
        """The first lane of each worker, and the one after the last."""
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
        """The flags below the root in the last row of each lane ``[lane, ...]``."""
        self._warned = False

    @property
    def lanes(self) -> int:
        """Lanes of all workers together."""
        return self._starts[-1] - self._starts[0]

    @property
    def follows(self) -> bool:
        """True if there are flags below the root, for which every row is read."""
        return bool(self._nested)

    @property
    def marked(self) -> tuple[Key, ...]:
        """Flags that a batch may have True where the environment did not say so."""
        return (*self._dones, *self._truncated)

    @property
    def dims(self) -> int:
        """Number of dimensions of a worker's rows, ``time`` included."""
        return 1 + max(map(len, self._shapes))

    def require_rectangles(self, items: bool = False) -> None:
        """Refuse a TorchRL buffer if batches are no full rectangles, because it knows no mask.

        ``items``: it keeps a lane's rows of a batch as one, of a length that never changes.

        Raises:
            ArgumentError: says what does.
        """
        if all(shape == () for shape in self._shapes):
            return
        lanes = [prod(shape) for shape in self._shapes] if self.apart else [self.lanes]
        for name in ("frames_per_batch", "total_frames"):
            count = getattr(self._options, name)
            if count is not None and any(count % each for each in lanes):
                raise ArgumentError(
                    f'{name}: layout="torchrl" gives a TorchRL replay buffer [lanes, time], '
                    f"which needs a multiple of {max(lanes)} lanes, got {count}. Or give the "
                    "buffer one of tallyroll's storages, which take any number of rows."
                )
        options = self._options
        if items and options.total_frames and options.total_frames % options.largest_batch:
            raise ArgumentError(
                f"total_frames: the replay buffer's items are a lane's part of a batch: expected a "
                f"multiple of frames_per_batch={options.frames_per_batch}, got "
                f"{options.total_frames}; or give the buffer one of tallyroll's storages, which "
                "take rows"
            )
        if self._reset_slots or self._options.total_episodes is not None:
            what = "reset slots" if self._reset_slots else "total_episodes"
            raise ArgumentError(
                f'replay_buffer: layout="torchrl" gives a TorchRL buffer [lanes, time], and with '
                f"{what} lanes differ in length; give the buffer one of tallyroll's storages, "
                "which take any rows"
            )

    # --- root flags -------------------------------------------------------------------------------

    def root_flags(self, part: Part | SlabPart) -> Flags:
        """The done flags that each row of ``part`` begins with ``[row, ...]``.

        Every part that is delivered goes through here, in order, for a group of agents may be done
        before the lane is.
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
        """Return ``rows``, in order of lanes, with ``flags`` at the root, as a batch."""
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
        """Return what each of TorchRL's workers would put into its buffer; cuts are not marked.

        Raises:
            ItemsDiffer: lanes differ in length, of which such a buffer knows nothing.
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
                    f"replay_buffer: expected lanes of equal length for a TorchRL buffer in "
                    f'layout="torchrl", got {lengths.min()} to {lengths.max()} rows, for a lane '
                    "was cut; give the buffer one of tallyroll's storages, which take any rows"
                )
            found.append(batch)
        return found

    def processed_for_buffer(self, batch: TensorDictBase) -> list[TensorDictBase]:
        """The same of a batch that was yielded, or that a postproc returned.

        Of a lane without a batch dimension, what is in the mask.
        """
        if not self._stacked or batch.batch_size[:1] != (len(self._shapes),):
            return [batch]
        found = list(batch.unbind(0))
        if batch.get(MASK, None) is None or self._shapes[0]:
            return found
        return [each[each.get(MASK)].exclude(MASK) for each in found]

    def rows_of(self, batch: TensorDictBase) -> TensorDictBase:
        """The rows in a batch, as they are stored: without the flags at the root."""
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
        """``rows`` of ``lanes`` as a batch, and the rows of each lane."""
        of_lanes = np.bincount(rows.get(LANE).cpu().numpy() - lanes.start, minlength=len(lanes))
        lengths = of_lanes
        ends = np.cumsum(lengths)[lengths > 0] - 1
        if self._truncated:
            self._mark(rows, ends, [*self._truncated, *map(_done_beside, self._truncated)])
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
                'the environment has reset slots, which are no rows: reset_slots="avoid", or '
                f"AutoresetMode.DISABLED, has none; and {why}"
            )
        elif self._options.total_episodes is not None:
            why = "with total_episodes lanes end apart: give total_frames"
        warnings.warn(
            f'layout="torchrl": lanes of this batch have {lengths.min()} to {lengths.max()} rows, '
            'so that it is padded with zeros, has ("collector", "mask"), and ("next", "done") is '
            f"True at the last row of each lane; leave out what is not in the mask, or {why}",
            PaddedBatchWarning,
            stacklevel=2,
        )


def _done_beside(key: Key) -> Key:
    return (*key[:-1], DONE[-1])
