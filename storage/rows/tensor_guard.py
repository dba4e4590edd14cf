"""Tensors that are known by their looks, so that their values can be copied by address.

To make an array of a tensor costs more than to copy the bytes of a small one. So the tensors of
the first batch are made arrays, which tells all that is to be known of their memory, and tensors
that look exactly like them are taken for the memory that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np
import torch

from tallyroll.storage.compat import tensor_guards

_IS_NESTED = attrgetter("is_nested")


TensorGuards = tensor_guards()


class TensorGuard:
    """A guard that recognises tensors laid out like those of an earlier batch."""

    def __init__(self) -> None:
        self._same: Callable[..., bool] | None = None

    def remember(self, leaves: Sequence[torch.Tensor], arrays: Sequence[np.ndarray]) -> None:
        """Remember tensors, and the arrays that share their memory."""
        self._same = None
        # Other classes may do anything when NumPy makes an array of them.
        plain = all(type(leaf) is torch.Tensor for leaf in leaves)
        if TensorGuards is not None and plain and all(a.flags.c_contiguous for a in arrays):
            guards = TensorGuards(*leaves, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._same = guards.check

    def addresses(self, leaves: Sequence[torch.Tensor]) -> list[int] | None:
        """Return addresses of the values of ``leaves``, if these are like the remembered ones.

        Return None otherwise. Alike means: class, dtype, device, shape, strides, gradients, and
        all else that decides what the memory means.
        """
        if self._same is None:
            return None
        try:
            # Torch would end the process that asks a nested tensor for its strides.
            if any(map(_IS_NESTED, leaves)) or not self._same(*leaves):
                return None
        except AttributeError:  # not all are tensors
            return None
        found = list(map(torch.Tensor.data_ptr, leaves))
        return found if all(found) else None  # 0: without memory
