"""One of several policies, which acts only on its rows and has its own random numbers."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, is_tensor_collection
from torch import nn
from torchrl.envs import EnvBase

from tallyroll.collector.compat import generator_states
from tallyroll.collector.counting.numbering import policy_seed
from tallyroll.collector.errors import PolicyError
from tallyroll.collector.policies.policy import Policy, copy_of
from tallyroll.collector.policies.random_actions import RandomActions, action_keys
from tallyroll.collector.policies.several.entries import OnePolicy
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.policies.trial import no_tensordict
from tallyroll.storage.rows.keys import Key, as_key

PolicyId = int | str
"""Index of a policy in a list by lane, or the group for which it acts."""


class PolicyPart:
    """A policy that chooses some of the actions of a slot.

    Args:
        id: the id of the policy among several policies.
        policy: the policy on its device; None if all actions are random.
        one: the caller's policy and its options.
    """

    def __init__(self, id: PolicyId, policy: Policy | None, one: OnePolicy) -> None:
        self.id, self.policy, self.one = id, policy, one
        self.rng = SlotRng()
        """The generator that draws the actions of a part without a policy."""
        self.stream: torch.Tensor | None = None
        """State of torch's generator for the next call; None to use the current state."""
        self.random: RandomActions | None = None
        self._env: EnvBase | None = None
        self._lanes: tuple[int, int] | None = None

    @property
    def opening(self) -> int:
        """Number of transitions with random actions before the policy acts."""
        return self.one.init_random_frames

    @property
    def module(self) -> nn.Module | None:
        """The module with the policy's weights; None if there is no module."""
        module = None if self.policy is None else self.policy.module
        return module if isinstance(module, nn.Module) else None

    def copied(self) -> "PolicyPart":
        """Return a copy whose calls have no side effects; raise if the policy cannot be copied."""
        policy = None
        if self.policy is not None:
            policy = copy.copy(self.policy)
            policy.calls(copy_of(self.policy.module))
        made = PolicyPart(self.id, policy, self.one)
        made.load_generators(self.generators)
        if self._env is not None and self._lanes is not None:
            made.draws_for(self._env, *self._lanes)
        return made

    # --- random numbers ---------------------------------------------------------------------------

    def draws_for(self, env: EnvBase, lanes: int, first: int) -> None:
        """Draw random actions for ``env``, whose first lane in the run is ``first``."""
        if self.policy is None:
            self._env, self._lanes = env, (lanes, first)
            self.random = RandomActions(env, self.rng, lanes, first)

    def seed(
        self, seed: int, incarnation: int, number: int, worker: int | None, *, own: bool
    ) -> None:
        """Seed the random streams of this part, which no other part changes.

        ``own`` is True if only this thread uses torch's generator, so that it can be replaced
        during calls.
        """
        if self.policy is None:
            self.rng.seed(policy_seed(seed, incarnation, number))
        if self.policy is None or not own:
            return
        words = policy_seed(seed, incarnation, number, worker).generate_state(1)
        with _generator_of_torch():
            torch.manual_seed(int(words[0]))
            self.stream = generator_states()[0]

    @property
    def generators(self) -> dict[str, Any]:
        """The states of the random streams of this part."""
        return {"torch": self.stream, "actions": self.rng.state}

    def load_generators(self, states: Mapping[str, Any]) -> None:
        """Restore the states of the random streams of this part."""
        self.stream = states["torch"]
        self.rng.restore(states["actions"])

    # --- actions ----------------------------------------------------------------------------------

    def __call__(self, td: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Return the values that the policy adds to ``td``, with actions in the required form."""
        policy = self.policy
        assert policy is not None
        try:
            if self.stream is None:
                out = policy(td)
            else:
                with _generator_of_torch():
                    torch.set_rng_state(self.stream)
                    out = policy(td)
                    self.stream = torch.get_rng_state()
        except Exception as error:
            error.add_note(f"tallyroll: raised for {whose(self.id)}")
            raise
        if not is_tensor_collection(out):
            raise no_tensordict(out)
        found: dict[Key, torch.Tensor] = {}
        for name, value in out.items(True, True):
            key = as_key(name)
            if key in policy.writes and isinstance(value, torch.Tensor):
                form = policy.forms.get(key)
                found[key] = form(value) if form is not None and form.takes(value) else value
        for key in policy.writes:
            if key not in found and not key[-1].startswith("_"):
                raise PolicyError(
                    f"policy {self.id}: expected the key {'/'.join(key)}, which the policy wrote "
                    "on the first observation, got none"
                )
        return found

    def at_random(self, td: TensorDictBase) -> dict[Key, torch.Tensor]:
        """Return random actions for all lanes of the environment."""
        assert self.random is not None and self._env is not None
        drawn = self.random(td.clone(False))
        return {key: drawn.get(key) for key in action_keys(self._env)}


def whose(id: PolicyId) -> str:
    """Return the name of a policy for messages."""
    return f"policy {id}" if isinstance(id, int) else f"the policy of the group {id!r}"


@contextmanager
def _generator_of_torch() -> Iterator[None]:
    """Restore torch's CPU generator after the context."""
    before = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)
