"""Numbers of rows and priorities, as callers give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tallyroll.storage.ext.sampling.sum_tree import Plain


def whole(name: str, given: Any) -> np.ndarray:
    """Return whole numbers as int64 [n], a copy."""
    if isinstance(given, torch.Tensor):
        given = given.numpy(force=True)
    found = np.asarray(given)
    if found.dtype.kind not in "iu":
        if found.size:
            raise ValueError(f"{name}: expected whole numbers, got {found.dtype}.")
        found = found.astype(np.int64)
    return found.reshape(-1).astype(np.int64)


def plain(given: Any, *dtypes: torch.dtype) -> Plain | None:
    """Return numbers as the extension reads them where they are; None if it cannot."""
    if isinstance(given, np.ndarray):
        return given
    if type(given) is not torch.Tensor or not given.is_cpu or given.dtype not in dtypes:
        return None
    if given.is_contiguous():
        return given.data_ptr(), given.numel(), given.element_size()
    found: np.ndarray = given.numpy(force=True)
    return found


def numbers(priority: Any) -> np.ndarray:
    """Return priorities as float64 [n]; raise `ValueError` if they are no numbers."""
    if isinstance(priority, torch.Tensor):
        if priority.dtype is torch.bfloat16:
            priority = priority.float()
        priority = priority.numpy(force=True)
    try:
        with np.errstate(all="ignore"):
            found = np.asarray(priority, np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"priorities are numbers, got {priority!r}.") from error
    return found.reshape(-1)
