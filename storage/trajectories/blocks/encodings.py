"""Three encodings of the lane of each row of a block. Pure.

The rows of a block are numbered by their *offset*. The *rank* of a row is the number of earlier
rows of its lane in the block. A *sweep* is a stretch of rows whose lanes do not descend: one slot,
or a batch that is laid out lane by lane.

Layer j of a sweep is the set of lanes that have more than j rows in it. `BitEncoding` stores one
bit per lane and layer twice, ordered by lane and ordered by layer. `TableEncoding` has two numbers
per sweep and lane. `OrderEncoding` has two numbers per row, for any order of rows.
"""
# ruff: noqa: D102 - each method is documented once, in `LaneEncoding`

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.kernel import in_order
from tallyroll.storage.trajectories.blocks.growable import GrowableArray, Ladders, StoredArray

KINDS: Final = ("order", "table", "bits")
"""The kinds of shelves, indexed by the numbers that the extension uses."""

MOST_LAYERS: Final = 16
"""The maximum number of layers of a `BitEncoding`."""
_WORD = 64
_LOW: Final = np.array([(1 << bits) - 1 for bits in range(_WORD + 1)], np.uint64)
"""Words with the lowest k bits set, indexed by k."""
_INT64: Final = np.iinfo(np.int64)
_ONE_BYTE: Final = np.arange(256, dtype=np.uint8)


@dataclass(frozen=True)
class LaneBlock:
    """The lanes of a block's rows, in several orders."""

    lane: np.ndarray
    """The lane of each row, integers below ``lanes``, [rows]."""
    order: np.ndarray
    """Offsets ordered by lane, and by time within a lane, [rows]."""
    lane_first: np.ndarray
    """The position in that order at which each lane begins, [lanes]."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.lane)

    @property
    def lanes(self) -> int:
        """The number of lanes."""
        return len(self.lane_first)

    @cached_property
    def sweep(self) -> np.ndarray:
        """The sweep of each row, [rows]."""
        begins = np.zeros(self.rows, np.bool_)
        np.less(self.lane[1:], self.lane[:-1], out=begins[1:])
        return begins.cumsum()

    @cached_property
    def sweep_first(self) -> np.ndarray:
        """The offset at which each sweep begins, [sweeps]."""
        return np.flatnonzero(np.diff(self.sweep, prepend=-1))

    @cached_property
    def layer(self) -> np.ndarray:
        """The number of earlier rows of the same lane in the row's sweep, [rows]."""
        same = np.zeros(self.rows, np.bool_)
        np.equal(self.lane[1:], self.lane[:-1], out=same[1:])
        number = np.arange(self.rows)
        layer: np.ndarray = number - np.maximum.accumulate(np.where(same, 0, number))
        return layer


