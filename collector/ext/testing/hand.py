"""A system stepped by hand, with the simplest possible code."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.stepping.arrays import as_flags, as_tensor, whole
from tallyroll.collector.envs.system import Mask, Step, System
from tallyroll.storage.rows.dtypes import NUMPY

Values: TypeAlias = list[NDArray[Any]]


class Hand:
    """A system stepped by hand: all lanes at a time, with ends handled as the system declares.

    Args:
        system: the system.
        seeds: seeds of the system's first reset, if the system accepts seeds.
        draw: function that draws a context from a generator. Each lane has a generator, and
            contexts are drawn one reset ahead.
    """

    def __init__(self, system: System, seeds: Sequence[int] | None, draw: Any = None) -> None:
        self.system, self.d = system, system.declares
        self._draw = draw
        self._rngs = [np.random.default_rng(seed) for seed in seeds or range(self.d.lanes)]
        if self.d.context:
            system.next_context = {
                name: np.zeros((self.d.lanes, *spec.shape), NUMPY[spec.dtype])
                for name, spec in self.d.context.items()
            }
            self._draw_contexts(np.ones(self.d.lanes, np.bool_))
        self.pending = np.zeros(self.d.lanes, np.bool_)
        """Lanes whose next step is a reset slot."""
        given = seeds if self.d.seeds in ("reset", "shared") else None
        self.seen = self._values(system.reset(None, given))
        self._redraw(np.ones(self.d.lanes, np.bool_))

    def _redraw(self, lanes: Mask) -> None:
        """Draw the seeds and contexts of the next resets of ``lanes``, which were just reset."""
        self._draw_contexts(lanes)

    def _draw_contexts(self, lanes: Mask) -> None:
        for lane in np.flatnonzero(lanes) if self.d.context else ():
            drawn = self._draw(self._rngs[lane])
            for name, values in self.system.next_context.items():
                values[lane] = drawn[name]

    def _values(self, values: Sequence[Any]) -> Values:
        return [as_tensor(each, torch.device("cpu")).numpy() for each in values]

    def reset(self, lanes: Mask | None) -> None:
        """Reset the lanes of a mask, or all lanes."""
        self.system.reset(lanes, None)
        everyone = np.ones(self.d.lanes, np.bool_)
        self._redraw(everyone if lanes is None else lanes)
        self.pending[everyone if lanes is None else lanes] = False

    def step(self, action: Values) -> tuple[Step, Values, Mask]:
        """Step all lanes.

        Returns:
            The result of the step, the observations after it (final ones where episodes ended), and
            a mask of the lanes that executed their action.
        """
        d = self.d
        out = stepped(self.system, action)
        after = self._values(out.obs)
        executed, ended = ~self.pending, as_flags(out.terminated) | as_flags(out.truncated)
        following = [value.copy() for value in after]
        if d.at_end == "final" and ended.any():
            reset = self._values(self.system.reset(ended, None))
            for value, new in zip(following, reset, strict=True):
                value[ended] = new[ended]
        if d.at_end == "first" and out.final is not None:
            for value, final in zip(after, self._values(out.final), strict=True):
                value[ended] = final[ended]
        self._redraw(self.pending if d.at_end == "reset_slot" else ended)
        if d.at_end == "reset_slot":
            self.pending = ended
        self.seen = following
        return out, after, executed


class SeededHand(Hand):
    """A system whose resets take seeds, each drawn one reset ahead."""

    def __init__(self, system: System, seeds: Sequence[int], draw: Any = None) -> None:
        self._ahead = system.next_seeds = np.array(seeds, np.int64)
        self._drawn = np.random.default_rng(seeds)
        self.seeds = self._ahead.copy()
        """Seeds ``[lane]`` of the current episodes."""
        self.contexts: list[dict[str, NDArray[Any]]] = [{} for _ in seeds]
        """Contexts of the current episodes, by lane."""
        super().__init__(system, seeds, draw)

    def _redraw(self, lanes: Mask) -> None:
        ahead = self.system.next_context if self.d.context else {}
        for lane in np.flatnonzero(lanes).tolist():
            self.seeds[lane] = self._ahead[lane]
            self.contexts[lane] = {name: values[lane].copy() for name, values in ahead.items()}
        super()._redraw(lanes)
        self._ahead[lanes] = self._drawn.integers(2**31, size=len(lanes))[lanes]


def stepped(system: System, action: Values, lanes: Mask | None = None) -> Step:
    """Step all lanes of a system, or the lanes of a mask."""
    d = system.declares
    given: Any = action
    if d.device != "cpu":
        given = [torch.from_numpy(each).to(d.device) for each in action]
    if not d.arrivals:
        return system.step(given) if lanes is None else system.step(given, lanes)
    assert d.lanes % d.arrivals == 0, f"lanes: choose a multiple of the {d.arrivals} arrivals"
    everyone = np.arange(d.lanes, dtype=np.int32)
    for part in np.split(everyone, range(d.arrivals, d.lanes, d.arrivals)):
        system.send([each[part] for each in given], part)
    return whole(system, d.lanes)
