"""Compiled functions for the work of every step of small environments, if they are built.

Each does in one call the same as Python and NumPy code beside its use; the same tests run with and
without them. `tallyroll.storage.engine.kernel` says when that code runs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import Extension


class StepKernel(Protocol):
    """The functions. :func:`table_of` makes a table; the caller keeps its arrays alive."""

    def number_slots(self, table: bytes, slots: int, taken: np.ndarray | None, /) -> int:
        """Number the rows of the first slots of a slab; see `SlabRows` for the table.

        ``taken`` says which slots are rows, bool [slots, lane]; None: all. Return the number of
        episodes that began, times 2**32, plus the number that ended.
        """

    def are_inside(self, table: bytes, slots: int, /) -> bool:
        """Return whether all values of the first slots lie within bounds, which NaN never does.

        The table has five words a column: its address, its dtype (`KINDS`), how many values there
        are in a slot, and the addresses of the low and the high bounds of a slot.
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

    def nth_marked(self, marks: np.ndarray, uniform: np.ndarray, chosen: np.ndarray, /) -> None:
        """Write one of the marked entries of each row of ``marks`` ``[*rows, n]`` to ``chosen``.

        All are contiguous: bool, float64 in [0, 1) ``[*rows]``, int64 ``[*rows]``.

        Raises:
            ValueError: their rows differ; nothing is written.
        """


EXTENSION = Extension("tallyroll.collector.native._kernel")
is_built = EXTENSION.is_built
require_names = EXTENSION.require_names
in_order = EXTENSION.in_order

DTYPES = ("f4", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8")
require_names("DTYPES", DTYPES)
KINDS = {np.dtype(kind): number for number, kind in enumerate(DTYPES)}
"""The numbers of the dtypes that `StepKernel.are_inside` knows."""


def compiled() -> StepKernel | None:
    """Return the functions; None if they were not built, or are switched off."""
    kernel: StepKernel | None = EXTENSION.functions()
    return kernel
