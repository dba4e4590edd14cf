"""Answers to the page's requests about one storage, as JSON values."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import numpy as np

from tallyroll.collector.ext.report.stored_runs import runs_of
from tallyroll.collector.ext.viewer.episodes import (
    EpisodeCount,
    EpisodeTable,
    ViewerStop,
    first_id,
    flag_at,
    rows_of_episode,
)
from tallyroll.collector.ext.viewer.flags import Flags
from tallyroll.collector.ext.viewer.values import (
    FRAMES,
    curves_of,
    frames_at,
    histograms_of,
    pictures_of,
    plain,
    sum_of_rewards,
    trends_of,
)
from tallyroll.storage import verify
from tallyroll.storage.errors import ColumnsMissing, StorageError, StorageMissing, UnknownTrajectory
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.verification.findings import Finding, Place, Report
from tallyroll.storage.ext.views.expression import Expression
from tallyroll.storage.ext.views.trajectory_columns import TrajectoryColumns
from tallyroll.storage.files.manifest import exported
from tallyroll.storage.files.paths import is_address
from tallyroll.storage.files.run_record import RunRecord
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import LANE, STEP, TERMINATED, TRAJ_IDS, TRUNCATED, format_key
from tallyroll.storage.rows.spaces import SPACES
from tallyroll.storage.storages import DiskStorage, open_storage
from tallyroll.storage.trajectories.columns import missing, numbers_of
from tallyroll.storage.trajectories.episodes import (
    END_CUT,
    END_NAMES,
    END_OPEN,
    END_TERMINATED,
    END_TRUNCATED,
)

PAGE: Final = 100
"""The number of episodes in an answer."""
_FRAMES_AT_ONCE: Final = 16
"""The number of frames that one read returns. It limits the memory for large frames."""
FINISHED: Final = (END_TERMINATED, END_TRUNCATED, END_CUT)
SORTED_BY: Final = (
    "id",
    "lane",
    "length",
    "return",
    "end",
    "first_row",
    "version_first",
    "version_last",
)
"""The fields by which episodes are sorted."""

Found = TypeVar("Found")


class Dataset:
    """A storage that the page shows. It is opened again if its files are replaced.

    Args:
        path: the path, address or pattern of the storage.
        flags: the flags that a person sets, if any.
        name: the name on the page; None: ``path``.
        options: options of `open_storage`.
    """

    def __init__(
        self, path: str, flags: Flags | None = None, name: str | None = None, **options: Any
    ) -> None:
        self.path, self.name, self._flags, self._options = path, name or path, flags, options
        self._lock = threading.RLock()
        self._closing = False
        self._verifying: threading.Thread | None = None
        self._report: dict[str, Any] = {"state": "none"}
        self._open()

    def _open(self) -> None:
        self._storage: DiskStorage | None = open_storage(self.path, **self._options)
        try:
            self._table = EpisodeTable(open_storage(self.path, **self._options))
        except BaseException:
            self._storage.close()
            self._storage = None
            raise
        self._files = self._identity()

    def close(self) -> None:
        """Stop all threads and close the storage."""
        self._closing = True
        if self._verifying is not None:
            self._verifying.join()
        with self._lock:
            self._close_storage()

    def _close_storage(self) -> None:
        storage, self._storage = self._storage, None
        if storage is not None:
            self._table.close()
            storage.close()

    def _identity(self) -> list[tuple[int, int]]:
        """Return what identifies the files or folders of the storage."""
        assert self._storage is not None
        reader = self._storage.reader
        members = [each.path for each in reader.members] if isinstance(reader, UnionReader) else []
        paths = members or ([] if is_address(self.path) else [reader.path])
        found = []
        for path in paths:
            if is_address(str(path)):
                continue
            try:
                state = os.stat(path)
            except FileNotFoundError:
                raise StorageMissing(
                    f"{path} does not exist any more: it was deleted or moved while it was viewed. "
                    "Restore it and reload the page, or end the viewer."
                ) from None
            found.append((state.st_dev, state.st_ino))
        return found

    @contextmanager
    def _reading(self) -> Iterator[RowReader]:
        """Return the reader for a call. One thread reads at a time."""
        with self._lock:
            if self._storage is not None and self._identity() != self._files:
                self._close_storage()
            if self._storage is None:
                self._open()
            assert self._storage is not None
            yield self._storage.reader

    def _read(self, read: Callable[[RowReader], Found]) -> Found:
        with self._reading() as reader:
            return read_consistently(reader, lambda: read(reader))

    # --- answers ----------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the facts about the storage, its runs and its ledger."""
        return self._read(self._summary)

    def _summary(self, reader: RowReader) -> dict[str, Any]:
        assert self._storage is not None
        manifest, span = reader.manifest, reader.span
        record = RunRecord.parse(self._storage.record)
        schema = reader.schema if reader.initialised else None
        runs = runs_of([exported(run) for run in manifest["runs"]], span)
        columns = schema.columns if schema else ()
        found: dict[str, Any] = plain(
            {
                "path": self.name,
                "format": manifest["format"],
                "id": manifest["id"],
                "created": manifest["created"],
                "rows": len(span),
                "first_row": span.start,
                "ring": reader.ring or None,
                "being_written": reader.is_written,
                "bytes": len(span) * (schema.row_nbytes if schema else 0),
                "columns": [
                    {"name": format_key(c.key), "dtype": c.dtype_name, "shape": list(c.shape)}
                    for c in columns
                ],
                "ledger": record.ledger if record else None,
                "runs": [{n: v for n, v in run.items() if n != SPACES} for run in runs],
                "pictures": list(pictures_of(schema)) if schema else [],
                "flags": self._flags is not None,
            }
        )
        return found

    def counted(self) -> EpisodeCount:
        """Return the episodes that have been counted so far."""
        with self._reading():
            table = self._table
        return table.counted()

    def episodes(
        self, where: str = "", sort: str = "first_row", descending: bool = False, page: int = 0
    ) -> dict[str, Any]:
        """Return a page of the table of episodes.

        Raises:
            InvalidExpression: ``where`` is not a condition on episodes.
            ValueError: ``sort`` is not a field of the table.
        """
        if sort not in SORTED_BY:
            raise ValueError(f"sort: expected one of {', '.join(SORTED_BY)}, got {sort!r}.")
        counted = self.counted()
        table = counted.table
        if where.strip() and len(table):
            condition = Expression(where)
            mask = self._read(
                lambda reader: condition.select(TrajectoryColumns(reader, table), len(table))
            )
            table = table[mask]
        keys = table[sort].reshape(len(table), -1)[:, 0] if len(table) else table[sort]
        order = np.argsort(keys, kind="stable")
        order = order[::-1] if descending else order
        lines = table[order[page * PAGE : (page + 1) * PAGE]]
        return {
            "total": len(table),
            "counted": len(counted.table),
            "rows": counted.rows,
            "head": counted.head,
            "complete": counted.complete,
            "error": counted.error,
            "page": page,
            "per_page": PAGE,
            "lines": self._lines(lines),
        }

    def _lines(self, lines: np.ndarray) -> list[dict[str, Any]]:
        flags = self._flags.of(self._flag_name()) if self._flags else {}
        names = [name for name in lines.dtype.names or () if name != "end"]
        return [
            {
                **{name: plain(line[name]) for name in names},
                "id": str(line["id"]),
                "reset_seed": str(line["reset_seed"]) if line["reset_seed"] >= 0 else None,
                "end": END_NAMES[line["end"]],
                "flag": flags.get(int(line["id"]), ""),
            }
            for line in lines
        ]

    def trends(self) -> dict[str, Any]:
        """Return the returns, lengths and ends of ended episodes over the rows."""
        counted = self.counted()
        table = counted.table
        table = table[np.isin(table["end"], FINISHED) & (table["first_step"] == 0)]
        table = table[np.argsort(table["last_row"], kind="stable")]
        names = [END_NAMES[code] for code in FINISHED]
        return {**trends_of(table, FINISHED), "end_names": names, "complete": counted.complete}

    def episode(self, id: int | None) -> dict[str, Any]:
        """Return one episode with its curves, or the episode of the first row if ``id`` is None.

        The rows are found without waiting for the whole table of episodes.

        Raises:
            UnknownTrajectory: no row of the episode is stored.
            ColumnsMissing: no columns assign rows to episodes.
        """
        table = self.counted().table
        return self._read(lambda reader: self._episode(reader, id, table))

    def _episode(self, reader: RowReader, id: int | None, table: np.ndarray) -> dict[str, Any]:
        if not len(reader.span):
            raise UnknownTrajectory(f"{reader.path} has no rows yet.")
        _require_episodes(reader)
        id = first_id(reader) if id is None else id
        rows, at = _rows_of(reader, id, table)
        ends = np.array([rows[0], rows[-1]])
        lane, step = (numbers_of(reader.column(key).take(ends)) for key in (LANE, STEP))
        told: dict[str, Any] = {"end": _end_of(reader, int(rows[-1])), "reset_seed": None}
        told |= {"return": plain(sum_of_rewards(reader, rows)), "flag": ""}
        if at is not None:
            told |= self._lines(table[at : at + 1])[0]
        return {
            **told,
            "id": str(id),
            "lane": int(lane[0]),
            "length": len(rows),
            "first_row": int(rows[0]),
            "last_row": int(rows[-1]),
            "first_step": int(step[0]),
            "before": str(table["id"][at - 1]) if at else None,
            "after": str(table["id"][at + 1]) if at is not None and at + 1 < len(table) else None,
            "pictures": [
                {
                    "name": name,
                    "height": each.height,
                    "width": each.width,
                    "channels": each.channels,
                }
                for name, (_, each) in pictures_of(reader.schema).items()
            ],
            **curves_of(reader, rows),
        }

    def frames(
        self, id: int, column: int, start: int, made: Callable[[np.ndarray], Found]
    ) -> list[Found]:
        """Apply ``made`` to the frames of at most `FRAMES` rows of an episode; return the results.

        Args:
            id: the trajectory.
            column: the index among the image columns.
            start: the index of the first row in the episode.
            made: a function of some consecutive frames, uint8 [frames, height, width, channels].

        Raises:
            ValueError: there is no such column.
            UnknownTrajectory: no row of the episode is stored.
        """
        table = self.counted().table

        def read(reader: RowReader) -> list[Found]:
            there = [*pictures_of(reader.schema).values()]
            if column >= len(there):
                raise ValueError(f"column: expected a number below {len(there)}, got {column}.")
            rows = _rows_of(reader, id, table)[0][start : start + FRAMES]
            parts = [rows[at : at + _FRAMES_AT_ONCE] for at in range(0, len(rows), _FRAMES_AT_ONCE)]
            return [made(frames_at(reader, *there[column], part)) for part in parts]

        return self._read(read)

    def histograms(self) -> list[dict[str, Any]]:
        """Return the histograms of columns with declared bounds."""
        return self._read(histograms_of)

    def set_flag(self, id: int, flag: str) -> None:
        """Set the flag of an episode, or remove it if ``flag`` is empty.

        Raises:
            ValueError: there is no file for flags, or the text is too long.
            UnknownTrajectory: no row of the episode is stored.
        """
        if self._flags is None:
            raise ValueError(
                "flag: there is no file for flags. Start the viewer with --flags FILE."
            )
        table = self.counted().table
        self._read(lambda reader: _rows_of(reader, id, table))
        self._flags.set(self._flag_name(), self.path, id, flag)

    def _flag_name(self) -> str:
        with self._reading() as reader:
            return str(reader.id or self.path)

    # --- verification -----------------------------------------------------------------------------

    def start_verification(self) -> dict[str, Any]:
        """Start `verify` in a thread, unless it runs already; see `verification`."""
        with self._lock:
            if self._report["state"] != "running" and not self._closing:
                self._report = {"state": "running", "done": 0, "total": 0}
                self._verifying = threading.Thread(target=self._verify, name="verify", daemon=True)
                self._verifying.start()
            return self._report

    def verification(self) -> dict[str, Any]:
        """Return the state of the verification, and its findings once it is complete."""
        return self._report

    def _verify(self) -> None:
        def progress(done: int, total: int) -> None:
            if self._closing:
                raise ViewerStop
            self._report = {"state": "running", "done": done, "total": total}

        try:
            report = verify(self.path, progress=progress, **self._options)
            self._report = self._read(lambda reader: _as_object(reader, report))
        except ViewerStop:
            self._report = {"state": "none"}
        except (StorageError, OSError) as error:
            self._report = {"state": "failed", "error": str(error)}


