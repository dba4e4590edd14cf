"""The lanes of a bare `SyncVectorEnv`, stepped as its own ``step`` does, but for what nobody reads.

That merges the infos of all lanes, and copies flags, rewards and observations: as long as a step
of a small environment takes.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from gymnasium.spaces import Box, MultiBinary, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from tallyroll.collector.compat import ENDED, own_observations
from tallyroll.collector.envs.exact import ExactRow, reward_of, terminated_of, truncated_of
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.run_plan import VectorTraits
from tallyroll.storage.engine.kernel import Kernel, compiled, table_of

_ARRAYS = Box, MultiBinary, MultiDiscrete
_STEP, _RESET = SyncVectorEnv.step, SyncVectorEnv.reset
_READERS = np.bool_, np.float32, reward_of, terminated_of, truncated_of


def traits_of(env: VectorEnv, *, infos: bool, many_rewards: bool) -> VectorTraits:
    """Look at ``env`` for `run_plan.stepping_vector`, which has the meaning of the others."""
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
        same_step=getattr(env, "autoreset_mode", None) is AutoresetMode.SAME_STEP,
        arrays=all(type(space) in _ARRAYS for space in spaces),
        infos=infos,
        many_rewards=many_rewards,
    )


class LanesInTurn:
    """Steps and resets the lanes of ``env``, which `run_plan.stepping_vector` has found fit.

    The vector knows afterwards what it would know: its own methods go on from there.
    """

    def __init__(self, env: SyncVectorEnv) -> None:
        self._env = env
        self._resets = env.autoreset_mode is AutoresetMode.NEXT_STEP
        space: Any = env.single_observation_space
        lanes, self._dtype = env.num_envs, space.dtype
        self._shape = lanes, *space.shape
        self._exact = ExactRow(("observation",), space.shape, space.dtype)
        self._rewards = np.zeros(lanes)
        self._terminated, self._truncated = np.zeros((2, lanes), np.bool_)
        self._lane = np.full(1, -1)  # which the extension is stepping
        kernel = compiled()
        self._step_lanes = self._in_python if kernel is None else self._compiled(kernel)

    def __reduce__(self) -> Any:
        """A copy has arrays of its own, and their addresses."""
        return type(self), (self._env,)

    @property
    def are_alone(self) -> bool:
        """Nobody has put a ``step`` or ``reset`` of another kind into the vector."""
        own = vars(self._env)
        return "step" not in own and "reset" not in own

    def new_rows(self) -> NDArray[Any]:
        """Memory for an observation of each lane."""
        return np.empty(self._shape, self._dtype)

    def step(self, action: NDArray[Any], to: NDArray[Any]) -> Step:
        """Step every lane, and write what it observes to ``to`` ``[lane, ...]``.

        Rewards and flags are the same arrays each time.
        """
        i = None  # the lane, for whoever looks at a traceback; `_in_python` has its own
        env = self._env
        envs, ended = env.envs, getattr(env, ENDED)
        seen: Any = own_observations(env)
        try:
            are_put = self._step_lanes(envs, action, seen, ended, to)
        except BaseException as error:
            i = int(self._lane[0]) if self._lane[0] >= 0 else None
            if isinstance(error, ValueRefused):
                error.lane = i
            raise
        if not are_put:
            self._put(seen, to)
        return Step((to,), (self._rewards,), self._terminated, self._truncated)

    def reset(self, lanes: Mask, to: NDArray[Any]) -> None:
        """Reset ``lanes``, and write what each lane, also of the others, observes now to ``to``."""
        getattr(self._env, ENDED)[lanes] = False
        seen: Any = own_observations(self._env)
        for i in np.flatnonzero(lanes).tolist():
            seen[i], _ = self._env.envs[i].reset(seed=None, options={})
            self._exact.of_lane(i, seen[i], first=True)
        self._put(seen, to)

    def _put(self, seen: Sequence[Any], to: NDArray[Any]) -> None:
        """Put what each lane observed together, as it is."""
        for i, (value, _) in enumerate(zip(seen, to, strict=True)):
            to[i] = self._exact.of_lane(i, value)

    def _in_python(
        self, envs: Any, action: NDArray[Any], seen: Any, ended: Mask, to: NDArray[Any]
    ) -> bool:
        """As `Kernel.step_lanes`, but that the caller puts observations together."""
        self._lane[0] = -1
        for i, (env, own) in enumerate(zip(envs, action, strict=True)):
            self._lane[0] = i
            if not ended[i]:
                seen[i], reward, terminated, truncated, _ = env.step(own)
                self._rewards[i] = reward_of(reward)
                self._terminated[i] = terminated_of(terminated)
                self._truncated[i] = truncated_of(truncated)
            elif self._resets:
                seen[i], _ = env.reset()
                self._rewards[i] = self._terminated[i] = self._truncated[i] = 0
            else:
                raise AssertionError(f"lane {i} is stepped on after its episode ended")
        np.logical_or(self._terminated, self._truncated, out=ended)
        return False

    def _compiled(self, kernel: Kernel) -> Any:
        arrays = self._rewards, self._terminated, self._truncated, self._lane
        row = self._shape[1:]
        nbytes = int(np.prod(row)) * self._dtype.itemsize
        words = [*(each.ctypes.data for each in arrays), self._shape[0], self._resets, nbytes]
        return partial(kernel.step_lanes, table_of([*words, *row]), self._dtype, _READERS)
