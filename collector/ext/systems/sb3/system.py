"""Stable-Baselines3's `VecEnv`, which resets lanes in its step and returns final observations."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from tallyroll.collector.compat import count_true, seed_next_reset
from tallyroll.collector.envs.calls.vectors import reached_sb3
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.failures import require_infos, watch_processes
from tallyroll.collector.envs.frame_skips import product, ticks_of_layer, ticks_of_objects
from tallyroll.collector.envs.gymnasium.info_system import InfoSystem, vector_info
from tallyroll.collector.envs.gymnasium.make import making
from tallyroll.collector.envs.gymnasium.seeded_resets import SeededResets
from tallyroll.collector.envs.gymnasium.spaces import Leaf, action_leaf, observation_leaves
from tallyroll.collector.envs.system import Mask, Step
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, TransitionError
from tallyroll.storage.rows.keys import format_key


def true_space(env: Any) -> spaces.Space[Any]:
    """Return the true space of ``env``'s observations; two wrappers declare a different space.

    `VecNormalize` keeps the bounds and dtype of the values that it normalizes. `VecFrameStack`
    repeats each bound next to itself, although it stacks observations one after the other.
    """
    package = sys.modules["stable_baselines3.common.vec_env"]
    space: spaces.Space[Any] = env.observation_space
    kinds = (package.VecNormalize, package.VecFrameStack)
    layer = next((each for each in layers(env) if isinstance(each, kinds)), None)
    if layer is None or (isinstance(layer, package.VecNormalize) and not layer.norm_obs):
        return space
    names = getattr(layer, "norm_obs_keys", None) or ()
    normalizes = isinstance(layer, package.VecNormalize)

    def true(part: spaces.Space[Any], name: str | None = None) -> spaces.Space[Any]:
        dtype: Any = part.dtype
        if normalizes and (name is None or name in names):
            dtype = np.float32
        elif not isinstance(part, spaces.Box) or not np.issubdtype(dtype, np.floating):
            return part
        return spaces.Box(-np.inf, np.inf, part.shape, dtype)

    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: true(part, name) for name, part in space.items()})
    return true(space)


def takes_resets(env: Any, kind: Any) -> bool:
    """Return True if ``env`` is a ``kind`` (`DummyVecEnv`) with unchanged step and reset."""
    own = type(env)
    return isinstance(env, kind) and (own.step_wait, own.reset) == (kind.step_wait, kind.reset)


def layers(env: Any) -> Iterator[Any]:
    """Yield ``env`` and the environments that it wraps, outermost first."""
    while env is not None:
        yield env
        env = vars(env).get("venv")


def finals_of(
    found: Mapping[int, Any],
    leaves: Sequence[Leaf],
    getters: Sequence[Callable[[Any], Any]],
    first_lane: int,
) -> list[NDArray[Any]]:
    """Return the final observations of lanes that ended, in arrays of all lanes."""
    rows = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    for lane, observation in found.items():
        for leaf, get, row in zip(leaves, getters, rows, strict=True):
            try:
                value = get(observation)
            except (KeyError, IndexError, TypeError) as error:
                raise TransitionError(
                    f"{format_key(leaf.key)}: expected a terminal_observation with that part in "
                    f"lane {first_lane + lane}, got {type(observation).__name__} "
                    f"{observation!r:.80}. A wrapper that changes observations must also change "
                    "the terminal_observation."
                ) from error
            if np.shape(value) != row.shape[1:]:
                raise TransitionError(
                    f"{format_key(leaf.key)}: expected a terminal_observation of shape "
                    f"{list(row.shape[1:])}, got {list(np.shape(value))} in lane "
                    f"{first_lane + lane}. A wrapper that changes observations must also change "
                    "the terminal_observation."
                )
            row[lane] = value
            if row.dtype.kind != "f" and not np.array_equal(row[lane], value):
                raise TransitionError(
                    f"{format_key(leaf.key)}: expected a terminal_observation of {row.dtype} in "
                    f"lane {first_lane + lane}, as the space declares, got values of another "
                    "dtype. A wrapper that changes observations must also change the "
                    "terminal_observation."
                )
    return rows


_FINAL, _CUT = "terminal_observation", "TimeLimit.truncated"


class _Lent(list[dict[str, Any]]):
    """Infos of all lanes, which `DummyVecEnv` need not copy.

    The system reads them before the next step.
    """

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class _LentObs(OrderedDict[Any, NDArray[Any]]):
    """Observations of all lanes, by leaf, that the system itself copies after the step."""

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class Sb3System(InfoSystem):
    """A ``VecEnv`` as a system, including its wrappers.

    An end that Stable-Baselines3 marks ``TimeLimit.truncated`` is truncated, and any other end is
    terminated. If an environment reports both, Stable-Baselines3 reports terminated.

    Args:
        env: the environment. The system closes it.

    Raises:
        EnvironmentRefused: the vector is SuperSuit's, which gives wrong results if agents end at
            different steps.
        SpaceError: no column can hold a space.
    """

    package = "stable_baselines3"
    extra = "sb3"
    about = "resets in the step of an end, finals kept in infos; seeds at a reset of all"
    why_no_resets = (
        "lanes accept them only in a DummyVecEnv whose class overrides neither step nor reset; use "
        "one, or MultiprocessCollector for processes"
    )

    def __init__(self, env: Any) -> None:
        if any(type(each).__module__.startswith("supersuit") for each in layers(env)):
            raise EnvironmentRefused(
                "SuperSuit's vectors give wrong results if agents end at different steps. Pass the "
                "PettingZoo environment itself."
            )
        *_, inner = layers(env)
        watch_processes(inner)
        self.env, self.reached = env, reached_sb3(env)
        spec = env.get_attr("spec", 0)[0] if env.has_attr("spec") else None
        self._id = getattr(spec, "id", None)
        lanes = int(env.num_envs)
        self._leaves = observation_leaves(true_space(env), lanes)
        self._getters = [leaf.getter() for leaf in self._leaves]
        action = action_leaf(env.action_space, lanes)
        self._never = np.zeros(lanes, np.bool_)
        self._lent, self._lent_obs = _Lent(), _LentObs()
        package = sys.modules["stable_baselines3.common.vec_env"]
        self._copies = type(env) is package.DummyVecEnv
        given = takes_resets(inner, package.DummyVecEnv)
        self._given = SeededResets(self, inner if given else None)
        how = {"reset_seeds": given, "options": given, "resets": "all"}
        self._declare(self._leaves, action, lanes, at_end="first", finals="extra", **how)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make a ``DummyVecEnv`` of a Gymnasium id; ``kwargs`` are passed to ``gymnasium.make``."""
        kind = needs("stable_baselines3.common.vec_env", "sb3").DummyVecEnv
        with ExitStack() as half_made:
            with making(name, kwargs):
                envs = []
                for _ in range(lanes):
                    envs.append(gymnasium.make(name, **kwargs))
                    half_made.callback(envs[-1].close)
            system = cls(kind([lambda env=env: env for env in envs]))
            half_made.pop_all()
        return system

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap a ``VecEnv``; return None for other objects."""
        package = sys.modules.get("stable_baselines3.common.vec_env.base_vec_env")
        return None if package is None or not isinstance(made, package.VecEnv) else cls(made)

    @property
    def ticks(self) -> int | None:
        """Ticks of a transition, from the lanes' environments and the vector's wrappers."""
        *outer, inner = layers(self.env)
        envs = getattr(inner, "envs", None)
        own = super().ticks if envs is None else ticks_of_objects(envs)
        return product([own, *map(ticks_of_layer, outer)])

    def describe(self) -> dict[str, Any]:
        """Return the id of the first lane, the kind of vector, and its wrappers."""
        *outer, inner = [type(each).__name__ for each in layers(self.env)]
        return {"id": self._id, "type": inner} | ({"wrappers": outer} if outer else {})

    def close(self) -> None:
        """Close the vector."""
        self.env.close()

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset all lanes."""
        if options:
            raise ArgumentError(
                f"reset: expected no options, got {sorted(options)}. Pass options to a VecEnv by "
                "set_options."
            )
        if seeds is not None:
            seed_next_reset(self.env, seeds)
        try:
            with self._given.begin():
                obs = self.env.reset()
        except (KeyError, IndexError, TypeError, ValueError):
            require_infos(self._reset_infos, self.first_lane)
            raise
        require_infos(self._reset_infos, self.first_lane)
        values = [get(obs) for get in self._getters]
        if not self._looks:
            return values
        infos = vector_info(self._reset_infos, self._read)
        return [*values, *self._first_infos(infos, None)]

    def step(self, action: Sequence[NDArray[Any]], lanes: Mask | None = None) -> Step:
        """Step all lanes."""
        if self._given.lanes is None:
            obs, reward, done, infos = self._stepped(action[0])
        else:
            with self._given:
                obs, reward, done, infos = self._stepped(action[0])
        values = [get(obs) for get in self._getters]
        if self._copies:
            values = [value.copy() for value in values]
        if not count_true(done):
            step = Step(values, (reward,), done, self._never)
            return self._with_infos(step, done, infos) if self._infos else step
        ended = np.nonzero(done)[0].tolist()
        truncated = self._never.copy()
        for lane in ended:
            truncated[lane] = bool(infos[lane].get(_CUT))
        for lane in ended:
            if infos[lane].get(_FINAL) is None:
                raise TransitionError(
                    f"infos[{lane}][{_FINAL!r}]: expected the final observation, got none from the "
                    f"VecEnv at the end of an episode of lane {self.first_lane + lane}. Let the "
                    "VecEnv store the observation there before it resets the lane."
                )
        found = {lane: infos[lane][_FINAL] for lane in ended}
        final = finals_of(found, self._leaves, self._getters, self.first_lane)
        step = Step(values, (reward,), done & ~truncated, truncated, final)
        return self._with_infos(step, done, infos) if self._infos else step

    def _stepped(self, action: NDArray[Any]) -> Any:
        """Step the vector; skip the copies that a bare `DummyVecEnv` makes.

        The system does not need the copies of infos, and copies the observations faster.
        """
        env, lent, seen = self.env, self._lent, self._lent_obs
        if not self._copies:
            return env.step(action)
        own, arrays = env.buf_infos, env.buf_obs
        if own is lent:  # an earlier interrupt left the loan in place
            own = [*lent]
        if arrays is seen:
            arrays = OrderedDict(seen)
        lent[:] = own
        seen.update(arrays)
        try:
            env.buf_infos, env.buf_obs = lent, seen
            return env.step(action)
        finally:
            own[:] = lent
            env.buf_infos, env.buf_obs = own, arrays

    def _with_infos(
        self, step: Step, done: NDArray[np.bool_], infos: Sequence[dict[str, Any]]
    ) -> Step:
        """Return ``step`` with columns of infos.

        For lanes that ended, the root has the infos of the reset.
        """
        first = given = vector_info(infos, self._infos.infos)
        final = step.final
        if done.any():
            first = vector_info(self._reset_infos, self._infos.infos)
            rows = self._infos.new_rows()
            self._infos.write(rows, given, done)
            final = [*final, *rows] if final is not None else None
        values = self._next_infos(given, first, done)
        return self._without_masks(step._replace(obs=[*step.obs, *values], final=final))

    @property
    def _reset_infos(self) -> Sequence[dict[str, Any]]:
        """Infos of the last reset of each lane, from the inner vector.

        The list of a wrapper stays empty.
        """
        return [*layers(self.env)][-1].reset_infos  # type: ignore[no-any-return]
