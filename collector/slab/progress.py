"""Progress board: machine words that a driver updates while it steps, for other code to read."""

import struct
from typing import Any, Final

BOARD_WORDS: Final = 8
FILLED, HALT, COUNTED, LEASE, STEPPED, ROUNDED, REWARD = range(7)
"""Positions of the words on a board:

* the number of complete slots of the slab;
* if not 0, a request to end after the step in progress, for good (`STOP`) or for a while (`PAUSE`);
* the counts of the lease so far, ``slots << 32 | transitions``, in one word that is written
  atomically;
* the number of the lease that began last;
* the number of slots that a worker has filled, if its rows are sent with its replies and so arrive
  later;
* one more than the number of a lane whose reward was changed by its storage dtype; 0 if there was
  none since the word was last read; below 0 if the run has warned of one and records no more;
* that reward as the environment returned it: the bits of a float64.
"""
STOP: Final = 1
PAUSE: Final = 2


def counted_word(slots: int, transitions: int) -> int:
    """Return the word for :data:`COUNTED`."""
    return slots << 32 | transitions


def counted_in(word: int) -> tuple[int, int]:
    """Return the numbers of slots and transitions in a word at :data:`COUNTED`."""
    return word >> 32, word & 0xFFFF_FFFF


def note_rounding(board: Any, lane: int, reward: float) -> None:
    """Record a reward that was changed by its storage dtype, unless the board already has one."""
    if not board[ROUNDED]:
        (board[REWARD],) = struct.unpack("q", struct.pack("d", reward))
        board[ROUNDED] = lane + 1


def rounding_on(board: Any) -> tuple[int, float] | None:
    """Return the lane and the reward that :func:`note_rounding` wrote; None if there is none."""
    if board[ROUNDED] <= 0:
        return None
    (reward,) = struct.unpack("d", struct.pack("q", board[REWARD]))
    return board[ROUNDED] - 1, reward


def new_board() -> memoryview:
    """Return a board in the memory of this process, for one driver."""
    return memoryview(bytearray(8 * BOARD_WORDS)).cast("q")
