"""Repair a storage of Tallyroll after a disk error.

The repair leaves out blocks whose checksums differ. Without checksums, it leaves out rows that
contradict other rows.
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
from tallyroll.storage.ext.dataset_checks.superblock import declared_end
from tallyroll.storage.ext.exchange.base import Block, Incoming
from tallyroll.storage.ext.exchange.export_rows import BLOCK_NBYTES
from tallyroll.storage.ext.exchange.readme import about_rows
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.repair.hdf5 import runs
from tallyroll.storage.ext.repair.losses import Losses, RowsRepair
from tallyroll.storage.ext.repair.packed import (
    packed_reader,
    unreadable_rows,
)
from tallyroll.storage.ext.verification.findings import Findings, Place
from tallyroll.storage.ext.verification.record_checks import check_runs
from tallyroll.storage.ext.verification.row_checks import RowChecks
from tallyroll.storage.files.checksums import mismatches
from tallyroll.storage.files.commit_header import committed_counts
from tallyroll.storage.files.paths import free_bytes
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.memmap import place_of
from tallyroll.storage.formats.zarr.format import ZarrFormat
from tallyroll.storage.formats.zarr.metadata import chunk_name
from tallyroll.storage.readers.row_reader import RowReader, SlotColumn, newest_rows
from tallyroll.storage.rows.keys import STEP, TRAJ_IDS, Key, format_key
from tallyroll.storage.rows.row_words import words
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.storages import open_storage
from tallyroll.storage.trajectories.columns import WHOSE, missing

_STEP: Final = 2**20
_MOST_CHUNKS: Final = 2**18
"""The maximum number of chunks of a column to check: a damaged header may claim any number."""


def missing_in(place: Path) -> dict[Path, Ranges]:
    """Return the byte ranges that files of an HDF5 or Zarr storage lack.

    The keys are paths below the storage.
    """
    if place.is_file():
        with open(opened_in(place, Path(place.name)), "rb") as raw:
            size, end = os.fstat(raw.fileno()).st_size, declared_end(raw) or 0
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
    """Yield the chunks of a Zarr storage that hold committed rows, with their sizes in bytes."""
    files = ZarrFormat(place)
    try:
        manifest = files.read_manifest()
        schema, sizes = Schema.from_json(manifest["schema"]), manifest.get("chunk_rows", [])
        _, rows = committed_counts(files.inside.read(files.header_path, 2**25))
    except (OSError, CorruptStorage, NotAStorage, InvalidSchema):
        return  # opening the storage reports the error
    if manifest["format"] == files.name and len(sizes) == len(schema.columns):
        for column, size in zip(schema.columns, sizes, strict=True):
            for number in range(min(_MOST_CHUNKS, -(-rows // size))):
                name = chunk_name(column, number)
                yield Path(*column.key, name), size * column.row_nbytes


def joined(one: Mapping[Path, Ranges], other: Mapping[Path, Ranges]) -> dict[Path, Ranges]:
    """Return the union of both mappings, with sorted ranges."""
    return {path: sorted([*one.get(path, []), *other.get(path, [])]) for path in {*one, *other}}


def working_copy(
    place: Path,
    target: Path,
    unreadable: Mapping[Path, Ranges],
    *,
    filled: bytes = b"\0",
    lengths: Mapping[Path, int] | None = None,
) -> None:
    """Copy the files of ``place`` to ``target``, with hard links for unchanged files.

    Args:
        place: a folder, or a file.
        target: the path of the copy; it must not exist.
        unreadable: byte ranges by file, to fill with ``filled``. A range may lie beyond the end of
            its file.
        filled: the fill byte.
        lengths: the minimum sizes of files in bytes. Shorter files are padded with zeros.

    Raises:
        OSError: the disk is full.
        StorageFull: the disk has no room for the copy.
    """
    lengths = lengths or {}
    more = sum(b - a for ranges in unreadable.values() for a, b in ranges)
    if more > free_bytes(target):
        raise StorageFull(
            f"{more:,} bytes of {place} are missing. The repair fills them in a copy, but "
            f"{target.parent} has no room for it. Nothing was written."
        )
    files = [*files_of(place)]
    for path in dict.fromkeys([*files, *unreadable]):
        original, copy = (place / path, target / path) if place.is_dir() else (place, target)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path not in files:  # a missing file, or a link
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
    """Copy the bytes of a file, with the fill byte in the given ranges."""
    at, size = 0, 0 if source is None else os.fstat(source).st_size
    for start, stop in (*ranges, (size, size)):
        for begin in range(at, min(start, size), _STEP):
            assert source is not None
            out.write(read_at(source, min(_STEP, min(start, size) - begin), begin))
        for begin in range(start, stop, _STEP):
            out.write(filled * min(_STEP, stop - begin))
        at = max(at, stop)


def _linked(source: Path, copy: Path) -> bool:
    """Create a hard link. Return False if the file system does not support it."""
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            return False
        raise
    return True


_TRUSTED: Final = ("zeros", "ids", "steps", "lanes", "ends", "observations")
"""The checks whose rows are left out if there are no checksums."""
_MANIFEST: Final = "manifest.json"


class OurRepair(RowsRepair):
    """Repair of a storage of Tallyroll. It keeps the rows that were not damaged.

    Rows after a gap form a separate trajectory.

    Args:
        losses: the list to which losses are added.
        aside: an empty folder for copies of damaged files.
        unreadable: ranges of files that the disk cannot read.
    """

    name: ClassVar[str] = "tallyroll"

    def __init__(self, losses: Losses, aside: Path, unreadable: Mapping[Path, Ranges]) -> None:
        super().__init__(losses, unreadable)
        self._aside = aside

    @contextlib.contextmanager
    def read(self, place: Path) -> Iterator[Incoming]:
        """Open the storage, or copies of it that can be opened."""
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
    """Return the expected sizes of column files, and the row counts of the short ones.

    Raises:
        CorruptStorage: no file is short, so ``error`` has another cause.
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
    """The rows of a reader, without the lost rows.

    Args:
        reader: the reader of the rows.
        losses: the list to which losses are added.
        short: the row counts of the columns whose files are too short.
        twin: a reader of the same rows with another fill for the bytes that the disk could not
            read.
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
        """For each column, a mask [n] of the rows that the disk could not read."""
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
        """Return a mask [n] of the rows without a known fault."""
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
        elif self._twin is None:  # rows next to a lost row would contradict its fill
            self._by_checks(good)
        return good

    def _by_twin(self, good: np.ndarray, twin: RowReader) -> None:
        """Leave out rows that differ between the two fills of unreadable bytes."""
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
        """Mark the rows of the mask ``wrong`` [n] as lost, and report those not lost before."""
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
                rows = newest_rows(reader, np.arange(each.start, each.stop)) - self._span.start
                wrong[rows[(rows >= 0) & (rows < len(wrong))]] = True
                if each.key in self._unread and self._unread[each.key][wrong].any():
                    continue  # unread bytes explain the mismatch, and the other rows were read
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
        """Return the good rows [n] sorted by trajectory and step, with their ids and steps."""
        at = np.flatnonzero(good)
        found = self._reader.copies(at + self._span.start, [TRAJ_IDS, STEP])
        ids, steps = (each.reshape(len(at)) for each in found)
        order = np.lexsort((steps, ids))
        return at[order], ids[order], steps[order]

    def _before(self, wrong: np.ndarray) -> np.ndarray:
        """Return a mask of the rows that precede ``wrong`` rows in their trajectories.

        Of two rows that contradict each other, either may be wrong.
        """
        order, ids, _ = self._order(np.ones(len(wrong), bool))
        before = np.zeros(len(wrong), bool)
        same = ids[1:] == ids[:-1]
        before[order[:-1][same & wrong[order[1:]]]] = True
        return before

    def _renumbered(self, good: np.ndarray) -> dict[Key, np.ndarray]:
        """Return new ids and steps [n] that make rows after a gap a separate trajectory.

        The result is empty if no trajectory needs new numbers.
        """
        order, ids, steps = self._order(good)
        if not len(order):
            return {}
        begins = np.ones(len(order), bool)
        begins[1:] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1] + 1)
        first_of_id = np.ones(len(order), bool)
        first_of_id[1:] = ids[1:] != ids[:-1]
        ringed = bool(self._span.start)
        # A trajectory without its first step becomes a new one, unless a ring has overwritten the
        # start.
        cut = begins & ~(first_of_id & ((steps == 0) | ringed))
        piece = np.cumsum(begins) - 1
        where = np.flatnonzero(begins)
        if not cut.any():
            return {}
        # Ids of a lane must increase, so all trajectories are renumbered in the order of their
        # first rows.
        new_ids = np.empty(len(where), np.int64)
        new_ids[np.argsort(order[where])] = np.arange(len(where))
        base = np.where(cut[where], steps[where], 0)
        out_ids, out_steps = np.zeros(len(good), np.int64), np.zeros(len(good), np.int64)
        out_ids[order] = new_ids[piece]
        out_steps[order] = steps - base[piece]
        return {TRAJ_IDS: out_ids, STEP: out_steps}


class _TrustedRows(Findings):
    """Findings that record the numbers of all rows that fail a check in `_TRUSTED`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, str, np.ndarray]] = []

    def add(self, check: str, message: str, *places: Place, count: int = 1) -> None:
        """Record the rows of a finding, if it names rows."""
        if check in _TRUSTED and places and places[0].row is not None:
            rows = np.arange(places[0].row, places[0].row + count)
            self.rows.append((check, message, rows))

    def merge(self, other: Findings) -> None:
        """Add the rows of another instance."""
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
