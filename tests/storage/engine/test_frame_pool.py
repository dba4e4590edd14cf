"""Compare pools of frames with a model that keeps the full values of each row.

``TALLYROLL_POOLS=2000 pytest -n0 tests/storage/engine/test_frame_pool.py`` runs that many pools.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tallyroll.storage import fast_paths
from tallyroll.storage.engine import frame_pool
from tallyroll.storage.engine.frame_layout import FrameLayout
from tallyroll.storage.engine.frame_pool import FrameWriter, read_frames
from tallyroll.storage.errors import CorruptStorage, InvalidSchema, StorageFull

TRIED = int(os.environ.get("TALLYROLL_POOLS", "20"))
BYTE = np.dtype(np.uint8)
SIZES = [3, 4, 8, 16, 64, 147, 148, 7056, 12288]
LARGE = [150528, 921600]
NOISE, STATIC, SPRITE, NANS, HALF = "noise", "static", "sprite", "nans", "half"


def frame_of(kind: str, lane: int, episode: int, step: int, size: int) -> np.ndarray:
    """Return a frame, uint8 [size], which depends on its lane, episode and step."""
    if kind == NOISE or (kind == STATIC and (episode + step) % 97 == 96):
        return np.random.default_rng((lane, episode, step)).integers(0, 256, size, np.uint8)
    if kind == NANS:  # payloads of NaN, zeros and negative zeros
        choice = np.array([0x7FC00001, 0x7F800001, 0xFFC12345, 0, 0x80000000], np.uint32)
        words = np.random.default_rng((lane, episode, step)).choice(choice, -(-size // 4))
        return words.view(np.uint8)[:size].copy()
    if kind == HALF:  # half of the words change
        frame = np.zeros(size, np.uint8)
        frame[size // 4 : -size // 4] = frame_of(NOISE, lane, episode, step, size // 2 + 1)[0]
        return frame
    frame = (np.arange(size) // 7 % 251).astype(np.uint8)
    if kind == SPRITE:
        at = (step * 53 + lane * 17) % size
        frame[at : at + 8] = 200 + step % 50
    frame[step % size] ^= 1 + step % 255
    frame[lane % size] ^= episode % 256
    return frame


@dataclass
class Lanes:
    """Lanes of stacked frames. Stacks begin with copies of the first frame, or with zeros."""

    rng: np.random.Generator
    kind: str
    stack: int
    size: int
    lengths: list[int]
    padding: str
    state: dict[int, list[int]] = field(default_factory=dict)
    episodes: int = 0

    def value(self, lane: int, episode: int, step: int) -> np.ndarray:
        """Return the stack [stack, size] after ``step`` steps."""
        frames = []
        for each in range(step - self.stack + 1, step + 1):
            if each < 0 and self.padding == "zeros":
                frames.append(np.zeros(self.size, np.uint8))
            elif each < 0 and self.padding == "other":
                frames.append(frame_of(NOISE, lane, episode, 1000 - each, self.size))
            else:
                frames.append(frame_of(self.kind, lane, episode, max(0, each), self.size))
        return np.stack(frames)

    def step(self, lane: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the observation and the next observation of one step of a lane."""
        if lane not in self.state or self.state[lane][1] == self.state[lane][2]:
            self.episodes += 1
            self.state[lane] = [self.episodes, 0, int(self.rng.choice(self.lengths))]
        episode, step, _ = self.state[lane]
        self.state[lane][1] += 1
        if self.rng.random() < 0.02:  # the true next observation is lost
            return self.value(lane, episode, step), self.value(lane, episode + 10**6, 0)
        return self.value(lane, episode, step), self.value(lane, episode, step + 1)

    def cut(self, lane: int) -> None:
        """Let the next step of a lane begin an episode."""
        self.state.pop(lane, None)


class Disk:
    """Memory that grows as a file does."""

    def __init__(self, layout: FrameLayout) -> None:
        self.layout, self.memory = layout, np.zeros(0, np.uint8)
        self.fails = False
        self.asked: list[int] = []

    def grow(self, segments: int) -> np.ndarray:
        """Return the memory of a longer pool. The former memory must not be used any more."""
        self.asked.append(segments)
        if self.fails:
            raise StorageFull("the disk is full")
        old, self.memory = self.memory, np.zeros(self.layout.nbytes_of(segments), np.uint8)
        self.memory[: len(old)] = old
        old[:] = 0xAA
        return self.memory


