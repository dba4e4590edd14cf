"""An export that is kept up while a process adds rows: versions, each of them whole."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tallyroll.storage.errors import StateMismatch
from tallyroll.storage.ext.copying import require_outside
from tallyroll.storage.ext.exchange.exporting import Cuts, ExportReport, export
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.ext.exchange.versions import versions_at
from tallyroll.storage.ext.overlays.overlaid import OverlaidReader
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.stores.row_store import RowStore
from tallyroll.storage.user_code import user_callback

_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Options of an export that is kept up under a writer: see `DiskStorage.export`.

    The rows of the newest version are never older than the seconds from the begin of one version to
    the begin of the next, and those that a version takes: with the default less than a minute, as
    long as a version takes less than 30 s.
    """

    every: float = 30.0
    """Seconds from the begin of a version to that of the next, if rows came since. A version that
    takes longer is followed by the next at once."""
    stop: Callable[[], bool] | None = None
    """Asked between versions, ten times a second: True ends it, with a last version if rows came
    since the one before."""
    on_version: Callable[[ExportReport], object] | None = None
    """Called with the report of each version, when it is the newest."""

    def __post_init__(self) -> None:
        if not 0 <= self.every < math.inf:
            raise ValueError(f"every: expected seconds, 0 or more, got {self.every!r:.80}.")


def export_storage(
    storage: RowStore,
    path: str | os.PathLike[str],
    kind: str,
    *,
    columns: Keys | None,
    cuts: Cuts,
    follow: Follow | None,
    options: object,
    progress: Progress | None,
) -> ExportReport:
    """Export the rows of a storage as `DiskStorage.export` does."""
    storage.reader.require_open()
    named = (columns,) if isinstance(columns, str) else columns or ()
    reader = storage.reader_with([*storage.reader.keys, *named]) if named else storage.reader
    if follow is None:
        return export(
            reader, path, kind, columns=columns, cuts=cuts, options=options, progress=progress
        )
    return export_followed(
        reader,
        path,
        kind,
        follow,
        columns=columns,
        cuts=cuts,
        options=options,
        progress=progress,
    )


@user_callback("export")
def export_followed(
    reader: RowReader,
    destination: str | os.PathLike[str],
    kind: str,
    follow: Follow,
    *,
    columns: Keys | None = None,
    cuts: Cuts = "keep",
    options: object = None,
    progress: Progress | None = None,
) -> ExportReport:
    """Write versions until the writer of the rows has ended; return the report of the last.

    Raises:
        PathIsTaken: something else is at ``destination``.
        StorageLocked: another process adds versions there.
        ValueError: the rows are not those of one storage, opened to be read.
    """
    files, place = format_named(kind, options), user_path(destination)
    rows = reader.rows if isinstance(reader, OverlaidReader) else reader
    if not isinstance(rows, FileReader):
        raise ValueError(
            f"follow: {reader.path} is not one storage that a process may be writing. Give its "
            "path alone, without a condition."
        )
    if rows.mode != "read":
        raise ValueError(
            f"follow: {reader.path} is written to by this object, and would never end. Give one "
            'that was opened with mode="read", as open_storage does.'
        )
    require_outside(reader, place)
    with versions_at(place, kind, files.suffix, reader.id) as versions:
        report: ExportReport | None = None
        count, seen, stopped = 0, -1, False
        while True:
            written = reader.is_written  # first: what it adds before it ends is exported below
            began, now = time.monotonic(), reader.revision
            if now != seen:
                version = versions.next()
                try:
                    found = export(
                        reader,
                        version,
                        kind,
                        columns=columns,
                        cuts=cuts,
                        options=options,
                        progress=progress,
                        title=place.name,
                    )
                except StateMismatch:
                    if not written:
                        raise
                    continue  # the writer took rows back: those that are left make a version
                versions.show(version)
                count, seen = count + 1, now
                report = replace(found, path=str(versions.link), versions=count)
                if follow.on_version is not None:
                    follow.on_version(report)
            assert report is not None
            if stopped or not written:
                return report
            stopped = _waited(reader, follow, began)


def _waited(reader: RowReader, follow: Follow, began: float) -> bool:
    """Wait until the next version is due, or the writer has ended; return True to stop."""
    while True:
        if follow.stop is not None and follow.stop():
            return True
        left = began + follow.every - time.monotonic()
        if left <= 0 or not reader.is_written:
            return False
        time.sleep(min(left, _LOOK_SECONDS))
