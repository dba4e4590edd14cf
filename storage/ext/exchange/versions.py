"""A folder of versions of an export, of which a link names the newest that is whole.

Beside the link, ``current``, are the versions, ``00000001`` and so on, a folder or a file each, and
``follow.json``, which says of which storage they are, and in which format. The link is replaced by
one rename when a version is on the disk; so whatever it leads to is whole. The version before that
stays, for readers that found it just now; older ones are removed, and get another name first.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import PathIsTaken, StorageLocked
from tallyroll.storage.files.lock import WriterLock
from tallyroll.storage.files.paths import (
    make_directory,
    refuse_impossible,
    require_creatable,
    translated,
)
from tallyroll.storage.files.safe_files import Inside

_CURRENT, _SAID, _LOCK = "current", "follow.json", ".follow.lock"
_SAID_NBYTES: Final = 2**16
_VERSION: Final = 1
_DIGITS: Final = 8


@contextlib.contextmanager
def versions_at(place: Path, kind: str, suffix: str, id: str | None) -> Iterator[Versions]:
    """Yield the versions in a folder, made if there is none; only this process may add to them.

    Raises:
        StorageLocked: another process adds versions there.
        PathIsTaken: something else is there, or versions of another storage or format.
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
                f"{place} is kept up by another process, which adds versions to it. Wait for it, "
                "or give another path."
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
    """The versions in a folder, which this process holds.

    Args:
        place: the folder.
        suffix: the end of their names.
    """

    def __init__(self, place: Path, suffix: str) -> None:
        self.place, self.link, self.inside = place, place / f"{_CURRENT}{suffix}", Inside(place)
        self._suffix, self._ours = suffix, False
        self._name = re.compile(rf"[0-9]{{{_DIGITS},}}{re.escape(suffix)}")

    @property
    def current(self) -> Path | None:
        """The newest version that is whole; None without one."""
        try:
            name = os.readlink(self.link)
        except OSError:
            return None
        return self.place / name if self._name.fullmatch(name) else None

    def take(self, kind: str, id: str | None) -> None:
        """Make the folder one of versions, or go on with those of the same storage and format."""
        said = {"tallyroll_follow": _VERSION, "kind": kind, "id": id}
        there = {each.name for each in self.place.iterdir()} - {_LOCK, f"{_SAID}.tmp"}
        if not there:
            self.inside.write_aside(self.place / _SAID, json.dumps(said).encode(), durable=True)
        elif self._said() != said:
            raise PathIsTaken(
                f"{self.place} has files already, and no versions of this storage as {kind}. They "
                "are not replaced. Give another path, or remove it first."
            )
        if os.path.lexists(self.link) and self.current is None:
            raise PathIsTaken(
                f"{self.link} is no link to a version beside it, and is not replaced. Remove it."
            )
        self._ours = True
        self._tidy()

    def _said(self) -> Any:
        try:
            return json.loads(self.inside.read(self.place / _SAID, _SAID_NBYTES))
        except (OSError, ValueError, RecursionError):
            return None

    def next(self) -> Path:
        """Return the path of the version that comes next, where nothing is."""
        numbers = [int(each.name[: -len(self._suffix) or None]) for each in self._every()]
        return self.place / f"{max(numbers, default=0) + 1:0{_DIGITS}}{self._suffix}"

    def show(self, version: Path) -> None:
        """Let the link lead to a version that is on the disk, and remove those before the last."""
        before, new = self.current, self.link.with_name(f".{self.link.name}.new")
        new.unlink(missing_ok=True)
        os.symlink(version.name, new)
        os.rename(new, self.link)
        self.inside.sync_directory(self.place)
        for each in self._every():
            if each not in (version, before):
                self._remove(each)

    def leave_nothing(self, *, folder: bool) -> None:
        """Remove what `take` made, as there is no version; the ``folder``, too."""
        if not self._ours:
            return
        self._tidy()
        for name in (_SAID, _LOCK):
            (self.place / name).unlink(missing_ok=True)
        if folder:
            self.inside.let_go()
            with contextlib.suppress(OSError):  # it has files of others
                self.place.rmdir()

    def _every(self) -> list[Path]:
        return [each for each in self.place.iterdir() if self._name.fullmatch(each.name)]

    def _tidy(self) -> None:
        """Remove parts of versions, which a killed process left."""
        for each in self.place.iterdir():
            if each.name.startswith(".") and self._name.match(each.name, 1):
                _gone(each)

    def _remove(self, version: Path) -> None:
        aside = version.with_name(f".{version.name}.removed")
        os.rename(version, aside)  # a part of it has not its name
        _gone(aside)


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
