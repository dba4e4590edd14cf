"""The chunk files of one column, which have the same size and are mapped contiguously.

`chunk_rows_of` in ``metadata.py`` chooses the size.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from tallyroll.storage.errors import CorruptStorage, TooManyFiles
from tallyroll.storage.files.mapping import Access, Region
from tallyroll.storage.files.safe_files import Inside, closing, open_file, write_all
from tallyroll.storage.formats.zarr.metadata import CHUNK_NAME, chunk_name
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.schema import Column

_NAME = re.compile(CHUNK_NAME)


class ChunkedColumn:
    """An open column in chunk files.

    Args:
        inside: access to the storage's files.
        place: the directory of the chunks, which is opened on demand.
        column: the column of the schema.
        chunk_rows: the number of rows of a chunk.
    """

    def __init__(self, inside: Inside, place: Path, column: Column, chunk_rows: int) -> None:
        self._inside, self._place, self._column = inside, place, column
        self.chunk_rows = chunk_rows
        self.chunk_nbytes = chunk_rows * column.row_nbytes
        self.count = 0
        """The number of leading chunks that are known to exist and to be complete."""
        self._regions: dict[Access, Region] = {}
        self._tail = (-1, -1)
        self._new_names = self._synced = False

    def count_for(self, rows: int) -> int:
        """Return the number of chunks for ``rows`` rows."""
        return -(-rows // self.chunk_rows)

    def _name(self, number: int) -> str:
        return chunk_name(self._column, number)

    def _directory(self) -> AbstractContextManager[int]:
        return closing(self._inside.open_directory(self._place))

    def require(self, count: int) -> None:
        """Check that ``count`` chunks exist.

        Raises:
            CorruptStorage: a chunk is missing, has another size, or is not a file.
        """
        if count <= self.count:
            return
        with self._directory() as directory:
            for number in range(self.count, count):
                self._require_chunk(directory, number)
                self.count = number + 1

    def _require_chunk(self, directory: int, number: int) -> None:
        storage = self._inside.root
        what = f"chunk {self._name(number)} of column {format_key(self._column.key)} in {storage}"
        try:
            found = os.stat(self._name(number), dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise CorruptStorage(
                f"{what} is missing, so its committed rows cannot be read. Restore the chunk from "
                "a copy."
            ) from error
        if not stat.S_ISREG(found.st_mode):
            raise CorruptStorage(
                f"{what} is not a regular file, and links are not followed. Restore the chunk "
                "from a copy."
            )
        if found.st_size != self.chunk_nbytes:
            raise CorruptStorage(
                f"{what} has {found.st_size} bytes, expected {self.chunk_nbytes}. It was cut "
                "short, or another program wrote it. Restore the chunk from a copy."
            )

    def make(self, count: int) -> None:
        """Add fully allocated chunks until ``count`` chunks exist. After an error, none is added.

        Raises:
            OSError: the file system refuses.
        """
        if count <= self.count:
            return
        with self._directory() as directory:
            for number in range(self.count, count):
                try:
                    self._make_chunk(directory, number)
                except (OSError, TooManyFiles):
                    self.remove(self.count, number + 1)
                    raise
        self._new_names, self.count = True, count

    def _make_chunk(self, directory: int, number: int) -> None:
        flags = os.O_RDWR | os.O_CREAT
        with closing(open_file(self._name(number), flags, directory)) as file:
            if os.fstat(file).st_size > self.chunk_nbytes:
                os.ftruncate(file, self.chunk_nbytes)
            os.posix_fallocate(file, 0, self.chunk_nbytes)

    def remove(self, start: int, stop: int) -> None:
        """Remove chunks ``[start, stop)``, which must not be mapped."""
        self.count = min(self.count, start)
        if stop <= start:
            return
        with self._directory() as directory:
            for number in range(start, stop):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._name(number), dir_fd=directory)

    def to_map(self, count: int, access: Access) -> int:
        """Return the number of maps that `array` creates for ``count`` chunks."""
        region = self._regions.get(access)
        if region is None or region.nbytes < count * self.chunk_nbytes:
            return count
        return max(0, count - region.mapped // self.chunk_nbytes)

    def array(self, count: int, room: int, access: Access) -> np.ndarray:
        """Return the first ``room`` rows of ``count`` mapped chunks, an array [room, ...].

        Raises:
            OSError: the system refuses to map them.
        """
        shape = (room, *self._column.shape)
        if not room:
            return np.empty(shape, self._column.numpy_dtype)
        region = self._regions.get(access)
        if region is None or region.nbytes < count * self.chunk_nbytes:
            region = self._regions[access] = _reserve(count * self.chunk_nbytes, access)
        flags = os.O_RDWR if access == "write" else os.O_RDONLY
        self.map_into(region, 0, region.mapped // self.chunk_nbytes, count, flags)
        return region.array(self._column.numpy_dtype, shape)

    def map_into(
        self, region: Region, at: int, first: int, count: int, flags: int = os.O_RDONLY
    ) -> None:
        """Map chunks ``[first, count)`` of a column that begins at byte ``at`` of the region.

        Raises:
            OSError: the system refuses to map them.
        """
        if count <= first:
            return
        with self._directory() as directory:
            for number in range(first, count):
                with closing(open_file(self._name(number), flags, directory)) as file:
                    region.add(file, self.chunk_nbytes, at + number * self.chunk_nbytes)

    def write(self, row: int, rows: np.ndarray) -> None:
        """Write C-contiguous ``rows`` from ``row`` on through the files."""
        rest = rows.reshape(-1).view(np.uint8).data
        at = row * self._column.row_nbytes
        while len(rest):
            number, start = divmod(at, self.chunk_nbytes)
            part = rest[: self.chunk_nbytes - start]
            write_all(self._file(number), part, start)
            rest, at = rest[len(part) :], at + len(part)

    def _file(self, number: int) -> int:
        """Return a descriptor of a chunk's file. The most recently used file stays open."""
        last, file = self._tail
        if last != number:
            self._close_tail()
            with self._directory() as directory:
                file = open_file(self._name(number), os.O_RDWR, directory)
            self._tail = number, file
        return file

    def sync(self, start: int) -> None:
        """Wait until the rows from ``start`` on are on the disk; the first call syncs all rows."""
        if (region := self._regions.get("write")) is not None:
            region.sync(start * self._column.row_nbytes if self._synced else 0)
        if self._new_names:
            with self._directory() as directory:
                os.fsync(directory)
        self._new_names, self._synced = False, True

    def trim(self, rows: int) -> None:
        """Remove all chunks beyond the first ``rows`` rows, and drop the maps."""
        self._close_tail()
        self._regions.clear()
        self.count = self.count_for(rows)
        with self._directory() as directory:
            for name in os.listdir(directory):
                if (chunk := _NAME.fullmatch(name)) and int(chunk[1]) >= self.count:
                    os.unlink(name, dir_fd=directory)

    def close(self) -> None:
        """Close the files. Arrays stay valid."""
        with contextlib.ExitStack() as exits:
            exits.callback(self._regions.clear)
            self._close_tail()

    def _close_tail(self) -> None:
        (_, file), self._tail = self._tail, (-1, -1)
        if file >= 0:
            os.close(file)


def _reserve(nbytes: int, access: Access) -> Region:
    # Twice as much, so that a growing column is rarely mapped again.
    try:
        return Region(2 * nbytes, access)
    except OSError:
        return Region(nbytes, access)
