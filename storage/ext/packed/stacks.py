"""Deduplication of states and of frames. Pure.

A row begins in a state and leads to a next state. If the next state equals, bit for bit, the state
in which the following row begins, both are stored as one state. States are numbered in the order of
rows. Each row adds the state in which it begins, unless that is the previous state, and then its
next state.

A stack of frames is usually the previous stack without its oldest frame and with a new one. Frames
are stored in that order, each of them once. A state that is not the previous state with one new
frame is a *start*. The table of starts has a line for each: the number of the state, the position
of its first stored frame, the number of its stored frames (the newest of the stack), and the kind
of padding before them. `REPEATS` repeats the first stored frame, and `ZEROS` fills with zeros, as
wrappers do at the beginning of an episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from tallyroll.storage.engine.kernel import compiled

REPEATS: Final = 0
ZEROS: Final = 1


def as_bits(values: np.ndarray, skip: int = 0) -> np.ndarray:
    """View rows [n, ...] as words [n, k] of the largest size that divides a row and ``skip``."""
    nbytes = values.itemsize * math.prod(values.shape[1:])
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(len(values), nbytes)
    width = next(each for each in (8, 4, 2, 1) if nbytes % each == skip % each == 0)
    return flat.view(f"u{width}")


def same_bits(one: np.ndarray, other: np.ndarray, skip: int = 0) -> np.ndarray:
    """Compare the bits of the rows [n, ...] of two arrays; return bool [n].

    The first ``skip`` bytes of a row of ``one`` and the last ``skip`` bytes of a row of ``other``
    are ignored.
    """
    if kernel := compiled():
        found = np.empty(len(one), np.bool_)
        kernel.same_rows(np.ascontiguousarray(one), np.ascontiguousarray(other), found, skip)
        return found
    left, right = as_bits(one, skip), as_bits(other, skip)
    first = skip // left.itemsize
    same: np.ndarray = (left[:, first:] == right[:, : left.shape[1] - first]).all(1)
    return same


def by_frame(stacks: np.ndarray, n: int, axis: int) -> np.ndarray:
    """Convert stacks [rows, ...] to frames [rows, n, ...], oldest first; a view if possible."""
    if axis == 0:
        size = stacks.shape[1] // n
        return stacks.reshape(len(stacks), n, size, *stacks.shape[2:])
    size = stacks.shape[axis + 1] // n
    shape = (*stacks.shape[: axis + 1], n, size, *stacks.shape[axis + 2 :])
    return np.moveaxis(stacks.reshape(shape), axis + 1, 1)


def stacked(frames: np.ndarray, axis: int) -> np.ndarray:
    """Convert frames [rows, n, ...] to C-contiguous stacks; the inverse of `by_frame`."""
    moved = np.moveaxis(frames, 1, axis + 1)
    shape = moved.shape
    joined = (*shape[: axis + 1], shape[axis + 1] * shape[axis + 2], *shape[axis + 3 :])
    return np.ascontiguousarray(moved).reshape(joined)


def frame_shape(shape: tuple[int, ...], n: int, axis: int) -> tuple[int, ...]:
    """Return the shape of one frame of a stack of this shape."""
    return (*shape[:axis], shape[axis] // n, *shape[axis + 1 :])


def follows(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return bool [rows]: True where ``after`` [rows, n, ...] is ``before`` with one new frame."""
    return same_bits(before, after, before.itemsize * math.prod(before.shape[2:]))


def own_frames(stack: np.ndarray) -> tuple[int, int]:
    """Return the number of frames of a stack [n, ...] to store, and the padding before them."""
    bits, n = as_bits(stack), len(stack)
    zero = 0
    while zero < n - 1 and not bits[zero].any():
        zero += 1
    same = 0
    while same < n - 1 and (bits[same + 1] == bits[0]).all():
        same += 1
    return (n - zero, ZEROS) if zero > same else (n - same, REPEATS)


class StateWriter:
    """Detector of the states of rows that arrive one block after the other."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        self.states = 0
        """The number of states so far."""
        self._rows = 0

    def breaks(self, root: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return bool [n]: True for each of the next rows that begins in a new state.

        Args:
            root: the states in which the rows begin [n, ...].
            after: the next states of the rows [n, ...].
        """
        own = np.ones(len(root), np.bool_)
        own[1:] = ~same_bits(root[1:], after[:-1])
        if self._last is not None:
            own[:1] = ~same_bits(root[:1], self._last)
        self._last = after[-1:].copy()
        self._rows += len(root)
        self.states += len(root) + int(own.sum())
        return own


