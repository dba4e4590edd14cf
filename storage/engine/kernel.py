"""Compiled functions that copy, commit and find rows, if they are built.

Each function does in one call what Python and NumPy do in one call per column. The equivalent
Python code is next to each use of a function. It runs if no compiler was available at installation,
or if the functions are switched off (``-kernel``, see `fast_paths`). The same tests run with and
without the functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from tallyroll.storage import fast_paths
from tallyroll.storage.errors import ExtensionMismatch
from tallyroll.storage.files.commit_header import ADDRESSES, CommitCounts

Word = TypeVar("Word")
Values: TypeAlias = np.ndarray | int | None
"""The values of a column: an array, an address, or None if there is no such column."""


class TreeKernel(Protocol):
    """The functions for sum trees; see `SumTree`."""

    def set_leaves(self, table: bytes, slots: np.ndarray, leaves: np.ndarray, /) -> None:
        """Set the leaves of ``slots``, and update the sums over them; see `SumTree`.

        ``slots`` is int64 [n], and ``leaves`` is float32 [n]. Both arrays are contiguous. ``slots``
        is overwritten.

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
        """Set the leaves of those ``rows`` whose present leaf is above 0; see `SumTree`.

        ``rows`` is int64 [n], and ``leaves`` is float32 [n]. Both arrays are contiguous and are
        overwritten. Only the rows ``[first, stop)`` can have leaves. Row r is in slot r % ring, or
        in slot r - base if ``ring`` is 0.

        Returns:
            The number of rows whose present leaf is not above 0.

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

        ``index`` (int64) and ``priorities`` (float32 or float64) are arrays, or tuples of the
        address, the count and the item size of contiguous numbers. ``powers`` is the address of the
        table of `Powers`. For ``drawn`` see `SumTree.put_priorities`, and for the other arguments
        see `put_leaves`.

        Returns:
            The number of rows whose present leaf is not above 0. The result is -1, and nothing is
            changed, if an array has another dtype, several dimensions and gaps, or more than 1024
            numbers, if their counts differ, if a row never existed, if a priority is negative,
            infinite or NaN, or if its power is not a positive normal float32.
        """

    def renew_sums(self, table: bytes, first: int, stop: int, /) -> None:
        """Recompute the sums over the slots ``[first, stop)``; see `SumTree`.

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
        """Draw rows in proportion to their leaves; see `SumTree`. All arrays are contiguous.

        Args:
            table: the table of the tree.
            uniform: numbers from 0 to below 1, float64 [n], which are overwritten.
            rows: the output array for the rows, int64 [n].
            leaves: the output array for their leaves, float32 [n].
            ring: the number of slots of the ring, or 0; see `put_leaves`.
            base: the row in slot 0, if there is no ring.
            stop: one more than the newest row.

        Raises:
            ValueError: all leaves are 0.
        """


class FrameKernel(Protocol):
    """The functions for pools of frames; see `frame_pool`. All arrays are contiguous."""

    def place_frames(
        self,
        table: bytes,
        lanes: np.ndarray,
        begins: np.ndarray,
        ends: np.ndarray,
        positions: np.ndarray,
        done: int,
        first_row: int,
        oldest: int,
        /,
    ) -> int:
        """Place the frames of the rows from ``done`` on, until free segments run out.

        ``lanes`` are indices into the arrays of the table, int64 [n]; ``begins`` and ``ends`` are
        the addresses of observations and next observations, int64 [n]; ``positions``, int32 [n, 2 *
        stack], is the output array. ``first_row`` is the number of the first row. Segments whose
        last row is below ``oldest`` are free.

        Returns:
            The number of rows that are placed, including the rows before ``done``.

        Raises:
            ValueError: the arrays differ in length, or a lane is not in the table. Nothing is
                placed.
        """

    def mark_rows(
        self, positions: np.ndarray, numbers: np.ndarray, last_row: np.ndarray, per: int, /
    ) -> None:
        """Write to ``last_row``, int64 [segments], the last row that needs each segment.

        ``positions`` is int32 [n, frames of a row], and ``numbers`` is int64 [n], ascending.

        Raises:
            IndexError: a position is not in the segments.
        """

    def read_frames(
        self,
        memory: np.ndarray,
        positions: np.ndarray,
        out: np.ndarray,
        later: np.ndarray,
        table: bytes,
        wide: int,
        /,
    ) -> None:
        """Read the frames at ``positions``, int32 [n, wide], to ``out`` and ``later``.

        See `tallyroll.storage.engine.frame_pool.read_frames`.

        Raises:
            IndexError: a position is not in the pool; nothing is read.
            ValueError: an output has another size.
        """


WINDOW = 66
"""The length of a window of trajectory ids; see `IdKernel`."""


class IdKernel(Protocol):
    """The functions for trajectory ids; see `IdChecks`.

    ``tails`` is an int64 array [8 * lanes + 2 + 2 * `WINDOW`]: eight arrays [lanes], two numbers
    and two windows.

    1. the trajectory of each lane's last row, or `NOBODY` if it ended or is unknown
    2. its next step
    3. the trajectory of each lane's last row, even if it ended; the largest int64 if unknown
    4. the trajectory of each lane's last row after the admitted batch, or `NOBODY` if it ended
    5. its next step
    6. the trajectory of each lane's last row in that batch, even if it ended
    7. the number of the last batch with rows of the lane
    8. the lanes of the admitted batch, as a list that fills the array from its start

    The numbers are the number of the last batch and the length of that list. The windows, before
    and after the admitted batch, record which ids are in use: a base, the largest id, and 4,096
    bits, one for each id from the base on. All ids below the base count as used.

    An id below the largest can be new: collectors number a trajectory when it begins, but its
    first row may be stored after rows of later trajectories.
    """

    def admit_rows(
        self,
        ids: Values,
        steps: Values,
        lanes: Values,
        ends: Values,
        others: Values,
        done: Values,
        tails: np.ndarray,
        count: int,
        lane_nbytes: int,
        /,
    ) -> int | None:
        """Admit rows if each continues its lane's trajectory or begins one with an unused id.

        Each column is an array of ``count`` rows, or the address of its values: int64 ids and
        steps, lanes of ``lane_nbytes`` bytes (4 or 8), and bool flags or None. Return the largest
        id, or None if the rows need other checks.

        Raises:
            BufferError, ValueError, TypeError: an array is not contiguous, or has another size.
        """

    def settle_rows(self, tails: np.ndarray, /) -> None:
        """Make the rows that were admitted last the last rows of their lanes."""

    def use_ids(self, tails: np.ndarray, ids: np.ndarray, /) -> None:
        """Mark int64 ids as used."""


class Kernel(TreeKernel, FrameKernel, IdKernel, Protocol):
    """The compiled functions.

    :func:`table_of` makes their tables. The caller keeps the arrays of a table alive.
    """

    def copy_rows(self, table: bytes, slot: int, first: int, count: int, /) -> None:
        """Copy rows ``[first, first + count)`` of each column to slots from ``slot`` on.

        The table has three words per column: see :func:`copy_table`.
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
        """Copy rows as `copy_rows` does, then commit and count them with ``record``, in one call.

        ``header`` is `Header.addresses`, and ``known`` is the address of the `CommitCounts` of the
        same header. Return False and change nothing if an earlier commit was interrupted or
        another process writes.
        """

    def gather_rows(self, table: bytes, slot: int, index: np.ndarray, rows: int, /) -> None:
        """Copy the rows ``index`` of each column, in that order, to slots from ``slot`` on.

        ``index`` is contiguous, intp [n]. For the table see `copy_rows`.

        Raises:
            IndexError: a row is not among the first ``rows``; nothing is copied.
        """

    def pack_runs(
        self, table: bytes, runs: np.ndarray, parts: np.ndarray, rows: int, most: int, /
    ) -> None:
        """Copy ``runs`` of rows to one target, part by part, and by column within each part.

        ``runs``, contiguous int64 [n, 2], has the slot of the first row and the number of rows of
        each run. ``parts``, int64 [m], has the number of runs of each part. The table is like that
        of `copy_rows`, but all columns have the same target, with space for ``most`` rows.

        Raises:
            IndexError: a row is not among the first ``rows``, there are more than ``most`` rows, or
                the parts do not add up to the runs; nothing is copied.
        """

    def same_rows(self, one: np.ndarray, other: np.ndarray, same: np.ndarray, skip: int, /) -> None:
        """Compare the bytes of rows [n, ...] of two arrays; write True to ``same`` for equal rows.

        ``same`` is bool [n]. All arrays are contiguous. The first ``skip`` bytes of each row of
        ``one``, and the last ``skip`` bytes of each row of ``other``, are ignored.

        Raises:
            ValueError: the arrays differ in size, or their rows have fewer than ``skip`` bytes.
        """

    def sum_steps(
        self,
        chain: np.ndarray,
        ends: np.ndarray,
        others: np.ndarray,
        rewards: np.ndarray,
        powers: np.ndarray,
        count: np.ndarray,
        last: np.ndarray,
        sums: np.ndarray,
        ring: int,
        /,
    ) -> None:
        """Sum the rewards along chains of rows; see `n_step`. All arrays are contiguous.

        Args:
            chain: consecutive rows of trajectories, int64 [n, rows]; the last one is repeated.
            ends: flags that end a trajectory, bool [slots, 1].
            others: more such flags, or the same array.
            rewards: the rewards, float32 or float64 [slots, 1].
            powers: the factors of the rewards, float64 [n].
            count: the output array for the numbers of summed rewards, int64 [rows].
            last: the output array for the last rows, int64 [rows].
            sums: the output array for the sums, float64 [rows].
            ring: row r is in slot r % ring, or in slot r if ``ring`` is 0.

        Raises:
            IndexError: a row is not in the slots, or arrays differ in length.
        """


