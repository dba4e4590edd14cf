"""Rows that still lie elsewhere, in an order of their own: copied once, to where they belong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LARGE_NBYTES = 4096
"""Rows of a column that large are worth it."""


class RowRefs:
    """``sources[origin[i]][index[i]]`` for each row ``i``; nothing is copied before `copy_to`.

    Stands for an array [N, ...] of large rows among those that a storage is given. Whoever makes
    one keeps the sources as they are until it was copied.

    Args:
        sources: C-contiguous arrays [M, ...] of one dtype and row shape.
        index: intp [N].
        origin: int [N], which source; None where there is one.
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
        """The rows of ``parts``, one part behind the other, in ``order`` (intp [N])."""
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
        """Of the rows."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def copy_to(self, out: np.ndarray) -> None:
        """Copy the rows to ``out``, a C-contiguous array of their shape and dtype."""
        if self.origin is None:
            # "clip" copies straight to `out`; indices are within bounds, whoever made them.
            self.sources[0].take(self.index, axis=0, out=out, mode="clip")
            return
        turns = (np.flatnonzero(np.diff(self.origin)) + 1).tolist()
        for start, stop in zip([0, *turns] if len(self) else (), [*turns, len(self)], strict=False):
            source = self.sources[self.origin[start]]
            source.take(self.index[start:stop], axis=0, out=out[start:stop], mode="clip")

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        """A copy, for whoever needs an array."""
        out = np.empty(self.shape, self.dtype)
        self.copy_to(out)
        return out
