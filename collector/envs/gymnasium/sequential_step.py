"""Fast steps of the lanes of a bare `SyncVectorEnv`, without unused results.

The vector's own ``step`` also merges the infos of all lanes and copies flags, rewards and
observations. This overhead takes as long as a step of a small environment.
"""

from functools import partial
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Text, Tuple
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from tallyroll.collector.compat import ENDED, OWN_OBSERVATIONS, count_true, own_observations
from tallyroll.collector.envs.exact import reward_reader, terminated_of, truncated_of
from tallyroll.collector.envs.gymnasium.info_merge import merges_plainly
from tallyroll.collector.envs.gymnasium.infos import InfoColumns
from tallyroll.collector.envs.gymnasium.lane_results import InfoCall, LaneResults
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ValueRefused
from tallyroll.collector.native.kernel import StepKernel, compiled, in_order, require_names
from tallyroll.collector.run_plan import VectorTraits
from tallyroll.storage.engine.kernel import table_of

_ARRAYS = Box, MultiBinary, MultiDiscrete
_STEP, _RESET = SyncVectorEnv.step, SyncVectorEnv.reset
_MODES = AutoresetMode.DISABLED, AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP
require_names("MODES", tuple(mode.name.lower() for mode in _MODES))


def traits_of(env: VectorEnv, *, infos: bool, many_rewards: bool) -> VectorTraits:
    """Return the traits of ``env`` for `run_plan.stepping_vector`, which explains the arguments."""
    bare = type(env) is SyncVectorEnv
    patched = SyncVectorEnv.step is not _STEP or SyncVectorEnv.reset is not _RESET
    if bare:
        patched |= type(getattr(env, "envs", None)) is not list
        patched |= type(own_observations(env)) is not list
        patched |= infos and not merges_plainly(env)
    return VectorTraits(
        kind=type(env).__name__,
        bare=bare,
        patched=patched,
        known=_is_known(env.single_observation_space) and type(env.action_space) in _ARRAYS,
        many_rewards=many_rewards,
    )


def _is_known(space: Space[Any]) -> bool:
    """Return True if Gymnasium defines how to concatenate values of ``space``."""
    if type(space) is Dict:
        return all(map(_is_known, space.values()))
    if type(space) is Tuple:
        return all(map(_is_known, space))
    return type(space) in (*_ARRAYS, Discrete, Text)


