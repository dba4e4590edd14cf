"""The instances of a system that its contract steps, and the actions for them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.system import System
from tallyroll.collector.ext.testing.hand import Hand, Values
from tallyroll.collector.policies.random_actions import block_draw

SEED = 7


class SystemCase:
    """A system to be tested; each part of the contract is a subclass."""

    lanes = 3
    """Lanes of the instances that are made; with arrivals more than come a call."""
    steps = 60
    """Steps by hand; several episodes of every lane have to end within them."""
    frames = 200
    """Rows that are collected."""
    repeatable = True
    """The same seeds and actions give the same values, bit for bit."""
    counts_episodes = False
    """Observations tell how many episodes a lane has had, so that no episode is like another."""
    agents_come_back = False
    """Agents of a group may join, or come back, while a lane's episode goes on."""

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        """A new instance; ``seeds`` are one a lane, for one that takes them when it is made."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """A context, where the system declares any."""
        return {}

    # --- tools ------------------------------------------------------------------------------------

    def hand(self, seeds: Sequence[int] = (), lanes: int = 0) -> Hand:
        """A new instance, reset."""
        seeds = list(seeds) or lane_seeds(SEED, lanes or self.lanes, 0)
        return Hand(self.make(len(seeds), seeds), seeds, self.draw)

    def actions(self, system: System, steps: int, seed: int = 0) -> Iterator[Values]:
        """Random actions of all lanes ``[lane, ...]``, step by step."""
        rng, lanes = np.random.default_rng(seed), system.declares.lanes
        draws = [
            block_draw(spec.expand(lanes, *spec.shape)) for spec in system.declares.action.values()
        ]
        for _ in range(steps):
            yield [
                draw(rng, 1)[0]
                if draw is not None
                else np.stack([spec.rand().numpy() for _ in range(lanes)])
                for draw, spec in zip(draws, system.declares.action.values(), strict=True)
            ]

    def close(self, *systems: System) -> None:
        """Close instances."""
        for system in systems:
            system.close()

    def require_equal(self, one: Values, other: Values, what: str) -> None:
        """Check that two instances with the same seeds gave the same values."""
        for a, b in zip(one, other, strict=True):
            assert np.array_equal(a, b), f"{what}: the same seeds gave {a!r:.200} and {b!r:.200}"
