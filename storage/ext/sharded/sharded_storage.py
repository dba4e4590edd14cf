"""The storage of a run whose workers write the rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from tallyroll.storage.ext.joined.union_storage import UnionStorage
from tallyroll.storage.ext.sharded.files import ShardedFiles
from tallyroll.storage.ext.sharded.reader import ShardedReader
from tallyroll.storage.ext.sharded.sink import ShardedWriter
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.replay.tensor_storage import AsTensorStorage


class ShardedStorage(DiskStorage):
    """A storage of which workers write the rows, each to a shard of its own: see `open_storage`.

    A collector with ``sharded=True`` makes it of a path. It takes a run, and no rows; they are
    read by `open_storage`.

    Args:
        path: a directory.
        mode: ``"create"`` or ``"append"``.

    Raises:
        StorageExists, DirectoryNotEmpty, StorageMissing, NotAStorage: something else is there, or
            nothing.
        StorageLocked: another process writes its run.
    """

    sharded = True
    writer: ShardedWriter

    def __init__(
        self, path: str | os.PathLike[str], *, mode: Literal["create", "append"] = "create"
    ) -> None:
        AsTensorStorage.__init__(self)
        self.path, self.mode = user_path(path), mode
        self.writer = ShardedWriter(self.path.absolute(), mode)
        self.reader = self.writer.reader
        self._reopening = {"path": str(self.path.absolute())}

    def reserve(self, rows: int) -> None:
        """Do nothing: workers reserve space where they are."""

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that count."""
        return self.head * self.schema.row_nbytes if self.head else 0


def open_at(path: Path, mode: Mode, *, accept_copy: bool = False) -> UnionStorage:
    """Open the shards of a sharded storage as one storage, to read."""
    reader = ShardedReader(ShardedFiles(path.absolute()), path, accept_copy=accept_copy)
    try:
        found = UnionStorage(reader, mode)
    except BaseException:
        reader.close()
        raise
    # As these shards with these rows: when it is opened again, more may count.
    found.reopen_by([each.path for each in reader.members], accept_copy=accept_copy)
    return found
