"""Writer of the parts of a split storage, all in one new folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tallyroll.storage.errors import StorageFull
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.storage_copy import CopyReport, copy
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import can_be_stored
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.user_code import user_callback

_SUFFIXES: Final = {"memmap": "", "hdf5": ".h5", "zarr": ".zarr"}


@user_callback("split")
def write_parts(
    parts: Mapping[str, RowReader],
    folder: str | os.PathLike[str],
    format: str = "memmap",
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> dict[str, CopyReport]:
    """Write each part as a storage, named like the part, in a folder that is created atomically.

    Args:
        parts: readers of the rows, by name.
        folder: the folder for the storages; it must not exist.
        format: the format of the storages: ``"memmap"``, ``"hdf5"`` or ``"zarr"``.
        dry_run: return the reports, and write nothing.
        progress: a callback that is called periodically with the number of bytes copied and the
            total number of bytes.

    Returns:
        A report for each part, with its path.

    Raises:
        StorageFull: the parts do not fit on the disk together.
        ValueError: a name is not a valid folder name, or the format is unknown.
        OpenError, Overrun, StateMismatch: as for `DiskStorage.copy_to`.
    """
    if format not in _SUFFIXES:
        raise ValueError(f"format: expected one of {', '.join(_SUFFIXES)}, got {format!r:.80}.")
    for name in parts:
        if not can_be_stored(name):
            raise ValueError(f"parts: expected a name that a folder can have, got {name!r:.80}.")
    place = user_path(folder)
    require_free(place)
    reports = {
        name: copy(reader, place / f"{name}{_SUFFIXES[format]}", format=format, dry_run=True)
        for name, reader in parts.items()
    }
    needed = sum(each.nbytes for each in reports.values())
    if needed > (free := min(each.free for each in reports.values())):
        raise StorageFull(
            f"{place} needs {needed} bytes for {len(parts)} parts, but only {free} bytes are "
            "free. Free disk space, or give another path."
        )
    if dry_run:
        return reports
    total = sum(each.rows * each.row_nbytes for each in reports.values())
    with atomic_creation(place) as target:
        done = 0
        target.mkdir()
        for name, reader in parts.items():

            def tell(nbytes: int, _: int, before: int = done) -> None:
                if progress is not None:
                    progress(before + nbytes, total)

            path = target / Path(reports[name].path).name
            copy(reader, path, format=format, progress=tell)
            done += reports[name].rows * reports[name].row_nbytes
    return reports