def table_of(words: Iterable[int | np.ndarray]) -> bytes:
    """Return a table of numbers and of array addresses, which does not keep the arrays alive.

    For a debug build of the extensions, the sizes of the arrays precede the words. The build checks
    that it stays within the arrays. The size of an array that is given by address is unknown.
    """
    words = [*words]
    table = np.array([_address_of(word) for word in words], np.int64)
    mark = getattr(EXTENSION.module, "TABLE_WITH_SIZES", None)
    if mark is None or not words:
        return table.tobytes()
    sizes = [word.nbytes if isinstance(word, np.ndarray) else -1 for word in words]
    return np.array([mark, *sizes, *table], np.int64).tobytes()


def _address_of(word: int | np.ndarray) -> int:
    return word.ctypes.data if isinstance(word, np.ndarray) else word


def copy_table(
    targets: Iterable[int | np.ndarray],
    sources: Iterable[int | np.ndarray],
    row_nbytes: Iterable[int],
) -> bytes:
    """Return the table of `Kernel.copy_rows`.

    Args:
        targets: for each column, the array that starts with slot 0, or its address.
        sources: for each column, the array that starts with row 0, or its address.
        row_nbytes: for each column, the bytes of a row.
    """
    words: list[Any] = in_order("COLUMN", target=targets, source=sources, row_nbytes=row_nbytes)
    return table_of(chain.from_iterable(zip(*words, strict=True)))


