"""Steps and resets by mask of a `SyncVectorEnv` within wrappers: lanes in turn, the rest as ever.

Most infos of lanes are empty, and are not merged; flags and rewards are read as they come.
"""

from copy import deepcopy
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv, VectorEnv, VectorWrapper
from gymnasium.vector.utils import concatenate
from numpy.typing import NDArray

from tallyroll.collector.compat import (
    ENDED,
    OBSERVATIONS,
    OWN_OBSERVATIONS,
    info_merge,
    own_observations,
)
from tallyroll.collector.envs.gymnasium.lane_results import LaneResults, Of
from tallyroll.collector.envs.gymnasium.lane_rows import Rows
from tallyroll.collector.envs.gymnasium.lanes_in_turn import LanesInTurn, traits_of
from tallyroll.collector.envs.system import Mask
from tallyroll.collector.run_plan import Decision, stepping_vector, stepping_wrapped
from tallyroll.storage.engine.kernel import table_of

_EMPTY = 3
"""The kind of an entry that is an empty dictionary; see `Kernel.step_lanes`."""


class _AsTheVector(LaneResults):
    """Observations and infos of a step, put together as ``env`` itself does."""

    def __init__(self, env: SyncVectorEnv) -> None:
        super().__init__(env, None)
        self._env, self.tells, self.address = env, True, 0
        self.infos: dict[str, Any] = {}

    def begin(self, lent: Any) -> Rows:
        """Begin a step whose observations are put into ``lent``, the vector's own."""
        self.infos, self._columns = {}, [lent]
        self.plain = lent if self._is_plain else None
        return self._columns

    def put(self, seen: Any) -> None:
        """Write the observation of each lane."""
        if self._is_plain:
            super().put(seen)
            return
        env, rows = self._env, self._columns[0]
        setattr(env, OBSERVATIONS, concatenate(env.single_observation_space, seen, rows))

    def put_final(self, lane: int, obs: Any) -> None:
        """Leave the final observation to :meth:`tell`."""

    def tell(self, lane: int, info: Any, of: int) -> None:
        """Merge the info of a lane, and in the step of an end the final observation."""
        if not (info or of):
            return
        if of == Of.LAST:
            seen = own_observations(self._env)[lane]
            info = {"final_obs": seen, "final_info": info}
        if info:
            self.infos = info_merge(self._env)(self.infos, info, lane)

    def entries(self) -> tuple[Any, ...]:
        """Return one that only an empty info is, so that others are handed to :meth:`tell`."""
        return (((), None, table_of([0, 0, _EMPTY, 0])),)


class WithinWrappers(LanesInTurn):
    """The vector inside of ``env``, which wraps it: :meth:`call` and :meth:`call_reset` drive it.

    Between two calls the vector is as its user made it.
    """

    def __init__(self, env: VectorEnv) -> None:
        base: Any = env.unwrapped
        self._wrapped, self._merged = env, _AsTheVector(base)
        super().__init__(base, results=self._merged)
        self._as_the_vector = self._step_as_the_vector  # one object
        self._resets_as_the_vector = self._reset_as_the_vector
        self.checked = False
        """The last step took observations that were as declared."""

    def __reduce__(self) -> Any:
        return type(self), (self._wrapped,)

    def call(self, action: NDArray[Any]) -> Any:
        """Return the result of the wrappers' ``step``."""
        own, ours = self._own, self._as_the_vector
        self.checked = False
        if own.get("step", ours) is not ours:  # someone replaced it
            return self._wrapped.step(action)
        try:
            own["step"] = ours
            return self._wrapped.step(action)
        finally:
            own.pop("step", None)

    def call_reset(self, lanes: Mask, options: dict[str, Any]) -> Any:
        """Return the result of the wrappers' ``reset`` of ``lanes``, the mask in ``options``."""
        own, ours = self._own, self._resets_as_the_vector
        if own.get("reset", ours) is not ours:  # someone replaced it
            return self._wrapped.reset(options=options)
        try:
            own["reset"], self._asked = ours, lanes
            return self._wrapped.reset(options=options)
        finally:
            own.pop("reset", None)

    def _step_as_the_vector(self, actions: Any) -> Any:
        """Return copies of the results, as the vector's own ``step`` does."""
        own = self._own
        out = super().step(actions, own[OBSERVATIONS])
        self.checked = self._merged.plain is not None
        obs = self._copied(own[OBSERVATIONS])
        flags = out.terminated.copy(), out.truncated.copy()
        return obs, out.reward[0].copy(), *flags, self._merged.infos

    def _reset_as_the_vector(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the result of the vector's own ``reset``, of the lanes that were asked for."""
        env, own, lanes, merged = self._env, self._own, self._asked, self._merged
        if seed is not None or not (options and options.get("reset_mask") is lanes):
            return SyncVectorEnv.reset(env, seed=seed, options=options)
        del options["reset_mask"]
        own[ENDED][lanes] = False
        held = own[OWN_OBSERVATIONS]
        merged.begin(own[OBSERVATIONS])
        for i in lanes.nonzero()[0].tolist():
            held[i], info = env.envs[i].reset(seed=None, options=options)
            merged.tell(i, info, Of.RESET)
        space, rows = env.single_observation_space, own[OBSERVATIONS]
        own[OBSERVATIONS] = concatenate(space, held, rows)
        return self._copied(own[OBSERVATIONS]), merged.infos

    def _copied(self, obs: Any) -> Any:
        """Return what the vector returns of its observations."""
        if not self._own["copy"]:
            return obs
        return obs.copy() if type(obs) is np.ndarray else deepcopy(obs)


def stepping_of(env: VectorEnv, *, infos: bool, many_rewards: bool) -> Decision:
    """Choose how the lanes of ``env`` are stepped; see `run_plan.stepping_vector`."""
    found = stepping_vector(traits_of(env, infos=infos, many_rewards=many_rewards))
    if not isinstance(env, VectorWrapper):
        return found
    inner = stepping_vector(traits_of(env.unwrapped, infos=True, many_rewards=many_rewards))
    return stepping_wrapped(found, inner)
