"""Spaces in Minari's metadata: built from the runs' spaces or from the rows, and read back."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch

from tallyroll.storage.ext.exchange.export_rows import ExportRows
from tallyroll.storage.ext.exchange.readme import recorded_spaces
from tallyroll.storage.ext.exchange.roles import Roles
from tallyroll.storage.rows.keys import NEXT, REWARD, TERMINATED, TRUNCATED, Key, format_key
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.rows.spaces import (
    NO_SPACE,
    Space,
    compact,
    fitting,
    leaves_of,
    space_of,
)

_MOST_ACTIONS: Final = 2**16
_TOPS: Final = {"observation_space": "observations", "action_space": "actions"}


# --- export ---------------------------------------------------------------------------------------


class Spaces:
    """The Gymnasium spaces of columns: declared by the runs, or else derived from the rows."""

    def __init__(self, rows: ExportRows, roles: Roles) -> None:
        self._rows, self._said = rows, recorded_spaces(rows.about, rows.schema)
        self._left = self._left_by_rows(roles)
        self.lost = len(self._left)
        """The number of known spaces that the export replaces by wider ones."""

    def _left_by_rows(self, roles: Roles) -> set[Key]:
        """Return the columns whose spaces would mislead readers, because values are outside."""
        observed = [each.key for each in roles.observations]
        of = {key: key for key in self._said} | {(NEXT, *key): key for key in observed}
        spaces = {key: space_of(self._said[of[key]]) for key in of if of[key] in self._said}
        wanted = {key: space for key, space in spaces.items() if not space.takes_all}
        left = set[Key]()
        for block in self._rows.blocks([*wanted]) if wanted else ():
            left |= {
                of[key]
                for key, space in wanted.items()
                if not space.holds(block[key]) and space.outside(block[key]).any()
            }
        return left

    def of_episodes(self, roles: Roles) -> tuple[Any, Any]:
        """Return the space of observations and the space of actions."""
        observed, acted = dict[Key, Any](), dict[Key, Any]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Gymnasium warns about the precision of bounds
            for each in roles.observations:
                space = self._known(each)
                observed[each.key] = _box(each) if space is None else space
            for each in roles.actions:
                space = self._known(each)
                acted[each.key] = _acted(self._rows, each) if space is None else space
        return _space(observed), _space(acted)

    def _known(self, column: Column) -> Any:
        """Return the space that the runs declare for a column, or None if Minari cannot hold it."""
        said = self._said.get(column.key)
        if said is None or column.key in self._left:
            return None
        with contextlib.suppress(*NO_SPACE):
            return _declared(said, column)
        self.lost += 1
        return None


def _declared(said: Mapping[str, Any], column: Column) -> Any:
    """Convert a space from JSON to Gymnasium.

    The function raises one of the errors in `NO_SPACE` if Gymnasium has no such space.
    """
    from gymnasium import spaces

    space, dtype = space_of(said), column.numpy_dtype
    match space.kind:
        case "Box" if dtype.kind in "iuf":
            return spaces.Box(*space.ends(dtype), dtype=dtype.type)
        case "Discrete" if not column.shape:
            return spaces.Discrete(int(said["n"]), start=int(said.get("start", 0)))
        case "MultiDiscrete":
            low, high = space.ends(np.dtype(np.int64))
            return spaces.MultiDiscrete(high - low + 1, start=low)
        case "MultiBinary" if space.shape:
            return spaces.MultiBinary(list(space.shape))
    raise ValueError(f"Gymnasium has no space {space.kind} of {dtype}")


def _acted(rows: ExportRows, column: Column) -> Any:
    """Return a space for an action column for which no run declares a space."""
    whole = not column.shape and column.numpy_dtype.kind in "iu"
    span = _span(rows, column) if whole else None
    return _box(column) if span is None else _discrete(*span)


def _span(rows: ExportRows, column: Column) -> tuple[int, int] | None:
    """Return the minimum and maximum of a column, or None if they are too far apart."""
    least, most = 2**63, -(2**63)
    for block in rows.blocks([column.key]):
        values = block[column.key]
        least, most = min(least, int(values.min())), max(most, int(values.max()))
    return (least, most) if 0 <= most - least < _MOST_ACTIONS else None


def _discrete(least: int, most: int) -> Any:
    from gymnasium.spaces import Discrete

    start = min(least, 0) if least < _MOST_ACTIONS else least
    return Discrete(most - start + 1, start=start)


def _box(column: Column) -> Any:
    from gymnasium.spaces import Box, MultiBinary

    dtype = np.dtype(np.float32) if column.dtype is torch.bfloat16 else column.numpy_dtype
    if dtype.kind == "b":
        return MultiBinary(column.shape or 1)
    if dtype.kind == "f":
        return Box(-np.inf, np.inf, column.shape, dtype.type)
    limits: Any = np.iinfo(dtype.str)
    return Box(limits.min, limits.max, column.shape, dtype.type)


def _space(spaces: Mapping[Key, Any]) -> Any:
    from gymnasium.spaces import Dict

    if len(spaces) == 1 and len(next(iter(spaces))) == 1:
        return next(iter(spaces.values()))
    return _as_spaces(nested(spaces), Dict)


def _as_spaces(values: Mapping[str, Any], kind: Any) -> Any:
    inner = {n: _as_spaces(v, kind) if isinstance(v, dict) else v for n, v in values.items()}
    return kind(inner)


# --- import ---------------------------------------------------------------------------------------


def spaces_in(metadata: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    """Return the spaces in Minari's metadata, as JSON, by the paths of datasets in an episode."""
    found = dict[Key, Mapping[str, Any]]()
    for name, top in _TOPS.items():
        said = metadata.get(name)
        with contextlib.suppress(*NO_SPACE):
            leaves = leaves_of(json.loads(said) if isinstance(said, str) else said)
            found |= {(top, *path.split("/")[1:]): leaf for path, leaf in leaves.items()}
    return found


def known_in(said: Mapping[Key, Mapping[str, Any]]) -> dict[Key, Space]:
    """Return the spaces that are valid, from JSON that may hold anything."""
    found = dict[Key, Space]()
    for place, each in said.items():
        with contextlib.suppress(*NO_SPACE):
            found[place] = space_of(each)
    return found


def entry_of(said: Mapping[Key, Mapping[str, Any]], schema: Schema) -> dict[str, Any]:
    """Return the fields of a run's manifest entry that record the spaces of columns."""
    columns, found = {each.key: each for each in schema.columns}, dict[str, Any]()
    for place, space in known_in(said).items():
        column = columns.get(key_of(place) or ())
        if column is not None and not space.differs(column.numpy_dtype, column.shape):
            with contextlib.suppress(*NO_SPACE):
                found[format_key(column.key)] = compact(said[place])
    return fitting(found)


OBSERVATIONS, ACTIONS, INFOS = "observations", "actions", "infos"
FLAGS: Final = {REWARD: "rewards", TERMINATED: "terminations", TRUNCATED: "truncations"}


def key_of(path: Key) -> Key | None:
    """Return the key of the column for a dataset, or None if no column corresponds to it."""
    match path:
        case ("observations", *rest):
            return tuple(rest) or ("observation",)
        case ("actions", *rest):
            return (*rest, "action")
        case (name,) if name in FLAGS.values():
            return next(each for each, other in FLAGS.items() if other == name)
    return None


def nested(values: Mapping[Key, Any]) -> dict[str, Any]:
    """Return values in nested dictionaries, one level for each part of their keys."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        here = found
        for part in key[:-1]:
            here = here.setdefault(part, {})
        here[key[-1]] = value
    return found
