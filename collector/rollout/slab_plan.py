"""Plan the slab of an environment and a policy, and choose the driver that fills it."""

from collections.abc import Mapping
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
from tallyroll.collector.slab.slab import Slab, SlabColumn, SlabColumns
from tallyroll.storage.rows.batch_dims import batch_dims_of
from tallyroll.storage.rows.dtypes import SIGNED
from tallyroll.storage.rows.keys import (
    COLLECTOR,
    DONE,
    IS_INIT,
    NEXT,
    NEXT_VALID,
    POLICY_ID,
    POLICY_VERSIONS,
    TERMINATED,
    TRUNCATED,
    VALID,
    Key,
    as_key,
    format_key,
    next_valid_keys,
)

MOST_SLOTS = 4096
SLAB_BYTES = 256 * 2**20
"""The size that a slab has at most, roughly; longer batches need several fills."""


@dataclass(frozen=True)
class SlabPlan:
    """The plan of a slab and of its rows, for an environment and a policy."""

    layout: SlabColumns
    extra: tuple[Key, ...]
    """Columns that the policy writes beside the action."""
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
    """True for an environment that writes in place and has reset slots."""
    marked: bool
    """True if the environment marks which slots are transitions."""
    inits: tuple[Key, ...] = ()
    """Columns that are True where a trajectory begins."""
    arrivals: int = 0
    """Rows of a slot if lanes return in any order; 0 if every lane has a column of its own."""
    flags: tuple[Key, ...] = ()
    """Done flags that the environment declares, by their names at the root.

    Empty except in TorchRL's layout: otherwise workers may differ in them.
    """
    batched: bool = True
    """False for an environment without a lane dimension in TorchRL's layout."""
    notes: tuple[str, ...] = ()
    """Warnings for users of the rows."""
    masks: tuple[MaskRule, ...] = ()
    """Masks of legal actions among the columns."""
    fault: str | None = None
    """How the environment falsifies ends of episodes, which only TorchRL's layout accepts."""
    ticks: int | None = field(default=1, compare=False)
    """Simulator ticks of a transition, as the environment reports them; None: unknown."""
    spaces: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """Spaces of observations and actions as JSON, by column names; workers may differ in them."""

    def executed(self, slab: Slab, start: int, stop: int, pending: NDArray[np.bool_]) -> Mask:
        """Mark the slots ``[start, stop)`` of ``slab`` that are transitions ``[time, lane]``.

        ``pending`` are the lanes that ended in the slot before them.
        """
        if self.reset_slots:
            return next_step_transitions(ended_in(slab, start, stop), pending)
        if self.marked:
            return slab.transitions[start:stop].copy()
        return np.ones((stop - start, slab.lanes), np.bool_)

    def slots(self, lanes: int, frames: int, slabs: int = 1) -> int:
        """Return enough slots for ``frames``, even if every second one is a reset slot.

        A bound may make it fewer: `MOST_SLOTS`, and about `SLAB_BYTES` for ``slabs`` slabs.
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
        """Return the rows of a slot of an environment with ``lanes`` lanes."""
        return self.arrivals or lanes

    def slab(self, slots: int, lanes: int, **options: Any) -> Slab:
        """Make a slab of ``slots`` slots; ``options`` are the others of :class:`Slab`."""
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
            "policy: several policies act in lanes that step together, and lanes of this "
            "environment come back in any order; give one policy"
        )
    if policy is None or options.init_random_frames or policy.draws:
        require_masks(env)  # one of several policies may draw in the trial
    if policy is not None:
        with torch.no_grad(), set_exploration_type(options.exploration_type), keep_streams(several):
            if several is None:
                settle_inputs(policy, first, env, _given(env))
            else:
                strict = options.checks.validate == "raise"
                several.try_parts(first, env, _given(env), strict=strict)
            extra = try_out(policy, first, env, strict=options.checks.validate == "raise")
    if in_place and next_keys(extra):
        raise PolicyError(
            f"the policy writes {[format_key(key) for key in next_keys(extra)]}, which must be "
            "carried from step to step and reset with each lane; add its primer to the "
            "environment: TransformedEnv(env, InitTracker(), policy.make_tensordict_primer())"
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
    return SlabPlan(
        layout={**extra, **layout},
        extra=tuple(extra),
        flowing=env.stepper.observation_keys if in_place and not arrivals else (),
        shared=in_place and env.stepper.declares.has_reset_slots and not arrivals,
        rewards=tuple((NEXT, *as_key(key)) for key in env.full_reward_spec.keys(True, True)),
        lost_finals=(options.checks.finals == "lost" or loses_finals(env))
        and not next_valid_keys(layout),  # there the environment marks them
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
        masks=tuple(rule for rule in rules_of(env) if {rule.mask, rule.action} <= {*layout}),
        fault=known_fault(env, options.max_frames_per_traj, options.checks.finals == "lost")
        if torchrl  # in other layouts it was refused before
        else None,
        ticks=ticks_of(env) if options.columns.frame_skip is None else 1,
        spaces=spaces_of(env, layout, options),
    )


def _require_values(columns: SlabColumns, error: type[CollectorError], maker: str) -> None:
    """Refuse columns without values, which no storage can hold."""
    for key, column in columns.items():
        if 0 in column.shape:
            raise error(
                f"{format_key(key)}: expected at least one value, got the shape "
                f"{list(column.shape)} of {maker}; leave it out there, or in a wrapper"
            )


def _given(env: EnvBase) -> list[Key]:
    """Return the observations that a policy of tensors may get."""
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
    """Make the driver that ``plan`` was made for.

    ``rng`` draws for each of ``run_lanes``, the lanes of the run, so that every process with an
    equal ``rng`` draws the same; with None it draws only for the lanes of ``env``.
    """
    columns = plan.arrivals or None
    if POLICY_ID in plan.layout and isinstance(policy, SeveralPolicies):
        ids = torch.from_numpy(np.asarray(policy.policy_of_lane))
        slab.columns[POLICY_ID][:] = ids.to(torch.int32)
    random = RandomActions(env, rng, run_lanes, slab.first_lane, columns)
    lanes: Lanes
    if plan.arrivals:
        lanes = ArrivingLanes(env, slab, plan.extra, board, by_policy=policy is not None)
        random.acting = lanes.acting
    elif plan.in_place:
        lanes = SystemLanes(env, slab, board)
    else:
        lanes = CopiedLanes(env, slab, (*plan.extra, POLICY_ID), board)
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
    """Return the columns of contexts and seeds, if resets get any."""
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
                f"{shown} is {type(spec).__name__}, which no column can hold; where it is a "
                f'string, TransformedEnv(env, FixedWidth({{"{shown}": bytes}})) makes one of it, '
                f'and TransformedEnv(env, ExcludeTransform("{shown}")) leaves it out'
            )
        if -1 in spec.shape:
            raise EnvironmentRefused(
                f"{shown} has no fixed shape ({list(spec.shape)}), and a column has one; around "
                f'each single environment, TransformedEnv(env, FixedWidth({{"{shown}": shape}})) '
                "fills shorter ones with zeros"
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
        raise EnvironmentRefused("the environment declares no done and terminated at its root")
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
            f"TorchRL's own environments and transforms need operations that torch lacks for the "
            f"dtype of {hard} ({error}); leave transforms out, or cast in a wrapper underneath, "
            "as gymnasium.wrappers.DtypeObservation(env, np.int32)"
        ) from error


def nested_dones(env: EnvBase) -> tuple[Key, ...]:
    """Return columns of the done flags that ``env`` declares below the root: those of groups."""
    keys = (as_key(key) for key in env.full_done_spec.keys(True, True))
    ends = ("terminated", "truncated")
    return tuple((NEXT, *key) for key in keys if len(key) > 1 and key[-1] not in ends)


def init_columns(env: EnvBase, layout: SlabColumns) -> tuple[Key, ...]:
    """Return the columns that mark where a trajectory begins; trackers may rename them."""
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
    """Return those of a :class:`SystemEnv`, without zeros, for which tensordict imports pandas."""
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
