"""Trajectory ids of rows that are about to be written: new, or gone on with, and nobody else's.

Collectors number their trajectories themselves and are not asked. Rows from elsewhere, such as
another storage's, may have ids that are stored already, and would become rows of those
trajectories.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from tallyroll.storage.engine.ring import slots_of
from tallyroll.storage.errors import TrajectoryIdTaken
from tallyroll.storage.rows.keys import DONE, LANE, STEP, TERMINATED, TRAJ_IDS, TRUNCATED
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.by_lane import MOST_LANES, NOBODY, extended
from tallyroll.storage.trajectories.columns import RowOrder

if TYPE_CHECKING:
    from tallyroll.storage.engine.engine import Engine

__all__ = ["IdChecks", "Ids", "Runs", "renumbered"]

Ids: TypeAlias = Literal["check", "renumber", "fresh"]

_NEAR = 2**16
_CHUNK_ROWS = 2**18
_NEAR_FIRST = 2**11
_FIRST = np.zeros(1, np.int64)
_NONE = np.empty(0, np.int64)


class Runs:
    """The trajectories in a batch: stretches of its rows, in the order of lanes.

    Args:
        ids: of the rows in the order in which they are stored, [n], n above 0.
        steps: [n].
        lane: [n].

    Raises:
        ValueError: an id of two lanes, steps that do not rise, a lane that goes to and fro
            between trajectories.
    """

    __slots__ = ("closes", "first", "first_step", "ids", "lane", "last", "last_step", "opens")

    def __init__(self, ids: np.ndarray, steps: np.ndarray, lane: np.ndarray) -> None:
        # In the order of lanes, as collectors' batches are, nothing needs to be sorted.
        at = None
        if (lane[1:] < lane[:-1]).any():
            at = lane.argsort(kind="stable")
            ids, steps, lane = ids.take(at), steps.take(at), lane.take(at)
        goes_on: np.ndarray = (ids[1:] == ids[:-1]) & (lane[1:] == lane[:-1])
        if not (steps[1:] > steps[:-1]).all(where=goes_on):
            where = int(np.flatnonzero(goes_on & (steps[1:] <= steps[:-1]))[0])
            raise ValueError(
                f"step {steps[where + 1]} follows step {steps[where]} in trajectory {ids[where]}"
            )
        begins = np.empty(len(ids), np.bool_)
        begins[0] = True
        np.logical_not(goes_on, out=begins[1:])
        start = begins.nonzero()[0]
        stop = np.empty_like(start)
        stop[:-1], stop[-1] = start[1:] - 1, len(ids) - 1
        # Arrays are [runs] from here on.
        self.ids, self.lane = ids.take(start), lane.take(start)
        self.first_step, self.last_step = steps.take(start), steps.take(stop)
        self.first: np.ndarray = start if at is None else at.take(start)
        """Indices of their first rows in the batch."""
        self.last: np.ndarray = stop if at is None else at.take(stop)
        """Indices of their last rows."""
        self.opens = np.empty(len(start), np.bool_)
        """Whether each is its lane's first."""
        self.opens[0] = True
        np.not_equal(self.lane[1:], self.lane[:-1], out=self.opens[1:])
        self.closes = np.ones(len(start), np.bool_)
        """Whether each is its lane's last."""
        self.closes[:-1] = self.opens[1:]
        if len(start) > 1:
            self._require_once()

    def _require_once(self) -> None:
        ordered = np.sort(self.ids)
        if (twice := ordered[1:] == ordered[:-1]).any():
            id = int(ordered[1:][twice][0])
            lanes = sorted(set(self.lane[self.ids == id].tolist()))
            raise ValueError(
                f"trajectory {id} is of lanes {lanes[0]} and {lanes[1]}"
                if len(lanes) > 1
                else f"lane {lanes[0]} is in another trajectory in the middle of trajectory {id}"
            )


