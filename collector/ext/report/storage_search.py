"""Find the storages at given paths and in given folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from tallyroll.storage.errors import NotAStorage, StorageError, StorageMissing
from tallyroll.storage.ext.joined.members import expand_paths
from tallyroll.storage.files.paths import is_pattern
from tallyroll.storage.formats.by_name import SUFFIXES
from tallyroll.storage.storages import open_storage

_DEEPEST = 8


def storages_at(
    path: str, accept_copy: bool = False
) -> Iterator[tuple[str, StorageError | OSError | None]]:
    """Yield each storage at ``path`` or below it, with the error if it cannot be opened.

    A folder that is not a storage is searched. Files in the folder count if they have the suffix of
    a storage file. For a pattern, each match is searched, and other files are ignored.
    """
    if is_pattern(path):
        try:
            among = [*map(str, expand_paths(path))]
        except StorageError as error:
            yield path, error
            return
        refused: StorageError | OSError | None = StorageMissing(
            f"{path} matches no storage. Check the pattern."
        )
    else:
        refused = _refusal(path, accept_copy)
        if not isinstance(refused, NotAStorage) or not os.path.isdir(path):
            yield path, refused
            return
        among = [path]
    found = [*_among(among, _DEEPEST + 1, set(), accept_copy)]
    yield from found or [(path, refused)]


def _among(
    paths: Iterable[str], depth: int, seen: set[str], accept_copy: bool
) -> Iterator[tuple[str, StorageError | OSError | None]]:
    """Yield the storages at paths and in folders; ``seen`` has the folders searched before."""
    for path in paths:
        refused = _refusal(path, accept_copy)
        if not isinstance(refused, NotAStorage | StorageMissing):
            yield path, refused
        elif os.path.isdir(path) and depth and (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            try:
                inner = [os.path.join(path, name) for name in sorted(os.listdir(path))]
            except OSError as error:
                yield path, error
                continue
            some = [each for each in inner if os.path.isdir(each) or _is_hdf5(each)]
            yield from _among(some, depth - 1, seen, accept_copy)


def _is_hdf5(path: str) -> bool:
    return SUFFIXES.get(Path(path).suffix.lower()) == "hdf5"


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
