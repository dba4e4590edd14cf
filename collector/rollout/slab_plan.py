"""Plan the slab of an environment and a policy, and choose the driver that fills it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs import EnvBase, InitTracker
from torchrl.envs.utils import set_exploration_type

from tallyroll.collector.counting.transitions import Mask, next_step_transitions
from tallyroll.collector.envs.probes.known_faults import known_fault
from tallyroll.collector.envs.setup.make import require_names_of
from tallyroll.collector.envs.setup.observation_columns import observed_keys
from tallyroll.collector.envs.setup.spaces import spaces_of
from tallyroll.collector.envs.setup.traits import fills_slabs, loses_finals, system_of, ticks_of
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import (
    CollectorError,
    EnvironmentRefused,
    PolicyError,
    SpaceError,
)
from tallyroll.collector.options import Options
from tallyroll.collector.policies.mask_rules import MaskRule, require_masks, rules_of
from tallyroll.collector.policies.policy import Policy
from tallyroll.collector.policies.random_actions import MASK_NAME, RandomActions, action_keys
from tallyroll.collector.policies.several.policies import SeveralPolicies, keep_streams
from tallyroll.collector.policies.slot_rng import SlotRng
from tallyroll.collector.policies.states import refuse_states
from tallyroll.collector.policies.trial import next_keys, settle_inputs, try_out
from tallyroll.collector.rollout.arriving_lanes import ArrivingLanes
from tallyroll.collector.rollout.copied_lanes import CopiedLanes
from tallyroll.collector.rollout.driver import LocalDriver
from tallyroll.collector.rollout.lanes import Lanes, SystemLanes, ended_in
from tallyroll.collector.run_plan import FEW_REWARDS
from tallyroll.collector.slab.names import excluded_columns, new_name
from tallyroll.collector.slab.slab import Slab, SlabColumn, SlabColumns
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    IS_INIT,
    LANE,
    NEXT,
    NEXT_VALID,
    POLICY_ID,
    POLICY_VERSION,
    POLICY_VERSIONS,
    STEP,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    VALID,
    Key,
    as_key,
    format_key,
    next_valid_keys,
)

MOST_SLOTS = 4096
SLAB_BYTES = 256 * 2**20
"""The approximate maximum size of a slab; longer batches need several fills."""


@dataclass(frozen=True)
class SlabPlan:
    """The plan of a slab and of its rows, for an environment and a policy."""

    layout: SlabColumns
    extra: tuple[Key, ...]
    """Columns that the policy writes in addition to the action."""
    flowing: tuple[Key, ...]
    """Observations that an environment writes in place."""
    shared: bool
    """True if observations and next observations share one memory, one slot apart."""
    rewards: tuple[Key, ...]
    lost_finals: bool
    observed: tuple[Key, ...]
    """Observations at the root and under ``"next"`` that distinguish states."""
    dones: tuple[Key, ...]
    """Done columns below the root."""
    batch_dims: dict[Key, int]
    """Batch dimensions that nested TensorDicts have after the lanes."""
    in_place: bool
    reset_slots: bool
    """True if the environment writes in place and has reset slots."""
    marked: bool
    """True if the environment marks which slots are transitions."""
    inits: tuple[Key, ...] = ()
    """Columns that are True in the first row of a trajectory."""
    arrivals: int = 0
    """Number of rows in a slot if lanes return in any order; 0 if each lane has its own column."""
    flags: tuple[Key, ...] = ()
    """Done flags that the environment declares, by their names at the root.

    The tuple is empty except in TorchRL's layout, because in other layouts workers may declare
    different flags.
    """
    batched: bool = True
    """False for an environment without a lane dimension in TorchRL's layout."""
    notes: tuple[str, ...] = ()
    """Warnings for users of the rows, about the policy."""
    excluded: tuple[Key, ...] = ()
    """Columns of slabs and batches that are not stored."""
    masks: tuple[MaskRule, ...] = ()
    """Masks of legal actions among the columns."""
    fault: str | None = None
    """A text on how the environment falsifies ends of episodes; accepted in TorchRL's layout."""
    ticks: int | None = field(default=1, compare=False)
    """Simulator ticks per transition, as the environment reports them; None if unknown."""
    spaces: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Spaces of observations and actions as JSON, by column name; workers may have other ones."""

    @property
    def flags_and_rewards(self) -> tuple[Key, ...]:
        """Keys of the flags and rewards, which the run loop reads."""
        keys = (DONE, TERMINATED, TRUNCATED, *self.dones, *self.inits, *self.rewards)
        return tuple(key for key in dict.fromkeys(keys) if key in self.layout)

    def executed(self, slab: Slab, start: int, stop: int, pending: NDArray[np.bool_]) -> Mask:
        """Return marks ``[time, lane]`` of the slots ``[start, stop)`` that are transitions.

        ``pending`` marks the lanes whose episode ended in the slot before ``start``.
        """
        if self.reset_slots:
            return next_step_transitions(ended_in(slab, start, stop), pending)
        if self.marked:
            return slab.transitions[start:stop].copy()
        return np.ones((stop - start, slab.lanes), np.bool_)

    def slots(self, lanes: int, frames: int, slabs: int = 1) -> int:
        """Return enough slots for ``frames`` rows, even if every second slot is a reset slot.

        The number is limited by `MOST_SLOTS`, and by about `SLAB_BYTES` for ``slabs`` slabs.
        """
        row = sum(
            torch.empty((), dtype=column.dtype).element_size() * int(np.prod(column.shape))
            for column in self.layout.values()
        )
        columns = self.columns(lanes)
        fitting = max(4, SLAB_BYTES // max(1, row * columns * slabs))
        return int(min(2 * ceil(frames / columns) + 4, MOST_SLOTS, fitting))

    @property
    def few_float_rewards(self) -> bool:
        """True if a lane's rewards are one column of at most `FEW_REWARDS` floats."""
        if len(self.rewards) != 1:
            return False
        reward = self.layout[self.rewards[0]]
        few = 1 <= prod(reward.shape) <= FEW_REWARDS
        return few and reward.dtype in (torch.float32, torch.float64)

    def columns(self, lanes: int) -> int:
        """Return the number of rows in a slot of an environment with ``lanes`` lanes."""
        return self.arrivals or lanes

    def slab(self, slots: int, lanes: int, **options: Any) -> Slab:
        """Make a slab of ``slots`` slots; ``options`` are the other arguments of :class:`Slab`."""
        return Slab(
            slots,
            self.columns(lanes),
            self.layout,
            flowing=self.flowing,
            shared=self.shared,
            arrivals=self.arrivals > 0,
            **options,
        )