class IdChecks:
    """Knows the ids of a storage well enough to tell whether a batch's are its own.

    Most batches are told by one comparison: all ids are larger than any that is stored, or each
    lane goes on with its last trajectory.
    """

    def __init__(self, schema: Schema, path: Path) -> None:
        keys = schema.keys
        self._path = path
        self._places = tuple(keys.index(key) for key in (TRAJ_IDS, STEP, LANE))
        ends = [keys.index(key) for key in (DONE, TERMINATED, TRUNCATED) if key in keys]
        self._ends = ends[:1] if DONE in keys else ends  # which says it for both
        self._order = RowOrder(schema)
        self._head = 0
        """The rows up to this number are known."""
        self._largest: int = NOBODY
        # The last row of each lane, if its trajectory goes on: whose it is, and the step after
        # it. Nobody's where it was not looked for.
        self._tail_id = np.empty(0, np.int64)
        self._tail_next = np.empty(0, np.int64)
        self._stored: set[int] = set()
        """All ids of the rows up to some number, from the first batch on that asks for it."""
        self._stored_head = 0
        self._admitted: tuple[int, Any, Any, Any] | None = None

    def largest(self, engine: Engine) -> int:
        """The largest id of the rows that are there, `NOBODY` without any."""
        self._catch_up(engine)
        return self._largest

    def admit(self, engine: Engine, values: Sequence[Any]) -> None:
        """Look at a batch, arrays or tensors [n, ...] by column, that is to be written next.

        Raises:
            TrajectoryIdTaken: its ids are not its own.
        """
        if self._head != engine.head:
            self._catch_up(engine)
        self._admitted = None
        ids, steps, lane = (values[place] for place in self._places)
        if len(ids) == 1:
            self._admit_one(engine, ids.item(), steps.item(), lane.item(), values)
        elif len(ids):
            numbers = _numbers(ids), _numbers(steps), _numbers(lane)
            if not self._admit_slot(*numbers, values):
                self._admit_many(engine, *numbers, values)

    def _admit_one(
        self, engine: Engine, id: int, step: int, lane: int, values: Sequence[Any]
    ) -> None:
        if not 0 <= lane < len(self._tail_id):
            _require_lanes(lane, lane, self._path)
            self._know_lane(lane)
        if id <= self._largest and not (
            self._tail_id.item(lane) == id and self._tail_next.item(lane) == step
        ):
            self._admit_many(engine, np.array([id]), np.array([step]), np.array([lane]), values)
            return
        for place in self._ends:
            if values[place].any():
                id_next = NOBODY
                break
        else:
            id_next = id
        self._admitted = id, lane, id_next, step + 1

    def _admit_slot(
        self, ids: np.ndarray, steps: np.ndarray, lane: np.ndarray, values: Sequence[Any]
    ) -> bool:
        """Admit a row of each of some lanes, in their order, that all go on; whether they are."""
        if not (lane[1:] > lane[:-1]).all() or not 0 <= lane[0] <= lane[-1] < len(self._tail_id):
            return False
        known = self._tail_id.take(lane) == ids
        known &= self._tail_next.take(lane) == steps
        if not known.all():
            return False
        for place in self._ends:
            if (ended := _flags(values[place])).any():
                ids = np.where(ended, NOBODY, ids)
        self._admitted = NOBODY, lane, ids, steps + 1
        return True

    def _admit_many(
        self,
        engine: Engine,
        ids: np.ndarray,
        steps: np.ndarray,
        lane: np.ndarray,
        values: Sequence[Any],
    ) -> None:
        runs = self._runs_in(ids, steps, lane)
        self._know_lane(int(runs.lane[-1]))
        if int(runs.ids.min()) <= self._largest:
            known = (self._tail_id.take(runs.lane) == runs.ids) & runs.opens
            known &= self._tail_next.take(runs.lane) == runs.first_step
            for run in np.flatnonzero(~known & (runs.ids <= self._largest)).tolist():
                self._require_own(engine, runs, run)
        at = runs.closes.nonzero()[0]
        last = runs.last.take(at)
        id = np.where(self._ended(values, last), NOBODY, runs.ids.take(at))
        self._admitted = int(runs.ids.max()), runs.lane.take(at), id, runs.last_step.take(at) + 1

    def _runs_in(self, ids: np.ndarray, steps: np.ndarray, lane: np.ndarray) -> Runs:
        _require_lanes(int(lane.min()), int(lane.max()), self._path)
        try:
            return Runs(ids, steps, lane)
        except ValueError as error:
            raise TrajectoryIdTaken(
                f"these rows cannot be those of trajectories: {error}. Nothing was written to "
                f"{self._path}; within a lane one trajectory follows the other, and its steps "
                "rise. Renumber the rows."
            ) from None

    def settle(self, head: int) -> None:
        """Take note that the admitted rows are written, and ``head`` rows committed."""
        if self._admitted is not None:
            (largest, lane, id, step), self._admitted = self._admitted, None
            self._tail_id[lane], self._tail_next[lane] = id, step
            self._largest, self._head = max(self._largest, largest), head

    def _know_lane(self, lane: int) -> None:
        if lane >= len(self._tail_id):
            self._tail_id = extended(self._tail_id, lane + 1, NOBODY)
            self._tail_next = np.resize(self._tail_next, len(self._tail_id))

    def _ended(self, values: Sequence[Any], at: np.ndarray) -> np.ndarray:
        """Which of the rows ``at`` [n] end their trajectories, [n]."""
        ended: np.ndarray = np.zeros(len(at), np.bool_)
        for place in self._ends:
            ended |= _flags(values[place]).take(at)
        return ended

    def _catch_up(self, engine: Engine) -> None:
        """Rows were written that were not asked about."""
        start, stop = max(self._head, engine.span.start), engine.head
        self._tail_id = _NONE
        for first in range(start, stop, _CHUNK_ROWS):
            ids = self._order.chunk(engine, first, min(first + _CHUNK_ROWS, stop)).ids
            self._largest = max(self._largest, int(ids.max(initial=NOBODY)))
        self._head = stop

    def _require_own(self, engine: Engine, runs: Runs, run: int) -> None:
        """Refuse a run of an id that is stored, unless it goes on from that id's last row."""
        id, lane, step = int(runs.ids[run]), int(runs.lane[run]), int(runs.first_step[run])
        row = self._last_row(engine, id)
        if row is None:
            return
        why = self._why_not(engine, row, id, lane, step)
        if why is None and not runs.opens[run]:
            why = "its lane is in another trajectory before, in these rows"
        if why is not None:
            raise TrajectoryIdTaken(
                f"trajectory {id} is stored in {self._path} already, and row "
                f"{int(runs.first[run])} of these, its step {step} in lane {lane}, does not go on "
                f"from there: {why}. Nothing was written. Give ids that are new, or let "
                'extend(..., ids="renumber") give these trajectories numbers behind the stored '
                "ones."
            )

    def _why_not(self, engine: Engine, row: int, id: int, lane: int, step: int) -> str | None:
        """Why a row of trajectory ``id`` cannot follow the stored row ``row``."""
        last = self._order.chunk(engine, row, row + 1)
        if int(last.lane[0]) != lane:
            return f"its last row is of lane {last.lane[0]}"
        if int(last.steps[0]) + 1 != step:
            return f"its last step is {last.steps[0]}"
        slot = slots_of(row, engine.ring)
        if self._ended([column[slot : slot + 1] for column in engine.columns()], _FIRST)[0]:
            return "it ended there"
        for start in range(row + 1, engine.head, _CHUNK_ROWS):
            chunk = self._order.chunk(engine, start, min(start + _CHUNK_ROWS, engine.head))
            if (chunk.lane == lane).any():
                other = chunk.ids[chunk.lane == lane][0]
                return f"lane {lane} is in trajectory {other} since"
        return None

    def _last_row(self, engine: Engine, id: int) -> int | None:
        """The last stored row of a trajectory; near the end, or else if the id is stored at all."""
        first = engine.span.start
        row, near = None, engine.head
        for size in (_NEAR_FIRST, _NEAR):
            if row is None and near > first:
                stop, near = near, max(first, engine.head - size)
                row = self._last_of(engine, id, near, stop)
        if row is not None or near == first or id not in self._all(engine):
            return row
        stop = near
        while row is None and stop > first:
            start = max(first, stop - _CHUNK_ROWS)
            row, stop = self._last_of(engine, id, start, stop), start
        return row

    def _last_of(self, engine: Engine, id: int, start: int, stop: int) -> int | None:
        chunk = self._order.chunk(engine, start, stop)
        found = np.flatnonzero(chunk.ids == id)
        return chunk.start + int(found[-1]) if len(found) else None

    def _all(self, engine: Engine) -> set[int]:
        """All ids, in a ring with those of rows that were overwritten since."""
        start = max(self._stored_head, engine.span.start)
        for first in range(start, engine.head, _CHUNK_ROWS):
            stop = min(first + _CHUNK_ROWS, engine.head)
            self._stored.update(np.unique(self._order.chunk(engine, first, stop).ids).tolist())
        self._stored_head = engine.head
        return self._stored


