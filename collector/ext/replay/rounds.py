"""Replay rounds: lanes that begin together are stepped and compared block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.replay.calls import Call
from tallyroll.collector.ext.replay.comparison import Comparison, differing_rows
from tallyroll.collector.ext.replay.replay_plan import Line, Table
from tallyroll.collector.ext.replay.stage import BeforeStep, Stage
from tallyroll.collector.ext.replay.video import EpisodeVideo
from tallyroll.storage.errors import Overrun
from tallyroll.storage.files.excluded_columns import excluded_by
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    NEXT,
    NEXT_VALID,
    TERMINATED,
    TRUNCATED,
    Key,
    format_key,
    without_next,
)
from tallyroll.storage.storages import DiskStorage
from tallyroll.storage.trajectories.episodes import END_TERMINATED, END_TRUNCATED

Array = np.ndarray[Any, Any]

_FLAGS = (TERMINATED, TRUNCATED, DONE)
_IDLE = -1


class StoredRows:
    """The rows of trajectories, by trajectory id.

    Args:
        storage: storage with the rows.
        table: the storage's table of trajectories.
    """

    def __init__(self, storage: DiskStorage, table: Table) -> None:
        self._storage, self._reader = storage, storage.reader
        self._excluded = excluded_by(storage.runs)
        self._lines = {int(id): at for at, id in enumerate(table["id"].tolist())}
        self._table = table
        self.schema = storage.schema

    def lacks(self, key: Key) -> bool:
        """Return True if a column is not stored, and no run excluded it."""
        return key not in self.schema and format_key(without_next(key)) not in self._excluded

    def of(self, id: int) -> Array:
        """Return a trajectory's row numbers, without rows added since the replay was planned."""
        rows = self._storage.trajectories.rows_of(id)
        return rows[: int(self._table["length"][self._lines[id]])]

    def count(self, line: Line) -> int:
        """Return the number of rows of a line."""
        return int(sum(self._table["length"][self._lines[id]] for id in line.trajectories))

    def ends(self, id: int) -> bool:
        """Return True if a trajectory terminated or was truncated."""
        end = int(self._table["end"][self._lines[id]])
        return end in (END_TERMINATED, END_TRUNCATED)

    def take(self, key: Key, rows: Array) -> Array:
        """Return a column's values for the given row numbers.

        Raises:
            Overrun: a ring overwrote some of the rows.
        """
        found: Array = self._reader.column(key).take(rows)
        if len(rows) and rows.min() < self._storage.span.start:
            raise Overrun(
                f"{self._storage.path}: the writer overwrote rows during the replay. Replay fewer "
                "or newer trajectories."
            )
        return found


@dataclass(frozen=True)
class Lane:
    """A lane of the stage, and the trajectories that it steps."""

    column: int
    """Index of the lane on the stage."""
    number: int
    """Number of the lane in the run."""
    trajectories: tuple[int, ...]
    doubtful: bool
    """True if a trajectory may not begin where the one before it ended."""
    first_too: bool
    """True if the doubt also applies to the first trajectory."""
    calls: tuple[Call, ...] = ()
    """Calls of the lane's environment since its reset."""


@dataclass
class _Schedule:
    """Row numbers, trajectory ids and steps of a round, ``[slot, lane]``; -1 if the lane waits."""

    rows: Array
    ids: Array
    steps: Array
    doubtful: Array
    """True in rows of trajectories that may begin in a different state."""

    @classmethod
    def of(cls, lanes: Sequence[Lane], stored: StoredRows, width: int, gaps: bool) -> _Schedule:
        columns = [_column(lane, stored, gaps) for lane in lanes]
        length = max((len(rows) for rows, *_ in columns), default=0)
        made = cls(
            np.full((length, width), _IDLE, np.int64),
            np.full((length, width), _IDLE, np.int64),
            np.full((length, width), _IDLE, np.int64),
            np.zeros((length, width), np.bool_),
        )
        for lane, (rows, ids, steps) in zip(lanes, columns, strict=True):
            at = slice(len(rows)), lane.column
            made.rows[at], made.ids[at], made.steps[at] = rows, ids, steps
            if lane.doubtful:
                certain = () if lane.first_too else lane.trajectories[:1]
                made.doubtful[at] = (rows != _IDLE) & ~np.isin(ids, certain)
        return made


