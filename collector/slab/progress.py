"""Words that a driver writes as it goes, and that others may look at meanwhile."""

from typing import Final

BOARD_WORDS: Final = 8
FILLED: Final = 0
"""Slots of the slab that are complete."""
HALT: Final = 1
"""Not 0: end after the step under way, for good (`STOP`), or to go on later (`PAUSE`)."""
STOP: Final = 1
PAUSE: Final = 2
COUNTED: Final = 2
"""Counts so far of a lease: ``slots << 32 | transitions``, one word, never half written."""
LEASE: Final = 3
"""The number of the lease that was begun last."""


def counted_word(slots: int, transitions: int) -> int:
    """The word at :data:`COUNTED`."""
    return slots << 32 | transitions


def counted_in(word: int) -> tuple[int, int]:
    """Slots and transitions in a word at :data:`COUNTED`."""
    return word >> 32, word & 0xFFFF_FFFF


def new_board() -> memoryview:
    """Return a board that only its own driver reads."""
    return memoryview(bytearray(8 * BOARD_WORDS)).cast("q")
