"""Export the rows of a reader to a format of other libraries, completely or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from rich.filesize import decimal

from tallyroll.storage.engine.available_memory import library_memory
from tallyroll.storage.errors import (
    ColumnsMissing,
    InvalidSchema,
    StateMismatch,
    StorageFull,
    WriteError,
)
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.exchange.base import ExchangeFormat
from tallyroll.storage.ext.exchange.export_rows import ExportRows, is_end_flag
from tallyroll.storage.ext.exchange.numbering import has_numbers
from tallyroll.storage.ext.exchange.readme import about_rows, omitted_counts
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.ext.exchange.sidecar import omitted_sidecars, saved_statistics
from tallyroll.storage.ext.storage_copy import ColumnSelection, require_outside, schema_of_copy
from tallyroll.storage.ext.views.view_reader import view_of
from tallyroll.storage.files.excluded_columns import excluded_note
from tallyroll.storage.files.paths import free_bytes, translated, user_path
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import NEXT, TERMINATED, TRUNCATED, Keys, format_key
from tallyroll.storage.rows.pages import Page, PageSource, counted
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import WHOSE, missing
from tallyroll.storage.trajectories.episodes import END_CUT, END_NAMES, END_OPEN
from tallyroll.storage.user_code import user_callback

Cuts = Literal["drop", "truncate", "keep"]
"""Ways to write trajectories that were neither terminated nor truncated."""
_NO_SPACE: Final = ("No space left", "errno = 28", "File too large", "errno = 27")


@dataclass(frozen=True)
class ExportReport(PageSource):
    """The result of an export."""

    path: str
    kind: str
    rows: int
    trajectories: int | None
    """The number of trajectories, or None if the rows do not record their trajectories."""
    cut: int
    """The number of trajectories of the source that were neither terminated nor truncated."""
    columns: tuple[str, ...]
    nbytes: int
    """The total size of the export's files."""
    lost: dict[str, int]
    """The number of items of the source that the export lacks, by reason.

    `exchange.md` lists the reasons.
    """
    versions: int | None = None
    """The number of versions written by a followed export; None for other exports."""

    def _show_on_(self, page: Page) -> None:
        more = (
            "" if self.trajectories is None else f" of {counted(self.trajectories, 'trajectory')}"
        )
        page.print(
            f"{self.path}: {counted(self.rows, 'row')}{more} written ({self.kind}, "
            f"{counted(len(self.columns), 'column')}, {decimal(self.nbytes)})"
        )
        if self.versions is not None:
            page.print(f"versions written: {self.versions:,}")
        if self.cut:
            page.print(f"cut: {counted(self.cut, 'trajectory')} of the source")
        for name, count in self.lost.items():
            page.print(f"lost: {name.replace('_', ' ')}: {count:,}")


@user_callback("export")
def export(
    reader: RowReader,
    destination: str | os.PathLike[str],
    kind: str,
    *,
    columns: Keys | None = None,
    cuts: Cuts = "keep",
    options: object = None,
    progress: Progress | None = None,
    title: str | None = None,
) -> ExportReport:
    """Write rows to a format of other libraries; see `DiskStorage.export`.

    ``title`` is the name that the export records for itself. None uses the name of its path.
    """
    report, _ = export_with_head(
        reader,
        destination,
        kind,
        columns=columns,
        cuts=cuts,
        options=options,
        progress=progress,
        title=title,
    )
    return report


def export_with_head(
    reader: RowReader,
    destination: str | os.PathLike[str],
    kind: str,
    *,
    columns: Keys | None,
    cuts: Cuts,
    options: object,
    progress: Progress | None,
    title: str | None,
) -> tuple[ExportReport, int]:
    """Write rows as `export` does. Also return the number of rows that had ever been committed."""
    if cuts not in get_args(Cuts):
        raise ValueError(f"cuts: expected 'drop', 'truncate' or 'keep', got {cuts!r:.80}.")
    files, place = format_named(kind, options), user_path(destination)
    require_free(place)
    require_outside(reader, place)
    schema, rewinds = schema_of_copy(reader, ColumnSelection(columns, ())), reader.rewinds
    _require_columns(files, schema, reader)
    chosen = _ExportSpan(reader, schema, cuts, needed=files.sorted)
    about, left = _metadata_of(reader, schema, chosen, whole=columns is None)
    rows = ExportRows(
        chosen.reader,
        chosen.rows,
        schema,
        about,
        place.name if title is None else title,
        chosen.table,
        chosen.ends,
        sorted=files.sorted,
        progress=progress,
    )
    nbytes = len(rows) * schema.row_nbytes
    if not files.compressed and nbytes > (free := free_bytes(place)):
        raise StorageFull(
            f"{place} has no room for {len(rows):,} rows: they need {nbytes:,} bytes, but only "
            f"{free:,} are free. Nothing was written. Free some space, or give another path."
        )
    with atomic_creation(place) as target:
        with translated(place, nbytes), _library_errors(kind, target), library_memory(str(place)):
            lost = {**chosen.lost, **left, **files.write(rows, target)}
            written = _synced(target)
        if reader.rewinds != rewinds:
            raise StateMismatch(
                f"{reader.path}: the writer rewound rows while they were exported. Export them "
                "again."
            )
    report = ExportReport(
        str(place),
        kind,
        len(rows),
        None if chosen.table is None else len(chosen.table),
        chosen.cut,
        tuple(map(format_key, schema.keys)),
        written,
        {name: count for name, count in lost.items() if count},
    )
    return report, chosen.span.stop


