"""Files of a packed storage: a Zarr group or an HDF5 file.

::

    DIR/zarr.json                      the root group: schema, provenance
    DIR/action/zarr.json               a column that is stored as an array
    DIR/action/c.0, c.1, ...           its shards
    DIR/observation/frames/            the frames of a column that is stored as states
    DIR/observation/breaks/, starts/   the rows and states that do not continue the previous one
    DIR/tallyroll/row/                 the row numbers in the source storage
    DIR/tallyroll/manifest.json        the manifest, with the layout of the packed rows
    DIR/tallyroll/episodes.npy         the table of episodes
    DIR/tallyroll/trajectories.index   the positions of the rows of trajectories
"""
# ruff: noqa: D102 - `Archive` documents the methods of all archives

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from tallyroll.storage.errors import NotAStorage
from tallyroll.storage.ext.packed.chunk_cache import Chunks
from tallyroll.storage.ext.packed.documents import documents
from tallyroll.storage.ext.packed.front import LEAST, front_in
from tallyroll.storage.ext.packed.layout import FORMAT, ArrayLayout, Layout
from tallyroll.storage.ext.packed.shards import LocalFiles, ShardChunks
from tallyroll.storage.files.manifest import Manifest, read_manifest
from tallyroll.storage.files.safe_files import Inside, open_any
from tallyroll.storage.formats.metadata_checks import differs
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks
from tallyroll.storage.trajectories.episode_file import read_table
from tallyroll.storage.trajectories.index_file import IndexOwner, read_index

OURS: Final = "tallyroll"
MANIFEST, EPISODES, INDEX = "manifest.json", "episodes.npy", "trajectories.index"


class Archive(ABC):
    """Interface to the files of a packed storage."""

    path: Path

    @abstractmethod
    def is_there(self) -> bool:
        """Return True if the path contains packed rows, damaged or not."""

    @abstractmethod
    def read_manifest(self) -> Manifest:
        """Return the manifest.

        Raises the errors of the function `read_manifest`.
        """

    @abstractmethod
    def chunks(self, layout: ArrayLayout) -> Chunks:
        """Return the chunks of an array."""

    def read_episodes(self, dtype: np.dtype[Any], rows: int) -> np.ndarray | None:
        """Return the table of episodes, or None if there is none.

        Raises the errors of `read_table`.
        """
        return None

    def read_index(self, owner: IndexOwner, rows: int, *, whole: bool) -> SavedBlocks | None:
        """Return the index of trajectories, or None if there is none.

        The index covers at most ``rows`` rows. Raises the errors of `read_index`.
        """
        return None

    def shown_wrongly(self, layout: Layout, manifest: Manifest) -> Iterator[str]:
        """Yield faults in the metadata that other libraries read."""
        return iter(())

    def close(self) -> None:  # noqa: B027 - a directory keeps no file open
        """Close all files."""


def changed_documents(
    path: Path, wanted: Mapping[PurePosixPath, Any], read: Callable[[Path], Any], remedy: str
) -> Iterator[str]:
    """Yield a sentence for each ``zarr.json`` below ``path`` that is not as ``wanted``."""
    for place, document in wanted.items():
        file = path / place / "zarr.json"
        try:
            found = read(file)
        except (OSError, ValueError, RecursionError) as error:
            yield f"{file} cannot be read by other libraries ({error})."
            continue
        if json.dumps(found, sort_keys=True) != json.dumps(document, sort_keys=True):
            yield str(differs(file, remedy))


class ZarrArchive(Archive):
    """Files of a Zarr group."""

    def __init__(self, path: Path) -> None:
        self.path, self.inside = path, Inside(path)

    @property
    def ours(self) -> Path:
        """The directory of Tallyroll's own files."""
        return self.path / OURS

    def is_there(self) -> bool:
        try:
            return bool(self.read_manifest()["format"] == FORMAT)
        except NotAStorage:
            return False

    def read_manifest(self) -> Manifest:
        return read_manifest(self.inside, self.ours / MANIFEST)

    def chunks(self, layout: ArrayLayout) -> Chunks:
        return ShardChunks(LocalFiles(self.inside), layout)

    def read_episodes(self, dtype: np.dtype[Any], rows: int) -> np.ndarray | None:
        return read_table(self.inside, self.ours / EPISODES, dtype, rows)

    def read_index(self, owner: IndexOwner, rows: int, *, whole: bool) -> SavedBlocks | None:
        return read_index(self.inside, self.ours / INDEX, owner, lambda: rows, whole=whole)

    def shown_wrongly(self, layout: Layout, manifest: Manifest) -> Iterator[str]:
        wanted, remedy = documents(layout, manifest), "restore it from a copy"
        return changed_documents(self.path, wanted, self.inside.read_json, remedy)


class Hdf5Archive(Archive):
    """An HDF5 file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def is_there(self) -> bool:
        from tallyroll.storage.ext.packed.hdf5 import is_packed

        return is_packed(self.path)

    def read_manifest(self) -> Manifest:
        from tallyroll.storage.ext.packed.hdf5 import opened, stored_manifest

        self._file = opened(self.path)
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            found = stored_manifest(self._file, self.path)
            stack.pop_all()
        return found

    def chunks(self, layout: ArrayLayout) -> Chunks:
        from tallyroll.storage.ext.packed.hdf5 import DatasetChunks

        return DatasetChunks(self._file, self.path, layout)

    def shown_wrongly(self, layout: Layout, manifest: Manifest) -> Iterator[str]:
        with open(open_any(self.path, os.O_RDONLY | os.O_CLOEXEC), "rb") as file:
            if self._file.userblock_size > LEAST and front_in(file) is None:
                yield (
                    f"{self.path} has no complete copy of its metadata at its front, which a "
                    "repair of the file would need."
                )

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
