"""Contexts, seeds and options of next resets, which are drawn one ahead."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tallyroll.collector.envs.stepping.reset_draws import ResetDraws
from tallyroll.collector.envs.system import System
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.user_code import user_code
from tallyroll.storage.rows.dtypes import NUMPY

Draw = Callable[[np.random.Generator], Mapping[str, Any]]
"""Draws a lane's context: a value for each name in ``Declares.context``."""


class Contexts:
    """The contexts of a system's lanes, drawn from a generator of each lane.

    Args:
        system: the system that is given them.
        draw: draws them; None where the system declares none.
        later: `take` will say how they are drawn.

    Raises:
        ArgumentError: it declares contexts and ``draw`` is None, or the reverse.
    """

    def __init__(self, system: System, draw: Draw | None, *, later: bool = False) -> None:
        declared = system.declares.context
        if bool(declared) != (draw is not None) and not later:
            raise ArgumentError(
                f"draw: expected one for the contexts {sorted(declared)} that "
                f"{type(system).__name__} declares, got {draw!r}; a collector draws them by "
                "resets=Resets(sampler=...)"
            )
        self._draw = draw
        self._rngs: list[np.random.Generator] = []
        self.resets: ResetDraws | None = None
        """Draws of a collector's ``resets``; None: there are none."""

    def leave(self, system: System) -> None:
        """Draw no more as an earlier collector wanted it."""
        if self.resets is not None:
            self.resets = system.next_seeds = system.next_options = None

    def take(self, resets: ResetDraws) -> None:
        """Draw by ``resets`` of a collector from now on.

        Raises:
            ArgumentError: contexts are drawn otherwise already.
        """
        if self._draw is not None:
            raise ArgumentError(
                "resets: expected an environment whose contexts are drawn by them alone, got one "
                "that was made with draw=; pass its System, or leave one of them out"
            )
        self.resets = resets

    def seed(self, system: System, seeds: Sequence[int] | None) -> None:
        """Seed the generators and draw all contexts, if there are seeds or for the first time."""
        if self.resets is not None:
            self.resets.give(system)
        if self._draw is None:
            return
        d = system.declares
        if seeds is not None or not self._rngs:
            each: Sequence[int | None] = seeds or [None] * d.lanes
            self._rngs = [np.random.default_rng(seed) for seed in each]
        if seeds is not None or not hasattr(system, "next_context"):
            system.next_context = {
                name: np.zeros((d.lanes, *spec.shape), NUMPY[spec.dtype])
                for name, spec in d.context.items()
            }
            self.draw(system, np.ones(d.lanes, np.bool_))

    def draw(self, system: System, lanes: NDArray[Any]) -> None:
        """Draw the contexts of the next resets of ``lanes`` that were reset: a mask or numbers."""
        if self.resets is not None:
            self.resets.begun(lanes)
        if self._draw is None:
            return
        for lane in np.flatnonzero(lanes) if lanes.dtype == np.bool_ else lanes:
            with user_code("draw"):
                drawn = self._draw(self._rngs[lane])
            for name, values in system.next_context.items():
                values[lane] = drawn[name]
