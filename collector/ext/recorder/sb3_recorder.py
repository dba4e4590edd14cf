"""Recorder of a `VecEnv` of Stable-Baselines3. Importing this module needs that package."""

from dataclasses import replace
from typing import Any

from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from tallyroll.collector.envs.setup.make import make_env
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.ext.recorder.recorded_env import RecordedEnv
from tallyroll.collector.ext.recorder.recorder import Recorder
from tallyroll.collector.ext.systems.sb3.system import Sb3System, layers
from tallyroll.collector.options import Options
from tallyroll.collector.options.objects import Columns

_FINAL = "terminal_observation"


class VecEnvStandIn(VecEnvWrapper):
    """Stand-in for a `VecEnv`."""

    returned: Any = None
    """The last result of the environment's ``step_wait`` or ``reset``."""
    loses_finals = False
    """True if final observations may be missing, so that first observations replace them."""

    def step_async(self, actions: Any) -> None:
        """Do nothing: the loop has stepped the environment."""

    def step_wait(self) -> Any:
        """Return the last result of the environment."""
        if not self.loses_finals:
            return self.returned
        obs, reward, done, infos = self.returned
        infos = [
            {**info, _FINAL: _row_of(obs, lane)} if done[lane] else info
            for lane, info in enumerate(infos)
        ]
        return obs, reward, done, infos

    def reset(self) -> Any:
        """Return the last result of the environment."""
        return self.returned


def _row_of(obs: Any, lane: int) -> Any:
    """Return the observation of one lane."""
    if isinstance(obs, dict):
        return {name: part[lane] for name, part in obs.items()}
    if isinstance(obs, tuple):
        return tuple(part[lane] for part in obs)
    return obs[lane]


def recorded_vec_env(env: VecEnv, options: Options) -> RecordedEnv:
    """Return the `RecordedEnv` of a `VecEnv`."""
    stand_in = VecEnvStandIn(env)
    stand_in.loses_finals = options.checks.finals == "lost"
    system = Sb3System(stand_in)
    if options.info_keys:
        system.keep_infos(options.info_keys)
    driven, actual = SystemEnv(system, rename=options.rename), SystemEnv(Sb3System(env))
    driven.owns_system = actual.owns_system = False
    description = make_env(actual, replace(options, columns=Columns())).description
    names = [type(each).__name__ for each in layers(env)]
    return RecordedEnv(driven, stand_in, actual, description, names)


class Sb3Recorder(Recorder, VecEnvWrapper):
    """`Recorder` of a `VecEnv`, with all methods of a `VecEnv`."""

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        return recorded_vec_env(env, options)

    def step_async(self, actions: Any) -> None:
        """Begin a step of all lanes."""
        if not self._passes():
            self._run.before_step(actions)
        try:
            self.venv.step_async(actions)
        except BaseException as error:
            self._commit_before(error)
            raise

    def step_wait(self) -> Any:
        """Return the results of the step, and record its transitions."""
        try:
            returned = self.venv.step_wait()
        except BaseException as error:
            self._commit_before(error)
            raise
        if self._run.is_stepping:
            self._run.after_step(returned)
        return returned

    def reset(self) -> Any:
        """Reset all lanes, and cut running episodes."""
        if self._run.is_full:
            return self.venv.reset()
        self._run.before_reset(None)
        try:
            returned = self.venv.reset()
        except BaseException as error:
            self._commit_before(error)
            raise
        self._run.after_reset(returned, None)
        return returned
