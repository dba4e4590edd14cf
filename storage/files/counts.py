"""Whole numbers by name, side by side in memory, where compiled code finds them by address.

One list of names gives the order of the words, in Python and in the extension: see `kernel`, which
compares both.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np


class Counts(ctypes.Structure):
    """A block of counts of 64 bits, 0 at first, that are read and set as attributes.

    A larger number wraps round: the code that sets it must know that it fits.
    """

    names: ClassVar[tuple[str, ...]]
    """The names of the counts, in the order of their words."""
    words: np.ndarray
    """The same numbers, int64 [name]."""
    address: int
    """The address of the first word; the block owns the memory."""

    def __new__(cls) -> Self:
        """Take the memory of an array, which NumPy and the extension see too."""
        words = np.zeros(len(cls.names), np.int64)
        block = cls.from_buffer(words.data)
        block.words, block.address = words, ctypes.addressof(block)
        return block

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


def counts_of(*names: str) -> type[Counts]:
    """Return a class of blocks that have these counts, in this order."""
    fields = [(name, ctypes.c_int64) for name in names]
    return type("Counts", (Counts,), {"_fields_": fields, "names": names})
