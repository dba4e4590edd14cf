"""Compiled functions for what is done with every step of small environments, where they are built.

They do what Python and NumPy do elsewhere here, in one call where those take one a column; every
use says what it stands for, and the same tests run with and without them. Where no compiler was
found when the package was installed, or they are switched off (``-kernel``, see
`ways`), all goes the longer way.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any, Protocol

import numpy as np

from tallyroll.storage import ways


class Kernel(Protocol):
    """The functions. A table is what :func:`table_of` makes; its arrays must be kept alive."""

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
        word: int,
        seal: bytes,
        record: bytes,
        /,
    ) -> None:
        """`copy_rows`, and what makes the rows count, in the order of a commit; see `Header`.

        ``header`` has three words: addresses of ``reserve``, of ``head`` and of the record's slot.
        Both counts become ``word``. Into the slot go ``seal``, its first word last, and ``record``.
        """

    def gather_rows(self, table: bytes, slot: int, index: np.ndarray, rows: int, /) -> None:
        """The same of rows ``index``, contiguous intp [n], in their order.

        Raises:
            IndexError: one of them is not among the first ``rows``; nothing is copied.
        """

    def number_slots(self, table: bytes, slots: int, taken: np.ndarray | None, /) -> int:
        """Number the rows of the first slots of a slab; see `SlabRows` for the table.

        ``taken`` says which slots are rows, bool [slots, lane]; None: all. Returns how many
        episodes began, times 2**32, and how many ended.
        """

    def are_inside(self, table: bytes, slots: int, /) -> bool:
        """Whether all values of the first slots lie within bounds, NaN in none.

        The table has five words a column: its address, what its numbers are (`KINDS`), how many
        there are in a slot, and the addresses of the bounds of a slot.
        """

    def store_slot(self, plan: tuple[Any, ...], room: int, version: int, watched: bool, /) -> int:
        """Check, number, count and commit the first slot of a slab, of which all lanes are rows.

        It is `are_inside`, `number_slots`, what `Ledger` and `RunRecord` say, and `commit_rows`;
        then the slab is ready for the next slot. No signal's handler runs in between. ``plan`` is
        that of `SlotRows`, ``room`` how many rows there is space for, ``version`` that of the
        policy, and ``watched``: begins and ends of episodes want a look before.

        Returns:
            How many episodes ended; -1, and nothing done, where it takes the longer way.
        """

    def put_step(
        self,
        table: bytes,
        format: bytes,
        observation: Any,
        reward: Any,
        terminated: Any,
        truncated: Any,
        /,
    ) -> int:
        """Write what a step returned to a slot; see `SystemEnv.step_of_first`.

        The table has seven words: the addresses of the observation, of what is seen next (0: that
        is the same memory), of rewards, of terminated and of truncated, whether rewards are
        float64, and how many lanes there are; and the shape of the observation, whose numbers are
        of ``format`` (`struct`). Rewards may be float32 or float64.

        Returns:
            How many lanes ended; -1 where an array is not such, or a reward becomes infinite:
            NumPy writes it then, whatever was written.
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
        to: np.ndarray,
        /,
    ) -> bool:
        """Step environments in turn, each with its row of ``action``; see `LanesInTurn`.

        The table has seven words: the addresses of rewards, float64, of terminated and of
        truncated, bool, and of the number of the lane that is stepped, int64, -1 before the first;
        how many lanes there are; whether one that ``ended``, bool [lane], is reset instead; and
        the bytes of an observation; then its shape. Observations go to ``seen``, and to ``to``
        [lane, ...]. The ``readers`` are NumPy's types of a bool and of a float32, which are taken
        as they are, like Python's bools, floats that a float32 holds and small integers; and the
        functions that any other reward, terminated and truncated is handed to.

        Returns:
            Whether all went to ``to``: those of another dtype or shape do not.

        Raises:
            AssertionError: a lane that ended is not to be reset.
            ValueError: not so many actions, or an environment returns other than five, or two.
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
    """A table of these numbers."""
    return np.fromiter(words, np.int64).tobytes()


def copy_table(targets: Iterable[int], sources: Iterable[int], row_nbytes: Iterable[int]) -> bytes:
    """The table of `Kernel.copy_rows`: addresses and bytes of a row, one each a column."""
    return table_of(chain.from_iterable(zip(targets, sources, row_nbytes, strict=True)))


_kernel: Kernel | None
try:
    from tallyroll.storage.engine import _kernel  # type: ignore[no-redef]
except ImportError:
    _kernel = None


def is_built() -> bool:
    """Whether the extension is there."""
    return _kernel is not None


def compiled() -> Kernel | None:
    """Return the functions; None where they were not built, or are switched off."""
    return _kernel if ways.is_on("kernel") else None
