"""Words that a driver writes as it goes, and that others may look at meanwhile."""

from typing import Final

BOARD_WORDS: Final = 8
FILLED, HALT, COUNTED, LEASE, STEPPED = range(5)
"""Positions of the words on a board:

* the slots of the slab that are complete;
* not 0: end after the step under way, for good (`STOP`), or to go on later (`PAUSE`);
* counts so far of a lease: ``slots << 32 | transitions``, one word, never half written;
* the number of the lease that was begun last;
* of a worker whose rows come with its answers: the slots that it filled, known before they come.
"""
STOP: Final = 1
PAUSE: Final = 2


def counted_word(slots: int, transitions: int) -> int:
    """The word at :data:`COUNTED`."""
    return slots << 32 | transitions


def counted_in(word: int) -> tuple[int, int]:
    """Slots and transitions in a word at :data:`COUNTED`."""
    return word >> 32, word & 0xFFFF_FFFF


def new_board() -> memoryview:
    """Return a board that only its own driver reads."""
    return memoryview(bytearray(8 * BOARD_WORDS)).cast("q")
