"""A new HDF5 file takes the place of an old one, or of none: whole, or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tallyroll.storage.errors import ForeignContent, InvalidProvenance, StorageFull
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.files.header_words import moved_into
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import failed, free_bytes
from tallyroll.storage.files.safe_files import Inside, closing, open_file, write_all
from tallyroll.storage.formats.hdf5.datasets import (
    PROVENANCE_NBYTES,
    DatasetOffsets,
    FilePlaces,
    foreign_names,
    make_file,
    nbytes_of_file,
)
from tallyroll.storage.formats.hdf5.user_block import MANIFEST_LIMIT, write_manifest
from tallyroll.storage.rows.schema import Schema

_COPY_NBYTES = 2**24


def aside(path: Path) -> Path:
    """Return the path of a new file while it is made."""
    return path.with_name(path.name + ".tmp")


@contextlib.contextmanager
def new_file(
    path: Path, schema: Schema, capacity: int, like: int | None = None
) -> Iterator[tuple[int, FilePlaces]]:
    """Yield a new file for ``capacity`` rows, open; it takes the place of ``path`` at the end.

    It has the attributes that other programs gave to the file ``like``.

    Its user block is empty, its space is reserved.

    Raises:
        StorageFull, UnsupportedPlatform: no space, and nothing was changed.
    """
    nbytes = nbytes_of_file(schema, capacity)
    new, inside = aside(path), Inside(path.parent)
    try:
        _require_space(path, nbytes)
        # HDF5 says less clearly that a file may not be that large.
        with closing(inside.make(new)) as file:
            os.ftruncate(file, nbytes)
            os.ftruncate(file, 0)
            places = make_file(file, new, schema, capacity, like)
            # A sparse file would kill us when the disk is full.
            os.posix_fallocate(file, 0, os.fstat(file).st_size)
            places.show_rows(file, 0)
            # What it was found by is no text, and a power cut may leave it there.
            write_all(file, b" " * PROVENANCE_NBYTES, places.provenance.at)
            yield file, places
            os.fsync(file)
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
        source: the places of its rows.
        rows: the number of rows to copy into the new file.
        capacity: the number of rows that the new file has space for.

    Raises:
        ForeignContent: the file holds content of another program, which would be lost.
        StorageFull, UnsupportedPlatform: no space, and nothing was changed.
    """
    with closing(open_file(path, os.O_RDONLY)) as old:
        if foreign := foreign_names(old, path, schema):
            raise ForeignContent(
                f"{path} has to be replaced for {capacity} rows, and holds what is not a "
                f"storage's: {', '.join(foreign)}. Move that to another file first."
            )
        with new_file(path, schema, capacity, old) as (new, places):
            write_all(new, moved_into(new, os.pread(old, HEADER_NBYTES, 0)), 0)
            for column, start, to in zip(
                schema.columns, source.offsets, places.layout.offsets, strict=True
            ):
                _copy(old, start, new, to, rows * column.row_nbytes)
            put_manifest(new, manifest, places)
            places.show_rows(new, rows)


def put_manifest(
    file: int, manifest: Manifest, places: FilePlaces, *, durable: bool = False
) -> None:
    """Write the manifest into the user block, and the attribute ``provenance``.

    Raises:
        InvalidProvenance: it has more than `MANIFEST_LIMIT` bytes.
    """
    content = json.dumps(manifest | {"places": places.to_json()}).encode()
    if len(content) > MANIFEST_LIMIT:
        raise InvalidProvenance(
            f"the manifest of an HDF5 storage, with the provenance of all runs, may have "
            f"{MANIFEST_LIMIT} bytes and this one has {len(content)}. Give less provenance, or "
            "use another format."
        )
    places.show_manifest(file, manifest)
    write_manifest(file, content, durable=durable)  # last, for with it the storage is one


def _copy(source: int, start: int, target: int, to: int, nbytes: int) -> None:
    # Byte by byte: blocks shared by both files would need space when they are written to.
    while nbytes:
        part = os.pread(source, min(_COPY_NBYTES, nbytes), start)
        if not part:
            raise OSError(errno.EIO, "the file ends before its rows do")
        write_all(target, part, to)
        start, to, nbytes = start + len(part), to + len(part), nbytes - len(part)
