"""How an environment is driven: what its slab looks like, and which rollout fills it."""

from math import ceil

import numpy as np
import torch
from torchrl.envs import EnvBase
from torchrl.envs.utils import ExplorationType, set_exploration_type

from tallyroll.collector.batch import RowSource
from tallyroll.collector.envs.gymnasium_vector import GymnasiumVectorEnv
from tallyroll.collector.envs.make import loses_finals
from tallyroll.collector.episode_gate import EpisodeGate
from tallyroll.collector.errors import EnvironmentRefused, PolicyError
from tallyroll.collector.keys import (
    COLLECTOR,
    DONE,
    NEXT,
    REWARD,
    TERMINATED,
    TRUNCATED,
    VALID,
    Key,
    as_key,
    dotted,
)
from tallyroll.collector.ledger import Ledger
from tallyroll.collector.policy import Policy, next_keys, try_out
from tallyroll.collector.random_actions import action_keys
from tallyroll.collector.rollout import Rollout, Surplus
from tallyroll.collector.rollout_copy import CopyRollout
from tallyroll.collector.rollout_in_place import InPlaceRollout
from tallyroll.collector.slab import Column, Layout, Slab

MOST_SLOTS = 4096
SLAB_BYTES = 256 * 2**20
"""A slab is at most about this large; longer batches are put together from several fills."""


def build_rollout(
    env: EnvBase,
    policy: Policy | None,
    *,
    frames_per_batch: int,
    surplus: Surplus,
    random_frames: int,
    rng: np.random.Generator,
    ledger: Ledger,
    gate: EpisodeGate | None,
    exploration: ExplorationType,
) -> tuple[Rollout, RowSource]:
    """Try the policy out, lay out the columns, and choose the way of driving."""
    in_place = isinstance(env, GymnasiumVectorEnv)
    first = env.reset()
    extra: dict[Key, Column] = {}
    if policy is not None:
        with torch.no_grad(), set_exploration_type(exploration):
            extra = try_out(policy, first, env)
    if in_place and next_keys(extra):
        raise PolicyError(
            f"the policy writes {[dotted(key) for key in next_keys(extra)]}, which must be carried "
            "from step to step and reset with each lane; add its primer to the environment: "
            "TransformedEnv(env, InitTracker(), policy.make_tensordict_primer())"
        )
    lanes = env.batch_size.numel()
    layout = in_place_layout(env) if in_place else copied_layout(env)
    extra = {key: column for key, column in extra.items() if key not in layout}
    layout = {**extra, **layout}
    slab = Slab(
        _slots(layout, lanes, frames_per_batch),
        lanes,
        layout,
        flowing=env.observation_keys if in_place else (),
        shared=in_place and env.has_reset_slots,
        device=None if in_place else env.device,
    )
    kind = InPlaceRollout if in_place else CopyRollout
    rollout: Rollout = kind(
        env,
        policy,
        extra=tuple(extra),
        slab=slab,
        surplus=surplus,
        random_frames=random_frames,
        rng=rng,
        ledger=ledger,
        gate=gate,
    )
    rollout.start_from(first)
    rewards = [(NEXT, *as_key(key)) for key in env.full_reward_spec.keys(True, True)]
    return rollout, RowSource(slab, layout, rewards, loses_finals(env))


def _slots(layout: Layout, lanes: int, frames_per_batch: int) -> int:
    """Enough for a batch even where every second slot is a reset slot, within bounds."""
    row = sum(
        torch.empty((), dtype=column.dtype).element_size() * int(np.prod(column.shape))
        for column in layout.values()
    )
    fitting = max(4, SLAB_BYTES // max(1, row * lanes))
    return int(min(2 * ceil(frames_per_batch / lanes) + 4, MOST_SLOTS, fitting))


def in_place_layout(env: GymnasiumVectorEnv) -> dict[Key, Column]:
    """Columns that a :class:`GymnasiumVectorEnv` fills."""
    layout: dict[Key, Column] = {}
    for key in env.observation_keys:
        layout[key] = _column(env.observation_spec[key], 1)
    for key in action_keys(env):
        layout[key] = _column(env.full_action_spec[key], 1)
    for key in env.observation_keys:
        layout[(NEXT, *key)] = layout[key]
    layout[REWARD] = Column(torch.float32, (1,))
    layout[TERMINATED] = layout[TRUNCATED] = Column(torch.bool, (1,))
    return layout


def copied_layout(env: EnvBase) -> dict[Key, Column]:
    """Columns that any TorchRL environment returns, from its specs."""
    lead = len(env.batch_size)
    flags = {as_key(key) for key in env.done_spec.keys(True, True)}
    for name, spec in env.observation_spec.items(True, True):
        if spec.dtype is None:
            raise EnvironmentRefused(
                f"{dotted(name)} is {type(spec).__name__}, which no column can hold; leave it out "
                f'with TransformedEnv(env, ExcludeTransform("{dotted(name)}"))'
            )
    layout: dict[Key, Column] = {}
    for name, value in env.fake_tensordict().items(True, True):
        key = as_key(name)
        if key in flags or key in (VALID, (NEXT, *VALID)):
            continue
        layout[key] = Column(value.dtype, tuple(value.shape[lead:]))
    if DONE not in layout or TERMINATED not in layout:
        raise EnvironmentRefused("the environment declares no done and terminated at its root")
    if any(key[0] == COLLECTOR or key[:2] == (NEXT, COLLECTOR) for key in layout):
        raise EnvironmentRefused(
            f"the environment has keys under {COLLECTOR!r}, where tallyroll keeps its own"
        )
    return layout


def _column(spec: object, lead: int) -> Column:
    return Column(spec.dtype, tuple(spec.shape[lead:]))  # type: ignore[attr-defined]
