"""The overlays of one storage: which there are, made, opened and dropped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from tallyroll.storage.errors import (
    ColumnsMissing,
    InvalidSchema,
    ReadOnlyStorage,
    SchemaMismatch,
    StorageError,
)
from tallyroll.storage.ext.overlays.header import HEADER_NBYTES, OverlayColumn, is_of_another
from tallyroll.storage.ext.overlays.overlay_file import (
    OverlayFile,
    acquire,
    lock_of,
    make_file,
    owner_of,
)
from tallyroll.storage.files.paths import translated
from tallyroll.storage.files.safe_files import closing
from tallyroll.storage.formats.base import BESIDE
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.rows.keys import Key, can_be_stored, format_key
from tallyroll.storage.rows.schema import Schema

_SUFFIX: Final = ".overlay"
_LONGEST_NAME: Final = 255 - len(".lock")


class Overlays:
    """The overlays beside the rows of one reader. A reader may come and go meanwhile."""

    def __init__(self, reader: FileReader) -> None:
        self.reader = reader
        self._files: dict[Key, OverlayFile] = {}

    def keys(self) -> list[Key]:
        """Return the keys of all overlays that there are, by their files' names.

        Files that name another storage are left out: they stayed when it was removed.
        """
        folder, inside = self._table.parent, self.reader.format.inside
        with (
            translated(folder),
            closing(inside.open_directory(folder)) as directory,
            os.scandir(directory) as entries,
        ):
            names = [each.name for each in entries if not each.is_dir(follow_symlinks=False)]
        found = (_key_in(name, self._first) for name in sorted(names))
        return [key for key in found if key is not None and not self._is_left_over(key)]

    def _is_left_over(self, key: Key) -> bool:
        """Return True if the file of a key is an overlay of another storage."""
        path = self.path_of(key)
        try:
            page = self.reader.format.inside.read_start(path, HEADER_NBYTES)
        except OSError:
            return False
        return is_of_another(page, path, owner_of(self.reader))

    @property
    def _table(self) -> Path:
        return self.reader.format.episodes_path

    @property
    def _first(self) -> str:
        """The beginning of the names of all files beside the rows; empty in a directory."""
        return self._table.name.removesuffix(BESIDE[0])

    def path_of(self, key: Key) -> Path:
        """Return the file of an overlay.

        Raises:
            InvalidSchema: no file can have the name.
        """
        if not key or not all(isinstance(part, str) and can_be_stored(part) for part in key):
            raise InvalidSchema(
                f"overlay {key!r:.200}: expected a name, or a tuple of names, each not empty and "
                "without '/'. Rename it."
            )
        parts = [quote(part, safe="").replace(".", "%2E") for part in key]
        name = self._first + "%2F".join(parts)
        if len(name + _SUFFIX) > _LONGEST_NAME:
            raise InvalidSchema(f"overlay {format_key(key)}: the name is too long for a file name.")
        return self._table.with_name(name + _SUFFIX)

    def __contains__(self, key: Key) -> bool:
        try:
            return os.path.lexists(self.path_of(key))
        except InvalidSchema:
            return False

    def open(self, key: Key, *, writable: bool = False) -> OverlayFile:
        """Return an overlay that is there; raise as `OverlayFile` does."""
        writable = writable or self.reader.mode != "read"
        known = self._files.get(key)
        if known is not None and known.is_current and (known.writable or not writable):
            return known
        found = OverlayFile(self.reader, self.path_of(key), key, writable=writable)
        self._files[key] = found  # others may use the one before, which is closed with the last
        return found

    def made(self, kept: OverlayColumn, *, writable: bool) -> OverlayFile:
        """Return the overlay that keeps this, which is made if there is none.

        Raises:
            SchemaMismatch: there is one that keeps something else.
            InvalidSchema: the rows have a column of that name, or it cannot be read together with
            them or with another overlay.
            ReadOnlyStorage: there is none, and this process may not make it.
        """
        key, reader = kept.key, self.reader
        require_fits(reader.schema, kept)
        path = self.path_of(key)
        if not self._has(key):
            self._require_no_group(key)
            if not writable:
                raise ReadOnlyStorage(
                    f'{reader.path} has no overlay {format_key(key)}, and mode="read" makes none. '
                    "Give writable=True, or make it in the process that writes the rows."
                )
            lock = acquire(reader, path, key)
            try:
                if not self._has(key):
                    make_file(reader, path, kept)
            finally:
                lock.release()
        found = self.open(key, writable=writable)
        if different := kept.differences(found.kept):
            raise SchemaMismatch(
                f"overlay {format_key(key)} of {reader.path} has {', '.join(different)}. Ask for "
                "it as it is, or drop it: storage.drop_overlay(name)."
            )
        return found

    def _has(self, key: Key) -> bool:
        return os.path.lexists(self.path_of(key)) and not self._is_left_over(key)

    def _require_no_group(self, key: Key) -> None:
        """Raise `InvalidSchema` if an overlay is a group that holds ``key``, or the reverse."""
        for other in self.keys():
            short = min(len(key), len(other))
            if key != other and key[:short] == other[:short]:
                raise InvalidSchema(
                    f"overlay {format_key(key)}: expected a name that can be read together with "
                    f"the overlay {format_key(other)}, got one that would be both a column and a "
                    "group. Give it another name."
                )

    def drop(self, key: Key) -> None:
        """Remove an overlay, damaged or not.

        Raises:
            ColumnsMissing: there is none.
            StorageLocked: another process writes to it.
        """
        reader, path = self.reader, self.path_of(key)
        if not os.path.lexists(path):
            raise ColumnsMissing(
                f"{reader.path} has no overlay {format_key(key)}; it has "
                f"{', '.join(map(format_key, self.keys())) or 'none'}."
            )
        known, inside = self._files.get(key), reader.format.inside
        if known is not None and known.is_locked:
            known.close()
        lock = acquire(reader, path, key)
        try:
            if (known := self._files.pop(key, None)) is not None:
                known.close()
            try:
                file = OverlayFile(reader, path, key, writable=True)
            except StorageError:
                pass  # it is damaged: then it goes, and no process has it open
            else:
                file.mark_dropped()
                file.close()
            with translated(path):
                inside.remove(path)
                inside.remove(lock_of(path))
        finally:
            lock.release()

    def flush(self) -> None:
        """Return when the values of all that were opened to be written are on the disk."""
        for file in self._files.values():
            if file.writable and file.is_open:
                file.flush()

    def close(self) -> None:
        """Close all files."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()


def require_fits(schema: Schema, kept: OverlayColumn) -> None:
    """Raise `InvalidSchema` unless an overlay can be read beside the columns of a schema."""
    if kept.key in schema:
        raise InvalidSchema(
            f"{format_key(kept.key)} is a column of the rows, which never change. Give the overlay "
            "another name."
        )
    try:
        Schema((*schema.columns, kept.column), schema.batch_dims)
    except InvalidSchema as error:
        raise InvalidSchema(
            f"overlay {format_key(kept.key)} does not fit beside the rows: {error}"
        ) from error


def _key_in(name: str, first: str) -> Key | None:
    """Return the key that a file's name says; None for a file that is no overlay."""
    if not name.startswith(first) or not name.endswith(_SUFFIX):
        return None
    middle = name[len(first) : -len(_SUFFIX)]
    if not middle or "." in middle:
        return None
    return tuple(unquote(part) for part in middle.split("%2F"))
