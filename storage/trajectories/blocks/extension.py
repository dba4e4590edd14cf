"""Interface of the compiled functions that read blocks (`storage/engine/_lane_blocks.c`)."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import compiled, require_names
from tallyroll.storage.trajectories.blocks.encodings import KINDS

require_names("SHELVES", KINDS)


class LaneKernel(Protocol):
    """The compiled functions. Each ``table`` argument is the table of a `LaneBlocks`."""

    def spots_of(
        self, table: bytes, tail_count: int, rows: np.ndarray, found: np.ndarray, /
    ) -> None:
        """Write the lane, position and start of each of ``rows`` [n] to ``found`` [3, n].

        ``tail_count`` is the number of rows in the tail of the `LaneBlocks`. All arrays that the
        compiled functions take are contiguous int64.

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
        """Write slices of ``length`` rows that end with ``rows`` to ``found`` [most, length].

        At most ``most`` slices are written, and only slices that lie within one stretch and have no
        row below ``first``.

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
        """Write to ``found`` the ``length`` rows that end at each of n positions in lanes.

        ``found`` is [n, length]. ``spots`` [3, n] has the lane, the position and the lowest
        position, whose row is repeated for rows before it. ``near`` [n] has a nearby row for each
        position, at which the search starts.

        Raises:
            IndexError: a row does not exist, or the blocks are damaged.
        """

    def walk_onward(
        self, table: bytes, tail_count: int, rows: np.ndarray, length: int, found: np.ndarray, /
    ) -> None:
        """Write to ``found`` [length, n] the ``length`` rows that begin at each of ``rows``.

        The last row of a stretch is repeated for rows after it.

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
