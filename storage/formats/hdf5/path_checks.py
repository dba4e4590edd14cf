"""A storage that is one file with a user block of ours: what may be at its path."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tallyroll.storage.errors import (
    NotAStorage,
    NotWritable,
    PathIsDirectory,
    PathIsTaken,
    StorageExists,
    StorageMissing,
)
from tallyroll.storage.files.paths import (
    failed,
    make_directory,
    refuse_impossible,
    require_creatable,
)
from tallyroll.storage.formats.base import Format
from tallyroll.storage.formats.hdf5.replace import aside, open_file, opened
from tallyroll.storage.formats.hdf5.user_block import is_hdf5, is_ours, newest_manifest
from tallyroll.storage.formats.newer_versions import refuse_newer_file

__all__ = ["OneFileFormat"]


class OneFileFormat(Format):
    """A storage that is one file, with its lock file beside it."""

    def __init__(self, path: Path) -> None:
        # Not a link's: the file is replaced at times, and two names would be two locks.
        path = Path(os.path.realpath(path))
        super().__init__(path, path.parent)

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(self.path.name + suffix)

    @property
    def lock_path(self) -> Path:
        """The writer's lock file, beside the file."""
        return self._beside(".lock")

    @property
    def header_path(self) -> Path:
        """The file itself, whose user block begins with the header."""
        return self.path

    @property
    def manifest_path(self) -> Path:
        """The file itself, whose user block holds the manifest."""
        return self.path

    @property
    def episodes_path(self) -> Path:
        """The table of episodes, beside the file."""
        return self._beside(".episodes.npy")

    def open_header(self, flags: int) -> int:
        """A descriptor of the file."""
        return open_file(self.path, flags)

    def stands(self) -> bool:
        """Whether there is a file of ours with a manifest in it."""
        try:
            with opened(self.path, os.O_RDONLY) as file:
                return is_ours(self.path) and newest_manifest(file) is not None
        except OSError:
            return False

    def refuse_existing(self) -> None:
        """Accept a path where nothing is, or an unfinished creation."""
        refuse_impossible(self.lock_path)
        if self.path.is_dir():
            raise PathIsDirectory(
                f"{self.path} should be a file, and is a directory. Give the path of a new file."
            )
        if not self.path.exists():
            require_creatable(self.path.parent)
        elif not is_ours(self.path):
            raise PathIsTaken(
                f"{self.path} is {_what(self.path)} already. Give the path of a new file."
            )
        else:
            self._refuse_storage()

    def _refuse_storage(self) -> None:
        if self.stands():
            raise StorageExists(
                f'{self.path} holds a storage already. Open it with mode="append" to add rows to '
                "it, or give another path."
            )
        with contextlib.suppress(NotAStorage):
            self.read_manifest()
        if not os.access(self.path.parent, os.W_OK | os.X_OK):
            raise NotWritable(f"{self.path.parent} cannot be written to. Give a path that can.")

    def refuse_missing(self) -> None:
        """Accept a file with a user block of ours."""
        refuse_impossible(self.path)
        if not self.path.exists():
            raise StorageMissing(
                f'{self.path} does not exist. Give the path of a storage, or use mode="create".'
            )
        if self.path.is_dir():
            raise NotAStorage(
                f"{self.path} is a directory, and this storage is a file. Give its path; "
                "tallyroll.storage.open_storage(path) opens any format."
            )
        if not os.access(self.path, os.R_OK):
            raise NotWritable(f"{self.path} cannot be read: permission denied.")
        if not is_ours(self.path):
            refuse_newer_file(self.path)
            raise NotAStorage(
                f"{self.path} is {_what(self.path)}, not a Tallyroll storage. Give the path of a "
                "storage."
            )

    def prepare(self) -> None:
        """Make the directory that the file lies in."""
        make_directory(self.path.parent)

    def settle(self) -> None:
        """Sync the file, the table of episodes, and their names."""
        try:
            self.sync()
            self.inside.sync(self.episodes_path)
            self.inside.sync_directory(self.path.parent)
        except OSError as error:
            raise failed(self.path, error, 0) from error

    def discard(self) -> None:
        """Remove an unfinished file, and an unfinished copy."""
        self.inside.remove(aside(self.path))
        self.inside.remove(self.path)

    def undo(self, *, made: bool) -> None:
        """Remove what a failed creation left, its lock too."""
        self.discard()
        self.inside.remove(self.lock_path)


def _what(path: Path) -> str:
    if not path.is_file():
        return "no plain file"
    if not path.stat().st_size:
        return "an empty file"
    return "an HDF5 file of another program" if is_hdf5(path) else "a file of another program"
