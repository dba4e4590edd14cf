"""Columns of all lanes for the observations and infos of lanes that are stepped one by one."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.envs.gymnasium.lane_rows import LaneRows, Rows
from tallyroll.collector.envs.gymnasium.spaces import observation_leaves
from tallyroll.collector.native.kernel import in_order, require_names
from tallyroll.storage.engine.kernel import table_of
from tallyroll.storage.rows.dtypes import NUMPY

VALUES = ("other", "float64", "int64", "empty")
"""Kinds of values of entries, in the order of their numbers; see `StepKernel.step_lanes`."""
require_names("VALUES", VALUES)


class InfoCall(IntEnum):
    """The call that returned an info. The extension uses the same numbers."""

    STEP = 0
    """A step, or a reset in place of one."""
    LAST = 1
    """The step that ended an episode, if a reset follows in the same step."""
    RESET = 2


require_names("CALLS", tuple(name.lower() for name in InfoCall.__members__))


def entry(
    path: Any, dtype: Any, kind: str, column: Any = 0, given: Any = 0, nbytes: int = 0, *shape: int
) -> tuple[Any, ...]:
    """Return an entry of infos for `StepKernel.step_lanes`.

    Args:
        path: names that lead to the entry in an info.
        dtype: dtype of the column.
        kind: one of `VALUES`.
        column: the column; 0 for none.
        given: the flag column, which is True where the entry was given; 0 if it is required.
        nbytes: bytes per row.
        *shape: shape of a row.
    """
    number = VALUES.index(kind)
    words = in_order("VALUE", column=column, given=given, kind=number, nbytes=nbytes)
    return tuple(in_order("ENTRY", path=path, dtype=dtype, table=table_of([*words, *shape])))


class LaneResults:
    """Columns of a step of ``env``, to which the results of each lane are written.

    Args:
        env: the vector.
        infos: declared entries of infos that are columns, or None.
    """

    def __init__(self, env: SyncVectorEnv, infos: InfoColumns | None) -> None:
        leaves = observation_leaves(env.single_observation_space, env.num_envs)
        self.leaves, self._infos = LaneRows(leaves), infos
        self.has_infos = bool(infos)
        """True if there are info columns."""
        first = leaves[0]
        self._is_plain = len(leaves) == 1 and not (first.path or first.text)
        self._shape, self.shape, self.dtype = first.shape, first.shape[1:], first.dtype
        same = first.spec.dtype is not None and NUMPY[first.spec.dtype] == self.dtype
        self.are_one_array = self._is_plain and same and not self.has_infos
        """True if the only column is an observation array in the dtype in which it is stored."""
        self.nbytes = _nbytes(self.shape, self.dtype)
        """Bytes of the observation of one lane, if it is a single array."""
        self.plain: NDArray[Any] | None = None
        """Memory of the observations of the present step, if they are a single array."""
        self._columns: Rows = []
        within = env.autoreset_mode is AutoresetMode.SAME_STEP
        self._told = self._infos_of_step = infos.new_rows() if infos else []
        self._infos_of_last = infos.new_rows() if infos and within else []
        self._final = self.leaves.new() if within else []
        self.finals = self._final + self._infos_of_last
        """Final observations and infos ``[lane, ...]``; only rows of lanes that ended are valid."""
        self.address = self._final[0].ctypes.data if within and self._is_plain else 0
        """Address to which the extension writes final observations; 0 if it calls `put_final`."""

    def begin(self, row: NDArray[Any] | None) -> Rows:
        """Return the columns of the next step.

        If observations are a single array, they are written to ``row``, or to new memory if ``row``
        is None. Each step reuses the info columns.
        """
        if self._is_plain:
            self.plain = np.empty(self._shape, self.dtype) if row is None else row
            self._columns = [self.plain]
        else:
            self._columns = self.leaves.new()
        if self._infos is None or not self.has_infos:
            return self._columns
        self._told = self._infos_of_step
        self._infos.fill(self._told)
        return self._columns + self._told

    def begin_reset(self) -> Rows:
        """Prepare the columns to which some lanes write their reset results, and return them."""
        self._columns = self.leaves.new()
        self._told = self._infos.new_rows() if self._infos else []
        return self._columns + self._told

    def put(self, seen: Sequence[Any]) -> None:
        """Write the observation of each lane."""
        self.leaves.put_all(self._columns, seen)

    def put_first(self, lane: int, obs: Any) -> None:
        """Write the observation that a reset of one lane returned."""
        self.leaves.put(self._columns, lane, obs, first=True)

    def put_final(self, lane: int, obs: Any) -> None:
        """Write the final observation of one lane."""
        self.leaves.put(self._final, lane, obs)

    def put_info(self, lane: int, info: Any, of: int) -> None:
        """Write the entries of a lane's info. ``of`` is the `InfoCall` that returned it."""
        if self._infos is not None:
            rows = self._infos_of_last if of == InfoCall.LAST else self._told
            self._infos.write_one(rows, lane, info, of == InfoCall.RESET)

    def entries(self) -> tuple[Any, ...]:
        """Return the entries of infos for `StepKernel.step_lanes`."""
        found, rows = [], iter(self._infos_of_step)
        for info in self._infos.infos if self._infos else ():
            row, given = next(rows), None if info.fill is None else next(rows)
            # The extension writes Python's own numbers to columns of these dtypes.
            plain = row.ndim == 1 and row.dtype in (np.float64, np.int64)
            kind, shape = row.dtype.name if plain else "other", row.shape[1:]
            marks, nbytes = 0 if given is None else given, _nbytes(shape, row.dtype)
            found.append(entry(info.key, row.dtype, kind, row, marks, nbytes, *shape))
        return tuple(found)


def _nbytes(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape)) * dtype.itemsize
