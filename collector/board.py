"""Words that a driver writes as it goes, and that others may look at meanwhile."""

from typing import Final

BOARD_WORDS: Final = 8
FILLED: Final = 0
"""Slots of the slab that are complete."""
HALT: Final = 1
"""Not 0: end after the step under way."""
COUNTED: Final = 2
"""Slots whose transitions are marked in the slab."""
LEASE: Final = 3
"""The number of the lease that was begun last."""


def new_board() -> memoryview:
    """The board of a driver that nobody else looks at."""
    return memoryview(bytearray(8 * BOARD_WORDS)).cast("q")
