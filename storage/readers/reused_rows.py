"""Memory for a batch, into which rows are read again and again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from tensordict import TensorDict

from tallyroll.storage.engine.columns import Places
from tallyroll.storage.engine.memory_left import require_memory
from tallyroll.storage.engine.pool import Room
from tallyroll.storage.rows.keys import Key, Keys, spell
from tallyroll.storage.rows.nesting import array_of

if TYPE_CHECKING:
    from tallyroll.storage.readers.row_reader import RowReader


class ReusedRows:
    """Memory for a number of rows, which each ``storage.get(index, out=...)`` overwrites.

    To make a TensorDict and its tensors takes longer than to copy 256 small rows. One thread may
    use it at a time. ``storage.reused(count, keys)`` makes it.

    Raises:
        ColumnsMissing: a column is not there.
        NotEnoughMemory: there is not enough memory.
        ValueError: ``count`` is no positive number.
    """

    def __init__(self, reader: RowReader, count: int, keys: Keys | None = None) -> None:
        if type(count) is not int or count < 1:
            raise ValueError(f"rows is a positive number, got {count!r}.")
        self.schema = reader.schema
        """The columns of the storage that it was made for."""
        self.places: Places | None = None
        """The places of its columns among them; None: it has all."""
        nest, columns = reader.nest, self.schema.columns
        if keys is not None:
            self.places, nest = reader.chosen(keys)
            columns = tuple(columns[place] for place in self.places)
        self.keys = tuple(column.key for column in columns)
        """The columns that it has."""
        nbytes = count * sum(column.row_nbytes for column in columns)
        require_memory(nbytes, f"a batch of {count} rows", "Choose fewer rows.")
        self.room = Room([np.empty((count, *c.shape), c.numpy_dtype) for c in columns])
        self.arrays: Mapping[Key, np.ndarray] = MappingProxyType(
            dict(zip(self.keys, self.room.arrays, strict=True))
        )
        """An array [count, ...] for each column; bfloat16 is the ``uint16`` of its bits."""
        self.rows: TensorDict = nest(self.room.arrays, (count,)).lock_()
        """The same memory as a TensorDict [count]; it is locked, so that its tensors stay."""

    def __len__(self) -> int:
        return self.room.count

    def fill(self, rows: TensorDict) -> None:
        """Copy a batch that has these columns.

        Raises:
            ValueError: it has another number of rows, or one has other values than the columns.
        """
        if rows.batch_size[:1] != (len(self),):
            raise ValueError(
                f"out holds {len(self)} rows, and the index is of {list(rows.batch_size[:1])}."
            )
        for key, array in self.arrays.items():
            found = array_of(key, rows[key])
            if (found.dtype, found.shape) != (array.dtype, array.shape):
                raise ValueError(
                    f"out was made for another storage: its column {spell(key)} is {array.dtype} "
                    f"{list(array.shape[1:])}, and here it is {found.dtype} "
                    f"{list(found.shape[1:])}."
                )
            np.copyto(array, found)
