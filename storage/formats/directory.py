"""The base of formats that are directories: which files may be there, and their removal."""

from __future__ import annotations

import contextlib
import os
from abc import abstractmethod
from pathlib import Path

from tallyroll.storage.errors import (
    CorruptStorage,
    DirectoryNotEmpty,
    NotAStorage,
    NotWritable,
    StorageExists,
    StorageMissing,
)
from tallyroll.storage.files.commit_header import (
    HEADER_NBYTES,
    committed_counts,
    refuse_newer,
    refuse_newer_header,
)
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.files.paths import (
    failed,
    make_directory,
    refuse_impossible,
    require_creatable,
)
from tallyroll.storage.formats.base import Format

__all__ = ["DirectoryFormat"]


class DirectoryFormat(Format):
    """A storage that is a directory of its own."""

    @abstractmethod
    def _owns(self, name: Path) -> bool:
        """Whether a file of that name, from the root, may be one of the format's own."""

    def refuse_existing(self) -> None:
        """Accept a path where nothing is, an empty directory, or an unfinished creation."""
        refuse_impossible(self.manifest_path)
        if self.manifest_path.exists():
            raise StorageExists(
                f'{self.path} holds a storage already. Open it with mode="append" to add rows to '
                "it, or give another path."
            )
        self._refuse_lost_manifest()
        if not self.path.is_dir():
            require_creatable(self.path)
        elif not os.access(self.path, os.W_OK | os.X_OK):
            raise NotWritable(f"{self.path} cannot be written to. Give a path that can.")
        elif foreign := self._foreign():
            raise DirectoryNotEmpty(
                f"{self.path} is not empty: it holds {foreign}. A new storage needs a directory "
                "of its own; give another path."
            )

    def read_manifest(self) -> Manifest:
        """The manifest. Where there is none that can be read, the header may be a later version's.

        Raises:
            FormatVersionMismatch: a later Tallyroll wrote it.
            NotAStorage, CorruptStorage: as `Format.read_manifest`.
        """
        try:
            return super().read_manifest()
        except (NotAStorage, CorruptStorage):
            refuse_newer_header(self.inside, self.header_path)
            raise

    def _refuse_lost_manifest(self) -> None:
        """An unfinished creation has committed nothing; anything else is somebody's data."""
        try:
            header = self.inside.read_start(self.header_path, HEADER_NBYTES)
            reserve, head = committed_counts(header)
        except OSError:
            return
        refuse_newer(header, self.header_path)
        if reserve or head:
            raise CorruptStorage(
                f"{self.path} has {head} committed rows and no {self.manifest_path.name}, which "
                "says what they are. Restore it from a copy; or delete the directory, and give it "
                "again."
            )

    def _foreign(self) -> str | None:
        if not any(self.path.iterdir()):
            return None
        files = [file for file in self.path.rglob("*") if file.is_symlink() or not file.is_dir()]
        foreign = [file for file in files if not self._owns(file.relative_to(self.path))]
        # The lock comes first: without it these files are not from a creation of ours.
        if self.lock_path.exists() and not foreign:
            return None
        if set(self.path.rglob("*")) == {self.lock_path.parent}:  # killed before it made its lock
            return None
        return (foreign[0] if foreign else next(self.path.iterdir())).name

    def refuse_missing(self) -> None:
        """Accept a directory."""
        refuse_impossible(self.manifest_path)
        if not self.path.exists():
            raise StorageMissing(
                f'{self.path} does not exist. Give the path of a storage, or use mode="create".'
            )
        if not self.path.is_dir():
            raise NotAStorage(
                f"{self.path} is a file, and this storage is a directory. Give its path."
            )

    def prepare(self) -> None:
        """Make the directory."""
        make_directory(self.path)
        try:
            self.inside.make_directory(self.lock_path.parent)
        except OSError as error:
            raise failed(self.lock_path.parent, error, 0) from error

    def discard(self) -> None:
        """Remove files of an unfinished creation, and directories that it leaves empty."""
        for place in sorted(self.path.rglob("*"), reverse=True):
            if place == self.lock_path:
                continue
            if place.is_dir() and not place.is_symlink():
                self.inside.remove_directory(place)
            elif self._owns(place.relative_to(self.path)):
                self.inside.remove(place)

    def undo(self, *, made: bool) -> None:
        """Remove what a failed creation left, its lock too, and the directory if it ``made`` it."""
        self.discard()
        self.inside.remove(self.lock_path)
        for place in sorted(self.path.rglob("*"), reverse=True):
            if place.is_dir() and not place.is_symlink():
                self.inside.remove_directory(place)
        if made:
            with contextlib.suppress(OSError):  # the error of the creation says more
                self.path.rmdir()

    def _write_header(self, header: bytes) -> None:
        try:
            with open(self.inside.make(self.header_path), "wb") as target:
                os.posix_fallocate(target.fileno(), 0, len(header))
                target.write(header)
                target.flush()
                os.fsync(target.fileno())
        except OSError as error:
            raise failed(self.path, error, len(header)) from error

    @abstractmethod
    def _documents(self) -> set[Path]:
        """The files that are written aside, one or more in every directory of the format."""

    def settle(self) -> None:
        """Sync rows, then metadata, then names, from the inside out."""
        files = self._documents()
        try:
            self.sync()
            for file in sorted(files):
                self.inside.sync(file)
            for directory in sorted({file.parent for file in files}, reverse=True):
                self.inside.sync_directory(directory)
        except OSError as error:
            raise failed(self.path, error, 0) from error

    def _sync_directories(self, directories: set[Path]) -> None:
        for directory in {self.path, *directories}:
            self.inside.sync_directory(directory)
