"""References to rows in other arrays, which are copied only once, to their destination."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGE_NBYTES = 4096
"""Size in bytes of a column's row from which on references are faster than a copy."""


class RowRefs:
    """References to the rows ``sources[origin[i]][index[i]]``, which `copy_to` copies.

    A caller may write them to a storage in place of an array [N, ...] of large rows. The caller
    must not change the sources before the rows are copied.

    Args:
        sources: C-contiguous arrays [M, ...] with the same dtype and row shape.
        index: the index of each row in its source, intp [N].
        origin: the source of each row, int [N]; None if there is only one source.
    """

    __slots__ = ("dtype", "index", "origin", "shape", "sources")

    def __init__(
        self, sources: Sequence[np.ndarray], index: np.ndarray, origin: np.ndarray | None = None
    ) -> None:
        self.sources, self.index, self.origin = tuple(sources), index, origin
        self.dtype = self.sources[0].dtype
        self.shape = (len(index), *self.sources[0].shape[1:])

    @classmethod
    def joined(cls, parts: Sequence[RowRefs], order: np.ndarray) -> RowRefs:
        """Return the concatenated rows of ``parts``, in ``order`` (intp [N])."""
        index = np.concatenate([part.index for part in parts])[order]
        origins: list[np.ndarray] = []
        sources: list[np.ndarray] = []
        for part in parts:
            own = np.zeros(len(part), np.intp) if part.origin is None else part.origin
            origins.append(own + len(sources))
            sources += part.sources
        return cls(sources, index, np.concatenate(origins)[order])

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, rows: slice | np.ndarray) -> RowRefs:
        origin = None if self.origin is None else self.origin[rows]
        return RowRefs(self.sources, self.index[rows], origin)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the rows."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def copy_to(self, out: np.ndarray) -> None:
        """Copy the rows to ``out``, a C-contiguous array of their shape and dtype."""
        if self.origin is None:
            # "clip" copies directly to `out`. The indices are within bounds anyway.
            self.sources[0].take(self.index, axis=0, out=out, mode="clip")
            return
        turns = (np.flatnonzero(np.diff(self.origin)) + 1).tolist()
        for start, stop in zip([0, *turns] if len(self) else (), [*turns, len(self)], strict=False):
            source = self.sources[self.origin[start]]
            source.take(self.index[start:stop], axis=0, out=out[start:stop], mode="clip")

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """Copy the rows to a new array, for NumPy."""
        out = np.empty(self.shape, self.dtype)
        self.copy_to(out)
        return out
