"""Columns whose values in slices differ from the stored ones.

A slice is treated as a separate trajectory. Its last row is marked as done, and as cut if the
trajectory continues. Its first row is marked as a beginning for recurrent modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from tensordict import TensorDict

from tallyroll.storage.rows.keys import CUT, DONE, Key, is_done, is_init
from tallyroll.storage.rows.schema import Schema
from tallyroll.storage.rows.tensordict_builder import TensorDictBuilder
from tallyroll.storage.trajectories.windows import Slices


def done_keys(schema: Schema) -> list[Key]:
    """Return every done column, at the root and in groups.

    The result is empty if the root has none, because then no column shows whether a trajectory
    continues.
    """
    if DONE not in schema:
        return []
    return [each.key for each in schema.columns if is_done(each.key, each.dtype)]


def init_keys(schema: Schema) -> list[Key]:
    """Return every column that marks where recurrent modules begin."""
    return [each.key for each in schema.columns if is_init(each.key, each.dtype)]


def slice_marks(dones: Mapping[Key, np.ndarray], slices: Slices) -> dict[Key, torch.Tensor]:
    """Return values at the last row of each slice that differ from the stored ones, by key.

    ``dones`` are copies of the stored values, bool [slices * length, ...], and are modified.
    """
    marks = {key: torch.from_numpy(done) for key, done in dones.items()}
    cut = end(dones, slices)
    return marks if cut is None else {CUT: torch.from_numpy(cut.reshape(-1)), **marks}


def end(dones: Mapping[Key, np.ndarray], slices: Slices) -> np.ndarray | None:
    """Set ``dones`` at the last row of slices; return a mask of the cut rows, [slices, length].

    The result is None if no column shows whether a trajectory continues.
    """
    cut, at = None, slices.last
    for key, done in dones.items():
        flags = done.reshape(*slices.rows.shape, -1)
        if key == DONE:
            cut = np.zeros(slices.rows.shape, np.bool_)
            cut[at] = ~flags[at].any(axis=1)
        flags[at] = True
    return cut


class SliceColumns:
    """The columns of a schema whose values in slices differ from the stored ones.

    Make one for each reader, because finding the columns takes as long as reading a small slice.
    """

    def __init__(self, schema: Schema) -> None:
        keys = schema.keys
        self.row_nbytes = schema.row_nbytes
        self.dones = [(key, keys.index(key)) for key in done_keys(schema)]
        self.inits = [keys.index(key) for key in init_keys(schema)]
        self._nest: TensorDictBuilder | None = None
        if self.dones and CUT not in keys and not schema.batch_dims:
            columns = [(each.key, each.dtype) for each in schema.columns]
            self._nest = TensorDictBuilder([*columns, (CUT, torch.bool)])

    def marked(
        self, arrays: Sequence[np.ndarray], slices: Slices, nest: TensorDictBuilder
    ) -> TensorDict:
        """Write the marks into the arrays of all columns, and return a TensorDict of the arrays.

        Arrays are [slices, length, ...]. ``nest`` is the builder of the reader.
        """
        cut = end({key: arrays[place] for key, place in self.dones}, slices)
        for place in self.inits:
            arrays[place][slices.first] = True
        if cut is None:
            return nest(arrays, slices.rows.shape)
        if self._nest is not None:
            return self._nest([*arrays, cut], slices.rows.shape)
        found = nest(arrays, slices.rows.shape)
        found.set(CUT, torch.from_numpy(cut).reshape(found.batch_size))
        return found
