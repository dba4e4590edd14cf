"""Checks of trajectory ids before a write: each id is new or continues its trajectory.

Collectors number their trajectories themselves, so their rows are not checked. Rows from elsewhere,
such as another storage, may have ids that are already stored, and would be added to those
trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol, TypeAlias

import numpy as np
import torch

from tallyroll.storage.engine.kernel import WINDOW, IdKernel, compiled
from tallyroll.storage.errors import TrajectoryIdTaken
from tallyroll.storage.rows.keys import DONE, LANE, STEP, TERMINATED, TRAJ_IDS, TRUNCATED
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import RowOrder, flags_of, numbers_of, unread
from tallyroll.storage.trajectories.episodes import Episodes
from tallyroll.storage.trajectories.index import IndexedReader, has_trajectories
from tallyroll.storage.trajectories.lane_stretches import (
    MOST_LANES,
    NOBODY,
    LaneStretches,
    extended,
    lane_order,
)

Ids: TypeAlias = Literal["check", "renumber", "fresh"]

_FIRST = np.zeros(1, np.int64)
_UNKNOWN = np.iinfo(np.int64).max


class CheckedRows(Protocol):
    """Rows that fit the schema."""

    @property
    def values(self) -> Sequence[Any]:
        """Arrays or tensors [n, ...], one per column."""

    @property
    def count(self) -> int:
        """The number of rows."""

    @property
    def addresses(self) -> Sequence[int] | None:
        """The address of each column's values, if they can be read there."""


