"""Specs and random states of dm_env environments."""

from typing import Any

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.errors import SpaceError
from tallyroll.storage.rows.dtypes import TORCH


def generator_of(env: Any) -> np.random.RandomState | None:
    """The generator that the episodes of ``env`` are drawn from; None: there is none to be seen."""
    found = getattr(getattr(env, "task", None), "random", None)
    if found is None:
        found = getattr(env, "random_state", None)  # of dm_control.composer
    return found if isinstance(found, np.random.RandomState) else None


def spec_of(name: str, spec: Any) -> TensorSpec:
    """Return a dm_env spec as TorchRL's; recognised by its attributes, without an import.

    Raises:
        SpaceError: it is not of one array of numbers.
    """
    shape, numpy = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or numpy is None or np.dtype(numpy) not in TORCH:
        raise SpaceError(
            f"{name}: expected one array of numbers, got {spec!r:.200}; wrap the environment"
        )
    dtype = TORCH[np.dtype(numpy)]
    if hasattr(spec, "num_values"):
        return Categorical(int(spec.num_values), shape=shape, dtype=dtype)
    if not hasattr(spec, "minimum"):
        return Unbounded(shape, dtype=dtype)
    low, high = (np.broadcast_to(each, shape) for each in (spec.minimum, spec.maximum))
    if np.isinf(low).all() and np.isinf(high).all():
        return Unbounded(shape, dtype=dtype)
    bounds = [torch.from_numpy(np.array(each)).to(dtype) for each in (low, high)]
    return Bounded(*bounds, shape=shape, dtype=dtype)
