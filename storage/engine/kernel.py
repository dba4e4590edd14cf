"""Compiled functions for the work of every step of small environments, if they are built.

Each does in one call the same as Python and NumPy code beside its use, which takes a call a
column; the same tests run with and without them. Without a compiler at installation, or with the
functions switched off (``-kernel``, see `ways`), that code runs instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np

from tallyroll.storage import ways
from tallyroll.storage.errors import ExtensionMismatch
from tallyroll.storage.files.commit_header import CommitCounts


class TreeKernel(Protocol):
    """The functions of sum trees; see `SumTree`."""

    def set_leaves(self, table: bytes, slots: np.ndarray, leaves: np.ndarray, /) -> None:
        """Set leaves, float32 [n], of the ``slots``, int64 [n], and sum them up; see `SumTree`.

        Both are contiguous, and the slots are used up.

        Raises:
            IndexError: a slot is not in the tree; nothing is changed.
        """

    def put_leaves(
        self,
        table: bytes,
        rows: np.ndarray,
        leaves: np.ndarray,
        ring: int,
        base: int,
        first: int,
        stop: int,
        most: int,
        /,
    ) -> int:
        """Set leaves, float32 [n], of rows, int64 [n], if they have leaves above 0; see `SumTree`.

        Both are contiguous, and are used up. Rows ``[first, stop)`` may have leaves: in slot
        r % ring, and where ``ring`` is 0 in r - base.

        Returns:
            How many rows have none.

        Raises:
            IndexError: a row is below 0, or not below ``most``; nothing is changed.
        """

    def put_priorities(
        self,
        table: bytes,
        powers: int,
        drawn: np.ndarray | None,
        index: np.ndarray | tuple[int, int, int],
        priorities: np.ndarray | tuple[int, int, int],
        ring: int,
        base: int,
        first: int,
        stop: int,
        most: int,
        /,
    ) -> int:
        """Set the leaves of rows to powers of priorities; see `SumTree.put_priorities`.

        Numbers are an array, or the address, the count and the bytes a number of contiguous ones:
        int64 for the index, float32 or float64 for priorities. ``powers`` is the address of the
        table of `Powers`; for the other numbers see `put_leaves`.

        Returns:
            How many rows have none; -1, with nothing done, if an array is of another dtype, has
            several dimensions and gaps, or has more than 1024 numbers, if their counts differ, if a
            row never was, or if a priority, or its power, is negative, infinite, 0 or no number.
        """

    def renew_sums(self, table: bytes, first: int, stop: int, /) -> None:
        """Sum up the leaves of the slots ``[first, stop)`` again; see `SumTree`.

        Raises:
            IndexError: a slot is not in the tree.
        """

    def draw_rows(
        self,
        table: bytes,
        uniform: np.ndarray,
        rows: np.ndarray,
        leaves: np.ndarray,
        ring: int,
        base: int,
        stop: int,
        /,
    ) -> None:
        """Draw rows in proportion to their leaves; see `SumTree`. Arrays are contiguous.

        Args:
            table: of the tree.
            uniform: numbers from 0 to below 1, float64 [n], which are used up.
            rows: where the rows are written, int64 [n].
            leaves: where their leaves are written, float32 [n].
            ring: slots of the ring, 0 without one; see `put_leaves`.
            base: the row in slot 0 without a ring.
            stop: one more than the newest row.

        Raises:
            ValueError: all leaves are 0.
        """


class Kernel(TreeKernel, Protocol):
    """The functions. :func:`table_of` makes a table; the caller keeps its arrays alive."""

    def copy_rows(self, table: bytes, slot: int, first: int, count: int, /) -> None:
        """Copy rows ``[first, first + count)`` of each column to slots from ``slot`` on.

        The table has three words a column: address of slot 0, address of row 0, bytes of a row.
        """

    def commit_rows(
        self,
        table: bytes,
        slot: int,
        first: int,
        count: int,
        header: bytes,
        known: int,
        record: bytes,
        /,
    ) -> bool:
        """Copy rows as `copy_rows` does, and commit and count them with ``record``, in one call.

        ``header`` are `Header.addresses`, and ``known`` is the address of the block of the same
        header's counts. Return False, with nothing done, if an earlier commit was interrupted, or
        if another process writes.
        """

    def gather_rows(self, table: bytes, slot: int, index: np.ndarray, rows: int, /) -> None:
        """Copy rows ``index``, contiguous intp [n], in their order; the table is `copy_rows`'s.

        Raises:
            IndexError: one of them is not among the first ``rows``; nothing is copied.
        """

    def pack_runs(
        self, table: bytes, runs: np.ndarray, parts: np.ndarray, rows: int, most: int, /
    ) -> None:
        """Copy ``runs`` of rows to one place, part by part, and each part column by column.

        Runs are int64 [n, 2], contiguous: the slot of the first row, and the number of rows; a part
        has so many of them as ``parts``, int64 [m], says. The table is `copy_rows`'s, where all
        columns have the address of the place, which has space for ``most`` rows.

        Raises:
            IndexError: a row is not among the first ``rows``, there are more than ``most``, or the
                parts have other runs; nothing is copied.
        """

    def number_slots(self, table: bytes, slots: int, taken: np.ndarray | None, /) -> int:
        """Number the rows of the first slots of a slab; see `SlabRows` for the table.

        ``taken`` says which slots are rows, bool [slots, lane]; None: all. Return the number of
        episodes that began, times 2**32, plus the number that ended.
        """

    def are_inside(self, table: bytes, slots: int, /) -> bool:
        """Return whether all values of the first slots lie within bounds, which NaN never does.

        The table has five words a column: its address, the kind of its numbers (`KINDS`), how
        many there are in a slot, and the addresses of the low and the high bounds of a slot.
        """

    def store_slots(
        self,
        plan: tuple[Any, ...],
        used: int,
        count: int,
        room: int,
        version: int,
        watched: bool,
        batch: tuple[bytes, Any, Any] | None,
        /,
    ) -> int:
        """Check, number, count and commit ``count`` rows of the first ``used`` slots of a slab.

        The rows are the held ones, in slot 0, and the transitions of the other slots, in slot
        order; those of the last slot that are left are held for the next call. The call does the
        work of `are_inside`, `number_slots`, `Ledger`, `RunRecord` and `commit_rows`, makes the
        slab ready for the next slot, and writes the episodes that ended to a ring of records, in
        the order of the rows and with their numbers in the run. No handler of a signal runs in
        between.

        ``plan`` is that of `SlotRows`, ``room`` the number of rows that there is space for, and
        ``version`` the policy's in the last slot. With ``watched`` the caller must see rows before
        they are stored, if an episode begins or ends in them.

        With a ``batch`` the rows are stored lane by lane, and copied to its columns, marked as in
        `cuts`. Its first table has the numbers of the columns of ids and of done flags; then three
        words a column: the address of row 0 in the slab, the bytes of a row, and its marks (0:
        none, 1: last rows of trajectories, 2: first ones, 3: cuts, which has no address). The
        second, int64 too, has the addresses of the batch's columns, which its third part keeps.

        Returns:
            How many episodes ended; -1, with nothing done, if the caller must store the slots
            step by step.
        """

    def put_step(
        self,
        table: bytes,
        formats: tuple[bytes, ...],
        observations: Sequence[Any],
        reward: Any,
        terminated: Any,
        truncated: Any,
        final: Sequence[Any] | None,
        /,
    ) -> int:
        """Write the arrays that a step returned to a slot; see `Stepper.step_of`.

        The table has five words: the addresses of rewards, of terminated and of truncated, whether
        rewards are float64, and the number of lanes; then for each observation its address, that of
        the one that the policy sees next (0: the same memory), the number of its dimensions, and
        these. Its numbers have its format (`struct`). Rewards may be float32 or float64. The
        ``final`` observations of lanes that ended are written in place of those that the step
        returned, which only the policy sees; None: there are none.

        Returns:
            How many lanes ended; -1 if an array is different, or a reward becomes infinite: then
            the caller writes the whole step by NumPy.
        """

    def put_entry(
        self,
        row: np.ndarray,
        given: np.ndarray | None,
        fill: bytes | None,
        found: tuple[Any, np.ndarray | None] | None,
        lanes: np.ndarray | None,
        /,
    ) -> bool:
        """Write an entry of vector infos to its column ``row`` ``[lane, ...]``, of some ``lanes``.

        ``found`` has the entry ``[lane, ...]``, and the lanes that have it (None: all); None: no
        lane does. Lanes without it get ``fill``, and ``given`` says which have it; both are None
        if all of ``lanes`` (None: all lanes) must have it.

        Returns:
            False if an array is different, or a lane lacks the entry: then the caller writes, or
            refuses it.
        """

    def step_lanes(
        self,
        table: bytes,
        dtype: np.dtype[Any],
        readers: tuple[Any, ...],
        envs: list[Any],
        action: np.ndarray,
        seen: list[Any],
        ended: np.ndarray,
        to: np.ndarray | None,
        slot: bytes | None,
        /,
    ) -> int:
        """Step environments in turn, each with its row of ``action``; see `LanesInTurn`.

        The table has eight words: the addresses of rewards, float64, of terminated and of
        truncated, bool, of the number of the lane that is being stepped, int64, -1 before the
        first, and of final observations; the number of lanes; the mode of a lane whose episode
        ends: 0: it must not be stepped on, 1: a lane that ``ended``, bool [lane], is reset
        instead, 2: it is reset in the same step, after its observation was copied to the final
        ones; and the bytes of an observation; then its shape. Observations are put into ``seen``,
        and copied to ``to`` [lane, ...]. The ``readers`` are NumPy's types of a bool and of a
        float32, which are read directly, like Python's bools, floats that a float32 holds and
        small integers; the functions that read any other reward, terminated and truncated; those
        that copy any other final observation, and refuse one that a reset overwrote; the one that
        writes the entries of an info which are columns; and those of these entries that are plain
        numbers, or arrays of their column's dtype and shape, in the infos of steps, which are
        written here: for each its path of names, its dtype and a table. That has the address of
        the column; the address of the column, bool, that says where it was given, 0: it must be;
        the kind of Python's numbers that it takes (1: float, as float64, 2: int, as int64, 3:
        none, but an empty dictionary, which is not written); and the bytes of a row; then its
        shape. A ``slot`` is a table of `put_step`, of a single observation, whose row is ``to``:
        the rest of the step is written there too.

        Returns:
            How many lanes ended; -1 if not all was copied to ``to`` and ``slot``, as an observation
            of another dtype or shape, or a reward that becomes infinite.

        Raises:
            AssertionError: a lane ended, and the table says not to reset it.
            ValueError: fewer actions than lanes, or an environment does not return five values
                from a step, or two from a reset.
        """

    def same_rows(self, one: np.ndarray, other: np.ndarray, same: np.ndarray, skip: int, /) -> None:
        """Write to ``same``, bool [n], which rows [n, ...] of two arrays have the same bytes.

        All are contiguous. The first ``skip`` bytes of a row of ``one``, and the last of one of the
        ``other``, are not looked at.

        Raises:
            ValueError: the arrays differ in their bytes, or have rows of fewer.
        """

    def nth_marked(self, marks: np.ndarray, uniform: np.ndarray, chosen: np.ndarray, /) -> None:
        """Write one of the marked entries of each row of ``marks`` ``[*rows, n]`` to ``chosen``.

        All are contiguous: bool, float64 in [0, 1) ``[*rows]``, int64 ``[*rows]``.

        Raises:
            ValueError: their rows differ; nothing is written.
        """


KINDS = {
    np.dtype(kind): number
    for number, kind in enumerate(("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"))
}
"""The numbers of the dtypes that `Kernel.are_inside` knows."""


def table_of(words: Iterable[int]) -> bytes:
    """Return a table of these numbers; it does not keep the arrays at its addresses alive."""
    return np.fromiter(words, np.int64).tobytes()


def copy_table(targets: Iterable[int], sources: Iterable[int], row_nbytes: Iterable[int]) -> bytes:
    """Return the table of `Kernel.copy_rows`: two addresses and the bytes of a row, by column."""
    return table_of(chain.from_iterable(zip(targets, sources, row_nbytes, strict=True)))


_kernel: Any
try:
    from tallyroll.storage.engine import _kernel  # type: ignore[no-redef]
except ImportError:
    _kernel = None


def require_names(block: str, names: tuple[str, ...]) -> None:
    """Refuse an extension that has other words in a block of counts, or in another order.

    Args:
        block: the name under which the extension exports its own names.
        names: those of Python's list.

    Raises:
        ExtensionMismatch: they differ, and the extension is not switched off.
    """
    global _kernel
    built = tuple(getattr(_kernel, block, "").split())
    if _kernel is None or built == names:
        return
    if not ways.is_on("kernel"):
        _kernel = None
        return
    raise ExtensionMismatch(
        f"expected the extension {_kernel.__file__} to have the words {', '.join(names)} in "
        f"{block}, got {', '.join(built) or 'none'}: it was built from other sources. Install "
        f"tallyroll again, or set {ways.VARIABLE}=-kernel to do without the extension."
    )


require_names("COMMIT", CommitCounts.names)


def is_built() -> bool:
    """Return whether the extension was built."""
    return _kernel is not None


def compiled() -> Kernel | None:
    """Return the functions; None if they were not built, or are switched off."""
    kernel: Kernel | None = _kernel if ways.is_on("kernel") else None
    return kernel
