"""A new HDF5 file takes the place of an old one, or of none: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tallyroll.storage.errors import ForeignContent, StorageFull
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.files.header_words import moved_into
from tallyroll.storage.files.manifest import Manifest, attributes_of
from tallyroll.storage.files.paths import failed, free_bytes
from tallyroll.storage.files.safe_files import Inside, write_all
from tallyroll.storage.formats.hdf5.datasets import (
    PROVENANCE_NBYTES,
    AttributePlace,
    DatasetOffsets,
    FilePlaces,
    foreign_names,
    make_file,
    nbytes_of_file,
)
from tallyroll.storage.formats.hdf5.user_block import require_size, write_manifest
from tallyroll.storage.rows.schema import Schema

__all__ = [
    "aside",
    "is_at",
    "new_file",
    "open_file",
    "opened",
    "read_rows",
    "rewrite",
    "show_manifest",
    "show_provenance",
    "show_rows",
    "shows_manifest",
]

_COPY_NBYTES = 2**24


def aside(path: Path) -> Path:
    """The path of a new file while it is made."""
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of a plain file at a path without links, closed at the end; raises OSError."""
    file = open_file(path, flags)
    try:
        yield file
    finally:
        os.close(file)


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a plain file at a path without links; raises OSError.

    The user named it, so that it may have other names besides.
    """
    # A pipe would keep us waiting.
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.ENXIO, "it is no file", str(path))
    except BaseException:
        os.close(file)
        raise
    return file


@contextlib.contextmanager
def new_file(path: Path, schema: Schema, capacity: int) -> Iterator[tuple[int, FilePlaces]]:
    """A new file for ``capacity`` rows, open; it takes the place of ``path`` at the end.

    Its user block is empty, its space is reserved.

    Raises:
        StorageFull, UnsupportedPlatform: no space, and nothing was changed.
    """
    nbytes = nbytes_of_file(schema, capacity)
    new, inside = aside(path), Inside(path.parent)
    try:
        _require_space(path, nbytes)
        # HDF5 says less clearly that a file may not be that large.
        file = inside.make(new)
        try:
            os.ftruncate(file, nbytes)
            os.ftruncate(file, 0)
            places = make_file(file, new, schema, capacity)
            # A sparse file would kill us when the disk is full.
            os.posix_fallocate(file, 0, os.fstat(file).st_size)
            show_rows(file, 0, places)
            # What it was found by is no text, and a power cut may leave it there.
            write_all(file, b" " * PROVENANCE_NBYTES, places.provenance.at)
            yield file, places
            os.fsync(file)
        finally:
            os.close(file)
        os.replace(new, path)
        inside.sync_directory(path.parent)
    except OSError as error:
        raise failed(path, error, nbytes) from error
    finally:
        inside.remove(new)


def _require_space(path: Path, nbytes: int) -> None:
    if nbytes > (free := free_bytes(path)):
        beside = f" beside the {path.stat().st_size} there" if path.exists() else ""
        raise StorageFull(
            f"{path} needs {nbytes} more bytes{beside}, and {free} are free. Committed rows are "
            "intact. Free space, or go on in another place."
        )


def rewrite(
    path: Path, schema: Schema, manifest: Manifest, source: DatasetOffsets, rows: int, capacity: int
) -> None:
    """Replace a storage's file by one for ``capacity`` rows, with its first ``rows`` rows.

    Args:
        path: the file.
        schema: its columns.
        manifest: its manifest.
        source: where its rows lie.
        rows: how many go into the new file.
        capacity: how many it is for.

    Raises:
        ForeignContent: the file holds what is not ours, and would not be in the new one.
        StorageFull, UnsupportedPlatform: no space, and nothing was changed.
    """
    with opened(path, os.O_RDONLY) as old:
        if foreign := foreign_names(old, path, schema):
            raise ForeignContent(
                f"{path} has to be written anew for {capacity} rows, and holds what is not a "
                f"storage's: {', '.join(foreign)}. Move that to another file first."
            )
        with new_file(path, schema, capacity) as (new, places):
            write_all(new, moved_into(new, os.pread(old, HEADER_NBYTES, 0)), 0)
            for column, start, to in zip(
                schema.columns, source.offsets, places.layout.offsets, strict=True
            ):
                _copy(old, start, new, to, rows * column.row_nbytes)
            show_manifest(new, manifest, places)
            show_rows(new, rows, places)


def show_manifest(
    file: int, manifest: Manifest, places: FilePlaces, *, durable: bool = False
) -> None:
    """Write the manifest into the user block, and the attribute ``provenance``."""
    content = json.dumps(manifest | {"places": places.to_json()}).encode()
    require_size(content)
    show_provenance(file, manifest, places)
    write_manifest(file, content, durable=durable)  # last, for with it the storage is one


def show_provenance(file: int, manifest: Manifest, places: FilePlaces) -> None:
    """Write the attribute ``provenance``."""
    write_all(file, _provenance(manifest), places.provenance.at)


def shows_manifest(file: int, manifest: Manifest, places: FilePlaces) -> bool:
    """Whether the attribute ``provenance`` is that of the manifest."""
    return os.pread(file, PROVENANCE_NBYTES, places.provenance.at) == _provenance(manifest)


def _provenance(manifest: Manifest) -> bytes:
    text = attributes_of(manifest, PROVENANCE_NBYTES)["provenance"].encode()
    return text[:PROVENANCE_NBYTES].ljust(PROVENANCE_NBYTES)


def show_rows(file: int, rows: int, places: FilePlaces) -> None:
    """Write the attribute ``rows``."""
    write_all(file, rows.to_bytes(8, "little"), places.rows.at)


def is_at(file: int, place: AttributePlace) -> bool:
    """Whether an attribute's value is where it was made: other programs may have moved it."""
    return os.pread(file, len(place.before), place.at - len(place.before)) == place.before


def read_rows(file: int, places: FilePlaces) -> int:
    """The value of the attribute ``rows``."""
    return int.from_bytes(os.pread(file, 8, places.rows.at), "little", signed=True)


def _copy(source: int, start: int, target: int, to: int, nbytes: int) -> None:
    # Byte by byte: blocks shared by both files would need space when they are written to.
    while nbytes:
        part = os.pread(source, min(_COPY_NBYTES, nbytes), start)
        if not part:
            raise OSError(errno.EIO, "the file ends before its rows do")
        write_all(target, part, to)
        start, to, nbytes = start + len(part), to + len(part), nbytes - len(part)
