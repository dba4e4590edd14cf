"""The seed of a run, and the generators and lanes that are seeded from it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tallyroll.collector.batches.state.provenance import MOST_SEEDS
from tallyroll.collector.compat import generator_states
from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.counting.numbering import driver_seed, lane_seeds
from tallyroll.collector.envs.calls.env_call import CallOutcome, EnvCall
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.policies.slot_rng import SlotRng


class Environments(Protocol):
    """The environments of a run, in this process or in workers: seeds, states and calls."""

    def seed(self, seed: int, incarnation: int, asked: bool) -> list[int]:
        """Seed all lanes, and return their seeds, or none if the environments chose them.

        ``asked``: the caller requested exactly this seed.
        """

    def state(self) -> Any:
        """Return their part of a saved state."""

    def load(self, state: Any) -> None:
        """Load a result of :meth:`state`, of these or other environments."""

    def reach(self, asked: EnvCall, lanes: Sequence[int]) -> list[CallOutcome]:
        """Call the environments of ``lanes``, and return the outcome in each.

        Raises:
            EnvironmentRefused, StateError: nothing was called.
        """


class RunSeeds:
    """Seeds a run by the seed and the incarnation of its ledger.

    Args:
        ledger: keeps the seed.
        envs: the environments to seed.
        policy: the policy, whose random streams are seeded if it has several.
        part: the shard whose lanes ``envs`` has; None if it has all lanes of the run.
    """

    def __init__(
        self,
        ledger: Ledger,
        envs: Environments,
        policy: Policy | None,
        part: ShardOfRun | None = None,
    ) -> None:
        self._ledger, self._envs, self._policy, self._part = ledger, envs, policy, part
        self.rng = SlotRng()
        """Draws actions."""
        self.of_lanes: list[int] = []
        """Seed of each lane of the run; none if the environments chose them, or they are many."""

    def seed(self, seed: int | None) -> None:
        """Seed every generator and every lane for the ledger's incarnation; None draws a seed."""
        incarnation, asked = self._ledger.incarnation, seed is not None
        # A policy of another shard draws other numbers; the first one's are those of one run.
        shard = None if self._part is None else self._part.lanes.start or None
        if seed is not None:
            torch.manual_seed(int(driver_seed(seed, incarnation, shard).generate_state(1)[0]))
        else:
            seed = int(torch.randint(2**31 - 1, ()))
        self._ledger.seed = seed
        self.rng.seed(driver_seed(seed, incarnation))
        if self._policy is not None:
            self._policy.seed(seed, incarnation, shard)
        self.of_lanes = self._envs.seed(seed, incarnation, asked)
        if self._part is not None and self.of_lanes:
            self.of_lanes = _of_run(self._part, self.of_lanes, seed, incarnation)

    def generators(self) -> dict[str, Any]:
        """Return the states of the generators."""
        found = {"torch": generator_states()[0], "actions": self.rng.state}
        if isinstance(self._policy, SeveralPolicies):
            found["policies"] = self._policy.generators
        return found

    def load_generators(self, states: dict[str, Any]) -> None:
        """Load a result of :meth:`generators`."""
        torch.set_rng_state(states["torch"])
        self.rng.state = states["actions"]
        if isinstance(self._policy, SeveralPolicies):
            self._policy.generators = states["policies"]


def _of_run(part: ShardOfRun, own: list[int], seed: int, incarnation: int) -> list[int]:
    """Return a seed for each lane of the run; a shard's own lanes have the seeds ``own``."""
    if part.run_lanes > MOST_SEEDS:
        return []
    every = lane_seeds(seed, part.run_lanes, incarnation)
    every[part.lanes.start : part.lanes.stop] = own
    return every
