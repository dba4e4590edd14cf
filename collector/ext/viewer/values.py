"""Values of rows as the page shows them: curves, frames and histograms, as JSON values or bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from tallyroll.collector.envs.extras import needs
from tallyroll.storage.readers.row_reader import RowReader
from tallyroll.storage.readers.spaces import spaces_of
from tallyroll.storage.rows.dtypes import in_float64
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    COUNTERS,
    LANE,
    NEXT,
    POLICY_VERSION,
    REWARD,
    STEP,
    TRAJ_IDS,
    format_key,
)
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.rows.spaces import space_of
from tallyroll.storage.trajectories.columns import floats_of

FRAMES: Final = 64
"""The number of frames in an answer."""
RAW_SIDE: Final = 256
"""The largest side of frames that are sent as they are."""
WEBP_SIDE: Final = 512
"""The largest side of other frames, which are scaled down and encoded."""
_ELEMENTS: Final = 16
"""The number of elements of a value that are shown."""
_POINTS: Final = 2000
"""The maximum number of points of a curve. Longer curves show the extremes of equal intervals."""
_CHUNK_NBYTES: Final = 2**25
_SAMPLE_NBYTES: Final = 2**26
_SAMPLE_ROWS: Final = 2**16
_BINS: Final = 40
_MOST_VALUES: Final = 64
"""The largest number of integers that have a bin each."""
_LEAST_SIDE: Final = 8
_NO_CURVE: Final = frozenset({TRAJ_IDS, STEP, LANE})
_FLAGS: Final = frozenset({"done", "terminated", "truncated"})


def plain(value: Any) -> Any:
    """Convert a value to JSON values, with text for numbers that JSON lacks."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


# --- curves ---------------------------------------------------------------------------------------


