"""Fast steps and resets by mask of a `SyncVectorEnv` inside vector wrappers.

The module steps lanes one by one and leaves the rest to the wrappers. It does not merge infos that
are empty, as most are, and reads flags and rewards lane by lane. Gymnasium wrappers that look only
at rewards and ends receive no observations.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate
from gymnasium.wrappers import vector
from numpy.typing import NDArray

from tallyroll.collector.compat import (
    ENDED,
    OBSERVATIONS,
    OWN_OBSERVATIONS,
    begin_lanes,
    count_true,
    info_merge,
    own_observations,
    states_of_lanes,
    statistics_key,
)
from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.envs.gymnasium.lane_results import InfoCall, LaneResults, entry
from tallyroll.collector.envs.gymnasium.lane_rows import Rows
from tallyroll.collector.envs.gymnasium.sequential_step import SequentialStep, traits_of
from tallyroll.collector.envs.gymnasium.vector_rules import wrappers_of
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.run_plan import Decision, stepping_vector, stepping_wrapped

_LOOK_AT_REWARDS = {
    kind: (kind.step, kind.reset)
    for kind in (
        vector.RecordEpisodeStatistics,
        vector.NormalizeReward,
        vector.TransformReward,
        vector.VectorizeTransformReward,
        vector.ClipReward,
    )
}
"""Wrappers that pass on observations, flags and infos unchanged, with their methods."""
_OF_ENDS = ("final_obs", "final_info", "_final_obs", "_final_info")


class _MergedResults(LaneResults):
    """Columns of observations, and infos that are merged as in ``env`` itself.

    The infos do not include final observations.
    """

    def __init__(self, env: SyncVectorEnv) -> None:
        super().__init__(env, None)
        self._env, self.has_infos = env, True
        self.infos: dict[str, Any] = {}

    def begin(self, row: Any) -> Rows:
        """Begin a step, with empty infos."""
        self.infos = {}
        return super().begin(row)

    def begin_reset(self) -> Rows:
        """Begin a reset of some lanes, with empty infos."""
        self.infos = {}
        return super().begin_reset()

    def put_info(self, lane: int, info: Any, of: int) -> None:
        """Merge the info of a lane, unless it is empty."""
        if info:
            info = {"final_info": info} if of == InfoCall.LAST else info
            self.infos = info_merge(self._env)(self.infos, info, lane)

    def entries(self) -> tuple[Any, ...]:
        """Return an entry that matches only empty infos; :meth:`put_info` receives the others."""
        return (entry((), None, "empty"),)


class _AsTheVector(_MergedResults):
    """Observations and infos of a step, merged as in ``env`` itself."""

    def __init__(self, env: SyncVectorEnv) -> None:
        super().__init__(env)
        self.address = 0

    def begin(self, row: Any) -> Rows:
        """Begin a step that writes observations to ``row``, the vector's own array."""
        self.infos, self._columns = {}, [row]
        self.plain = row if self._is_plain else None
        return self._columns

    def put(self, seen: Any) -> None:
        """Write the observation of each lane."""
        if self._is_plain:
            super().put(seen)
            return
        env, rows = self._env, self._columns[0]
        setattr(env, OBSERVATIONS, concatenate(env.single_observation_space, seen, rows))

    def put_final(self, lane: int, obs: Any) -> None:
        """Do nothing: :meth:`put_info` handles the final observation."""

    def put_info(self, lane: int, info: Any, of: int) -> None:
        """Merge the info of a lane and, if its episode ended, the final observation."""
        if not (info or of):
            return
        if of == InfoCall.LAST:
            seen = own_observations(self._env)[lane]
            info = {"final_obs": seen, "final_info": info}
        if info:
            self.infos = info_merge(self._env)(self.infos, info, lane)


