"""Export rows while a process adds more, as a series of complete versions."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import PathIsTaken, StateMismatch, StorageLocked
from tallyroll.storage.ext.exchange.dataset_export import (
    Cuts,
    ExportReport,
    export,
    export_with_head,
)
from tallyroll.storage.ext.exchange.registry import format_named
from tallyroll.storage.ext.overlays.overlaid import OverlaidReader
from tallyroll.storage.ext.storage_copy import require_outside
from tallyroll.storage.files.lock import WriterLock
from tallyroll.storage.files.paths import (
    make_directory,
    refuse_impossible,
    require_creatable,
    translated,
    user_path,
)
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Keys
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.stores.row_store import RowStore
from tallyroll.storage.user_code import user_callback

_CURRENT, _SAID, _LOCK = "current", "follow.json", ".follow.lock"
_SAID_NBYTES: Final = 2**16
_VERSION: Final = 1
_DIGITS: Final = 8


@contextlib.contextmanager
def versions_at(place: Path, kind: str, suffix: str, id: str | None) -> Iterator[Versions]:
    """Yield the versions in a folder, locked for this process. Create the folder if necessary.

    Raises:
        StorageLocked: another process adds versions to the folder.
        PathIsTaken: the folder holds other files, or versions of another storage or format.
    """
    refuse_impossible(place)
    require_creatable(place)
    made = not os.path.lexists(place)
    make_directory(place)
    with translated(place):
        found = Versions(place, suffix)
        try:
            lock = WriterLock(found.inside, place / _LOCK)
        except StorageLocked as error:
            raise StorageLocked(
                f"{place}: another process is adding versions to this export. Wait until that "
                "process ends, or give another path."
            ) from error
        try:
            found.take(kind, id)
            yield found
        finally:
            try:
                if found.current is None:
                    found.leave_nothing(folder=made)
            finally:
                lock.release()


class Versions:
    """The versions in a folder that this process has locked.

    Args:
        place: the folder.
        suffix: the suffix of the versions' names.
    """

    def __init__(self, place: Path, suffix: str) -> None:
        self.place, self.link, self.inside = place, place / f"{_CURRENT}{suffix}", Inside(place)
        self._suffix, self._ours = suffix, False
        self._name = re.compile(rf"[0-9]{{{_DIGITS},}}{re.escape(suffix)}")

    @property
    def current(self) -> Path | None:
        """The newest complete version, or None if there is none."""
        try:
            name = os.readlink(self.link)
        except OSError:
            return None
        return self.place / name if self._name.fullmatch(name) else None

    def take(self, kind: str, id: str | None) -> None:
        """Initialize the folder, or resume one with versions of the same storage and format.

        Raises:
            PathIsTaken: the folder holds other files, or versions of another storage or format.
        """
        said = {"tallyroll_follow": _VERSION, "kind": kind, "id": id}
        there = {each.name for each in self.place.iterdir()} - {_LOCK, f"{_SAID}.tmp"}
        if not there:
            self.inside.write_atomically(
                self.place / _SAID, json.dumps(said).encode(), durable=True
            )
        elif self._read_state() != said:
            raise PathIsTaken(
                f"{self.place}: expected versions of this storage as {kind}, got other files, and "
                "the export does not replace them. Give another path, or remove the folder first."
            )
        if os.path.lexists(self.link) and self.current is None:
            raise PathIsTaken(
                f"{self.link}: expected a link to a version in the same folder, got another "
                "file, which the export does not replace. Remove the file."
            )
        self._ours = True
        self._tidy()

    def _read_state(self) -> Any:
        try:
            return json.loads(self.inside.read(self.place / _SAID, _SAID_NBYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def next(self) -> Path:
        """Return the path of the next version, which does not exist yet."""
        numbers = [int(each.name[: -len(self._suffix) or None]) for each in self._every()]
        return self.place / f"{max(numbers, default=0) + 1:0{_DIGITS}}{self._suffix}"

    def show(self, version: Path) -> None:
        """Point the link at a version on disk, and remove versions older than the previous one."""
        before, new = self.current, self.link.with_name(f".{self.link.name}.new")
        new.unlink(missing_ok=True)
        os.symlink(version.name, new)
        os.rename(new, self.link)
        self.inside.sync_directory(self.place)
        for each in self._every():
            if each not in (version, before):
                self._remove(each)

    def leave_nothing(self, *, folder: bool) -> None:
        """Remove the files that `take` created. Call this only if there is no version.

        Args:
            folder: True to remove the folder too, if it is empty.
        """
        if not self._ours:
            return
        self._tidy()
        for name in (_SAID, _LOCK):
            (self.place / name).unlink(missing_ok=True)
        if folder:
            self.inside.release()
            with contextlib.suppress(OSError):  # the folder may hold files of other programs
                self.place.rmdir()

    def _every(self) -> list[Path]:
        return [each for each in self.place.iterdir() if self._name.fullmatch(each.name)]

    def _tidy(self) -> None:
        """Remove incomplete versions that a killed process left."""
        for each in self.place.iterdir():
            if each.name.startswith(".") and self._name.match(each.name, 1):
                _gone(each)

    def _remove(self, version: Path) -> None:
        aside = version.with_name(f".{version.name}.removed")
        os.rename(version, aside)  # a partly removed version must not keep its name
        _gone(aside)


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


_LOOK_SECONDS: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Follow:
    """Options of an export that follows a writer; see `DiskStorage.export`.

    The newest version lags behind the writer by at most the interval between the starts of two
    versions plus the time that writing a version takes. With the default interval, the lag is less
    than a minute as long as a version takes less than 30 s.
    """

    every: float = 30.0
    """Seconds from the start of one version to the start of the next, if there are new rows.

    If a version takes longer, the next one starts immediately.
    """
    stop: Callable[[], bool] | None = None
    """A function that is called between versions, ten times a second.

    If it returns True, the export stops. If rows were added since the last version, the export
    writes a final version first.
    """
    on_version: Callable[[ExportReport], object] | None = None
    """Called with the report of each version, once it is the newest."""

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
    """Export the rows of a storage, as `DiskStorage.export` does."""
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
    """Write versions until the writer of the rows has ended. Return the report of the last version.

    Raises:
        PathIsTaken: ``destination`` holds other files.
        StorageLocked: another process adds versions to ``destination``.
        ValueError: ``reader`` does not read one storage that was opened with mode "read".
    """
    files, place = format_named(kind, options), user_path(destination)
    rows = reader.rows if isinstance(reader, OverlaidReader) else reader
    if not isinstance(rows, FileReader):
        raise ValueError(
            f"follow: expected one storage that a process may be writing to, got {reader.path}. "
            "Give the path of a single storage, without a condition."
        )
    if rows.mode != "read":
        raise ValueError(
            f"follow: {reader.path} is open for writing here, so the export would never end. Pass "
            'a storage that was opened with mode="read", as open_storage does.'
        )
    require_outside(reader, place)
    with versions_at(place, kind, files.suffix, reader.id) as versions:
        report: ExportReport | None = None
        count, seen, stopped = 0, (-1, 0), False
        while True:
            # Read this before the export: if the writer has ended, the export has all rows.
            written = reader.is_written
            began, rewinds = time.monotonic(), reader.rewinds
            if (reader.head, rewinds) != seen:
                version = versions.next()
                try:
                    found, head = export_with_head(
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
                    continue  # the writer rewound rows: the next version holds the remaining ones
                versions.show(version)
                # The version may have rows that were committed after the comparison.
                count, seen = count + 1, (head, rewinds)
                report = replace(found, path=str(versions.link), versions=count)
                if follow.on_version is not None:
                    follow.on_version(report)
            assert report is not None
            if stopped or not written:
                return report
            stopped = _waited(reader, follow, began)


def _waited(reader: RowReader, follow: Follow, began: float) -> bool:
    """Wait until the next version is due or the writer has ended.

    Return True if ``follow.stop`` stops the export.
    """
    while True:
        if follow.stop is not None and follow.stop():
            return True
        left = began + follow.every - time.monotonic()
        if left <= 0 or not reader.is_written:
            return False
        time.sleep(min(left, _LOOK_SECONDS))
