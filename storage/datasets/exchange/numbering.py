"""Numbers of trajectories for rows that have none, from the flags of their ends. Pure."""

from __future__ import annotations

import numpy as np

from tallyroll.storage.datasets.exchange.door import Block
from tallyroll.storage.rows.keys import DONE, LANE, STEP, TERMINATED, TRAJ_IDS, TRUNCATED
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.trajectories.columns import missing

_FLAGS = (TERMINATED, TRUNCATED, DONE)
_OURS = (TRAJ_IDS, STEP, LANE)


class Numbering:
    """Gives rows of one lane, one trajectory after the other, the columns that say whose they are.

    Args:
        schema: the columns that they have.
    """

    def __init__(self, schema: Schema) -> None:
        shapes = {each.key: each for each in schema.columns}
        self._flags = [
            key
            for key in _FLAGS
            if key in shapes and shapes[key].dtype_name == "bool" and shapes[key].row_nbytes == 1
        ]
        self.needed = bool(self._flags) and not {*_OURS} & {*schema.keys}
        """False where rows have numbers, or no flags."""
        self.schema = schema if not self.needed else numbered(schema)
        self._id = self._step = 0

    def of(self, block: Block) -> Block:
        """Return the rows that come next, with their numbers."""
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
    """Return the columns of rows that are of these trajectories, [n] each."""
    lanes = np.zeros(len(ids), np.int32)
    return {TRAJ_IDS: ids.astype(np.int64), STEP: steps.astype(np.int64), LANE: lanes}


def numbered(schema: Schema) -> Schema:
    """Return columns with those that say which trajectory, step and lane a row is."""
    empty = numbers(np.empty(0, np.int64), np.empty(0, np.int64))
    more = tuple(each for each in Schema.of(empty).columns if each.key not in schema.keys)
    return Schema((*schema.columns, *more), schema.batch_dims)


def has_numbers(schema: Schema) -> bool:
    """Return whether rows say which trajectory, step and lane they are."""
    return not missing(schema, _OURS)
