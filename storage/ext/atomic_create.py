"""Atomic creation of a storage: write it in a temporary folder, and rename it when complete."""

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
    """Raise `PathIsTaken` if ``place`` exists, or an `OpenError` if it cannot be created."""
    refuse_impossible(place)
    require_creatable(place.parent)
    if os.path.lexists(place):
        raise _path_exists_error(place)


@contextlib.contextmanager
def atomic_creation(place: Path) -> Iterator[Path]:
    """Yield a temporary path for a new storage, and rename it to ``place`` at the end.

    The temporary folder is next to ``place``, on the same file system. Leftovers of a killed
    process are removed first. After an error, everything that was written is removed.

    Raises:
        StorageLocked: another process writes to ``place``.
        PathIsTaken: ``place`` exists.
    """
    place = place.absolute()  # other libraries change the working directory, or join paths twice
    folder = place.parent / f".{place.name}{_SUFFIX}"
    target = folder / f"rows{place.suffix}"
    with _locked_folder(folder, place):
        _unpublish(target, place)
        _clear(folder)
        yield target
        _publish(target, place)


@contextlib.contextmanager
def scratch_folder(place: Path, suffix: str) -> Iterator[Path]:
    """Yield an empty scratch folder next to ``place``, for use until a new storage exists.

    Leftovers of a killed process are removed first. The folder is removed at the end.

    Raises:
        StorageLocked: another process uses the folder.
    """
    place = place.absolute()
    folder = place.parent / f".{place.name}{suffix}"
    with _locked_folder(folder, place):
        _clear(folder)
        yield folder


@contextlib.contextmanager
def _locked_folder(folder: Path, place: Path) -> Iterator[None]:
    """Hold a folder exclusively, and remove it at the end."""
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
    """Lock a folder and return its descriptor. The lock ends with the process."""
    while True:
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
        try:
            held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its previous owner removed it
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(held), os.lstat(folder)):
                return held
        except BlockingIOError as error:
            os.close(held)
            raise StorageLocked(
                f"{place} is being written by another process, in the temporary folder {folder}. "
                "Wait until that process has finished, or give another path."
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
    """Rename a complete storage, whose data is already on the disk, to ``place`` atomically.

    The side files of a single-file storage, such as an index, are renamed first.
    """
    with translated(place):
        if os.path.lexists(place):
            raise _path_exists_error(place)
        if target.is_dir():
            try:
                os.rename(target, place)  # replaces an empty directory, and nothing else
            except OSError as error:
                if os.path.lexists(place):
                    raise _path_exists_error(place) from error
                raise
        else:
            for each, named in _side_files(target, place):
                linked = each.with_name("linked")
                os.link(each, linked, follow_symlinks=False)
                os.replace(linked, named)
            try:
                os.link(target, place, follow_symlinks=False)
            except FileExistsError as error:
                raise _path_exists_error(place) from error
    sync_above(place)


def _side_files(target: Path, place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the side files of a file, and their final names."""
    for each in [*target.parent.iterdir()]:
        if each.name.startswith(f"{target.name}.") and each.suffix != ".lock":
            yield each, place.with_name(place.name + each.name[len(target.name) :])


def _unpublish(target: Path, place: Path) -> None:
    """Remove side files that a killed process published before it could publish the main file."""
    if not os.path.lexists(place):
        for each, named in _side_files(target, place):
            if os.path.lexists(named) and os.path.samestat(os.lstat(each), os.lstat(named)):
                named.unlink()


def _path_exists_error(place: Path) -> PathIsTaken:
    return PathIsTaken(
        f"{place} already exists and is not replaced. Give another path, or remove the existing "
        "one first."
    )
