"""The `pack` operation, which writes a packed storage atomically."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np

from tallyroll.storage.engine.available_memory import require_memory
from tallyroll.storage.errors import (
    CorruptStorage,
    PathIsTaken,
    StateMismatch,
    StorageFull,
)
from tallyroll.storage.ext.atomic_create import atomic_creation, require_free
from tallyroll.storage.ext.packed.archives import EPISODES, INDEX, MANIFEST, OURS, ZarrArchive
from tallyroll.storage.ext.packed.codecs import Codec
from tallyroll.storage.ext.packed.column_writers import (
    ColumnPlan,
    PackedWriter,
    planned,
)
from tallyroll.storage.ext.packed.documents import documents
from tallyroll.storage.ext.packed.front import room_for
from tallyroll.storage.ext.packed.layout import FORMAT, FORMAT_HDF5, ArrayLayout, Layout
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.packed.shards import ChunkWriter, ShardWriter
from tallyroll.storage.ext.storage_copy import may_be_overwritten, overlays_of, source_around
from tallyroll.storage.files.copied_runs import FIRST_ROW_OF_RUN, PACKED, Entry, source_of
from tallyroll.storage.files.manifest import Manifest, new_manifest, write_manifest
from tallyroll.storage.files.paths import free_bytes, translated, user_path
from tallyroll.storage.files.run_events import without_name
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.by_name import SUFFIXES
from tallyroll.storage.formats.zarr.metadata import require_names
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.frame_stacks import FrameStack, frames_declared
from tallyroll.storage.rows.keys import LANE, TERMINATED, TRAJ_IDS, Key, as_key, format_key
from tallyroll.storage.rows.pages import Page, PageSource
from tallyroll.storage.rows.progress import Progress
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.columns import WHOSE, missing, numbers_of
from tallyroll.storage.trajectories.content import expanded
from tallyroll.storage.trajectories.episode_file import write_table
from tallyroll.storage.trajectories.index import has_trajectories
from tallyroll.storage.trajectories.index_file import IndexOwner, write_index
from tallyroll.storage.user_code import user_callback

_NBYTES_OF_A_ROW = 56


def packed_order(reader: RowReader, span: range) -> np.ndarray:
    """Return the row numbers of ``span`` in packing order.

    Trajectories are in the order of their first rows. The rows of a run stay together, so a
    trajectory that continues in the next run has two parts. Rows without trajectory ids keep their
    order.

    Raises:
        NotEnoughMemory: there is not enough memory for the row numbers.
        Overrun: the writer of a ring overwrote rows in the meantime.
    """
    rows = np.arange(span.start, span.stop)
    if not len(rows) or not has_trajectories(reader.schema):
        return rows
    require_memory(len(rows) * _NBYTES_OF_A_ROW, f"the order of {len(rows):,} rows")
    ids, lane = (
        numbers_of(reader.column(key).slice(span.start, span.stop)) for key in (TRAJ_IDS, LANE)
    )
    if reader.ring:
        ids, lane = ids.copy(), lane.copy()
        if reader.span.start > span.start:
            raise reader.overrun(f"{len(rows):,}")
    at = np.argsort(lane, kind="stable")
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (np.diff(lane[at]) != 0) | (np.diff(ids[at]) != 0)
    firsts = np.array([run["first_row"] for run in reader.runs], np.int64) - span.start
    run = np.searchsorted(firsts, at, side="right")
    begins[1:] |= np.diff(run) != 0
    start = np.flatnonzero(begins)
    count = np.diff(start, append=len(rows))
    # Sort by first row. This orders the trajectories within a run, and keeps the runs in order.
    order = np.argsort(at[start], kind="stable")
    found: np.ndarray = rows[at[expanded(start[order], count[order])]]
    return found


def packed_runs(runs: Sequence[Mapping[str, Any]], *, counted: bool) -> list[Entry]:
    """Return the manifest entries of runs for their packed rows.

    ``counted`` is True if the record of a collector counts these rows. Otherwise the key that marks
    a collector's entry is removed, because a record must count the rows of every such entry.
    """
    if not counted:
        runs = [{name: run[name] for name in run if name != FIRST_ROW_OF_RUN} for run in runs]
    return [without_name(run) for run in runs]


Format = Literal["zarr", "hdf5"]

_LOOKS, _LOOK_ROWS, _LOOK_NBYTES = 6, 64, 2**24
_RING_NBYTES, _MOST_BLOCK_ROWS = 2**22, 2**14
_SPARE_NBYTES: Final = 2**22


@dataclass(frozen=True)
class PackReport(PageSource):
    """Result of packing a storage."""

    path: str
    rows: int
    nbytes: int
    """Disk space of the packed rows in bytes."""
    row_nbytes: int
    """Bytes per row before packing."""
    columns: dict[str, int]
    """Disk space in bytes of each array, by path."""
    once: tuple[str, ...]
    """Columns that share their states with their column in ``next``."""
    stacks: dict[str, int]
    """Columns that are stored as single frames, with the number of frames per stack."""
    overlays_left_out: tuple[str, ...] = ()
    """Overlays of the sources, as ``PATH: NAME``. Packed storages have no overlays."""

    def _show_on_(self, page: Page) -> None:
        show_pack(self, page)


def show_pack(report: PackReport, page: Page, seconds: float | None = None) -> None:
    """Write a report to a page; ``seconds`` is the duration of packing."""
    rows = max(1, report.rows)
    took = "" if seconds is None else f", {seconds:.1f} s"
    page.print(
        f"{report.path}: {report.rows:,} rows of {report.nbytes / rows:,.1f} bytes, which were "
        f"{report.row_nbytes:,} ({report.nbytes:,} bytes in all){took}"
    )
    if report.once:
        page.print(f"observations stored once: {', '.join(report.once)}")
    if report.stacks:
        found = ", ".join(f"{name} ({n})" for name, n in report.stacks.items())
        page.print(f"frames stored once: {found}")
    for each in report.overlays_left_out:
        page.print(f"not packed: overlay {each}")
    page.head("Bytes a row")
    for name, nbytes in sorted(report.columns.items(), key=lambda each: -each[1]):
        page.print(f"  {nbytes / rows:10,.2f}  {name}")


@user_callback("pack")
def pack(
    reader: RowReader,
    destination: str | os.PathLike[str],
    *,
    format: Format | None = None,
    codecs: Mapping[str | Key, str] | str | None = None,
    once: bool = True,
    stacks: Sequence[FrameStack] | None = None,
    progress: Progress | None = None,
) -> PackReport:
    """Pack the rows of a reader into a new storage at ``destination``; see `DiskStorage.pack`.

    Raises:
        OpenError: ``destination`` exists or cannot be written, or another process is packing to
            it.
        StorageFull: the disk has too little space, by an estimate or while packing.
        Overrun: the writer of a ring overwrote rows before they were packed.
        StateMismatch: rows were rewound while they were packed.
        MissingLibrary: a library is not installed.
        ValueError: an argument has an invalid value.
    """
    schema, span, place = reader.schema, reader.span, user_path(destination)
    format = _format_at(place, format)
    require_names(schema)
    codec = _codecs(schema, codecs, format)
    declared = None if stacks is None else frames_declared(schema, stacks)
    _require_outside(reader, place)
    require_free(place)
    rewinds = reader.rewinds
    order = packed_order(reader, span)
    looks = _looks(reader, order)
    plans = planned(schema, looks, once=once, stacks=declared if once or stacks else {})
    _require_room(place, plans, looks, codec, len(order))
    with atomic_creation(place) as target:
        room = _room_for(reader, order, codec)
        with (
            translated(place),
            contextlib.closing(
                _Hdf5Files(target, room) if format == "hdf5" else _ZarrFiles(target)
            ) as files,
        ):
            packing = PackedWriter(schema, plans, codec, files, span.start)
            try:
                _copy(reader, order, packing, progress)
                layout = packing.finish()
            finally:
                packing.abandon()
            if reader.rewinds != rewinds:
                raise StateMismatch(
                    f"{reader.path} was rewound while its rows were packed. Pack the storage again."
                )
            manifest = _manifest(reader, span, schema, layout, files.format)
            files.finish(layout, manifest)
            sizes = {"/".join(each.layout.path): each.nbytes for each in packing.writers}
    return PackReport(
        str(place),
        layout.rows,
        sum(sizes.values()),
        schema.row_nbytes,
        sizes,
        tuple(format_key(each.column.key) for each in plans if each.next is not None),
        {format_key(each.column.key): each.n for each in plans if each.n > 1},
        overlays_of(reader),
    )


def _format_at(place: Path, wanted: Format | None) -> Format:
    """Return the format to write; the default depends on the suffix of the path."""
    if wanted not in (None, *get_args(Format)):
        raise ValueError(f"format: expected 'zarr' or 'hdf5', got {wanted!r:.80}.")
    suffix = SUFFIXES.get(place.suffix.lower())
    if wanted is not None and suffix not in (None, wanted):
        raise ValueError(
            f"format: expected {suffix!r}, from the suffix of {place}, got {wanted!r}. Leave "
            "format out, or give another path."
        )
    return wanted or ("hdf5" if suffix == "hdf5" else "zarr")


def _codecs(
    schema: Schema, given: Mapping[str | Key, str] | str | None, format: str
) -> Callable[[Column], Codec]:
    """Return a function that maps columns to codecs; raise ValueError for an unknown codec."""
    if isinstance(given, str):
        every, given = Codec.of(given), {}
    else:
        every = None
    chosen = {as_key(key): Codec.of(text) for key, text in (given or {}).items()}
    if unknown := [format_key(key) for key in chosen if key not in schema.keys]:
        raise ValueError(
            f"codecs: expected some of {', '.join(map(format_key, schema.keys))}, got "
            f"{', '.join(unknown)}."
        )
    for each in (*chosen.values(), *([every] if every else [])):
        if (each.name == "gzip") != (format == "hdf5"):
            raise ValueError(
                "codec: expected gzip:1 to gzip:9 for HDF5, or zstd, shuffle or none for Zarr, got "
                f"{each}."
            )

    def codec(column: Column) -> Codec:
        if found := chosen.get(column.key, every):
            return found
        if format == "hdf5":
            return Codec.of("gzip")
        return Codec.of("zstd" if column.numpy_dtype.itemsize == 1 else "shuffle")

    return codec


def _require_outside(reader: RowReader, place: Path) -> None:
    """Raise `PathIsTaken` if the destination lies within a source."""
    if (source := source_around(reader, place)) is not None:
        raise PathIsTaken(
            f"{place} is inside {source}, the storage to pack, which must not change. Give a path "
            "outside it."
        )


def _looks(reader: RowReader, order: np.ndarray) -> list[Callable[[Key], np.ndarray]]:
    """Return samples of rows that are consecutive in packing order; columns are read on demand."""
    size = max(2, min(_LOOK_ROWS, _LOOK_NBYTES // reader.schema.row_nbytes))
    starts = np.unique(np.linspace(0, max(0, len(order) - size), _LOOKS).astype(np.int64))
    parts = [order[start : start + size] for start in starts.tolist()]
    return [lru_cache(2)(partial(_values, reader, rows)) for rows in parts if len(rows)]


def _values(reader: RowReader, rows: np.ndarray, key: Key) -> np.ndarray:
    return reader.column(key).take(rows)


def _require_room(
    place: Path,
    plans: Sequence[ColumnPlan],
    looks: Sequence[Callable[[Key], np.ndarray]],
    codec: Callable[[Column], Codec],
    rows: int,
) -> None:
    """Estimate the packed size from the samples, and refuse rows that will not fit.

    Raises:
        StorageFull: the rows will not fit.
    """
    nbytes, seen = 0, 0
    for look in looks:
        for plan in plans:
            values = look(plan.column.key)
            # Count one frame per stack, and no next states, which are stored with the states.
            part = max(1, plan.column.row_nbytes // values.itemsize // plan.n)
            one = np.ascontiguousarray(values.reshape(len(values), -1)[:, :part])
            used = codec(plan.column)
            nbytes += one.nbytes // 2 if used.name == "gzip" else len(used.encode(one))
        seen += len(look(plans[0].column.key))
    wanted = nbytes * rows // max(1, seen) + _SPARE_NBYTES
    if wanted > (free := free_bytes(place)):
        raise StorageFull(
            f"{place} has no room for {rows:,} packed rows: they need about {wanted:,} bytes, and "
            f"{free:,} are free. Nothing was written. Free space, or give another path."
        )


def _copy(
    reader: RowReader, order: np.ndarray, packing: PackedWriter, progress: Progress | None
) -> None:
    # Use small blocks for a ring, so that an overwrite is detected soon after it happens.
    few = max(1, min(_MOST_BLOCK_ROWS, _RING_NBYTES // reader.schema.row_nbytes))
    block = few if reader.ring else _MOST_BLOCK_ROWS
    read = partial(_read, reader, may_be_overwritten(reader), {})
    for start in range(0, len(order), block):
        rows = order[start : start + block]
        packing.append(rows, read)
        if reader.ring and int(rows.min()) < reader.span.start:
            raise reader.overrun(f"these {len(rows):,} rows")
        if progress is not None:
            progress(packing.rows, len(order))


def _read(
    reader: RowReader, copied: bool, room: dict[Key, np.ndarray], key: Key, rows: np.ndarray
) -> np.ndarray:
    """Return rows of a column: a copy if ``copied`` is True, otherwise possibly a view.

    Copies reuse the buffers in ``room``.
    """
    column, first = reader.column(key), int(rows[0])
    if not copied and int(rows[-1]) - first == len(rows) - 1 and (np.diff(rows) == 1).all():
        return column.slice(first, first + len(rows))
    out = room.get(key)
    if out is None or len(out) < len(rows):
        about = reader.schema.columns[reader.schema.keys.index(key)]
        out = room[key] = np.empty((len(rows), *about.shape), about.numpy_dtype)
    return column.take(rows, out=out[: len(rows)])


def _manifest(
    reader: RowReader, span: range, schema: Schema, layout: Layout, format: str
) -> Manifest:
    source = reader.manifest
    record, kept = reader.record, None
    if record is not None and record[0] == span.stop:
        with contextlib.suppress(UnicodeDecodeError):  # not written by a collector
            kept = record[1].decode()
    manifest = new_manifest(format, schema, packed_runs(source["runs"], counted=bool(kept)))
    known = {**source_of(source, [span.start, span.stop]), "format": source["format"]}
    manifest |= {"packed": layout.to_json(), PACKED: known}
    return manifest if kept is None else {**manifest, "record": kept}


def _room_for(reader: RowReader, order: np.ndarray, codec: Callable[[Column], Codec]) -> int:
    """Estimate the size in bytes of the metadata copy at the front of an HDF5 file."""
    schema = reader.schema
    layouts = [
        ArrayLayout.of(each.key, each.numpy_dtype, each.shape, len(order), codec(each))
        for each in schema.columns
    ]
    manifest = new_manifest(FORMAT_HDF5, schema, packed_runs(reader.manifest["runs"], counted=True))
    return room_for(manifest, layouts, len(order))


class _ZarrFiles:
    """Output directory of a Zarr group."""

    format, hdf5 = FORMAT, False

    def __init__(self, path: Path) -> None:
        self._path, self._inside = path, Inside(path)
        path.mkdir()

    def __call__(self, layout: ArrayLayout) -> ChunkWriter:
        return ShardWriter(self._inside, layout)

    def finish(self, layout: Layout, manifest: Manifest) -> None:
        """Write the remaining files, and flush all files to the disk."""
        path, inside = self._path, self._inside
        for place, document in documents(layout, manifest).items():
            inside.make_directory(path / place)
            with open(inside.make(path / place / "zarr.json"), "wb") as file:
                file.write(json.dumps(document).encode())
        write_manifest(inside, path / OURS / MANIFEST, manifest)
        with contextlib.closing(PackedReader(ZarrArchive(path))) as packed:
            self._write_tables(packed)
        # Sync all files at the end, which is far faster than syncing each one when written.
        for folder, _, names in os.walk(path):
            for name in names:
                inside.sync(Path(folder, name))
            inside.sync_directory(Path(folder))

    def _write_tables(self, packed: PackedReader) -> None:
        """Write the table of episodes and the index, if the rows have trajectory ids.

        Inconsistent ids are ignored here; `verify` reports them.
        """
        ours, index = self._path / OURS, packed.trajectory_index
        with contextlib.suppress(CorruptStorage):
            if not missing(packed.schema, (*WHOSE, TERMINATED)):
                write_table(self._inside, ours / EPISODES, index.table(packed))
            if not missing(packed.schema, WHOSE):
                rows = index.rows(packed)
                if rows.in_blocks and not packed.span.start:
                    owner = IndexOwner(packed.id, 0, 0)
                    write_index(self._inside, ours / INDEX, owner, rows.state(), synced=False)

    def close(self) -> None:
        """Do nothing: writers close their files."""


class _Hdf5Files:
    """Output HDF5 file."""

    format, hdf5 = FORMAT_HDF5, True

    def __init__(self, path: Path, room: int) -> None:
        from tallyroll.storage.ext.packed.hdf5 import new_file

        self._path, self._exits = path, contextlib.ExitStack()
        self._file, self._guard = self._exits.enter_context(new_file(path, room))

    def __call__(self, layout: ArrayLayout) -> ChunkWriter:
        from tallyroll.storage.ext.packed.hdf5 import DatasetWriter

        return DatasetWriter(self._file, self._guard, layout)

    def finish(self, layout: Layout, manifest: Manifest) -> None:
        """Write the manifest and the front, and flush the file to the disk."""
        from tallyroll.storage.ext.packed.hdf5 import finish_file, write_front

        content = finish_file(self._file, manifest, layout)
        self.close()
        write_front(self._path, content)

    def close(self) -> None:
        """Close the file, even if it is incomplete; raise OSError if a write failed."""
        self._exits.close()
