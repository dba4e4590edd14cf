"""Blocks as plain arrays, in the form of the index file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tallyroll.storage.trajectories.blocks.encodings import (
    KINDS,
    MOST_LAYERS,
    BitEncoding,
    LaneEncoding,
    OrderEncoding,
    TableEncoding,
)

Parts = Sequence[np.ndarray]
"""An array in consecutive parts."""

_CLASSES: Final[dict[str, Any]] = {
    "order": OrderEncoding,
    "table": TableEncoding,
    "bits": BitEncoding,
}
_ITEMSIZES: Final = (2, 4)

BY_BLOCK: Final = 3
"""The number of values per block: its first row, its shelf, and the index of its first cell."""
BY_LANE: Final = 5
"""The number of values per lane: its number in the storage, and the values of `Tail.state`."""
BY_CELL: Final = (np.dtype("<i8"),) * 3 + (np.dtype("<u4"),)
"""The dtypes of the values of a cell, the combination of a block and a lane: the number of rows of
the lane before the block, the start of the last stretch before the block, the trajectory of that
stretch, and the position at which the lane begins in the order of lanes."""


@dataclass(frozen=True, slots=True)
class ShelfState:
    """The blocks of a shelf."""

    key: tuple[int, ...]
    """The number of the kind, the size of an offset in bytes, and `LaneEncoding.sizes`."""
    arrays: Sequence[Parts]
    """The arrays of `LaneEncoding.stored`."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """All blocks of an index, and its lanes. Rows after the last block are not included."""

    rows: int
    """One more than the number of the last row."""
    by_block: np.ndarray
    """See `BY_BLOCK`, int64 [3, blocks]."""
    by_lane: np.ndarray
    """See `BY_LANE`, int64 [5, lanes]."""
    by_cell: Sequence[np.ndarray]
    """See `BY_CELL`, [cells] each."""
    shelves: Sequence[ShelfState]
    """Shelves in the order in which blocks first use them. Slots follow the order of blocks."""

    def is_as(self, other: BlockState) -> bool:
        """Return True if all numbers are the same."""
        mine, its = self._all(), other._all()
        return (
            self.rows == other.rows
            and [shelf.key for shelf in self.shelves] == [shelf.key for shelf in other.shelves]
            and len(mine) == len(its)
            and all(np.array_equal(whole(a), whole(b)) for a, b in zip(mine, its, strict=True))
        )

    def _all(self) -> list[Parts]:
        arrays = [[each] for each in (self.by_block, self.by_lane, *self.by_cell)]
        return [*arrays, *(parts for shelf in self.shelves for parts in shelf.arrays)]


def whole(parts: Parts) -> np.ndarray:
    """Return the concatenated array."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def empty_shelf(key: Sequence[int]) -> LaneEncoding:
    """Return an empty shelf for a `ShelfState.key`; raise ValueError if the key is invalid."""
    kind, itemsize, *sizes = key
    if not 0 <= kind < len(KINDS) or itemsize not in _ITEMSIZES:
        raise ValueError("a shelf has an unknown kind")
    name = KINDS[kind]
    if len(sizes) != {"order": 0, "table": 1, "bits": 2}[name] or min(sizes, default=1) < 1:
        raise ValueError("a shelf has invalid sizes")
    if name == "bits" and sizes[1] > MOST_LAYERS:
        raise ValueError("a shelf has too many layers")
    made: LaneEncoding = _CLASSES[name](np.dtype(f"<u{itemsize}"), *sizes)
    return made


def key_of(shelf: LaneEncoding) -> tuple[int, ...]:
    """Return the `ShelfState.key` of a shelf."""
    kind = next(name for name, each in _CLASSES.items() if type(shelf) is each)
    return KINDS.index(kind), shelf.dtype.itemsize, *shelf.sizes


def merged(shelves: Sequence[LaneEncoding]) -> ShelfState:
    """Return the concatenated blocks of shelves of one kind."""
    rows = [shelf.stored for shelf in shelves]
    arrays: list[list[np.ndarray]] = []
    for at in range(len(rows[0])):
        parts, before = [], 0
        for stored in rows:
            pile, _, into = stored[at]
            parts.append(pile.all + before if into is not None and before else pile.all)
            before += into.count if into is not None else 0
        arrays.append(parts)
    return ShelfState(key_of(shelves[0]), arrays)
