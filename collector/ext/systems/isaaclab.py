"""Isaac Lab: batched torch on a device, reset within the step that ends an episode."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Self

import gymnasium
import torch
from gymnasium.vector import AutoresetMode, VectorEnv

from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.gymnasium.spaces import action_leaf, observation_leaves
from tallyroll.collector.envs.system import Array, Declares, Finals, Mask, Step, System
from tallyroll.collector.errors import (
    ArgumentError,
    EnvironmentRefused,
    MissingExtra,
    TransitionError,
)

FINAL = "final_obs"
PACKAGES = ("isaaclab.", "omni.isaac.lab.")
_TASK_PACKAGES = ("isaaclab_tasks", "omni.isaac.lab_tasks")


class IsaacLabSystem(System):
    """A ``ManagerBasedRLEnv`` or ``DirectRLEnv``, with or without Gymnasium's wrappers.

    Groups of observations ("policy", "critic") become columns with these names. The system keeps
    final observations if the environment's ``cfg.compute_final_obs`` is true. If it is false, they
    are lost, and ``("collector", "next_valid")`` marks the rows. Versions without that option keep
    a final observation whenever ``extras["final_obs"]`` is present. All lanes draw from one
    generator, seeded with the first lane's seed.

    Args:
        env: the environment. The system closes it.

    Raises:
        EnvironmentRefused: the environment has several agents, or does not reset itself within its
            step.
        SpaceError: no column can hold a space.
    """

    package = "isaaclab"
    about = "resets in the step of an end, finals kept or flagged; one seed for all lanes"
    why_no_resets = (
        "the environment resets lanes within its step, and all lanes draw from one generator"
    )

    def __init__(self, env: Any) -> None:
        inner = env.unwrapped
        if hasattr(inner, "possible_agents"):
            raise EnvironmentRefused(
                f"{type(inner).__name__}: expected one agent, got several. Convert the environment "
                "with isaaclab.envs.multi_agent_to_single_agent."
            )
        cfg = getattr(inner, "cfg", None)
        modes = [inner.metadata.get("autoreset_mode"), getattr(cfg, "autoreset_mode", None)]
        if other := [each for each in modes if each not in (None, *_SAME_STEP)]:
            raise EnvironmentRefused(
                f"{type(inner).__name__}: expected autoreset_mode SAME_STEP, got {other[0]}"
            )
        keeps = getattr(cfg, "compute_final_obs", None)
        finals: Finals = "some" if keeps is None else ("extra" if keeps else "lost")
        self.env, self._finals, lanes = env, finals, int(inner.num_envs)
        leaves = observation_leaves(inner.single_observation_space, lanes)
        self._getters = [leaf.getter() for leaf in leaves]
        self._keys = {leaf.key: leaf.spec[0] for leaf in leaves}
        action = action_leaf(inner.single_action_space, lanes)
        self.declares = Declares(
            lanes=lanes,
            observation=self._keys,
            action={action.key: action.spec[0]},
            at_end="first",
            finals=finals,
            resets="all",
            seeds="shared",
            device=str(inner.device),
        )

    def reset(
        self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any
    ) -> Sequence[Array]:
        """Reset all lanes."""
        seed = None if seeds is None else int(seeds[0])
        observation, _ = self.env.reset(seed=seed, options=options.get("options"))
        return [take(observation) for take in self._getters]

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes."""
        out = self.env.step(torch.as_tensor(action[0]))
        observation, reward, terminated, truncated, extras = out
        told = extras.get(FINAL) if self._finals != "lost" else None
        final = None if told is None else self._final(told)
        valid = torch.full_like(terminated, told is not None) if self._finals == "some" else None
        seen = [take(observation) for take in self._getters]
        return Step(seen, [reward], terminated, truncated, final, valid)

    def _final(self, told: Any) -> list[Array]:
        try:
            return [take(told) for take in self._getters]
        except (KeyError, TypeError) as error:
            raise TransitionError(
                f'extras["{FINAL}"]: expected the keys of the observations, {[*self._keys]}, got '
                f"{error!r}"
            ) from error

    def close(self) -> None:
        """Close the environment."""
        self.env.close()

    @property
    def ticks(self) -> int | None:
        """Physics steps in a transition, from ``cfg.decimation`` and wrappers.

        None if the configuration has no ``decimation``.
        """
        configured = hasattr(getattr(self.env.unwrapped, "cfg", None), "decimation")
        return ticks_of_objects([self.env]) if configured else None

    def describe(self) -> dict[str, Any]:
        """Return the task and the kind of environment."""
        spec = getattr(self.env, "spec", None)
        return {"id": spec.id if spec else None, "type": type(self.env.unwrapped).__name__}

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make a task such as ``isaaclab:Isaac-Cartpole-v0``. Launch the Isaac Lab app first.

        ``kwargs`` are ``device`` (default "cuda:0"), ``render_mode``, and entries of the task's
        ``cfg``. If the ``cfg`` has ``compute_final_obs``, the default is True.
        """
        env = make_task(name, lanes, kwargs)
        with closing_on_error(env):
            return cls(env)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap an instance of Isaac Lab's classes or their subclasses; None for other objects."""
        if not isinstance(made, (gymnasium.Env, VectorEnv)):
            return None
        modules = (kind.__module__ for kind in type(made.unwrapped).__mro__)
        return cls(made) if any(each.startswith(PACKAGES) for each in modules) else None


_SAME_STEP = (AutoresetMode.SAME_STEP, AutoresetMode.SAME_STEP.value, AutoresetMode.SAME_STEP.name)


def make_task(name: str, lanes: int, given: Mapping[str, Any]) -> Any:
    """Make the environment of a task. ``given`` has the ``kwargs`` of `IsaacLabSystem.make`.

    Raises:
        MissingExtra: Isaac Lab is not installed.
        EnvironmentRefused: the Isaac Lab app was not launched.
        ArgumentError: the task is unknown, or its cfg lacks an entry.
    """
    entries = dict(given)
    mode = entries.pop("render_mode", None)
    parse = _tasks(name).parse_env_cfg
    try:
        cfg = parse(name, device=entries.pop("device", "cuda:0"), num_envs=lanes)
    except gymnasium.error.Error as error:
        raise ArgumentError(f"isaaclab:{name}: {error}") from error
    if hasattr(cfg, "compute_final_obs"):
        entries.setdefault("compute_final_obs", True)
    if unknown := [key for key in entries if not hasattr(cfg, key)]:
        raise ArgumentError(f"isaaclab:{name}: expected entries of the task's cfg, got {unknown}")
    for key, value in entries.items():
        setattr(cfg, key, value)
    return gymnasium.make(name, cfg=cfg, render_mode=mode)


def _tasks(name: str) -> Any:
    """Return the module with the tasks; importing its package registers them with Gymnasium."""
    for package in _TASK_PACKAGES:
        try:
            import_module(package)
            return import_module(f"{package}.utils")
        except ModuleNotFoundError as error:
            if not f"{package}.".startswith(f"{error.name}."):
                raise EnvironmentRefused(
                    f"isaaclab:{name}: Isaac Lab cannot be imported before its app is launched "
                    f"({error}). Call isaaclab.app.AppLauncher(headless=True) first, and then make "
                    "the collector in the same script."
                ) from error
    raise MissingExtra(
        f"isaaclab:{name}: Isaac Lab is not installed. Install it from NVIDIA "
        "(https://isaac-sim.github.io/IsaacLab)."
    )
