"""Words that a driver writes as it goes, and that others may look at meanwhile."""

import struct
from typing import Any, Final

BOARD_WORDS: Final = 8
FILLED, HALT, COUNTED, LEASE, STEPPED, ROUNDED, REWARD = range(7)
"""Positions of the words on a board:

* the slots of the slab that are complete;
* not 0: end after the step under way, for good (`STOP`), or to go on later (`PAUSE`);
* counts so far of a lease: ``slots << 32 | transitions``, one word, never half written;
* the number of the lease that was begun last;
* of a worker whose rows come with its answers: the slots that it filled, known before they come;
* one more than the number of a lane whose reward became another number where it was stored; 0: none
  since the word was last read; below 0: the run has warned of one, and notes no more;
* that reward as the environment returned it: the bits of a float64.
"""
STOP: Final = 1
PAUSE: Final = 2


def counted_word(slots: int, transitions: int) -> int:
    """The word at :data:`COUNTED`."""
    return slots << 32 | transitions


def counted_in(word: int) -> tuple[int, int]:
    """Slots and transitions in a word at :data:`COUNTED`."""
    return word >> 32, word & 0xFFFF_FFFF


def note_rounding(board: Any, lane: int, reward: float) -> None:
    """Write a reward that became another number where it was stored to a board without one."""
    if not board[ROUNDED]:
        (board[REWARD],) = struct.unpack("q", struct.pack("d", reward))
        board[ROUNDED] = lane + 1


def rounding_on(board: Any) -> tuple[int, float] | None:
    """Return the lane and the reward that :func:`note_rounding` wrote; None: there is none."""
    if board[ROUNDED] <= 0:
        return None
    (reward,) = struct.unpack("d", struct.pack("q", board[REWARD]))
    return board[ROUNDED] - 1, reward


def new_board() -> memoryview:
    """Return a board that only its own driver reads."""
    return memoryview(bytearray(8 * BOARD_WORDS)).cast("q")
