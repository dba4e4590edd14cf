"""Zarr v3 format: one file per chunk of a column, in a directory that is a Zarr group.

::

    DIR/zarr.json                       the root group: schema, provenance, rows
    DIR/next/zarr.json                  the group ("next",)
    DIR/next/reward/zarr.json           the column ("next", "reward"): shape, chunks
    DIR/next/reward/c.0, c.1, ...       its chunks, row after row
    DIR/observation/c.0.0, c.1.0, ...   chunks of a column whose rows have one dimension
    DIR/tallyroll/                      a Zarr array of bytes, whose one chunk is the header
    DIR/tallyroll/c.0                   the header: the number of committed rows, and the record
    DIR/tallyroll/manifest.json         the manifest; written last when a storage is created
    DIR/tallyroll/lock                  the lock of the writer
    DIR/tallyroll/episodes.npy          the episode table
    DIR/tallyroll/content.leaves        content hashes, if they are kept
    DIR/tallyroll/observation.frames    the frames of ("observation",), if they are stored once

Chunks are uncompressed and never sparse. Zarr requires a complete last chunk too: its bytes after
the last row are not visible.

Frames that are stored once are in a separate file, because lanes fill its segments in any order,
while chunks follow the rows. To other libraries, their columns are arrays of positions.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, TypeAlias
from urllib.parse import quote

import numpy as np

from tallyroll.storage.errors import (
    CorruptStorage,
    InvalidSchema,
    NotAStorage,
    StorageFull,
    UnsupportedPlatform,
)
from tallyroll.storage.files.commit_header import HEADER_NBYTES
from tallyroll.storage.files.format_versions import refuse_newer_provenance
from tallyroll.storage.files.manifest import Manifest, attributes_of
from tallyroll.storage.files.mapping import PAGE_NBYTES, Access, Area, Region, maps_left
from tallyroll.storage.files.paths import failed, open_column, translates_errors
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside, closing
from tallyroll.storage.formats.base import BESIDE, EVENTS_FILE
from tallyroll.storage.formats.directory import DirectoryFormat
from tallyroll.storage.formats.metadata_checks import wrong_documents
from tallyroll.storage.formats.space import Footprint
from tallyroll.storage.formats.zarr.chunks import ChunkedColumn
from tallyroll.storage.formats.zarr.metadata import (
    CHUNK_NAME,
    chunk_rows_of,
    documents,
    header_document,
    require_names,
)
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Column, Schema

_Attributes: TypeAlias = dict[PurePosixPath, Mapping[str, Any]]
"""Attributes by the place of an array or a group."""

_OURS, _META = "tallyroll", "zarr.json"
_ROOT = PurePosixPath()
_WHOLE = "|".join(map(re.escape, ("manifest.json", *BESIDE, EVENTS_FILE)))
_FILES = re.compile(
    rf"(?:.*/)?zarr\.json(?:\.tmp)?|.+/{CHUNK_NAME}"
    rf"|{_OURS}/(?:lock|[^/]+\.frames|(?:{_WHOLE})(?:\.tmp)?)"
)
# Files that our own writer, zarr-python and TensorStore leave behind when they are killed.
_LEFT_BEHIND = re.compile(
    rf"(?:zarr\.json|{_WHOLE})\.tmp"
    rf"|(?:zarr|c[.0-9]*)\.[0-9a-f]{{32}}\.partial|(?:zarr\.json|{CHUNK_NAME})\.__lock"
)
_FEW_MAPS = 1000
_OTHER_FILES = 16
_LARGEST_CHUNK = 2**31
_PROVENANCE_NBYTES = JSON_LIMIT // 4


class ZarrFormat(DirectoryFormat):
    """The files of a `ZarrStorage`."""

    name: ClassVar[str] = "tallyroll.zarr"
    pools: ClassVar[bool] = True
    most_dims: ClassVar[int] = 32  # the limit of TensorStore
    lacks_bfloat16: ClassVar[str] = "Zarr"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        ours = path / _OURS
        self.lock_path, self.header_path = ours / "lock", ours / "c.0"
        self.manifest_path = ours / "manifest.json"
        self.beside = tuple(ours / name for name in BESIDE)
        self.events_path = ours / EVENTS_FILE
        self._header_meta = ours / _META
        self._manifest: Manifest | None = None
        self._chunk_rows: tuple[int, ...] = ()
        self._shown = 0
        self._header_meta_stands = True
        self._attributes: _Attributes = {}
        self._columns: list[ChunkedColumn] = []
        self._mapping = threading.Lock()

    def _owns(self, name: Path) -> bool:
        return _FILES.fullmatch(name.as_posix()) is not None

    def read_manifest(self) -> Manifest:
        """Return the manifest, which has the rows per chunk. Call this before `open`."""
        try:
            manifest = super().read_manifest()
        except NotAStorage:
            refuse_newer_group(self.path)
            raise
        if manifest["format"] == self.name:
            self._chunk_rows = _chunk_rows_in(manifest, self.manifest_path)
            self._manifest = manifest
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, and show its runs to other libraries."""
        manifest = manifest | {"chunk_rows": list(self._chunk_rows)}
        super().write_manifest(manifest)
        before, self._manifest = self._manifest, manifest
        if before is None or attributes_of(before) != attributes_of(manifest):
            self.publish(self._shown)

    def check(self, schema: Schema) -> None:
        """Raise for names and dtypes that Zarr does not support, and for chunks over 2 GiB."""
        super().check(schema)
        require_names(schema)
        for column, rows in zip(schema.columns, _chunks(schema, 0), strict=True):
            _require_mappable(column, rows)

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Return the space of ``rows`` rows: whole chunks, each mapped for writing and views."""
        chunk_rows = self._chunk_rows or _chunks(schema, rows)
        pairs = list(zip(schema.columns, chunk_rows, strict=True))
        chunks = [-(-rows // count) for _, count in pairs]
        sizes = [count * column.row_nbytes for column, count in pairs]
        return Footprint(
            nbytes=HEADER_NBYTES + sum(n * size for n, size in zip(chunks, sizes, strict=True)),
            files=sum(chunks) + 2 * len(pairs) + _OTHER_FILES,
            largest=max(sizes),
            maps=2 * sum(chunks) + 1,
        )

    def _make_columns(self, capacity: int) -> None:
        self._chunk_rows = _chunks(self.schema, capacity)
        self._header_meta_stands = False
        for column in self.schema.columns:
            self.inside.make_directory(self.path.joinpath(*column.key))

    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the columns' directories."""
        self.schema = schema
        if len(self._chunk_rows) != len(schema.columns):
            raise CorruptStorage(
                f"{self.manifest_path} has chunks of {len(self._chunk_rows)} columns, but a schema "
                f"of {len(schema.columns)}: the file is damaged. Restore it from a copy."
            )
        columns: list[ChunkedColumn] = []
        self.inside.hold()
        with contextlib.ExitStack() as undo:
            undo.callback(self.inside.release)
            for column, rows in zip(schema.columns, self._chunk_rows, strict=True):
                _require_pages(self.path, column, rows)
                place = self.path.joinpath(*column.key)
                os.close(open_column(self.inside, place, os.O_DIRECTORY))
                columns.append(ChunkedColumn(self.inside, place, column, rows))
            self._columns = columns
            if writable:
                self._open_metadata()
            undo.pop_all()

    def _open_metadata(self) -> None:
        self._sweep()
        self._attributes = self._read_attributes()
        # The visible row count does not change when a run is added, until the next refresh.
        shown = self._attributes.get(_ROOT, {}).get("rows")
        self._shown = shown if type(shown) is int and shown >= 0 else 0
        self._header_meta_stands = not any(self._header_shown_wrongly())

    def _sweep(self) -> None:
        for place in {file.parent for file in self.replaced_files()}:
            with (
                contextlib.suppress(OSError),
                closing(self.inside.open_directory(place)) as directory,
            ):
                for name in filter(_LEFT_BEHIND.fullmatch, os.listdir(directory)):
                    with contextlib.suppress(OSError):  # a directory is not ours
                        os.unlink(name, dir_fd=directory)

    def _read_attributes(self) -> _Attributes:
        """Return the attributes of arrays and groups, which other programs may have extended."""
        found: _Attributes = {}
        for place in documents(self.schema, self._chunk_rows, 0, {}):
            with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
                document = self.inside.read_json(self.path / place / _META)
                found[place] = dict(document["attributes"])
        return found

    def _pool_path(self, key: Key) -> Path:
        parts = (quote(part, safe="").replace(".", "%2E") for part in key)
        return self.manifest_path.with_name(".".join([*parts, "frames"]))

    @translates_errors
    def grow(self, rows: int) -> None:
        """Create whole chunk files. Sparse files would cause SIGBUS on a full disk."""
        before = [column.count for column in self._columns]
        more = [max(0, c.count_for(rows) - c.count) for c in self._columns]
        # Views map the chunks a second time.
        self._require_maps(2 * sum(more), StorageFull)
        try:
            for column in self._columns:
                column.make(column.count_for(rows))
        except OSError as error:
            for column, count in zip(self._columns, before, strict=True):
                column.remove(count, column.count)
            sizes = [column.chunk_nbytes for column in self._columns]
            nbytes = sum(count * size for count, size in zip(more, sizes, strict=True))
            raise failed(self.path, error, nbytes) from error

    def _require_maps(self, count: int, error: type[StorageFull | UnsupportedPlatform]) -> None:
        if count > _FEW_MAPS and count > (left := maps_left()):
            raise error(
                f"{self.path} needs maps of {count} more chunk files, but this process may make "
                f"only {left} more (vm.max_map_count). Committed rows are intact. Raise that "
                "limit, or create a storage with capacity=..., which makes fewer and larger chunks."
            )

    @translates_errors
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Map the chunks that hold ``rows`` rows; for writing, map all existing chunks."""
        with self._mapping:  # several threads may read
            for column in self._columns:
                column.require(column.count_for(rows))
            # Readers do not map chunks without rows, because the writer may replace those chunks.
            counts = [c.count if access == "write" else c.count_for(rows) for c in self._columns]
            pairs = list(zip(self._columns, counts, strict=True))
            self._require_maps(sum(c.to_map(n, access) for c, n in pairs), UnsupportedPlatform)
            room = _room(pairs)
            return [column.array(count, room, access) for column, count in pairs]

    def private(self, rows: int, before: Area | None = None) -> Area:
        """Map the chunks of each column after those of the previous one, with space for more."""
        with self._mapping:
            for column in self._columns:
                column.require(column.count_for(rows))
            pairs = [(column, column.count_for(rows)) for column in self._columns]
            sizes = [count * column.chunk_nbytes for column, count in pairs]
            if before is None or not _fit(sizes, before):
                self._require_maps(sum(count for _, count in pairs), UnsupportedPlatform)
                before = _reserved(sizes)
            for (column, count), start in zip(pairs, before.starts, strict=True):
                column.map_into(before.region, start, column.count_for(before.room), count)
            return replace(before, room=_room(pairs))

    @translates_errors
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write rows through the files. The maps show them at once."""
        self._columns[column].write(row, rows)

    def publish(self, rows: int) -> None:
        """Write Zarr's metadata for ``rows`` rows: arrays, then groups, the root last."""
        root = dict(self._attributes.get(_ROOT, {}))
        if self._manifest is not None:
            root |= attributes_of(self._manifest, _PROVENANCE_NBYTES)
        if not self._header_meta_stands:
            self._show(self._header_document)
            self._header_meta_stands = True
        self._show(self._documents(rows, self._attributes | {_ROOT: root | {"rows": rows}}))
        self._shown = rows

    def _documents(self, rows: int, attributes: _Attributes | None = None) -> dict[Path, Any]:
        shown = documents(self.schema, self._chunk_rows, rows, attributes or {})
        return {self.path / place / _META: document for place, document in shown.items()}

    @property
    def _header_document(self) -> dict[Path, Any]:
        return {self._header_meta: header_document(HEADER_NBYTES)}

    def replaced_files(self) -> set[Path]:
        """Return the files of the base class and the metadata of the header."""
        return super().replaced_files() | {self._header_meta}

    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Compare Zarr's metadata with the expected content."""
        yield from super().shown_wrongly(head)
        yield from self._header_shown_wrongly()

    def _header_shown_wrongly(self) -> Iterator[str]:
        return wrong_documents(self.inside, lambda _: self._header_document, lambda: HEADER_NBYTES)

    @translates_errors
    def trim(self, rows: int, kept: int) -> None:
        """Remove chunks without rows, including those of a killed writer."""
        for column in self._columns:
            column.trim(max(rows, kept))

    @translates_errors
    def sync(self, start: int = 0) -> None:
        """Wait until the rows from ``start`` on are on the disk; the first call syncs all rows."""
        for column in self._columns:
            column.sync(start)

    def close(self) -> None:
        """Close the files."""
        columns, self._columns = self._columns, []
        with contextlib.ExitStack() as exits:
            exits.callback(self.inside.release)
            for column in columns:
                exits.callback(column.close)


