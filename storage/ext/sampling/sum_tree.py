"""Sum tree for draws in proportion to leaves, implemented in C and in NumPy.

A leaf is a float32, 0 or above, that belongs to a slot. Every 16 leaves, which fill one cache line,
have a parent node that stores their sum, the smallest one above 0, and the largest. Every 16 nodes
have a parent node in turn, up to a single root. After a change of a leaf, the nodes above it
are summed again from their children instead of being updated by differences, so that rounding
errors do not accumulate.

The children 0, 4, 8 and 12 of a node are a group, as are 1, 5, 9 and 13, and so on. A node's sum
adds the sums of the groups in order, in float64, and the sum of a group adds its children. A draw
descends from the root by these sums. `engine/_sum_tree.c` and the NumPy code in this module give
bit-identical results. A leaf of 0 is never drawn, regardless of rounding.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from tallyroll.storage.engine import kernel
from tallyroll.storage.engine.kernel import in_order, table_of
from tallyroll.storage.engine.ring import rows_in

FAN_OUT: Final = 16
_GROUPS: Final = 4

_LINE_NBYTES: Final = 64
_BLOCK: Final = np.dtype(
    [("sum", "f8", (FAN_OUT,)), ("least", "f4", (FAN_OUT,)), ("most", "f4", (FAN_OUT,))]
)
"""Sixteen sibling nodes, which share a parent."""

kernel.require_names("NODES", _BLOCK.names or ())


Plain = np.ndarray | tuple[int, int, int]
"""Numbers [n]: an array, or the address, count and item size in bytes of contiguous memory."""


class LeafNumbering(NamedTuple):
    """The rows that have leaves, and their slots."""

    ring: int
    """The number of slots of a ring, in which row r is in slot r % ring; 0 without a ring."""
    base: int
    """The row in slot 0, without a ring."""
    first: int
    """The oldest existing row."""
    stop: int
    """One more than the newest row."""


def _padded(count: int) -> int:
    return max(1, -(-count // FAN_OUT)) * FAN_OUT


def _levels(slots: int) -> list[int]:
    """Return the number of nodes of each level above ``slots`` leaves, from the bottom up."""
    nodes = [-(-_padded(slots) // FAN_OUT)]
    while nodes[-1] > 1:
        nodes.append(-(-nodes[-1] // FAN_OUT))
    return nodes


def tree_nbytes(slots: int) -> int:
    """Return the memory that a tree takes, in bytes."""
    blocks = sum(_padded(nodes) // FAN_OUT for nodes in _levels(slots))
    return 4 * _padded(slots) + _BLOCK.itemsize * blocks


def _aligned(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Return an array of zeros that begins at a cache line."""
    memory = np.zeros(count * dtype.itemsize + _LINE_NBYTES, np.uint8)
    begin = -memory.ctypes.data % _LINE_NBYTES
    return memory[begin : begin + count * dtype.itemsize].view(dtype)


