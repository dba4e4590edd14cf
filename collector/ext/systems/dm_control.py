"""Environments with the dm_env interface: dm_control tasks by name, others as objects."""

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from torchrl.data import Bounded, Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.calls.objects import reach_objects
from tallyroll.collector.envs.exact import ExactRow, reward_reader
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.system import Declares, Mask, Step, System
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused, SpaceError, ValueRefused
from tallyroll.collector.ext.systems.envpool.spaces import is_pool
from tallyroll.collector.ext.systems.kinds.side_by_side import all_or_none, close_all, numbers
from tallyroll.storage.rows.dtypes import TORCH


def generator_of(env: Any) -> np.random.RandomState | None:
    """Return the generator of the episodes of ``env``, or None if ``env`` does not expose one."""
    found = getattr(getattr(env, "task", None), "random", None)
    if found is None:
        found = getattr(env, "random_state", None)  # dm_control.composer
    return found if isinstance(found, np.random.RandomState) else None


def spec_of(name: str, spec: Any) -> TensorSpec:
    """Convert a dm_env spec to a TorchRL spec.

    The function recognises specs by their attributes and does not import dm_env.

    Raises:
        SpaceError: the spec is not one array of numbers.
    """
    shape, numpy = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or numpy is None or np.dtype(numpy) not in TORCH:
        raise SpaceError(
            f"{name}: expected one array of numbers, got {spec!r:.200}. Convert the value in a "
            "wrapper of the environment."
        )
    dtype = TORCH[np.dtype(numpy)]
    if hasattr(spec, "num_values"):
        return Categorical(int(spec.num_values), shape=shape, dtype=dtype)
    if not hasattr(spec, "minimum"):
        return Unbounded(shape, dtype=dtype)
    low, high = (np.broadcast_to(each, shape) for each in (spec.minimum, spec.maximum))
    if np.isinf(low).all() and np.isinf(high).all():
        return Unbounded(shape, dtype=dtype)
    bounds = [torch.from_numpy(np.array(each)).to(dtype) for each in (low, high)]
    return Bounded(*bounds, shape=shape, dtype=dtype)


_DRAWS_ITS_MODEL = ("lqr",)
"""Domains that draw their physics when they are made, in addition to their first states."""


