"""Provenance of a run for the manifest: versions, seeds, and arguments of the call."""

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from torchrl.data import ReplayBuffer

from tallyroll.collector.counting.ledger import Ledger
from tallyroll.collector.options import Options
from tallyroll.collector.options.sharding import ShardOfRun
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.several.policies import SeveralPolicies
from tallyroll.collector.slab.names import spelled_rename
from tallyroll.storage.rows.spaces import UNCHECKED, fitting

MOST_SEEDS = 1024
_OF_ONE_SHARD = frozenset(("frames_per_batch", "total_frames", "num_workers", "mode", "transport"))
"""Arguments that may differ between shards."""


def call_of(options: Options, policy: Policy | None, more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the collector arguments to record, including ``more``, without empty lists."""
    kept = {
        "frames_per_batch": options.frames_per_batch,
        "total_frames": options.total_frames,
        "total_episodes": options.total_episodes,
        **({"budget_unit": "agent_transitions"} if options.by_agent else {}),
        "policy": None if policy is None else type(policy.source).__qualname__,
        "policies": policy.described if isinstance(policy, SeveralPolicies) else [],
        "surplus": options.surplus,
        "frame_skip": options.columns.frame_skip,
        "finals": options.checks.finals,
        "info_keys": [str(info) for info in options.info_keys],
        "rename": spelled_rename(options.rename),
        **({"resets": options.resets.described()} if options.resets.draws else {}),
        **_otherwise(options),
        **more,
    }
    return {name: value for name, value in kept.items() if value != []}


def _otherwise(options: Options) -> dict[str, Any]:
    """Return the options about the environment that differ from their defaults."""
    found = {
        "max_frames_per_traj": options.max_frames_per_traj,
        "reset_at_each_iter": options.reset_at_each_iter or None,
        "reward_dtype": None
        if options.columns.reward_dtype is None
        else str(options.columns.reward_dtype).removeprefix("torch."),
        "reset_slots": None if options.checks.reset_slots == "mask" else options.checks.reset_slots,
    }
    return {name: value for name, value in found.items() if value is not None}


def recorded_spaces(
    spaces: Mapping[str, Any], options: Options, buffer: ReplayBuffer | None
) -> dict[str, Any]:
    """Return the spaces that fit into a run's entry, and the reasons why rows may violate them.

    With ``validate="noise"``, actions outside a box are stored too. Because any run may have such
    actions, they are not listed as a reason.
    """
    reasons = {
        f"validate={options.checks.validate!r}": options.checks.validate in ("warn", "off"),
        "postproc": options.postproc is not None,
        "the replay buffer's transforms": buffer is not None and len(buffer._transform) > 0,  # noqa: SLF001
    }
    found = [why for why, holds in reasons.items() if holds]
    return fitting(spaces) | ({UNCHECKED: ", ".join(found)} if found else {})


def common_id(run: Mapping[str, Any], part: ShardOfRun, policy: Mapping[str, Any]) -> str:
    """Return a hash of the properties that all shards of a run share, from one shard's entry.

    These properties are the environment, the seed, the lanes, the budget, the number of shards, the
    arguments of the call that determine the rows, and the ``policy``: its code, and the weights
    that the run began with. Versions, workers and the size of a batch may differ.
    """
    call = {name: value for name, value in run["call"].items() if name not in _OF_ONE_SHARD}
    budget = [part.asked, part.opening, part.of]
    common = [run["environment"], run["seed"], run["lanes"], *budget, call, dict(policy)]
    text = json.dumps(common, sort_keys=True, default=repr)
    return sha256(text.encode()).hexdigest()[:16]


def run_provenance(
    environment: Mapping[str, Any],
    ledger: Ledger,
    lane_seeds: Sequence[int],
    *,
    lanes: int,
    first_id: int,
    call: Mapping[str, Any],
    policy_version: int,
    made: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return the entry of a run in a manifest, as JSON values.

    ``call`` has the recorded arguments of the collector. ``lane_seeds`` has the seed of each lane's
    first reset. It is empty if the environment chose the seeds. More than `MOST_SEEDS` of them are
    left out, because they follow from the seed of the run. ``policy_version`` is the version at the
    entry's ``first_row``. ``made`` is the result of `host_info.made_by`; None if no storage keeps
    it.

    ``first_id`` is the lowest id of a trajectory. In a run with this value, a lane skips an id when
    it lost transitions or was reset, even between two trajectories. So if the ids of two
    trajectories of a lane are ``lanes`` apart and the first ended, the second follows it directly.
    """
    run: dict[str, Any] = {
        "environment": environment,
        "versions": ledger.versions,
        "seed": ledger.seed,
        "incarnation": ledger.incarnation,
        "lanes": lanes,
        "first_id": first_id,
        "policy_version": policy_version,
        "call": dict(call),
    }
    if made is not None:
        run["made"] = dict(made)
    if ledger.respawned:  # these incarnations are respawns, the others resumptions
        run["respawned"] = ledger.respawned
    if 0 < len(lane_seeds) <= MOST_SEEDS:
        run["lane_seeds"] = list(lane_seeds)
    return run
