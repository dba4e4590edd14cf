"""Memory in which the small tensors of a batch become arrays, all of them in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from .schema import Column

__all__ = ["Staging"]

_LARGE_NBYTES = 2**13
"""Tensors above this size are made arrays one by one. ``Tensor.numpy`` costs 0.7 us each, and
0.4 us when many are copied at once, which does not pay where the bytes weigh more."""


class Staging:
    """A place for batches of ``count`` rows of ``columns``, used again for each."""

    def __init__(self, columns: Sequence[Column], count: int) -> None:
        large = [count * column.row_nbytes > _LARGE_NBYTES for column in columns]
        self._large = [i for i, each in enumerate(large) if each]
        self._small = [i for i, each in enumerate(large) if not each]
        self._arrays = [
            np.empty((0 if i in self._large else count, *column.shape), column.numpy_dtype)
            for i, column in enumerate(columns)
        ]
        with torch.inference_mode(False):  # or nobody could write to them outside of it
            self._tensors = [
                torch.from_numpy(self._arrays[i]).view(columns[i].dtype) for i in self._small
            ]

    def arrays(self, leaves: list[torch.Tensor]) -> list[np.ndarray]:
        """One array a column of what ``leaves`` hold, until the next call.

        Args:
            leaves: one tensor [count, ...] a column, of its shape and dtype, on any device,
                none followed by autograd, which would follow the copies too.

        Raises:
            RuntimeError: one is not dense, or has no values.
            TypeError: one is no tensor, or large and not in the memory of the CPU.
        """
        arrays, small = self._arrays.copy(), leaves  # large ones are not held on to
        if self._large:
            small = [leaves[i] for i in self._small]
            for index in self._large:
                arrays[index] = torch.Tensor.numpy(leaves[index])
        if small:
            torch._foreach_copy_(self._tensors, small)
        return arrays