def _room(counts: Iterable[tuple[ChunkedColumn, int]]) -> int:
    """Return the number of rows that fit into the given number of chunks of every column."""
    return min(count * column.chunk_rows for column, count in counts)


def _reserved(sizes: Sequence[int]) -> Area:
    # Twice as much, so that a growing storage is rarely mapped again.
    try:
        return _spread([2 * size for size in sizes])
    except OSError:
        return _spread(sizes)


def _spread(sizes: Sequence[int]) -> Area:
    """Return an area without rows, for columns of these sizes."""
    starts = tuple(accumulate(sizes, initial=0))
    return Area(Region(starts[-1], "private"), starts[:-1], 0)


def _fit(sizes: Sequence[int], area: Area) -> bool:
    """Return True if columns of these sizes fit into an area."""
    ends = (*area.starts[1:], area.region.nbytes)
    places = zip(sizes, area.starts, ends, strict=True)
    return all(start + size <= end for size, start, end in places)


def refuse_newer_group(path: Path) -> None:
    """Raise `FormatVersionMismatch` for a Zarr group that a later version of Tallyroll wrote."""
    with contextlib.suppress(OSError, ValueError, RecursionError, TypeError, KeyError):
        provenance = Inside(path).read_json(path / _META)["attributes"]["provenance"]
        refuse_newer_provenance(provenance, path)