def _require_columns(files: ExchangeFormat, schema: Schema, reader: RowReader) -> None:
    """Raise `InvalidSchema` if the format cannot hold a column, or needs one that is missing."""
    try:
        files.check(schema)
    except InvalidSchema as error:
        observed = any((NEXT, *key) in schema for key in schema.keys)
        if observed or not (note := excluded_note(reader.runs)):
            raise
        raise InvalidSchema(f"{error}{note}") from error


class _ExportSpan:
    """The rows that ``cuts`` selects for an export, and the counts of the rows that it leaves out.

    ``span`` is the range of the rows that the source had at the time of the selection. A writer may
    have added more rows since.
    """

    def __init__(self, reader: RowReader, schema: Schema, cuts: Cuts, *, needed: bool) -> None:
        self.reader, self.table, self.cut = reader, None, 0
        self.span = reader.span
        self.ends, self.lost = np.empty(0, np.int64), dict[str, int]()
        self.left_out = False
        lacking = missing(reader.schema, (*WHOSE, TERMINATED))
        if lacking and (needed or cuts != "keep"):
            raise ColumnsMissing(
                f"{reader.path} has no {', no '.join(lacking)}, so its trajectories are unknown. "
                "Export to a table format, such as parquet, with cuts='keep'."
            )
        if lacking or not has_numbers(reader.schema):
            return
        if cuts == "truncate" and TRUNCATED not in schema.keys:
            raise ColumnsMissing(
                f"cuts='truncate': expected {format_key(TRUNCATED)} among the exported columns. "
                "Export this column too, or pass cuts='drop' or cuts='keep'."
            )
        table = read_consistently(reader, lambda: reader.trajectories.table)
        if reader.is_written:  # select only the rows that the table describes
            stop = int(table["last_row"].max(initial=-1)) + 1
            self.span = range(min(reader.span.start, stop), stop)
            self.reader = reader = view_of(reader, table, np.ones(len(table), bool))
            table = reader.trajectories.table
        left = table["end"] != END_CUT
        left &= table["end"] != END_OPEN
        self.cut = int(np.count_nonzero(~left))
        if cuts == "drop" and self.cut:
            self.lost = {
                "cut_trajectories": self.cut,
                "rows_of_cut_trajectories": int(table["length"][~left].sum()),
            }
            self.left_out, self.reader = True, view_of(reader, table, left)
            table = self.reader.trajectories.table
        elif cuts == "truncate" and self.cut:
            self.lost = {"cuts_written_as_truncated": self.cut}
            self.ends = np.sort(table["last_row"][~left])
        self.table = table

    @property
    def rows(self) -> range:
        """The numbers that the rows have in ``reader``."""
        return self.span if self.table is None else self.reader.span

    @property
    def counts(self) -> dict[str, int]:
        """The number of written trajectories for each kind of end."""
        assert self.table is not None
        found = Counter(END_NAMES[end] for end in self.table["end"].tolist())
        cut = found.pop("open", 0) + found.pop("cut", 0)
        found["truncated" if len(self.ends) else "cut"] += cut
        return {end: count for end, count in found.items() if count}


def _metadata_of(
    reader: RowReader, schema: Schema, chosen: _ExportSpan, *, whole: bool
) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the metadata that travels with the rows, and counts of the items that it leaves out.

    ``whole`` is True if the caller selected all columns. Columns and overlays that the caller
    leaves out do not count as lost.
    """
    about = about_rows(reader, schema, chosen.span)
    changed = [each.key for each in schema.columns if is_end_flag(each)] if len(chosen.ends) else []
    rows = len(chosen.rows) if not chosen.left_out else -1
    kept, lost = saved_statistics(reader, schema, rows, changed)
    left = {"statistics": lost, **omitted_counts(about)}
    if whole:
        left |= omitted_sidecars(reader, schema)
    more: dict[str, Any] = {"statistics": kept} if kept else {}
    if chosen.table is not None:
        more["ends"] = chosen.counts
    return about | more, left


@contextlib.contextmanager
def _library_errors(kind: str, target: Path) -> Iterator[None]:
    """Translate errors of the library that writes the export.

    If a library reports a full disk without an errno, the error becomes an `OSError` with ENOSPC. A
    missing file becomes a `WriteError` that names the library, unless another process removed the
    destination folder.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        if isinstance(error, FileNotFoundError) and target.parent.is_dir():
            raise WriteError(
                f"{kind}: expected its library to find the file {error.filename}, got "
                f"{error.strerror!r}. Nothing was written. Try another version of the library, and "
                "report this."
            ) from error
        if getattr(error, "errno", None) is None and any(each in str(error) for each in _NO_SPACE):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def _synced(target: Path) -> int:
    """Flush all files to the disk and return their total size in bytes."""
    if not target.is_dir():
        Inside(target.parent).sync(target)
        return target.stat().st_size
    inside, nbytes = Inside(target), 0
    for folder, _, names in os.walk(target):
        for name in names:
            inside.sync(Path(folder, name))
            nbytes += Path(folder, name).stat().st_size
        inside.sync_directory(Path(folder))
    return nbytes
