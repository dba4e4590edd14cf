"""The promises of a `RowReader` to code below it, which only reads rows by their numbers."""

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
        """All values as one array, if they lie so in memory; row r is at ``slots_of(r)``."""

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Copy the values of ``rows`` [*], in any order: [*rows.shape, *shape of a value]."""

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the values of the rows ``[start, stop)``, C-contiguous; do not write to them."""


class ReadableRows(Protocol):
    """Rows by their numbers; see `RowReader`."""

    path: Path
    ring: int

    @property
    def schema(self) -> Schema:
        """The columns."""

    @property
    def id(self) -> str | None:
        """The id of the storage; its copies have the same."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """The columns' keys, in order."""

    @property
    def nest(self) -> TensorDictBuilder:
        """The nest that joins arrays, one a column, to the TensorDict of a batch."""

    @property
    def span(self) -> range:
        """The numbers of the rows that are there."""

    @property
    def head(self) -> int:
        """The number of rows ever committed."""

    @property
    def rewinds(self) -> int:
        """How often rows were taken back, so that numbers from there on mean other rows."""

    @property
    def rewinding(self) -> bool:
        """True if a writer has taken rows back, and has not tidied up after that."""

    @property
    def runs(self) -> list[dict[str, Any]]:
        """The runs that wrote the rows."""

    @property
    def initialised(self) -> bool:
        """True if there is a schema yet."""

    @property
    def is_written(self) -> bool:
        """True if some process may add rows now."""

    def column(self, key: Key) -> ReadColumn:
        """Return the reader of one column."""

    def slots_of(self, rows: np.ndarray) -> np.ndarray:
        """Return the indices of rows [*] in the array of a column.

        Those of rows that follow one another do so, too, but at the end of a ring.
        """

    def copies(self, rows: np.ndarray, keys: Sequence[Key] | None = None) -> list[np.ndarray]:
        """Return copies [*rows.shape, ...] of rows of the span, of all columns or of some."""

    def gather(self, rows: np.ndarray | Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy rows as `copies` does, for batches, whose memory may be used again after them."""

    def episode_lines(self, dtype: np.dtype[Any]) -> np.ndarray | None:
        """Return the table of episodes that is stored beside the rows; None without one."""

    def kept_index(self, *, whole: bool = False) -> Any:
        """Return the index of trajectories that is kept beside the rows; None without one."""

    def overrun(self, what: str) -> Overrun:
        """Return the error for rows that a writer overwrites before they are read."""
