"""The interface of a format, which defines the places of rows and metadata for other libraries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidSchema, StorageExists
from tallyroll.storage.files.copied_runs import COPIES_NBYTES
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.mapping import Access, Area
from tallyroll.storage.files.paths import (
    make_directory,
    open_column,
    refuse_impossible,
    refuse_nothing,
    translated,
    translates_errors,
)
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.space import Footprint
from tallyroll.storage.rows.keys import Key, format_key
from tallyroll.storage.rows.schema import Schema

BESIDE: Final = (
    "episodes.npy",
    "content.leaves",
    "priorities.leaves",
    "trajectories.blocks",
    "samples.drawn",
    "columns.statistics",
)
"""Files next to the rows: the episode table, content hashes, priorities of a sampler, the
trajectory index, counts of rows drawn under a rate limit, and column statistics. Each file records
how many rows it covers, and can be lost without losing rows."""

EVENTS_FILE: Final = "run.events"
"""The file of environment calls, see `tallyroll.storage.readers.event_file`."""


class Format(ABC):
    """Abstract format of a storage: the places of its rows, and the metadata around them.

    A new format needs a storage class in `tallyroll.storage.storages`, where `FORMATS` gives it a
    short name and ``_name_at`` detects it by its files. `tallyroll.storage.formats.by_name` maps
    that name and path suffixes to the format.
    """

    name: ClassVar[str]
    """The name in the manifest, which begins with ``tallyroll.``."""

    grows: ClassVar[bool] = True
    """True if space for more rows can be added to an open storage."""

    rings: ClassVar[bool] = False
    """True if new rows may overwrite the oldest."""

    pools: ClassVar[bool] = False
    """True if the format can store each frame once, in pool files."""

    most_dims: ClassVar[int] = 64
    """Maximum number of dimensions of a column, including rows. The default is NumPy's limit."""

    copies_nbytes: ClassVar[int] = COPIES_NBYTES
    """Maximum bytes of copied runs in a manifest, which leaves room for the runs of collectors."""

    lacks_bfloat16: ClassVar[str] = ""
    """The name of the file format, for messages, if it lacks bfloat16."""

    durable = False
    """True if the manifest and the metadata for other libraries must survive a power cut."""

    lock_path: Path
    """The writer's lock file."""

    header_path: Path
    """The file that begins with the header."""

    manifest_path: Path
    """The file that holds the manifest."""

    beside: tuple[Path, ...]
    """The paths of the files in `BESIDE`, in order."""

    events_path: Path
    """The path of `EVENTS_FILE`."""

    schema: Schema
    """The schema, once the storage has been created or opened."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self.inside = Inside(path if root is None else root)
        """Access to the directory that contains all files. Files are opened only through it."""

    def sync_metadata(self, durable: bool) -> None:
        """Let the manifest and the metadata survive a power cut, if ``durable`` is True."""
        self.durable = durable

    @property
    def episodes_path(self) -> Path:
        """The file of the episode table."""
        return self.beside[0]

    @property
    def leaves_path(self) -> Path:
        """The file of content hashes."""
        return self.beside[1]

    @property
    def priorities_path(self) -> Path:
        """The file of a sampler's priorities."""
        return self.beside[2]

    @property
    def index_path(self) -> Path:
        """The file of the trajectory index."""
        return self.beside[3]

    @property
    def drawn_path(self) -> Path:
        """The file of counts of rows drawn under a rate limit."""
        return self.beside[4]

    @property
    def statistics_path(self) -> Path:
        """The file of column statistics."""
        return self.beside[5]

    def open_header(self, flags: int) -> int:
        """Open the file that begins with the header; return a descriptor."""
        return self.inside.open(self.header_path, flags)

    def exists(self) -> bool:
        """Return True if a storage exists, which is the case once its manifest exists."""
        # A dangling link counts as a manifest: a cache may have lost its target, and the error of
        # reading the link names it.
        return self.manifest_path.exists() or self.manifest_path.is_symlink()

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """Read and check the manifest before `open`; raise as `manifest.read_manifest` does."""

    @abstractmethod
    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest atomically."""

    @abstractmethod
    def refuse_existing(self) -> None:
        """Raise an `OpenError` unless a storage can be created at the path."""

    def _refuse_storage(self) -> None:
        if self.exists():
            raise StorageExists(
                f'{self.path} holds a storage already. Open it with mode="append" to add rows to '
                'it (mode="auto" creates it the first time), or give another path.'
            )

    def refuse_missing(self) -> None:
        """Raise an `OpenError` unless something that may be a storage is at the path."""
        refuse_impossible(self.manifest_path)
        refuse_nothing(self.path, 'Give the path of a storage, or use mode="create".')

    def check(self, schema: Schema) -> None:
        """Raise `InvalidSchema` if the format cannot hold these columns."""
        for column in schema.columns:
            if (dims := 1 + len(column.shape)) > self.most_dims:
                raise InvalidSchema(
                    f"column {format_key(column.key)} has {dims} dimensions, rows included, but "
                    f"this format supports at most {self.most_dims}. Flatten some."
                )
            if self.lacks_bfloat16 and column.dtype is torch.bfloat16:
                raise InvalidSchema(
                    f"column {format_key(column.key)} is bfloat16, which {self.lacks_bfloat16} "
                    "does not have. Convert it to float32 before writing, or use MemmapStorage."
                )

    def prepare(self) -> None:
        """Create the directory of a new storage's lock file."""
        make_directory(self.inside.root)
        with translated(self.lock_path.parent):
            self.inside.make_directory(self.lock_path.parent)

    @abstractmethod
    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Remove files of an unfinished creation, and create the header and files without rows.

        ``capacity`` is the number of rows that the user requests, or 0 if it is unknown.

        Raises:
            StorageFull: the disk has no space.
        """

    def fit(self, schema: Schema, capacity: int) -> None:  # noqa: B027 - most formats grow
        """Make space for ``capacity`` rows in a storage that cannot grow in place.

        The writer holds the lock, and no other file is open yet. Formats that grow do nothing.

        Raises:
            StorageFull: the disk has no space; nothing was changed.
        """

    def finish(self, schema: Schema, rows: int) -> None:  # noqa: B027 - trimmed is enough
        """Reduce the files to exactly ``rows`` rows. The writer holds the lock and no other file.

        Raises:
            StorageFull: the disk has no space; nothing was changed.
        """

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Return the space of ``rows`` rows on disk; by default, each column is one file."""
        sizes = [rows * column.row_nbytes for column in schema.columns]
        return Footprint(sum(sizes), len(sizes), max(sizes), len(sizes))

    @abstractmethod
    def discard(self) -> None:
        """Remove the files of an unfinished creation."""

    def undo(self, *, made: bool) -> None:
        """Remove the files and lock of a failed creation, and the directory if it was ``made``."""
        self.discard()
        self.inside.remove(self.lock_path)

    @abstractmethod
    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the files of an existing storage.

        Raises:
            CorruptStorage: a file is missing.
        """

    def _pool_path(self, key: Key) -> Path:
        """Return the path of a column's frame pool. Only formats with `pools` implement this."""
        raise NotImplementedError(self.name)

    @translates_errors
    def make_pool(self, key: Key) -> None:
        """Create an empty frame pool for a column."""
        os.close(self.inside.make(self._pool_path(key)))

    def open_pool(self, key: Key, flags: int) -> int:
        """Open the frame pool of a column, and return its descriptor.

        Raises:
            CorruptStorage: the file is missing.
        """
        return open_column(self.inside, self._pool_path(key), flags)

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Reserve space for at least ``rows`` rows; raise `StorageFull` with nothing changed."""

    @abstractmethod
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Return all mapped rows, as one array [room, ...] per column.

        ``room`` is at least ``rows``.

        Raises:
            CorruptStorage: the files are shorter.
        """

    @abstractmethod
    def private(self, rows: int, before: Area | None = None) -> Area:
        """Map at least ``rows`` rows privately for one caller. ``rows`` is above 0.

        ``before`` is a smaller area that no other caller uses. A format may extend it.

        Raises:
            CorruptStorage: the files are shorter.
            FileNotFoundError: the files were deleted.
            OSError: the system refuses to map the files.
        """

    @abstractmethod
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write C-contiguous ``rows`` to a column from ``row`` on. The space must be reserved."""

    @abstractmethod
    def publish(self, rows: int) -> None:
        """Make ``rows`` rows visible to other libraries."""

    @abstractmethod
    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults in the metadata for other libraries, one sentence per file.

        A writer that opens and closes the storage rewrites all of that metadata.

        Args:
            head: a function that returns the current number of committed rows.

        Raises:
            MissingLibrary: the check needs a library that is not installed.
        """

    def made_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults as `shown_wrongly` does, in metadata that is written only at creation."""
        return iter(())

    @abstractmethod
    def trim(self, rows: int, kept: int) -> None:
        """Release the space beyond ``rows`` rows.

        Processes may have mapped the first ``kept`` rows, and expect to find later rows in the same
        files. This part of the files must not be replaced. It must not be shortened either, because
        the system would kill these processes.
        """

    @abstractmethod
    def sync(self, start: int = 0) -> None:
        """Wait until all rows are on the disk. Earlier calls synced the rows before ``start``."""

    @abstractmethod
    def replaced_files(self) -> set[Path]:
        """Return the files that are replaced atomically, at least one per directory."""

    @translates_errors
    def settle(self) -> None:
        """Wait until everything but the header is on the disk, including the work of other writers.

        Rows are synced first, then metadata, then directory entries, from the inside out.

        Raises:
            DiskFailed: the system cannot write to the disk.
        """
        self.sync()
        for file in sorted(self.replaced_files()):
            self.inside.sync(file)
        self._sync_names()

    def _sync_names(self) -> None:
        for directory in sorted({file.parent for file in self.replaced_files()}, reverse=True):
            self.inside.sync_directory(directory)

    @abstractmethod
    def close(self) -> None:
        """Close the files. Arrays that were returned stay valid."""
