"""The interface of a format: the places of rows, and metadata for other libraries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

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
from tallyroll.storage.rows.keys import spell
from tallyroll.storage.rows.schema import Schema


class Format(ABC):
    """The places of a storage's rows, and the metadata around them."""

    name: ClassVar[str]
    """The name in the manifest, ``tallyroll.`` first."""

    grows: ClassVar[bool] = True
    """Whether space for more rows can be added to an open storage."""

    rings: ClassVar[bool] = False
    """Whether new rows may overwrite the oldest."""

    most_dims: ClassVar[int] = 64
    """Dimensions of a column, rows included. NumPy has so many."""

    lacks_bfloat16: ClassVar[str] = ""
    """What the format is called, if it has no such dtype."""

    durable = False
    """Whether the manifest, and what is shown to other libraries, is to survive a power cut."""

    lock_path: Path
    """The writer's lock file."""

    header_path: Path
    """The file that begins with the header."""

    manifest_path: Path
    """The file that holds the manifest."""

    episodes_path: Path
    """The file for the table of episodes."""

    schema: Schema
    """The columns, once it was created or opened."""

    def __init__(self, path: Path, root: Path | None = None) -> None:
        self.path = path
        self.inside = Inside(path if root is None else root)
        """The way to all its files."""

    def open_header(self, flags: int) -> int:
        """A descriptor of the file that begins with the header."""
        return self.inside.open(self.header_path, flags)

    def stands(self) -> bool:
        """Whether a storage is there: it is one from the moment that its manifest exists."""
        # A link to nothing is named when it is read: the content of a cache may be missing.
        return self.manifest_path.exists() or self.manifest_path.is_symlink()

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """The manifest, checked; raises as `manifest.read_manifest`. Read before `open`."""

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
                    f"column {spell(column.key)} has {dims} dimensions, rows included, and this "
                    f"format holds {self.most_dims}. Flatten some."
                )
            if self.lacks_bfloat16 and column.dtype is torch.bfloat16:
                raise InvalidSchema(
                    f"column {spell(column.key)} is bfloat16, which {self.lacks_bfloat16} does not "
                    "have. Convert it to float32 before writing, or use MemmapStorage."
                )

    def prepare(self) -> None:
        """Make the place for a new storage's lock file."""
        make_directory(self.inside.root)
        with translated(self.lock_path.parent):
            self.inside.make_directory(self.lock_path.parent)

    @abstractmethod
    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Make files without rows, and the header. What an unfinished creation left goes.

        ``capacity`` is how many rows are wanted, 0 where nobody knows.

        Raises:
            StorageFull: no space.
        """

    def fit(self, schema: Schema, capacity: int) -> None:  # noqa: B027 - most formats grow
        """Make a storage that cannot grow in place able to hold ``capacity`` rows.

        The writer holds the lock and nothing is open yet. Formats that grow do nothing.

        Raises:
            StorageFull: no space; nothing was changed.
        """

    def finish(self, schema: Schema, rows: int) -> None:  # noqa: B027 - trimmed is enough
        """Leave exactly ``rows`` rows, for good. The writer holds the lock and nothing else.

        Raises:
            StorageFull: no space; nothing was changed.
        """

    def footprint(self, schema: Schema, rows: int) -> Footprint:
        """Space that ``rows`` rows take on disk; by default, a file for each column."""
        sizes = [rows * column.row_nbytes for column in schema.columns]
        return Footprint(sum(sizes), len(sizes), max(sizes), len(sizes))

    @abstractmethod
    def discard(self) -> None:
        """Remove what an unfinished creation left."""

    def undo(self, *, made: bool) -> None:
        """Remove what a failed creation left, its lock too, and the place if it ``made`` it."""
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
        """All that is mapped now, one array [room, ...] a column, room being at least ``rows``.

        Raises:
            CorruptStorage: the files are shorter than that.
        """

    @abstractmethod
    def private(self, rows: int, before: Area | None = None) -> Area:
        """At least ``rows`` rows, more than none, mapped once more: privately, and for one alone.

        ``before`` is a smaller area that nobody else has, for a format that can add to it.

        Raises:
            CorruptStorage: the files are shorter than that.
            OSError: the system refuses; FileNotFoundError: they were deleted.
        """

    @abstractmethod
    def write(self, column: int, row: int, rows: np.ndarray) -> None:
        """Write C-contiguous ``rows`` of a column from ``row`` on, where space is reserved."""

    @abstractmethod
    def publish(self, rows: int) -> None:
        """Show ``rows`` rows to other libraries."""

    @abstractmethod
    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Faults that other libraries would read, one sentence a file.

        A writer that opens the storage and closes it writes all of that anew.

        Args:
            head: tells how many rows are committed now.

        Raises:
            MissingLibrary: it takes one that is not installed.
        """

    def made_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """As `shown_wrongly`, of what was written once, and is not when a writer closes."""
        return iter(())

    @abstractmethod
    def trim(self, rows: int) -> None:
        """Give back the space beyond ``rows`` rows."""

    @abstractmethod
    def sync(self, start: int = 0) -> None:
        """Return when all rows are on the disk; those before ``start`` were at an earlier call."""

    @abstractmethod
    def written_aside(self) -> set[Path]:
        """The files that are written aside, one or more in every directory of the format."""

    @told
    def settle(self) -> None:
        """Return when everything but the header is on the disk, whoever wrote it, names too.

        Rows first, then metadata, then names, from the inside out.

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
