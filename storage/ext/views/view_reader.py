"""Reader that presents selected rows of another reader as if there were no others."""
# ruff: noqa: D102 - `RowReader` documents these methods

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import Overrun
from tallyroll.storage.ext.views.chosen_rows import ChosenRows, chosen_rows
from tallyroll.storage.files.copied_runs import FIRST_ROW_OF_RUN, SOURCES, source_of, sources_of
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.run_events import without_events
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader
from tallyroll.storage.rows.keys import TRAJ_IDS, Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.rewinds import require_not_rewound
from tallyroll.storage.trajectories.columns import numbers_of

_CHUNK_ROWS: Final = 2**18
_TABLE: Final = 8
"""The most entries per id for which a lookup table of ids is used."""


class ViewReader(RowReader):
    """Selected rows of another reader, numbered 0, 1, 2 ... in the order of that reader.

    The selection is fixed when the view is created and ignores rows that a writer adds later.
    Reading a row that a ring has overwritten since then raises `Overrun`. Reading a row that was
    rewound raises `StateMismatch`.

    Args:
        rows: the underlying reader, which stays open.
        picked: the row numbers in the underlying reader.
        lines: the trajectories in the format of the table of ``rows``; None: compute them from the
            rows on demand.
    """

    def __init__(
        self, rows: RowReader, picked: ChosenRows, lines: np.ndarray | None = None
    ) -> None:
        self.rows, self.picked, self.lines = rows, picked, lines
        self.path, self.copied_as = rows.path, rows.copied_as
        self._rewinds, self._stop = rows.rewinds, picked.stop
        self._span = range(len(picked))

    def require_open(self) -> None:
        self.closed = self.closed or self.rows.closed
        super().require_open()

    @property
    def schema(self) -> Schema:
        return self.rows.schema

    @property
    def keys(self) -> tuple[Key, ...]:
        return self.rows.keys

    @property
    def span(self) -> range:
        return self._span

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @cached_property
    def _manifest(self) -> Manifest:
        """The manifest of the storage, with the positions of its runs among these rows.

        A run keeps its entry even if none of its rows is selected, so that runs keep their numbers.
        """
        manifest = self.rows.manifest
        runs = [run for run in manifest["runs"] if run["first_row"] < self._stop]
        found = {
            **manifest,
            "id": f"{manifest['id']}-{self.picked.digest[:16]}",
            "runs": [self._placed(run) for run in runs],
            SOURCES: self._sources(manifest),
        }
        found.pop("finalized", None)  # its checksums cover other rows
        return found

    def _sources(self, manifest: Manifest) -> list[dict[str, Any]]:
        """Return the source storages of the rows, for the manifests of copies."""
        if not len(self._span):
            return []
        first, last = self.picked.numbers(np.array([0, len(self._span) - 1])).tolist()
        found = {"first_row": 0, **source_of(manifest, [first, last])}
        found.pop(SOURCES, None)
        return [found, *({**each, "first_row": 0} for each in sources_of(manifest))]

    def _placed(self, run: dict[str, Any]) -> dict[str, Any]:
        """Convert a run's entry to row numbers of the view, without lane seeds and events."""
        entry = {name: each for name, each in without_events(run).items() if name != "lane_seeds"}
        for name in ("first_row", FIRST_ROW_OF_RUN):
            if type(row := entry.get(name)) is int:
                entry[name] = int(self.picked.below(np.array([row]))[0])
        return entry

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        return self.lines if self.lines is not None and self.lines.dtype == dtype else None

    def column(self, key: Key) -> ColumnReader:
        return _ViewColumn(self, self.rows.column(key))

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        there = self.numbers(rows)
        found = self.rows.copies(there, keys)
        self.check(there)
        return found

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        if isinstance(rows, np.ndarray):
            there = self.numbers(rows)
            found = self.rows.gather(there)
            self.check(there)
            return found
        each = [self.numbers(every) for every in rows]
        found = self.rows.gather(each)
        for there in each:
            self.check(there)
        return found

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """Convert row numbers [*] of the view to row numbers of the storage, int64 [*]."""
        self.require_open()
        return self.picked.numbers(rows)

    def check(self, there: np.ndarray) -> None:
        """Check that rows ``there`` of the storage, which were just read, are still valid.

        Raises:
            Overrun: a ring has overwritten some of them.
            StateMismatch: some rows of the view were rewound.
        """
        rows = self.rows
        if rows.rewinds != self._rewinds:
            require_not_rewound(rows, self._stop, self._rewinds, "this view")
            self._rewinds = rows.rewinds
        if rows.ring and there.size and int(there.min()) < (first := rows.span.start):
            raise Overrun(
                f"row {int(there.min())} of {self.path} belongs to a view, but the ring has "
                f"overwritten all rows below {first} since the view was created. Create the view "
                "again, or copy the rows first."
            )