def plan_slab(
    env: EnvBase, policy: Policy | None, first: TensorDictBase, options: Options
) -> SlabPlan:
    """Try the policy on ``first``, the result of a reset, and lay out the columns."""
    in_place = fills_slabs(env)
    arrivals = env.stepper.declares.arrivals if isinstance(env, SystemEnv) and in_place else 0
    extra: dict[Key, SlabColumn] = {}
    several = policy if isinstance(policy, SeveralPolicies) else None
    if several is not None and arrivals:
        raise EnvironmentRefused(
            "policy: expected one policy, got several. Several policies act in lanes that step "
            "together, but lanes of this environment come back in any order."
        )
    if policy is None or options.init_random_frames or policy.draws:
        require_masks(env)  # one of several policies may act at random in the trial
    if policy is not None:
        with torch.no_grad(), set_exploration_type(options.exploration_type), keep_streams(several):
            if several is None:
                settle_inputs(policy, first, env, _policy_input_keys(env))
            else:
                strict = options.checks.validate == "raise"
                several.try_parts(first, env, _policy_input_keys(env), strict=strict)
            extra = try_out(policy, first, env, strict=options.checks.validate == "raise")
    if in_place and next_keys(extra):
        raise PolicyError(
            f"the policy writes {[format_key(key) for key in next_keys(extra)]}: these values must "
            "be carried from step to step and reset with each lane. Add the primer of the policy "
            "to the environment: TransformedEnv(env, InitTracker(), "
            "policy.make_tensordict_primer())"
        )
    if policy is not None:
        with torch.no_grad(), set_exploration_type(options.exploration_type), keep_streams(several):
            refuse_states(policy, first, env, in_place)
    require_names_of(env, written=[key for key in extra if key[:2] != POLICY_VERSIONS])
    layout = in_place_layout(env) if in_place else copied_layout(env)
    layout |= reset_layout(env)
    if several is not None and several.policy_of_lane is not None:
        layout[POLICY_ID] = SlabColumn(torch.int32, ())
    _require_values(layout, SpaceError, "the environment")
    _require_values(extra, PolicyError, "the policy")
    dims = _batch_dims(env, layout, policy)
    extra = {key: column for key, column in extra.items() if key not in layout}
    torchrl = options.layout.name == "torchrl"
    excluded = _excluded(env, (*extra, *layout), options)
    return SlabPlan(
        layout={**extra, **layout},
        extra=tuple(extra),
        flowing=env.stepper.observation_keys if in_place and not arrivals else (),
        shared=in_place and env.stepper.declares.has_reset_slots and not arrivals,
        rewards=tuple((NEXT, *as_key(key)) for key in env.full_reward_spec.keys(True, True)),
        lost_finals=(options.checks.finals == "lost" or loses_finals(env))
        and not next_valid_keys(layout),  # otherwise the environment marks lost finals
        observed=observed_keys(env, layout, options),
        dones=nested_dones(env),
        inits=init_columns(env, layout),
        batch_dims=dims,
        in_place=in_place,
        reset_slots=in_place and env.stepper.declares.has_reset_slots,
        marked=not in_place and VALID in map(as_key, env.observation_spec.keys(True, True)),
        arrivals=arrivals,
        flags=tuple(map(as_key, env.full_done_spec.keys(True, True))) if torchrl else (),
        batched=len(env.batch_size) > 0 or not torchrl,
        notes=() if policy is None else tuple(policy.notes),
        excluded=excluded,
        masks=tuple(rule for rule in rules_of(env) if {rule.mask, rule.action} <= {*layout}),
        fault=known_fault(env, options.max_frames_per_traj, options.checks.finals == "lost")
        if torchrl  # in other layouts it has been refused
        else None,
        ticks=ticks_of(env) if options.columns.frame_skip is None else 1,
        spaces=spaces_of(env, {k: c for k, c in layout.items() if k not in excluded}, options),
    )