class Pool:
    """A writer with its memory."""

    def __init__(self, layout: FrameLayout, *, compiled: bool) -> None:
        self.disk = Disk(layout)
        self.off = () if compiled else ("kernel",)
        self.layout = layout
        self.open()

    def open(self) -> None:
        """Open the pool with a new writer."""
        with fast_paths.switched_off(*self.off):
            self.writer = FrameWriter(self.layout, self.disk.memory, self.disk.grow)

    def append(
        self, lanes: list[int], values: list[Any], first_row: int, oldest: int = 0
    ) -> np.ndarray:
        """Append rows of ``values`` [rows, 2, stack, frame], whose memory is then overwritten."""
        kept = [np.stack(both) for both in values]
        begins = np.array([each[0].ctypes.data for each in kept], np.int64)
        ends = np.array([each[1].ctypes.data for each in kept], np.int64)
        try:
            numbers = np.array(lanes, np.int64)
            return self.writer.append(numbers, begins, ends, first_row, oldest)
        finally:
            for each in kept:
                each[:] = 0x99

    def read(self, positions: np.ndarray) -> np.ndarray:
        """Return frames [..., k, frame], which are read to two arrays if k is 2 or more."""
        halves = np.array_split(positions, 2 if positions.shape[-1] > 1 else 1, axis=-1)
        size = self.layout.frame_nbytes
        outs = [np.full((*half.shape, size), 0x55, np.uint8) for half in halves]
        with fast_paths.switched_off(*self.off):
            read_frames(self.layout, self.disk.memory, positions, *outs)
        return np.concatenate(outs, axis=-2)


@dataclass
class Row:
    """A row of the model."""

    lane: int
    begin: np.ndarray
    end: np.ndarray
    positions: np.ndarray


