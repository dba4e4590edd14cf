"""The seed of a run, and the generators and lanes that are seeded from it."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tallyroll.collector.batches.state.provenance import MOST_SEEDS
from tallyroll.collector.compat import load_generators, saved_generators
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

        ``asked`` is True if the caller requested exactly this seed.
        """

    def state(self) -> Any:
        """Return the environments' part of a saved state."""

    def load(self, state: Any) -> None:
        """Load a result of :meth:`state`, from these or other environments."""

    def reach(self, asked: EnvCall, lanes: Sequence[int]) -> list[CallOutcome]:
        """Call the environments of ``lanes``, and return the outcome in each.

        Raises:
            EnvironmentRefused, StateError: nothing was called.
        """


class RunSeeds:
    """Seeds a run with the seed and the incarnation of its ledger.

    Args:
        ledger: the ledger, which keeps the seed.
        envs: the environments to seed.
        policy: the policy, whose random streams are seeded too.
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
        """The generator that draws actions."""
        self.of_lanes: list[int] = []
        """Seed of each lane of the run; empty if the environments chose them or there are many."""

    def seed(self, seed: int | None) -> None:
        """Seed every generator and lane for the ledger's incarnation.

        If ``seed`` is None, draw a seed.
        """
        incarnation, asked = self._ledger.incarnation, seed is not None
        # Each shard's policy draws other numbers. The first shard draws the numbers of an unsharded
        # run.
        shard = None if self._part is None else self._part.lanes.start or None
        if seed is not None:
            torch.manual_seed(int(driver_seed(seed, incarnation, shard).generate_state(1)[0]))
        else:
            seed = int(torch.randint(2**31 - 1, ()))
        self._ledger.seed = seed  # a field of the public record, which has no method for it
        self.rng.seed(driver_seed(seed, incarnation))
        if self._policy is not None:
            self._policy.seed(seed, incarnation, shard)
        self.of_lanes = self._envs.seed(seed, incarnation, asked)
        if self._part is not None and self.of_lanes:
            self.of_lanes = _of_run(self._part, self.of_lanes, seed, incarnation)

    def generators(self) -> dict[str, Any]:
        """Return the states of the generators."""
        found = {**saved_generators(), "actions": self.rng.state}
        if isinstance(self._policy, SeveralPolicies):
            found["policies"] = self._policy.generators
        return found

    def load_generators(self, states: dict[str, Any]) -> None:
        """Load a result of :meth:`generators`."""
        load_generators(states)
        self.rng.restore(states["actions"])
        if isinstance(self._policy, SeveralPolicies):
            self._policy.load_generators(states["policies"])


def _of_run(part: ShardOfRun, own: list[int], seed: int, incarnation: int) -> list[int]:
    """Return a seed for each lane of the run. ``own`` are the seeds of the lanes of this shard."""
    if part.run_lanes > MOST_SEEDS:
        return []
    every = lane_seeds(seed, part.run_lanes, incarnation)
    every[part.lanes.start : part.lanes.stop] = own
    return every