def _excluded(env: EnvBase, columns: Sequence[Key], options: Options) -> tuple[Key, ...]:
    """Return the columns that are not stored.

    Raises:
        ArgumentError: a name in ``exclude`` matches no column, or a column that every row needs.
    """
    rewards, dones = (
        [(NEXT, *as_key(key)) for key in spec.keys(True, True)]
        for spec in (env.full_reward_spec, env.full_done_spec)
    )
    masks = [new_name((*key[1:-1], "mask"), options.rename, columns) for key in nested_dones(env)]
    own = [key for key in columns if key[0] == COLLECTOR]
    required = {
        **dict.fromkeys(action_keys(env), "an action"),
        **dict.fromkeys(rewards, "a reward"),
        **dict.fromkeys((*dones, DONE, TERMINATED, TRUNCATED), "a flag of ends"),
        **dict.fromkeys((key for key in masks if key in columns), "a mask of agents"),
        **dict.fromkeys((*own, TRAJ_IDS, STEP, LANE, POLICY_VERSION), "a column of the collector"),
    }
    return excluded_columns(options.columns.exclude, columns, required)


def _require_values(columns: SlabColumns, error: type[CollectorError], maker: str) -> None:
    """Raise ``error`` for columns without values, which no storage can hold."""
    for key, column in columns.items():
        if 0 in column.shape:
            raise error(
                f"{format_key(key)}: expected at least one value, got the shape "
                f"{list(column.shape)} from {maker}. Remove the column from it, or in a wrapper."
            )


