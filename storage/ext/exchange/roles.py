"""Assign columns their roles in episodes: observation, action, reward or end. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    COUNTERS,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    Key,
    format_key,
    next_valid_keys,
)
from tallyroll.storage.rows.schema import Column, Schema

_FLAGS = ("done", "terminated", "truncated", "reward")
_ACTION = "action"


@dataclass(frozen=True)
class Roles:
    """The columns of a schema, by their role."""

    observations: tuple[Column, ...]
    """Columns that have a counterpart of the same dtype and shape under ``next``."""
    actions: tuple[Column, ...]
    reward: Column
    terminated: Column
    truncated: Column | None
    others: tuple[Column, ...]
    """All other columns, except next observations."""

    @classmethod
    def of(cls, schema: Schema, kind: str) -> Roles:
        """Assign roles to the columns of a schema.

        Raises:
            InvalidSchema: the columns do not form transitions.
        """
        found = {each.key: each for each in schema.columns}
        observations = tuple(
            each for each in schema.columns if _observed(each.key) and _alike(found, each)
        )
        actions = tuple(each for each in schema.columns if _acts(each.key))
        lacking = [format_key(key) for key in (REWARD, TERMINATED) if key not in found]
        lacking += [] if observations else ["observation, with next/observation"]
        lacking += [] if actions else [_ACTION]
        if lacking:
            raise InvalidSchema(
                f"{kind} holds episodes, but the rows have no {', no '.join(lacking)}. Export to a "
                "table format, such as parquet."
            )
        for key in (TERMINATED, TRUNCATED):
            if key in found and (found[key].dtype_name, found[key].row_nbytes) != ("bool", 1):
                raise InvalidSchema(
                    f"{format_key(key)}: expected one bool per row, got "
                    f"{list(found[key].shape)} of {found[key].dtype_name}."
                )
        roles = (REWARD, TERMINATED, TRUNCATED)
        used = {*roles, *(each.key for each in (*observations, *actions))}
        used |= {(NEXT, *each.key) for each in observations}
        others = tuple(each for each in schema.columns if each.key not in used)
        return cls(
            observations,
            actions,
            found[REWARD],
            found[TERMINATED],
            found.get(TRUNCATED),
            others,
        )


def _observed(key: Key) -> bool:
    own = key[0] in (NEXT, COLLECTOR) or key[-1] in COUNTERS
    return not own and not _acts(key) and key[-1] not in _FLAGS


def _acts(key: Key) -> bool:
    return key[0] not in (NEXT, COLLECTOR) and key[-1] == _ACTION


def _alike(found: dict[Key, Column], column: Column) -> bool:
    after = found.get((NEXT, *column.key))
    return after is not None and (after.dtype, after.shape) == (column.dtype, column.shape)


def under(name: str, columns: tuple[Column, ...]) -> dict[Key, Key]:
    """Map columns to paths in a file.

    A single column maps to ``name`` itself, and several columns to paths below it.
    """
    if len(columns) == 1 and len(columns[0].key) == 1:
        return {columns[0].key: (name,)}
    return {each.key: (name, *each.key) for each in columns}


class Successors:
    """Counts next observations that differ from the following row's observation.

    The class also counts the final observations that the source had already lost.
    """

    def __init__(self, roles: Roles) -> None:
        self._roles = roles
        self.lost = {"final_observations": 0, "next_observations": 0}

    def count(self, rows: Mapping[Key, np.ndarray]) -> None:
        """Count the rows of an episode."""
        differ = np.zeros(max(0, len(rows[TERMINATED]) - 1), bool)
        for each in self._roles.observations:
            one, after = (_bytes(rows[key], each) for key in (each.key, (NEXT, *each.key)))
            differ |= (after[:-1] != one[1:]).any(1)
        self.lost["next_observations"] += int(differ.sum())
        for key in next_valid_keys(rows):
            self.lost["final_observations"] += int((~rows[key]).sum())


def _bytes(values: np.ndarray, column: Column) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, column.row_nbytes)
