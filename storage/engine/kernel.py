"""Compiled functions that copy, commit and find rows, if they are built.

Each does in one call the same as Python and NumPy code beside its use, which takes a call a
column; the same tests run with and without them. Without a compiler at installation, or with the
functions switched off (``-kernel``, see `ways`), that code runs instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import Any, Protocol, TypeVar

import numpy as np

from tallyroll.storage import fast_paths
from tallyroll.storage.errors import ExtensionMismatch
from tallyroll.storage.files.commit_header import ADDRESSES, CommitCounts

Word = TypeVar("Word")


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

        The table has three words a column: see :func:`copy_table`.
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

    def same_rows(self, one: np.ndarray, other: np.ndarray, same: np.ndarray, skip: int, /) -> None:
        """Write to ``same``, bool [n], which rows [n, ...] of two arrays have the same bytes.

        All are contiguous. The first ``skip`` bytes of a row of ``one``, and the last of one of the
        ``other``, are not looked at.

        Raises:
            ValueError: the arrays differ in their bytes, or have rows of fewer.
        """


def table_of(words: Iterable[int | np.ndarray]) -> bytes:
    """Return a table of these numbers, and of addresses of these arrays, which it keeps not alive.

    A debug build of the extensions finds the bytes of the arrays before the words, and checks that
    it stays within them; it does not know those of an address that is given as a number.
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
        targets: the array of each column in which slot 0 is first, or its address.
        sources: the array of each column in which row 0 is first, or its address.
        row_nbytes: the bytes of a row of each column.
    """
    words: list[Any] = in_order("COLUMN", target=targets, source=sources, row_nbytes=row_nbytes)
    return table_of(chain.from_iterable(zip(*words, strict=True)))


class Extension:
    """A compiled extension, which may be missing, or switched off.

    Args:
        name: its module.
    """

    def __init__(self, name: str) -> None:
        self.module: Any = None
        """The extension; None if it was not built."""
        with suppress(ImportError):
            self.module = import_module(name)

    def functions(self) -> Any:
        """Return the extension; None if it was not built, or is switched off."""
        return self.module if fast_paths.is_on("kernel") else None

    def is_built(self) -> bool:
        """Return whether it was built."""
        return self.module is not None

    def require_names(self, block: str, names: tuple[str, ...]) -> None:
        """Refuse an extension that has other words in a block of counts, or in another order.

        Args:
            block: the name under which the extension exports its own names.
            names: those of Python's list.

        Raises:
            ExtensionMismatch: they differ, and the extension is not switched off.
        """
        built = self._names(block)
        if self.module is not None and built != names:
            self._refuse(block, names, built)

    def in_order(self, block: str, /, **words: Word) -> list[Word]:
        """Return the words of a table in the order in which the extension reads them.

        Without the extension, which alone reads tables, their order is that of the arguments.

        Args:
            block: the name under which the extension exports their names.
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
            f"in {block}, got {', '.join(built) or 'none'}: it was built from other sources. "
            f"Install tallyroll again, or set {fast_paths.VARIABLE}=-kernel to do without the "
            "extension."
        )


EXTENSION = Extension("tallyroll.storage.engine._kernel")
is_built = EXTENSION.is_built
require_names = EXTENSION.require_names
in_order = EXTENSION.in_order
require_names("COMMIT", CommitCounts.names)
require_names("HEADER", ADDRESSES)


def compiled() -> Kernel | None:
    """Return the functions; None if they were not built, or are switched off."""
    kernel: Kernel | None = EXTENSION.functions()
    return kernel
