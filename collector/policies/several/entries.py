"""Several policies in the form of a collector's argument: by lane, or by group of agents."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.options.checks import available_device, not_negative, or_none
from tallyroll.collector.options.objects import DeviceLike
from tallyroll.collector.policies.policy import PolicyFn
from tallyroll.collector.policies.several.lane_sets import LaneSet, require_lanes


@dataclass(frozen=True)
class OnePolicy:
    """One of several policies, with its own options.

    Args:
        policy: a policy as for a collector; None if all actions are random.
        init_random_frames: number of transitions of the policy's lanes, or of its group, that have
            random actions at the start. The number is exact.
        policy_device: the device of the policy's calls; None means the collector's
            ``policy_device``.

    Raises:
        ArgumentError: an argument is not valid.

    Examples:
        >>> from tallyroll.collector import OnePolicy, SyncCollector
        >>> def left(td):
        ...     return td.set("action", td["observation"][..., 0].long() * 0)
        >>> policies = [(0, OnePolicy(left, init_random_frames=3)), ([1, 2], None)]
        >>> with SyncCollector(
        ...     "CartPole-v1", policies, num_envs=3, frames_per_batch=15, total_frames=15, seed=0
        ... ) as collector:
        ...     batch = next(iter(collector))
        >>> batch["collector", "policy_id"].tolist()
        [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
        >>> batch["collector", "policy_version"].tolist()
        [-1, -1, -1, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1]
    """

    policy: Any
    _: KW_ONLY
    init_random_frames: int = 0
    policy_device: DeviceLike = None

    def __post_init__(self) -> None:
        if isinstance(self.policy, OnePolicy):
            raise ArgumentError(
                "policy: expected a policy in OnePolicy(...), got another OnePolicy"
            )
        frames = not_negative("init_random_frames", self.init_random_frames)
        if frames and self.policy is None:
            raise ArgumentError(
                f"init_random_frames: expected 0 if the policy is None, because all its actions "
                f"are random, got {frames}"
            )


ByLane: TypeAlias = Sequence[tuple[LaneSet, PolicyFn | OnePolicy | None]]
ByGroup: TypeAlias = Mapping[str, PolicyFn | OnePolicy | None]
Policies: TypeAlias = PolicyFn | ByLane | ByGroup
"""The kinds of policies that collectors accept: one policy, or several."""


def device_of(one: OnePolicy) -> torch.device | None:
    """Return the policy's own device, or None; raise an error if this machine lacks it."""
    found: torch.device | None = or_none(available_device)("policy_device", one.policy_device)
    return found


def are_several(policy: Any) -> bool:
    """Return True if ``policy`` is several policies, judged only by its type."""
    return isinstance(policy, (Mapping, list, tuple)) and not callable(policy)


def without_openings(policy: Any) -> Any:
    """Return the argument ``policy``, with ``init_random_frames`` of each policy removed."""
    if not are_several(policy):
        return policy
    if isinstance(policy, Mapping):
        return {name: _acting(one) for name, one in policy.items()}
    if len(pairs := _pairs(policy)) < len(policy):
        return policy
    return [(lanes, _acting(one)) for lanes, one in pairs]


def each_of(policy: Any) -> list[Any]:
    """Return the policies in a result of `without_openings`, or the single policy, as a list."""
    if not are_several(policy):
        return [policy]
    given = policy.values() if isinstance(policy, Mapping) else [one for _, one in _pairs(policy)]
    return [one.policy if isinstance(one, OnePolicy) else one for one in given]


def _pairs(given: Sequence[Any]) -> list[Any]:
    """Return the entries that are pairs; `lane_entries` reports the other entries as errors."""
    return [each for each in given if isinstance(each, (tuple, list)) and len(each) == 2]


def _acting(one: Any) -> Any:
    return replace(one, init_random_frames=0) if isinstance(one, OnePolicy) else one


def lane_entries(given: Sequence[Any]) -> list[tuple[LaneSet, OnePolicy]]:
    """Return the lanes and the policy of each entry of a list.

    Raises:
        ArgumentError: the argument is not a list of such pairs.
    """
    wanted = "policy: expected one policy, {group: policy} or [(lanes, policy), …]"
    if not given:
        raise ArgumentError(f"{wanted}, got an empty {type(given).__name__}")
    found = []
    for at, each in enumerate(given):
        if not isinstance(each, (tuple, list)) or len(each) != 2:
            raise ArgumentError(f"{wanted}, got {_describe(each)} at index {at}")
        lanes, policy = each
        if isinstance(lanes, (np.ndarray, torch.Tensor)):
            lanes = lanes.tolist()
        require_lanes(lanes, at)
        found.append((lanes, _one(policy, f"policy {at}")))
    return found


def group_entries(given: Mapping[Any, Any]) -> dict[str, OnePolicy]:
    """Return the policy of each group of a mapping.

    Raises:
        ArgumentError: a key is not a string, or the mapping is empty.
    """
    if not given or not all(isinstance(name, str) for name in given):
        raise ArgumentError(
            f"policy: expected {{group: policy}} with the names of groups, got {[*given]}"
        )
    return {name: _one(policy, f"the group {name!r}") for name, policy in given.items()}


def _one(policy: Any, whose: str) -> OnePolicy:
    one = policy if isinstance(policy, OnePolicy) else OnePolicy(policy)
    if are_several(one.policy):
        raise ArgumentError(
            f"policy: expected one policy for {whose}, got several: {_describe(one.policy)}"
        )
    return one


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.60}"
