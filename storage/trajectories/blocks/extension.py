"""The functions of the extension that read blocks, with `storage/engine/_lane_blocks.c`."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import compiled, require_names
from tallyroll.storage.trajectories.blocks.encodings import KINDS

require_names("SHELVES", KINDS)


class LaneKernel(Protocol):
    """The functions. Tables are those of `LaneBlocks`."""

    def spots_of(
        self, table: bytes, tail_count: int, rows: np.ndarray, found: np.ndarray, /
    ) -> None:
        """Find rows, int64 [n], in their lanes: lane, position and start in ``found``, [3, n].

        The table is that of `LaneBlocks`, whose tail has so many rows. All arrays of this and the
        next three functions are contiguous, and int64.

        Raises:
            IndexError: a row is not there, or the blocks are damaged.
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

        Those alone that their stretch has whole, from row ``first`` on, until there are ``most``.
        Returns how many there are.

        Raises:
            IndexError: a row is not there, or the blocks are damaged.
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
        """Find the ``length`` rows up to positions of lanes: ``found`` [n, length].

        ``spots`` [3, n] has the lane, the position, and the lowest one: its row is repeated in the
        place of rows before it. ``near`` [n] are rows, of which each is near those.

        Raises:
            IndexError: a row is not there, or the blocks are damaged.
        """

    def walk_onward(
        self, table: bytes, tail_count: int, rows: np.ndarray, length: int, found: np.ndarray, /
    ) -> None:
        """Walk from each of ``rows`` [n] to the end of its stretch: ``found`` [length, n].

        The last row is repeated in the place of rows after it.

        Raises:
            IndexError: a row is not there, or the blocks are damaged.
        """

    def bounds_of(
        self, table: bytes, tail_count: int, lane: int, position: int, floor: int, /
    ) -> tuple[int, int]:
        """Return the first and one more than the last position of the trajectory of a row.

        The row is at a ``position`` of a lane, of which positions from ``floor`` on are there.

        Raises:
            IndexError: the row is not there, or the blocks are damaged.
        """


def compiled_lanes() -> LaneKernel | None:
    """Return the functions; None if they were not built, or are switched off."""
    kernel: Any = compiled()
    found: LaneKernel | None = kernel
    return found