class WithinWrappers(SequentialStep):
    """Steps the vector inside the wrappers ``env``, through :meth:`call` and :meth:`call_reset`.

    Between two calls the vector is unchanged, as its user made it.
    """

    def __init__(self, env: VectorEnv, rewards: torch.dtype | None) -> None:
        base: Any = env.unwrapped
        self._wrapped, self._merged = env, _AsTheVector(base)
        super().__init__(base, results=self._merged, rewards=rewards)
        self._as_the_vector = self._step_as_the_vector  # bound once, to compare by identity
        self._resets_as_the_vector = self._reset_as_the_vector
        self.checked = False
        """True if the observations of the last step were validated."""

    def __reduce__(self) -> Any:
        return type(self), (self._wrapped, self._reward_dtype)

    def call(self, action: NDArray[Any]) -> Any:
        """Return the result of ``step`` of the wrappers."""
        own, ours = self._own, self._as_the_vector
        self.checked = False
        if own.get("step", ours) is not ours:  # user code replaced it
            return self._wrapped.step(action)
        try:
            own["step"] = ours
            return self._wrapped.step(action)
        finally:
            own.pop("step", None)

    def call_reset(self, lanes: Mask, options: dict[str, Any]) -> Any:
        """Return the result of ``reset`` of the wrappers for ``lanes``, the mask in ``options``."""
        own, ours = self._own, self._resets_as_the_vector
        if own.get("reset", ours) is not ours:  # user code replaced it
            return self._wrapped.reset(options=options)
        try:
            own["reset"], self._asked = ours, lanes
            return self._wrapped.reset(options=options)
        finally:
            own.pop("reset", None)

    def _step_as_the_vector(self, actions: Any) -> Any:
        """Return copies of the results, like the vector's own ``step``."""
        own = self._own
        out = self.step_into(actions, own[OBSERVATIONS], None)
        assert out is not None, "there is no slot"
        self.checked = self._merged.plain is not None
        obs = self._copied(own[OBSERVATIONS])
        flags = out.terminated.copy(), out.truncated.copy()
        return obs, out.reward[0].copy(), *flags, self._merged.infos

    def _reset_as_the_vector(self, *, seed: Any = None, options: Any = None) -> Any:
        """Reset the requested lanes and return the result, like the vector's own ``reset``."""
        env, own, lanes, merged = self._env, self._own, self._asked, self._merged
        if seed is not None or not (options and options.get("reset_mask") is lanes):
            return SyncVectorEnv.reset(env, seed=seed, options=options)
        del options["reset_mask"]
        own[ENDED][lanes] = False
        held = own[OWN_OBSERVATIONS]
        merged.begin(own[OBSERVATIONS])
        for i in lanes.nonzero()[0].tolist():
            held[i], info = env.envs[i].reset(seed=None, options=options)
            merged.put_info(i, info, InfoCall.RESET)
        space, rows = env.single_observation_space, own[OBSERVATIONS]
        own[OBSERVATIONS] = concatenate(space, held, rows)
        return self._copied(own[OBSERVATIONS]), merged.infos

    def _copied(self, obs: Any) -> Any:
        """Return observations in the form in which the vector returns them."""
        if not self._own["copy"]:
            return obs
        return obs.copy() if type(obs) is np.ndarray else deepcopy(obs)