class Run:
    """Writes the same rows to a compiled pool, to one in NumPy, and to the model."""

    def __init__(self, layout: FrameLayout, ring: int, lanes: Lanes, seed: int) -> None:
        self.layout, self.ring, self.lanes = layout, ring, lanes
        self.rng = np.random.default_rng(seed)
        self.pools = [Pool(layout, compiled=compiled) for compiled in (True, False)]
        self.rows: dict[int, Row] = {}
        self.head = self.reserve = self.failures = self.linked = 0

    @property
    def oldest(self) -> int:
        """The oldest valid row."""
        return max(0, self.reserve - self.ring) if self.ring else 0

    def valid(self) -> list[int]:
        """Return the numbers of the valid rows."""
        return [number for number in range(self.oldest, self.head) if number in self.rows]

    def append(self, lanes: list[int], *, commits: bool, fails: bool) -> None:
        """Append a row for each of ``lanes``, unless ``fails`` and the pools are full."""
        steps = [self.lanes.step(lane) for lane in lanes]
        self.reserve = max(self.reserve, self.head + len(lanes))
        before = [pool.disk.memory.copy() for pool in self.pools]
        owned = [{*pool.writer._open.tolist()} for pool in self.pools]
        found = []
        for pool in self.pools:
            pool.disk.fails = fails
            try:
                found.append(pool.append(lanes, steps, self.head, self.oldest))
            except StorageFull:
                found.append(None)
        assert np.array_equal(*(pool.disk.memory for pool in self.pools))
        for pool, *was in zip(self.pools, before, owned, strict=True):
            self.assert_needed_segments_are_kept(pool.disk.memory, *was)
        if found[0] is None or not commits:
            assert found[1] is None or found[0] is not None
            self.failures += found[0] is None
            for lane in {*lanes}:
                self.lanes.cut(lane)
            return
        assert np.array_equal(*found)
        self.commit(lanes, steps, found[0])
        self.assert_segments_have_one_owner()

    def commit(self, lanes: list[int], steps: list[Any], positions: np.ndarray) -> None:
        """Add rows to the model, and check the number of frames that they wrote."""
        stack, last = self.layout.stack, dict[int, Row]()
        known = {p for row in self.valid() for p in self.rows[row].positions.tolist()}
        for lane, (begin, end), found in zip(lanes, steps, positions, strict=True):
            row = Row(lane, begin, end, found)
            new = {*found.tolist()} - known
            assert len(new) <= 2 * stack
            if lane in last and np.array_equal(last[lane].end, begin):
                self.linked += 1
                assert np.array_equal(last[lane].positions[stack:], found[:stack])
                assert len(new) == 1 or not np.array_equal(begin[1:], end[:-1])
            known |= new
            last[lane] = self.rows[self.head] = row
            self.head += 1
        for number in [number for number in self.rows if number < self.oldest]:
            del self.rows[number]

    def assert_segments_have_one_owner(self) -> None:
        """Check that valid positions are in the pool, in no segment that another lane fills."""
        for pool in self.pools:
            writer = pool.writer
            fills = {
                int(writer._open[i]): lane
                for lane, i in writer._lane_of.items()
                if writer._open[i] >= 0
            }
            assert len(fills) == (writer._open >= 0).sum()
            newest = np.full(writer.segments, -1)
            for number in self.valid():
                row = self.rows[number]
                assert row.positions.min() >= 0
                assert row.positions.max() < writer.segments * self.layout.segment_frames
                segments = row.positions // self.layout.segment_frames
                assert {fills.get(segment, row.lane) for segment in segments.tolist()} == {row.lane}
                newest[segments] = number
            assert (writer._last_row >= newest).all()

    def assert_needed_segments_are_kept(
        self, memory: np.ndarray, before: np.ndarray, owned: set[int]
    ) -> None:
        """Check that nothing in use changed, and that only owners wrote to segments in use."""
        layout, needed = self.layout, {}
        for number in self.valid():
            for position in self.rows[number].positions.tolist():
                segment, index = divmod(position, layout.segment_frames)
                needed[segment] = max(needed.get(segment, 0), index)
        reference = layout.preamble_nbytes if needed else 0
        assert np.array_equal(memory[:reference], before[:reference])
        for segment, index in needed.items():
            place = slice(layout.nbytes_of(segment), layout.nbytes_of(segment + 1))
            new, old = memory[place], before[place]
            if segment not in owned:
                assert np.array_equal(new, old), segment
            used = (index + 1) * layout.frame_nbytes
            if layout.delta:
                used = int(old[: 4 * layout.segment_frames].view(np.uint32)[index])
                ends = 4 * (index + 1)
                assert np.array_equal(new[:ends], old[:ends]), segment
            first = layout.begin_of_frames
            assert np.array_equal(new[first:used], old[first:used]), segment

    def check(self) -> None:
        """Compare all valid rows with the model."""
        if not (order := self.rng.permutation(self.valid()).tolist()):
            return
        positions = np.stack([self.rows[number].positions for number in order])
        wanted = np.stack([[*self.rows[n].begin, *self.rows[n].end] for n in order])
        for pool in self.pools:
            assert np.array_equal(pool.read(positions), wanted)

    def resume(self, *, reopens: bool) -> None:
        """Derive the segments in use again, after the rows or the writer changed."""
        valid = self.valid()
        positions = np.array([self.rows[n].positions for n in valid], np.int32)
        positions = positions.reshape(len(valid), 2 * self.layout.stack)
        for pool in self.pools:
            if reopens:
                pool.open()
            pool.writer.resume(positions, np.array(valid, np.int64), pool.disk.memory)
        assert np.array_equal(self.pools[0].writer._last_row, self.pools[1].writer._last_row)

    def rewind(self, head: int) -> None:
        """Rewind to an earlier row."""
        for number in range(head, self.head):
            self.rows.pop(number, None)
        self.head = head
        self.reserve = max(self.reserve, head) if self.ring else head
        for lane in [*self.lanes.state]:
            self.lanes.cut(lane)
        self.resume(reopens=False)

    def empty(self) -> None:
        """Make all rows of a ring invalid."""
        self.reserve = self.head + self.ring
        self.rows.clear()
        self.resume(reopens=False)


