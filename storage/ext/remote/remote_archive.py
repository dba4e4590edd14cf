"""An `Archive` of packed rows in an object store."""
# ruff: noqa: D102 - `Archive` documents the methods of all archives

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import CorruptStorage, DamagedTable, NotAStorage, StorageMissing
from tallyroll.storage.ext.packed.archives import (
    EPISODES,
    INDEX,
    MANIFEST,
    OURS,
    Archive,
    changed_documents,
)
from tallyroll.storage.ext.packed.chunk_cache import Chunks
from tallyroll.storage.ext.packed.documents import documents
from tallyroll.storage.ext.packed.layout import FORMAT, ArrayLayout, Layout
from tallyroll.storage.ext.packed.packed_reader import PackedReader
from tallyroll.storage.ext.packed.shards import ShardChunks
from tallyroll.storage.ext.remote.address import S3Path, s3_path
from tallyroll.storage.ext.remote.objects import Objects
from tallyroll.storage.ext.remote.options import S3Options
from tallyroll.storage.ext.remote.push_plan import PLAN
from tallyroll.storage.ext.remote.ranges import ObjectFiles
from tallyroll.storage.files.manifest import MANIFEST_LIMIT, Manifest, parse_manifest
from tallyroll.storage.files.paths import user_path
from tallyroll.storage.files.safe_files import JSON_LIMIT, Inside
from tallyroll.storage.readers.file_reader import Mode
from tallyroll.storage.storages import ReaderStorage, require_reading
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.episode_file import read_table
from tallyroll.storage.trajectories.index_file import IndexOwner, UnusableIndex, read_index

_THREADS: Final = 8
_TABLE_LIMIT: Final = 2**32


def open_at(
    path: str | os.PathLike[str], mode: Mode, *, s3: S3Options | None = None, **_: object
) -> ReaderStorage:
    """Open the packed dataset at an address for reading; see `open_storage`."""
    place = s3_path(path)
    if place is None:
        user_path(path)  # raises an error, because the address has another scheme
        raise AssertionError
    require_reading(str(place), mode)
    return ReaderStorage(opened(place, s3 or S3Options()), mode, path=str(place), s3=s3)


def opened(place: S3Path, options: S3Options) -> PackedReader:
    """Return a reader of the dataset at an address.

    Raises:
        StorageMissing: there is nothing at the address.
        NotAStorage: the dataset was pushed only in part, or is not a packed dataset.
        ObjectStoreFailed: the store rejects a request, or does not answer in time.
        MissingLibrary: the extra ``s3`` is not installed.
    """
    archive = RemoteArchive(place, options)
    with contextlib.ExitStack() as stack:
        stack.callback(archive.close)
        reader = PackedReader(archive, threads=_THREADS)
        stack.pop_all()
    return reader


class RemoteArchive(Archive):
    """A Zarr group in an object store, as it was when it was opened."""

    def __init__(self, place: S3Path, options: S3Options) -> None:
        self.path: S3Path = place
        self.files = ObjectFiles(Objects(place, options))

    def is_there(self) -> bool:
        return bool(self.read_manifest()["format"] == FORMAT)

    def read_manifest(self) -> Manifest:
        place, listed = self.path / OURS / MANIFEST, self.files.listed
        if not listed:
            raise StorageMissing(
                f"there are no objects at {self.path}. Give the address of a dataset that was "
                "pushed."
            )
        if f"{OURS}/{MANIFEST}" not in listed:
            if PLAN in listed:
                raise NotAStorage(
                    f"{self.path} was pushed in part: its last object, {OURS}/{MANIFEST}, is "
                    "missing. Wait for the running push, or push the dataset again: that resumes "
                    "the push."
                )
            raise NotAStorage(
                f"{self.path} is not a packed dataset: it has no {OURS}/{MANIFEST}. Give the "
                "address of a dataset that was packed with `tallyroll pack` and pushed with "
                "`tallyroll push`."
            )
        found = parse_manifest(self._whole(place, MANIFEST_LIMIT), place)
        if found["format"] != FORMAT:
            raise NotAStorage(
                f"{self.path} has the format {found['format']}, and Tallyroll reads only packed "
                "datasets from object stores. Pack the rows with `tallyroll pack`, and push the "
                "result."
            )
        return found

    def _whole(self, path: Path, limit: int) -> bytes:
        try:
            return self.files.whole(path, limit)
        except ValueError as error:
            raise CorruptStorage(
                f"{path} cannot be read: {error}. Push the dataset again."
            ) from error

    def chunks(self, layout: ArrayLayout) -> Chunks:
        return ShardChunks(self.files, layout)

    @contextlib.contextmanager
    def _copied(self, name: str, limit: int) -> Iterator[tuple[Inside, Path] | None]:
        """Yield a local copy of an object, or None if there is no such object.

        The copy is removed at the end. A memory map of the copy remains valid, because the system
        keeps the bytes of a file while it is mapped.
        """
        path = self.path / OURS / name
        if f"{OURS}/{name}" not in self.files.listed:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="tallyroll-") as folder:
            copy = Path(folder, name)
            copy.write_bytes(self._whole(path, limit))
            try:
                yield Inside(Path(folder)), copy
            except (DamagedTable, UnusableIndex) as error:
                raise type(error)(str(error).replace(str(copy), str(path))) from None

    def read_episodes(self, dtype: np.dtype[Any], rows: int) -> np.ndarray | None:
        with self._copied(EPISODES, min(_TABLE_LIMIT, rows * dtype.itemsize + 2**17)) as copy:
            return None if copy is None else read_table(*copy, dtype, rows)

    def read_index(self, owner: IndexOwner, rows: int, *, whole: bool) -> SavedBlocks | None:
        with self._copied(INDEX, _TABLE_LIMIT) as copy:
            if copy is None:
                return None
            return read_index(*copy, owner, lambda: rows, whole=whole)

    def shown_wrongly(self, layout: Layout, manifest: Manifest) -> Iterator[str]:
        def read(file: Path) -> Any:
            return json.loads(self.files.whole(file, JSON_LIMIT))

        return changed_documents(self.path, documents(layout, manifest), read, "push it again")

    def close(self) -> None:
        self.files.end()