def _column(lane: Lane, stored: StoredRows, gaps: bool) -> tuple[Array, Array, Array]:
    """Return the rows, ids and steps of a lane, with a gap for each reset slot."""
    parts: list[tuple[Array, int]] = []
    for id in lane.trajectories:
        rows = stored.of(id)
        last = id == lane.trajectories[-1]
        if gaps and not last and stored.ends(id):
            rows = np.append(rows, _IDLE)
        parts.append((rows, id))
    rows = np.concatenate([rows for rows, _ in parts])
    ids = np.concatenate([np.full(len(rows), id) for rows, id in parts])
    steps = np.concatenate([np.arange(len(rows)) for rows, _ in parts])
    return rows, ids, steps


class Round:
    """Lanes that were reset together, stepped through their stored actions.

    Args:
        stage: the stage, after a reset.
        stored: the stored rows.
        lanes: the lanes and their trajectories.
        comparison: collects the differences.
        film: video that shows every slot of the first lane. None makes no video.
    """

    def __init__(
        self,
        stage: Stage,
        stored: StoredRows,
        lanes: Sequence[Lane],
        comparison: Comparison,
        film: EpisodeVideo | None,
    ) -> None:
        self._stage, self._stored, self._lanes = stage, stored, lanes
        self._comparison, self._film = comparison, film
        self._schedule = _Schedule.of(lanes, stored, stage.lanes, stage.has_reset_slots)
        self._calls: dict[int, list[tuple[int, Call]]] = {}
        """Lanes and calls by the slot before which they happen."""
        for lane in lanes:
            self._place(lane)
        self._number = np.zeros(stage.lanes, np.int64)
        for lane in lanes:
            self._number[lane.column] = lane.number
        self._stop = np.full(stage.lanes, len(self._schedule.rows))
        """The first slot of each lane that is not compared any more, ``[lane]``."""
        self.keys = [key for key in stage.keys if key in stored.schema]
        """Columns that are compared."""
        self.doubtful: list[int] = []
        """Trajectories that differ, but may have begun in a different state."""
        self.unreached: dict[int, int] = {}
        """For each trajectory that was not compared, the trajectory at which its lane diverged."""
        self.compared: set[int] = set()
        """Trajectories that were compared."""
        self._require_columns()

    def _place(self, lane: Lane) -> None:
        """Find the slots before which the calls of a lane happen."""
        rows, ids, steps = (
            each[:, lane.column]
            for each in (self._schedule.rows, self._schedule.ids, self._schedule.steps)
        )
        slots = np.flatnonzero(rows != _IDLE)
        for call in lane.calls:
            before = call.position(rows[slots], ids[slots], steps[slots])
            if before < len(slots):  # otherwise the call comes after all rows
                slot = int(slots[before - 1]) + 1 if before else 0
                self._calls.setdefault(slot, []).append((lane.column, call))

    def _require_columns(self) -> None:
        """Refuse an environment whose columns differ from the stored ones."""
        layout, schema = self._stage.plan.layout, self._stored.schema
        lacking = [key for key in layout if key[0] != COLLECTOR and self._stored.lacks(key)]
        if lacking:
            raise ArgumentError(
                "the environment makes columns that are not stored: "
                f"{[*map(format_key, lacking)]}. Make the environment as the run did "
                "(create_env_fn=)."
            )
        for column in schema.columns:
            made = layout.get(column.key)
            if made is not None and (made.dtype, made.shape) != (column.dtype, column.shape):
                raise ArgumentError(
                    f"{format_key(column.key)}: expected {column.dtype} {[*column.shape]} as "
                    f"stored, got {made.dtype} {[*made.shape]} from the environment. Make the "
                    "environment as the run did (create_env_fn=)."
                )

    def blocks(self) -> Iterator[None]:
        """Step and compare the lanes; yield after each block."""
        stage, schedule = self._stage, self._schedule
        length = len(schedule.rows)
        for start in range(0, length, stage.slots):
            slots = min(stage.slots, length - start)
            part = schedule.rows[start : start + slots]
            places = np.nonzero(part != _IDLE)
            at = places[0], places[1]
            rows = part[at]
            actions = {key: self._stored.take(key, rows) for key in stage.actions}
            called = any(slot in self._calls for slot in range(start, start + slots))
            before = self._before(start) if called or self._film is not None else None
            stage.step(actions, at, slots, before)
            self._compare(start, at, rows)
            stage.go_on(slots)
            yield
        self._account()

    def _before(self, start: int) -> BeforeStep:
        film, lane, schedule = self._film, self._lanes[0], self._schedule

        def before(slot: int) -> None:
            for column, call in self._calls.get(start + slot, ()):
                self._stage.call(call, column)
            if film is not None and schedule.rows[start + slot, lane.column] != _IDLE:
                film.show(self._stage.env, lane.column)

        return before

    def _compare(self, start: int, at: tuple[Array, Array], rows: Array) -> None:
        slots, lanes = at
        keep = start + slots < self._stop[lanes]
        at, rows = (slots[keep], lanes[keep]), rows[keep]
        at, rows = self._without_doubtful(start, at, rows)
        at, rows = self._until_broken(start, at, rows)
        whole = at[0] + start, at[1]
        ids, steps = self._schedule.ids[whole], self._schedule.steps[whole]
        numbers = self._number[at[1]]
        for key in self.keys:
            stored, replayed, kept = self._values(key, at, rows)
            where = ids[kept], steps[kept], rows[kept], numbers[kept]
            self._comparison.column(key, stored, replayed, where)
        self._comparison.rows += len(rows)

    def _values(self, key: Key, at: tuple[Array, Array], rows: Array) -> tuple[Array, Array, Array]:
        """Return the stored values, the replayed values, and the indices of their rows.

        Final observations that the system loses are left out, because the replayed value belongs to
        another episode.
        """
        stored, replayed = self._stored.take(key, rows), self._stage.values(key, at)
        kept = np.arange(len(rows))
        of_observation = key[0] == NEXT and key[1:] in self._stage.plan.layout
        if of_observation and NEXT_VALID in self._stored.schema:
            kept = np.flatnonzero(self._stored.take(NEXT_VALID, rows))
        # For lost observations of agents, stored and replayed values are both zeros.
        return stored[kept], replayed[kept], kept

    def _without_doubtful(
        self, start: int, at: tuple[Array, Array], rows: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Drop doubtful trajectories that differ, and the later trajectories of their lanes."""
        some = np.flatnonzero(self._schedule.doubtful[at[0] + start, at[1]])
        if not len(some):
            return at, rows
        where, numbers = (at[0][some], at[1][some]), rows[some]
        differ = np.zeros(len(some), np.bool_)
        for key in self.keys:
            stored, replayed, kept = self._values(key, where, numbers)
            differ[kept[differing_rows(stored, replayed, self._comparison.atol)]] = True
        for slot, lane in zip(where[0][differ], where[1][differ], strict=True):
            if start + slot < self._stop[lane]:
                self._stop[lane] = start + slot
                self.doubtful += self._ids_from(start + slot, lane)
        return self._before_stop(start, at, rows)

    def _until_broken(
        self, start: int, at: tuple[Array, Array], rows: Array
    ) -> tuple[tuple[Array, Array], Array]:
        """Drop rows after the first end that only the stored or only the replayed rows have."""
        for key in _FLAGS:
            if key not in self.keys:
                continue
            stored, replayed = self._stored.take(key, rows), self._stage.values(key, at)
            for index in differing_rows(stored, replayed).tolist():
                slot, lane = start + int(at[0][index]), int(at[1][index])
                if slot + 1 < self._stop[lane]:
                    self._stop[lane] = slot + 1
        return self._before_stop(start, at, rows)

    def _before_stop(
        self, start: int, at: tuple[Array, Array], rows: Array
    ) -> tuple[tuple[Array, Array], Array]:
        keep = start + at[0] < self._stop[at[1]]
        return (at[0][keep], at[1][keep]), rows[keep]

    def _ids_from(self, slot: int, lane: int) -> list[int]:
        """Return the trajectories of a lane that have rows in or after a slot."""
        of_lane = self._schedule.ids[slot:, lane]
        return [int(id) for id in dict.fromkeys(of_lane.tolist()) if id != _IDLE]

    def _account(self) -> None:
        """Record which trajectories were compared, and which were not reached."""
        for lane in self._lanes:
            stop, doubtful = int(self._stop[lane.column]), {*self.doubtful}
            reached = self._schedule.ids[:stop, lane.column]
            seen = [int(id) for id in dict.fromkeys(reached.tolist()) if id != _IDLE]
            self.compared.update(set(seen) - doubtful)
            for id in lane.trajectories:
                if id not in seen and id not in doubtful:
                    self.unreached[id] = seen[-1]
