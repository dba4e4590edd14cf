"""System for Gymnasium's vector environments, in any autoreset mode."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray
from torchrl.data import Unbounded

from tallyroll.collector.compat import own_observations
from tallyroll.collector.envs.calls.vectors import reached_vector
from tallyroll.collector.envs.exact import terminated_of, truncated_of
from tallyroll.collector.envs.failures import watch_processes
from tallyroll.collector.envs.frame_skips import product, ticks_of_layer
from tallyroll.collector.envs.gymnasium.info_masks import InfoMasks, masks_declared
from tallyroll.collector.envs.gymnasium.info_merge import install
from tallyroll.collector.envs.gymnasium.infos import RESET_SLOT, InfoColumns, named, observations
from tallyroll.collector.envs.gymnasium.lane_rows import LaneRows, Rows, refuse_overwriting
from tallyroll.collector.envs.gymnasium.lane_values import CANNOT_TAKE, LaneValues
from tallyroll.collector.envs.gymnasium.seeded_resets import KEPT, SeededResets, takes_resets
from tallyroll.collector.envs.gymnasium.sequential_step import SequentialStep
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.gymnasium.vector_rules import (
    FORGETS,
    VectorRules,
    refuse_shared,
    refuse_texts,
    rewards_of,
    wrappers_of,
)
from tallyroll.collector.envs.gymnasium.wrapper_step import (
    ThroughWrappers,
    WithinWrappers,
    stepping_of,
)
from tallyroll.collector.envs.system import Declares, Into, Mask, Step, System
from tallyroll.collector.errors import EnvironmentRefused, ValueRefused
from tallyroll.collector.options.objects import ResetSlots
from tallyroll.collector.policies.random_actions import MASK_NAME
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import NamedColumn

_ended: WeakKeyDictionary[VectorEnv, Mask] = WeakKeyDictionary()
"""Lanes that ended in the last step, for vectors that forget resets."""
_NO_LANE = np.zeros(0, np.bool_)


class GymnasiumSystem(System):
    """System over a ``gymnasium.vector.VectorEnv``.

    Args:
        env: the vector environment. Closing the system closes it.
        reset_slots: ``"avoid"`` resets by mask right after an end in NEXT_STEP mode.
        infos: entries of ``info`` that become observations. The first reset declares those without
            a dtype.
        reset_masks: True if ``reset(options={"reset_mask": …})`` resets some of the lanes. None
            selects True for SyncVectorEnv and AsyncVectorEnv, and False otherwise.

    Raises:
        ArgumentError: an argument is invalid.
        EnvironmentRefused: the environment cannot be driven without losing transitions.
        SpaceError: no column can hold a space.
    """

    kept_options = KEPT

    def __init__(
        self,
        env: VectorEnv,
        *,
        reset_slots: ResetSlots = "mask",
        infos: Sequence[Info] = (),
        reset_masks: bool | None = None,
    ) -> None:
        watch_processes(env.unwrapped)
        self._rules = rules = VectorRules.of(env, reset_slots, reset_masks, bool(infos))
        self.env, self.reached = env, reached_vector(env)
        self.autoreset, self.forgets_resets = rules.autoreset, rules.forgets_resets
        self._lanes = int(env.num_envs)
        self.infos = InfoColumns(infos, self._lanes)
        space = env.single_observation_space
        leaves = observation_leaves(space, self._lanes, getattr(env, "observation_space", None))
        self._rows = LaneRows(leaves)
        if any(leaf.text for leaf in self._rows.leaves):
            refuse_texts(env)
        actions = getattr(env, "action_space", None)
        self._action = action_leaf(env.single_action_space, self._lanes, actions)
        self._rewards = rewards_of(env)
        self._one_of_many = self._rewards == (1,)
        self._values = LaneValues(env, self._rewards)
        if self.infos:
            install(env, {info.key[-1] for info in self.infos.infos})
        *self._takes, self.why_no_resets = takes_resets(env, rules)
        self._given = SeededResets(self, env.unwrapped)
        self._infoless, self._infos_of_step = not self.infos, Rows()
        self._after_end = RESET_SLOT if rules.at_end == "reset_slot" else 0
        first = self._rows.leaves[0]
        self._plain = len(self._rows.leaves) == 1 and not (first.path or first.text)
        self._in_turn: SequentialStep | None = None  # from the first reset on
        self._into: Into | None = None
        self._within: WithinWrappers | None = None
        self._masks: InfoMasks | None = None
        self.declares = self._declared()

    def _declared(self) -> Declares:
        return Declares(
            lanes=self._lanes,
            observation=observations(self._rows.leaves, self.infos),
            action={self._action.key: self._action.spec[0]},
            reward={("reward",): Unbounded(self._rewards or (1,))},
            at_end=self._rules.at_end,
            finals="extra" if self._rules.at_end == "first" else "returned",
            resets="mask" if self._rules.by_mask else "all",
            reset_seeds=self._takes[0],
            options=self._takes[1],
            parts=type(self.env) is SyncVectorEnv and self.autoreset is AutoresetMode.DISABLED,
            of_lanes={
                each.key: each.spec
                for each in (*self._rows.leaves, self._action)
                if each.spec != each.spec[0].expand(each.spec.shape)
            },
        )

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return a system over ``made`` if that is a vector environment; otherwise None."""
        return cls(made) if isinstance(made, VectorEnv) else None

    @property
    def columns(self) -> Sequence[NamedColumn]:
        """Columns of observations and infos, including infos that the first reset will declare."""
        return named(self._rows.leaves, self.infos)

    @property
    def ticks(self) -> int | None:
        """Ticks per transition, from the lanes' environments and the vector's wrappers."""
        own = map(ticks_of_layer, wrappers_of(self.env))
        return product([super().ticks, *own, ticks_of_layer(self.env.unwrapped)])

    @property
    def info_names(self) -> tuple[str, ...]:
        """Names at the root of ``info`` from which columns are read."""
        return tuple(dict.fromkeys(info.key[0] for info in self.infos.shown))

    def describe(self) -> dict[str, Any]:
        """Return the id and the kind of vector."""
        spec = self.env.spec
        return {"id": spec.id if spec else None, "type": self._rules.name_of(self.env)}

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    # --- resets -----------------------------------------------------------------------------------

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset the lanes of a mask, or all of them."""
        self.infos.number_from(self.first_lane)
        try:
            if lanes is None:
                values = self._reset_all(seeds, options.get("options"))
            else:
                values = self._reset_some(lanes, options.get("options") or {})
            return values if self._masks is None else self._masks.reset(values, lanes)
        except ValueRefused as error:
            if error.lane is not None:
                error.locate(lane=error.lane + self.first_lane)
            raise

    def _reset_some(self, lanes: Mask, given: Mapping[str, Any]) -> list[Any]:
        if self._in_turn is not None and not given and self._in_turn.are_alone:
            self.infos.steps[lanes] = 0
            return self._in_turn.reset(lanes)
        asked = {**given, "reset_mask": lanes}
        # A reset clears the state of some vector wrappers even for lanes that continue.
        kept = [(each, name, getattr(each, name).copy()) for each, name in self._rules.stateful]
        seed = None if self.next_seeds is None else self._seed(self.next_seeds.tolist())
        call = partial(self.env.reset, seed=seed, options=asked)
        if self._within is not None:
            call = partial(self._within.call_reset, lanes, asked)
        obs, info = self._called(call, first=True)
        others = ~lanes
        for each, name, value in kept:
            np.copyto(getattr(each, name), value, where=others)
        self.infos.steps[lanes] = 0
        return self._with_infos(
            obs, partial(self.infos.write_reset, info=info, lanes=lanes), reset=True
        )

    def _reset_all(self, seeds: Sequence[int] | None, options: Any) -> list[Any]:
        if self.forgets_resets and _ended.get(self.env.unwrapped, _NO_LANE).any():
            raise EnvironmentRefused(FORGETS)
        seed = None if seeds is None else self._seed(seeds)
        call = partial(self.env.reset, seed=seed, options=options)
        given = self._given.begin().lanes
        obs, info = self._called(call, first=True)
        refuse_shared(self.env)
        self._look_for_masks(info)
        many = bool(self._rewards)
        self.stepped_by = stepping_of(self.env, infos=bool(self.infos), many_rewards=many)
        self._values.read_rewards_as(self.reward_dtype)
        self._values.watch()
        self._in_turn = self._into = self._within = None
        how: Any = {"reset_slots": self._after_end == RESET_SLOT, "given": given}
        how["rewards"] = self.reward_dtype
        if self.stepped_by.way == "in turn" and isinstance(self.env, SyncVectorEnv):
            self._in_turn = SequentialStep(self.env, self.infos or None, **how)
            if self._in_turn.fills_slots and type(self).step is GymnasiumSystem.step:
                self._into = self._step_into
        elif self.stepped_by.way == "through":
            self._in_turn = ThroughWrappers(self.env, self.infos, **how)
        elif self.stepped_by.way == "within":
            self._within = WithinWrappers(self.env, self.reward_dtype)
        self._infos_of_step = self.infos.new_rows()
        self.infos.steps[:] = 0
        return self._with_infos(obs, partial(self.infos.write_reset, info=info), reset=True)

    def _look_for_masks(self, info: Any) -> None:
        """Declare infos from a first reset, and track masks of legal actions from then on."""
        if not self.infos.declared:
            self.infos.declare(info)
            self.declares = self._declared()
        wanted = self.wants_masks and self._masks is None
        mask = masks_declared(info, self._rows.leaves, self._lanes, wanted=wanted)
        if mask is not None:
            self.infos, self._infoless = self.infos.with_mask(mask), False
            self._masks = InfoMasks(self._action, self.declares, mask)
            self.legal = self._masks.legal
            install(self.env, {MASK_NAME})
        if self._masks is not None:
            self._masks.number_from(self.first_lane)

    def _called(self, call: Callable[[], Any], *, first: bool) -> Any:
        """Call the vector and return its result, after validating the lanes' observations."""
        try:
            with self._given:
                returned = call()
        except CANNOT_TAKE as error:
            self._values.look(first=first, raised=error)
            raise
        self._values.look(first=first)
        return returned

    def _seed(self, seeds: Sequence[int]) -> Any:
        """Return seeds, one per lane, in the form that ``env.reset`` accepts."""
        return seeds if self._rules.takes_seeds else seeds[0]

    def _with_infos(
        self, obs: Any, write: Callable[[Rows], None], *, reset: bool = False
    ) -> list[Any]:
        values = self._rows.values(obs)
        if self._infoless:
            return values
        rows = self.infos.new_rows() if reset else self._infos_of_step
        write(rows)
        return values + rows

    # --- steps ------------------------------------------------------------------------------------

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes, or those of a mask."""
        try:
            if lanes is not None and not lanes.all():
                out = self._step_some(action[0], np.flatnonzero(lanes))
                return out if self._masks is None else self._masks.step(out, lanes)
            if self._in_turn is not None and self._in_turn.are_alone:
                out = self._in_turn.step(action[0])
                if not self._infoless:
                    self.infos.count(out.terminated, out.truncated, self._after_end)
            else:
                out = self._step_vector(action[0])
            return out if self._masks is None else self._masks.step(out)
        except ValueRefused as error:
            if error.lane is not None:
                error.locate(lane=error.lane + self.first_lane)
            raise

    @property
    def into(self) -> Into | None:
        """Function that steps lanes straight into a slot; None if :meth:`step` was replaced."""
        return None if "step" in vars(self) else self._into

    def _step_into(self, action: NDArray[Any], row: NDArray[Any], slot: bytes) -> Step | None:
        """Step all lanes and write the results to a slot; see `SequentialStep.step_into`."""
        turn = self._in_turn
        if turn is None or not turn.are_alone:
            return self.step((action,))
        try:
            return turn.step_into(action, row, slot)
        except ValueRefused as error:
            if error.lane is not None:
                error.locate(lane=error.lane + self.first_lane)
            raise

    def _step_vector(self, action: NDArray[Any]) -> Step:
        own, within = self._values, self._within
        call = self.env.step if within is None else within.call
        try:
            if self._given.lanes is None:
                obs, reward, terminated, truncated, info = call(action)
            else:
                with self._given:
                    obs, reward, terminated, truncated, info = call(action)
        except CANNOT_TAKE as error:
            own.look(first=False, raised=error)
            raise
        if self.forgets_resets:
            _ended[self.env.unwrapped] = np.logical_or(terminated, truncated)
        if within is None or not within.checked:
            own.look(first=False)
        if own.watching:
            own.stepped(np.logical_or(terminated, truncated))
        if self._one_of_many:
            reward = reward[..., 0]
        if "final_obs" not in info:
            values = [obs] if self._plain else self._rows.values(obs)
            if not self._infoless:
                self.infos.write(self._infos_of_step, info)
                self.infos.count(terminated, truncated, self._after_end)
                values += self._infos_of_step
            return Step(values, (reward,), terminated, truncated)
        ended = np.logical_or(terminated, truncated)
        there = info.get("_final_obs")
        final = self._rows.finals(self.env, ended, obs, info["final_obs"], there)
        if self._infoless:
            return Step(self._rows.values(obs), (reward,), terminated, truncated, final)
        of_last = self.infos.new_rows()
        self.infos.write_final(of_last, info, ended)
        # Lanes that ended show the infos of their reset here.
        values = self._with_infos(obs, partial(self.infos.write_shown, info=info, ended=ended))
        self.infos.count(terminated, truncated, self._after_end)
        return Step(values, (reward,), terminated, truncated, final + of_last)

    def _step_some(self, action: NDArray[Any], lanes: NDArray[np.intp]) -> Step:
        """Step only ``lanes``, each in a separate call."""
        assert isinstance(self.env, SyncVectorEnv)
        held: Any = own_observations(self.env)  # a reset by mask returns these for other lanes
        rows, infos = self._rows.new(), self.infos.new_rows()
        reward = np.zeros((self._lanes, *self._rewards))
        terminated, truncated = np.zeros((2, self._lanes), np.bool_)
        for lane in lanes:
            obs, paid, over, cut, info = self.env.envs[lane].step(action[lane])
            if held:
                held[lane] = obs
            try:
                reward[lane] = self._values.reward(paid)
                terminated[lane], truncated[lane] = terminated_of(over), truncated_of(cut)
            except ValueRefused as error:
                error.locate(lane=int(lane))
                raise
            self._rows.put(rows, int(lane), obs)
            self.infos.write_one(infos, int(lane), info, False)
        self.infos.steps[lanes] += 1
        self.infos.steps[terminated | truncated] = 0
        reward = reward[..., 0] if self._one_of_many else reward
        return Step(rows + infos, (reward,), terminated, truncated)

    # --- checks -----------------------------------------------------------------------------------

    def require_finals(self) -> None:
        """Raise if the observations of a lane do not survive a step and a reset in one call."""
        if self.autoreset is AutoresetMode.SAME_STEP:
            refuse_overwriting(self.env, self.info_names)