class LaneEncoding(ABC):
    """Blocks of one encoding.

    The argument ``block`` of each method has the numbers [n] of blocks of this encoding.
    """

    def __init__(self, dtype: Any) -> None:
        self.dtype = dtype
        self.starts = Ladders(dtype)
        """The positions at which stretches begin, in the order of lanes."""
        self.ids = GrowableArray(np.int64)
        """The trajectory of each stretch."""
        self._least, self._most = GrowableArray(np.int64), GrowableArray(np.int64)
        self.count = 0

    def add(self, block: LaneBlock, starts: np.ndarray, ids: np.ndarray) -> int:
        """Add a block with the positions of its stretches and their ids; return its number."""
        self._add(block)
        self.starts.add(starts, block.rows)
        self.ids.add(ids)
        self._least.add(np.array([ids.min(initial=_INT64.max)]))
        self._most.add(np.array([ids.max(initial=_INT64.min)]))
        self.count += 1
        return self.count - 1

    def of_id(self, id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return each stretch of a trajectory: its block and its index on the shelf, [n] each."""
        near = np.flatnonzero((self._least.all <= id) & (self._most.all >= id))
        if not len(near):
            return near, near
        begin, stop = self.starts.bounds(int(near[0]))[0], self.starts.bounds(int(near[-1]))[1]
        index = begin + np.flatnonzero(self.ids.all[begin:stop] == id)
        return self.starts.of_rungs.all.searchsorted(index, side="right") - 1, index

    @abstractmethod
    def _add(self, block: LaneBlock) -> None:
        """Add the lane of each row."""

    @abstractmethod
    def spots(self, block: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lane and the rank of the rows at these offsets, [n] each."""

    @abstractmethod
    def offsets(self, block: np.ndarray, lane: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Return the offsets of the rows of lanes with these ranks, which must exist, [n]."""

    def cut(self, blocks: int) -> None:
        """Drop the first blocks; at least one must remain."""
        self.ids.cut(self.starts.bounds(blocks)[0])
        self.starts.cut(blocks)
        self._least.cut(blocks)
        self._most.cut(blocks)
        self.count -= blocks
        self._cut(blocks)

    @abstractmethod
    def _cut(self, blocks: int) -> None:
        """Drop the lanes of the first blocks."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """The constructor arguments other than the dtype."""

    @property
    def stored(self) -> tuple[StoredArray, ...]:
        """All arrays, in the order of the index file."""
        own = StoredArray(self.ids), StoredArray(self._least, True), StoredArray(self._most, True)
        return *self.starts.stored, *own, *self._stored

    @property
    @abstractmethod
    def _stored(self) -> tuple[StoredArray, ...]:
        """The arrays that encode the lanes."""

    def hold(self, arrays: Sequence[np.ndarray]) -> None:
        """Adopt the blocks in these arrays, in the order of `stored`.

        Only the lengths of arrays and the numbers per block are checked. The contents of the other
        arrays are not.

        Raises:
            ValueError: the arrays are inconsistent.
        """
        for stored, array in zip(self.stored, arrays, strict=True):
            stored.pile.hold(array)
        self.count = self._least.count
        for stored in self.stored:
            if stored.each and stored.pile.count != self.count:
                raise ValueError("an array does not have a number for each block")
            if stored.into is not None:
                check_places(stored.pile.all, stored.into.count)
        if not self.count or self.ids.count != self.starts.rungs.count or not self._fits():
            raise ValueError("the arrays of a shelf have inconsistent lengths")

    @abstractmethod
    def _fits(self) -> bool:
        """Return True if the arrays that encode the lanes are consistent."""

    def clone(self) -> LaneEncoding:
        """Return an independent copy of the shelf."""
        made = type(self)(self.dtype, *self.sizes)
        made.hold([stored.pile.all for stored in self.stored])
        return made

    @property
    def words(self) -> tuple[Any, ...]:
        """The table words that describe a shelf: see ``ShelfWords`` in ``_lane_blocks.c``."""
        words: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(("lanes", "layers", "nbytes"), (0,)),
            "starts": self.starts.words,
            "sweeps": _NO_LADDER,
            "ids": self.ids.words,
            **dict.fromkeys(("ahead", "back", "of_ahead", "of_back", "words"), _NO_PILE),
            **self._own_words,
        }
        return tuple(chain.from_iterable(in_order("SHELF", **words)))

    @property
    @abstractmethod
    def _own_words(self) -> dict[str, tuple[Any, ...]]:
        """The kind, and the words that only some kinds of shelves have."""

    @property
    def nbytes(self) -> int:
        """The size of all blocks in bytes."""
        return self.starts.nbytes + self.ids.nbytes + sum(each.nbytes for each in self._piles)

    @property
    @abstractmethod
    def _piles(self) -> tuple[GrowableArray | Ladders, ...]:
        """The arrays that encode the lanes."""


class OrderEncoding(LaneEncoding):
    """Encoding as the position of each row in the order of lanes, and the inverse permutation."""

    def __init__(self, dtype: Any) -> None:
        super().__init__(dtype)
        self._offset, self._place = GrowableArray(dtype), GrowableArray(dtype)
        self._of_rows = GrowableArray(np.int64)
        self._lane_first, self._lanes = GrowableArray(dtype), GrowableArray(np.int64)
        self._of_lanes = GrowableArray(np.int64)

    def _add(self, block: LaneBlock) -> None:
        place = np.empty_like(block.order)
        place[block.order] = np.arange(block.rows)
        self._of_rows.add(np.array([self._offset.add(block.order)]))
        self._place.add(place)
        self._of_lanes.add(np.array([self._lane_first.add(block.lane_first)]))
        self._lanes.add(np.array([block.lanes]))

    def spots(self, block: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        place = self._place.all.take(self._of_rows.all.take(block) + offset)
        first = self._of_lanes.all.take(block)
        lane = last_up_to(self._lane_first.all, first, self._lanes.all.take(block), place)
        return lane, place - self._lane_first.all.take(first + lane).astype(np.int64)

    def offsets(self, block: np.ndarray, lane: np.ndarray, rank: np.ndarray) -> np.ndarray:
        place = self._lane_first.all.take(self._of_lanes.all.take(block) + lane) + rank
        found: np.ndarray = self._offset.all.take(self._of_rows.all.take(block) + place)
        return found.astype(np.int64)

    def _cut(self, blocks: int) -> None:
        for of, piles in (
            (self._of_rows, (self._offset, self._place)),
            (self._of_lanes, (self._lane_first,)),
        ):
            begin = int(of.all[blocks])
            of.cut(blocks)
            of.all[:] -= begin
            for pile in piles:
                pile.cut(begin)
        self._lanes.cut(blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        return ()

    @property
    def _stored(self) -> tuple[StoredArray, ...]:
        return (
            *(StoredArray(self._offset), StoredArray(self._place)),
            *(StoredArray(self._of_rows, True, self._offset), StoredArray(self._lane_first)),
            *(StoredArray(self._lanes, True), StoredArray(self._of_lanes, True, self._lane_first)),
        )

    def _fits(self) -> bool:
        lanes = np.diff(self._of_lanes.all, append=self._lane_first.count)
        return self._place.count == self._offset.count and bool((lanes == self._lanes.all).all())

    @property
    def _own_words(self) -> dict[str, tuple[Any, ...]]:
        return {
            "kind": (KINDS.index("order"),),
            "ahead": self._place.words,
            "back": self._offset.words,
            "of_ahead": self._of_rows.words,
            "of_back": self._of_rows.words,
        }

    @property
    def _piles(self) -> tuple[GrowableArray | Ladders, ...]:
        return self._offset, self._place, self._lane_first

    @staticmethod
    def cost(block: LaneBlock, itemsize: int) -> float:
        """Return the size of a block in bytes."""
        return 2 * itemsize * block.rows + itemsize * block.lanes


class TableEncoding(LaneEncoding):
    """Encoding as the offset and the rank at which each lane begins in each sweep.

    Args:
        dtype: the dtype of offsets.
        lanes: the number of lanes.
    """

    def __init__(self, dtype: Any, lanes: int) -> None:
        super().__init__(dtype)
        self._lanes = lanes
        self._sweeps = Ladders(dtype)
        self._offset, self._rank = GrowableArray(dtype, lanes), GrowableArray(dtype)

    def _add(self, block: LaneBlock) -> None:
        sweeps = len(block.sweep_first)
        counts = np.bincount(
            block.sweep * self._lanes + block.lane, minlength=sweeps * self._lanes
        ).reshape(sweeps, self._lanes)
        self._offset.add(_before(counts, 1) + block.sweep_first[:, None])
        self._rank.add(_before(counts, 0).T.reshape(-1))
        self._sweeps.add(block.sweep_first, block.rows)

    def spots(self, block: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sweep = self._sweeps.up_to(block, offset) - 1
        first = sweep * self._lanes
        flat = self._offset.all.reshape(-1)
        lane = last_up_to(flat, first, np.full(len(first), self._lanes), offset)
        at, _ = self._ranks(block, lane)
        rank = self._rank.all.take(at + sweep - self._sweeps.of_rungs.all.take(block))
        return lane, rank + (offset - flat.take(first + lane))

    def offsets(self, block: np.ndarray, lane: np.ndarray, rank: np.ndarray) -> np.ndarray:
        at, count = self._ranks(block, lane)
        sweep = last_up_to(self._rank.all, at, count, rank)
        first = self._sweeps.of_rungs.all.take(block)
        begin = self._offset.all.reshape(-1).take((first + sweep) * self._lanes + lane)
        found: np.ndarray = begin + (rank - self._rank.all.take(at + sweep))
        return found

    def _ranks(self, block: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where the ranks of a lane begin, and the number of sweeps, [n] each."""
        of = self._sweeps.of_rungs.all
        first = of.take(block)
        stop = np.append(of, self._sweeps.rungs.count).take(block + 1)
        return first * self._lanes + lane * (stop - first), stop - first

    def _cut(self, blocks: int) -> None:
        begin = int(self._sweeps.of_rungs.all[blocks])
        self._sweeps.cut(blocks)
        self._offset.cut(begin)
        self._rank.cut(begin * self._lanes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self._lanes,)

    @property
    def _stored(self) -> tuple[StoredArray, ...]:
        return *self._sweeps.stored, StoredArray(self._offset), StoredArray(self._rank)

    def _fits(self) -> bool:
        sweeps = self._sweeps.rungs.count
        return self._offset.count == sweeps and self._rank.count == sweeps * self._lanes

    @property
    def _own_words(self) -> dict[str, tuple[Any, ...]]:
        return {
            "kind": (KINDS.index("table"),),
            "lanes": (self._lanes,),
            "sweeps": self._sweeps.words,
            "ahead": self._offset.words,
            "back": self._rank.words,
        }

    @property
    def _piles(self) -> tuple[GrowableArray | Ladders, ...]:
        return self._offset, self._rank, self._sweeps

    @staticmethod
    def cost(block: LaneBlock, itemsize: int) -> float:
        """Return the size of a block in bytes."""
        return 2 * itemsize * len(block.sweep_first) * block.lanes


class BitEncoding(LaneEncoding):
    """Encoding as one bit per lane and layer, stored by layers and by lanes.

    Args:
        dtype: the dtype of offsets.
        lanes: the number of lanes.
        layers: the number of layers of a sweep.
    """

    def __init__(self, dtype: Any, lanes: int, layers: int) -> None:
        super().__init__(dtype)
        self._lanes, self._layers = lanes, layers
        self._nbytes = _word_nbytes(lanes)
        word = np.dtype(f"<u{min(self._nbytes, 8)}")
        self._sweeps = Ladders(dtype)
        self._by_layer = GrowableArray(np.uint8, self._nbytes)
        self._by_lane, self._of_lanes = GrowableArray(np.uint64), GrowableArray(np.int64)
        self._words, self._most_words = GrowableArray(np.int64), 1
        self._word = word

    @cached_property
    def _below(self) -> np.ndarray:
        """For each lane, a mask of the lanes below it. The extension does not need these masks."""
        below = np.tri(self._lanes, 8 * self._nbytes, -1, dtype=np.uint8)
        return np.packbits(below, axis=1, bitorder="little").view(self._word)

    def _add(self, block: LaneBlock) -> None:
        layers = len(block.sweep_first) * self._layers
        bits = np.zeros((layers, 8 * self._nbytes), np.bool_)
        bits[block.sweep * self._layers + block.layer, block.lane] = True
        self._by_layer.add(np.packbits(bits, axis=1, bitorder="little"))
        words = -(-layers // _WORD)
        by_lane = np.zeros((self._lanes, words * _WORD), np.bool_)
        by_lane[:, :layers] = bits.T[: self._lanes]
        packed = np.packbits(by_lane, axis=1, bitorder="little").view(np.uint64)
        self._of_lanes.add(np.array([self._by_lane.add(packed.reshape(-1))]))
        self._words.add(np.array([words]))
        self._most_words = max(self._most_words, words)
        self._sweeps.add(block.sweep_first, block.rows)

    def spots(self, block: np.ndarray, offset: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sweep = self._sweeps.up_to(block, offset) - 1
        within = offset - self._sweeps.rungs.all.take(sweep)
        rows, layers = self._rows_of(sweep), self._layers
        # Count the rows below each lane over all layers: first by byte, then by bit.
        counts = np.bitwise_count(rows).sum(axis=1, dtype=np.int64)
        byte, before = _first_above(counts, within)
        bits = np.unpackbits(
            rows[np.arange(len(rows)), :, byte][:, :, None], axis=2, bitorder="little"
        )
        bit, more = _first_above(bits.sum(axis=1, dtype=np.int64), within - before)
        lane = byte * 8 + bit
        layer = (sweep - self._sweeps.of_rungs.all.take(block)) * layers + within - before - more
        mask = _LOW.take(np.clip(layer[:, None] - _WORD * self._columns, 0, _WORD))
        rank = np.bitwise_count(self._lane_words(block, lane) & mask).sum(axis=1, dtype=np.int64)
        return lane, rank

    def offsets(self, block: np.ndarray, lane: np.ndarray, rank: np.ndarray) -> np.ndarray:
        words = self._lane_words(block, lane)
        word, before = _first_above(np.bitwise_count(words), rank)
        chosen = words[np.arange(len(words)), word]
        layer = word * _WORD + _select(chosen, rank - before)
        sweep = layer // self._layers + self._sweeps.of_rungs.all.take(block)
        rows = self._rows_of(sweep).view(self._word).reshape(len(sweep), self._layers, -1)
        below = np.bitwise_count(rows & self._below.take(lane, axis=0)[:, None])
        below = below.reshape(len(sweep), -1)
        before = below[:, 0] if below.shape[1] == 1 else below.sum(axis=1, dtype=np.int64)
        found: np.ndarray = self._sweeps.rungs.all.take(sweep) + (before + layer % self._layers)
        return found

    def _rows_of(self, sweep: np.ndarray) -> np.ndarray:
        """Return the bytes of every layer of sweeps [n], [n, layers, bytes]."""
        shape = (-1, self._layers * self._nbytes)
        rows = self._by_layer.all.reshape(shape).take(sweep, axis=0)
        return rows.reshape(len(sweep), self._layers, self._nbytes)

    def _lane_words(self, block: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """Return the words of lanes in blocks, padded with 0, [n, words]."""
        words = self._words.all.take(block)
        at = (self._of_lanes.all.take(block) + lane * words)[:, None] + self._columns
        found: np.ndarray = self._by_lane.all.take(at, mode="clip")
        if self._most_words > 1:
            found[self._columns >= words[:, None]] = 0
        return found

    @property
    def _columns(self) -> np.ndarray:
        return np.arange(self._most_words)

    def _cut(self, blocks: int) -> None:
        begin = int(self._sweeps.of_rungs.all[blocks])
        self._sweeps.cut(blocks)
        self._by_layer.cut(begin * self._layers)
        begin = int(self._of_lanes.all[blocks])
        self._of_lanes.cut(blocks)
        self._of_lanes.all[:] -= begin
        self._by_lane.cut(begin)
        self._words.cut(blocks)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._lanes, self._layers

    @property
    def _stored(self) -> tuple[StoredArray, ...]:
        return (
            *(*self._sweeps.stored, StoredArray(self._by_layer), StoredArray(self._by_lane)),
            *(StoredArray(self._of_lanes, True, self._by_lane), StoredArray(self._words, True)),
        )

    def _fits(self) -> bool:
        self._most_words = int(self._words.all.max())
        words = np.diff(self._of_lanes.all, append=self._by_lane.count)
        return (
            self._by_layer.count == self._sweeps.rungs.count * self._layers
            and self._words.all.min() > 0
            and bool((words // self._lanes == self._words.all).all())
            and not (words % self._lanes).any()
        )

    @property
    def _own_words(self) -> dict[str, tuple[Any, ...]]:
        return {
            "kind": (KINDS.index("bits"),),
            "lanes": (self._lanes,),
            "layers": (self._layers,),
            "nbytes": (self._nbytes,),
            "sweeps": self._sweeps.words,
            "ahead": self._by_layer.words,
            "back": self._by_lane.words,
            "of_back": self._of_lanes.words,
            "words": self._words.words,
        }

    @property
    def _piles(self) -> tuple[GrowableArray | Ladders, ...]:
        return self._by_layer, self._by_lane, self._sweeps

    @staticmethod
    def cost(block: LaneBlock, itemsize: int) -> float:
        """Return the size of a block in bytes, or infinity if a sweep has too many layers."""
        each = int(block.layer.max()) + 1
        if each > MOST_LAYERS:
            return float("inf")
        layers = len(block.sweep_first) * each
        by_lane = 8 * -(-layers // _WORD) * block.lanes
        return layers * _word_nbytes(block.lanes) + by_lane + itemsize * len(block.sweep_first)


_NO_PILE: Final = (0,) * 3
_NO_LADDER: Final = _NO_PILE * 4


def check_places(places: np.ndarray, count: int) -> None:
    """Raise ValueError unless places [n], int64, ascend from 0 to at most ``count``."""
    if len(places) and not (
        places[0] == 0 and places[-1] <= count and (places[1:] >= places[:-1]).all()
    ):
        raise ValueError("an array refers to places that do not exist")


def _word_nbytes(lanes: int) -> int:
    """Return the number of bytes with a bit for each lane: 1, 2, 4, or a multiple of 8."""
    nbytes = -(-lanes // 8)
    return 1 << (nbytes - 1).bit_length() if nbytes <= 8 else -(-nbytes // 8) * 8


def _before(counts: np.ndarray, axis: int) -> np.ndarray:
    """Return the exclusive cumulative sum of counts along an axis."""
    found: np.ndarray = counts.cumsum(axis=axis) - counts
    return found


def _first_above(counts: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the first column of counts [n, columns] whose running sum exceeds a number [n].

    Returns:
        The column, and the sum before it, [n] each.
    """
    if counts.shape[1] == 1:
        return np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    sums = counts.cumsum(axis=1, dtype=np.int64)
    column = (sums <= number[:, None]).sum(axis=1)
    row = np.arange(len(counts))
    return column, sums[row, column] - counts[row, column]


def _select(words: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return the position of the ``rank``-th set bit of words [n]."""
    octets = words.view(np.uint8).reshape(-1, 8)
    octet, before = _first_above(np.bitwise_count(octets), rank)
    value = octets[np.arange(len(octets)), octet]
    found: np.ndarray = octet * 8 + _SELECT[value, rank - before]
    return found


def _select_table() -> np.ndarray:
    bits = np.unpackbits(_ONE_BYTE[:, None], axis=1, bitorder="little")
    table = np.zeros((256, 8), np.int64)
    value, bit = bits.nonzero()
    table[value, bits.cumsum(axis=1)[value, bit] - 1] = bit
    return table


_SELECT: Final = _select_table()
"""The position of the k-th set bit of a byte."""


def last_up_to(
    values: np.ndarray, first: np.ndarray, count: np.ndarray, x: np.ndarray
) -> np.ndarray:
    """Return the last index in ``values[first : first + count]`` whose value is at most x, [n].

    The values of each part ascend, and the first one is at most x.
    """
    low, high = np.zeros_like(first), count - 1
    while (low < high).any():
        middle = (low + high + 1) >> 1
        passed = values.take(first + middle) <= x
        low = np.where(passed, middle, low)
        high = np.where(passed, high, middle - 1)
    return low


def kind_of(block: LaneBlock, itemsize: int) -> tuple[Any, ...]:
    """Return the smallest encoding of a block, and the arguments of that encoding."""
    costs = {
        (BitEncoding, block.lanes, int(block.layer.max()) + 1): BitEncoding.cost(block, itemsize),
        (TableEncoding, block.lanes): TableEncoding.cost(block, itemsize),
        (OrderEncoding,): OrderEncoding.cost(block, itemsize),
    }
    return min(costs, key=costs.__getitem__)
