"""The part of `RowReader` that lower layers use, which read rows only by number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tallyroll.storage.errors import Overrun
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder


class ReadColumn(Protocol):
    """The values of one column; see `ColumnReader`."""

    @property
    def array(self) -> np.ndarray | None:
        """All values as one array, if it is in memory; row r is at ``slots_of(r)``."""

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy the values of ``rows`` [*], in any order, to ``out`` or to a new array.

        The shape of the array is [*rows.shape, *shape of a value].
        """

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the values of the rows ``[start, stop)`` as a C-contiguous array.

        Callers must not write to the array.
        """


class ReadableRows(Protocol):
    """Rows by number; see `RowReader`."""

    path: Path
    ring: int

    @property
    def schema(self) -> Schema:
        """The schema of the rows."""

    @property
    def id(self) -> str | None:
        """The id of the storage, which its copies share."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys of the columns, in order."""

    @property
    def nest(self) -> TensorDictBuilder:
        """The builder that joins arrays, one per column, to the TensorDict of a batch."""

    @property
    def span(self) -> range:
        """The numbers of the valid rows."""

    @property
    def head(self) -> int:
        """The number of rows ever committed."""

    @property
    def rewinds(self) -> int:
        """The number of rewinds, after each of which row numbers may refer to other rows."""

    @property
    def rewinding(self) -> bool:
        """True while a writer has committed a rewind and not yet completed it."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that wrote the rows."""

    @property
    def initialised(self) -> bool:
        """True if the storage has a schema."""

    @property
    def is_written(self) -> bool:
        """True if a process may currently be adding rows."""

    def column(self, key: Key) -> ReadColumn:
        """Return the reader of one column."""

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of rows [*] in the array of a column.

        Consecutive rows have consecutive indices, except at the end of a ring.
        """

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        """Return copies [*rows.shape, ...] of rows of the span, for all columns or for ``keys``."""

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy rows for a batch, as `copies` does; the memory may be reused after the batch."""

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Return the episode table that is stored alongside the rows, or None."""

    def kept_index(self, *, whole: bool = False) -> Any:
        """Return the trajectory index that is saved alongside the rows, or None."""

    def overrun(self, what: str) -> Overrun:
        """Return the error for rows that a writer overwrites before they are read."""