class SequentialStep:
    """Steps and resets the lanes of ``env``, if `run_plan.stepping_vector` allows it.

    The object updates the vector's own state, so callers can use the vector's own methods at any
    time.

    Args:
        env: the vector.
        infos: entries of the lanes' infos that are columns.
        reset_slots: True if the end of an episode needs no work, because the next slot is a reset.
        results: the columns of a step; None creates a `LaneResults`.
        given: the lanes, if their resets use drawn seeds and options; None otherwise.
        rewards: dtype of the reward column.
    """

    def __init__(
        self,
        env: SyncVectorEnv,
        infos: InfoColumns | None = None,
        *,
        reset_slots: bool = False,
        results: LaneResults | None = None,
        given: list[Any] | None = None,
        rewards: torch.dtype | None = None,
    ) -> None:
        self._reward_dtype, self._reward_of = rewards, reward_reader(rewards)
        self._env, self._own, self._infos = env, vars(env), infos
        self._given = given
        self._mode = env.autoreset_mode
        self._within = self._mode is AutoresetMode.SAME_STEP
        self._reset_slots = reset_slots
        lanes = env.num_envs
        self._results = LaneResults(env, infos) if results is None else results
        self._rewards = np.zeros(lanes)
        self._terminated, self._truncated = np.zeros((2, lanes), np.bool_)
        self._lane = np.full(1, -1)  # the lane that the extension is stepping
        kernel = compiled()
        self._is_compiled = kernel is not None
        self._step_lanes = self._in_python if kernel is None else self._compiled(kernel)

    def __reduce__(self) -> Any:
        """Rebuild copies from the vector alone, because each copy has separate arrays."""
        made = partial(type(self), reset_slots=self._reset_slots, rewards=self._reward_dtype)
        return made, (self._env, self._infos)

    @property
    def are_alone(self) -> bool:
        """True if the vector's ``step`` and ``reset`` were not replaced."""
        own = self._own
        return "step" not in own and "reset" not in own

    def step(self, action: NDArray[Any]) -> Step:
        """Step every lane.

        The next step reuses the arrays of rewards, flags and final observations.
        """
        out = self.step_into(action, None, None)
        assert out is not None
        return out

    @property
    def fills_slots(self) -> bool:
        """True if :meth:`step_into` can write to slots."""
        return self._is_compiled and self._results.are_one_array

    def step_into(
        self, action: NDArray[Any], row: NDArray[Any] | None, slot: bytes | None
    ) -> Step | None:
        """Step every lane, and write the results to a slot, if there is one.

        Args:
            action: ``[lane, ...]``.
            row: memory for the observations ``[lane, ...]``, such as a row of the slot; None for
                new memory.
            slot: table of the slot for `StepKernel.put_step`; None for no slot.

        Returns:
            None if the slot is complete. Otherwise the step, as from :meth:`step`, for the caller
            to complete.
        """
        i = None  # the lane, which is read from tracebacks; `_in_python` has its own ``i``
        env, results = self._env, self._results
        ended, seen = getattr(env, ENDED), getattr(env, OWN_OBSERVATIONS)
        rows = results.begin(row) if slot is None else []
        try:
            to = results.plain if slot is None else row
            envs = env.envs if self._given is None else self._given
            ends = self._step_lanes(envs, action, seen, ended, to, slot)
            if slot is not None:
                if ends == 0 or (ends > 0 and self._reset_slots):
                    return None
                rows = results.begin(row)
            if ends < 0:
                self._lane[0] = -1
                results.put(seen)
        except BaseException as error:
            i = int(self._lane[0]) if self._lane[0] >= 0 else None
            if isinstance(error, ValueRefused):
                i = error.locate(lane=i).lane
            raise
        final = results.finals if self._within and count_true(ended) else None
        return Step(rows, (self._rewards,), self._terminated, self._truncated, final)

    def reset(self, lanes: Mask) -> list[NDArray[Any]]:
        """Reset ``lanes``, and return columns that contain their rows."""
        getattr(self._env, ENDED)[lanes] = False
        seen: Any = own_observations(self._env)
        results = self._results
        rows = results.begin_reset()
        envs = self._env.envs if self._given is None else self._given
        for i in lanes.nonzero()[0].tolist():
            seen[i], info = envs[i].reset(seed=None, options={})
            results.put_first(i, seen[i])
            results.put_info(i, info, InfoCall.RESET)
        return rows

    def _in_python(
        self, envs: Any, action: NDArray[Any], seen: Any, ended: Mask, to: Any, slot: Any
    ) -> int:
        """Step like `StepKernel.step_lanes`. Return -1, so that the caller writes observations."""
        self._lane[0] = -1
        next_step, within, results = self._mode is _MODES[1], self._within, self._results
        for i, (env, own) in enumerate(zip(envs, action, strict=True)):
            self._lane[0] = i
            of = InfoCall.STEP
            if within or not ended[i]:
                seen[i], reward, terminated, truncated, info = env.step(own)
                self._rewards[i] = self._reward_of(reward)
                self._terminated[i] = over = terminated_of(terminated)
                self._truncated[i] = cut = truncated_of(truncated)
                if within and (over or cut):
                    final, of = seen[i], InfoCall.RESET
                    if results.has_infos:
                        results.put_info(i, info, InfoCall.LAST)
                    results.put_final(i, final)
                    seen[i], info = env.reset()
                    results.leaves.refuse_overwritten(i, final, seen[i])
            elif next_step:
                seen[i], info = env.reset()
                self._rewards[i] = self._terminated[i] = self._truncated[i] = 0
            else:
                raise AssertionError(f"lane {i} was stepped after the end of its episode")
            if results.has_infos:
                results.put_info(i, info, of)
        np.logical_or(self._terminated, self._truncated, out=ended)
        return -1

    def _compiled(self, kernel: StepKernel) -> Any:
        results = self._results
        words: list[Any] = in_order(
            "LANES",
            reward=self._rewards,
            terminated=self._terminated,
            truncated=self._truncated,
            lane=self._lane,
            finals=results.address,
            lanes=len(self._rewards),
            mode=_MODES.index(self._mode),
            nbytes=results.nbytes,
        )
        readers: dict[str, Any] = {
            "bool": np.bool_,
            "float32": np.float32,
            "reward": self._reward_of,
            "terminated": terminated_of,
            "truncated": truncated_of,
            "final": results.put_final,
            "overwritten": results.leaves.refuse_overwritten,
            "tell": results.put_info,
            "entries": results.entries(),
        }
        table, read = table_of([*words, *results.shape]), tuple(in_order("READERS", **readers))
        return partial(kernel.step_lanes, table, results.dtype, read)
