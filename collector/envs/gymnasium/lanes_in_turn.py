"""The lanes of a bare `SyncVectorEnv`, stepped as by its ``step``, without unused results.

Its own ``step`` also merges the infos of all lanes, and copies flags, rewards and observations,
which takes as long as a step of a small environment.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from tallyroll.collector.compat import ENDED, OWN_OBSERVATIONS, count_true, own_observations
from tallyroll.collector.envs.exact import ExactRow, reward_of, terminated_of, truncated_of
from tallyroll.collector.envs.gymnasium.lane_rows import refuse_overwritten
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.run_plan import VectorTraits
from tallyroll.storage.engine.kernel import Kernel, compiled, table_of

_ARRAYS = Box, MultiBinary, MultiDiscrete
_STEP, _RESET = SyncVectorEnv.step, SyncVectorEnv.reset
_READERS = np.bool_, np.float32, reward_of, terminated_of, truncated_of
_MODES = AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP


def traits_of(env: VectorEnv, *, infos: bool, many_rewards: bool) -> VectorTraits:
    """Return the traits of ``env`` for `run_plan.stepping_vector`, which explains the arguments."""
    bare = type(env) is SyncVectorEnv
    patched = SyncVectorEnv.step is not _STEP or SyncVectorEnv.reset is not _RESET
    if bare:
        patched |= type(getattr(env, "envs", None)) is not list
        patched |= type(own_observations(env)) is not list
    spaces = env.single_observation_space, env.action_space
    return VectorTraits(
        kind=type(env).__name__,
        bare=bare,
        patched=patched,
        arrays=all(type(space) in _ARRAYS for space in spaces),
        infos=infos,
        many_rewards=many_rewards,
    )


class LanesInTurn:
    """Step and reset the lanes of ``env``, which `run_plan.stepping_vector` has found fit.

    The vector's own state is kept up to date: its own methods can go on at any time.
    """

    def __init__(self, env: SyncVectorEnv) -> None:
        self._env = env
        self._mode = env.autoreset_mode
        self._within = self._mode is AutoresetMode.SAME_STEP
        space: Any = env.single_observation_space
        lanes, self._dtype = env.num_envs, space.dtype
        self._shape = lanes, *space.shape
        self._exact = ExactRow(("observation",), space.shape, space.dtype)
        self._rewards = np.zeros(lanes)
        self._terminated, self._truncated = np.zeros((2, lanes), np.bool_)
        self._lane = np.full(1, -1)  # the lane that the extension is stepping
        self._finals = np.zeros(self._shape if self._within else 0, self._dtype)
        self._put_final = partial(_put_row, self._exact, self._finals)
        kernel = compiled()
        self._step_lanes = self._in_python if kernel is None else self._compiled(kernel)

    def __reduce__(self) -> Any:
        """Make copies from the vector alone: each has its own arrays and their addresses."""
        return type(self), (self._env,)

    @property
    def are_alone(self) -> bool:
        """True if the vector's ``step`` and ``reset`` are those of its class, not replaced."""
        own = vars(self._env)
        return "step" not in own and "reset" not in own

    def new_rows(self) -> NDArray[Any]:
        """Return memory for an observation of each lane."""
        return np.empty(self._shape, self._dtype)

    def step(self, action: NDArray[Any], to: NDArray[Any] | None) -> Step:
        """Step every lane, and write its observation to ``to`` ``[lane, ...]``, None: new memory.

        Rewards, flags and final observations are the same arrays each time.
        """
        i = None  # the lane, for readers of a traceback; `_in_python` has its own
        env = self._env
        envs, ended = env.envs, getattr(env, ENDED)
        seen: Any = getattr(env, OWN_OBSERVATIONS)
        if to is None:
            to = np.empty(self._shape, self._dtype)
        try:
            are_put = self._step_lanes(envs, action, seen, ended, to)
        except BaseException as error:
            i = int(self._lane[0]) if self._lane[0] >= 0 else None
            if isinstance(error, ValueRefused):
                error.lane = i
            raise
        if not are_put:
            self._put(seen, to)
        final = (self._finals,) if self._within and count_true(ended) else None
        return Step((to,), (self._rewards,), self._terminated, self._truncated, final)

    def reset(self, lanes: Mask, to: NDArray[Any]) -> None:
        """Reset ``lanes``, and write the observations of all lanes to ``to`` ``[lane, ...]``."""
        getattr(self._env, ENDED)[lanes] = False
        seen: Any = own_observations(self._env)
        for i in np.flatnonzero(lanes).tolist():
            seen[i], _ = self._env.envs[i].reset(seed=None, options={})
            self._exact.of_lane(i, seen[i], first=True)
        self._put(seen, to)

    def _put(self, seen: Sequence[Any], to: NDArray[Any]) -> None:
        """Write the observation of each lane to its row of ``to``, uncast."""
        for i, (value, _) in enumerate(zip(seen, to, strict=True)):
            to[i] = self._exact.of_lane(i, value)

    def _in_python(
        self, envs: Any, action: NDArray[Any], seen: Any, ended: Mask, to: NDArray[Any]
    ) -> bool:
        """Step as `Kernel.step_lanes` does; return False: the caller writes observations."""
        self._lane[0] = -1
        next_step = self._mode is AutoresetMode.NEXT_STEP
        for i, (env, own) in enumerate(zip(envs, action, strict=True)):
            self._lane[0] = i
            if self._within or not ended[i]:
                seen[i], reward, terminated, truncated, _ = env.step(own)
                self._rewards[i] = reward_of(reward)
                self._terminated[i] = over = terminated_of(terminated)
                self._truncated[i] = cut = truncated_of(truncated)
                if self._within and (over or cut):
                    final = seen[i]
                    self._put_final(i, final)
                    seen[i], _ = env.reset()
                    refuse_overwritten(i, final, seen[i])
            elif next_step:
                seen[i], _ = env.reset()
                self._rewards[i] = self._terminated[i] = self._truncated[i] = 0
            else:
                raise AssertionError(f"lane {i} is stepped on after its episode ended")
        np.logical_or(self._terminated, self._truncated, out=ended)
        return False

    def _compiled(self, kernel: Kernel) -> Any:
        arrays = self._rewards, self._terminated, self._truncated, self._lane, self._finals
        row = self._shape[1:]
        nbytes = int(np.prod(row)) * self._dtype.itemsize
        words = [*(each.ctypes.data for each in arrays), self._shape[0]]
        table = table_of([*words, _MODES.index(self._mode), nbytes, *row])
        readers = (*_READERS, self._put_final, refuse_overwritten)
        return partial(kernel.step_lanes, table, self._dtype, readers)


def _put_row(exact: ExactRow, rows: NDArray[Any], lane: int, value: Any) -> None:
    """Write the observation of one lane to its row, uncast."""
    rows[lane] = exact.of_lane(lane, value)
