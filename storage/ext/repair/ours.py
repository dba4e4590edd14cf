"""Repair of a storage of ours after a fault of the disk: the rows of which nothing says otherwise.

Blocks whose checksums differ are left out; without checksums, rows that contradict others.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from tallyroll.storage.errors import (
    CorruptStorage,
    InvalidDataset,
    InvalidSchema,
    NotAStorage,
    StorageFull,
)
from tallyroll.storage.ext.dataset_checks.disk import Ranges, files_of, opened_in, read_at
from tallyroll.storage.ext.dataset_checks.superblock import end_said
from tallyroll.storage.ext.exchange.base import Block, Incoming
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.readme import about_rows
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.repair.hdf5 import runs
from tallyroll.storage.ext.repair.losses import Losses
from tallyroll.storage.ext.repair.packed import (
    packed_reader,
    unreadable_rows,
)
from tallyroll.storage.ext.repair.rows_repair import RowsRepair
from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.ext.verification.record_checks import check_runs
from tallyroll.storage.ext.verification.row_checks import RowChecks
from tallyroll.storage.ext.verification.storage_checks import SlotColumn
from tallyroll.storage.files.checksums import mismatches
from tallyroll.storage.files.commit_header import committed_counts
from tallyroll.storage.files.paths import free_bytes
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.memmap import place_of
from tallyroll.storage.formats.zarr.format import ZarrFormat
from tallyroll.storage.formats.zarr.metadata import chunk_name
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import STEP, TRAJ_IDS, Key, format_key
from tallyroll.storage.rows.row_words import words
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.storages import open_storage
from tallyroll.storage.trajectories.columns import WHOSE, missing

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


_TRUSTED: Final = ("zeros", "ids", "steps", "lanes", "ends", "observations")
"""Checks whose rows are left out where there are no checksums."""
_MANIFEST: Final = "manifest.json"


class OurRepair(RowsRepair):
    """Reads rows that are as they were written; those after a gap are a trajectory of their own.

    Args:
        losses: gets what is not read.
        aside: an empty folder, for copies of what is damaged.
        unreadable: ranges of files that the disk cannot read.
    """

    name: ClassVar[str] = "tallyroll"

    def __init__(self, losses: Losses, aside: Path, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__(losses, unreadable)
        self._aside = aside

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the storage, or copies that can be opened."""
        with contextlib.ExitStack() as stack:
            try:
                yield self._rows(place, stack).incoming()
            except (InvalidDataset, CorruptStorage, NotAStorage) as error:
                raise InvalidDataset(f"{place} cannot be repaired: {error!s:.400}") from error

    def _rows(self, place: Path, stack: contextlib.ExitStack) -> _RepairedRows:
        folder = self.folder(place if place.is_dir() else place.parent)
        if (packed := packed_reader(place, folder)) is not None:
            stack.enter_context(contextlib.closing(packed))
            return _RepairedRows(packed, self._losses)
        if gaps := joined(self._unreadable, missing_in(place)):
            readers = []
            for name, filled in (("zeros", b"\0"), ("ones", b"\xff")):
                copy = self._aside / f"{name}{place.suffix}"
                working_copy(place, copy, gaps, filled=filled)
                readers.append(_opened(copy, stack))
            return _RepairedRows(readers[0], self._losses, twin=readers[1])
        try:
            return _RepairedRows(_opened(place, stack), self._losses)
        except CorruptStorage as error:
            lengths, short = _lengths(place, error)
            working_copy(place, self._aside / "rows", {}, lengths=lengths)
            return _RepairedRows(_opened(self._aside / "rows", stack), self._losses, short)


def _opened(place: Path, stack: contextlib.ExitStack) -> RowReader:
    return stack.enter_context(open_storage(place, accept_copy=True)).reader