def _policy_input_keys(env: EnvBase) -> list[Key]:
    """Return the keys of observations that a policy that takes tensors may get."""
    base = system_of(env)
    infos = () if base is None else base.info_keys
    keys = map(as_key, env.observation_spec.keys(True, True))
    told = {*infos} - {(MASK_NAME,)}  # policies may want the mask of legal actions
    return [key for key in keys if key[0] != COLLECTOR and key not in told]


def make_driver(
    env: EnvBase,
    policy: Policy | None,
    plan: SlabPlan,
    slab: Slab,
    rng: SlotRng,
    board: memoryview,
    run_lanes: int | None = None,
) -> LocalDriver:
    """Make the driver for which ``plan`` was made.

    ``run_lanes`` is the number of lanes of the run. ``rng`` draws for all of them, so that every
    process with an equal ``rng`` draws the same numbers. If ``run_lanes`` is None, ``rng`` draws
    only for the lanes of ``env``.
    """
    columns = plan.arrivals or None
    if POLICY_ID in plan.layout and isinstance(policy, SeveralPolicies):
        ids = torch.from_numpy(np.asarray(policy.policy_of_lane))
        slab.columns[POLICY_ID][:] = ids.to(torch.int32)
    lanes: Lanes
    acting = None
    if plan.arrivals:
        lanes = ArrivingLanes(env, slab, plan.extra, board, by_policy=policy is not None)
        acting = lanes.acting
    elif plan.in_place:
        lanes = SystemLanes(env, slab, board)
    else:
        lanes = CopiedLanes(env, slab, (*plan.extra, POLICY_ID), board)
    random = RandomActions(env, rng, run_lanes, slab.first_lane, columns, acting)
    return LocalDriver(lanes, policy, extra=plan.extra, random=random, board=board)


def in_place_layout(env: SystemEnv) -> dict[Key, SlabColumn]:
    """Return the columns that a :class:`SystemEnv` fills."""
    layout: dict[Key, SlabColumn] = {}
    for key in env.observation_keys:
        layout[key] = _column(env.observation_spec[key], 1)
    for key in action_keys(env):
        layout[key] = _column(env.full_action_spec[key], 1)
    for key in env.observation_keys:
        layout[(NEXT, *key)] = layout[key]
    for key in env.stepper.reward_keys:
        layout[(NEXT, *key)] = _column(env.full_reward_spec[key], 1)
    layout[TERMINATED] = layout[TRUNCATED] = SlabColumn(torch.bool, (1,))
    for group, size in env.stepper.declares.groups.items():
        for name in ("terminated", "truncated", "done"):
            layout[(NEXT, group, name)] = SlabColumn(torch.bool, (size, 1))
    if NEXT_VALID in map(as_key, env.observation_spec.keys(True, True)):
        layout[NEXT_VALID] = SlabColumn(torch.bool, ())
    if env.stepper.declares.agent_finals == "some":
        for group, size in env.stepper.declares.groups.items():
            layout[(*NEXT_VALID, group)] = SlabColumn(torch.bool, (size,))
    return layout


def reset_layout(env: EnvBase) -> dict[Key, SlabColumn]:
    """Return the columns of reset contexts and reset seeds, if resets get any."""
    base = system_of(env)
    resets = None if base is None else base.stepper.contexts.resets
    return {} if resets is None else resets.layout