class Extension:
    """A compiled extension, which may be missing or switched off.

    Args:
        name: the name of the extension module.
    """

    def __init__(self, name: str) -> None:
        self.module: Any = None
        """The extension module, or None if it was not built."""
        with suppress(ImportError):
            self.module = import_module(name)

    def functions(self) -> Any:
        """Return the extension module, or None if it was not built or is switched off."""
        return self.module if fast_paths.is_on("kernel") else None

    def is_built(self) -> bool:
        """Return True if the extension was built."""
        return self.module is not None

    def require_names(self, block: str, names: tuple[str, ...]) -> None:
        """Raise unless the extension has the words ``names`` in a block of counts, in this order.

        Args:
            block: the name under which the extension exports the names of the words.
            names: the names in the list of the Python code.

        Raises:
            ExtensionMismatch: the names differ, and the extension is not switched off.
        """
        built = self._names(block)
        if self.module is not None and built != names:
            self._refuse(block, names, built)

    def in_order(self, block: str, /, **words: Word) -> list[Word]:
        """Return the words of a table in the order in which the extension reads them.

        Only the extension reads tables. Without the extension, the words are in the order of the
        arguments.

        Args:
            block: the name under which the extension exports the names of the words.
            **words: all words of the table by name.

        Raises:
            ExtensionMismatch: the names differ, and the extension is not switched off.
        """
        built = self._names(block)
        if self.module is not None and words.keys() != {*built}:
            self._refuse(block, tuple(words), built)
        return [*words.values()] if self.module is None else [words[name] for name in built]

    def _names(self, block: str) -> tuple[str, ...]:
        return tuple(getattr(self.module, block, "").split())

    def _refuse(self, block: str, names: tuple[str, ...], built: tuple[str, ...]) -> None:
        if not fast_paths.is_on("kernel"):
            self.module = None
            return
        raise ExtensionMismatch(
            f"expected the extension {self.module.__file__} to have the words {', '.join(names)} "
            f"in {block}, got {', '.join(built) or 'none'}. The extension was built from other "
            f"sources. Install tallyroll again, or set {fast_paths.VARIABLE}=-kernel to run "
            "without the extension."
        )


EXTENSION = Extension("tallyroll.storage.engine._kernel")
is_built = EXTENSION.is_built
require_names = EXTENSION.require_names
in_order = EXTENSION.in_order
require_names("COMMIT", CommitCounts.names)
require_names("HEADER", ADDRESSES)


def compiled() -> Kernel | None:
    """Return the compiled functions, or None if they were not built or are switched off."""
    kernel: Kernel | None = EXTENSION.functions()
    return kernel
