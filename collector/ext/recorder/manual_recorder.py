"""Recorder of a loop without an environment, which passes each transition itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray

from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.setup.make import make_env
from tallyroll.collector.envs.system import Declares, Mask, Step, System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.recorder.recorded_env import RecordedEnv
from tallyroll.collector.ext.recorder.recorder import Recorder
from tallyroll.collector.interrupts import defer_signals
from tallyroll.collector.options import Options
from tallyroll.collector.options.checks import positive
from tallyroll.collector.options.objects import Columns
from tallyroll.collector.slab.names import NamedColumn

MANUAL = "Recorder.manual"
"""Kind of environment in the manifest of a run without an environment."""


class ManualSystem(System):
    """System whose results the loop passes.

    Args:
        observation_space: space of a lane's observations.
        action_space: space of a lane's actions.
        lanes: number of lanes; None: one lane, whose values have no dimension of lanes.

    Raises:
        ArgumentError: an argument is neither a space nor a number of lanes.
        SpaceError: no column can hold a space.
    """

    def __init__(self, observation_space: Any, action_space: Any, lanes: int | None) -> None:
        spaces = {"observation_space": observation_space, "action_space": action_space}
        for name, space in spaces.items():
            if not isinstance(space, gymnasium.Space):
                raise ArgumentError(
                    f"{name}: expected the Gymnasium space of one lane, got "
                    f"{type(space).__name__}. Pass, for example, spaces.Box(-1, 1, (3,))."
                )
        self.is_single = lanes is None
        self.num_envs = 1 if lanes is None else positive("lanes", lanes)
        self.returned: Any = None
        """The values that the next ``step`` or ``reset`` returns."""
        self._leaves = observation_leaves(observation_space, self.num_envs)
        self._getters = [leaf.getter() for leaf in self._leaves]
        action = action_leaf(action_space, self.num_envs)
        self.declares = Declares(
            lanes=self.num_envs,
            observation={leaf.key: leaf.spec[0] for leaf in self._leaves},
            action={action.key: action.spec[0]},
            at_end="final",
        )

    @property
    def columns(self) -> Sequence[NamedColumn]:
        """Names of the observations, in order."""
        return [NamedColumn(leaf.key, leaf.path) for leaf in self._leaves]

    def describe(self) -> dict[str, Any]:
        """Return a description without an id."""
        return {"id": None, "type": MANUAL}

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> Any:
        """Return the first observations that the loop passed."""
        return self.returned

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Any:
        """Return the results that the loop passed."""
        return self.returned

    def observation(self, name: str, value: Any) -> list[NDArray[Any]]:
        """Return an observation as arrays ``[lane, ...]``, one for each column.

        Raises:
            ArgumentError: ``value`` differs from the space in its parts, a shape or a dtype.
        """
        found = []
        for leaf, get in zip(self._leaves, self._getters, strict=True):
            try:
                part = get(value)
            except (KeyError, IndexError, TypeError) as error:
                path = "".join(f"[{step!r}]" for step in leaf.path)
                raise ArgumentError(
                    f"{name}: expected {name}{path}, as the space declares, got "
                    f"{type(value).__name__} {value!r:.80}"
                ) from error
            where = "".join((name, *(f"[{step!r}]" for step in leaf.path)))
            found.append(self._array(where, part, leaf.shape, leaf.dtype))
        return found

    def numbers(self, name: str, value: Any, dtype: Any = None) -> NDArray[Any]:
        """Return ``value`` as an array ``[lane]``, of ``dtype`` unless that is None.

        Raises:
            ArgumentError: the shape or the dtype differs.
        """
        return self._array(name, value, (self.num_envs,), dtype)

    def _array(
        self, name: str, value: Any, shape: tuple[int, ...], dtype: np.dtype[Any] | None
    ) -> NDArray[Any]:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu().numpy()
        try:
            found = np.asarray(value)
        except ValueError as error:
            raise ArgumentError(
                f"{name}: expected an array, got lists of unequal lengths"
            ) from error
        fits = found.dtype == dtype if dtype is not None else found.dtype.kind in "biuf"
        if fits and not self.is_single and found.shape == shape:
            return found
        if fits and self.is_single and found.shape == shape[1:]:
            return found[None]
        wanted = shape[1:] if self.is_single else shape
        lanes = "" if self.is_single else f" for {self.num_envs} lanes"
        raise ArgumentError(
            f"{name}: expected {dtype or 'numbers'} of shape {list(wanted)}{lanes}, got "
            f"{found.dtype} of shape {list(found.shape)}. Convert the value, or change the space."
        )


class NoEnvironment:
    """Base of a recorder that wraps nothing."""

    def __init__(self, env: ManualSystem) -> None:
        self._system = env

    def close(self) -> None:
        """Do nothing."""


class ManualRecorder(Recorder, NoEnvironment):
    """`Recorder` without an environment, which `Recorder.manual` makes."""

    _keywords = Recorder._keywords - {"info_keys"}  # noqa: SLF001  of the base class

    def _recorded_env(self, env: Any, options: Options) -> RecordedEnv:
        driven, actual = SystemEnv(env, rename=options.rename), SystemEnv(env)
        description = make_env(actual, replace(options, columns=Columns())).description
        return RecordedEnv(driven, env, actual, description, [MANUAL], is_single=env.is_single)

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
    ) -> None:
        """Record one transition of each lane.

        A lane's trajectory continues if ``obs`` has the same bits as the ``next_obs`` of the last
        call, and if it did not end there. Otherwise a new trajectory begins. If the old one did not
        end, it is cut: its last row is neither terminated nor truncated.

        All arrays are copied. A call whose arguments are refused records nothing, and can be
        repeated with corrected ones. Signal handlers run after the call.

        Args:
            obs: observations ``[lane, ...]`` before the actions, with the structure and the dtypes
                of the space.
            action: actions ``[lane, ...]``.
            reward: numbers ``[lane]``.
            next_obs: observations ``[lane, ...]`` after the actions, also at an end.
            terminated: bools ``[lane]``.
            truncated: bools ``[lane]``.

        Raises:
            ArgumentError: an argument has another shape or dtype.
            StateError: an annotation is missing, the recorder is closed, or the run is full with
                ``at_end="raise"``.
        """
        if self._passes():
            return
        system = self._system
        if obs is next_obs and isinstance(obs, np.ndarray | torch.Tensor | dict):
            raise ArgumentError(
                "next_obs: expected another object than obs, because the later observation "
                "overwrites the earlier one in the same array. Pass a copy."
            )
        first = system.observation("obs", obs)
        step = Step(
            system.observation("next_obs", next_obs),
            (system.numbers("reward", reward),),
            system.numbers("terminated", terminated, np.dtype(np.bool_)),
            system.numbers("truncated", truncated, np.dtype(np.bool_)),
        )
        with defer_signals():
            self._run.begin_at(first)
            self._run.before_step(action)
            self._run.after_step(step)
