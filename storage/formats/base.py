"""The interface of a format: the places of rows, and metadata for other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar, Final

import numpy as np
import torch

from tallyroll.storage.errors import InvalidSchema, StorageExists
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.mapping import Access, Area
from tallyroll.storage.files.paths import (
    make_directory,
    refuse_impossible,
    refuse_nothing,
    told,
    translated,
)
from tallyroll.storage.files.safe_files import Inside
from tallyroll.storage.formats.space import Footprint
from tallyroll.storage.rows.keys import format_key
from tallyroll.storage.rows.schema import Schema

BESIDE: Final = (
    "episodes.npy",
    "content.leaves",
    "priorities.leaves",
    "trajectories.blocks",
    "samples.drawn",
    "columns.statistics",
)
"""Files that are kept beside the rows, each of which says how far it goes, and can be lost without
losing rows: the table of episodes, hashes of the content, priorities of a sampler, the index of
trajectories, how many rows were drawn under a rate limit, and statistics of columns."""

EVENTS_FILE: Final = "run.events"
"""The file of calls of environments, see `tallyroll.storage.readers.event_file`."""


class Format(ABC):
    """The places of a storage's rows, and the metadata around them.

    A new format gets a class of storages in `tallyroll.storage.storages`: there `FORMATS` gives it
    a short name, and ``_name_at`` finds it by its files. `tallyroll.storage.formats.by_name` has
    the format by that name, and the suffixes that mean it.
    """

    name: ClassVar[str]
    """The name in the manifest, ``tallyroll.`` first."""

    grows: ClassVar[bool] = True
    """Whether space for more rows can be added to an open storage."""

    rings: ClassVar[bool] = False
    """Whether new rows may overwrite the oldest."""

    most_dims: ClassVar[int] = 64
    """Dimensions of a column, rows included. NumPy has so many."""

    lacks_bfloat16: ClassVar[str] = ""
    """The name of the file format, for messages, if it has no bfloat16."""

    durable = False
    """True if the manifest and the metadata for other libraries must survive a power cut."""

    lock_path: Path
    """The writer's lock file."""

    header_path: Path
    """The file that begins with the header."""

    manifest_path: Path
    """The file that holds the manifest."""

    beside: tuple[Path, ...]
    """The paths of `BESIDE`, in its order."""

    events_path: Path
    """The path of `EVENTS_FILE`."""

    schema: Schema
    """The columns, once the storage was created or opened."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self.inside = Inside(path if root is None else root)
        """The directory of all its files, through which they are opened."""

    @property
    def episodes_path(self) -> Path:
        """The file for the table of episodes."""
        return self.beside[0]

    @property
    def leaves_path(self) -> Path:
        """The file for hashes of the content."""
        return self.beside[1]

    @property
    def priorities_path(self) -> Path:
        """The file for the priorities of a sampler."""
        return self.beside[2]

    @property
    def index_path(self) -> Path:
        """The file for the index of trajectories."""
        return self.beside[3]

    @property
    def drawn_path(self) -> Path:
        """The file for the rows that were drawn under a rate limit."""
        return self.beside[4]

    @property
    def statistics_path(self) -> Path:
        """The file for statistics of columns."""
        return self.beside[5]

    def open_header(self, flags: int) -> int:
        """Open the file that begins with the header; return a descriptor."""
        return self.inside.open(self.header_path, flags)

    def stands(self) -> bool:
        """Return whether a storage is there: from the moment that its manifest exists."""
        # Reading a link to nothing raises an error that names it: a cache may have lost its file.
        return self.manifest_path.exists() or self.manifest_path.is_symlink()

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """Return the checked manifest; raise as `manifest.read_manifest`. Call it before `open`."""

    @abstractmethod
    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, whole or not at all."""

    @abstractmethod
    def refuse_existing(self) -> None:
        """Raise an `OpenError` unless a storage can be created at the path."""

    def _refuse_storage(self) -> None:
        if self.stands():
            raise StorageExists(
                f'{self.path} holds a storage already. Open it with mode="append" to add rows to '
                "it, or give another path."
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
                    f"column {format_key(column.key)} has {dims} dimensions, rows included, and "
                    f"this format holds {self.most_dims}. Flatten some."
                )
            if self.lacks_bfloat16 and column.dtype is torch.bfloat16:
                raise InvalidSchema(
                    f"column {format_key(column.key)} is bfloat16, which {self.lacks_bfloat16} "
                    "does not have. Convert it to float32 before writing, or use MemmapStorage."
                )

    def prepare(self) -> None:
        """Make the place for a new storage's lock file."""
        make_directory(self.inside.root)
        with translated(self.lock_path.parent):
            self.inside.make_directory(self.lock_path.parent)

    @abstractmethod
    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Make files without rows, and the header; remove those of an unfinished creation.

        ``capacity`` is the number of rows that the user wants, 0 if it is unknown.

        Raises:
            StorageFull: no space.
        """

    def fit(self, schema: Schema, capacity: int) -> None:  # noqa: B027 - most formats grow
        """Make space for ``capacity`` rows in a storage that cannot grow in place.

        The writer holds the lock, and no other file is open yet. Formats that grow do nothing.

        Raises:
            StorageFull: no space; nothing was changed.
        """

    def finish(self, schema: Schema, rows: int) -> None:  # noqa: B027 - trimmed is enough
        """Leave exactly ``rows`` rows, for good. The writer holds the lock and no other file.

        Raises:
            StorageFull: no space; nothing was changed.
        """

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Return the space of ``rows`` rows on disk; by default, a file for each column."""
        sizes = [rows * column.row_nbytes for column in schema.columns]
        return Footprint(sum(sizes), len(sizes), max(sizes), len(sizes))

    @abstractmethod
    def discard(self) -> None:
        """Remove the files of an unfinished creation."""

    def undo(self, *, made: bool) -> None:
        """Remove the files of a failed creation, its lock too, and the place if it ``made`` it."""
        self.discard()
        self.inside.remove(self.lock_path)

    @abstractmethod
    def open(self, schema: Schema, *, writable: bool) -> None:
        """Open the files of an existing storage.

        Raises:
            CorruptStorage: one is missing.
        """

    @abstractmethod
    def grow(self, rows: int) -> None:
        """Reserve space for at least ``rows`` rows, or raise `StorageFull` with nothing changed."""

    @abstractmethod
    def arrays(self, rows: int, access: Access) -> list[np.ndarray]:
        """Return all mapped rows, one array [room, ...] a column, room being at least ``rows``.

        Raises:
            CorruptStorage: the files are shorter than that.
        """

    @abstractmethod
    def private(self, rows: int, before: Area | None = None) -> Area:
        """Map at least ``rows`` rows once more, privately, for one caller; ``rows`` is above 0.

        ``before`` is a smaller area that only this caller has; a format that can adds to it.

        Raises:
            CorruptStorage: the files are shorter than that.
            OSError: the system refuses; FileNotFoundError: the files were deleted.
        """

    @abstractmethod
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write C-contiguous ``rows`` of a column from ``row`` on, where space is reserved."""

    @abstractmethod
    def publish(self, rows: int) -> None:
        """Show ``rows`` rows to other libraries."""

    @abstractmethod
    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults in the metadata for other libraries, one sentence a file.

        A writer that opens the storage and closes it writes all of that metadata again.

        Args:
            head: returns how many rows are committed now.

        Raises:
            MissingLibrary: the check needs a library that is not installed.
        """

    def made_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Yield faults as `shown_wrongly` does, in metadata that only the creation writes."""
        return iter(())

    @abstractmethod
    def trim(self, rows: int, kept: int) -> None:
        """Give back the space beyond ``rows`` rows.

        Processes may have mapped the files up to ``kept`` rows, and look there for rows that come
        later: those files must not be cut, or the system kills them, nor be replaced.
        """

    @abstractmethod
    def sync(self, start: int = 0) -> None:
        """Return when all rows are on the disk; those before ``start`` were at an earlier call."""

    @abstractmethod
    def written_aside(self) -> set[Path]:
        """Return the files that are written aside, one or more in every directory of the format."""

    @told
    def settle(self) -> None:
        """Return when everything but the header is on the disk, the work of other writers too.

        Rows are synced first, then metadata, then names, from the inside out.

        Raises:
            DiskFailed: the system cannot write it.
        """
        self.sync()
        for file in sorted(self.written_aside()):
            self.inside.sync(file)
        self._sync_names()

    def _sync_names(self) -> None:
        for directory in sorted({file.parent for file in self.written_aside()}, reverse=True):
            self.inside.sync_directory(directory)

    @abstractmethod
    def close(self) -> None:
        """Close the files. Arrays handed out stay valid."""
