"""Files of a sharded storage: a manifest, the acknowledged rows, and one folder per shard.

::

    DIR/manifest.json         columns, and the runs that wrote the rows
    DIR/acknowledged.lines    the acknowledged rows of each shard; see `acknowledged_rows`
    DIR/tallyroll.lock        held by the process that acknowledges rows
    DIR/shards/000000-…       one memory-mapped storage per worker start, on the worker's node

A node that does not share this disk writes to the same path on its own disk. Its shards must be
copied here before they can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tallyroll.storage.errors import CorruptStorage, NotAStorage, StorageMissing
from tallyroll.storage.ext.sharded.acknowledged_rows import (
    AcknowledgedRows,
    ShardRows,
    read_acknowledged,
)
from tallyroll.storage.files.manifest import SHARDED, Manifest, read_manifest
from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.safe_files import Inside, close_all
from tallyroll.storage.formats.memmap import MemmapFormat
from tallyroll.storage.readers.file_reader import FileReader

_BEFORE: Final = "shards_before"
"""The field of a run's entry that contains the number of shards when the run began."""


class ShardedFiles:
    """The files of a sharded storage at ``root``, an absolute path."""

    def __init__(self, root: Path) -> None:
        self.root, self.inside = root, Inside(root)
        self.manifest_path = root / "manifest.json"
        self.lines_path = root / "acknowledged.lines"
        self.lock_path = root / "tallyroll.lock"
        self.shards_path = root / "shards"

    def manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            StorageMissing: the folder does not exist.
            NotAStorage: the storage has another format.
            CorruptStorage: the manifest is damaged.
        """
        if not self.root.exists():
            raise StorageMissing(
                f"there is no storage at {self.root}. Give the path of an existing storage."
            )
        found = read_manifest(self.inside, self.manifest_path)
        if found["format"] != SHARDED:
            raise NotAStorage(
                f"{self.root}: expected a storage of format {SHARDED}, got format "
                f"{found['format']}."
            )
        return found

    def acknowledged(self) -> AcknowledgedRows:
        """Return the acknowledged rows."""
        return read_acknowledged(self.inside, self.lines_path)[0]

    def place_of(self, name: str) -> Path:
        """Return the folder of a shard."""
        return self.shards_path / name

    def open_shard(self, shard: ShardRows, *, accept_copy: bool = False) -> FileReader:
        """Open a shard, and check its identity and that it has its acknowledged rows.

        Raises:
            CorruptStorage: the shard is missing or lacks rows, or another storage is in its place.
            StorageError: the shard cannot be opened.
        """
        place = self.place_of(shard.name)
        try:
            close_all([self.inside.open_directory(place)])  # does not follow links
        except FileNotFoundError as error:
            raise CorruptStorage(
                f"{place} is missing, with {shard.rows:,} acknowledged rows that a worker on node "
                f"{shard.host} wrote. Copy the folder from that node, or resume the run to "
                "collect as many rows again."
            ) from error
        except OSError as error:
            with translated(place):
                raise error
        try:
            reader = FileReader(MemmapFormat(place), place, "read").open(accept_copy=accept_copy)
        except NotAStorage as error:
            raise CorruptStorage(
                f"{place}, which has {shard.rows:,} acknowledged rows, is damaged: {error} You can "
                "also resume the run, which collects as many rows again."
            ) from error
        if (id := reader.manifest["id"]) != shard.id:
            with reader:
                raise CorruptStorage(
                    f"{place} is another storage (its id is {id}, expected {shard.id}), and "
                    f"{shard.rows:,} acknowledged rows from node {shard.host} are missing. "
                    "Restore the folder with these rows, or resume the run to collect as many "
                    "rows again."
                )
        if reader.head < shard.rows or reader.ring:
            with reader:
                raise CorruptStorage(
                    f"{place} has {reader.head:,} rows, but {shard.rows:,} rows are acknowledged. "
                    f"Copy a newer version of the folder from node {shard.host}, or resume the "
                    "run to collect the missing rows again."
                )
        return reader

    def open_all(self, said: AcknowledgedRows, *, accept_copy: bool = False) -> list[FileReader]:
        """Open each shard that has acknowledged rows."""
        with ExitStack() as undo:
            found = [
                undo.enter_context(self.open_shard(each, accept_copy=accept_copy))
                for each in said.shards
                if each.rows
            ]
            undo.pop_all()
        return found


def entry_before(run: Mapping[str, Any], shards: int) -> dict[str, Any]:
    """Return the entry of a run that begins, or resumes, when ``shards`` shards exist."""
    return {**run, _BEFORE: shards}


def entries_in(manifest: Manifest, said: AcknowledgedRows) -> Iterator[dict[str, Any]]:
    """Yield the entries of runs, in which ``first_row`` counts acknowledged rows only."""
    for run in manifest["runs"]:
        before = run.get(_BEFORE)
        if type(before) is not int or not before >= 0:
            raise CorruptStorage(
                "the manifest of a sharded storage is damaged: expected a number of shards in "
                f"{_BEFORE}, got {before!r:.100}. Restore the manifest from a copy."
            )
        yield {**run, "first_row": sum(each.rows for each in said.shards[:before])}
