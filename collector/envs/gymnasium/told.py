"""Systems of other libraries whose spaces are Gymnasium's, and whose infos may be columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from tallyroll.collector.envs.gymnasium.infos import InfoColumns, named, observations
from tallyroll.collector.envs.gymnasium.spaces import Leaf
from tallyroll.collector.envs.system import Declares, Mask, System
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Named


class TellingSystem(System):
    """A system with infos: ``__init__`` calls :meth:`_declare`, ``reset`` :meth:`_told_first`."""

    _infos: InfoColumns

    def _declare(self, leaves: Sequence[Leaf], action: Leaf, lanes: int, **how: Any) -> None:
        """Declare observations and action; ``how`` are the other fields of :class:`Declares`."""
        self._leaves, self._action, self._how = leaves, action, {"lanes": lanes, **how}
        self.keep_infos(())

    def _declare_again(self) -> None:
        self.declares = Declares(
            observation=observations(self._leaves, self._infos),
            action={self._action.key: self._action.spec[0]},
            **self._how,
        )

    @property
    def columns(self) -> Sequence[Named]:
        """Observations, and infos, also those that the first reset will declare."""
        return named(self._leaves, self._infos)

    def keep_infos(self, infos: Sequence[Info]) -> bool:
        """Make columns of the entries of ``infos``; return True: the system can."""
        self._infos = InfoColumns(infos, self._how["lanes"])
        self._declare_again()
        return True

    def _told_first(self, infos: Mapping[str, Any], lanes: Mask | None) -> list[Any]:
        """Return the columns of infos after a reset of ``lanes`` (None: all)."""
        kept = self._infos
        kept.first_lane = self.first_lane
        kept.steps[... if lanes is None else lanes] = 0
        if not kept.declared:
            kept.declare(infos)
            self._declare_again()
        rows = kept.new_rows()
        kept.write_reset(rows, infos, lanes)
        return rows

    def _told_next(
        self, infos: Mapping[str, Any], first: Mapping[str, Any], ended: Mask
    ) -> list[Any]:
        """Return the columns of a step's infos; for ``ended`` lanes from the reset's, ``first``."""
        kept, rows = self._infos, self._infos.new_rows()
        kept.write(rows, infos, ~ended)
        kept.write_reset(rows, first, ended)
        kept.count(ended)
        return rows
