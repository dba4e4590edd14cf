"""Reset draws that use the seeds and contexts of stored trajectories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.envs.setup.traits import system_of
from tallyroll.collector.envs.stepping.reset_draws import ResetDraws
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options.resets import Resets

Array = np.ndarray[Any, Any]


class ReplayedDraws(ResetDraws):
    """Reset draws with seeds and contexts that the caller sets.

    Each reset repeats them until the caller sets new ones.

    Args:
        system: the system that receives the draws.
        columns: contexts by name, as values ``[n, ...]``, for example of stored rows.
        resets: the resets of the run. They draw, from the seed, the options that no column
            provides.
    """

    def __init__(self, system: System, columns: Mapping[str, Array], resets: Resets) -> None:
        lanes = system.declares.lanes
        self._given, self._context = resets, dict(system.declares.context)
        self._resets = Resets(seeds=True)
        self._next = {
            name: np.zeros((lanes, *values.shape[1:]), values.dtype)
            for name, values in columns.items()
        }
        self._now = {name: values.copy() for name, values in self._next.items()}
        self._seeds, self._now_seed = np.zeros(lanes, np.int64), np.zeros(lanes, np.int64)
        self._draws_options = bool(columns) or resets.sampler is not None
        self._options: list[dict[str, Any]] = [{}] * lanes
        self.told = None
        if self._context.keys() != self._next.keys() and self._context:
            raise ArgumentError(
                f"expected an environment with the contexts {sorted(self._next)} of the rows, got "
                f"{sorted(self._context)}"
            )

    def seed(self, seed: int, incarnation: int, lanes: Sequence[int]) -> list[int]:
        """Return the seeds of the next resets; the run's seed has no effect."""
        return self._seeds.tolist()

    def give_lanes(self, seeds: Array, contexts: Mapping[str, Array]) -> None:
        """Set the seeds and contexts of the next resets of the first lanes, one entry per lane.

        Other lanes repeat the last entry.
        """
        count = len(seeds)
        self._seeds[:count], self._seeds[count:] = seeds, seeds[-1]
        for name, values in self._next.items():
            values[:count], values[count:] = contexts[name], contexts[name][-1]
        if self._draws_options and not self._context:
            self._options = [self._options_of(lane) for lane in range(len(self._seeds))]

    def _options_of(self, lane: int) -> dict[str, Any]:
        drawn = self._given.options_of(int(self._seeds[lane]))
        # Convert contexts to numbers of the dtype of their column.
        return {**drawn, **{name: values[lane].item() for name, values in self._next.items()}}

    def begun(self, lanes: Array) -> None:
        """Record that trajectories of ``lanes``, a mask or indices, have begun."""
        at = lanes.nonzero()[0] if lanes.dtype == np.bool_ else lanes
        self._now_seed[at] = self._seeds[at]
        for name, values in self._next.items():
            self._now[name][at] = values[at]
        if self.told is not None and len(at):
            self.told(at.tolist())


def give_draws(env: Any, columns: Mapping[str, Array], resets: Resets) -> ReplayedDraws:
    """Make resets of ``env`` use seeds and contexts from the caller.

    Raises:
        EnvironmentRefused: the environment's resets do not accept a seed, or options.
    """
    base: SystemEnv | None = system_of(env)
    d = None if base is None else base.stepper.declares
    if base is None or d is None or not d.reset_seeds:
        kind = type(env).__name__ if base is None else base.kind
        why = "" if base is None else f" ({base.system.why_no_resets})"
        raise EnvironmentRefused(
            f"{kind} does not accept a seed at the reset of a lane{why}, but the rows have reset "
            "seeds. Pass the environment that the run had."
        )
    if columns and not (d.context or d.options):
        raise EnvironmentRefused(
            f"{base.kind} does not accept options at the reset of a lane "
            f"({base.system.why_no_resets}), but the rows have contexts. Pass the environment that "
            "the run had."
        )
    draws = ReplayedDraws(base.system, columns, resets)
    base.stepper.contexts.take(draws)
    return draws