def _rows_of(reader: RowReader, id: int, table: np.ndarray) -> tuple[np.ndarray, int | None]:
    """Return the rows of an episode, and the index of its line in the table if it has one."""
    _require_episodes(reader)
    known = np.flatnonzero(table["id"] == id)
    if not len(known):
        return rows_of_episode(reader, id), None
    line = table[known[-1]]
    rows = rows_of_episode(reader, id, int(line["first_row"]), int(line["last_row"]))
    return rows, int(known[-1])


def _require_episodes(reader: RowReader) -> None:
    if absent := missing(reader.schema, (TRAJ_IDS, STEP, LANE)):
        raise ColumnsMissing(
            f"{reader.path} has no columns {', '.join(absent)}, which assign rows to episodes."
        )


def _end_of(reader: RowReader, row: int) -> str:
    """Return the end of an episode that is not counted yet, given its last row."""
    for key, code in ((TERMINATED, END_TERMINATED), (TRUNCATED, END_TRUNCATED)):
        if flag_at(reader, key, row):
            return END_NAMES[code]
    return END_NAMES[END_OPEN if reader.is_written else END_CUT]


def _as_object(reader: RowReader, report: Report) -> dict[str, Any]:
    """Return a report as JSON values. Places of rows name the trajectory of the row."""

    def place_of(place: Place) -> dict[str, Any]:
        id = place.trajectory
        if id is None and place.row in reader.span and TRAJ_IDS in reader.keys:
            id = int(numbers_of(reader.column(TRAJ_IDS).take(np.array([place.row])))[0])
        known = id is not None and place.row in reader.span
        return {"text": str(place), "trajectory": str(id) if known else None}

    def finding_of(each: Finding) -> dict[str, Any]:
        return {"text": str(each), "count": each.count, "places": [*map(place_of, each.places)]}

    return {
        "state": "done",
        "sound": report.sound,
        "rows": report.rows,
        "checked": list(report.checked),
        "skipped": dict(report.skipped),
        "findings": [*map(finding_of, report.findings)],
        "notes": [*map(finding_of, report.notes)],
    }
