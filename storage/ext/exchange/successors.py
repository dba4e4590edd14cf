"""Count the next observations that are lost if each observation is stored once. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tallyroll.storage.ext.exchange.roles import Roles
from tallyroll.storage.rows.keys import NEXT, TERMINATED, Key, next_valid_keys
from tallyroll.storage.rows.schema import Column


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
