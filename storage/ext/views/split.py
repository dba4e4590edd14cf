"""Trajectories divided among parts, at random and the same each time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from tallyroll.storage.ext.views.trajectories import StoredTrajectories
from tallyroll.storage.ext.views.view_reader import ViewReader

_LEEWAY = 1e-9
_MOST_SEED = 2**64


def split(
    trajectories: StoredTrajectories[Any], shares: Mapping[str, float], seed: int
) -> dict[str, ViewReader]:
    """Return a reader of each part of the trajectories; see `DiskStorage.split`."""
    _check(shares, seed)

    def masks(table: np.ndarray) -> dict[str, np.ndarray]:
        parts = divided(table["id"], shares, seed)
        if empty := [name for name, mine in parts.items() if not mine.any()]:
            raise ValueError(
                f"split: expected trajectories for each part, got none for {', '.join(empty)}, of "
                f"{len(table):,} in all. Give larger shares, fewer parts, or more trajectories."
            )
        return parts

    return trajectories.parts(masks)


def _check(shares: Mapping[str, float], seed: int) -> None:
    """Raise `ValueError` unless these are shares of a whole, `TypeError` unless numbers."""
    if type(seed) is not int or not 0 <= seed < _MOST_SEED:
        raise ValueError(f"split: expected a seed from 0 to 2**64 - 1, got {seed!r}.")
    if not shares:
        raise TypeError("split: expected parts and their shares, such as train=0.9, val=0.1.")
    for name, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise TypeError(f"split: expected {name} to be a number, got {share!r}.")
        if not 0 < share <= 1:
            raise ValueError(f"split: expected {name} above 0 and at most 1, got {share!r}.")
    if (total := math.fsum(shares.values())) > 1 + _LEEWAY:
        raise ValueError(
            f"split: expected shares of at most 1 together, got "
            f"{' + '.join(map(repr, shares.values()))} = {total:g}."
        )


def divided(ids: np.ndarray, shares: Mapping[str, float], seed: int) -> dict[str, np.ndarray]:
    """Return which of some trajectories are in each part, bool [trajectories].

    No trajectory is in two parts, and all are in one if the shares are 1 together. It depends on
    the ids and the seed alone, not on the order of the ids: trajectories are put in the order of a
    hash of both, of which each part has the next stretch. So most stay in their part where others
    come or go.

    Args:
        ids: of the trajectories, int64 [trajectories].
        shares: of each part, above 0, 1 together or less.
        seed: of the order, a whole number of 64 bits, 0 or more.
    """
    order = np.lexsort((ids, hashed(ids.astype(np.uint64) ^ hashed(np.array([seed], np.uint64)))))
    found, total, start = {}, 0.0, 0
    for name, share in shares.items():
        total += share
        stop = min(len(ids), math.floor(total * len(ids) + 0.5))
        mine = np.zeros(len(ids), np.bool_)
        mine[order[start:stop]] = True
        found[name], start = mine, stop
    return found


def hashed(numbers: np.ndarray) -> np.ndarray:
    """Return a hash of each number, uint64: the finaliser of SplitMix64."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: np.ndarray = numbers ^ (numbers >> np.uint64(31))
    return found