def _array(values: Any) -> np.ndarray:
    # Through a tensor's __array__ it takes longer.
    return values.numpy() if type(values) is torch.Tensor else np.asarray(values)


def _numbers(values: Any) -> np.ndarray:
    """Whole numbers [n, ...], one a row, as int64 [n]."""
    array: np.ndarray = _array(values)
    array = array if array.ndim == 1 else array.reshape(len(array))
    return array if array.dtype == np.int64 else array.astype(np.int64)


def _flags(values: Any) -> np.ndarray:
    """Flags [n, ...], bools or numbers, as bools [n]: any of a row."""
    found: np.ndarray = _array(values)
    if found.dtype != np.bool_:
        found = found != 0
    if found.ndim == 1:
        return found
    found = found.reshape(len(found), -1)
    flags: np.ndarray = found[:, 0] if found.shape[1] == 1 else np.any(found, axis=1)
    return flags


def _require_lanes(least: int, most: int, path: Path) -> None:
    if not 0 <= least <= most < MOST_LANES:
        raise TrajectoryIdTaken(
            f"these rows say that they are of lane {least if least < 0 else most}, and lanes are "
            f"numbered from 0 to {MOST_LANES - 1}. Nothing was written to {path}; number the "
            "lanes so."
        )


def renumbered(ids: np.ndarray, base: int) -> np.ndarray:
    """Ids [n, ...] moved up or down by one number, so that the smallest is ``base``.

    Raises:
        TrajectoryIdTaken: they would not fit the column.
    """
    if not len(ids):
        return ids
    least, most = int(ids.min()), int(ids.max())
    if base + most - least > np.iinfo(ids.dtype).max:
        raise TrajectoryIdTaken(
            f"these trajectories, {least} to {most}, cannot be numbered from {base} on, for "
            f"{ids.dtype} holds no such number. Number them without gaps, and write again."
        )
    # In two steps, each of which fits; the way from the smallest to the base may not.
    moved: np.ndarray = ids - ids.min() + ids.dtype.type(base)
    return moved