def curves_of(reader: RowReader, rows: np.ndarray) -> dict[str, Any]:
    """Return the values of the numeric columns along the rows [n] of an episode.

    ``x`` has the index of the step of each point. If ``every`` is 1, each step is a point.
    Otherwise each pair of points has the minimum and the maximum of ``every`` steps.
    Values that are not finite are null, and ``not_finite`` counts them.
    """
    every = 1 if len(rows) <= _POINTS else math.ceil(2 * len(rows) / _POINTS)
    begins = np.arange(0, len(rows), every)
    x = begins
    if every > 1:
        middle = np.minimum(begins + every // 2, len(rows) - 1)
        x = np.stack([begins, middle], 1).reshape(-1)
    columns = [_curve(reader, column, rows, every) for column in _plotted(reader.schema)]
    return {"x": x.tolist(), "every": every, "columns": columns}


def _plotted(schema: Schema) -> list[Column]:
    """Return the columns that are shown as curves: reward, action, observations, others."""
    own = {column.key for column in schema.columns}
    found = [
        column
        for column in schema.columns
        if column.numpy_dtype.kind in "biuf"
        and column.key not in _NO_CURVE
        and column.key[-1] not in _FLAGS | COUNTERS
        and (column.key[0] != NEXT or column.key[1:] not in own)
        and FrameView.of(column) is None
    ]
    return sorted(found, key=_place)


def _place(column: Column) -> int:
    if column.key == REWARD or column.key[-1] == "reward":
        return 0
    if column.key[-1] == "action":
        return 1
    return 3 if column.key[0] == COLLECTOR and column.key != POLICY_VERSION else 2


def _curve(reader: RowReader, column: Column, rows: np.ndarray, every: int) -> dict[str, Any]:
    size = math.prod(column.shape)
    parts, not_finite = [], 0
    for some in _chunks(column, rows, every):
        values = _floats(reader, column, some).reshape(len(some), size)[:, :_ELEMENTS]
        not_finite += int((~np.isfinite(values)).sum())
        if every > 1:
            at = np.arange(0, len(values), every)
            ends = np.fmin.reduceat(values, at), np.fmax.reduceat(values, at)
            values = np.stack(ends, 1).reshape(-1, values.shape[1])
        parts.append(values)
    joined = np.concatenate(parts)
    lines = [[v if math.isfinite(v) else None for v in line] for line in joined.T.tolist()]
    return {
        "name": format_key(column.key),
        "elements": size,
        "steps": column.numpy_dtype.kind in "biu",
        "not_finite": not_finite,
        "values": lines,
    }


def sum_of_rewards(reader: RowReader, rows: np.ndarray) -> Any:
    """Return the sum of the rewards of rows, one for each element of a reward; None without."""
    column = next((each for each in reader.schema.columns if each.key == REWARD), None)
    if column is None:
        return None
    with np.errstate(all="ignore"):  # rewards may be infinite
        total = _floats(reader, column, rows).reshape(len(rows), -1).sum(0)
    return total.tolist() if len(total) > 1 else float(total[0])


def _chunks(column: Column, rows: np.ndarray, every: int) -> Iterator[np.ndarray]:
    count = max(1, _CHUNK_NBYTES // max(1, column.row_nbytes) // every) * every
    for start in range(0, len(rows), count):
        yield rows[start : start + count]


def _floats(reader: RowReader, column: Column, rows: np.ndarray) -> np.ndarray:
    """Return the values of a column at ``rows`` [n] as float64 [n, ...]."""
    found = reader.copies(rows, [column.key])[0]
    return in_float64(floats_of(found) if column.dtype is torch.bfloat16 else found)


# --- frames ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FrameView:
    """The layout of an image column. Of a stack of frames, the last one is shown."""

    height: int
    width: int
    channels: int
    """1 for grey, 3 for red, green and blue."""
    stacks: int
    """The number of leading axes with frames of a stack: 0 or 1."""
    axis: str
    """The place of the channels: ``"first"``, ``"last"`` or ``"none"``."""

    @classmethod
    def of(cls, column: Column) -> FrameView | None:
        """Return the layout of a column's values, or None if they are not images."""
        if column.dtype is not torch.uint8 or len(column.shape) not in (2, 3, 4):
            return None
        stacks, shape = (1, column.shape[1:]) if len(column.shape) == 4 else (0, column.shape)
        if len(shape) == 2:
            height, width, channels, axis = *shape, 1, "none"
        elif shape[2] <= shape[0] and shape[2] < _LEAST_SIDE:
            height, width, channels, axis = *shape, "last"
        elif shape[0] < _LEAST_SIDE:
            channels, height, width, axis = *shape, "first"
        elif not stacks:  # a long stack of grey frames
            (height, width), channels, axis, stacks = shape[1:], 1, "none", 1
        else:
            return None
        colours = 3 if channels == 3 else 1
        return (
            cls(height, width, colours, stacks, axis) if min(height, width) >= _LEAST_SIDE else None
        )

    def frames(self, values: np.ndarray) -> np.ndarray:
        """Convert values [n, ...] of the column to frames [n, height, width, channels]."""
        if self.stacks:
            values = values[:, -1]
        if self.axis == "none":
            return values[..., None]
        values = np.moveaxis(values, 1, -1) if self.axis == "first" else values
        return values if values.shape[-1] == self.channels else values[..., -1:]


def pictures_of(schema: Schema) -> dict[str, tuple[Column, FrameView]]:
    """Return the image columns of a schema by name, without next observations."""
    own = {column.key for column in schema.columns}
    return {
        format_key(column.key): (column, picture)
        for column in schema.columns
        if (column.key[0] != NEXT or column.key[1:] not in own)
        and (picture := FrameView.of(column)) is not None
    }


def frames_at(
    reader: RowReader, column: Column, picture: FrameView, rows: np.ndarray
) -> np.ndarray:
    """Return the frames of rows as uint8 [rows, height, width, channels]."""
    return np.ascontiguousarray(picture.frames(reader.copies(rows, [column.key])[0]))


def encoded(frames: np.ndarray) -> tuple[str, bytes]:
    """Return the encoding of frames [n, height, width, channels], and their bytes.

    Small frames are encoded as ``"raw"``: their bytes, one frame after another. Larger frames are
    encoded as ``"webp"``: for each, the length of its image as a little-endian uint32, then the
    image.
    """
    if max(frames.shape[1:3]) <= RAW_SIDE:
        return "raw", frames.tobytes()
    images = [_webp(frame) for frame in frames]
    return "webp", b"".join(len(each).to_bytes(4, "little") + each for each in images)


def _webp(frame: np.ndarray) -> bytes:
    image = needs("PIL.Image", "view", "large frames")
    picture = image.fromarray(frame[..., 0] if frame.shape[-1] == 1 else frame)
    picture.thumbnail((WEBP_SIDE, WEBP_SIDE), image.Resampling.BILINEAR)
    file = io.BytesIO()
    picture.convert("RGB").save(file, "WEBP", quality=80, method=0)
    return file.getvalue()


# --- histograms -----------------------------------------------------------------------------------


def histograms_of(reader: RowReader) -> list[dict[str, Any]]:
    """Return a histogram of each element of the columns with declared bounds.

    A histogram counts at most 65,536 evenly spaced rows. If a bound is not finite, the histogram
    reaches to the extreme of the values. A column of more than 16 elements has a single histogram.
    """
    span, found = reader.span, []
    if not len(span):
        return []
    spaces = spaces_of(reader.manifest["runs"], reader.schema)
    for column in reader.schema.columns:
        if column.key not in spaces or column.numpy_dtype.kind not in "biuf":
            continue
        space = space_of(spaces[column.key])
        if space.low is None or space.high is None:
            continue
        shape = column.shape or (1,)
        low, high = (
            np.broadcast_to(np.asarray(each, np.float64), shape).reshape(-1)
            for each in (space.low, space.high)
        )
        if not np.isfinite(low).any() and not np.isfinite(high).any():
            continue
        count = max(1, min(len(span), _SAMPLE_ROWS, _SAMPLE_NBYTES // (8 * len(low))))
        rows = np.unique(np.linspace(span.start, span.stop - 1, count).astype(np.int64))
        values = _floats(reader, column, rows).reshape(len(rows), -1)
        if len(low) > _ELEMENTS:
            low, high, values = (
                low.min(keepdims=True),
                high.max(keepdims=True),
                values.reshape(-1, 1),
            )
        whole = column.numpy_dtype.kind in "biu"
        bars = [_bars(v, a, b, whole) for v, a, b in zip(values.T, low, high, strict=True)]
        found.append({"name": format_key(column.key), "rows": len(rows), "elements": bars})
    return found


def _bars(values: np.ndarray, low: float, high: float, whole: bool) -> dict[str, Any]:
    """Count the values [n] of an element in bins between its bounds."""
    finite = values[np.isfinite(values)]
    outer = [bound for bound in (low, high) if math.isfinite(bound)] or [0.0]
    outer += [float(finite.min()), float(finite.max())] if len(finite) else []
    least = low if math.isfinite(low) else min(outer)
    most = high if math.isfinite(high) else max(outer)
    if whole and most - least < _MOST_VALUES:
        edges = np.arange(least, most + 2) - 0.5
    else:
        edges = np.linspace(least, most if most > least else least + 1, _BINS + 1)
    inside = finite[(finite >= least) & (finite <= most)]
    counts = np.histogram(inside, edges)[0]
    return {
        "low": plain(float(low)),
        "high": plain(float(high)),
        "edges": edges.tolist(),
        "counts": counts.tolist(),
        "below": int((finite < least).sum()),
        "above": int((finite > most).sum()),
        "not_finite": len(values) - len(finite),
    }


# --- trends of a run ------------------------------------------------------------------------------


def trends_of(table: np.ndarray, ends: Sequence[int], bins: int = 400) -> dict[str, Any]:
    """Return the returns and lengths of the episodes in ``table``, and the shares of their ends.

    The episodes are divided into at most ``bins`` groups of about equal size. Each point has the
    mean, minimum and maximum of a group, at the last row of its last episode.

    Args:
        table: lines of an episode table, ordered by last row.
        ends: codes of the ends whose shares are returned.
        bins: maximum number of points.
    """
    count = min(bins, len(table))
    if not count:
        return {"x": [], "episodes": 0, "returns": [], "lengths": None, "ends": []}
    begins = np.arange(count) * len(table) // count
    sizes = np.diff([*begins, len(table)])
    returns = table["return"].reshape(len(table), -1)[:, :4]
    shares = [
        np.add.reduceat(table["end"] == code, begins, dtype=np.float64) / sizes for code in ends
    ]
    return {
        "x": table["last_row"][begins + sizes - 1].tolist(),
        "episodes": len(table),
        "returns": [_spread(each, begins, sizes) for each in returns.T],
        "lengths": _spread(table["length"].astype(np.float64), begins, sizes),
        "ends": [each.tolist() for each in shares],
    }


def _spread(values: np.ndarray, begins: np.ndarray, sizes: np.ndarray) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # returns may be infinite
        found = {
            "mean": np.add.reduceat(values, begins) / sizes,
            "low": np.minimum.reduceat(values, begins),
            "high": np.maximum.reduceat(values, begins),
        }
    return {
        name: [v if math.isfinite(v) else None for v in each.tolist()]
        for name, each in found.items()
    }
