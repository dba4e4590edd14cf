"""Named integers in contiguous memory, which compiled code accesses by address.

One list of names defines the order of the words in Python and in the extension. `kernel` compares
the two lists.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np


class Counts(ctypes.Structure):
    """Block of 64-bit counts, initially 0, that are read and set as attributes.

    A block holds the counts of an object, which sets them like its own attributes. Numbers that do
    not fit into 64 bits wrap around, so the code that sets a count must ensure that it fits.
    """

    names: ClassVar[tuple[str, ...]]
    """The names of the counts, in the order of their words."""
    words: np.ndarray
    """The counts as an array, int64 [name]."""
    address: int
    """The address of the first word. The block owns the memory."""

    def __new__(cls) -> Self:
        """Allocate the block in an array, which NumPy and the extension share."""
        words = np.zeros(len(cls.names), np.int64)
        block = cls.from_buffer(words.data)
        block.words, block.address = words, ctypes.addressof(block)
        return block

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> int: ...


def counts_of(*names: str) -> type[Counts]:
    """Return a class of blocks with these counts, in this order."""
    fields = [(name, ctypes.c_int64) for name in names]
    return type("Counts", (Counts,), {"_fields_": fields, "names": names})
