"""The methods of a storage that count its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tallyroll.storage.datasets.statistics.statistics import Statistics, statistics_of
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.rows.keys import Key, Keys, as_key, spell
from tallyroll.storage.rows.progress import Progress

if TYPE_CHECKING:
    from tallyroll.storage.datasets.statistics.normaliser import Normaliser


class HasStatistics:
    """A storage whose columns can be counted."""

    reader: RowReader

    def statistics(
        self, keys: Keys | None = None, *, keep: bool = True, progress: Progress | None = None
    ) -> Statistics:
        """Return mean, deviation, extremes, quantiles and the share of NaNs of each column.

        One pass in bounded memory, in float64. They are kept in a file beside the rows, and later
        only rows that came since are read; not those of a ring, a view, several storages or files
        of others. A file that is damaged, or of other rows, is counted again from the rows.

        Args:
            keys: of the columns; None: all but complex ones.
            keep: use the file, and write it, where it can be written.
            progress: called now and then with the bytes that were read, and with all.

        Raises:
            ColumnsMissing: a column that is not there.
            ValueError: a column of complex numbers.
            NotInitialised: there is no schema yet.
        """
        return statistics_of(self.reader, keys, progress, keep=keep)

    def normaliser(
        self, key: str | Key, *, eps: float = 1e-6, clip: float | None = 10.0, keep: bool = True
    ) -> Normaliser:
        """Return a transform with the mean and the deviation that a column has in these rows.

        Args:
            key: of the column, such as ``"observation"``.
            eps, clip: as `Normaliser`.
            keep: as `statistics`.

        Raises:
            ColumnsMissing: there is no such column.
            ValueError: the column has no finite mean, or ``eps`` or ``clip`` is no number above 0.
        """
        from tallyroll.storage.datasets.statistics.normaliser import (
            Normaliser,
        )  # TorchRL's environments

        found = self.statistics([as_key(key)], keep=keep)[as_key(key)]
        mean, std = (torch.as_tensor(each).float() for each in (found.mean, found.std))
        if not (mean.isfinite().all() and std.isfinite().all()):
            raise ValueError(
                f"normaliser: expected finite numbers in {spell(key)} of {self.reader.path}, got "
                "none, or infinite ones. See storage.statistics()."
            )
        return Normaliser(key, mean, std, eps=eps, clip=clip)