class DmControlSystem(System):
    """dm_env environments side by side, one per lane. Each observation is its own column.

    An episode that ends with discount 1 is truncated. With any other discount it is terminated.

    Args:
        envs: the environments. The system closes them.
        seeds: when the system takes seeds. ``"reset"`` passes them to the generator of each task.
            None selects ``"reset"`` if every task has a generator, and ``"none"`` otherwise.

    Raises:
        SpaceError: no column can hold an observation or action.
    """

    package, extra = "dm_control", "dm-control"
    about = "discount 1 is truncated; finals kept, lanes reset by mask; a seed a lane"
    why_no_resets = (
        "a task accepts seeds only if its generator can be seeded after the task is made, and "
        "accepts no options"
    )

    def __init__(self, envs: Sequence[Any], *, seeds: Any = None) -> None:
        self._envs = list(envs)
        self.reached = partial(reach_objects, self._envs)
        first, lanes = self._envs[0], len(self._envs)
        specs = first.observation_spec()
        self._names = list(specs) if isinstance(specs, Mapping) else None
        specs = specs if self._names is not None else {"observation": specs}
        self._generators: list[Any] = [generator_of(env) for env in self._envs]
        if seeds is None:
            seeds = "none" if any(each is None for each in self._generators) else "reset"
        self.declares = Declares(
            lanes=lanes,
            observation={(name,): spec_of(name, spec) for name, spec in specs.items()},
            action={("action",): spec_of("action", first.action_spec())},
            at_end="final",
            parts=True,
            seeds=seeds,
            reset_seeds=seeds == "reset",
        )
        self._obs = [np.zeros((lanes, *s.shape), s.dtype) for s in specs.values()]
        self._exact = [ExactRow((n,), tuple(s.shape), np.dtype(s.dtype)) for n, s in specs.items()]
        self._reward = np.zeros(lanes)
        self._terminated, self._truncated = np.zeros((2, lanes), np.bool_)

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the task ``DOMAIN/TASK`` or ``DOMAIN-TASK`` of the suite.

        ``kwargs`` are passed to ``suite.load``. ``pixels`` makes observations images: pass True, or
        a mapping of arguments of ``suite.wrappers.pixels.Wrapper``.
        """
        suite = needs("dm_control.suite", "dm-control")
        domain, _, task = name.partition("/" if "/" in name else "-")
        if not task:
            raise ArgumentError(f"expected dm_control:DOMAIN/TASK, got {name!r}")
        pixels = kwargs.pop("pixels", None)
        given = dict(kwargs.pop("task_kwargs", None) or {})
        at_making = domain in _DRAWS_ITS_MODEL
        try:
            with all_or_none() as envs:
                for lane in range(lanes):
                    own = {"random": seeds[lane]} if seeds is not None and at_making else {}
                    envs.append(suite.load(domain, task, task_kwargs={**given, **own}, **kwargs))
                    if pixels:
                        wrapper = needs("dm_control.suite.wrappers.pixels", "dm-control").Wrapper
                        more = pixels if isinstance(pixels, Mapping) else {}
                        envs[-1] = wrapper(envs[-1], **more)
                return cls(envs, seeds="make" if at_making else None)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"dm_control cannot make {name!r}: {error}") from error

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap a ``dm_env.Environment``, or a list with one per lane; None for other objects."""
        dm_env = sys.modules.get("dm_env")
        if dm_env is None:
            return None
        envs = made if isinstance(made, (list, tuple)) and made else [made]
        one_each = all(isinstance(e, dm_env.Environment) and not is_pool(e) for e in envs)
        return cls(envs) if one_each else None

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Any]:
        """Reset lanes. A seed seeds the generator of a lane's task."""
        seeds = seeds if self.next_seeds is None else self.next_seeds.tolist()
        for lane in numbers(lanes, len(self._envs)):
            if seeds is not None:
                self._generators[lane].seed(seeds[lane])
            observation = self._envs[lane].reset().observation
            self._put(lane, observation, first=True)
        return self._obs

    def step(self, action: Sequence[Any], lanes: Mask | None = None) -> Step:
        """Step all lanes, or the lanes of a mask."""
        (given,) = action
        rewards, put = self._reward, self._put
        self._terminated[:] = self._truncated[:] = False
        for lane in numbers(lanes, len(self._envs)):
            kind, reward, discount, observation = self._envs[lane].step(given[lane])
            if kind == 0:  # FIRST
                raise EnvironmentRefused(
                    f"lane {self.first_lane + lane}: {type(self._envs[lane]).__name__} reset "
                    "itself in a step, although the step before did not end the episode"
                )
            put(lane, observation)
            rewards[lane] = reward if type(reward) is float else self._reward_of(lane, reward)
            if kind == 2:  # LAST
                self._truncated[lane] = discount == 1
                self._terminated[lane] = discount != 1
        return Step(self._obs, (rewards,), self._terminated, self._truncated)

    def _put(self, lane: int, observation: Any, *, first: bool = False) -> None:
        names = self._names
        values = (observation,) if names is None else [observation.get(name) for name in names]
        for column, value, exact in zip(self._obs, values, self._exact, strict=True):
            is_right = exact.is_right(value)
            column[lane] = value if is_right else self._fitted(exact, lane, value, first)

    def _fitted(self, exact: ExactRow, lane: int, value: Any, first: bool) -> Any:
        return exact.of_lane(self.first_lane + lane, value, first=first)

    def _reward_of(self, lane: int, value: Any) -> float:
        try:
            return reward_reader(self.reward_dtype)(value)
        except ValueRefused as error:
            error.lane = self.first_lane + lane
            raise

    @property
    def ticks(self) -> int | None:
        """Physics steps in a transition, from the environments and their wrappers."""
        return ticks_of_objects(self._envs)

    def close(self) -> None:
        """Close every environment."""
        close_all(self._envs)