def _chunks(schema: Schema, capacity: int) -> tuple[int, ...]:
    return tuple(chunk_rows_of(column, capacity) for column in schema.columns)


def _chunk_rows_in(manifest: Manifest, path: Path) -> tuple[int, ...]:
    found = manifest.get("chunk_rows")
    if not isinstance(found, Sequence) or not all(type(n) is int and n > 0 for n in found):
        raise CorruptStorage(
            f"{path}: expected the rows per chunk of each column, got {found!r:.80}. The file is "
            "damaged. Restore it from a copy."
        )
    return tuple(found)


def _require_mappable(column: Column, rows: int) -> None:
    if (nbytes := rows * column.row_nbytes) > _LARGEST_CHUNK:
        raise InvalidSchema(
            f"column {format_key(column.key)} has {column.row_nbytes} bytes per row, so a chunk of "
            f"whole pages would have {nbytes} bytes, more than the maximum of {_LARGEST_CHUNK}. "
            "Pad its rows to a multiple of 64 bytes, or use MemmapStorage."
        )


def _require_pages(path: Path, column: Column, rows: int) -> None:
    nbytes = rows * column.row_nbytes
    if nbytes > _LARGEST_CHUNK:
        raise CorruptStorage(
            f"chunks of column {format_key(column.key)} in {path} would have {nbytes} bytes, more "
            f"than the maximum of {_LARGEST_CHUNK}: the manifest is damaged. Restore it from a "
            "copy."
        )
    if nbytes % PAGE_NBYTES:
        raise UnsupportedPlatform(
            f"chunks of column {format_key(column.key)} in {path} have {nbytes} bytes, which is "
            f"not a multiple of the page size of this machine, {PAGE_NBYTES} bytes. On this "
            "machine, read the storage with zarr-python."
        )
