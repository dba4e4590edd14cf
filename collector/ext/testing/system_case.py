"""System instances for the contract tests, and actions with which to step them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.system import System
from tallyroll.collector.ext.testing.hand import Hand, Values
from tallyroll.collector.policies.random_actions import block_draw

SEED = 7


class SystemCase:
    """A system under test. Each part of the contract is a subclass."""

    lanes = 3
    """Number of lanes of the instances. With arrivals, choose more than arrive per call."""
    steps = 60
    """Number of steps by hand. Several episodes of every lane must end within them."""
    frames = 200
    """Number of rows to collect."""
    repeatable = True
    """True if the same seeds and actions give the same values, bit for bit."""
    counts_episodes = False
    """True if observations depend on the number of episodes, so that no two episodes are equal."""
    agents_come_back = False
    """True if agents of a group may join or return during an episode."""

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        """Return a new instance.

        ``seeds`` has one seed per lane, for systems that need seeds when they are made.
        """
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Mapping[str, Any]:
        """Return a context, if the system declares any."""
        return {}

    # --- tools ------------------------------------------------------------------------------------

    def hand(self, seeds: Sequence[int] = (), lanes: int = 0) -> Hand:
        """Return a new instance after a reset."""
        seeds = list(seeds) or lane_seeds(SEED, lanes or self.lanes, 0)
        return Hand(self.make(len(seeds), seeds), seeds, self.draw)

    def actions(self, system: System, steps: int, seed: int = 0) -> Iterator[Values]:
        """Yield random actions of all lanes ``[lane, ...]`` for each step."""
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
