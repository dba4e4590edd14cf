"""A new storage is written beside its place, and gets its name when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tallyroll.storage.errors import PathIsTaken, StorageLocked
from tallyroll.storage.files.paths import (
    make_directory,
    refuse_impossible,
    require_creatable,
    sync_above,
    translated,
)

_SUFFIX: Final = ".written-aside"


def require_free(place: Path) -> None:
    """Raise `PathIsTaken` if something is at ``place``, or an `OpenError` if nothing can be."""
    refuse_impossible(place)
    require_creatable(place.parent)
    if os.path.lexists(place):
        raise _taken(place)


@contextlib.contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """Yield an empty folder beside ``place``, on its file system; it goes at the end.

    What a killed process left in it goes first.

    Raises:
        StorageLocked: another process writes to ``place``.
    """
    folder = place.parent / f".{place.name}{_SUFFIX}"
    make_directory(place.parent)
    with translated(folder):
        held = _locked(folder, place)
        try:
            _clear(folder)
            yield folder
        finally:
            try:
                _clear(folder)
                folder.rmdir()
            finally:
                os.close(held)


def _locked(folder: Path, place: Path) -> int:
    """Return a descriptor of the folder, which holds its lock: it ends with the process."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner removed it, at its end
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), os.lstat(folder)):
                return held
        except BlockingIOError as error:
            os.close(held)
            raise StorageLocked(
                f"{place} is being written by another process, beside it in {folder}. Wait for "
                "it, or give another path."
            ) from error
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(held)
            raise
        os.close(held)


def _clear(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def publish(target: Path, place: Path) -> None:
    """Give a storage that is whole, and on the disk, the name ``place``, at once.

    What lies beside a file, as an index does, gets its name before.

    Raises:
        PathIsTaken: something has the name.
    """
    with translated(place):
        if os.path.lexists(place):
            raise _taken(place)
        if target.is_dir():
            try:
                os.rename(target, place)  # replaces an empty directory, and nothing else
            except OSError as error:
                if os.path.lexists(place):
                    raise _taken(place) from error
                raise
        else:
            for each in target.parent.glob(f"{target.name}.*"):
                if each.suffix != ".lock":
                    os.replace(each, place.parent / (place.name + each.name[len(target.name) :]))
            try:
                os.link(target, place, follow_symlinks=False)
            except FileExistsError as error:
                raise _taken(place) from error
    sync_above(place)


def _taken(place: Path) -> PathIsTaken:
    return PathIsTaken(
        f"{place} is there already, and is not replaced. Give another path, or remove it first."
    )