class _ViewColumn(ColumnReader):
    """A column of the selected rows."""

    def __init__(self, view: ViewReader, column: ColumnReader) -> None:
        self._view, self._column = view, column

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        there = self._view.numbers(rows)
        found = self._column.take(there, out)
        self._view.check(there)
        return found

    def slice(self, start: int, stop: int) -> np.ndarray:
        view = self._view
        if start >= stop:
            return self._column.take(np.empty(0, np.int64))
        there = view.numbers(np.array([start, stop - 1]))
        first, last = there.tolist()
        if last - first == stop - start - 1:  # consecutive in the storage, too
            found = self._column.slice(first, last + 1)
            found = found.copy() if view.rows.ring else found
        else:
            there = view.picked.between(start, stop)
            found = self._column.take(there)
        view.check(there)
        return found


_ROWS: Final = ("first_row", "last_row")


def view_of(rows: RowReader, table: np.ndarray, chosen: np.ndarray) -> ViewReader:
    """Return a reader of selected trajectories.

    Args:
        rows: the reader. If it is a view, the result reads the storage below it directly.
        table: the trajectories of the reader, as returned by `TrajectoryIndex.table`.
        chosen: a mask of the selected trajectories, bool [trajectories].
    """
    lines = table[chosen]
    stop = int(table["last_row"].max(initial=-1)) + 1
    span = range(min(rows.span.start, stop), stop)
    parts: Iterable[np.ndarray] = _rows_of(rows, span, np.sort(lines["id"]), bool(chosen.all()))
    source = rows
    if isinstance(rows, ViewReader):
        parts = map(rows.picked.numbers, parts)
        for name in _ROWS:
            lines[name] = rows.picked.numbers(lines[name])
        source, span = rows.rows, range(rows.rows.span.start, rows.picked.stop)
    found = chosen_rows(span, parts)
    for name in _ROWS:
        lines[name] = found.below(lines[name])
    # A ring may retain only part of a trajectory, so its lines are recomputed from the rows.
    return ViewReader(source, found, None if source.ring else lines)


def _rows_of(rows: RowReader, span: range, ids: np.ndarray, every: bool) -> Iterator[np.ndarray]:
    """Yield the row numbers of trajectories, whose ids are sorted."""
    if not len(ids):
        return
    among = _Among(ids)
    column = rows.column(TRAJ_IDS)
    for start in range(span.start, span.stop, _CHUNK_ROWS):
        stop = min(start + _CHUNK_ROWS, span.stop)
        if every:
            yield np.arange(start, stop)
            continue
        there = start + np.flatnonzero(among(numbers_of(column.slice(start, stop))))
        yield there[there >= rows.span.start] if rows.ring else there


class _Among:
    """Membership test for a sorted set of ids."""

    def __init__(self, ids: np.ndarray) -> None:
        self._ids, self._least, self._most = ids, int(ids[0]), int(ids[-1])
        self._table: np.ndarray | None = None
        if (wide := self._most - self._least + 1) <= _TABLE * len(ids) + _CHUNK_ROWS:
            self._table = np.zeros(wide, np.bool_)
            self._table[ids - self._least] = True

    def __call__(self, ids: np.ndarray) -> np.ndarray:
        found: np.ndarray
        within = np.clip(ids, self._least, self._most)
        if self._table is not None:
            found = self._table[within - self._least]
        else:
            found = self._ids[self._ids.searchsorted(within)] == within
        found = found & (within == ids)
        return found
