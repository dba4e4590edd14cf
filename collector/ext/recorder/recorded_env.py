"""Environments that the user's loop steps: stand-ins, columns and descriptions for a recorder.

The ``step`` and ``reset`` of a stand-in return the results that the environment returned to the
loop. A recorder drives the stand-in as collectors drive environments, so the same code converts the
results to columns.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper
from numpy.typing import NDArray

from tallyroll.collector.counting.transitions import Mask
from tallyroll.collector.envs.gymnasium.info_merge import install
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.envs.gymnasium.vector_rules import VectorRules, autoreset_mode
from tallyroll.collector.envs.setup.make import make_env
from tallyroll.collector.envs.system import System
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.options import Options
from tallyroll.collector.options.objects import Columns

_FINALS = ("final_obs", "_final_obs")


@dataclass(frozen=True)
class RecordedEnv:
    """An environment that the user's loop steps, and a stand-in that repeats its results."""

    env: SystemEnv
    """Environment that drives ``stand_in`` and converts its results to columns."""
    stand_in: Any
    """The stand-in, whose ``returned`` is set to each result of the environment."""
    actual: SystemEnv
    """The environment itself. The recorder reads its traits, but never steps it."""
    description: dict[str, Any]
    """Description of the environment for provenance."""
    layers: list[str]
    """Class names of the environment and of its inner environments, outermost first."""
    is_single: bool = False
    """True if the environment has no dimension of lanes."""
    mask_refusal: str = ""
    """Reason to refuse resets by mask, which may reset other lanes too; empty: allow them."""
    forgets_resets: bool = False
    """True if a lane that the loop reset after its end may reset itself again in the next step."""

    actions: Callable[[Any], Sequence[NDArray[Any]]] | None = None
    """Function from the loop's action to an array ``[lane, ...]`` for each column of actions.

    None if there is only one such column, which stores the loop's action."""

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.env.stepper.declares.lanes

    @property
    def system(self) -> System:
        """The system that drives the stand-in."""
        return self.env.system

    @property
    def is_declared(self) -> bool:
        """True if the columns are known before the first reset."""
        stepper = self.env.stepper
        return set(stepper.info_keys) <= set(stepper.declares.observation)

    def require_mask(self, lanes: Mask | None) -> None:
        """Raise `EnvironmentRefused` if ``lanes`` is a mask, and masks are refused."""
        if lanes is not None and self.mask_refusal:
            raise EnvironmentRefused(f"reset_mask: {self.mask_refusal}")


def recorded_env(env: gymnasium.Env[Any, Any], options: Options) -> RecordedEnv:
    """Return the `RecordedEnv` of a single Gymnasium environment."""
    stand_in = EnvStandIn(env)
    vector = SyncVectorEnv([lambda: stand_in], copy=False, autoreset_mode=AutoresetMode.DISABLED)
    driven = _of_vector(vector, options, reset_masks=None)
    actual = _of_vector(vector, replace(options, columns=Columns()), reset_masks=None)
    description = _description(actual, options)
    layers = list(_layers(env, gymnasium.Wrapper))
    return RecordedEnv(driven, stand_in, actual, description, layers, is_single=True)


def recorded_vector(env: VectorEnv[Any, Any, Any], options: Options) -> RecordedEnv:
    """Return the `RecordedEnv` of a Gymnasium vector.

    Raises:
        EnvironmentRefused: the results of the vector do not contain all of its transitions.
    """
    disabled = VectorStandIn(env).autoreset_mode is AutoresetMode.DISABLED
    rules = VectorRules.of(env, "mask", True if disabled else None, bool(options.info_keys))
    refusal = ""
    if not rules.by_mask:
        refusal = (
            f"{rules.name_of(env)} is not known to keep the other lanes when it resets those of a "
            "mask. Reset all lanes, or use a SyncVectorEnv."
        )
    if options.info_keys:
        install(env, {info.key[-1] for info in options.info_keys})
    stand_in = VectorStandIn(env)
    stand_in.loses_finals = options.checks.finals == "lost"
    driven = _of_vector(stand_in, options, reset_masks=True)
    plain = replace(options, columns=Columns())
    actual = _of_vector(env, plain, reset_masks=True if disabled else None)
    layers = list(_layers(env, VectorWrapper))
    return RecordedEnv(
        driven,
        stand_in,
        actual,
        _description(actual, options),
        layers,
        mask_refusal=refusal,
        forgets_resets=rules.forgets_resets,
    )


def _of_vector(
    env: VectorEnv[Any, Any, Any], options: Options, *, reset_masks: bool | None
) -> GymnasiumVectorEnv:
    made = GymnasiumVectorEnv(
        env,
        info_keys=options.info_keys,
        reset_masks=reset_masks,
        rename=options.rename,
    )
    made.owns_system = False  # an attribute that callers set
    return made


def _description(env: SystemEnv, options: Options) -> dict[str, Any]:
    return make_env(env, replace(options, columns=Columns())).description


def _layers(env: Any, wrapper: Any) -> Iterator[str]:
    """Yield the class names of ``env`` and of its inner environments, outermost first."""
    while isinstance(env, wrapper):
        yield type(env).__name__
        env = env.env
    yield type(env).__name__


class EnvStandIn(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stand-in for a single Gymnasium environment."""

    returned: Any = None
    """The last result of the environment's ``step`` or ``reset``."""

    @property
    def spec(self) -> Any:  # type: ignore[override]
        """The spec of the environment itself."""
        return self.env.spec

    def step(self, action: Any) -> Any:
        """Return the last result of the environment."""
        return self.returned

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the last result of the environment."""
        return self.returned

    def close(self) -> None:
        """Do nothing: the loop owns the environment."""


class VectorStandIn(VectorEnv[Any, Any, Any]):
    """Stand-in for a Gymnasium vector.

    It is not a wrapper of ``env``. Otherwise the system would find a `SyncVectorEnv` inside it, and
    step the lanes of that.
    """

    returned: Any = None
    """The last result of the vector's ``step`` or ``reset``."""

    loses_finals = False
    """True if ``step`` returns no final observations, because the vector may lose them."""

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        self.num_envs, self.spec, self.metadata = env.num_envs, env.spec, env.metadata
        self.single_observation_space = env.single_observation_space
        self.single_action_space = env.single_action_space
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.autoreset_mode = autoreset_mode(env)
        if (space := getattr(env.unwrapped, "reward_space", None)) is not None:
            self.reward_space = space

    def step(self, actions: Any) -> Any:
        """Return the last result of the vector."""
        if not self.loses_finals:
            return self.returned
        *results, info = self.returned
        return *results, {name: value for name, value in info.items() if name not in _FINALS}

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Return the last result of the vector."""
        return self.returned
