"""Set of the overlays of one storage: list, create, open and drop them."""

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
    lock_of,
    lock_overlay,
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
    """The overlays that belong to the rows of one reader."""

    def __init__(self, reader: FileReader) -> None:
        self.reader = reader
        self._files: dict[Key, OverlayFile] = {}

    def keys(self) -> list[Key]:
        """Return the keys of all overlays, in the order of their file names.

        Files that name another storage are skipped: they are leftovers of a removed storage.
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
        """The common prefix of the names of a storage's side files; empty for a directory."""
        return self._table.name.removesuffix(BESIDE[0])

    def path_of(self, key: Key) -> Path:
        """Return the path of an overlay's file.

        Raises:
            InvalidSchema: the key does not make a valid file name.
        """
        if not key or not all(isinstance(part, str) and can_be_stored(part) for part in key):
            raise InvalidSchema(
                f"overlay {key!r:.200}: expected a non-empty name without '/', or a tuple of such "
                "names. Rename the overlay."
            )
        parts = [quote(part, safe="").replace(".", "%2E") for part in key]
        name = self._first + "%2F".join(parts)
        if len(name + _SUFFIX) > _LONGEST_NAME:
            raise InvalidSchema(
                f"overlay {format_key(key)}: the name is too long for a file name. Give a shorter "
                "name."
            )
        return self._table.with_name(name + _SUFFIX)

    def __contains__(self, key: Key) -> bool:
        try:
            return os.path.lexists(self.path_of(key))
        except InvalidSchema:
            return False

    def open(self, key: Key, *, writable: bool = False) -> OverlayFile:
        """Open an existing overlay, and raise the errors of `OverlayFile`."""
        writable = writable or self.reader.mode != "read"
        known = self._files.get(key)
        if known is not None and known.is_current and (known.writable or not writable):
            return known
        found = OverlayFile(self.reader, self.path_of(key), key, writable=writable)
        self._files[key] = found  # the previous object stays open for its other users
        return found

    def made(self, kept: OverlayColumn, *, writable: bool) -> OverlayFile:
        """Return the overlay with this description, and create it if it does not exist.

        Raises:
            SchemaMismatch: the overlay exists with another dtype, shape or fill.
            InvalidSchema: the rows have a column of that name, or the overlay cannot be read
                together with the rows or with another overlay.
            ReadOnlyStorage: the overlay does not exist, and this process may not create it.
        """
        key, reader = kept.key, self.reader
        require_fits(reader.schema, kept)
        path = self.path_of(key)
        if not self._has(key):
            self._require_no_group(key)
            if not writable:
                raise ReadOnlyStorage(
                    f'{reader.path} has no overlay {format_key(key)}, and mode="read" does not '
                    "create one. Give writable=True, or create the overlay in the process that "
                    "writes the rows."
                )
            lock = lock_overlay(reader, path, key)
            try:
                if not self._has(key):
                    make_file(reader, path, kept)
            finally:
                lock.release()
        found = self.open(key, writable=writable)
        if different := kept.differences(found.header):
            raise SchemaMismatch(
                f"overlay {format_key(key)} of {reader.path} has {', '.join(different)}. Ask for "
                "the overlay with its stored dtype, shape and fill, or drop the overlay: "
                "storage.drop_overlay(name)."
            )
        return found

    def _has(self, key: Key) -> bool:
        return os.path.lexists(self.path_of(key)) and not self._is_left_over(key)

    def _require_no_group(self, key: Key) -> None:
        """Raise `InvalidSchema` if an existing overlay is a group above or below ``key``."""
        for other in self.keys():
            short = min(len(key), len(other))
            if key != other and key[:short] == other[:short]:
                raise InvalidSchema(
                    f"overlay {format_key(key)}: expected a name that can be read together with "
                    f"the overlay {format_key(other)}, got one that would be both a column and a "
                    "group. Choose another name."
                )

    def drop(self, key: Key) -> None:
        """Remove an overlay, even a damaged one.

        Raises:
            ColumnsMissing: the overlay does not exist.
            StorageLocked: another process writes to the overlay.
        """
        reader, path = self.reader, self.path_of(key)
        if not os.path.lexists(path):
            raise ColumnsMissing(
                f"{reader.path} has no overlay {format_key(key)}. Its overlays are "
                f"{', '.join(map(format_key, self.keys())) or 'none'}."
            )
        known, inside = self._files.get(key), reader.format.inside
        if known is not None and known.is_locked:
            known.close()
        lock = lock_overlay(reader, path, key)
        try:
            if (known := self._files.pop(key, None)) is not None:
                known.close()
            try:
                file = OverlayFile(reader, path, key, writable=True)
            except StorageError:
                pass  # damaged: remove it; no process can have it open
            else:
                file.mark_dropped()
                file.close()
            with translated(path):
                inside.remove(path)
                inside.remove(lock_of(path))
        finally:
            lock.release()

    def flush(self) -> None:
        """Flush to the disk the values of all overlays that are open for writing."""
        for file in self._files.values():
            if file.writable and file.is_open:
                file.flush()

    def close(self) -> None:
        """Close all files."""
        files, self._files = self._files, {}
        for file in files.values():
            file.close()


def require_fits(schema: Schema, kept: OverlayColumn) -> None:
    """Raise `InvalidSchema` unless an overlay can be read together with the columns of a schema."""
    if kept.key in schema:
        raise InvalidSchema(
            f"overlay {format_key(kept.key)}: the rows have a column of this name, and rows never "
            "change. Give the overlay another name."
        )
    try:
        Schema((*schema.columns, kept.column), schema.batch_dims)
    except InvalidSchema as error:
        raise InvalidSchema(
            f"overlay {format_key(kept.key)} cannot be read together with the rows: {error}"
        ) from error


def _key_in(name: str, first: str) -> Key | None:
    """Return the key that a file name encodes; None if the file is not an overlay."""
    if not name.startswith(first) or not name.endswith(_SUFFIX):
        return None
    middle = name[len(first) : -len(_SUFFIX)]
    if not middle or "." in middle:
        return None
    return tuple(unquote(part) for part in middle.split("%2F"))
