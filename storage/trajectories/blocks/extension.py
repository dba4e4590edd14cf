"""Interface of the compiled functions that read blocks (`storage/engine/_lane_blocks.c`)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import compiled, require_names
from tallyroll.storage.trajectories.blocks.encodings import KINDS

require_names("SHELVES", KINDS)


class LaneKernel(Protocol):
    """The compiled functions. Tables are those of `LaneBlocks`."""

    def spots_of(
        self, table: bytes, tail_count: int, rows: np.ndarray, found: np.ndarray, /
    ) -> None:
        """Find rows, int64 [n], in their lanes: lane, position and start in ``found``, [3, n].

        The table is that of `LaneBlocks`, whose tail has ``tail_count`` rows. All arrays of this
        and the next three functions are contiguous int64.

        Raises:
            IndexError: a row does not exist, or the blocks are damaged.
        """

    def windows_of(
        self,
        table: bytes,
        tail_count: int,
        rows: np.ndarray,
        length: int,
        first: int,
        found: np.ndarray,
        /,
    ) -> int:
        """Find the slices of ``length`` rows that end with ``rows`` [n]: ``found`` [most, length].

        Only slices that their stretch fully contains, from row ``first`` on, are found, and at most
        ``most`` of them.

        Returns:
            The number of slices.

        Raises:
            IndexError: a row does not exist, or the blocks are damaged.
        """

    def rows_at(
        self,
        table: bytes,
        tail_count: int,
        spots: np.ndarray,
        near: np.ndarray,
        length: int,
        found: np.ndarray,
        /,
    ) -> None:
        """For each of n positions in lanes, write the ``length`` rows that end there to ``found``.

        ``found`` is [n, length]. ``spots`` [3, n] has the lane, the position and the lowest
        position, whose row is repeated for rows before it. ``near`` [n] has a nearby row for each
        position, at which the search starts.

        Raises:
            IndexError: a row does not exist, or the blocks are damaged.
        """

    def walk_onward(
        self, table: bytes, tail_count: int, rows: np.ndarray, length: int, found: np.ndarray, /
    ) -> None:
        """Walk from each of ``rows`` [n] to the end of its stretch: ``found`` [length, n].

        The last row is repeated for rows after it.

        Raises:
            IndexError: a row does not exist, or the blocks are damaged.
        """

    def bounds_of(
        self, table: bytes, tail_count: int, lane: int, position: int, floor: int, /
    ) -> tuple[int, int]:
        """Return the first and one more than the last position of the trajectory of a row.

        The row is at ``position`` of a lane, whose positions from ``floor`` on are available.

        Raises:
            IndexError: the row does not exist, or the blocks are damaged.
        """


def compiled_lanes() -> LaneKernel | None:
    """Return the compiled functions, or None if they were not built or are switched off."""
    kernel: Any = compiled()
    found: LaneKernel | None = kernel
    return found
