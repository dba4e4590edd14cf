"""The methods of a storage that give its rows to training code and to tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from tensordict import TensorDict

from tallyroll.storage.datasets.training.row_dataset import Pieces, RowDataset
from tallyroll.storage.datasets.training.tables import arrow_table, data_frame
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Keys, as_key
from tallyroll.storage.trajectories.windows import check_positive

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Last = Literal["pad", "skip"]
"""Ways to treat the piece at the end of a trajectory, if it is shorter than the others."""


class HasTraining:
    """A storage whose rows are trained from."""

    reader: RowReader
    reader_with: Callable[[Keys], RowReader]

    def dataset(
        self,
        columns: Keys | None = None,
        *,
        slice_len: int | None = None,
        short: Last = "pad",
        where: str | None = None,
        transform: Callable[[TensorDict], Any] | None = None,
    ) -> RowDataset:
        """Return the rows of this moment as a map-style dataset of PyTorch.

        Args:
            columns: those that are wanted, overlays among them; None: all.
            slice_len: items are pieces of trajectories of so many rows, from the first row of each
                on, which have each row once: TensorDicts [slice_len] that end as
                `Trajectories.sample_slices` says. None: items are rows.
            short: what becomes of the last piece of a trajectory, if it has fewer rows: ``"pad"``,
                it has zeros at its end, and ``("collector", "mask")`` is True where there is a
                row; ``"skip"``, it is no item.
            where: an expression: only rows of trajectories for which it holds, see
                `StoredTrajectories.where`.
            transform: a function of a batch of items, in the process that reads it.

        Raises:
            ColumnsMissing: a column that is not there; with ``slice_len``, the rows do not say
                which trajectory they belong to.
            InvalidExpression: ``where`` is no condition on trajectories.
            ValueError: an argument is none of its values.
        """
        if short not in get_args(Last):
            raise ValueError(f"short is one of 'pad' and 'skip', got {short!r}.")
        if slice_len is not None:
            check_positive("slice_len", slice_len)
        storage: Any = self if where is None else self.trajectories.where(where)  # type: ignore[attr-defined]
        keys = None
        if columns is not None:
            keys = [as_key(each) for each in ([columns] if isinstance(columns, str) else columns)]
            storage.reader_with(keys).chosen(keys)
        storage.reader.require_open()
        pieces = None
        if slice_len is not None:
            pieces = Pieces(storage.reader, slice_len, short=short == "pad")
        return RowDataset(storage, keys, pieces, transform)

    def to_pandas(self, columns: Keys | None = None) -> pd.DataFrame:
        """Return the rows as a table of pandas, which the extra ``pandas`` installs.

        A column is named as its key, joined by dots, as ``next.reward``. One with several numbers
        a row becomes as many, ``observation.0``, ``observation.1`` and so on.

        Args:
            columns: those that are wanted; None: all with at most 64 numbers a row.

        Raises:
            MissingLibrary: pandas is not installed.
            ColumnsMissing: there is no such column.
            ValueError: a column that was asked for has more numbers a row than that.
        """
        return data_frame(self.reader if columns is None else self.reader_with(columns), columns)

    def to_arrow(self, columns: Keys | None = None) -> pa.Table:
        """Return the rows as a table of Arrow, which the extra ``arrow`` installs.

        A column is named as its key, joined by dots. One with several numbers a row is a list of
        fixed size, whose field has the shape in its metadata, as JSON. bfloat16 becomes float32.

        Args:
            columns: those that are wanted; None: all.

        Raises:
            MissingLibrary: pyarrow is not installed.
            ColumnsMissing: there is no such column.
            ValueError: a column of complex numbers, which Arrow has not.
        """
        return arrow_table(self.reader if columns is None else self.reader_with(columns), columns)
