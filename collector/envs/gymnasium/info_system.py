"""Base class for systems of other libraries with Gymnasium spaces and infos."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.gymnasium.info_entries import entry_of
from tallyroll.collector.envs.gymnasium.info_masks import InfoMasks, masks_declared
from tallyroll.collector.envs.gymnasium.infos import InfoColumns, named, observations
from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.envs.system import Declares, Mask, Step, System
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import NamedColumn


class InfoSystem(System):
    """System with infos.

    A subclass calls :meth:`_declare` in ``__init__``, and :meth:`_first_infos` in ``reset``.
    """

    _infos: InfoColumns
    _masks: InfoMasks | None

    def _declare(self, leaves: Sequence[Leaf], action: Leaf, lanes: int, **how: Any) -> None:
        """Declare observations and action. ``how`` holds the other fields of :class:`Declares`."""
        self._leaves, self._action, self._how = leaves, action, {"lanes": lanes, **how}
        self.keep_infos(())

    def _declare_again(self) -> None:
        self.declares = Declares(
            observation=observations(self._leaves, self._infos),
            action={self._action.key: self._action.spec[0]},
            **self._how,
        )

    @property
    def columns(self) -> Sequence[NamedColumn]:
        """Columns of observations and infos, including infos that the first reset will declare."""
        return named(self._leaves, self._infos)

    def keep_infos(self, infos: Sequence[Info]) -> bool:
        """Make columns of the entries of ``infos``. Always returns True."""
        self._infos, self._masks = InfoColumns(infos, self._how["lanes"]), None
        self._declare_again()
        return True

    @property
    def _read(self) -> list[Info]:
        """Entries of infos that a reset reads."""
        masks = [Info(MASK_NAME)] if self.wants_masks and self._masks is None else []
        return [*self._infos.infos, *masks]

    @property
    def _looks(self) -> bool:
        """True if infos of resets are read, for columns or for masks of legal actions."""
        return bool(self._infos) or self.wants_masks

    def _first_infos(self, infos: Mapping[str, Any], lanes: Mask | None) -> list[Any]:
        """Return the info columns after a reset of ``lanes`` (None: all)."""
        if not self._infos.declared:
            self._infos.declare(infos)
            self._declare_again()
        if lanes is None:
            self._look_for_masks(infos)
        kept = self._infos
        kept.number_from(self.first_lane)
        kept.steps[... if lanes is None else lanes] = 0
        rows = kept.new_rows()
        kept.write_reset(rows, infos, lanes)
        return rows if self._masks is None else self._masks.reset(rows, lanes)

    def _look_for_masks(self, infos: Mapping[str, Any]) -> None:
        lanes, wanted = self.declares.lanes, self.wants_masks and self._masks is None
        mask = masks_declared(infos, self._leaves, lanes, wanted=wanted)
        if mask is not None:
            self._infos = self._infos.with_mask(mask)
            self._masks = InfoMasks(self._action, self.declares, mask)
            self.legal = self._masks.legal
        if self._masks is not None:
            self._masks.number_from(self.first_lane)

    def _without_masks(self, step: Step, lanes: Any = None) -> Step:
        """Return a ``step`` of ``lanes`` without the masks among its columns."""
        return step if self._masks is None else self._masks.step(step, lanes)

    def _next_infos(
        self, infos: Mapping[str, Any], first: Mapping[str, Any], ended: Mask
    ) -> list[Any]:
        """Return the info columns of a step. Lanes in ``ended`` use ``first``, infos of resets."""
        kept, rows = self._infos, self._infos.new_rows()
        kept.write(rows, infos, ~ended)
        kept.write_reset(rows, first, ended)
        kept.count(ended)
        return rows


def vector_info(infos: Sequence[Mapping[str, Any]], wanted: Sequence[Info]) -> dict[str, Any]:
    """Return the entries ``wanted`` of all lanes ``[lane]``, with None for lanes that lack one.

    Entries that no lane has are absent. Names that are not wanted map to None, so that messages can
    list them.
    """
    keys = [info.key for info in wanted]
    found: dict[str, Any] = dict.fromkeys(
        name for each in infos for name in each if (name,) not in keys
    )
    for key in keys:
        values = np.empty(len(infos), object)
        for lane, info in enumerate(infos):
            values[lane] = entry_of(info, key)
        if all(value is None for value in values):
            continue
        level = found
        for name in key[:-1]:
            if not isinstance(level.get(name), dict):
                level[name] = {}
            level = level[name]
        level[key[-1]] = values
    return found
