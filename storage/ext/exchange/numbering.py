"""Convert end flags to bools, and number the trajectories of rows without numbers. Pure."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from tallyroll.storage.errors import InvalidDataset
from tallyroll.storage.ext.exchange.base import Block
from tallyroll.storage.rows.keys import (
    DONE,
    LANE,
    NEXT,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    Key,
    format_key,
)
from tallyroll.storage.rows.schema import Column, Schema
from tallyroll.storage.trajectories.columns import floats_of, missing

_FLAGS = (TERMINATED, TRUNCATED, DONE)
_FLAG_NAMES = {key[-1] for key in _FLAGS}
_OURS = (TRAJ_IDS, STEP, LANE)


def flags_of_ends(values: np.ndarray, column: Column, name: str, first: int) -> np.ndarray:
    """Convert the flags [n, ...] of a source to bools of the same shape.

    Args:
        values: bools, or numbers that are 0 or 1. A bfloat16 number is given by its bits.
        column: the column of the flags in the source.
        name: the name of the flags, for messages.
        first: the number of the first row.

    Raises:
        InvalidDataset: a flag is neither 0 nor 1, such as NaN.
    """
    if column.dtype is torch.bool:
        return values
    plain = floats_of(values) if column.dtype is torch.bfloat16 else values
    found: np.ndarray = plain == 1
    wrong = ~(found | (plain == 0))
    if wrong.any():
        row = int(np.flatnonzero(wrong.reshape(len(wrong), -1).any(1))[0])
        value = plain[row][wrong[row]].reshape(-1)[0].item()
        raise InvalidDataset(
            f"{name}: expected 0 or 1 where an episode may end, got {value!r} in row {first + row}"
        )
    return found


class EndFlags:
    """Converts end flags to bools if a source stores them as numbers.

    Args:
        schema: the columns of the source.
    """

    def __init__(self, schema: Schema) -> None:
        self._numbers = {
            each.key: each
            for each in schema.columns
            if _is_flag(each.key) and each.dtype is not torch.bool
        }
        self._rows = 0
        self.schema = schema
        """The columns of the source, with end flags as bools."""
        if self._numbers:
            columns = (
                replace(each, dtype=torch.bool) if each.key in self._numbers else each
                for each in schema.columns
            )
            self.schema = Schema(tuple(columns), schema.batch_dims)

    def of(self, block: Block) -> Block:
        """Return the next rows with end flags as bools. Raises as `flags_of_ends` does."""
        if not self._numbers:
            return block
        first, self._rows = self._rows, self._rows + len(next(iter(block.values())))
        return block | {
            key: flags_of_ends(block[key], column, format_key(key), first)
            for key, column in self._numbers.items()
        }


def _is_flag(key: Key) -> bool:
    """Return True if ``key`` is an end-of-episode flag, of all agents or of a group."""
    return key[-1] in _FLAG_NAMES and (key[0] == NEXT or len(key) == 1)


class TrajectoryNumbering:
    """Adds trajectory, step and lane columns to rows of one lane.

    The rows must come one trajectory after another.

    Args:
        schema: the columns of the rows.
    """

    def __init__(self, schema: Schema) -> None:
        shapes = {each.key: each for each in schema.columns}
        self._flags = [
            key
            for key in _FLAGS
            if key in shapes and shapes[key].dtype_name == "bool" and shapes[key].row_nbytes == 1
        ]
        self.needed = bool(self._flags) and not {*_OURS} & {*schema.keys}
        """False if the rows have numbers already, or have no flags."""
        self.schema = schema if not self.needed else numbered(schema)
        self._id = self._step = 0

    def of(self, block: Block) -> Block:
        """Return the next rows with their trajectory, step and lane numbers."""
        if not self.needed:
            return block
        count = len(next(iter(block.values())))
        ended = np.zeros(count, bool)
        for key in self._flags:
            ended |= block[key].reshape(count)
        begins = np.concatenate(([False], ended[:-1])) if count else ended
        ids = self._id + np.cumsum(begins)
        places = np.arange(count)
        first = np.maximum.accumulate(np.where(begins, places, 0))
        steps = places - first + np.where(first == 0, self._step, 0)
        if count:
            over = bool(ended[-1])
            self._id = int(ids[-1]) + over
            self._step = 0 if over else int(steps[-1]) + 1
        return block | numbers(ids, steps)


def numbers(ids: np.ndarray, steps: np.ndarray) -> Block:
    """Return the trajectory, step and lane columns [n] of rows in lane 0."""
    lanes = np.zeros(len(ids), np.int32)
    return {TRAJ_IDS: ids.astype(np.int64), STEP: steps.astype(np.int64), LANE: lanes}


def numbered(schema: Schema) -> Schema:
    """Return a schema with the trajectory, step and lane columns added."""
    empty = numbers(np.empty(0, np.int64), np.empty(0, np.int64))
    more = tuple(each for each in Schema.of(empty).columns if each.key not in schema.keys)
    return Schema((*schema.columns, *more), schema.batch_dims)


def has_numbers(schema: Schema) -> bool:
    """Return True if rows have trajectory, step and lane numbers."""
    return not missing(schema, _OURS)