def copied_layout(env: EnvBase) -> dict[Key, SlabColumn]:
    """Return the columns that a TorchRL environment returns, from its specs."""
    lead = len(env.batch_size)
    flags = {as_key(key) for key in env.done_spec.keys(True, True)}
    for name, spec in env.observation_spec.items(True, True):
        shown = format_key(as_key(name))
        if spec.dtype is None:
            raise EnvironmentRefused(
                f"{shown} is {type(spec).__name__}, which no column can hold. Convert strings with "
                f'TransformedEnv(env, FixedWidth({{"{shown}": bytes}})), or leave the entry out '
                f'with TransformedEnv(env, ExcludeTransform("{shown}")).'
            )
        if -1 in spec.shape:
            raise EnvironmentRefused(
                f"{shown}: expected a fixed shape, got {list(spec.shape)}. Fill shorter values "
                "with zeros: wrap each single environment in TransformedEnv(env, "
                f'FixedWidth({{"{shown}": shape}})).'
            )
    layout: dict[Key, SlabColumn] = {}
    for name, value in _fake(env).items(True, True):
        key = as_key(name)
        if key in flags or key in (VALID, (NEXT, *VALID)) or key in next_valid_keys([key]):
            continue
        if next_valid_keys([key[1:]]):
            key = key[1:]
        layout[key] = SlabColumn(value.dtype, tuple(value.shape[lead:]))
    if DONE not in layout or TERMINATED not in layout:
        raise EnvironmentRefused(
            "the environment does not declare both done and terminated at its root"
        )
    return layout


def _fake(env: EnvBase) -> TensorDictBase:
    """Return TorchRL's fake TensorDict of the environment's specs."""
    try:
        return env.fake_tensordict()
    except NotImplementedError as error:
        columns = (*env.observation_spec.items(True, True), *env.full_action_spec.items(True, True))
        hard = [format_key(as_key(key)) for key, spec in columns if spec.dtype in SIGNED]
        if not hard:
            raise
        raise EnvironmentRefused(
            "TorchRL's own environments and transforms need operations that torch lacks for the "
            f"dtype of {hard} ({error}). Leave transforms out, or cast in an inner wrapper, such "
            "as gymnasium.wrappers.DtypeObservation(env, np.int32)."
        ) from error


def nested_dones(env: EnvBase) -> tuple[Key, ...]:
    """Return the columns of done flags that ``env`` declares for groups, below the root."""
    keys = (as_key(key) for key in env.full_done_spec.keys(True, True))
    ends = ("terminated", "truncated")
    return tuple((NEXT, *key) for key in keys if len(key) > 1 and key[-1] not in ends)


def init_columns(env: EnvBase, layout: SlabColumns) -> tuple[Key, ...]:
    """Return the columns that mark the first row of a trajectory; trackers may rename them."""
    trackers = (each for each in env.modules() if isinstance(each, InitTracker))
    names = {IS_INIT, *(each.init_key for each in trackers)}
    return tuple(
        key
        for key, column in layout.items()
        if key[0] != NEXT and key[-1] in names and column.dtype is torch.bool
    )


def _batch_dims(env: EnvBase, layout: SlabColumns, policy: Policy | None) -> dict[Key, int]:
    """Return the batch dimensions of nested TensorDicts, from the specs or from the policy."""
    lead = len(env.batch_size)
    known = {key[:depth] for key in layout for depth in range(len(key))}
    own = {} if policy is None else policy.batch_dims
    added = {level: count for level, count in own.items() if level not in known}
    found = _declared_dims(env) if fills_slabs(env) else batch_dims_of(_fake(env), lead)
    return {**found, **added}


def _declared_dims(env: EnvBase) -> dict[Key, int]:
    """Return the batch dimensions of nested TensorDicts that a :class:`SystemEnv` declares.

    This does not call ``zero`` on the specs, for which tensordict imports pandas.
    """
    found: dict[Key, int] = {}
    for spec in (env.observation_spec, env.full_action_spec, env.full_done_spec):
        found |= _dims_of_spec(spec, ())
    for spec in (env.observation_spec, env.full_reward_spec, env.full_done_spec):
        found |= _dims_of_spec(spec, (NEXT,))
    return found


def _dims_of_spec(spec: Composite, level: Key) -> dict[Key, int]:
    found = {level: len(spec.shape) - 1} if len(spec.shape) > 1 else {}
    for name, value in spec.items():
        if isinstance(value, Composite):
            found |= _dims_of_spec(value, (*level, name))
    return found


def _column(spec: object, lead: int) -> SlabColumn:
    return SlabColumn(spec.dtype, tuple(spec.shape[lead:]))  # type: ignore[attr-defined]
