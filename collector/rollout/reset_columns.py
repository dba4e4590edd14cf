"""Columns for the context and the seed of a reset, repeated in each row of its trajectory."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torchrl.envs import EnvBase

from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.slab.slab import Cursor, Slab
from tallyroll.storage.rows.keys import Key


class ResetColumns:
    """Writes the reset contexts and seeds of the current trajectories to the slots of a slab.

    If a step resets lanes, their next slots get the next values.

    Args:
        now: the keys of the columns and their current values ``[lane, ...]``, which the resets
            update.
        slab: the slab with these columns.
        cursor: the current slot if the environment fills the slab, otherwise None.
    """

    def __init__(
        self, now: Sequence[tuple[Key, NDArray[Any]]], slab: Slab, cursor: Cursor | None
    ) -> None:
        self.keys = tuple(key for key, _ in now)
        self._columns = [(slab.columns[key], torch.from_numpy(values)) for key, values in now]
        self._arrays = [(slab.arrays[key], values) for key, values in now if key in slab.arrays]
        self._cursor, self._stop = cursor, 0

    @classmethod
    def of(cls, env: EnvBase, slab: Slab, cursor: Cursor | None = None) -> Self | None:
        """Return the reset columns of ``env``, or None if it has none.

        From now on, ``env`` reports its resets to them.
        """
        base = system_of(env)
        resets = None if base is None else base.stepper.contexts.resets
        if resets is None:
            return None
        made = cls([*resets.now.items()], slab, cursor)
        resets.report_to(None if cursor is None or slab.lane is not None else made.begun)
        return made

    def fill(self, start: int, stop: int) -> None:
        """Write the values to slots ``[start, stop)``, which are about to be stepped."""
        self._stop = stop
        if stop == start + 1:
            for column, now in self._arrays:
                column[start] = now
            return
        for column, now in self._arrays:
            column[start:stop] = now

    def begun(self, lanes: Sequence[int]) -> None:
        """Write the new values of ``lanes`` to the slots after the current one."""
        assert self._cursor is not None
        after, stop = self._cursor.at + 1, self._stop
        if after < stop:
            for column, now in self._arrays:
                for lane in lanes:
                    column[after:stop, lane] = now[lane]

    def put(self, at: int, lanes: NDArray[Any] | None = None) -> None:
        """Write the values to slot ``at``, which has rows of ``lanes``; None means all lanes."""
        if lanes is None:
            for to, values in self._columns:
                to[at].copy_(values)
            return
        for column, now in self._arrays:
            column[at] = now[lanes]
