"""Reader of rows together with overlays, which appear as further columns."""
# ruff: noqa: D102 - `RowReader` documents these methods

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tallyroll.storage.ext.overlays.overlay_file import OverlayFile
from tallyroll.storage.files.manifest import Manifest
from tallyroll.storage.readers.file_reader import FileReader
from tallyroll.storage.readers.row_reader import ColumnReader, RowReader
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.origin import Origin
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.blocks.saved_blocks import SavedBlocks


class _OverlayColumn(ColumnReader):
    """Adapter that reads an overlay as a column."""

    def __init__(self, file: OverlayFile) -> None:
        self._file = file

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        return self._file.take(rows, out)

    def slice(self, start: int, stop: int) -> np.ndarray:
        return self._file.take(np.arange(start, stop))


class OverlaidReader(RowReader):
    """Reader that appends overlays to the columns of another reader.

    Args:
        rows: the reader of the rows. It stays open when this one is closed.
        overlays: the overlays, in the order of their columns.
    """

    def __init__(self, rows: FileReader, overlays: Sequence[OverlayFile]) -> None:
        self.rows, self.path, self.ring = rows, rows.path, rows.ring
        self.copied_as, self.trajectory_index = rows.copied_as, rows.trajectory_index
        self._added = {each.key: each for each in overlays}
        schema = rows.schema
        added = [each.header.column for each in overlays]
        self._schema = Schema((*schema.columns, *added), schema.batch_dims)

    def require_open(self) -> None:
        self.closed = self.rows.closed
        super().require_open()

    def close(self) -> None:
        """Do nothing: the owner of the underlying reader closes it."""

    @property
    def schema(self) -> Schema:
        self.rows.running()
        return self._schema

    @property
    def keys(self) -> tuple[Key, ...]:
        return self._schema.keys

    @property
    def span(self) -> range:
        return self.rows.span

    @property
    def manifest(self) -> Manifest:
        return self.rows.manifest

    @property
    def initialised(self) -> bool:
        return self.rows.initialised

    @property
    def floor(self) -> int:
        return self.rows.floor

    @property
    def last_head(self) -> int:
        return self.rows.last_head

    @property
    def rewinds(self) -> int:
        return self.rows.rewinds

    @property
    def rewinding(self) -> bool:
        return self.rows.rewinding

    @property
    def revision(self) -> int:
        return self.rows.revision

    @property
    def id(self) -> str | None:
        return self.rows.id

    @property
    def origin(self) -> Origin:
        return self.rows.origin

    @property
    def record(self) -> tuple[int, bytes] | None:
        return self.rows.record

    @property
    def record_damaged(self) -> bool:
        return self.rows.record_damaged

    @property
    def left_open(self) -> bool:
        return self.rows.left_open

    @property
    def is_written(self) -> bool:
        return self.rows.is_written

    def kept_index(self, *, whole: bool = False) -> SavedBlocks | None:
        return self.rows.kept_index(whole=whole)

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        return self.rows.episode_lines(dtype)

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        return self.rows.slots_of(rows)

    def column(self, key: Key) -> ColumnReader:
        if (file := self._added.get(key)) is not None:
            return _OverlayColumn(file)
        return self.rows.column(key)

    def shown(self, key: Key) -> np.ndarray:
        return super().shown(key) if key in self._added else self.rows.shown(key)

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        keys = self.keys if keys is None else keys
        stored = iter(self.rows.copies(rows, [key for key in keys if key not in self._added]))
        return [self._added[key].take(rows) if key in self._added else next(stored) for key in keys]

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        if isinstance(rows, np.ndarray):
            added = [file.take(rows) for file in self._added.values()]
            return [*self.rows.gather(rows), *added]
        stored = len(self._schema.columns) - len(self._added)
        pairs = zip(self._added.values(), rows[stored:], strict=True)
        return [*self.rows.gather(rows[:stored]), *(file.take(at) for file, at in pairs)]
