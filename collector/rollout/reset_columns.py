"""Columns of a slab that say what each trajectory began from, constant in its rows."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torchrl.envs import EnvBase

from tallyroll.collector.envs.driven.traits import system_of
from tallyroll.collector.slab.slab import Cursor, Slab
from tallyroll.storage.rows.keys import Key


class ResetColumns:
    """Writes what the trajectories under way began from to the slots of a slab.

    Where a step resets lanes, their next slots get the next values.

    Args:
        now: values ``[lane, ...]`` by their columns; their owner changes them.
        slab: has the columns.
        cursor: its slot under way, where the environment fills the slab.
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
        """Return those of ``env``, which tells of its resets from now on; None: it has none."""
        base = system_of(env)
        resets = None if base is None else base.stepper.contexts.resets
        if resets is None:
            return None
        made = cls([*resets.now.items()], slab, cursor)
        resets.told = None if cursor is None or slab.lane is not None else made.begun
        return made

    def fill(self, start: int, stop: int) -> None:
        """Write to the slots ``[start, stop)``, which are about to be stepped."""
        self._stop = stop
        if stop == start + 1:
            for column, now in self._arrays:
                column[start] = now
            return
        for column, now in self._arrays:
            column[start:stop] = now

    def begun(self, lanes: Sequence[int]) -> None:
        """Write to those of the slots that follow the one under way in ``lanes``."""
        assert self._cursor is not None
        after, stop = self._cursor.at + 1, self._stop
        if after < stop:
            for column, now in self._arrays:
                for lane in lanes:
                    column[after:stop, lane] = now[lane]

    def put(self, at: int, lanes: NDArray[Any] | None = None) -> None:
        """Write to the slot ``at``, whose rows are of ``lanes``; None: of every lane."""
        if lanes is None:
            for to, values in self._columns:
                to[at].copy_(values)
            return
        for column, now in self._arrays:
            column[at] = now[lanes]