def in_order(root: np.ndarray, after: np.ndarray, own: np.ndarray) -> np.ndarray:
    """Return the states of rows in order: the next state of each row, ``after``.

    Rows that ``own`` [n] marks do not begin with the next state of the previous row. Their first
    state, from ``root``, precedes their next state. The result may be ``after`` itself.
    """
    if not own.any():
        return after
    states = np.empty((len(root) + int(own.sum()), *root.shape[1:]), root.dtype)
    at = np.arange(len(root)) + np.cumsum(own)
    states[at] = after
    states[at[own] - 1] = root[own]
    return states


class FrameWriter:
    """Detector of the frames of states that arrive one block after the other."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        self._states = 0
        self.frames = 0
        """The number of frames so far."""

    def add(self, stacks: np.ndarray, goes_on: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the frames that the next states add [k, ...], and the lines of starts [s, 4].

        Args:
            stacks: the states as frames [m, n, ...].
            goes_on: bool [m]; False for states that must be starts.
        """
        m = len(stacks)
        follow = goes_on.copy()
        inner = np.flatnonzero(follow[1:]) + 1
        follow[inner] = follows(stacks[inner - 1], stacks[inner])
        if self._last is None:
            follow[:1] = False
        elif follow[0]:
            follow[:1] = follows(self._last, stacks[:1])
        found = self.of(stacks[:, -1], follow, stacks.__getitem__)
        self._last = stacks[-1:].copy() if m else self._last
        return found

    def of(
        self, newest: np.ndarray, follow: np.ndarray, stack: Callable[[int], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as `add`, given which states follow the previous state.

        The returned frames may be ``newest`` itself.

        Args:
            newest: the newest frame of each state [m, ...].
            follow: bool [m]; True for each state that is the previous state with its newest frame.
            stack: a function that returns one of these states as frames [n, ...].
        """
        if follow.all():
            self._states += len(follow)
            self.frames += len(follow)
            return newest, np.zeros((0, 4), np.int64)
        count = np.ones(len(follow), np.int64)
        alone = np.flatnonzero(~follow)
        starts = np.zeros((len(alone), 4), np.int64)
        starts[:, 0] = self._states + alone
        found = [stack(state) for state in alone.tolist()]
        for line, each in zip(starts, found, strict=True):
            line[2:] = own_frames(each)
        count[alone] = starts[:, 2]
        at = np.cumsum(count) - 1
        frames = np.empty((int(count.sum()), *newest.shape[1:]), newest.dtype)
        frames[at] = newest
        firsts = at[alone] - count[alone] + 1
        starts[:, 1] = self.frames + firsts
        for each, first, many in zip(found, firsts.tolist(), starts[:, 2].tolist(), strict=True):
            frames[first : first + many] = each[len(each) - many :]
        self._states += len(follow)
        self.frames += len(frames)
        return frames, starts


def state_of(rows: np.ndarray, breaks: np.ndarray | None, is_next: bool) -> np.ndarray:
    """Return the state of each of ``rows`` [n], or its next state if ``is_next``."""
    if breaks is None:
        return rows
    found: np.ndarray = rows + np.searchsorted(breaks, rows, side="right") - (not is_next)
    return found


def frames_of(states: np.ndarray, starts: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions [m, n] of the frames of ``states`` [m], and a mask of zero frames."""
    line = np.searchsorted(starts[:, 0], states, side="right") - 1
    state, first, count, what = starts[line].T
    newest = first + count - 1 + states - state
    at = newest[:, None] + np.arange(1 - n, 1)
    before = at < first[:, None]
    return np.where(before, first[:, None], at), before & (what == ZEROS)[:, None]


def what_is_wrong(
    breaks: np.ndarray | None,
    starts: np.ndarray | None,
    rows: int,
    states: int,
    frames: int,
    n: int,
) -> str | None:
    """Validate breaks and starts; return the reason if they are inconsistent, or None."""
    if breaks is not None and not _ascend(breaks, rows):
        return "the breaks are not ascending row numbers"
    if starts is not None:
        state, first, count, what = starts.T
        if not _ascend(state, states):
            return "the starts are not ascending state numbers"
        if ((count < 1) | (count > n) | (what < REPEATS) | (what > ZEROS)).any():
            return "a start has an invalid number or kind of frames"
        # Each start begins at the end of the frames of the previous states.
        length = np.diff(state, append=states) + count - 1
        if (first != np.cumsum(length) - length).any() or length.sum() != frames:
            return "a start does not follow the frames of the states before it"
    return None


def _ascend(numbers: np.ndarray, stop: int) -> bool:
    """Return True if numbers ascend from 0 and are below ``stop``, or are empty if it is 0."""
    if not len(numbers) or not stop:
        return len(numbers) == 0 and not stop
    return bool(numbers[0] == 0 and numbers[-1] < stop and (np.diff(numbers) > 0).all())
