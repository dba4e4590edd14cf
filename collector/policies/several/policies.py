"""Several policies of a run, with the interface of a single policy."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy, Weights
from tallyroll.collector.policies.several.by_group import JointByGroup
from tallyroll.collector.policies.several.by_lane import JointByLane
from tallyroll.collector.policies.several.entries import (
    are_several,
    group_entries,
    lane_entries,
)
from tallyroll.collector.policies.several.joint import Joint, Trial, part_of
from tallyroll.collector.policies.several.openings import Openings
from tallyroll.collector.policies.several.policy_part import PolicyId, PolicyPart
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.rows.keys import Key


class SeveralPolicies(Policy):
    """Several policies, each with its own version; ``version`` counts the updates of all.

    Args:
        joint: the policies.
        device: the device of all policies except those with their own device.
        env_device: the device of actions.
    """

    openings: Openings
    """The openings of the policies; set by :meth:`bind`."""

    def __init__(
        self, joint: Joint, device: torch.device | None, env_device: torch.device | None
    ) -> None:
        super().__init__(joint.placed(device, env_device), None, None)
        self._own = range(0)
        self._lanes = 0

    def bind(self, own: range, lanes: int) -> None:
        """Act for the lanes ``own`` of a run that has ``lanes`` lanes.

        Raises:
            ArgumentError: a lane has no policy, or has two.
        """
        self._own, self._lanes = own, lanes
        self._joint.bind(own, lanes)
        joint, asked = self._joint, [part.opening for part in self.parts]
        self.openings = Openings(asked, joint.acts_in, joint.version_columns, own.start)
        self._opening = self.openings.left > 0

    def bind_whole(self, lanes: int, part: ShardOfRun | None) -> None:
        """Act for all ``lanes`` lanes of a run, or for all lanes of the shard ``part``.

        Raises:
            ArgumentError: as in :meth:`bind`.
        """
        of = lanes if part is None else part.run_lanes
        self.bind(range(of), of)
        if part is not None:
            of_run = self.openings
            self.bind(part.lanes, of)
            self.openings = of_run.of_lanes(part.lanes)

    @property
    def _joint(self) -> Joint:
        """The policies as one module; in a copy for a trial, the copied module."""
        assert isinstance(self.module, Joint)
        return self.module

    @property
    def described(self) -> list[dict[str, Any]]:
        """Description of the policies for a manifest."""
        return self._joint.described

    @property
    def parts(self) -> Sequence[PolicyPart]:
        """The policies."""
        return self._joint.parts

    @property
    def draws(self) -> bool:
        """True if some actions are random even without the collector's ``init_random_frames``."""
        return any(part.opening or part.policy is None for part in self.parts)

    @property
    def policy_of_lane(self) -> NDArray[np.int64] | None:
        """The number of each lane's policy ``[lane]``; None if all policies act in every lane."""
        joint = self._joint
        return joint.of_lane if isinstance(joint, JointByLane) else None

    @property
    def row_version(self) -> Any:
        """Version of each lane's policy; with groups, the number of updates of all policies."""
        return self._joint.row_versions(self.version)

    def rows_of(self, drawn: Mask) -> tuple[Mask, Any]:
        """Return the lanes that act at random in a slot, and the versions of its rows.

        ``drawn`` marks ``[policy, lane]`` in which an opening acts at random.

        Returns:
            The lanes that act at random, by group ``[policy, lane]``, and the versions of rows.
        """
        return self._joint.rows_of(drawn, self.version)

    def of_key(self, key: Key, random_lanes: Mask) -> Mask:
        """Return the part ``[lane]`` of ``random_lanes`` in which no policy writes ``key``."""
        return self._joint.of_key(key, random_lanes)

    # --- acting -----------------------------------------------------------------------------------

    def try_parts(
        self, td: TensorDictBase, env: EnvBase, observations: Collection[Key], *, strict: bool
    ) -> None:
        """Try out each policy, as `try_out` does for a single policy."""
        trial = Trial(td, env, observations, self._lanes, self._own.start, strict)
        self.notes += self._joint.try_parts(trial)

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Choose actions for ``td``; each policy gets a copy of its rows."""
        return self.around(td)

    def leave_out(self, random_lanes: Mask) -> None:
        """Skip policies in the next call if all of their lanes act at random.

        ``random_lanes`` is the mask that :meth:`rows_of` returned.
        """
        self._joint.leave_out(random_lanes)

    def passes(self) -> None:
        """Skip the random numbers of a slot in which only lanes of other workers are stepped."""
        self._joint.passes()

    def seed(
        self, seed: int, incarnation: int, worker: int | None = None, *, own: bool = True
    ) -> None:
        """Seed the random streams of each policy."""
        self._joint.seed(seed, incarnation, worker, own=own)

    @property
    def generators(self) -> list[dict[str, Any]]:
        """The states of the random streams of each policy."""
        return [part.generators for part in self.parts]

    def load_generators(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of the random streams of each policy."""
        for part, state in zip(self.parts, states, strict=True):
            part.load_generators(state)

    # --- versions and weights ---------------------------------------------------------------------

    @property
    def versions(self) -> dict[PolicyId, int]:
        """Number of updates of each policy that is not random, by id."""
        versions = self._joint.versions.tolist()
        pairs = zip(self.parts, versions, strict=True)
        return {part.id: version for part, version in pairs if part.policy is not None}

    def of_id(self, policy_id: PolicyId | None) -> Policy:
        """Return the policy with the id ``policy_id``.

        Raises:
            ArgumentError: no policy has the id, or ``policy_id`` is None.
        """
        known = [*self.versions]
        if policy_id not in known:
            near = did_you_mean(policy_id, map(str, known)) if isinstance(policy_id, str) else ""
            random = any(part.id == policy_id for part in self.parts)
            why = ", whose actions are random" if random else ""
            raise ArgumentError(
                f"policy_id: expected the id of a policy, one of {known}, got "
                f"{policy_id!r}{why}{near}"
            )
        found = next(part.policy for part in self.parts if part.id == policy_id)
        assert found is not None
        return found

    def update_weights(self, weights: Weights = None, policy_id: PolicyId | None = None) -> None:
        """Load new weights for one policy, and increment its version."""
        self.of_id(policy_id).update_weights(weights)
        self._count(policy_id, 1)

    def looks_unchanged(self, rows: int) -> bool:
        """Return True if all live weights look as they did before the last batch."""
        if self._opening.any():
            return False
        # Not a generator, in which an exception of a signal handler could be lost.
        for part in self.parts:
            if part.policy is not None and not part.policy.looks_unchanged(rows):
                return False
        return True

    def changed_unversioned(self) -> bool:
        """Return True if live weights changed since the last call without a new version.

        A policy is ignored if its opening is not over or has just ended, because it may not have
        acted yet.
        """
        opening, self._opening = self._opening, self.openings.left > 0
        found = False
        for at, part in enumerate(self.parts):
            if part.policy is not None and part.policy.changed_unversioned():
                found |= not (opening[at] or self._opening[at])
        return found

    def decrement_version(self, policy_id: PolicyId | None = None) -> None:
        """Decrement the version, after an update that reached no worker."""
        self._count(policy_id, -1)

    def _count(self, policy_id: PolicyId | None, by: int) -> None:
        at = next(at for at, part in enumerate(self.parts) if part.id == policy_id)
        self._joint.versions[at] += by
        self.version += by

    def begin_at(self, version: int) -> None:
        """Raise versions to ``version`` if they are lower."""
        super().begin_at(version)
        self._joint.versions.clamp_(min=version)

    # --- state ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return each policy's weights, buffers, version and number of remaining random actions."""
        parts = [None if part.policy is None else part.policy.state_dict() for part in self.parts]
        return {
            "version": self.version,
            "versions": self._joint.versions.tolist(),
            "ids": [part.id for part in self.parts],
            "parts": parts,
            "openings": self.openings.left.tolist(),
        }

    def misfit(self, state: Mapping[str, Any]) -> str | None:
        """Return the reason why a state does not fit these policies; None if it fits."""
        mine = [part.id for part in self.parts]
        if "parts" not in state:
            return f"the state is of one policy, but this collector has {len(mine)}: {mine}"
        theirs = [(each, of is None) for each, of in zip(state["ids"], state["parts"], strict=True)]
        if theirs != [(part.id, part.policy is None) for part in self.parts]:
            return f"the state is of the policies {state['ids']}, but this collector has {mine}"
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that :meth:`state_dict` returned."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            if part.policy is not None:
                part.policy.load_state_dict(own)
        self._joint.versions.copy_(torch.tensor(state["versions"]))
        self.version = int(state["version"])
        self.openings.continue_with(state["openings"])

    def load_newer(self, state: Mapping[str, Any]) -> None:
        """Restore the weights of an earlier state, under versions that no weights have had."""
        left, newest = self.openings.left.copy(), max([self.version, *self.versions.values()])
        self.load_state_dict(state)
        self.begin_at(max(newest, self.version) + 1)
        self.openings.continue_with(left)


