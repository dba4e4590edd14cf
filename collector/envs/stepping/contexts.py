"""Contexts, seeds and options of the next resets, drawn one reset ahead."""

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
"""Function that draws the context of a lane: one value for each name in ``Declares.context``."""


class Contexts:
    """Contexts of a system's lanes, drawn from one generator per lane.

    Args:
        system: the system that uses the contexts.
        draw: function that draws a context; None if the system declares no contexts.
        later: True if a call of `take` will decide how contexts are drawn.

    Raises:
        ArgumentError: the system declares contexts and ``draw`` is None, or the reverse.
    """

    def __init__(self, system: System, draw: Draw | None, *, later: bool = False) -> None:
        declared = system.declares.context
        if bool(declared) != (draw is not None) and not later:
            raise ArgumentError(
                "draw: expected a function if the system declares contexts, and None otherwise, "
                f"got {draw!r} for the contexts {sorted(declared)} of {type(system).__name__}. In "
                "a collector, pass resets=Resets(sampler=...) instead."
            )
        self._draw = draw
        self._rngs: list[np.random.Generator] = []
        self.resets: ResetDraws | None = None
        """Draws of a collector's ``resets``, or None."""

    def leave(self, system: System) -> None:
        """Stop drawing for an earlier collector."""
        if self.resets is not None:
            self.resets = system.next_seeds = system.next_options = None

    def take(self, resets: ResetDraws) -> None:
        """Draw with the ``resets`` of a collector from now on.

        Raises:
            ArgumentError: contexts are already drawn by ``draw``.
        """
        if self._draw is not None:
            raise ArgumentError(
                "resets: expected an environment that was made without draw, got one whose draw "
                "function already chooses the contexts. Use either resets or draw."
            )
        self.resets = resets

    def seed(self, system: System, seeds: Sequence[int] | None) -> None:
        """Seed the generators and draw all contexts. Without seeds, do so only the first time."""
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
        """Draw the next contexts of ``lanes``, a mask or numbers, which were just reset."""
        if self.resets is not None:
            self.resets.begun(lanes)
        if self._draw is None:
            return
        for lane in np.flatnonzero(lanes) if lanes.dtype == np.bool_ else lanes:
            with user_code("draw"):
                drawn = self._draw(self._rngs[lane])
            for name, values in system.next_context.items():
                values[lane] = drawn[name]
