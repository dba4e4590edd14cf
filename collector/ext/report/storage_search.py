"""Find the storages at given paths and in given folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tallyroll.storage.errors import NotAStorage, StorageError, StorageMissing
from tallyroll.storage.formats.by_name import SUFFIXES
from tallyroll.storage.storages import open_storage

_DEEPEST = 8


def storages_at(
    path: str, accept_copy: bool = False
) -> Iterator[tuple[str, StorageError | OSError | None]]:
    """Yield each storage at ``path`` or below it, with the error if it cannot be opened.

    A folder that is not a storage is searched. Files in the folder count if they have the suffix of
    a storage file.
    """
    refused = _refusal(path, accept_copy)
    if not isinstance(refused, NotAStorage) or not os.path.isdir(path):
        yield path, refused
        return
    found = [*_below(path, _DEEPEST, {os.path.realpath(path)}, accept_copy)]
    yield from found or [(path, refused)]


def _below(
    folder: str, depth: int, seen: set[str], accept_copy: bool
) -> Iterator[tuple[str, StorageError | OSError | None]]:
    """Yield the storages in a folder; ``seen`` has the folders that were already searched."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        yield folder, error
        return
    for name in names:
        path = os.path.join(folder, name)
        is_folder = os.path.isdir(path)
        if not is_folder and SUFFIXES.get(Path(name).suffix.lower()) != "hdf5":
            continue
        refused = _refusal(path, accept_copy)
        if not isinstance(refused, NotAStorage | StorageMissing):
            yield path, refused
        elif is_folder and depth and (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield from _below(path, depth - 1, seen, accept_copy)


def _refusal(path: str, accept_copy: bool) -> StorageError | OSError | None:
    """Return the error of opening a storage at a path; None if the storage can be opened."""
    try:
        open_storage(path, accept_copy=accept_copy).close()
    except (StorageError, OSError) as error:
        return error
    return None


def distinct(paths: Iterable[str]) -> list[str]:
    """Return the paths, without those that lead to the same place as an earlier path."""
    places: dict[str, str] = {}
    for path in paths:
        places.setdefault(os.path.realpath(path), path)
    return [*places.values()]