class IdChecks:
    """Checks of the ids of a batch against those of a storage with ``schema``.

    For most batches, one comparison is enough: all ids are larger than any stored id, or each lane
    continues its last trajectory.
    """

    def __init__(self, reader: IndexedReader, schema: Schema) -> None:
        keys = schema.keys
        self._reader, self._path = reader, reader.path
        self._places = tuple(keys.index(key) for key in (TRAJ_IDS, STEP, LANE))
        ends = [key for key in (TERMINATED, TRUNCATED) if key in keys]
        if len(ends) < 2 and DONE in keys:
            ends = [DONE]
        self._ends = [keys.index(key) for key in ends]
        # Done alone may also mean that a batch was cut. A flag without done is not an end either:
        # TorchRL's trainers set truncated in every row that they store.
        self._done = [keys.index(DONE)] if DONE in keys else []
        self._order = RowOrder(schema)
        self.seen = 0
        """The number of rows whose ids have been read."""
        self._largest: int = NOBODY
        self._kernel, self._columns, self._lane_nbytes = _compiled(schema, self._places, self._ends)
        self._make_tails(0)
        self._episodes: Episodes | None = None
        """The episode table, computed for the first batch that needs it."""
        self._admitted: tuple[np.ndarray, Any, Any, Any, Any] | None = None
        """The ids that began; lanes, last ids or `NOBODY`, next steps, and last ids."""
        self._compiled_largest: int | None = None
        """The largest id, once the extension has admitted a batch; None: it has not."""
        self._replaces_all = False
        """True if the batch fills the ring, so that it replaces all stored rows."""

    @classmethod
    def of(cls, reader: IndexedReader, schema: Schema) -> IdChecks | None:
        """Return the checks for rows of ``schema``, or None if they have no ids."""
        return cls(reader, schema) if has_trajectories(schema) else None

    def largest(self) -> int:
        """Return the largest id of the stored rows, or `NOBODY` if there are none."""
        self._catch_up()
        return self._largest

    def _make_tails(self, lanes: int) -> None:
        """Make the tails of ``lanes`` lanes, whose last rows are unknown; see `IdKernel`."""
        self._tails = np.zeros(8 * lanes + 2 + 2 * WINDOW, np.int64)
        # For each lane: the trajectory of the last row, its next step, and the trajectory even if
        # it has ended. The first is `NOBODY` if it has ended, or if the row was not looked up.
        self._tail_id, self._tail_next, self._tail_run = self._tails[: 3 * lanes].reshape(3, lanes)
        self._tail_id[:] = NOBODY
        self._tail_run[:] = _UNKNOWN
        window = self._tails[-2 * WINDOW : -WINDOW]
        window[:3] = self._largest, self._largest, 1  # all ids up to the largest count as used

    def admit(self, rows: CheckedRows) -> None:
        """Check the batch that is written next.

        Raises:
            TrajectoryIdTaken: an id belongs to another trajectory.
        """
        if self.seen != self._reader.head:
            self._catch_up()
        self._admitted = self._compiled_largest = None
        values = rows.values
        if self._kernel is not None and rows.count:
            given: Sequence[Any] = rows.addresses or values
            ids, steps, lane, end, other, done = [
                None if place is None else given[place] for place in self._columns
            ]
            with suppress(BufferError, TypeError, ValueError):
                self._compiled_largest = self._kernel.admit_rows(
                    ids,
                    steps,
                    lane,
                    end,
                    other,
                    done,
                    self._tails,
                    rows.count,
                    self._lane_nbytes,
                )
            if self._compiled_largest is not None:
                return
        ids, steps, lane = (values[place] for place in self._places)
        if len(ids) == 1:
            self._admit_one(ids.item(), steps.item(), lane.item(), values)
        elif len(ids):
            ids, steps, lane = (numbers_of(_array(each)) for each in (ids, steps, lane))
            if not self._admit_slot(ids, steps, lane, values):
                self._admit_many(ids, steps, lane, values)

    def _admit_one(self, id: int, step: int, lane: int, values: Sequence[Any]) -> None:
        if not 0 <= lane < len(self._tail_id):
            _require_lanes(lane, lane, self._path)
            self._know_lane(lane)
        if id <= self._largest and not (
            self._tail_id.item(lane) == id and self._tail_next.item(lane) == step
        ):
            self._admit_many(np.array([id]), np.array([step]), np.array([lane]), values)
            return
        id_next = NOBODY if self._ended(values, _FIRST)[0] else id
        self._admitted = np.array([id]), lane, id_next, step + 1, id

    def _admit_slot(
        self, ids: np.ndarray, steps: np.ndarray, lane: np.ndarray, values: Sequence[Any]
    ) -> bool:
        """Admit a batch with one row per lane if all rows continue; return True on success."""
        if not (lane[1:] > lane[:-1]).all() or not 0 <= lane[0] <= lane[-1] < len(self._tail_id):
            return False
        known = self._tail_id.take(lane) == ids
        known &= self._tail_next.take(lane) == steps
        if not known.all():
            return False
        id = ids
        if any(values[place].any() for place in self._ends):
            id = np.where(self._ended(values), NOBODY, ids)
        self._admitted = ids[:0], lane, id, steps + 1, ids
        return True

    def _admit_many(
        self,
        ids: np.ndarray,
        steps: np.ndarray,
        lane: np.ndarray,
        values: Sequence[Any],
    ) -> None:
        _require_lanes(int(lane.min()), int(lane.max()), self._path)
        self._replaces_all = len(ids) == self._reader.ring
        order = lane_order(lane)
        self._know_lane(int(order.lane[-1]))
        ids, steps = ids.take(order.at), steps.take(order.at)
        goes_on = order.before(ids, self._tail_id) == ids
        runs = order.stretches(~goes_on)
        ended = self._ended(values, order.at)
        self._require_trajectories(runs, ids, steps, ended)
        begun = ids.take(runs.at)
        if int(begun.min()) <= self._largest:
            goes_on &= order.before(steps + 1, self._tail_next) == steps
            for run in np.flatnonzero(~goes_on.take(runs.at) & (begun <= self._largest)).tolist():
                at = runs.at[run]
                row, own, opens = int(order.at[at]), int(runs.lane[run]), at in order.first
                self._require_own(int(ids[at]), int(steps[at]), own, row, opens=opens)
        last = order.last
        last_ids = ids.take(last)
        id = np.where(ended.take(last), NOBODY, last_ids)
        self._admitted = begun, order.own, id, steps.take(last) + 1, last_ids

    def _require_trajectories(
        self, runs: LaneStretches, ids: np.ndarray, steps: np.ndarray, ended: np.ndarray
    ) -> None:
        """Raise if rows of a lane cannot follow each other, or if two runs have the same id."""
        gaps = steps[1:] != steps[:-1] + 1
        gaps |= ended[:-1]
        gaps[runs.at[1:] - 1] = False
        if gaps.any():
            at = int(gaps.argmax())
            where = f"step {steps[at]}, where it ended," if ended[at] else f"step {steps[at]}"
            self._refuse(f"step {steps[at + 1]} follows {where} in trajectory {ids[at]}")
        begun = ids.take(runs.at)
        back = (begun[1:] < begun[:-1]) & (runs.lane[1:] == runs.lane[:-1])
        if back.any():
            at = int(back.argmax())
            self._refuse(
                f"in lane {runs.lane[at]} trajectory {begun[at + 1]} follows trajectory {begun[at]}"
            )
        ordered = np.sort(begun)
        if (twice := ordered[1:] == ordered[:-1]).any():
            id = int(ordered[1:][twice][0])
            lanes = sorted(set(runs.lane[begun == id].tolist()))
            self._refuse(
                f"trajectory {id} is in lanes {lanes[0]} and {lanes[1]}"
                if len(lanes) > 1
                else f"lane {lanes[0]} is in another trajectory in the middle of trajectory {id}"
            )

    def _refuse(self, why: str) -> NoReturn:
        raise TrajectoryIdTaken(
            f"these rows do not form trajectories: {why}. Nothing was written to {self._path}. In "
            "each lane, trajectories must follow each other with rising ids, and the steps of a "
            "trajectory must be consecutive. Give all rows of a trajectory in the order in which "
            "they were collected. For a ring, ring.in_order() returns that order."
        )

    def settle(self, head: int) -> None:
        """Record that the admitted rows were written and that ``head`` rows are committed."""
        if self._admitted is not None:
            (begun, lane, id, step, run), self._admitted = self._admitted, None
            self._tail_id[lane], self._tail_next[lane], self._tail_run[lane] = id, step, run
            self._largest, self.seen = max(self._largest, int(begun.max(initial=NOBODY))), head
            if self._kernel is not None:
                self._kernel.use_ids(self._tails, begun)
        elif self._compiled_largest is not None:
            assert self._kernel is not None
            self._kernel.settle_rows(self._tails)
            self._largest, self.seen = self._compiled_largest, head
            self._compiled_largest = None

    def _know_lane(self, lane: int) -> None:
        if lane >= len(self._tail_id):
            before = self._tails, self._tail_id, self._tail_next, self._tail_run
            self._make_tails(len(extended(self._tail_id, lane + 1, NOBODY)))
            now = self._tails, self._tail_id, self._tail_next, self._tail_run
            now[0][-2 * WINDOW :] = before[0][-2 * WINDOW :]
            for tail, known in zip(now[1:], before[1:], strict=True):
                tail[: len(known)] = known

    def _ended(self, values: Sequence[Any], at: np.ndarray | None = None) -> np.ndarray:
        """Return a mask [n] of the rows, or of the rows ``at`` [n], that end their trajectories."""
        count = len(values[self._places[0]]) if at is None else len(at)
        ended: np.ndarray = np.zeros(count, np.bool_)
        for place in self._ends:
            ended |= _flags_at(values[place], at)
        for place in self._done:
            ended &= _flags_at(values[place], at)
        return ended

    def _catch_up(self) -> None:
        """Process rows that were written without checks."""
        for start, stop in unread(self._reader, self):
            ids = self._order.chunk(self._reader, start, stop).ids
            self._largest = max(self._largest, int(ids.max(initial=NOBODY)))
            self.seen = stop
        self._make_tails(0)

    def _require_own(self, id: int, step: int, lane: int, row: int, *, opens: bool) -> None:
        """Raise if an id is already stored, unless the row continues from that id's last row.

        Args:
            id, step, lane: the values of the row.
            row: the index of the row in the batch.
            opens: True if the row is the first of its lane in the batch.
        """
        if self._replaces_all or not self._reader.head:
            return
        episodes = self._counted()
        last, current = episodes.last_row(id), episodes.last_id(lane)
        if last is None or last < self._reader.span.start:
            if opens:
                self._require_later(id, lane, current, row)
            return
        why = self._why_not(last, step, lane)
        if why is None and current != id:
            why = f"lane {lane} has continued with trajectory {current}"
        if why is None and not opens:
            why = "its lane is in another trajectory earlier in this batch"
        if why is not None:
            raise TrajectoryIdTaken(
                f"trajectory {id} is already stored in {self._path}. Row {row} of this batch (step "
                f"{step}, lane {lane}) has the same id but does not continue that trajectory: "
                f'{why}. Nothing was written. Use new ids, or extend(..., ids="renumber"), which '
                "numbers these trajectories after the stored ones."
            )

    def _require_later(self, id: int, lane: int, current: int, row: int) -> None:
        """Raise if a new id is smaller than the id of its lane's last stored row."""
        last = self._counted().last_row(current) if current > id else None
        if last is not None and last >= self._reader.span.start:
            raise TrajectoryIdTaken(
                f"row {row} of this batch is of trajectory {id}, but its lane {lane} is already in "
                f"trajectory {current} of {self._path}, and ids must rise within a lane. Nothing "
                'was written. Use larger ids, or extend(..., ids="renumber"), which numbers these '
                "trajectories after the stored ones."
            )

    def _counted(self) -> Episodes:
        """Return the episode table of all rows.

        The checks keep their own table, because the index must not depend on checked batches.
        """
        reader = self._reader
        if self._episodes is None:
            self._episodes = reader.trajectory_index.load_episodes(reader)
        for start, stop in unread(reader, self._episodes):
            self._episodes.extend(self._order.episode_rows(reader, start, stop))
        return self._episodes

    def _why_not(self, row: int, step: int, lane: int) -> str | None:
        """Return the reason why a row cannot follow the stored row ``row``, or None."""
        last = self._order.chunk(self._reader, row, row + 1)
        if int(last.lane[0]) != lane:
            return f"its last row is of lane {last.lane[0]}"
        if int(last.steps[0]) + 1 != step:
            return f"its last step is {last.steps[0]}"
        ended = self._ended(self._reader.copies(np.array([row])), _FIRST)[0]
        return "it ended there" if ended else None


