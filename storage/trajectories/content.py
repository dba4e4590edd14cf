"""The content of a storage: its rows in an order of their own, and one hash of all of them.

The order is that of trajectory and step, so that it does not matter in which order rows were
committed, nor in which format and files they lie.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from tallyroll.storage.errors import ColumnsMissing
from tallyroll.storage.files.checksums import Progress
from tallyroll.storage.rows.keys import CUT, STEP, TRAJ_IDS, spell
from tallyroll.storage.rows.reading import Reading
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.columns import missing, numbers_of

Numbering: TypeAlias = Literal["kept", "relative"]
NAMING: Final = (TRAJ_IDS, STEP)
"""The columns that say which row is which."""
_MAGIC: Final = "tallyroll content 1"
_MOST_NBYTES: Final = 32 << 20
"""Rows that are copied at a time, but for one row that is larger."""


def hash_of(reader: Reading, ids: Numbering = "kept", progress: Progress | None = None) -> str:
    """Return one SHA-256 of the rows that a reader has at this moment; see `content_hash`."""
    if not reader.initialised:
        return hashlib.sha256(_MAGIC.encode()).hexdigest()
    columns = compared_columns(reader.schema)
    about = [[spell(column.key), column.dtype_name, list(column.shape)] for column in columns]
    empty = hashlib.sha256(f"{_MAGIC}\n{json.dumps(about)}\n".encode())
    content, root = Content(reader, ids), empty.copy()
    bounds = content.bounds.tolist()
    leaf, trajectory = empty.copy(), 0
    for start, part in content.packed(columns):
        # A part may begin and end within a trajectory.
        size = part.nbytes // len(part)
        bytes_of, at, stop = part.view(np.uint8).data, start, start + len(part)
        while trajectory + 1 < len(bounds) and bounds[trajectory + 1] <= stop:
            end = bounds[trajectory + 1]
            leaf.update(bytes_of[(at - start) * size : (end - start) * size])
            root.update(leaf.digest())
            leaf, at, trajectory = empty.copy(), end, trajectory + 1
        leaf.update(bytes_of[(at - start) * size :])
        if progress is not None:
            progress(len(part) * reader.schema.row_nbytes)
    return root.hexdigest()


def compared_columns(schema: Schema) -> list[Column]:
    """Return the columns that are content, by name."""
    return sorted(
        (column for column in schema.columns if column.key != CUT),
        key=lambda column: spell(column.key),
    )


class Content:
    """The rows that a reader has at this moment, ordered by trajectory and step.

    Raises:
        ColumnsMissing: the rows do not say which trajectory and step they are.
        Overrun: a ring's writer overwrites rows while they are read.
        ValueError: ``ids`` is no `Numbering`.
    """

    def __init__(self, reader: Reading, ids: Numbering = "kept") -> None:
        if ids not in ("kept", "relative"):
            raise ValueError(f"ids: expected 'kept' or 'relative', got {ids!r}")
        if lacking := missing(reader.schema, NAMING):
            raise ColumnsMissing(
                f"{reader.path} has no {', no '.join(lacking)} (whole numbers, one a row), which "
                "say which row is which. Tallyroll's collectors write these columns."
            )
        self._reader, self._span = reader, reader.span
        span = self._span
        own = [
            numbers_of(reader.column(key).take(np.arange(span.start, span.stop))) for key in NAMING
        ]
        self.check()
        found, steps = own
        order = np.argsort(found, kind="stable")
        found, steps = found[order], steps[order]
        same = found[1:] == found[:-1]
        if (same & (steps[1:] < steps[:-1])).any():  # rows from elsewhere, in no order of time
            order = np.lexsort((np.arange(len(order)), own[1], own[0]))
            found, steps = own[0][order], own[1][order]
            same = found[1:] == found[:-1]
        self.rows: np.ndarray = order + span.start
        """Their numbers in this order, int64 [rows]."""
        self.steps: np.ndarray = steps
        """int64 [rows]."""
        firsts, end = np.flatnonzero(~same) + 1, [len(order)] if len(order) else []
        self.bounds: np.ndarray = np.concatenate(([0], firsts, end)).astype(np.int64)
        """Where trajectories begin in the order, and its end, int64 [trajectories + 1]."""
        self.relative = ids == "relative"
        lengths = np.diff(self.bounds)
        self.ids: np.ndarray = (
            np.repeat(np.arange(len(lengths)), lengths) if self.relative else found
        )
        """int64 [rows]."""

    def check(self) -> None:
        """Raise `Overrun` if rows of the span are gone."""
        if self._reader.span.start > self._span.start:
            raise self._reader.overrun(f"{len(self._span):,}")

    def packed(self, columns: list[Column]) -> Iterator[tuple[int, np.ndarray]]:
        """Yield places of the order, and the rows from there on, each as its columns' bytes."""
        fields = [(f"f{at}", f"V{column.row_nbytes}") for at, column in enumerate(columns)]
        dtype = np.dtype(fields)
        size = max(1, _MOST_NBYTES // dtype.itemsize)
        room = np.empty(min(size, len(self.rows)), dtype)
        for start in range(0, len(self.rows), size):
            at = np.arange(start, min(start + size, len(self.rows)))
            part = room[: len(at)]
            for (name, kind), column in zip(fields, columns, strict=True):
                part[name] = self.bytes_at(column, at).view(kind)[:, 0]
            yield start, part

    def bytes_at(self, column: Column, at: np.ndarray) -> np.ndarray:
        """Return a column's bytes at places [n] of the order, uint8 [n, bytes of a row]."""
        if self.relative and column.key == TRAJ_IDS:
            values: Any = self.ids[at].astype(column.numpy_dtype)
        else:
            values = self._reader.column(column.key).take(self.rows[at])
            self.check()
        found: np.ndarray = np.ascontiguousarray(values).reshape(len(at), -1).view(np.uint8)
        return found