class SumTree:
    """Leaves of slots, and the sums above them. Callers must serialize calls.

    Args:
        slots: the number of leaves, which are 0 initially.
    """

    def __init__(self, slots: int) -> None:
        self._kernel = kernel.compiled()
        self._make(slots)

    def _make(self, slots: int) -> None:
        self.leaves = _aligned(_padded(slots), np.dtype(np.float32))
        """The leaves, float32 [slots]; ``slots`` is a multiple of 16. Only methods change them."""
        self._blocks: list[np.ndarray] = []
        nodes = _levels(slots)
        slots, levels = len(self.leaves), len(nodes)
        words: list[Any] = in_order("TREE", leaves=self.leaves, slots=slots, levels=levels)
        for count in nodes:
            blocks = _aligned(_padded(count) // FAN_OUT, _BLOCK)
            blocks["least"] = np.inf
            self._blocks.append(blocks)
            words += in_order("LEVEL", blocks=blocks, nodes=count)
        self._table = table_of(words)

    def grow(self, slots: int) -> None:
        """Make room for ``slots`` leaves, and keep the existing ones."""
        if slots <= len(self.leaves):
            return
        leaves, levels = self.leaves, self._blocks
        self._make(slots)
        self.leaves[: len(leaves)] = leaves
        for blocks, old in zip(self._blocks, levels, strict=False):
            blocks[: len(old)] = old
        self.renew(0, 1)  # fills the added levels

    @property
    def total(self) -> float:
        """The sum of all leaves."""
        return float(self._blocks[-1]["sum"][0, 0])

    @property
    def least(self) -> np.float32:
        """The smallest leaf above 0; infinite if there is none."""
        found: np.float32 = self._blocks[-1]["least"][0, 0]
        return found

    @property
    def largest(self) -> np.float32:
        """The largest leaf."""
        found: np.float32 = self._blocks[-1]["most"][0, 0]
        return found

    def set(self, slots: np.ndarray, leaves: np.ndarray) -> None:
        """Set leaves, float32 [n], at ``slots``, int64 [n]; the last value of a slot wins.

        Raises:
            IndexError: a slot is not in the tree; nothing was changed.
        """
        if self._kernel is not None:
            self._kernel.set_leaves(self._table, slots.copy(), leaves)
            return
        if len(slots) and not 0 <= slots.min() <= slots.max() < len(self.leaves):
            raise IndexError("a slot is not in the tree")
        self._set(slots, leaves)

    def _set(self, slots: np.ndarray, leaves: np.ndarray) -> None:
        self.leaves[slots] = leaves
        for level in range(len(self._blocks)):
            slots = np.unique(slots // FAN_OUT)
            self._renew(level, slots)

    def put(self, rows: np.ndarray, leaves: np.ndarray, there: LeafNumbering, most: int) -> int:
        """Set leaves, float32 [n], of ``rows``, int64 [n], whose present leaves are above 0.

        The call overwrites ``rows`` and ``leaves`` as scratch space.

        Args:
            rows: row numbers.
            leaves: their new leaves.
            there: the rows that have leaves, and their slots.
            most: one more than the largest row that ever existed.

        Returns:
            The number of rows whose leaf is not above 0.

        Raises:
            IndexError: a row never existed; nothing was changed.
        """
        ring, base, first, stop = there
        if self._kernel is not None:
            return self._kernel.put_leaves(self._table, rows, leaves, ring, base, first, stop, most)
        if len(rows) and not 0 <= rows.min() <= rows.max() < most:
            raise IndexError("a row is not in the tree")
        known = np.flatnonzero((rows >= first) & (rows < stop))
        slots = rows[known] % ring if ring else rows[known] - base
        alive = self.leaves[slots] > 0
        self._set(slots[alive], leaves[known[alive]])
        return len(rows) - int(alive.sum())

    def put_priorities(
        self,
        powers: int | None,
        drawn: np.ndarray | None,
        index: Plain,
        priority: Plain,
        there: LeafNumbering,
        most: int,
    ) -> int:
        """Convert priorities of rows to leaves and set them as `put` does, in one call.

        Args:
            powers: the address of the table of `Powers`.
            drawn: one more than the row that each ``index`` denotes; None: the index is the row.
            index: the index of the rows, int64 [n].
            priority: the priorities, float32 or float64 [n].
            there: the rows that have leaves, and their slots.
            most: one more than the largest row that ever existed.

        Returns:
            The number of rows whose leaf is not above 0. If the extension is not available, or an
            argument has another type or an invalid value, nothing is changed and the result is -1.
        """
        if self._kernel is None or powers is None:
            return -1
        return self._kernel.put_priorities(
            self._table, powers, drawn, index, priority, *there, most
        )

    def fill(self, first: int, stop: int, leaf: float | np.ndarray) -> None:
        """Set the leaves of the slots ``[first, stop)``."""
        self.leaves[first:stop] = leaf
        self.renew(first, stop)

    def renew(self, first: int, stop: int) -> None:
        """Recompute the sums above the slots ``[first, stop)``."""
        if self._kernel is not None:
            self._kernel.renew_sums(self._table, first, stop)
            return
        for level in range(len(self._blocks) if first < stop else 0):
            first, stop = first // FAN_OUT, (stop - 1) // FAN_OUT + 1
            self._renew(level, np.arange(first, stop))

    def _renew(self, level: int, nodes: np.ndarray) -> None:
        if level:
            below = self._blocks[level - 1][nodes]
            sums, least, most = below["sum"], below["least"], below["most"]
        else:
            sums = most = self.leaves.reshape(-1, FAN_OUT)[nodes]
            least = np.where(sums > 0, sums, np.float32(np.inf))
        at = nodes // FAN_OUT, nodes % FAN_OUT
        blocks = self._blocks[level]
        blocks["sum"][at] = _running(_running(_by_group(sums))[:, -1])[:, -1]
        blocks["least"][at] = least.min(axis=1)
        blocks["most"][at] = most.max(axis=1)

    def draw(self, uniform: np.ndarray, there: LeafNumbering) -> tuple[np.ndarray, np.ndarray]:
        """Draw rows in proportion to their leaves; return rows, int64 [n], and leaves, float32 [n].

        Args:
            uniform: numbers in [0, 1), float64 [n]. The call overwrites them as scratch space.
            there: the rows that have leaves, and their slots.

        Raises:
            ValueError: all leaves are 0.
        """
        ring, base, _, stop = there
        if self._kernel is not None:
            rows, leaves = np.empty(len(uniform), np.int64), np.empty(len(uniform), np.float32)
            self._kernel.draw_rows(self._table, uniform, rows, leaves, ring, base, stop)
            return rows, leaves
        if not self.total > 0:
            raise ValueError("expected a tree with a leaf above 0, got only leaves of 0")
        mass = np.minimum(uniform * self.total, np.nextafter(self.total, 0))
        slots = np.zeros(len(uniform), np.int64)
        levels = [blocks["sum"] for blocks in self._blocks[-2::-1]]
        for children in (*levels, self.leaves.reshape(-1, FAN_OUT)):
            found = _by_group(children[slots])
            group, mass = _part_of(_running(found)[:, -1], mass)
            child, mass = _part_of(found[np.arange(len(slots)), :, group], mass)
            slots = slots * FAN_OUT + _GROUPS * child + group
        return rows_in(slots, stop, ring) if ring else slots + base, self.leaves[slots]


def _by_group(children: np.ndarray) -> np.ndarray:
    """Reshape children [n, 16] to [n, child, group]."""
    return children.reshape(-1, FAN_OUT // _GROUPS, _GROUPS)


def _running(numbers: np.ndarray) -> np.ndarray:
    """Return the cumulative sums of numbers [n, 4, ...] along axis 1."""
    return numbers.cumsum(axis=1, dtype=np.float64)


def _part_of(parts: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the parts [n, 4] contains each ``mass`` [n], and the remaining mass."""
    until, each = _running(parts), np.arange(len(parts))
    number = (until <= mass[:, None]).sum(axis=1)
    before = np.where(number > 0, until[each, number - 1], 0)
    end = parts[each, number].astype(np.float64)
    return number, np.minimum(mass - before, np.nextafter(end, 0))