def _compiled(
    schema: Schema, places: Sequence[int], ends: Sequence[int]
) -> tuple[IdKernel | None, list[int | None], int]:
    """Return the extension, the positions of the columns that it reads, and the size of a lane.

    The extension is None if it cannot read the columns.
    """
    columns, flags = schema.columns, [*ends]
    done = [schema.keys.index(DONE)] if DONE in schema.keys else []
    read: list[int | None] = [*places, *flags, *[None] * (2 - len(flags)), *done]
    read += [None] * (6 - len(read))
    kernel = compiled()
    for place in places:
        sizes = (4, 8) if columns[place].key == LANE else (8,)
        if columns[place].numpy_dtype.kind != "i" or columns[place].row_nbytes not in sizes:
            kernel = None
    for place in (*flags, *done):
        if columns[place].dtype is not torch.bool or columns[place].row_nbytes != 1:
            kernel = None
    return kernel, read, columns[places[2]].row_nbytes


def _flags_at(column: Any, at: np.ndarray | None) -> np.ndarray:
    flags = flags_of(_array(column))
    return flags if at is None else flags.take(at)


def _array(values: Any) -> np.ndarray:
    # Conversion through the tensor's __array__ takes longer.
    return values.numpy() if type(values) is torch.Tensor else np.asarray(values)


def _require_lanes(least: int, most: int, path: Path) -> None:
    if not 0 <= least <= most < MOST_LANES:
        raise TrajectoryIdTaken(
            f"these rows have lane {least if least < 0 else most}, but lanes are numbered from 0 "
            f"to {MOST_LANES - 1}. Nothing was written to {path}. Number the lanes in that range."
        )


def renumbered(ids: np.ndarray, base: int) -> np.ndarray:
    """Return ids [n, ...], shifted by one offset so that the smallest is ``base``.

    Raises:
        TrajectoryIdTaken: the dtype of the column cannot hold the new ids.
    """
    if not len(ids):
        return ids
    least, most = int(ids.min()), int(ids.max())
    if base + most - least > np.iinfo(ids.dtype).max:
        raise TrajectoryIdTaken(
            f"trajectories {least} to {most} cannot be renumbered from {base} on: the new ids do "
            f"not fit into {ids.dtype}. Number the trajectories without gaps, and write them again."
        )
    # Neither of these two steps can overflow, whereas the dtype may not hold the offset itself.
    moved: np.ndarray = ids - ids.min() + ids.dtype.type(base)
    return moved
