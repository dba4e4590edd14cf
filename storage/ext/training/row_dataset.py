"""Map-style PyTorch dataset of rows or of pieces of trajectories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from tensordict import TensorDict
from torch.utils.data import Dataset

from tallyroll.storage.errors import IndexOutOfRange
from tallyroll.storage.readers.row_reader import RowReader, columns_of, take_rows
from tallyroll.storage.replay.disk_storage import DiskStorage
from tallyroll.storage.rows.consistent_read import read_consistently
from tallyroll.storage.rows.keys import MASK, Key, Keys, as_key
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.stores.rewinds import require_not_rewound
from tallyroll.storage.trajectories.slice_columns import SliceColumns
from tallyroll.storage.trajectories.windows import Slices, check_positive
from tallyroll.storage.user_code import user_callback

Last = Literal["pad", "skip"]
"""Treatment of a trajectory's last piece if it is shorter than the others."""


class RowDataset(Dataset[Any]):
    """Dataset whose items are the rows of a storage, or pieces of its trajectories.

    ``storage.dataset(...)`` creates one. A `torch.utils.data.DataLoader` reads a whole batch at
    once; pass it `collate`, which returns the batch unchanged::

        data = storage.dataset(["observation", "action"])
        loader = DataLoader(data, batch_size=256, shuffle=True, collate_fn=data.collate)

    The items are fixed when the dataset is created: later rows are not included, and rows that a
    ring overwrites raise `IndexOutOfRange`. The dataset can be pickled whenever its storage can,
    for workers of any start method.
    """

    def __init__(
        self,
        storage: Any,
        keys: Sequence[Key] | None,
        pieces: Pieces | None,
        transform: Callable[[TensorDict], Any] | None,
    ) -> None:
        self.storage, self.keys, self.transform = storage, keys, transform
        self._pieces = pieces
        span = storage.span
        self._stop, self._rewinds = span.stop, storage.reader.rewinds
        self._first, self._count = span.start, len(span) if pieces is None else len(pieces)

    def __len__(self) -> int:
        """Return the number of items."""
        return self._count

    def __getitem__(self, item: int) -> Any:
        """Return one item after the transform."""
        return self.__getitems__([item])[0]

    def __getitems__(self, items: Sequence[int] | torch.Tensor) -> Any:
        """Return a batch of items after the transform: a TensorDict [n], or [n, slice_len].

        Raises:
            IndexOutOfRange: an item does not exist, or its rows were overwritten.
            StateMismatch: the rows of an item were rewound.
        """
        at = np.asarray(items, np.int64).reshape(-1)
        at = np.where(at < 0, at + self._count, at)
        if len(at) and not (at.min() >= 0 and at.max() < self._count):
            raise IndexOutOfRange(
                f"items: expected numbers from 0 to {self._count - 1}, got {min(items)} to "
                f"{max(items)}."
            )
        reader = self.storage.reader if self.keys is None else self.storage.reader_with(self.keys)
        if self._pieces is None:
            found = take_rows(reader, self._first + at, self.keys)
        else:
            found = self._pieces.read(reader, at, self.keys)
        if reader.rewinds != self._rewinds:
            require_not_rewound(reader, self._stop, self._rewinds, "this dataset")
            self._rewinds = reader.rewinds
        if self.transform is None:
            return found
        with user_callback("transform"):
            return self.transform(found)

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return the batch unchanged, since `__getitems__` has read it as a whole."""
        return batch

    def __repr__(self) -> str:
        what = "rows" if self._pieces is None else f"pieces of {self._pieces.length} rows"
        return f"RowDataset({self._count:,} {what} of {self.storage!r})"


class Pieces:
    """All trajectories, each cut into consecutive pieces of ``length`` rows.

    Each row is in one piece. The last piece of a trajectory may be shorter.

    Args:
        reader: the reader of the rows.
        length: rows per piece.
        short: False skips pieces with fewer than ``length`` rows.

    Raises:
        ColumnsMissing: the rows have no trajectory ids.
    """

    def __init__(self, reader: RowReader, length: int, *, short: bool) -> None:
        self.length = length
        self._ends, self._counts = read_consistently(reader, lambda: _pieces(reader, length))
        if not short:
            whole = self._counts == length
            self._ends, self._counts = self._ends[whole], self._counts[whole]

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, reader: RowReader, at: np.ndarray, keys: Sequence[Key] | None) -> TensorDict:
        """Return pieces [n] as a TensorDict [n, length].

        Pieces are marked and masked at their ends like the slices of
        `Trajectories.sample_slices`.
        """
        slices = self._slices(reader, self._ends[at], self._counts[at])
        places, nest = columns_of(reader, keys)
        columns = reader.schema.columns
        if places is not None:
            columns = tuple(columns[place] for place in places)
        arrays = read_consistently(
            reader, lambda: self._copied(reader, slices, [c.key for c in columns])
        )
        mask = slices.mask
        assert mask is not None
        for array in arrays:
            array[~mask] = 0
        found = SliceColumns(Schema(columns)).marked(arrays, slices, nest)
        found.set(MASK, torch.from_numpy(mask))
        return found

    def _copied(self, reader: RowReader, slices: Slices, keys: Sequence[Key]) -> list[np.ndarray]:
        found = reader.copies(slices.rows, keys)
        if len(slices.rows) and (least := int(slices.rows.min())) < reader.span.start:
            raise IndexOutOfRange(
                f"row {least} of {reader.path} was overwritten since the dataset was created. "
                "Create the dataset again, or give the ring more slots."
            )
        return found

    def _slices(self, reader: RowReader, ends: np.ndarray, counts: np.ndarray) -> Slices:
        index = reader.trajectory_index
        with index.lock:
            rows = index.rows(reader).windows(ends, self.length)
        place = np.arange(self.length)
        mask = place < counts[:, None]
        first = self.length - counts[:, None]
        at = first + np.minimum(place, counts[:, None] - 1)
        return Slices(np.take_along_axis(rows, at, axis=1), mask)


def _pieces(reader: RowReader, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the last row and the row count of each piece, ordered by last row."""
    index = reader.trajectory_index
    with index.lock:
        ends, counts = index.rows(reader).pieces(length, reader.span.start)
    order = ends.argsort(kind="stable")
    return ends[order], counts[order]


def dataset_of(
    storage: DiskStorage,
    columns: Keys | None,
    *,
    slice_len: int | None,
    short: Last,
    where: str | None,
    transform: Callable[[TensorDict], Any] | None,
) -> RowDataset:
    """Create a dataset of a storage or a selection of it; see `DiskStorage.dataset`."""
    if short not in get_args(Last):
        raise ValueError(f"short: expected 'pad' or 'skip', got {short!r}.")
    if slice_len is not None:
        check_positive("slice_len", slice_len)
    if where is not None:
        storage = storage.trajectories.where(where)
    keys = None
    if columns is not None:
        keys = [as_key(each) for each in ([columns] if isinstance(columns, str) else columns)]
        columns_of(storage.reader_with(keys), keys)
    storage.reader.require_open()
    pieces = None
    if slice_len is not None:
        pieces = Pieces(storage.reader, slice_len, short=short == "pad")
    return RowDataset(storage, keys, pieces, transform)
