"""Compact sets of row numbers in ascending order. Pure.

Chosen rows are numbered 0, 1, 2 ... in the order that they have among all rows. They are stored
either as stretches of 16 bytes each, or as a bitmap of 1.5 bits per row, whichever is smaller.
"""
# ruff: noqa: D102 - the methods are described once, in `ChosenRows`

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

_BLOCK: Final = 128
"""Rows per block. A running count of chosen rows is stored for each block."""
_BYTES: Final = _BLOCK // 8
_AT_ONCE: Final = 2**16
_PIECE: Final = 2**20

_BITS: Final = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_ONES: Final = _BITS.sum(axis=1, dtype=np.uint8)
"""The number of set bits of each byte value [256]."""
_NTH: Final = np.argsort(1 - _BITS.astype(np.int8), axis=1, kind="stable").astype(np.uint8)
"""The index of the n-th set bit of each byte value [256, 8]."""


class ChosenRows(ABC):
    """A set of row numbers in ascending order."""

    _before: np.ndarray
    """The number of chosen rows before each stretch or block, and the total at the end, int64."""

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def stop(self) -> int:
        """One more than the largest number; 0 if the set is empty."""
        return int(self.numbers(np.array([len(self) - 1]))[0]) + 1 if len(self) else 0

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Size in memory in bytes."""

    @property
    def digest(self) -> str:
        """A SHA-256 hash of the set, in hexadecimal."""
        return hashlib.sha256(b"".join(self._parts())).hexdigest()

    @abstractmethod
    def numbers(self, places: np.ndarray) -> np.ndarray:
        """Return the row numbers of the chosen rows at 0-based ``places`` [*]; int64 [*]."""

    @abstractmethod
    def below(self, numbers: np.ndarray) -> np.ndarray:
        """Return how many chosen rows are below each of ``numbers`` [n]; int64 [n]."""

    @abstractmethod
    def between(self, start: int, stop: int) -> np.ndarray:
        """Return the row numbers of the chosen rows ``[start, stop)``; int64 [stop - start]."""

    @abstractmethod
    def _parts(self) -> Iterator[bytes]:
        """Yield bytes that identify the set."""


class Stretches(ChosenRows):
    """Set that is stored as stretches of consecutive rows.

    Args:
        starts: the first row of each stretch, int64 [stretches].
        stops: the end of each stretch (exclusive), int64 [stretches].
    """

    def __init__(self, starts: np.ndarray, stops: np.ndarray) -> None:
        self._starts = starts
        self._before = np.concatenate(([0], np.cumsum(stops - starts))).astype(np.int64)

    @property
    def nbytes(self) -> int:
        return self._starts.nbytes + self._before.nbytes

    def numbers(self, places: np.ndarray) -> np.ndarray:
        if not len(self._starts):
            return np.empty(places.shape, np.int64)
        at = self._before.searchsorted(places, side="right") - 1
        found: np.ndarray = self._starts[at] + (places - self._before[at])
        return found

    def below(self, numbers: np.ndarray) -> np.ndarray:
        at = self._starts.searchsorted(numbers, side="right") - 1
        there = np.maximum(at, 0)
        lengths = np.diff(self._before, append=0)
        found = self._before[there] + np.minimum(
            numbers - self._starts[there] if len(self._starts) else 0, lengths[there]
        )
        return np.where(at < 0, 0, found)

    def between(self, start: int, stop: int) -> np.ndarray:
        return self.numbers(np.arange(start, stop))

    def _parts(self) -> Iterator[bytes]:
        yield b"stretches"
        yield self._starts.tobytes()
        yield self._before.tobytes()


class Bits(ChosenRows):
    """Set that is stored as a bitmap over a range of rows.

    Args:
        first: the row number of the first bit.
        bits: the bitmap in whole blocks, uint8 [blocks * bytes per block].
    """

    def __init__(self, first: int, bits: np.ndarray) -> None:
        self._first, self._bits = first, bits.reshape(-1, _BYTES)
        each = _ONES[self._bits].sum(axis=1, dtype=np.int64)
        self._before = np.concatenate(([0], np.cumsum(each))).astype(np.int64)

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes + self._before.nbytes

    def numbers(self, places: np.ndarray) -> np.ndarray:
        flat = places.reshape(-1)
        found = np.empty(len(flat), np.int64)
        for at in range(0, len(flat), _AT_ONCE):
            found[at : at + _AT_ONCE] = self._numbers(flat[at : at + _AT_ONCE])
        return found.reshape(places.shape)

    def _numbers(self, places: np.ndarray) -> np.ndarray:
        block = self._before.searchsorted(places, side="right") - 1
        left = places - self._before[block]
        each = self._bits[block]
        counted = np.cumsum(_ONES[each], axis=1, dtype=np.uint16)
        byte = (counted <= left[:, None]).sum(axis=1)
        every = np.arange(len(block))
        left = left - (counted[every, byte] - _ONES[each[every, byte]])
        bit = _NTH[each[every, byte], left]
        found: np.ndarray = self._first + (block * _BYTES + byte) * 8 + bit
        return found

    def below(self, numbers: np.ndarray) -> np.ndarray:
        at = np.clip(numbers - self._first, 0, self._bits.size * 8)
        block = at // _BLOCK
        whole = np.minimum(block, len(self._bits) - 1)
        rest = (at - whole * _BLOCK)[:, None] - np.arange(_BYTES) * 8  # bits of each byte
        masks = (1 << np.clip(rest, 0, 8)) - 1
        some = _ONES[self._bits[whole] & masks.astype(np.uint8)].sum(axis=1, dtype=np.int64)
        found: np.ndarray = self._before[whole] + some
        return found

    def between(self, start: int, stop: int) -> np.ndarray:
        if start >= stop:
            return np.empty(0, np.int64)
        one, other = self._before.searchsorted([start, stop - 1], side="right") - 1
        bits = np.unpackbits(self._bits[one : other + 1].reshape(-1), bitorder="little")
        skipped = start - int(self._before[one])
        found = np.flatnonzero(bits)[skipped : skipped + stop - start]
        found += self._first + int(one) * _BLOCK
        return found

    def _parts(self) -> Iterator[bytes]:
        yield f"bits from {self._first}".encode()
        yield self._bits.tobytes()


def chosen_rows(span: range, parts: Iterable[np.ndarray]) -> ChosenRows:
    """Return the set of the row numbers in ``parts``.

    Each part contains numbers within ``span`` in any order. Duplicates count once.
    """
    first = span.start // _BLOCK * _BLOCK
    bits = np.zeros(-(-max(0, span.stop - first) // _BLOCK) * _BYTES, np.uint8)
    for numbers in parts:
        at = numbers - first
        np.bitwise_or.at(bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))
    some = np.flatnonzero(bits)
    if not len(some):
        nothing = np.empty(0, np.int64)
        return Stretches(nothing, nothing)
    # Trim the bitmap, so that the same rows have the same bits however many rows follow.
    begin, stop = int(some[0]) // _BYTES, int(some[-1]) // _BYTES + 1
    bits, first = bits[begin * _BYTES : stop * _BYTES], first + begin * _BLOCK
    most = len(bits) // 10
    each, found = [], 0
    for ends in _ends(bits):
        found += len(ends)
        if found > 2 * most + 2:
            return Bits(first, bits.copy())
        each.append(ends)
    every = first + np.concatenate(each)
    return Stretches(every[0::2].copy(), every[1::2].copy())


def _ends(bits: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the indices at which a bit differs from the previous one, including both ends."""
    before = 0
    for at in range(0, len(bits), _PIECE):
        each = np.unpackbits(bits[at : at + _PIECE], bitorder="little")
        yield at * 8 + np.flatnonzero(np.diff(each, prepend=np.uint8(before)))
        before = int(each[-1])
    if before:
        yield np.array([len(bits) * 8])
