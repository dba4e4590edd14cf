"""Storage of a run whose workers write the rows."""
# ruff: noqa: D102 - `RowReader` documents these methods

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tallyroll.storage.errors import NotInitialised
from tallyroll.storage.ext.joined.union import UnionReader
from tallyroll.storage.ext.joined.union_storage import UnionStorage
from tallyroll.storage.ext.sharded.files import ShardedFiles, entries_in
from tallyroll.storage.ext.sharded.sink import ShardedWriter
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.replay.tensor_storage import AsTensorStorage, remedies_named
from tallyroll.storage.rows.frame_stacks import FrameStack
from tallyroll.storage.stores.row_store import Once


class ShardedReader(UnionReader):
    """Reader of the rows that were acknowledged when it was opened, one shard after the other.

    Workers assign unique trajectory ids, so the reader does not move ids.

    Args:
        files: the files of the storage.
        path: the path to show in messages.
        accept_copy: open shards that were copied while a writer had them open.
    """

    def __init__(self, files: ShardedFiles, path: Path, *, accept_copy: bool = False) -> None:
        manifest, said = files.manifest(), files.acknowledged()
        kept = [each for each in said.shards if each.rows]
        if not kept:
            raise NotInitialised(f"{path} has no rows yet. Collect some first.")
        self._own_manifest, self._record = manifest, said.record
        members = files.open_all(said, accept_copy=accept_copy)
        try:
            super().__init__(members, path, spans=[range(each.rows) for each in kept])
            self._runs = list(entries_in(manifest, said))
        except BaseException:
            for member in members:
                member.close()
            raise
        self.ids_moved_by = (0,) * len(members)

    @property
    def manifest(self) -> Manifest:
        self.require_open()
        return {
            **super().manifest,
            "format": self._own_manifest["format"],
            "created": self._own_manifest["created"],
        }

    @property
    def record(self) -> tuple[int, bytes] | None:
        return self._record


class ShardedStorage(DiskStorage):
    """Storage whose rows are written by workers, each to its own shard; see `open_storage`.

    A collector with ``sharded=True`` creates such a storage from a path. Pass this object as its
    ``storage=`` to choose the layout of the shards. It accepts a run, but no rows. Read the rows
    with `open_storage`.

    Args:
        path: a directory.
        mode: ``"create"`` or ``"append"``.
        once: True to store each frame of large observations once, in a pool of each shard; see
            `DiskStorage`. ``"auto"`` and False store whole observations. With ``"append"``, new
            shards have the layout of the earlier ones.
        stacks: with ``once=True``, the observations that are stacks of frames along their first
            axis.

    Raises:
        ValueError: ``once=True`` or ``stacks`` with ``mode="append"``, or ``stacks`` without
            ``once=True``.
        StorageExists, DirectoryNotEmpty: with ``"create"``, the directory is in use.
        StorageMissing, NotAStorage: with ``"append"``, ``path`` is not a sharded storage.
        StorageLocked: another process writes a run to the storage.
    """

    sharded = True
    writer: ShardedWriter

    _format_class = MemmapFormat

    @remedies_named
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Literal["create", "append"] = "create",
        once: Once = "auto",
        stacks: Sequence[FrameStack] = (),
    ) -> None:
        AsTensorStorage.__init__(self)
        self.path, self.mode = user_path(path), mode
        plan = self._plan_of(once, stacks)
        self.writer = ShardedWriter(self.path.absolute(), mode, plan)
        self.reader = self.writer.reader
        self._reopening = {"path": str(self.path.absolute())}

    def reserve(self, rows: int) -> None:
        """Do nothing: workers reserve space for their own shards."""

    @property
    def stores_once(self) -> bool:
        """True if the shards store the frames of some columns once."""
        return self.writer.stores_once

    @property
    def nbytes(self) -> int:
        """Size of the acknowledged rows in bytes."""
        return self.head * self.schema.row_nbytes if self.head else 0


def open_at(path: Path, mode: Mode, *, accept_copy: bool = False) -> UnionStorage:
    """Open the shards of a sharded storage as one read-only storage."""
    reader = ShardedReader(ShardedFiles(path.absolute()), path, accept_copy=accept_copy)
    try:
        found = UnionStorage(reader, mode)
    except BaseException:
        reader.close()
        raise
    # A pickle reopens these shards with these rows, since more rows may be acknowledged later.
    found.reopen_by([each.path for each in reader.members], accept_copy=accept_copy)
    return found
