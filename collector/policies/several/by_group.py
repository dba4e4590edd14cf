"""Several policies, one per group of agents, combined into one policy."""

from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.errors import ArgumentError, PolicyError
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import MASK_NAME, action_keys
from tallyroll.collector.policies.several.joint import (
    Joint,
    Trial,
    named,
    naming,
    opening_of,
    put,
)
from tallyroll.collector.policies.several.policy_part import PolicyPart, whose
from tallyroll.collector.policies.trial import settle_inputs, try_out
from tallyroll.collector.slab.slab import SlabColumn, SlabColumns
from tallyroll.storage.package.near_names import did_you_mean
from tallyroll.storage.rows.keys import POLICY_VERSIONS, RANDOM_VERSION, Key, as_key, format_key


class JointByGroup(Joint):
    """Policies that each act for one group of agents, in all lanes.

    Args:
        parts: the policies; their ids are names of groups.
    """

    def __init__(self, parts: Sequence[PolicyPart]) -> None:
        super().__init__(parts)
        self.relative: list[bool] = []
        """For each part, True if it gets the TensorDict of its group instead of the whole one."""
        self.actions: list[tuple[Key, ...]] = []
        """For each part, the action keys of its group."""
        self.owner: dict[Key, int] = {}
        """The number of the part that writes each key."""
        self.lanes = 0

    def bind_like(self, other: Self) -> None:
        """Act in the same lanes and groups as ``other``."""
        self.relative, self.actions, self.owner = other.relative, other.actions, other.owner
        self.lanes = other.lanes

    def bind(self, own: range, lanes: int) -> None:
        """Act in all lanes of ``own``."""
        self.lanes = len(own)

    @property
    def described(self) -> list[dict[str, Any]]:
        """Description of the policies for a manifest."""
        return [{"id": part.id, "policy": named(part)} | opening_of(part) for part in self.parts]

    @property
    def acts_in(self) -> Mask:
        """Marks ``[part, lane]``, all True, because each part acts in all lanes."""
        return np.ones((len(self.parts), self.lanes), np.bool_)

    @property
    def version_columns(self) -> list[Key]:
        """The version column of each group."""
        return [(*POLICY_VERSIONS, str(part.id)) for part in self.parts]

    def row_versions(self, version: int) -> int:
        """Return the number of updates, summed over all policies; -1 if no group has a policy."""
        return RANDOM_VERSION if self._draws.all() else version

    def rows_of(self, drawn: Mask, version: int) -> tuple[Mask, Any]:
        """Return ``drawn``, and the version of each lane's row.

        The version is -1 in lanes where all groups act at random.
        """
        wholly = (drawn | self._draws[:, None]).all(axis=0)
        return drawn, np.where(wholly, RANDOM_VERSION, self.row_versions(version))

    def of_key(self, key: Key, random_lanes: Mask) -> Mask:
        """Return the lanes in which the group that writes ``key`` acts at random."""
        if random_lanes.ndim == 1:  # in these lanes, all groups act at random
            return random_lanes
        lanes: Mask = random_lanes[self.owner[key]]
        return lanes

    def try_parts(self, trial: Trial) -> list[str]:
        """Try out each policy, and add the version column of each group to the columns."""
        notes = super().try_parts(trial)
        for number, key in enumerate(self.version_columns):
            self.columns[key], self.owner[key] = SlabColumn(torch.int64, ()), number
        return notes

    def _prepare(self, trial: Trial) -> None:
        """Find the groups, and require one policy for each."""
        groups = _groups_of(trial.env)
        _require_groups([str(part.id) for part in self.parts], groups)
        self.relative = [False] * len(self.parts)
        self.actions = [groups[str(part.id)] for part in self.parts]
        self.owner = {key: at for at, keys in enumerate(self.actions) for key in keys}
        for group in groups:
            inner = trial.env.full_action_spec[group].shape
            if len(inner) > trial.lead:
                self.batch_dims[(group,)] = len(inner) - trial.lead

    def _tried(
        self, number: int, part: PolicyPart, policy: Policy, trial: Trial
    ) -> tuple[SlabColumns, Mapping[Key, int]]:
        """Try out a policy on the TensorDict of its group, or on the whole TensorDict."""
        group = str(part.id)
        keys = {key[1:] for key in trial.observations if key[0] == group}
        relative = _is_relative(policy, keys, {*trial.observations})
        self.relative[number] = relative
        with naming(whose(part.id)):
            found = _called(policy, group, trial, keys if relative else None)
        prefix = (group,) if relative else ()
        columns = {(*prefix, *key): column for key, column in found.items()}
        dims = {(*prefix, *level): count for level, count in policy.batch_dims.items()}
        twice = [key for key in columns if key in self.columns]
        if twice:
            raise PolicyError(
                f"the policy of the group {group!r} writes {format_key(twice[0])}, which the "
                "policy of another group writes too. Use a key of the group: "
                f"{group}/{twice[0][-1]}"
            )
        self.owner |= {(*prefix, *key): number for key in policy.writes}
        return columns, dims

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        """Return the output of the policies, each for its group."""
        out, versions = self._empty(td), self.versions.tolist()
        idle, self._idle = self._idle, None
        for number, part in enumerate(self.parts):
            group, version = str(part.id), versions[number]
            if part.policy is None:
                drawn, version = part.at_random(td), RANDOM_VERSION
                found = {key: drawn[key] for key in self.actions[number]}
            elif idle is not None and idle[number]:
                continue
            elif self.relative[number]:
                found = {(group, *key): value for key, value in part(td.get(group)).items()}
            else:
                found = part(td)
            put(part, out, None, found)
            out.get(self.version_columns[number]).fill_(version)
        return out


