"""A copy of a damaged storage to work on, where a disk cannot read parts of it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import CorruptStorage, InvalidSchema, NotAStorage, StorageFull
from tallyroll.storage.ext.soundness.disk import Ranges, files_of, opened_in, read_at
from tallyroll.storage.ext.soundness.superblock import end_said
from tallyroll.storage.files.commit_header import committed_counts
from tallyroll.storage.files.paths import free_bytes
from tallyroll.storage.formats.zarr.format import ZarrFormat
from tallyroll.storage.formats.zarr.metadata import chunk_name
from tallyroll.storage.rows.schema import Schema

_STEP: Final = 2**20
_MOST_CHUNKS: Final = 2**18
"""Chunks of a column that are looked at: a damaged header may say that there are any number."""


def missing_in(place: Path) -> dict[Path, Ranges]:
    """Return the bytes that files of rows lack, by their paths below a storage in HDF5 or Zarr."""
    if place.is_file():
        with open(opened_in(place, Path(place.name)), "rb") as raw:
            size, end = os.fstat(raw.fileno()).st_size, end_said(raw) or 0
        return {Path(place.name): [(size, end)]} if size < end else {}
    found = dict[Path, Ranges]()
    for path, wanted in _chunks_of(place):
        try:
            there = os.lstat(place / path)
            size = there.st_size if stat.S_ISREG(there.st_mode) else 0
        except FileNotFoundError:
            size = 0
        if size < wanted:
            found[path] = [(size, wanted)]
    return found


def _chunks_of(place: Path) -> Iterator[tuple[Path, int]]:
    """Yield the chunks of a storage in Zarr that have committed rows, with their bytes."""
    files = ZarrFormat(place)
    try:
        manifest = files.read_manifest()
        schema, sizes = Schema.from_json(manifest["schema"]), manifest.get("chunk_rows", [])
        _, rows = committed_counts(files.inside.read(files.header_path, 2**25))
    except (OSError, CorruptStorage, NotAStorage, InvalidSchema):
        return  # which opening it will say
    if manifest["format"] == files.name and len(sizes) == len(schema.columns):
        for column, size in zip(schema.columns, sizes, strict=True):
            for number in range(min(_MOST_CHUNKS, -(-rows // size))):
                name = chunk_name(column, number)
                yield Path(*column.key, name), size * column.row_nbytes


def joined(one: Mapping[Path, Ranges], other: Mapping[Path, Ranges]) -> dict[Path, Ranges]:
    """Return the ranges of both."""
    return {path: sorted([*one.get(path, []), *other.get(path, [])]) for path in {*one, *other}}


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
        unreadable: ranges of files, also beyond their ends, that get the byte ``filled``.
        filled: one byte.
        lengths: bytes that files are to have, with zeros at their ends.

    Raises:
        OSError: the disk is full.
        StorageFull: it would be.
    """
    lengths = lengths or {}
    more = sum(b - a for ranges in unreadable.values() for a, b in ranges)
    if more > free_bytes(target):
        raise StorageFull(
            f"{place} lacks {more:,} bytes, and {target.parent} has no room for a copy with them. "
            "Nothing was written."
        )
    files = [*files_of(place)]
    for path in dict.fromkeys([*files, *unreadable]):
        original, copy = (place / path, target / path) if place.is_dir() else (place, target)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path not in files:  # a file that is missing, or a link
            with copy.open("xb") as out:
                _write(out, None, unreadable[path], filled)
            continue
        with open(opened_in(place, path), "rb", buffering=0) as source:
            size = os.fstat(source.fileno()).st_size
            alike = path not in unreadable and lengths.get(path, 0) <= size
            if alike and _linked(original, copy):
                continue
            with copy.open("xb") as out:
                _write(out, source.fileno(), unreadable.get(path, []), filled)
                out.truncate(max(out.tell(), lengths.get(path, 0)))
            shutil.copystat(original, copy)


def _write(out: Any, source: int | None, ranges: Ranges, filled: bytes) -> None:
    """Write the bytes of a file, with others in some ranges."""
    at, size = 0, 0 if source is None else os.fstat(source).st_size
    for start, stop in (*ranges, (size, size)):
        for begin in range(at, min(start, size), _STEP):
            assert source is not None
            out.write(read_at(source, min(_STEP, min(start, size) - begin), begin))
        for begin in range(start, stop, _STEP):
            out.write(filled * min(_STEP, stop - begin))
        at = max(at, stop)


def _linked(source: Path, copy: Path) -> bool:
    """Give a file another name; return False where the file system cannot."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True
