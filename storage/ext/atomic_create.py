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
def written_aside(place: Path) -> Iterator[Path]:
    """Yield a path for a new storage, which gets the name ``place`` at the end.

    It is beside ``place``, on its file system. What a killed process left there goes first; after
    an error all goes that was written.

    Raises:
        StorageLocked: another process writes to ``place``.
        PathIsTaken: something has the name.
    """
    place = place.absolute()  # other libraries change folders, or join paths twice
    folder = place.parent / f".{place.name}{_SUFFIX}"
    target = folder / f"rows{place.suffix}"
    with _held(folder, place):
        _take_back(target, place)
        _clear(folder)
        yield target
        _publish(target, place)


@contextlib.contextmanager
def folder_beside(place: Path, suffix: str) -> Iterator[Path]:
    """Yield an empty folder beside ``place``, for what is needed until a new storage is there.

    What a killed process left there goes first, and all of it at the end.

    Raises:
        StorageLocked: another process has it.
    """
    place = place.absolute()
    folder = place.parent / f".{place.name}{suffix}"
    with _held(folder, place):
        _clear(folder)
        yield folder


@contextlib.contextmanager
def _held(folder: Path, place: Path) -> Iterator[None]:
    """Have a folder that no other process has, and remove it at the end."""
    make_directory(place.parent)
    with translated(folder):
        held = _locked(folder, place)
        try:
            yield
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


def _publish(target: Path, place: Path) -> None:
    """Give a storage that is whole, and on the disk, the name ``place``, at once.

    What lies beside a file, as an index does, gets its name before.
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
            for each, named in _beside(target, place):
                linked = each.with_name("linked")
                os.link(each, linked, follow_symlinks=False)
                os.replace(linked, named)
            try:
                os.link(target, place, follow_symlinks=False)
            except FileExistsError as error:
                raise _taken(place) from error
    sync_above(place)


def _beside(target: Path, place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files beside a file, and the names that they get."""
    for each in [*target.parent.iterdir()]:
        if each.name.startswith(f"{target.name}.") and each.suffix != ".lock":
            yield each, place.with_name(place.name + each.name[len(target.name) :])


def _take_back(target: Path, place: Path) -> None:
    """Remove the names that a killed process gave to files beside one that got none itself."""
    if not os.path.lexists(place):
        for each, named in _beside(target, place):
            if os.path.lexists(named) and os.path.samestat(os.lstat(each), os.lstat(named)):
                named.unlink()


def _taken(place: Path) -> PathIsTaken:
    return PathIsTaken(
        f"{place} is there already, and is not replaced. Give another path, or remove it first."
    )
