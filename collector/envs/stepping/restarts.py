"""Resets of all lanes, with seeds. A system that cannot be reset is made again."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.counting.numbering import lane_seed
from tallyroll.collector.envs.stepping.contexts import Contexts
from tallyroll.collector.envs.stepping.results import kind_of
from tallyroll.collector.envs.system import Array, Declares, System
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.user_code import user_code

Make = Callable[[Sequence[int] | None], System]
"""Function that makes a system from one seed per lane. None makes it without seeds."""


class Restarts:
    """Resets all lanes of a system.

    Args:
        make: function that makes the system again, if it accepts seeds only when it is made.
        contexts: the contexts of the lanes.
    """

    def __init__(self, make: Make | None, contexts: Contexts) -> None:
        self._make, self._contexts = make, contexts
        self.seeds: Sequence[int] | None = None
        """Seeds of the next reset, one per lane; None to continue the generators."""
        self._last: list[int] = []
        self._remade = 0
        self._begun = False

    def takes_seeds(self, declares: Declares) -> bool:
        """Return True if each lane can be given a seed."""
        how = declares.seeds
        return how in ("reset", "shared") or (how == "make" and self._make is not None)

    def seed_next(self, seeds: Sequence[int] | None) -> None:
        """Use ``seeds``, one per lane, for the next reset. None continues the generators."""
        self.seeds = seeds

    def reset(self, system: System, **options: Any) -> tuple[System, Sequence[Array]]:
        """Reset all lanes, and return the system and its first observations.

        The returned system may be a new one. The option ``seed`` is a sequence of one seed per
        lane, or the integer seed of the first lane, from which the others count up.

        Raises:
            EnvironmentRefused: the system can be reset only once, and there is no ``make``.
        """
        d = system.declares
        seeds = options.pop("seed", self.seeds)
        self.seeds = None
        resets = self._contexts.resets
        if resets is not None and resets.seeds is not None:
            seeds = resets.seeds.tolist()
        if isinstance(seeds, int):
            seeds = [seeds + lane for lane in range(d.lanes)]
        again = d.resets == "none" and self._begun
        if seeds is not None:
            self._last, self._remade = list(seeds), 0
        elif again and self._last:
            self._remade += 1
            seeds = [lane_seed(each, 0, self._remade) for each in self._last]
        if again and self._make is None:
            raise EnvironmentRefused(
                f"{kind_of(system)} cannot be reset, and there is no factory to make it again. "
                "Pass a factory that accepts seeds (def make(seeds): …)."
            )
        if self._make is not None and (again or (d.seeds == "make" and seeds is not None)):
            system = self._made_again(system, seeds, self._make)
        self._contexts.seed(system, seeds)
        first = system.reset(None, seeds if d.seeds in ("reset", "shared") else None, **options)
        self._begun = True
        self._contexts.draw(system, np.ones(d.lanes, np.bool_))
        return system, first

    def _made_again(self, system: System, seeds: Sequence[int] | None, make: Make) -> System:
        with user_code("create_env_fn"):
            system.close()
            made = make(seeds)
        made.first_lane, made.reward_dtype = system.first_lane, system.reward_dtype
        made.wants_masks = system.wants_masks
        return made