def drawn_layout(rng: np.random.Generator, size: int) -> FrameLayout:
    """Draw a layout for frames of ``size`` bytes, of small segments or as planned."""
    stack, delta = int(rng.integers(1, 5)), bool(rng.integers(2)) and size % 4 == 0
    shape = (stack, size) if stack > 1 else (size,)
    if rng.random() < 0.3 or size > 20000:
        return FrameLayout.plan(BYTE, shape, stack, delta=delta)
    per = int(rng.choice([8, 16, 64]))
    block = -(-(4 * per + int(rng.choice([1, 2, 5])) * size) // 8) * 8
    return FrameLayout(BYTE, (size,), stack, delta, per, block if delta else per * size)


def run(seed: int, size: int, *, steps: int, most: int) -> Run:
    """Run pools with random lanes, failures, rewinds and reopenings."""
    rng = np.random.default_rng(seed)
    layout = drawn_layout(rng, size)
    lengths = [[1], [2], [5], [1000], [1, 2, 5, 1000]][int(rng.integers(5))]
    kind = str(rng.choice([NOISE, STATIC, SPRITE, NANS, HALF]))
    padding = str(rng.choice(["copies", "zeros", "other"]))
    lanes = Lanes(rng, kind, layout.stack, size, lengths, padding)
    ring = int(rng.choice([0, 30, 120]))
    numbers = rng.choice(10**12, int(rng.integers(1, most + 2)), replace=False)
    done = Run(layout, ring, lanes, seed)
    for _ in range(steps):
        what = rng.random()
        if what < 0.05:
            done.resume(reopens=True)
        elif what < 0.08:
            valid = done.valid()
            done.rewind(int(rng.integers(valid[0], valid[-1] + 2)) if valid else done.head)
        elif what < 0.10 and ring:
            done.empty()
        elif what < 0.15:
            lanes.cut(int(rng.choice(numbers)))
        active = numbers[rng.random(len(numbers)) < rng.choice([0.3, 1.0])]  # the others stall
        slots = int(rng.integers(1, most))
        order = np.tile(active, slots) if rng.random() < 0.6 else np.repeat(active, slots)
        order = order[: ring or len(order)].tolist()
        done.append(order, commits=not 0.5 < what < 0.55, fails=what > (0.6 if seed % 2 else 1))
        if rng.random() < 0.3:
            done.check()
    done.check()
    return done


@pytest.mark.parametrize("part", range(4))
def test_rows_of_random_pools_are_those_of_the_model(part: int) -> None:
    runs = []
    for seed in range(part * TRIED // 4, (part + 1) * TRIED // 4):
        rng = np.random.default_rng(seed)
        runs.append(run(seed, int(rng.choice(SIZES)), steps=int(rng.integers(10, 30)), most=8))
    assert sum(each.linked for each in runs) > 100
    assert any(each.failures for each in runs)


@pytest.mark.parametrize("size", LARGE)
def test_rows_of_large_frames_are_those_of_the_model(size: int) -> None:
    for seed in range(3):
        run(seed, size, steps=4, most=3)


@pytest.fixture(params=["extension", "numpy"])
def pool_of(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return a function that makes a pool, with the extension or without it."""
    compiled = request.param == "extension"
    with fast_paths.switched_off(*(() if compiled else ("kernel",))):
        yield lambda layout: Pool(layout, compiled=compiled)


def stacks_of(frames: list[int], stack: int, size: int) -> list[np.ndarray]:
    """Return the stacks [stack, size] that follow each other in frames of the bytes ``frames``."""
    made = np.repeat(np.array(frames, np.uint8)[:, None], size, 1)
    return [made[i : i + stack] for i in range(len(frames) - stack + 1)]


@pytest.mark.parametrize("delta", [False, True])
def test_frames_are_stored_once(pool_of: Any, delta: bool) -> None:
    pool = pool_of(FrameLayout.plan(BYTE, (3, 16), 3, delta=delta))
    copies, zeros = (stacks_of([f, f, 1, 2, 3], 3, 16) for f in (1, 0))
    other = stacks_of([9, 8, 7, 6], 3, 16)
    rows = [*pairwise(copies), (zeros[0], zeros[1]), (other[0], other[1])]
    rows += [(other[1], copies[0]), (copies[0], other[0])]
    found = pool.append([5] * len(rows), rows, 0).tolist()
    assert found == [
        [0, 0, 0, 0, 0, 1],  # a stack of copies, shifted
        [0, 0, 1, 0, 1, 2],  # links and shifts
        [3, 3, 4, 3, 4, 5],  # two zeros are one frame
        [6, 7, 8, 7, 8, 9],
        [7, 8, 9, 10, 10, 10],  # links, but the next observation is another one
        [10, 10, 10, 11, 12, 13],
    ]
    wanted = np.array([[*begin, *end] for begin, end in rows])
    assert np.array_equal(pool.read(np.array(found, np.int32)), wanted)
    again = pool.append([5, 6], [(other[0], other[1])] * 2, len(rows)).tolist()
    assert again == [
        [11, 12, 13, 12, 13, 14],
        [r + pool.layout.segment_frames for r in (0, 1, 2, 1, 2, 3)],
    ]


@pytest.mark.parametrize(("length", "frames"), [(1, 2.0), (2, 1.5), (5, 1.2), (1000, 1.001)])
def test_frames_of_a_row(pool_of: Any, length: int, frames: float) -> None:
    pool = pool_of(FrameLayout.plan(BYTE, (8,), 1, delta=False))
    lanes = Lanes(np.random.default_rng(0), NOISE, 1, 8, [length], "copies")
    rows = [
        (lanes.value(0, i // length, i % length), lanes.value(0, i // length, i % length + 1))
        for i in range(1000)
    ]
    positions = pool.append([0] * 1000, rows, 0)
    assert len(np.unique(positions)) / 1000 == frames


def test_long_runs_of_equal_and_of_new_words() -> None:
    """A run has at most 65,535 words to skip and as many new ones."""
    size, edges = 921600, [1, 65534, 65535, 65536, 131070, 131071, 200000]
    layout = FrameLayout.plan(BYTE, (size,), 1, delta=True)
    base = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    rows = []
    for skip, count in [(0, 230399), *((a, b) for a in edges for b in edges if a + b < 230400)]:
        end = base.copy()
        end.view(np.uint32)[skip : skip + count] += 1
        rows.append((base[None], end[None]))
    wanted = np.array([[*begin, *end] for begin, end in rows])
    pools = [Pool(layout, compiled=compiled) for compiled in (True, False)]
    found = [pool.append([*range(len(rows))], rows, 0) for pool in pools]
    assert np.array_equal(*found)
    assert np.array_equal(*(pool.disk.memory for pool in pools))
    for pool in pools:
        assert np.array_equal(pool.read(found[0]), wanted)


def test_bytes_of_rows_in_which_little_moves(pool_of: Any) -> None:
    """8 lanes of 84 x 84 pixels: a noisy background, a moving sprite and a counter."""
    back = np.random.default_rng(0).integers(0, 256, (84, 84), np.uint8)
    frames = np.tile(back, (8, 124, 1, 1))
    for lane in range(8):
        for step in range(124):
            x, y = 4 + abs((2 * step + 9 * lane) % 140 - 70), 4 + abs((step + lane) % 140 - 70)
            frames[lane, step, y : y + 4, x : x + 3] = 236
            frames[lane, step, 2:8, 10:16] = step // 20 * 30
    lanes = [lane for _ in range(120) for lane in range(8)]
    rows = [
        frames[lane, step : step + 5].reshape(5, -1) for step in range(120) for lane in range(8)
    ]
    for delta, least, most in ((True, 80, 200), (False, 7056, 1.2 * 7056)):
        pool = pool_of(FrameLayout.plan(BYTE, (4, 84, 84), 4, delta=delta))
        found = pool.append(lanes, [(each[:4], each[1:]) for each in rows], 0)
        segments = len(np.unique(found // pool.layout.segment_frames))
        assert least < segments * pool.layout.segment_nbytes / len(rows) < most
        assert np.array_equal(pool.read(found[:, [0, 1, 2, 3, 7]]), rows)


def states(count: int, size: int, first: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return rows of states of noise, each of which begins with the end of the one before."""
    made = [frame_of(NOISE, 0, 0, first + i, size)[None] for i in range(count + 1)]
    return [*pairwise(made)]


def test_the_pool_grows_by_small_steps(pool_of: Any) -> None:
    pool, sizes = pool_of(FrameLayout.plan(BYTE, (8192,), 1, delta=False)), [0]
    for row in range(0, 1280, 64):
        pool.append([0] * 64, states(64, 8192, row), row)
        if len(pool.disk.memory) > sizes[-1]:
            sizes.append(len(pool.disk.memory))
    assert sizes[1] == 2**20
    for before, after in pairwise(sizes[1:]):
        assert after - before <= max(before // 8, 2 * pool.layout.segment_nbytes)
    pool.disk.asked.clear()
    pool.disk.fails = True  # both the step and the least number of segments are refused
    with pytest.raises(StorageFull):
        pool.append([*range(1000)], [states(1, 8192)[0]] * 1000, 1280)
    assert [*pool.disk.asked] == sorted(pool.disk.asked, reverse=True)


@pytest.mark.parametrize("error", [StorageFull, KeyboardInterrupt])
@pytest.mark.parametrize("delta", [False, True])
def test_rows_after_a_failed_append(pool_of: Any, delta: bool, error: type[BaseException]) -> None:
    """The segments of the failed append are used again, also if the first row failed."""
    layout = FrameLayout.plan(BYTE, (2, 4096), 2, delta=delta)
    pool, values = pool_of(layout), Lanes(np.random.default_rng(0), HALF, 2, 4096, [], "copies")

    def fail(segments: int) -> np.ndarray:
        raise error

    def rows(lane: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
        return [*pairwise(values.value(lane, 0, step) for step in range(count + 1))]

    grow, kept, found = pool.writer._grow, rows(0, 60), np.empty((0, 4), np.int32)
    pool.append([1] * 7, rows(1, 7), 0)  # is not committed, but the pool has grown
    segments = pool.writer.segments
    for first in (0, 20, 40):
        pool.writer._grow = fail
        for _ in range(3):
            with pytest.raises(error):
                pool.append([0] + [1] * 400, rows(3, 1) + rows(2, 40) * 10, first)
        pool.writer._grow = grow
        found = np.concatenate([found, pool.append([0] * 20, kept[first : first + 20], first)])
        assert pool.writer.segments == segments
        wanted = np.array([[*begin, *end] for begin, end in kept[: first + 20]])
        assert np.array_equal(pool.read(found), wanted)


@pytest.mark.parametrize("delta", [False, True])
def test_first_rows_that_are_appended_again(pool_of: Any, delta: bool) -> None:
    """The reference is the first frame of the second attempt."""
    pool = pool_of(FrameLayout.plan(BYTE, (1024,), 1, delta=delta))
    for attempt in range(3):
        rows: list[Any] = []
        for lane in (0, 1):
            frames = [
                frame_of(SPRITE, 5 * lane + attempt, 0, step, 1024)[None] for step in range(4)
            ]
            rows += pairwise(frames)
        found = pool.append([0] * 3 + [1] * 3, rows, 0)
        assert np.array_equal(pool.read(found), np.array(rows)[:, :, 0])


def test_rows_after_an_append_that_was_not_committed_and_one_that_failed(pool_of: Any) -> None:
    pool = pool_of(
        FrameLayout(BYTE, (16384,), 1, delta=False, segment_frames=8, segment_nbytes=131072)
    )
    kept = states(4, 16384)
    found = pool.append([0] * 4, kept, 0)
    pool.append([0] * 20, states(20, 16384, 4), 4)  # fills the segment of the rows before
    pool.disk.fails = True
    with pytest.raises(StorageFull):
        pool.append([1] * 99, states(99, 16384, 100), 4)
    pool.disk.fails = False
    pool.append([1] * 99, states(99, 16384, 200), 4)
    assert np.array_equal(pool.read(found), np.array(kept)[:, :, 0])


def test_lanes_that_return_after_their_segments_became_free(pool_of: Any) -> None:
    """One lane's segment was taken meanwhile. The other lane links to a segment listed as free."""
    pool = pool_of(
        FrameLayout(BYTE, (16384,), 1, delta=False, segment_frames=8, segment_nbytes=131072)
    )
    taken, listed, busy = 0, 2, 1
    row, steps, rows = 0, {taken: 0, listed: 1000, busy: 2000}, {}

    def step(lane: int) -> list[int]:
        nonlocal row
        values = states(1, 16384, steps[lane])
        found = pool.append([lane], values, row, max(0, row - 19))
        rows[row] = values[0], found
        row, steps[lane] = row + 1, steps[lane] + 1
        return found[0].tolist()

    assert [step(taken), step(listed)] == [[0, 1], [8, 9]]
    while step(busy)[1] != 0:
        assert row < 100
    assert step(listed) == [9, 16]
    assert len({*step(taken)} & {0, 1}) == 0
    for values, found in [rows[each] for each in range(row - 20, row)]:
        assert np.array_equal(pool.read(found)[0], np.array(values)[:, 0])


def test_positions_beyond_32_bits(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_pool, "_MOST_POSITIONS", 100)
    pool = pool_of(FrameLayout.plan(BYTE, (8,), 1, delta=False))
    found = pool.append([0] * 80, states(80, 8), 0)
    for _ in range(2):
        with pytest.raises(StorageFull, match=r"3 segments and needs 4, .* in several shards"):
            pool.append([0] * 80, states(80, 8), 80)
    assert np.array_equal(pool.read(found), np.array(states(80, 8))[:, :, 0])
    pool.writer.resume(found[:20], np.arange(20), pool.disk.memory)
    pool.append([0] * 60, states(60, 8), 20)
    assert np.array_equal(pool.read(found[:20]), np.array(states(20, 8))[:, :, 0])


def test_a_ring_of_lanes_that_never_return_does_not_grow(pool_of: Any) -> None:
    pool = pool_of(FrameLayout.plan(BYTE, (2048,), 1, delta=False))
    for row in range(0, 4000, 10):
        pool.append([row] * 10, states(10, 2048, row), row, max(0, row - 90))
    assert pool.writer.segments <= 32


def test_wrong_positions_are_refused(pool_of: Any) -> None:
    pool = pool_of(FrameLayout.plan(BYTE, (16,), 1, delta=True))
    found, writer = pool.append([0] * 4, states(4, 16), 0), pool.writer
    frames = writer.segments * pool.layout.segment_frames
    out = np.zeros((2, 16), np.uint8)
    for wrong in (-1, frames, -(2**31), 2**31 - 1):
        positions = np.array([0, wrong], np.int32)
        with pytest.raises(IndexError, match=f"expected frames below {frames}, .* got {wrong}"):
            read_frames(pool.layout, pool.disk.memory, positions, out)
        with pytest.raises(CorruptStorage, match=f"got {wrong}"):
            writer.resume(np.array([[0, wrong]], np.int32), np.zeros(1, np.int64), writer._memory)
    assert not out.any()
    with pytest.raises(IndexError, match="below 0"):
        read_frames(pool.layout, pool.disk.memory[:100], np.zeros(2, np.int32), out)
    for positions, target in (
        (np.zeros(2, np.int64), out),
        (np.zeros(3, np.int32), out),
        (np.zeros(2, np.int32), out[:, ::-1]),
    ):
        with pytest.raises(ValueError, match="outs: expected contiguous arrays"):
            read_frames(pool.layout, pool.disk.memory, positions, target)
    pair = np.zeros((2, 2), np.int32)
    with pytest.raises(ValueError, match=r"outs: expected contiguous|differ in number"):
        read_frames(pool.layout, pool.disk.memory, pair, out[:1], np.concatenate([out, out[:1]]))
    read_frames(pool.layout, pool.disk.memory, np.empty((0, 2), np.int32), out[:0])
    writer.resume(found, np.arange(4), pool.disk.memory)
    with pytest.raises(ValueError, match="oldest: expected 0 to 4"):
        pool.append([0], states(1, 16), 4, 5)
    with pytest.raises(ValueError, match="does not shrink"):
        writer.remap(pool.disk.memory[:-8192])
    with pytest.raises(ValueError, match="writable array of bytes"):
        writer.remap(pool.disk.memory.view(np.int8))


def test_damaged_pools_are_read_within_their_bounds() -> None:
    """Any bytes give frames: the sanitizers find reads and writes outside the arrays."""
    for seed in range(2 * TRIED):
        rng = np.random.default_rng(seed)
        size = int(rng.choice([4, 16, 148, 1024]))
        per = int(rng.choice([1, 8, 64]))
        nbytes = -(-(4 * per + int(rng.choice([1, 2, 5])) * size) // 8) * 8
        layout = FrameLayout(BYTE, (size,), 1, True, per, nbytes)
        pool = Pool(layout, compiled=True)
        lanes = Lanes(rng, str(rng.choice([NOISE, STATIC, HALF])), 1, size, [9], "copies")
        pool.append([*range(4)] * 10, [lanes.step(i % 4) for i in range(40)], 0)
        first = layout.preamble_nbytes
        damaged = pool.disk.memory[: layout.nbytes_of(12)].copy()
        for _ in range(int(rng.choice([1, 10, 300]))):
            at = int(rng.integers(first, len(damaged)))
            damaged[at] ^= 1 << rng.integers(8)
        if rng.random() < 0.3:
            damaged[first:] = rng.integers(0, 256, len(damaged) - first, np.uint8)
        if rng.random() < 0.5:  # plausible ends of frames
            for segment in range(0, 12, 2):
                ends = damaged[layout.nbytes_of(segment) :][: 4 * per].view(np.uint32)
                ends[:] = np.sort(rng.integers(per, nbytes // 4 + 2, per)) * 4
        memory = damaged[: len(damaged) - int(rng.integers(nbytes))].copy()  # the end is exact
        frames = layout.segments_in(len(memory)) * per
        positions = rng.integers(0, frames, (50, int(rng.choice([1, 2, 8, 40])))).astype(np.int32)
        if rng.random() < 0.5:
            positions.sort(1)
        pool.disk.memory = memory
        found = [pool.read(positions)]
        with fast_paths.switched_off("kernel"):
            found.append(np.empty_like(found[0]))
            read_frames(layout, memory, positions, found[1])
        assert np.array_equal(*found)


@pytest.mark.parametrize("size", [3, 4, 147, 7056, 12288, 150528, 921600, 2**26 - 4])
@pytest.mark.parametrize("stack", [1, 4])
def test_layouts(size: int, stack: int) -> None:
    shape = (stack, size) if stack > 1 else (size,)
    for delta in (False, True):
        if delta and size % 4:
            with pytest.raises(InvalidSchema, match="words of 4 bytes"):
                FrameLayout.plan(BYTE, shape, stack, delta=delta)
            continue
        layout = FrameLayout.plan(BYTE, shape, stack, delta=delta)
        assert (layout.frame_nbytes, layout.shape, layout.stack) == (size, (size,), stack)
        assert layout.segment_nbytes % 8 == 0
        if delta:
            assert layout.segment_nbytes >= 4 * layout.segment_frames + size
            if size >= 1024:  # noise: whole frames fill a block
                whole = (layout.segment_nbytes - 4 * layout.segment_frames) // size
                assert layout.segment_nbytes <= 1.05 * whole * size
            assert layout.preamble_nbytes % 4096 == 0 <= layout.preamble_nbytes - size
        else:
            assert layout.segment_nbytes == layout.segment_frames * size
        for segments in (0, 1, 7):
            nbytes = layout.nbytes_of(segments)
            assert layout.segments_in(nbytes) == segments == layout.segments_in(nbytes + 1)
        assert layout.segments_in(0) == 0
        assert FrameLayout.from_json(layout.to_json()) == layout


WRONG_VALUES: list[tuple[str, Any]] = [
    *(("dtype", value) for value in ("object", "S8", "datetime64[s]", None, 1, ["uint8"])),
    *(("shape", value) for value in ([], [0], [-4], [4.0], ["4"], 84, None, [2**62], [True])),
    *(("stack", value) for value in (0, -1, 1.0, True, "4", 2**70)),
    *(("delta", value) for value in (0, 1, None, "yes")),
    *(("segment_frames", value) for value in (0, -64, 1025, 2**64, 64.0, None)),
    *(("segment_nbytes", value) for value in (0, -8, 7304, 8188, 8193, 2**31, 2**63, 8192.0)),
]


@pytest.mark.parametrize(("key", "value"), WRONG_VALUES)
def test_layouts_of_damaged_files_are_refused(key: str, value: Any) -> None:
    layout = FrameLayout.plan(BYTE, (4, 88, 84), 4, delta=True)
    assert FrameLayout.from_json(layout.to_json()) == layout
    right = layout.to_json() | {"segment_nbytes": 7312, "shape": [84, 84]}
    assert FrameLayout.from_json(right).frame_nbytes == 7056
    with pytest.raises(InvalidSchema):
        FrameLayout.from_json(right | {key: value})


@pytest.mark.parametrize("wrong", [None, [], "plain", {}, {"dtype": "uint8"}])
def test_other_values_are_no_layouts(wrong: Any) -> None:
    with pytest.raises(InvalidSchema, match="expected a layout"):
        FrameLayout.from_json(wrong)
    layout = FrameLayout.plan(BYTE, (8,), 1, delta=False)
    with pytest.raises(InvalidSchema, match="expected a layout"):
        FrameLayout.from_json(layout.to_json() | {"more": 1})
    with pytest.raises(InvalidSchema, match="begins with an axis of 4 frames"):
        FrameLayout.plan(BYTE, (3, 84, 84), 4, delta=False)
