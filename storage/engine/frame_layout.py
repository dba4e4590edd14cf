"""Layout of a frame pool: which bytes belong to a segment, and to a frame in it. Pure.

`tallyroll.storage.engine.frame_pool` describes pools.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np

from tallyroll.storage.engine.kernel import in_order, table_of
from tallyroll.storage.errors import InvalidSchema
from tallyroll.storage.rows.dtypes import NUMPY

WORD_NBYTES: Final = 4
_PAGE_NBYTES: Final = 4096
_MOST_PER: Final = 1024
"""Maximum number of frames in a segment, as in the extension."""
_MOST_STACK: Final = 1024
_MOST_SEGMENT_NBYTES: Final = 2**31 - 8
_BLOCK_NBYTES: Final = 8192
"""Target size of a block in bytes. The plan rounds it to a number of whole frames."""
_BLOCK_FRAMES: Final = 64
_LARGE_FRAME_NBYTES: Final = 2**16
_DTYPES: Final = {dtype.name: dtype for dtype in NUMPY.values()}


def _rounded_up(nbytes: int, step: int) -> int:
    """Return ``nbytes`` rounded up to a multiple of ``step``."""
    return -(-nbytes // step) * step


@dataclass(frozen=True)
class FrameLayout:
    """Layout of the pool for one observation column and its next observation.

    Args:
        dtype: the dtype of an element; uint16 stands for bfloat16.
        shape: the shape of one frame, without the axis of the stack.
        stack: the number of frames in a value, along its first axis; 1 if the value is one frame.
        delta: store frames as differences, in blocks.
        segment_frames: the maximum number of frames in a segment.
        segment_nbytes: the size of a segment in bytes, a multiple of 8. In a plain pool, it is the
            size of the segment's frames. In a delta pool, a segment has space for the end offset of
            each frame, and for at least one whole frame.

    Raises:
        InvalidSchema: a pool cannot have this layout.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    stack: int
    delta: bool
    segment_frames: int
    segment_nbytes: int

    def __post_init__(self) -> None:
        if self.dtype not in NUMPY.values() or min(self.shape, default=1) < 1:
            raise InvalidSchema(
                "once: expected frames of a torch dtype and without empty axes, got dtype "
                f"{self.dtype} and shape {list(self.shape)}. Use once=False."
            )
        if not 1 <= self.stack <= _MOST_STACK or not 1 <= self.segment_frames <= _MOST_PER:
            raise InvalidSchema(
                f"once: expected a stack of 1 to {_MOST_STACK} frames and segments of 1 to "
                f"{_MOST_PER} frames, got {self.stack} and {self.segment_frames}."
            )
        if self.delta and self.frame_nbytes % WORD_NBYTES:
            raise InvalidSchema(
                f"once: expected frames of whole words of {WORD_NBYTES} bytes for differences, "
                f"got frames of {self.frame_nbytes} bytes. Store whole frames."
            )
        least = self.frame_nbytes + WORD_NBYTES * self.segment_frames
        fits = self.segment_nbytes >= least if self.delta else self.segment_nbytes == self._whole
        if not fits or self.segment_nbytes % 8 or self.segment_nbytes > _MOST_SEGMENT_NBYTES:
            raise InvalidSchema(
                f"once: expected segments for {self.segment_frames} frames of {self.frame_nbytes} "
                f"bytes, whose size is a multiple of 8 and at most {_MOST_SEGMENT_NBYTES} bytes, "
                f"got {self.segment_nbytes} bytes. Use once=False for larger frames."
            )

    @classmethod
    def plan(
        cls, dtype: np.dtype[Any], value_shape: tuple[int, ...], stack: int, *, delta: bool
    ) -> FrameLayout:
        """Choose the layout for a column.

        Args:
            dtype: the dtype of the column's arrays.
            value_shape: the shape of the column's value, with the axis of the stack.
            stack: the number of frames in a value; 1 if the value is one frame.
            delta: store frames as differences, in blocks.

        Raises:
            InvalidSchema: the first axis is not the stack, or a pool cannot hold the frames.
        """
        if stack > 1 and value_shape[:1] != (stack,):
            raise InvalidSchema(
                f"stacks: expected a value that begins with an axis of {stack} frames, got shape "
                f"{list(value_shape)}. Give the number of frames along its first axis."
            )
        shape = tuple(value_shape[1:] if stack > 1 else value_shape)
        frame_nbytes = dtype.itemsize * math.prod(shape)
        if delta:
            # Whole frames fill a block, so frames that do not shrink take at most 5 % more bytes
            # than in a plain pool.
            per, ends = _BLOCK_FRAMES, WORD_NBYTES * _BLOCK_FRAMES
            whole = max(1, round((_BLOCK_NBYTES - ends) / max(1, frame_nbytes)))
            segment_nbytes = _rounded_up(ends + whole * frame_nbytes, 8)
        else:
            per = 32 if frame_nbytes < _LARGE_FRAME_NBYTES else 8
            segment_nbytes = per * frame_nbytes
        return cls(np.dtype(dtype), shape, stack, delta, per, segment_nbytes)

    @cached_property
    def frame_nbytes(self) -> int:
        """The bytes of one frame."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def value_nbytes(self) -> int:
        """The size in bytes of a value, which has `stack` frames."""
        return self.stack * self.frame_nbytes

    @property
    def preamble_nbytes(self) -> int:
        """The number of bytes before the first segment; a delta pool has its reference there."""
        return _rounded_up(self.frame_nbytes, _PAGE_NBYTES) if self.delta else 0

    @property
    def _whole(self) -> int:
        return self.segment_frames * self.frame_nbytes

    @property
    def begin_of_frames(self) -> int:
        """The number of bytes before the first frame of a segment."""
        return WORD_NBYTES * self.segment_frames if self.delta else 0

    @cached_property
    def table(self) -> bytes:
        """The kernel table of the layout."""
        return table_of(self.words())

    def words(self) -> list[int]:
        """Return the words of the layout in a kernel table."""
        return in_order(
            "FRAMES",
            frame_nbytes=self.frame_nbytes,
            segment_frames=self.segment_frames,
            segment_nbytes=self.segment_nbytes,
            preamble_nbytes=self.preamble_nbytes,
            delta=int(self.delta),
        )

    def nbytes_of(self, segments: int) -> int:
        """Return the size in bytes of a pool with that many segments."""
        return self.preamble_nbytes + segments * self.segment_nbytes

    def segments_in(self, nbytes: int) -> int:
        """Return the number of whole segments in a pool of that many bytes."""
        return max(0, nbytes - self.preamble_nbytes) // self.segment_nbytes

    def frames_that_fit(self, used: int, filled: int) -> int:
        """Return the number of frames that fit in a segment even if each is stored whole.

        Args:
            used: the number of frames that the segment has.
            filled: the number of bytes that are in use.
        """
        return min(self.segment_frames - used, (self.segment_nbytes - filled) // self.frame_nbytes)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON value that `from_json` reads."""
        return {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "stack": self.stack,
            "delta": self.delta,
            "segment_frames": self.segment_frames,
            "segment_nbytes": self.segment_nbytes,
        }

    @classmethod
    def from_json(cls, value: Any) -> FrameLayout:
        """Return the layout from the result of `to_json`.

        Raises:
            InvalidSchema: ``value`` has another form.
        """
        keys = {"dtype", "shape", "stack", "delta", "segment_frames", "segment_nbytes"}
        if not isinstance(value, dict) or value.keys() != keys:
            raise InvalidSchema(
                f"expected a layout of frames with {', '.join(sorted(keys))}, got {value!r:.200}."
            )
        sizes = ("stack", "segment_frames", "segment_nbytes")
        shape, numbers = value["shape"], [value[key] for key in sizes]
        known = isinstance(value["dtype"], str) and value["dtype"] in _DTYPES
        whole = isinstance(shape, list) and all(type(size) is int for size in [*shape, *numbers])
        if not known or not whole or type(value["delta"]) is not bool or len(shape) > 64:
            raise InvalidSchema(
                "expected a layout of frames with a known dtype and whole numbers, got "
                f"{value!r:.200}."
            )
        stack, *segment = numbers
        dtype = _DTYPES[value["dtype"]]
        return cls(dtype, tuple(shape), stack, value["delta"], *segment)
