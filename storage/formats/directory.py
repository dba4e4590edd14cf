"""Base class of formats whose storages are directories, with creation and removal of files."""

from __future__ import annotations

import contextlib
import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tallyroll.storage.errors import CorruptStorage, DirectoryNotEmpty, NotAStorage
from tallyroll.storage.files.commit_header import (
    HEADER_NBYTES,
    committed_counts,
)
from tallyroll.storage.files.header_identity import refuse_newer
from tallyroll.storage.files.manifest import Manifest, read_manifest, write_manifest
from tallyroll.storage.files.paths import refuse_impossible, require_creatable, translated
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.metadata_checks import wrong_documents
from tallyroll.storage.rows.schema import Schema


class DirectoryFormat(Format):
    """Format of a storage that occupies a whole directory."""

    @abstractmethod
    def _owns(self, name: Path) -> bool:
        """Return True if a file of that name, relative to the root, may belong to the format."""

    def refuse_existing(self) -> None:
        """Raise unless the path is free, an empty directory, or an unfinished creation."""
        refuse_impossible(self.manifest_path)
        self._refuse_storage()
        self._refuse_lost_manifest()
        require_creatable(self.path)
        if self.path.is_dir() and (foreign := self._foreign()):
            raise DirectoryNotEmpty(
                f"{self.path} is not empty: it holds {foreign}. A new storage needs a directory of "
                "its own. Give another path."
            )

    def read_manifest(self) -> Manifest:
        """Return the manifest.

        If the manifest cannot be read, the header shows whether a later version wrote the storage.

        Raises:
            FormatVersionMismatch: a later version of Tallyroll wrote the storage.
            NotAStorage, CorruptStorage: see `manifest.read_manifest`.
        """
        try:
            return read_manifest(self.inside, self.manifest_path)
        except (NotAStorage, CorruptStorage):
            with contextlib.suppress(OSError):
                header = self.inside.read_start(self.header_path, HEADER_NBYTES)
                refuse_newer(header, self.header_path)
            raise

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest atomically."""
        write_manifest(self.inside, self.manifest_path, manifest, durable=self.durable)

    def _refuse_lost_manifest(self) -> None:
        """Raise `CorruptStorage` if rows are committed, because then the creation was finished."""
        try:
            header = self.inside.read_start(self.header_path, HEADER_NBYTES)
            reserve, head = committed_counts(header)
        except OSError:
            return
        refuse_newer(header, self.header_path)
        if reserve or head:
            raise CorruptStorage(
                f"{self.path} has {head} committed rows, but {self.manifest_path.name}, which "
                "describes them, is missing. Restore that file from a copy, or delete the "
                "directory and use its path again."
            )

    def _foreign(self) -> str | None:
        if not any(self.path.iterdir()):
            return None
        files = [file for file in self.path.rglob("*") if file.is_symlink() or not file.is_dir()]
        foreign = [file for file in files if not self._owns(file.relative_to(self.path))]
        # Check the lock first: without it, these files are not from an unfinished creation.
        if self.lock_path.exists() and not foreign:
            return None
        if set(self.path.rglob("*")) == {self.lock_path.parent}:  # killed before the lock was made
            return None
        return (foreign[0] if foreign else next(self.path.iterdir())).name

    def refuse_missing(self) -> None:
        """Raise unless the path is a directory."""
        super().refuse_missing()
        if not self.path.is_dir():
            raise NotAStorage(
                f"{self.path} is a file, but a storage of this format is a directory. Give the "
                "path of the directory."
            )

    def discard(self) -> None:
        """Remove files of an unfinished creation, and directories that become empty."""
        for place in sorted(self.path.rglob("*"), reverse=True):
            if place == self.lock_path:
                continue
            if place.is_dir() and not place.is_symlink():
                self.inside.remove_directory(place)
            elif self._owns(place.relative_to(self.path)):
                self.inside.remove(place)

    def undo(self, *, made: bool) -> None:
        """Remove the files and lock of a failed creation, and the directory if it was ``made``."""
        super().undo(made=made)
        for place in sorted(self.path.rglob("*"), reverse=True):
            if place.is_dir() and not place.is_symlink():
                self.inside.remove_directory(place)
        if made:
            with contextlib.suppress(OSError):  # the error of the creation is more informative
                self.path.rmdir()

    def create(self, schema: Schema, header: bytes, capacity: int = 0) -> None:
        """Create the header and the files of a storage without rows, but not the manifest."""
        self.discard()
        self.schema = schema
        with translated(self.path, len(header)):
            self._make_columns(capacity)
        self.publish(0)
        with (
            translated(self.path, len(header)),
            open(self.inside.make(self.header_path), "wb") as target,
        ):
            os.posix_fallocate(target.fileno(), 0, len(header))
            target.write(header)
            target.flush()
            os.fsync(target.fileno())
        self._sync_names()

    @abstractmethod
    def _make_columns(self, capacity: int) -> None:
        """Create the directories of the columns, and their initial files."""

    @abstractmethod
    def _documents(self, rows: int) -> Mapping[Path, Any]:
        """Return the JSON for other libraries that shows ``rows`` rows, by file, in write order."""

    def publish(self, rows: int) -> None:
        """Write the metadata for other libraries that shows ``rows`` rows, the root last."""
        self._show(self._documents(rows))

    def _show(self, documents: Mapping[Path, Any]) -> None:
        with translated(self.path, 4096):
            for file, document in documents.items():
                content = json.dumps(document).encode()
                self.inside.write_atomically(file, content, synced=self.durable)

    def replaced_files(self) -> set[Path]:
        """Return the manifest, the files alongside the rows, and the files for other libraries."""
        return {self.manifest_path, *self.beside, self.events_path, *self._documents(0)}

    def shown_wrongly(self, head: Callable[[], int]) -> Iterator[str]:
        """Compare the metadata for other libraries with the expected content."""
        return wrong_documents(self.inside, self._documents, head)
