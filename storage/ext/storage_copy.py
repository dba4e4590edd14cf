"""Copy of the rows of any reader to a new storage of any format, in one pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.filesize import decimal

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.engine.once_columns import stored_schema
from tallyroll.storage.errors import ColumnsMissing, NotWritable, Overrun, StateMismatch
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.joined.union import UnionPart, UnionReader
from tallyroll.storage.ext.overlays.overlaid import OverlaidReader
from tallyroll.storage.ext.overlays.overlay_copies import NewOverlays, OverlaysOf
from tallyroll.storage.ext.views.view_reader import ViewReader
from tallyroll.storage.files.copied_runs import (
    LEFT_OUT,
    copy_entry,
    has_room,
    makers,
    room_for_copies,
    source_of,
)
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.by_name import FILES, format_at
from tallyroll.storage.formats.space import estimate, require_room
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.batch_dims import fitting
from tallyroll.storage.rows.keys import STEP, TRAJ_IDS, Key, Keys, as_key, format_key
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.opened_files import OpenedFiles, PlanOnce, plan_once_like
from tallyroll.storage.stores.row_writer import RowWriter
from tallyroll.storage.trajectories.columns import missing, numbers_of
from tallyroll.storage.user_code import user_callback

_BLOCK_NBYTES: Final = 2**26
_SORTED_NBYTES: Final = 48
"""The memory that sorting needs, in bytes per row."""
_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True)
class CopyReport(PageSource):
    """Result of a copy, or of a dry run."""

    path: str
    format: str
    """The short name of the format: ``memmap``, ``hdf5`` or ``zarr``."""
    rows: int
    row_nbytes: int
    columns: tuple[str, ...]
    nbytes: int
    """Disk space in bytes that the copy takes."""
    free: int
    """Free disk space in bytes before the copy."""
    overlays: tuple[str, ...] = ()
    """The names of the overlays that were copied."""
    overlays_left_out: tuple[str, ...] = ()
    """The overlays of the sources that were not copied, as ``PATH: NAME``."""

    def _show_on_(self, page: Page) -> None:
        show_copy(self, page)


def show_copy(report: CopyReport, page: Page, *, dry: bool = False) -> None:
    """Write a report to a page; ``dry`` is True for a dry run."""
    said = "would be written" if dry else "written"
    page.print(
        f"{report.path}: {report.rows:,} rows of {report.row_nbytes:,} bytes {said} "
        f"({report.format}, {len(report.columns)} columns, {decimal(report.nbytes)})"
    )
    if dry:
        page.print(f"{decimal(report.free)} are free there; nothing was written")
    if report.overlays:
        page.print(f"with overlays {', '.join(report.overlays)}")
    for each in report.overlays_left_out:
        page.print(f"not copied: overlay {each}")


@user_callback("copy")
def copy(
    reader: RowReader,
    destination: str | os.PathLike[str],
    *,
    columns: Keys | None = None,
    drop: Keys = (),
    sort: bool = False,
    format: str | None = None,
    follow: bool = False,
    stop: Callable[[], bool] | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> CopyReport:
    """Copy the committed rows of a reader to a new storage; see `DiskStorage.copy_to`.

    Raises:
        PathIsTaken: ``destination`` exists.
        StorageLocked: another process writes to ``destination``.
        StorageFull: the rows do not fit on the disk.
        ColumnsMissing: a column does not exist.
        Overrun: a ring's writer overwrites rows before they are copied.
        StateMismatch: rows were rewound during the copy.
        ValueError: an argument has an invalid value.
    """
    place = user_path(destination)
    name = format_at(place, format)
    wanted = ColumnSelection(columns, drop)
    if follow:
        _require_followed(reader, name, sort)
    span = reader.span
    require_free(place)
    require_outside(reader, place)
    with closing(OverlaysOf(sources_of(reader), wanted)) as overlays:
        schema = schema_of_copy(reader, wanted, overlays.every)
        files = FILES[name](place.absolute())
        files.check(schema)
        plan = _plan_once(reader, files)
        stored = schema if plan is None else stored_schema(schema, plan(schema))
        space, rows = estimate(files, stored, len(span)), len(span)
        if not dry_run:
            require_room(files, stored, len(span))
            with (
                atomic_creation(place) as target,
                closing(_StorageCopy(reader, span, schema, overlays, FILES[name](target))) as it,
            ):
                it.take(_blocks(reader, span, schema, sort=sort), len(span), progress)
                if follow:
                    it.follow(stop, progress)
            rows = it.rows
    return CopyReport(
        str(place),
        name,
        rows,
        schema.row_nbytes,
        tuple(map(format_key, schema.keys)),
        files.footprint(stored, rows).nbytes + overlays.nbytes(rows),
        space.free,
        tuple(format_key(each.key) for each in overlays.headers),
        tuple(overlays.left_out),
    )


class ColumnSelection:
    """Predicate that selects columns and overlays by key."""

    def __init__(self, columns: Keys | None, drop: Keys) -> None:
        self.only = None if columns is None else {as_key(key) for key in _several(columns)}
        self.dropped = {as_key(key) for key in _several(drop)}

    def __call__(self, key: Key) -> bool:
        """Return True if a column or an overlay is selected."""
        return key not in self.dropped and (self.only is None or key in self.only)


def schema_of_copy(
    reader: RowReader, wanted: ColumnSelection, beside: Collection[Key] = ()
) -> Schema:
    """Return the schema of the selected columns, in their order.

    ``beside`` contains the keys of overlays, which the selection may also name.
    """
    schema = reader.schema
    known = {*schema.keys, *beside}
    unknown = sorted((wanted.dropped | (wanted.only or set())) - known)
    if unknown or wanted.only == set():
        raise ColumnsMissing(
            f"columns: expected some of {', '.join(map(format_key, schema.keys))}, got "
            f"{', '.join(sorted(map(format_key, unknown))) or 'none'}."
            f"{excluded_note(reader.runs, unknown)}"
        )
    left = [key for key in schema.keys if wanted(key)]
    if not left:
        raise ColumnsMissing(
            f"all columns of {reader.path} would be dropped. Keep at least one column."
        )
    kept = tuple(each for each in schema.columns if each.key in left)
    dims = fitting(dict(schema.batch_dims), {each.key: each.shape for each in kept})
    return Schema(kept, tuple(dims.items()))


def _several(keys: Keys) -> Sequence[str | Key]:
    return (keys,) if isinstance(keys, str) else keys


def _require_followed(reader: RowReader, name: str, sort: bool) -> None:
    if sort:
        raise ValueError(
            "follow and sort cannot be combined, because the order of all rows is known only at "
            "the end. Leave out one of them."
        )
    if name == "hdf5":
        raise ValueError(
            "follow: an HDF5 file needs its final number of rows in advance. Copy to memmap or "
            "zarr."
        )
    if not isinstance(reader, FileReader):
        raise ValueError(
            "follow: expected a single storage that another process may be writing, got "
            f"{reader.path}. Give only the path of that storage."
        )


def sources_of(reader: RowReader) -> list[RowReader]:
    """Return the readers of the storages that hold the rows of ``reader``."""
    reader, _ = _there(reader, np.empty(0, np.int64))
    return [e.reader for e in reader.members] if isinstance(reader, UnionReader) else [reader]


def _plan_once(reader: RowReader, files: Format) -> PlanOnce | None:
    """Return the plan of the columns that the copy stores once, as all sources do.

    A Zarr copy of other formats stores whole rows, which other libraries can read.
    """
    sources = [
        each.rows if isinstance(each, OverlaidReader) else each for each in sources_of(reader)
    ]
    keeps = files.pools and (files.rings or all(e.copied_as is type(files) for e in sources))
    return plan_once_like(*sources) if keeps else None


def source_around(reader: RowReader, place: Path) -> Path | None:
    """Return the path of the source storage that contains ``place``; None if there is none."""
    above = Path(os.path.realpath(place)).parents
    paths = (each.path for each in sources_of(reader))
    return next((path for path in paths if Path(os.path.realpath(path)) in above), None)


def overlays_of(reader: RowReader) -> tuple[str, ...]:
    """Return the overlays of the storages that hold the reader's rows, as ``PATH: NAME``."""
    with closing(OverlaysOf(sources_of(reader), lambda _: False)) as overlays:
        return tuple(overlays.left_out)


