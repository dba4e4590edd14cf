"""Spaces of an environment's columns, derived from its specs, for provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    MultiOneHot,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import EnvBase

from tallyroll.collector.envs.setup.observation_columns import info_columns
from tallyroll.collector.options import Options
from tallyroll.collector.slab.slab import SlabColumns
from tallyroll.storage.rows.keys import COLLECTOR, COUNTERS, NEXT, as_key, format_key
from tallyroll.storage.rows.spaces import OF_LANES, Space, agreed, box, box_of_lanes, space_of


def spaces_of(env: EnvBase, layout: SlabColumns, options: Options) -> dict[str, Any]:
    """Return the spaces of a lane's observations and actions as JSON, by column name.

    Args:
        env: the collector's environment. Bounds that differ between lanes are included by lane.
            Otherwise the first lane determines the space.
        layout: the columns of the slab.
        options: the collector's options. They name the columns from Gymnasium's ``info``, which
            have no space.
    """
    lead, infos = len(env.batch_size), info_columns(env, layout, options)
    first = options.first_lane
    found = dict[str, Any]()
    for name, spec in env.observation_spec.items(True, True):
        key = as_key(name)
        own = key[0] == COLLECTOR or key[-1] in COUNTERS or key in infos
        if not own and key in layout and (NEXT, *key) in layout:
            found[format_key(key)] = _spec_as_json(spec, lead, first)
    for name, spec in env.full_action_spec.items(True, True):
        found[format_key(as_key(name))] = _spec_as_json(spec, lead, first)
    return {name: said for name, said in found.items() if said is not None}


def joined(spaces: Sequence[Mapping[str, Any]], lanes: Sequence[int]) -> dict[str, Any]:
    """Join the spaces of workers with the given numbers of ``lanes``.

    If bounds differ among the lanes of a worker, the result contains them by lane. Other spaces are
    included if all workers agree on them.
    """
    found = agreed(spaces)
    for name in {name for each in spaces for name, said in each.items() if OF_LANES in said}:
        found.pop(name, None)
        if not all(each.get(name, {}).get("type") == "Box" for each in spaces):
            continue
        parts = [space_of(each[name]) for each in spaces]
        if any(part.shape != parts[0].shape or part.dtype != parts[0].dtype for part in parts):
            continue
        low, high = (
            np.concatenate(
                [_of_lanes(part, count)[at] for part, count in zip(parts, lanes, strict=True)]
            )
            for at in (0, 1)
        )
        dtype = parts[0].dtype
        assert dtype is not None, "a Box has a dtype"
        found[name] = box_of_lanes(dtype, low, high, parts[0].first_lane)
    return found


def _of_lanes(space: Space, lanes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds ``[lane, ...]`` of a Box as two arrays."""
    own = space.of_lanes or space
    assert own.low is not None and own.high is not None and space.dtype is not None
    if space.of_lanes is not None:
        return own.low.astype(space.dtype), own.high.astype(space.dtype)
    low, high = (each.astype(space.dtype) for each in (own.low, own.high))
    return np.repeat(low[None], lanes, axis=0), np.repeat(high[None], lanes, axis=0)


def _spec_as_json(spec: TensorSpec, lead: int, first_lane: int = 0) -> dict[str, Any] | None:
    """Convert a spec whose first ``lead`` dimensions are lanes to JSON; None if unsupported."""
    dtype, shape = _dtype(spec.dtype), tuple(spec.shape[lead:])
    if dtype is None:
        return None
    said: dict[str, Any] = {"dtype": dtype.name, "shape": [*shape]}
    if isinstance(spec, MultiOneHot):
        return {"type": "MultiOneHot", "nvec": [*map(int, spec.nvec)], **said}
    if isinstance(spec, OneHot):
        return {"type": "OneHot", "n": int(spec.space.n), **said}
    if isinstance(spec, Binary):
        return {"type": "MultiBinary", "n": [*shape], "dtype": dtype.name}
    if isinstance(spec, MultiCategorical):
        counts = spec.nvec.cpu().numpy().reshape(-1, shape[-1])[0]
        return {"type": "MultiDiscrete", "nvec": counts.tolist(), **said}
    if type(spec) is Categorical and int(spec.n) > 0:
        if shape:
            return {"type": "MultiDiscrete", "nvec": int(spec.n), **said}
        return {"type": "Discrete", "n": int(spec.n), "start": 0, "dtype": dtype.name}
    if isinstance(spec, Bounded) and lead == 1:
        low, high = (each.cpu().numpy() for each in (spec.low, spec.high))
        if not ((low == low[:1]).all() and (high == high[:1]).all()):
            return box_of_lanes(dtype, low, high, first_lane)
    if isinstance(spec, Bounded):
        low, high = (each.cpu().numpy()[(0,) * lead] for each in (spec.low, spec.high))
        return _of_bounds(dtype, low, high)
    if isinstance(spec, Unbounded):
        return box(dtype, *(np.broadcast_to(each, shape) for each in _all_of(dtype)))
    return None


def _dtype(dtype: torch.dtype | None) -> np.dtype[Any] | None:
    if dtype is None or dtype is torch.bfloat16 or dtype.is_complex:
        return None
    return torch.zeros(0, dtype=dtype).numpy().dtype


def _of_bounds(dtype: np.dtype[Any], low: np.ndarray, high: np.ndarray) -> dict[str, Any]:
    """Return a Box, or a Discrete for bounds of a single int64, as in Gymnasium."""
    if dtype == np.int64 and not low.shape and (count := int(high) - int(low) + 1) < 2**31:
        return {"type": "Discrete", "n": count, "start": int(low), "dtype": dtype.name}
    return box(dtype, np.asarray(low), np.asarray(high))


def _all_of(dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Return the smallest and the largest value of a dtype."""
    if dtype.kind == "f":
        return dtype.type(-np.inf), dtype.type(np.inf)
    if dtype.kind == "b":
        return np.False_, np.True_
    limits: Any = np.iinfo(dtype)
    return dtype.type(limits.min), dtype.type(limits.max)
