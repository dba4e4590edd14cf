"""A copy of a damaged storage to work on, where a disk cannot read parts of it."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from tallyroll.storage.verification.soundness.disk import Ranges, files_of, opened_in, read_at

_STEP: Final = 2**20


def working_copy(
    place: Path,
    target: Path,
    unreadable: Mapping[Path, Ranges],
    *,
    filled: bytes = b"\0",
    lengths: Mapping[Path, int] | None = None,
) -> None:
    """Make ``target`` have the files of ``place``; those that stay alike are links to their bytes.

    Args:
        place: a folder, or a file.
        target: where nothing is.
        unreadable: ranges of files that get the byte ``filled``.
        filled: one byte.
        lengths: bytes that files are to have, with zeros at their ends.

    Raises:
        OSError: the disk is full.
    """
    lengths = lengths or {}
    for path in files_of(place):
        copy = target / path if place.is_dir() else target
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(opened_in(place, path), "rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            alike = path not in unreadable and lengths.get(path, 0) <= size
            if alike and _linked(place / path if place.is_dir() else place, copy):
                continue
            with copy.open("xb") as out:
                at = 0
                for start, stop in (*unreadable.get(path, []), (size, size)):
                    for begin in range(at, start, _STEP):
                        out.write(read_at(source.fileno(), min(_STEP, start - begin), begin))
                    out.write(filled * (stop - start))
                    at = stop
                out.truncate(max(size, lengths.get(path, 0)))
            shutil.copystat(place / path if place.is_dir() else place, copy)


def _linked(source: Path, copy: Path) -> bool:
    """Give a file another name; return False where the file system cannot."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True