def _lengths(place: Path, error: CorruptStorage) -> tuple[dict[Path, int], dict[str, int]]:
    """Return the bytes that files of columns are to have, and the rows of those that are short.

    Raises:
        CorruptStorage: none is: ``error`` is of something else.
    """
    try:
        said = json.loads(Inside(place).read(place / _MANIFEST, 2**25))["schema"]
        sizes = {
            each.key: (os.stat(place / place_of(each.key, leaf=True)).st_size, each.row_nbytes)
            for each in Schema.from_json(said).columns
        }
    except (OSError, ValueError, KeyError, TypeError, InvalidSchema) as why:
        raise error from why
    most = max((size // row for size, row in sizes.values()), default=0)
    short = {format_key(k): size // row for k, (size, row) in sizes.items() if size // row < most}
    if not short:
        raise error
    return {place_of(key, leaf=True): most * row for key, (_, row) in sizes.items()}, short


class _RepairedRows:
    """Rows of a reader, and which of them are as they were written.

    Args:
        reader: of the rows.
        losses: gets those that are not.
        short: how many rows the columns have whose files are too short.
        twin: a reader of the same rows, but for the bytes that a disk could not read.
    """

    def __init__(
        self,
        reader: RowReader,
        losses: Losses,
        short: Mapping[str, int] | None = None,
        twin: RowReader | None = None,
    ) -> None:
        self._reader, self._losses, self._short = reader, losses, short or {}
        self._twin = twin
        self._unread = dict[Key, np.ndarray]()
        """The rows [n] of each column that the disk could not read."""
        self._span = reader.span
        self._numbered = not missing(reader.schema, WHOSE)

    def incoming(self) -> Incoming:
        good = self._good()
        if len(good) and not good.any():
            raise InvalidDataset("no row can be read.")
        schema = self._reader.schema
        rows = np.flatnonzero(good) + self._span.start
        fresh = self._renumbered(good) if self._numbered else {}
        size = max(1, BLOCK_NBYTES // max(1, schema.row_nbytes))

        def blocks() -> Iterator[Block]:
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                block = dict(zip(schema.keys, self._reader.copies(part), strict=True))
                for key, values in fresh.items():
                    new = values[part - self._span.start].astype(block[key].dtype)
                    block[key] = new.reshape(block[key].shape)
                yield block

        return Incoming(schema, len(rows), blocks(), about_rows(self._reader, schema), "tallyroll")

    def _good(self) -> np.ndarray:
        """Return which rows [n] are as they were written, as far as is known."""
        good = np.ones(len(self._span), bool)
        for column, rows in self._short.items():
            lost = good.copy()
            lost[: max(0, rows - self._span.start)] = False
            self._lose(good, lost, "rows beyond the end of a file that is too short", column)
        if isinstance(self._reader, PackedReader):
            for key, wrong in unreadable_rows(self._reader):
                self._lose(good, wrong, "rows of a chunk that cannot be read", format_key(key))
            return good
        if self._twin is not None:
            self._by_twin(good, self._twin)
        sums = self._sums()
        if sums is not None:
            self._by_checksums(good, sums)
        elif self._twin is None:  # a row beside one that is lost would contradict it
            self._by_checks(good)
        return good

    def _by_twin(self, good: np.ndarray, twin: RowReader) -> None:
        """Leave out rows that differ where the bytes do which the disk could not read."""
        schema = self._reader.schema
        size = max(1, BLOCK_NBYTES // max(1, schema.row_nbytes))
        self._unread = wrong = {key: np.zeros(len(good), bool) for key in schema.keys}
        for start in range(0, len(good), size):
            part = np.arange(start, min(start + size, len(good)))
            both = [each.copies(part + self._span.start) for each in (self._reader, twin)]
            for key, one, other in zip(schema.keys, *both, strict=True):
                wrong[key][part] = (words(one) != words(other)).any(1)
        for key, rows in wrong.items():
            self._lose(good, rows, "rows with bytes that cannot be read", format_key(key))

    def _lose(
        self, good: np.ndarray, wrong: np.ndarray, message: str, column: str | None = None
    ) -> None:
        """Leave rows [n] out, and list those that were good until now."""
        for start, stop in runs(wrong & good):
            row = start + self._span.start
            self._losses.add(message, stop - start, row=row, column=column)
        good &= ~wrong

    def _sums(self) -> Any:
        done = self._reader.manifest.get("finalized")
        return done.get("checksums") if isinstance(done, dict) else None

    def _by_checksums(self, good: np.ndarray, sums: Any) -> None:
        reader = self._reader
        columns = {key: SlotColumn(reader, key) for key in reader.keys}
        try:
            for each in mismatches(columns, sums):
                wrong = np.zeros(len(good), bool)
                rows = reader.rows_in(np.arange(each.start, each.stop)) - self._span.start
                wrong[rows[(rows >= 0) & (rows < len(wrong))]] = True
                if each.key in self._unread and self._unread[each.key][wrong].any():
                    continue  # the others of its rows were read without an error
                message = "a block of rows whose checksum differs"
                self._lose(good, wrong, message, format_key(each.key))
        except CorruptStorage as error:
            self._losses.add("checksums cannot be used", 0, what=f"{error!s:.200}")
            self._by_checks(good)

    def _by_checks(self, good: np.ndarray) -> None:
        reader = self._reader
        gathered = _TrustedRows()
        entries = check_runs(reader.manifest["runs"], reader.head, Findings())
        RowChecks(reader, entries, nan=False, gather=_TrustedRows).run(
            gathered, lambda nbytes: None
        )
        for check, message, rows in gathered.rows:
            at = rows - self._span.start
            wrong = np.zeros(len(good), bool)
            wrong[at[(at >= 0) & (at < len(wrong))]] = True
            if check == "observations" and self._numbered:
                wrong |= self._before(wrong)
            self._lose(good, wrong, f"rows that contradict others: {message}")

    def _order(self, good: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the rows [n] that are good by trajectory and step, and both of them."""
        at = np.flatnonzero(good)
        found = self._reader.copies(at + self._span.start, [TRAJ_IDS, STEP])
        ids, steps = (each.reshape(len(at)) for each in found)
        order = np.lexsort((steps, ids))
        return at[order], ids[order], steps[order]

    def _before(self, wrong: np.ndarray) -> np.ndarray:
        """Return the rows that come before others in their trajectories: either may be wrong."""
        order, ids, _ = self._order(np.ones(len(wrong), bool))
        before = np.zeros(len(wrong), bool)
        same = ids[1:] == ids[:-1]
        before[order[:-1][same & wrong[order[1:]]]] = True
        return before

    def _renumbered(self, good: np.ndarray) -> dict[Key, np.ndarray]:
        """Return ids and steps [n] by which rows after a gap are a trajectory of their own."""
        order, ids, steps = self._order(good)
        if not len(order):
            return {}
        begins = np.ones(len(order), bool)
        begins[1:] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1] + 1)
        first_of_id = np.ones(len(order), bool)
        first_of_id[1:] = ids[1:] != ids[:-1]
        ringed = bool(self._span.start)
        # A trajectory that lost its beginning is another one, unless a ring took it.
        cut = begins & ~(first_of_id & ((steps == 0) | ringed))
        piece = np.cumsum(begins) - 1
        where = np.flatnonzero(begins)
        if not cut.any():
            return {}
        # Ids of a lane only grow: all are numbered again, by the first rows of trajectories.
        new_ids = np.empty(len(where), np.int64)
        new_ids[np.argsort(order[where])] = np.arange(len(where))
        base = np.where(cut[where], steps[where], 0)
        out_ids, out_steps = np.zeros(len(good), np.int64), np.zeros(len(good), np.int64)
        out_ids[order] = new_ids[piece]
        out_steps[order] = steps - base[piece]
        return {TRAJ_IDS: out_ids, STEP: out_steps}


class _TrustedRows(Findings):
    """Keeps all rows of the checks that are trusted."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, np.ndarray]] = []

    def add(self, check: str, message: str, *places: Place, count: int = 1) -> None:
        """Keep rows of a finding that names them."""
        if check in _TRUSTED and places and places[0].row is not None:
            rows = np.arange(places[0].row, places[0].row + count)
            self.rows.append((check, message, rows))

    def merge(self, other: Findings) -> None:
        """Add the rows of others, which keep all of theirs, too."""
        if isinstance(other, _TrustedRows):
            self.rows += other.rows
        else:
            super().merge(other)

    def add_rows(
        self, check: str, message: str, rows: np.ndarray, place_of: Callable[[int], Place]
    ) -> None:
        """Keep the rows."""
        if check in _TRUSTED and len(rows):
            self.rows.append((check, message, np.asarray(rows)))
