"""Counts as machine words with check bits, so that a flipped bit is told. Pure."""

from __future__ import annotations

import binascii

__all__ = ["COUNT_BITS", "count_of", "word_of"]

COUNT_BITS = 48
_COUNT = (1 << COUNT_BITS) - 1


def word_of(count: int) -> int:
    """A count below 2**48 with its check bits, the CRC of the count in the upper 16."""
    return count | binascii.crc_hqx(count.to_bytes(6, "little"), 0) << COUNT_BITS


def count_of(word: int) -> int | None:
    """The count in a word; None where its check bits are others."""
    count = word & _COUNT
    return count if word_of(count) == word else None
