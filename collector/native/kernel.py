"""Compiled functions that speed up the steps of small environments, if they are built.

One call of a function replaces Python and NumPy code. The same tests run with and without the
functions. `tallyroll.storage.engine.kernel` describes when the Python code runs instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tallyroll.storage.engine.kernel import Extension


class StepKernel(Protocol):
    """The compiled functions.

    :func:`table_of` makes the tables. The caller keeps the arrays of a table alive.
    """

    def number_slots(self, table: bytes, slots: int, taken: np.ndarray | None, /) -> int:
        """Number the rows of the first slots of a slab; see `SlabTable` for the table.

        Args:
            table: the numbering table.
            slots: number of slots.
            taken: marks of the slots that are rows, bool [slots, lane]; None means all slots.

        Returns:
            The number of episodes that began, times 2**32, plus the number that ended.
        """

    def are_inside(self, table: bytes, slots: int, /) -> bool:
        """Return True if all values of the first slots are within bounds; NaN never is.

        The table has five words per column: the address of the column, the number of its dtype in
        `KINDS`, the number of values in a slot, and the addresses of the low and the high bounds of
        a slot.
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

        The rows are the held rows in slot 0, then the transitions of the other slots, in slot
        order. The remaining rows of the last slot are held for the next call. The call does the
        work of `are_inside`, `number_slots`, `Ledger`, `RunRecord` and `commit_rows`, and prepares
        the slab for the next slot. It writes the episodes that ended to a ring of records, in the
        order of the rows and with their numbers in the run. No signal handler runs in between.

        ``plan`` is the plan of `SlotRows`, ``room`` is the number of free rows of the storage, and
        ``version`` is the version of the policy in the last slot. If ``watched`` is True, the
        caller must see rows in which an episode begins or ends before they are stored.

        If there is a ``batch``, the rows are stored lane by lane, and copied to the columns of the
        batch with marks as in `cuts`. The first part of ``batch`` is a table with the indices of
        the columns of ids and of done flags, then three words per column: the address of row 0 in
        the slab, the number of bytes in a row, and the kind of its marks. The kinds are 0 for none,
        1 for the last rows of trajectories, 2 for the first rows, and 3 for cuts, a column without
        an address in the slab. The second part is a table with the addresses of the batch's
        columns, and the third part keeps these columns alive.

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

        The table has five words: the addresses of rewards, terminated and truncated, 1 if rewards
        are float64 or else 0, and the number of lanes. For each observation, four parts follow: the
        address of its row, the address of the copy that the policy sees next (0 if it is the same
        memory), the number of dimensions, and the shape. ``formats`` has the number format of each
        observation, as in `struct`. Rewards may be float32 or float64. If ``final`` is not None, it
        has the final observations. For lanes that ended, these are written to the rows, and only
        the policy sees the observations that the step returned.

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
        """Write an entry of vector infos to its column ``row`` ``[lane, ...]``, for ``lanes``.

        ``found`` is None if no lane has the entry. Otherwise it is a pair: the values of all lanes,
        and marks of the lanes that have the entry, or None if all have it. Lanes without the entry
        get ``fill``. The output ``given`` marks the lanes that have it. Both are None if every lane
        must have the entry. ``lanes`` are marks; None means all lanes.

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

        The table has these eight words, followed by the shape of an observation:

        * the addresses of rewards (float64), of terminated and of truncated (both bool);
        * the address of the number of the lane that is being stepped (int64, -1 before the first
          lane);
        * the address of final observations;
        * the number of lanes;
        * the mode, which says what happens to a lane whose episode has ended: in mode 0, stepping
          it is an error; in mode 1, a lane that ``ended`` (bool [lane]) marks is reset instead of
          stepped; in mode 2, it is reset in the same step, after its observation is copied to the
          final observations;
        * the number of bytes in an observation.

        Observations are put into the list ``seen``, and copied to ``to`` [lane, ...].

        The ``readers`` are, in this order:

        * the NumPy types of a bool and a float32, whose values are read directly, like Python's
          bools, small integers, and floats in the range of float32;
        * the functions that read any other value of reward, terminated and truncated;
        * the function that copies any other final observation, and the function that raises if a
          reset overwrote it;
        * the function that writes those entries of an info that are columns;
        * the entries of an info that ``step_lanes`` writes itself, because they are plain numbers,
          or arrays with the dtype and shape of their columns. Each entry has a path of names, a
          dtype and a table.

        The table of an entry has four words, followed by the shape of a row: the address of the
        column; the address of the bool column that marks the lanes with the entry (0 if it is
        required); the kind of Python values that are written directly (0 for none, 1 for float to
        float64, 2 for int to int64, 3 for an empty dictionary, which has no column); and the number
        of bytes in a row.

        ``slot`` is a table as for `put_step`, with a single observation, whose row is ``to``. If
        given, the rest of the step is written to this slot too.

        Returns:
            The number of lanes that ended; -1 if something could not be copied to ``to`` or
            ``slot``, such as an observation of another dtype or shape, or a reward that becomes
            infinite.

        Raises:
            AssertionError: a lane has ended, and the mode does not allow a step after that.
            ValueError: there are fewer actions than lanes, or an environment does not return five
                values from a step, or two from a reset.
        """

    def nth_marked(self, marks: np.ndarray, uniform: np.ndarray, chosen: np.ndarray, /) -> None:
        """Write to ``chosen`` the index of one marked entry per row of ``marks`` ``[*rows, n]``.

        All arrays are contiguous: ``marks`` is bool, ``uniform`` is float64 ``[*rows]`` in [0, 1),
        and ``chosen`` is int64 ``[*rows]``.

        Raises:
            ValueError: the arrays differ in their rows; nothing is written.
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
    """Return the functions; None if they were not built or are switched off."""
    kernel: StepKernel | None = EXTENSION.functions()
    return kernel
