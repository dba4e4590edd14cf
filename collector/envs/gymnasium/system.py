"""Gymnasium's vector environments as a system, in any autoreset mode."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import gymnasium
import numpy as np
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)
from gymnasium.wrappers.vector import DictInfoToList, NormalizeObservation
from numpy.typing import NDArray
from torchrl.data import Unbounded

from tallyroll.collector.compat import (
    OBSERVATIONS,
    own_observations,
    states_of_lanes,
    widen_rewards,
)
from tallyroll.collector.envs.exact import terminated_of, truncated_of
from tallyroll.collector.envs.gymnasium.info_merge import install
from tallyroll.collector.envs.gymnasium.infos import (
    RESET_SLOT,
    InfoColumns,
    named,
    observations,
)
from tallyroll.collector.envs.gymnasium.lane_values import (
    CANNOT_TAKE,
    LaneValues,
    part_of,
    row_of,
)
from tallyroll.collector.envs.gymnasium.lanes_in_turn import LanesInTurn, traits_of
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.probe import overwrites_itself, single_env
from tallyroll.collector.envs.reuse import share_memory, sharing
from tallyroll.collector.envs.system import AtEnd, Declares, Mask, Step, System
from tallyroll.collector.envs.throwaway import distinct
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, ValueRefused
from tallyroll.collector.options import ResetSlots, one_of
from tallyroll.collector.run_plan import lending, stepping_vector
from tallyroll.collector.slab.info import Info
from tallyroll.collector.slab.names import Named

Rows = list[NDArray[Any]]

_REFUSED = {
    "gymnasium.envs.functional_jax_env": "a functional (phys2d) vector environment gives reward 1 "
    "in reset slots and loses the transitions of every other lane there; use the CPU version of "
    "the environment",
    "envpool": "EnvPool has an adapter of its own, which wrappers of Gymnasium hide: pass its "
    "environment to the collector as envpool.make gives it, or 'envpool:TASK'",
    "supersuit": "SuperSuit's vectors are wrong where agents die unevenly; pass the vector itself "
    "to the collector, which finds that out, or the PettingZoo environment",
}
_FORGETS = (
    "an AsyncVectorEnv in NEXT_STEP mode with shared_memory=False, or with a worker function of "
    "your own, may reset a lane whose episode ended once more after a reset; make it with "
    "autoreset_mode=AutoresetMode.DISABLED or SAME_STEP, or with shared_memory=True "
    "(reset_masks=True says that your own worker honours resets)"
)
_ended: WeakKeyDictionary[VectorEnv, Mask] = WeakKeyDictionary()
"""Lanes that ended in the last step, of vectors that forget resets."""
_NO_LANE = np.zeros(0, np.bool_)
_AT_END: dict[AutoresetMode, AtEnd] = {
    AutoresetMode.DISABLED: "final",
    AutoresetMode.NEXT_STEP: "reset_slot",
    AutoresetMode.SAME_STEP: "first",
}


def _forgets_resets(env: VectorEnv, mode: AutoresetMode, reset_masks: bool | None) -> bool:
    """A lane that ended, and was reset since, may reset itself once more in the next step.

    So does the worker of Gymnasium's `AsyncVectorEnv` without shared memory, from 1.1 to 1.4 at
    least. Another worker may, unless ``reset_masks`` says that it honours resets.
    """
    base = env.unwrapped
    if not isinstance(base, AsyncVectorEnv) or mode is not AutoresetMode.NEXT_STEP:
        return False
    return not reset_masks if base.worker is not None else not base.shared_memory


class GymnasiumSystem(System):
    """A ``gymnasium.vector.VectorEnv`` as a system.

    Args:
        env: the vector environment. Closing this closes it.
        reset_slots: ``"avoid"`` resets by mask right after an end in NEXT_STEP mode.
        infos: entries of ``info`` that become observations. Those without a dtype are declared by
            the first reset.
        reset_masks: whether ``reset(options={"reset_mask": …})`` resets a part of the lanes; known
            for Sync and Async, False otherwise unless it is said.

    Raises:
        ArgumentError: an argument that cannot be right.
        EnvironmentRefused: an environment that cannot be driven without losing transitions.
        SpaceError: a space that no column can hold.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        reset_slots: ResetSlots = "mask",
        infos: Sequence[Info] = (),
        reset_masks: bool | None = None,
    ) -> None:
        if not isinstance(env, VectorEnv):
            raise ArgumentError(
                f"expected a gymnasium.vector.VectorEnv, got {type(env).__name__}; make one with "
                "gymnasium.make_vec(id, num_envs=…)"
            )
        one_of("reset_slots", reset_slots, ResetSlots)
        for base in type(env.unwrapped).__mro__:
            for module, reason in _REFUSED.items():
                if base.__module__.startswith(module):
                    raise EnvironmentRefused(reason)
        self.env = env
        self.autoreset = autoreset_mode(env)
        self._takes_seeds = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        self._by_mask = self._takes_seeds if reset_masks is None else reset_masks
        wrappers = list(_wrappers(env))
        self._whole = any(isinstance(each, NormalizeObservation) for each in wrappers)
        self.forgets_resets = _forgets_resets(env, self.autoreset, reset_masks)
        self._by_mask = self._by_mask and not (self._whole or self.forgets_resets)
        self._stateful = [(each, name) for each in wrappers for name in states_of_lanes(each)]
        if any(isinstance(each, DictInfoToList) for each in wrappers) and (
            infos or self.autoreset is AutoresetMode.SAME_STEP
        ):
            raise EnvironmentRefused(
                "DictInfoToList takes infos apart, and columns of infos and, in SAME_STEP mode, "
                "final observations are read from them; leave it out"
            )
        if self.autoreset is AutoresetMode.DISABLED and not self._by_mask:
            raise EnvironmentRefused(
                f"{type(env.unwrapped).__name__} has autoreset disabled and no reset by mask, so "
                "a lane whose episode ended could not be restarted alone; use SyncVectorEnv, or "
                'pass reset_masks=True if it honours options["reset_mask"]'
            )
        if reset_slots == "avoid" and self.forgets_resets:
            raise EnvironmentRefused(_FORGETS)
        if reset_slots == "avoid" and not self._by_mask:
            raise EnvironmentRefused(
                f'reset_slots="avoid" resets lanes by mask, which {self.describe()["type"]} '
                'ignores; use reset_slots="mask"'
            )
        avoids = reset_slots == "avoid" and self.autoreset is AutoresetMode.NEXT_STEP
        self._at_end: AtEnd = "final" if avoids else _AT_END[self.autoreset]
        self._lanes = int(env.num_envs)
        self.infos = InfoColumns(infos, self._lanes)
        self._leaves = observation_leaves(env.single_observation_space, self._lanes)
        self._getters = [leaf.getter() for leaf in self._leaves]
        self._exact = [row_of(leaf) for leaf in self._leaves]
        inner: Any = env.unwrapped
        if (
            isinstance(inner, AsyncVectorEnv)
            and inner.shared_memory
            and any(leaf.text for leaf in self._leaves)
        ):
            raise EnvironmentRefused(
                "AsyncVectorEnv never reads strings from shared memory again, so each would be "
                "that of its first moment; pass shared_memory=False, and "
                "autoreset_mode=AutoresetMode.DISABLED"
            )
        self._action = action_leaf(env.single_action_space, self._lanes)
        self._rewards = rewards_of(env)
        self._one_of_many = self._rewards == (1,)
        self._values = LaneValues(env, self._rewards)
        if self.infos:
            install(env, {info.key[-1] for info in self.infos.infos})
        self._infoless = not self.infos
        self._after_end = RESET_SLOT if self._at_end == "reset_slot" else 0
        # The vector may put observations together where they are wanted: one copy less.
        self._plain = len(self._leaves) == 1 and not (self._leaves[0].path or self._leaves[0].text)
        other = not self._plain or bool(self.infos) or type(env) is not SyncVectorEnv
        other = other or not (hasattr(env, OBSERVATIONS) and own_observations(env))
        self.lent = lending(copies=bool(getattr(env, "copy", True)), other=other)
        self.lends = self.lent.way == "slab"
        self._own: Any = None
        self._in_turn: LanesInTurn | None = None  # from the first reset on
        self.declares = self._declared()

    def _declared(self) -> Declares:
        return Declares(
            lanes=self._lanes,
            observation=observations(self._leaves, self.infos),
            action={self._action.key: self._action.spec[0]},
            reward={("reward",): Unbounded(self._rewards or (1,))},
            at_end=self._at_end,
            finals="extra" if self._at_end == "first" else "returned",
            resets="mask" if self._by_mask else "all",
            parts=type(self.env) is SyncVectorEnv and self.autoreset is AutoresetMode.DISABLED,
        )

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """A system over a vector environment."""
        return cls(made) if isinstance(made, VectorEnv) else None

    @property
    def columns(self) -> Sequence[Named]:
        """Observations, and infos, also those that the first reset will declare."""
        return named(self._leaves, self.infos)

    @property
    def info_names(self) -> tuple[str, ...]:
        """Names at the root of ``info`` that columns are read from."""
        return tuple(dict.fromkeys(info.key[0] for info in self.infos.infos))

    def describe(self) -> dict[str, Any]:
        """The id, and the kind of vector."""
        spec = self.env.spec
        kind = type(self.env.unwrapped).__name__
        whole = f"NormalizeObservation({kind})" if self._whole else kind
        return {"id": spec.id if spec else None, "type": whole}

    def close(self) -> None:
        """Close the vector environment."""
        self.env.close()

    def lend(self, rows: Sequence[NDArray[Any]] | None) -> None:
        """Let a `SyncVectorEnv` put its next observations there."""
        if self._own is None:
            self._own = getattr(self.env, OBSERVATIONS)
        setattr(self.env, OBSERVATIONS, self._own if rows is None else rows[0])
        if rows is None:
            self._own = None

    # --- resets -----------------------------------------------------------------------------------

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset the lanes of a mask, or all of them."""
        self.infos.first_lane = self.first_lane
        try:
            if lanes is None:
                return self._reset_all(seeds, options.get("options"))
            return self._reset_some(lanes, options.get("options") or {})
        except ValueRefused as error:
            self._number(error)
            raise

    def _reset_some(self, lanes: Mask, given: Mapping[str, Any]) -> list[Any]:
        if self._in_turn is not None and not given and self._in_turn.are_alone:
            to = self._target(self._in_turn)
            self._in_turn.reset(lanes, to)
            return [to]
        asked = {**given, "reset_mask": lanes}
        # Some vector wrappers forget what they know of every lane, also of those that go on.
        kept = [(each, name, getattr(each, name).copy()) for each, name in self._stateful]
        obs, info = self._called(partial(self.env.reset, options=asked), first=True)
        for each, name, value in kept:
            getattr(each, name)[~lanes] = value[~lanes]
        self.infos.steps[lanes] = 0
        return self._with_infos(obs, partial(self.infos.write_reset, info=info, lanes=lanes))

    def _reset_all(self, seeds: Sequence[int] | None, options: Any) -> list[Any]:
        if self.forgets_resets and _ended.get(self.env.unwrapped, _NO_LANE).any():
            raise EnvironmentRefused(_FORGETS)
        seed = None if seeds is None else self._seed(seeds)
        call = partial(self.env.reset, seed=seed, options=options)
        obs, info = self._called(call, first=True)
        self._refuse_shared()
        traits = traits_of(self.env, infos=bool(self.infos), many_rewards=bool(self._rewards))
        self.stepped_by = stepping_vector(traits)
        self._in_turn = None
        if self.stepped_by.way == "in turn" and isinstance(self.env, SyncVectorEnv):
            self._in_turn = LanesInTurn(self.env)
        self._values.watch()
        if not self.infos.declared:
            self.infos.declare(info)
            self.declares = self._declared()
        self.infos.steps[:] = 0
        return self._with_infos(obs, partial(self.infos.write_reset, info=info))

    def _called(self, call: Callable[[], Any], *, first: bool) -> Any:
        """Call the vector and return its result, if its lanes return what they declare."""
        try:
            returned = call()
        except CANNOT_TAKE as error:
            self._values.look(first=first, raised=error)
            raise
        self._values.look(first=first)
        return returned

    def _number(self, error: ValueRefused) -> None:
        """Number the lane of ``error`` over the run."""
        if error.lane is not None:
            error.lane += self.first_lane

    def _seed(self, seeds: Sequence[int]) -> Any:
        """Return the seeds of lanes in the form that ``env.reset`` takes."""
        return seeds if self._takes_seeds else seeds[0]

    def _with_infos(self, obs: Any, write: Callable[[Rows], None]) -> list[Any]:
        values = [get(obs) for get in self._getters]
        if self.infos:
            rows = self.infos.new_rows()
            write(rows)
            values += rows
        return values

    def _refuse_shared(self) -> None:
        """Lanes that return one array for all of them overwrite each other's observations."""
        if pair := sharing(own_observations(self.env)):
            raise EnvironmentRefused(
                f"lanes {pair[0]} and {pair[1]} return their observations in the same array, so "
                "that one overwrites the other's; give each its own, or return copies"
            )

    # --- steps ------------------------------------------------------------------------------------

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes, or those of a mask."""
        try:
            if lanes is not None and not lanes.all():
                return self._step_some(action[0], np.flatnonzero(lanes))
            if self._in_turn is not None and self._in_turn.are_alone:
                lent = None if self._own is None else getattr(self.env, OBSERVATIONS)
                return self._in_turn.step(action[0], lent)
            return self._step_vector(action[0])
        except ValueRefused as error:
            self._number(error)
            raise

    def _step_vector(self, action: NDArray[Any]) -> Step:
        own = self._values
        try:
            obs, reward, terminated, truncated, info = self.env.step(action)
        except CANNOT_TAKE as error:
            own.look(first=False, raised=error)
            raise
        if self.forgets_resets:
            _ended[self.env.unwrapped] = np.logical_or(terminated, truncated)
        own.look(first=False)
        if own.watching:
            own.stepped(np.logical_or(terminated, truncated))
        if self._one_of_many:
            reward = reward[..., 0]
        if self._infoless and "final_obs" not in info:
            values = (obs,) if self._plain else [get(obs) for get in self._getters]
            return Step(values, (reward,), terminated, truncated)
        ended = np.logical_or(terminated, truncated)
        if "final_obs" not in info:
            values = self._with_infos(obs, partial(self.infos.write, info=info))
            self.infos.count(ended, self._after_end)
            return Step(values, (reward,), terminated, truncated)
        final = self._finals(ended, obs, info)
        # Lanes that ended show the infos of their reset here.
        values = self._with_infos(obs, partial(self._write_infos, info=info, ended=ended))
        self.infos.count(ended, self._after_end)
        return Step(values, (reward,), terminated, truncated, final)

    def _target(self, lanes: LanesInTurn) -> NDArray[Any]:
        """Return the memory for the next observations: the lent arrays, or new ones."""
        if self._own is None:
            return lanes.new_rows()
        lent: NDArray[Any] = getattr(self.env, OBSERVATIONS)
        return lent

    def _write_infos(self, rows: Rows, *, info: Mapping[str, Any], ended: Mask) -> None:
        self.infos.write(rows, info, ~ended)
        self.infos.write_first(rows, info, ended)

    def _finals(self, ended: Mask, obs: Any, info: Mapping[str, Any]) -> Rows:
        """The final observations of lanes that ended, in SAME_STEP mode."""
        finals = info["final_obs"]
        rows: Rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
        for lane in np.flatnonzero(ended).tolist():
            final = finals[lane] if not isinstance(finals, Mapping) else None
            for row, get, exact in zip(rows, self._getters, self._exact, strict=True):
                value = get(finals)[lane] if final is None else part_of(get, final, exact, lane)
                self._refuse_reused(lane, get, value, obs)
                row[lane] = exact.of_lane(lane, value)
        infos = self.infos.new_rows()
        self.infos.write_final(infos, info, ended)
        return rows + infos

    def _refuse_reused(self, lane: int, get: Callable[[Any], Any], final: Any, obs: Any) -> None:
        """Refuse a lane whose final observation is in the array of the next first one.

        That is a lane which returns one array each time, or a vector whose final observations
        are views of what it returns.
        """
        if not isinstance(final, np.ndarray):
            return
        held = own_observations(self.env)
        first = get(held[lane]) if held else get(obs)[lane]
        if share_memory(first, final):
            raise EnvironmentRefused(
                f"lane {lane} returns its observations in one array that it overwrites, so in "
                "SAME_STEP mode the final observation is gone when the step returns; use "
                "NEXT_STEP or DISABLED, or return copies"
            )

    def _step_some(self, action: NDArray[Any], lanes: NDArray[np.intp]) -> Step:
        """Step ``lanes`` alone, each by a call of its own."""
        assert isinstance(self.env, SyncVectorEnv)
        held: Any = own_observations(self.env)  # a reset by mask returns these of the other lanes
        rows: Rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in self._leaves]
        infos = self.infos.new_rows()
        reward = np.zeros((self._lanes, *self._rewards))
        terminated, truncated = np.zeros((2, self._lanes), np.bool_)
        for lane in lanes:
            obs, paid, over, cut, info = self.env.envs[lane].step(action[lane])
            if held:
                held[lane] = obs
            self._put_one(int(lane), [reward, terminated, truncated], (paid, over, cut))
            for row, get, exact in zip(rows, self._getters, self._exact, strict=True):
                row[lane] = exact.of_lane(int(lane), part_of(get, obs, exact, int(lane)))
            self.infos.write_one(infos, int(lane), info, False)
        self.infos.steps[lanes] += 1
        self.infos.steps[terminated | truncated] = 0
        reward = reward[..., 0] if self._one_of_many else reward
        return Step(rows + infos, (reward,), terminated, truncated)

    def _put_one(self, lane: int, to: Rows, values: Sequence[Any]) -> None:
        reward, terminated, truncated = to
        try:
            reward[lane] = self._values.reward(values[0])
            terminated[lane], truncated[lane] = terminated_of(values[1]), truncated_of(values[2])
        except ValueRefused as error:
            error.lane = lane
            raise

    # --- what it must not be ----------------------------------------------------------------------

    def require_finals(self) -> None:
        """Refuse lanes whose observations do not survive a step and reset in one call."""
        holder = vector_of_lanes(self.env) if self.autoreset is AutoresetMode.SAME_STEP else None
        if holder is None:
            return  # or its final observations are looked at as they come
        sync = isinstance(holder, SyncVectorEnv)
        child = partial(single_env, names=() if sync else self.info_names)
        for index in distinct(holder.env_fns):
            if overwrites_itself(holder.env_fns[index], child, warn=not sync):
                raise EnvironmentRefused(
                    f"environment {index} of {type(holder).__name__} returns its observations in "
                    "one array that it overwrites, and in SAME_STEP mode it is stepped and reset "
                    "in one call, so that the final observation is gone when that returns; use "
                    "NEXT_STEP or DISABLED, or return copies"
                )


def _wrappers(env: VectorEnv) -> Iterator[VectorWrapper]:
    """The vector wrappers of ``env``, outermost first."""
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


def rewards_of(env: VectorEnv) -> tuple[int, ...]:
    """The shape of a lane's reward: MO-Gymnasium's are vectors."""
    base: Any = env.unwrapped
    space = getattr(base, "reward_space", None)
    if space is None and isinstance(base, SyncVectorEnv):
        space = _reward_space(base.envs[0])
        if space is not None:
            widen_rewards(base, space.shape)
    return () if space is None else tuple(space.shape)


def _reward_space(env: Any) -> Any:
    while isinstance(env, gymnasium.Wrapper):
        if type(env).__name__ == "LinearReward":  # of MO-Gymnasium: a weighted sum
            return None
        env = env.env
    return getattr(env, "reward_space", None)


def vector_of_lanes(vector: VectorEnv) -> Any:
    """The vector in ``vector`` that made its lanes by ``env_fns``; None where there is none."""
    inner: Any = vector.unwrapped
    for _ in range(4):
        if getattr(inner, "env_fns", None):
            return inner
        held = [each for each in vars(inner).values() if isinstance(each, VectorEnv)]
        if len(held) != 1:
            return None
        inner = held[0].unwrapped
    return None


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """The autoreset mode that ``env`` declares.

    Raises:
        EnvironmentRefused: it declares none.
    """
    mode = getattr(env.unwrapped, "autoreset_mode", None)
    if mode is None:
        mode = (env.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise EnvironmentRefused(
            f"{type(env.unwrapped).__name__} does not say how it resets itself: expected "
            "env.unwrapped.autoreset_mode or env.metadata['autoreset_mode'] (gymnasium "
            f"{gymnasium.__version__}: one of {[m.value for m in AutoresetMode]})"
        )
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)