class ThroughWrappers(SequentialStep):
    """Steps lanes one by one inside wrappers that look only at rewards and ends.

    If no episode begins or ends in a step, the class itself adds the step to the wrappers'
    statistics. Other steps go through the wrappers' own ``step``, without observations, and final
    observations stay out of the infos. A reset by mask restarts the requested lanes and their part
    of the statistics.

    Args:
        env: the wrappers around a vector.
        infos: entries of the wrappers' infos that are columns.
        reset_slots: True if the end of an episode needs no work, because the next slot is a reset.
        given: the lanes, if their resets use drawn seeds and options; None otherwise.
        rewards: dtype of the reward column.
    """

    fills_slots = False

    def __init__(
        self,
        env: VectorEnv,
        infos: InfoColumns,
        *,
        reset_slots: bool = False,
        given: list[Any] | None = None,
        rewards: torch.dtype | None = None,
    ) -> None:
        base: Any = env.unwrapped
        self._wrapped, self._columns, self._merged = env, infos, _MergedResults(base)
        wrappers: list[Any] = [*wrappers_of(env)]
        self._own_names = [vars(each) for each in wrappers]
        self._states = [(each, name) for each in wrappers for name in states_of_lanes(each)]
        kinds = vector.RecordEpisodeStatistics, vector.NormalizeReward
        self._inner_first = wrappers[::-1]
        self._counting = [each for each in wrappers if type(each) is kinds[0]]
        # True if steps between ends only add to returns and lengths.
        self._adds = not any(type(each) is kinds[1] for each in wrappers)
        self._told, self._told_last, self._untold = (infos.new_rows() for _ in range(3))
        # True if wrappers add all entries, and only at the ends of episodes.
        self._of_ends = all(each.fill is not None and len(each.key) > 1 for each in infos.infos)
        super().__init__(
            base, reset_slots=reset_slots, results=self._merged, given=given, rewards=rewards
        )
        self._as_returned = self._what_was_returned  # bound once, to compare by identity
        self._asked: Any = None
        self._returned: Any = None

    def __reduce__(self) -> Any:
        made = partial(type(self), reset_slots=self._reset_slots, rewards=self._reward_dtype)
        return made, (self._wrapped, self._columns)

    @property
    def are_alone(self) -> bool:
        """True if no ``step`` or ``reset`` of the vector and its wrappers was replaced."""
        own, ours = self._own, self._as_returned
        if "reset" in own or own.get("step", ours) is not ours:
            return False
        for own in self._own_names:  # noqa: SIM110  `all` takes three times as long
            if "step" in own or "reset" in own:
                return False
        return True

    def step(self, action: NDArray[Any]) -> Step:
        """Step every lane, and return the wrappers' rewards and the info columns."""
        out, infos, info = self.step_into(action, None, None), self._columns, self._merged.infos
        assert out is not None, "there is no slot"
        obs, (reward,), terminated, truncated, final = out[:5]
        ended, reward, are_told = self._own[ENDED], reward.copy(), bool(info)
        if self._adds and self._are_between(ended):
            for each in self._inner_first:
                if type(each) is vector.RecordEpisodeStatistics:
                    each.episode_returns += reward
                    each.episode_lengths += 1
                else:
                    reward = each.rewards(reward)
        else:
            reward = self._by_wrappers(action, (None, reward, terminated, truncated, info))
        if not infos:
            return Step(obs, (reward,), terminated, truncated, final)
        told = self._told if info else self._untold
        if final is None:
            infos.write(told, info)
        else:
            infos.write_final(self._told_last, info, ended)
            final = [*final, *self._told_last]
            # Lanes that ended show the infos of their reset here.
            if are_told or not self._of_ends:
                infos.write_shown(told, info, ended)
            else:
                infos.write(told := self._untold, {})
        return Step([*obs, *told], (reward,), terminated, truncated, final)

    def _are_between(self, ended: Mask) -> bool:
        """Return True if no episode begins or ends in this step, according to the statistics."""
        for each in self._counting:
            if count_true(ended) or count_true(each.prev_dones):
                return False
        return True

    def _by_wrappers(self, action: Any, returned: tuple[Any, ...]) -> Any:
        """Return the rewards of the wrappers' own ``step`` if the vector returns ``returned``."""
        own = self._own
        try:
            own["step"], self._asked, self._returned = self._as_returned, action, returned
            return self._wrapped.step(action)[1]
        finally:
            own.pop("step", None)

    def _what_was_returned(self, actions: Any) -> Any:
        """Return the stored results to the wrappers, in place of the vector's ``step``."""
        if actions is not self._asked:  # an interrupt left this method in place
            self._own.pop("step", None)
            return self._env.step(actions)
        return self._returned

    def reset(self, lanes: Mask) -> Rows:
        """Reset ``lanes`` and their statistics, and return columns with their rows."""
        rows, infos = super().reset(lanes), self._columns
        for each, name in self._states:
            begin_lanes(each, name, lanes)
        if not infos:
            return rows
        info = self._merged.infos
        if info or not self._of_ends:
            told = infos.new_rows()
            infos.write_reset(told, info, lanes)
        else:
            infos.write(told := self._untold, {})
        return [*rows, *told]


def stepping_of(env: VectorEnv, *, infos: bool, many_rewards: bool) -> Decision:
    """Choose how the lanes of ``env`` are stepped; see `run_plan.stepping_vector`."""
    found = stepping_vector(traits_of(env, infos=infos, many_rewards=many_rewards))
    if not isinstance(env, VectorWrapper):
        return found
    inner = stepping_vector(traits_of(env.unwrapped, infos=True, many_rewards=many_rewards))
    others = [type(each).__name__ for each in wrappers_of(env) if not _looks_at_rewards(each)]
    return stepping_wrapped(found, inner, others)


def _looks_at_rewards(wrapper: VectorWrapper) -> bool:
    """Return True if ``wrapper`` is a Gymnasium wrapper that looks only at rewards and ends."""
    kind: Any = type(wrapper)
    known = _LOOK_AT_REWARDS.get(kind) == (kind.step, kind.reset)
    return known and statistics_key(wrapper) not in _OF_ENDS
