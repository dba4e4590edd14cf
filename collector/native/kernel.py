"""Compiled functions for the work of each step of small environments, if they are built.

Each function replaces Python and NumPy code in one call. The same tests run with and without the
functions. `tallyroll.storage.engine.kernel` describes when the Python code runs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import Extension


class StepKernel(Protocol):
    """The compiled functions.

    :func:`table_of` makes tables, whose arrays the caller keeps alive.
    """

    def number_slots(self, table: bytes, slots: int, taken: np.ndarray | None, /) -> int:
        """Number the rows of the first slots of a slab; see `SlabRows` for the table.

        Args:
            table: the table.
            slots: number of slots.
            taken: marks of rows, bool [slots, lane]; None: all.

        Returns:
            The number of episodes that began, times 2**32, plus the number that ended.
        """

    def are_inside(self, table: bytes, slots: int, /) -> bool:
        """Return True if all values of the first slots lie within bounds, which NaN never does.

        The table has five words per column: its address, its dtype (`KINDS`), the number of values
        in a slot, and the addresses of the low and the high bounds of a slot.
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
        order. Rows of the last slot that are left are held for the next call. The call does the
        work of `are_inside`, `number_slots`, `Ledger`, `RunRecord` and `commit_rows`, and prepares
        the slab for the next slot. It writes the episodes that ended to a ring of records, in the
        order of the rows and with their numbers in the run. No signal handler runs in between.

        ``plan`` is that of `SlotRows`, ``room`` the number of free rows of the storage, and
        ``version`` the policy's in the last slot. With ``watched`` the caller must see rows before
        they are stored, if an episode begins or ends in them.

        With a ``batch`` the rows are stored lane by lane, and copied to the batch's columns, marked
        as in `cuts`. Its first table has the numbers of the columns of ids and of done flags; then
        three words per column: the address of row 0 in the slab, the bytes of a row, and its marks
        (0: none, 1: last rows of trajectories, 2: first ones, 3: cuts, which has no address). The
        second, int64 too, has the addresses of the batch's columns, which its third part keeps
        alive.

        Returns:
            The number of episodes that ended; -1, with nothing done, if the caller must store the
            slots step by step.
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
        rewards are float64, and the number of lanes. Then it has for each observation its address,
        that of the one that the policy sees next (0: the same memory), the number of its
        dimensions, and its shape. ``formats`` has the format of the numbers of each (`struct`).
        Rewards may be float32 or float64. The ``final`` observations of lanes that ended are
        written instead of those that the step returned, which only the policy sees; None: there are
        none.

        Returns:
            The number of lanes that ended; -1 if an array has an unexpected type or shape, or a
            reward becomes infinite. The caller then writes the whole step with NumPy.
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
        """Write an entry of vector infos to its column ``row`` ``[lane, ...]``, for some ``lanes``.

        ``found`` has the entry ``[lane, ...]``, and the lanes that have it (None: all); None: no
        lane has it. Lanes without it get ``fill``, and ``given`` marks the lanes that have it. Both
        are None if all of ``lanes`` (None: all lanes) must have it.

        Returns:
            False if an array has an unexpected type or shape, or a lane lacks the entry. The caller
            then writes or refuses it.
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
        """Step environments in turn, each with its row of ``action``; see `SequentialStep`.

        The table has eight words, and then the shape of an observation:

        * the addresses of rewards, float64, of terminated and of truncated, bool;
        * the address of the number of the lane that is being stepped, int64, -1 before the first;
        * the address of final observations;
        * the number of lanes;
        * the mode of a lane whose episode ends: 0: stepping it is an error; 1: a lane that
          ``ended``, bool [lane], is reset instead; 2: it is reset in the same step, after its
          observation was copied to the final ones;
        * the bytes of an observation.

        Observations are put into ``seen``, and copied to ``to`` [lane, ...].

        The ``readers`` are, in this order:

        * NumPy's types of a bool and of a float32, which are read directly, like Python's bools,
          floats that a float32 holds and small integers;
        * the functions that read any other reward, terminated and truncated;
        * the functions that copy any other final observation, and refuse one that a reset
          overwrote;
        * the function that writes the entries of an info which are columns;
        * the entries of an info that this function writes itself, plain numbers or arrays of their
          column's dtype and shape: for each its path of names, its dtype and a table.

        A table of an entry has the address of the column; the address of the bool column that marks
        where it was given, 0: it must be; the kind of Python's numbers that it accepts (1: float,
        as float64, 2: int, as int64, 3: none, but an empty dictionary, which is not written); and
        the bytes of a row; then its shape.

        A ``slot`` is a table of `put_step`, of a single observation, whose row is ``to``: the rest
        of the step is written there too.

        Returns:
            The number of lanes that ended; -1 if not everything was copied to ``to`` and ``slot``,
            such as an observation of another dtype or shape, or a reward that becomes infinite.

        Raises:
            AssertionError: a lane ended, and the mode forbids to step it.
            ValueError: there are fewer actions than lanes, or an environment does not return five
                values from a step, or two from a reset.
        """

    def nth_marked(self, marks: np.ndarray, uniform: np.ndarray, chosen: np.ndarray, /) -> None:
        """Write the index of a marked entry of each row of ``marks`` ``[*rows, n]`` to ``chosen``.

        All are contiguous: ``marks`` bool, ``uniform`` float64 in [0, 1) ``[*rows]``, ``chosen``
        int64 ``[*rows]``.

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
"""Numbers of the dtypes that `StepKernel.are_inside` supports."""


def compiled() -> StepKernel | None:
    """Return the functions; None if they were not built, or are switched off."""
    kernel: StepKernel | None = EXTENSION.functions()
    return kernel
