"""A user saves values of many types with the state of a run, and loads them again."""

from __future__ import annotations

import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from tallyroll.collector import load_checkpoint, save_checkpoint
from tallyroll.collector.base import Collector
from tallyroll.storage.storages import DiskStorage


def wrong_in_saving(collector: Collector, batch: TensorDictBase, number: int) -> list[str]:
    """Return the names of values that a checkpoint after ``batch`` does not restore exactly."""
    values = _values(batch, np.random.default_rng([37, number]))
    storage = collector.restarting.storage
    saved = collector if storage is None or isinstance(storage, DiskStorage) else None
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(folder, collector=saved, **values)
        found = load_checkpoint(folder).values  # loading restores the state of generators
    if found.keys() != values.keys():
        return [f"values {sorted(found)} came back of {sorted(values)}"]
    return [
        f"{name} was saved as {value!r:.80} and came back as {found[name]!r:.80}"
        for name, value in values.items()
        if not same(value, found[name])
    ]


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same types, and the same bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=False)
        return len(one) == len(other) and all(same(*each) for each in pairs)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and same(_array(one), _array(other))
    if isinstance(one, (np.ndarray, np.generic)):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and one.tobytes() == other.tobytes()
    return bool(one == other)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().contiguous().view(torch.uint8).numpy() if tensor.ndim else tensor.numpy()


def _values(batch: TensorDictBase, rng: np.random.Generator) -> dict[str, Any]:
    """Return values that refer to the rows of a batch, nested at random."""
    columns = {str(key): value for key, value in batch.items(True, True)}
    arrays = {name: value.numpy(force=True) for name, value in columns.items()}
    leaves: list[Any] = [
        *columns.values(),
        *arrays.values(),
        *(each[..., ::2] for each in arrays.values() if each.ndim),
        *(each.reshape(-1)[0] for each in arrays.values() if each.size),
        np.float64(0.1),
        np.array(["a", "b"]),
        np.datetime64("2026-01-01"),
        b"a\0",
        bytearray(b"b"),
        -0.0,
        2**70,
        None,
        {1, 2},
        frozenset([(1, "a")]),
        Counter("aab"),
        torch.nn.Parameter(torch.ones(2)),
        {"tallyroll": "array", "values": 3},
    ]
    values: dict[str, Any] = {}
    for number in range(6):
        value = leaves[rng.integers(len(leaves))]
        for _ in range(rng.integers(0, 4)):
            other = leaves[rng.integers(len(leaves))]
            around = [
                [value, other],
                (value,),
                {"tallyroll": value},
                {3: value, (1, None): other},
                OrderedDict(a=value),
                defaultdict(list, b=value),
                deque([other, value], maxlen=3),
            ]
            value = around[rng.integers(len(around))]
        values[f"value{number}"] = value
    return values