def _joint_of(policy: Any) -> Joint:
    """Combine several policies, in the form in which a caller gave them.

    Raises:
        ArgumentError: ``policy`` is neither a list of lanes and policies nor a mapping of groups.
    """
    if isinstance(policy, Mapping):
        groups = group_entries(policy)
        return JointByGroup([part_of(name, one) for name, one in groups.items()])
    entries = lane_entries(policy)
    parts = [part_of(at, one) for at, (_, one) in enumerate(entries)]
    return JointByLane(parts, [lanes for lanes, _ in entries])


def policy_argument(policy: Any) -> Any:
    """Return the argument ``policy`` of a collector, with several policies as one module."""
    return _joint_of(policy) if are_several(policy) else policy


def policy_of(
    policy: Any,
    device: torch.device | None,
    env_device: torch.device | None,
    *,
    kinds: tuple[type[Policy], type[SeveralPolicies]] = (Policy, SeveralPolicies),
) -> Any:
    """Wrap a result of `policy_argument` in one of the two classes ``kinds``.

    The first class is for a single policy, and the second for several. None stays None.
    """
    if policy is None:
        return None
    return kinds[isinstance(policy, Joint)](policy, device, env_device)


def openings_of(policy: Policy | None) -> Openings | None:
    """Return the openings of several policies; None if none of them has one."""
    if isinstance(policy, SeveralPolicies) and policy.openings.asked.any():
        return policy.openings
    return None


@contextmanager
def keep_streams(policy: SeveralPolicies | None) -> Iterator[None]:
    """Restore the random streams of several policies after the context."""
    if policy is None:
        yield
        return
    before = policy.generators
    try:
        yield
    finally:
        policy.load_generators(before)