def require_outside(reader: RowReader, place: Path) -> None:
    """Raise `NotWritable` if ``place`` lies within a storage that holds some of the rows."""
    if (source := source_around(reader, place)) is not None:
        raise NotWritable(f"{place} is inside the storage {source}. Give a path outside it.")


# --- rows -----------------------------------------------------------------------------------------


def _blocks(
    reader: RowReader, span: range, schema: Schema, *, sort: bool
) -> Iterator[range | np.ndarray]:
    """Yield row numbers in blocks of at most `_BLOCK_NBYTES` of rows."""
    size = max(1, _BLOCK_NBYTES // schema.row_nbytes)
    rows = trajectory_order(reader, span) if sort else None
    for start in range(0, len(span), size):
        yield span[start : start + size] if rows is None else rows[start : start + size]


def trajectory_order(reader: RowReader, span: range) -> np.ndarray:
    """Return row numbers grouped by trajectory, in the order of the trajectories' first rows.

    Raises:
        ColumnsMissing: the rows have no trajectory ids or no steps.
    """
    if lacking := missing(reader.schema, (TRAJ_IDS, STEP)):
        raise ColumnsMissing(
            f"{reader.path} has no {', no '.join(lacking)} (whole numbers, one per row). "
            "Sorting needs these columns. Copy without sorting."
        )
    require_memory(
        len(span) * _SORTED_NBYTES, f"the order of {len(span):,} rows", "Copy without sorting."
    )
    ids, steps = (
        numbers_of(reader.column(key).slice(span.start, span.stop)) for key in (TRAJ_IDS, STEP)
    )
    _, first, which = np.unique(ids, return_index=True, return_inverse=True)
    return np.lexsort((steps, first[which])) + span.start


class _StorageCopy:
    """Writer that copies the rows ``span`` of a reader, and any later rows, to a new storage."""

    def __init__(
        self, reader: RowReader, span: range, schema: Schema, overlays: OverlaysOf, files: Format
    ) -> None:
        self._reader, self._schema, self._rewinds = reader, schema, reader.rewinds
        self._overlays = overlays
        self._columns = {key: reader.column(key) for key in schema.keys}
        self._sources = _Sources(reader, files.copies_nbytes)
        self._upto, self.rows = span.stop, 0
        target = FileReader(files, files.path, "create")
        once = _plan_once(reader, files)
        opened = OpenedFiles(target, capacity=max(1, len(span)), durability="power", once=once)
        self._writer = RowWriter(opened)
        try:
            self._writer.runs.create(schema, [{"first_row": 0}])
            self._beside = NewOverlays(target, overlays.headers)
        except BaseException:
            self._writer.close()
            raise

    def close(self) -> None:
        """Close the new storage; its rows are on the disk afterwards."""
        try:
            self._beside.close()
        finally:
            self._writer.close()

    def take(
        self, blocks: Iterable[range | np.ndarray], total: int, progress: Progress | None
    ) -> None:
        """Copy blocks of rows; ``total`` is the number of rows of the whole copy."""
        each = self._schema.row_nbytes
        for block in blocks:
            parts = self._sources.parts(block)
            values = self._overlays.take(parts, len(block))
            self._writer.append(self._writer.input_rows.checked(self._read(block)))
            self._beside.put(values, self.rows)
            self.rows += len(block)
            self._sources.count(parts)
            if progress is not None:
                progress(self.rows * each, total * each)
        if self._reader.rewinds != self._rewinds:
            raise StateMismatch(
                f"rows of {self._reader.path} were rewound during the copy. Copy the storage again."
            )
        self._writer.runs.write(self._sources.entries())

    def _read(self, block: range | np.ndarray) -> dict[Key, np.ndarray]:
        if isinstance(block, np.ndarray):
            rows = {key: column.take(block) for key, column in self._columns.items()}
        else:
            rows = {
                key: column.slice(block.start, block.stop) for key, column in self._columns.items()
            }
            if may_be_overwritten(self._reader):  # the values may be views of the ring's memory
                rows = {key: values.copy() for key, values in rows.items()}
        _require_left(self._reader, block)
        return rows

    def follow(self, stop: Callable[[], bool] | None, progress: Progress | None) -> None:
        """Copy the rows that a writer adds, until the writer ends or ``stop`` returns True."""
        reader = self._reader
        while True:
            written = reader.is_written  # check first, so that rows added before the end are read
            span = range(self._upto, reader.head)
            if span:
                blocks = _blocks(reader, span, self._schema, sort=False)
                self.take(blocks, self.rows + len(span), progress)
                self._upto = span.stop
            if not written or (stop is not None and stop()):
                return
            time.sleep(_LOOK_SECONDS)


def _there(reader: RowReader, rows: np.ndarray) -> tuple[RowReader, np.ndarray]:
    """Return the reader below a view, and the numbers of ``rows`` in that reader.

    Any other reader is returned with the same numbers.
    """
    return (reader.rows, reader.numbers(rows)) if isinstance(reader, ViewReader) else (reader, rows)


def may_be_overwritten(reader: RowReader) -> bool:
    """Return True if a source is a ring, whose writer may overwrite rows during a read."""
    return any(each.ring for each in sources_of(reader))


def _require_left(reader: RowReader, block: range | np.ndarray) -> None:
    """Raise `Overrun` if rows were overwritten while they were read."""
    if not may_be_overwritten(reader):
        return
    reader, rows = _there(reader, np.asarray(block))
    if isinstance(reader, UnionReader):
        reader.require_rows(rows)
    elif int(rows.min()) < (first := reader.span.start):
        raise Overrun(
            f"{reader.path} is a ring, and its writer has overwritten row {int(rows.min())} before "
            f"that row was copied: the ring starts with row {first} now. Nothing was written. Copy "
            "again, or copy while the writer pauses."
        )


# --- provenance -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Stretch:
    """Consecutive rows of the new storage that come from one source."""

    first_row: int
    source: int
    least: int
    most: int


class _Sources:
    """Record of the source of each row of the new storage, for the new manifest."""

    def __init__(self, reader: RowReader, most: int) -> None:
        self._reader, self._readers, self._most = reader, sources_of(reader), most
        base, _ = _there(reader, np.empty(0, np.int64))
        self._union = base if isinstance(base, UnionReader) else None
        self._stretches: list[_Stretch] = []
        self._rows = 0

    def parts(self, block: range | np.ndarray) -> list[UnionPart]:
        """Split a block of rows by source."""
        _, rows = _there(self._reader, np.asarray(block))
        return [UnionPart(0, slice(None), rows)] if self._union is None else self._union.parts(rows)

    def count(self, parts: Iterable[UnionPart]) -> None:
        """Record the sources of rows that were written."""
        # The rows of a member stay together, even if trajectories are sorted by their first rows.
        for part in parts:
            self._add(part.member, part.rows)

    def _add(self, source: int, rows: np.ndarray) -> None:
        least, most = int(rows.min()), int(rows.max())
        last = self._stretches[-1] if self._stretches else None
        if last is not None and last.source == source:
            last.least, last.most = min(last.least, least), max(last.most, most)
        else:
            self._stretches.append(_Stretch(self._rows, source, least, most))
        self._rows += len(rows)

    def entries(self) -> list[dict[str, Any]]:
        """Return the manifest entries; each names a source storage, its rows, and their runs."""
        found: list[dict[str, Any]] = []
        for each in self._stretches:
            if not has_room(found):
                found.append({"first_row": each.first_row, LEFT_OUT: True})
                break
            manifest = self._readers[each.source].manifest
            runs, _ = makers(manifest["runs"], range(each.least, each.most + 1))
            rows: list[int | None] = [each.least, each.most]
            room = room_for_copies(found, self._most)
            moved = 0 if self._union is None else self._union.ids_moved_by[each.source]
            entry, source = {"first_row": each.first_row}, source_of(manifest, rows, moved)
            found.append(copy_entry(entry, source, runs, room, unchanged=True))
        return found or [{"first_row": 0}]