def _groups_of(env: EnvBase) -> dict[str, tuple[Key, ...]]:
    """Return the actions of each group.

    Raises:
        ArgumentError: an action belongs to no group.
    """
    found: dict[str, tuple[Key, ...]] = {}
    for key in action_keys(env):
        if len(key) < 2:
            raise ArgumentError(
                "policy: {group: policy} needs groups of agents, but the environment has the "
                f"action {format_key(key)}. Pass one policy, or [(lanes, policy), …]."
            )
        found[key[0]] = (*found.get(key[0], ()), key)
    return found


def _require_groups(given: Sequence[str], groups: Collection[str]) -> None:
    for name in given:
        if name not in groups:
            raise ArgumentError(
                f"policy: expected the groups {sorted(groups)}, got {name!r}"
                f"{did_you_mean(name, groups)}"
            )
    for name in groups:
        if name not in given:
            raise ArgumentError(
                f"policy: expected a policy for each of the groups {sorted(groups)}, got none for "
                f"{name!r}. Add a policy for this group, or None for random actions."
            )


def _called(
    policy: Policy, group: str, trial: Trial, inside: Collection[Key] | None
) -> dict[Key, SlabColumn]:
    """Try ``policy`` on the keys ``inside`` the TensorDict of ``group``; None means all keys."""
    env = trial.env
    keys = trial.observations if inside is None else inside
    some, specs = trial.td.get(group), env.full_action_spec[group]
    if inside is None:
        some = trial.td
        specs = Composite({group: specs}, shape=env.full_action_spec.shape)
    acted = SimpleNamespace(full_action_spec=specs, batch_size=env.batch_size)
    data = [key for key in keys if key[-1] not in ("mask", MASK_NAME)]
    try:
        settle_inputs(policy, some, acted, keys)
    except ArgumentError:
        if len(data) == len(keys):
            raise
        settle_inputs(policy, some, acted, data)
    found = try_out(policy, some, acted, strict=trial.strict)
    written = [key for key in policy.writes if inside is None and key in action_keys(env)]
    others = [key for key in written if key[0] != group]
    if others:
        raise PolicyError(f"the policy writes {format_key(others[0])}, the action of another group")
    return found


def _is_relative(policy: Policy, inside: Collection[Key], whole: Collection[Key]) -> bool:
    """Return True if ``policy`` takes the TensorDict of its group, whose keys are ``inside``."""
    reads = getattr(policy.source, "in_keys", None)
    if reads is None:
        return True
    keys = [as_key(key) for key in reads]
    return all(key in inside for key in keys) or not all(key in whole for key in keys)
