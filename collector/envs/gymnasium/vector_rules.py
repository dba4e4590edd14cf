"""Reset behavior of vector environments, and vectors that cannot be driven."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import gymnasium
from gymnasium.vector import (
    AsyncVectorEnv,
    AutoresetMode,
    SyncVectorEnv,
    VectorEnv,
    VectorWrapper,
)
from gymnasium.wrappers.vector import DictInfoToList, NormalizeObservation

from tallyroll.collector.compat import own_observations, states_of_lanes, widen_rewards
from tallyroll.collector.envs.probes.reuse import sharing
from tallyroll.collector.envs.system import AtEnd
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.options.checks import one_of
from tallyroll.collector.options.objects import ResetSlots

_REFUSED = {
    "gymnasium.envs.functional_jax_env": "a functional (phys2d) vector environment returns reward "
    "1 in reset slots, and loses the transitions of all other lanes in the same step. Use the CPU "
    "version of the environment.",
    "envpool": "Gymnasium wrappers hide EnvPool environments from Tallyroll's adapter. Pass the "
    "result of envpool.make to the collector, or the id 'envpool:TASK'.",
    "supersuit": "SuperSuit's vectors return wrong results if agents die at different times. Pass "
    "the vector itself to the collector, which detects this, or the PettingZoo environment.",
}
FORGETS = (
    "an AsyncVectorEnv in NEXT_STEP mode with shared_memory=False, or with a worker function of "
    "your own, may reset a lane again in the step after a reset, if the lane's episode had ended. "
    "Make the vector with autoreset_mode=AutoresetMode.DISABLED or SAME_STEP, or with "
    "shared_memory=True. If your own worker honours resets, pass reset_masks=True."
)
_AT_END: dict[AutoresetMode, AtEnd] = {
    AutoresetMode.DISABLED: "final",
    AutoresetMode.NEXT_STEP: "reset_slot",
    AutoresetMode.SAME_STEP: "first",
}


@dataclass(frozen=True)
class VectorRules:
    """Rules by which a vector environment resets its lanes."""

    autoreset: AutoresetMode
    at_end: AtEnd
    takes_seeds: bool
    """True if a reset accepts one seed per lane."""
    by_mask: bool
    """True if a reset can restart some lanes while the others continue."""
    whole: bool
    """True if a wrapper normalizes the observations of all lanes together."""
    forgets_resets: bool
    """True if a lane that ended and was reset may reset itself again in the next step."""
    stateful: list[tuple[Any, str]]
    """Wrappers and names of their per-lane states, which a reset of some lanes would erase."""

    @classmethod
    def of(
        cls, env: VectorEnv, reset_slots: ResetSlots, reset_masks: bool | None, infos: bool
    ) -> Self:
        """Determine the rules of ``env``. For the other arguments see `GymnasiumSystem`.

        Raises:
            ArgumentError: an argument is invalid.
            EnvironmentRefused: the environment cannot be driven without losing transitions.
        """
        _require_vector(env)
        one_of("reset_slots", reset_slots, ResetSlots)
        mode, wrappers = autoreset_mode(env), list(wrappers_of(env))
        if any(isinstance(each, DictInfoToList) for each in wrappers) and (
            infos or mode is AutoresetMode.SAME_STEP
        ):
            raise EnvironmentRefused(
                "DictInfoToList converts infos to lists, from which Tallyroll cannot read info "
                "columns or, in SAME_STEP mode, final observations. Remove this wrapper."
            )
        known = isinstance(env.unwrapped, (SyncVectorEnv, AsyncVectorEnv))
        whole = any(isinstance(each, NormalizeObservation) for each in wrappers)
        forgets = _forgets_resets(env, mode, reset_masks)
        by_mask = known if reset_masks is None else reset_masks
        avoids = reset_slots == "avoid" and mode is AutoresetMode.NEXT_STEP
        found = cls(
            autoreset=mode,
            at_end="final" if avoids else _AT_END[mode],
            takes_seeds=known,
            by_mask=by_mask and not (whole or forgets),
            whole=whole,
            forgets_resets=forgets,
            stateful=[(each, name) for each in wrappers for name in states_of_lanes(each)],
        )
        found._refuse(env, reset_slots)
        return found

    def _refuse(self, env: VectorEnv, reset_slots: ResetSlots) -> None:
        if self.autoreset is AutoresetMode.DISABLED and not self.by_mask:
            raise EnvironmentRefused(
                f"{type(env.unwrapped).__name__} has autoreset disabled and no reset by mask, so "
                "a lane whose episode ended could not be restarted alone. Use SyncVectorEnv, or "
                'pass reset_masks=True if the vector honours options["reset_mask"].'
            )
        if reset_slots == "avoid" and self.forgets_resets:
            raise EnvironmentRefused(FORGETS)
        if reset_slots == "avoid" and not self.by_mask:
            raise EnvironmentRefused(
                f'reset_slots="avoid" resets lanes by mask, but {self.name_of(env)} ignores masks. '
                'Use reset_slots="mask".'
            )

    def name_of(self, env: VectorEnv) -> str:
        """Return the kind of vector, for messages and provenance."""
        kind = type(env.unwrapped).__name__
        return f"NormalizeObservation({kind})" if self.whole else kind


def _require_vector(env: VectorEnv) -> None:
    if not isinstance(env, VectorEnv):
        raise ArgumentError(
            f"expected a gymnasium.vector.VectorEnv, got {type(env).__name__}; make one with "
            "gymnasium.make_vec(id, num_envs=…)"
        )
    for base in type(env.unwrapped).__mro__:
        for module, reason in _REFUSED.items():
            if base.__module__.startswith(module):
                raise EnvironmentRefused(reason)


def _forgets_resets(env: VectorEnv, mode: AutoresetMode, reset_masks: bool | None) -> bool:
    """Return True if a lane that ended and was reset may reset itself again in the next step.

    The worker of Gymnasium's `AsyncVectorEnv` without shared memory does so, at least from 1.1 to
    1.4. A custom worker may do so too, unless ``reset_masks`` is True.
    """
    base = env.unwrapped
    if not isinstance(base, AsyncVectorEnv) or mode is not AutoresetMode.NEXT_STEP:
        return False
    return not reset_masks if base.worker is not None else not base.shared_memory


def wrappers_of(env: VectorEnv) -> Iterator[VectorWrapper]:
    """Yield the vector wrappers of ``env``, outermost first."""
    while isinstance(env, VectorWrapper):
        yield env
        env = env.env


def autoreset_mode(env: VectorEnv) -> AutoresetMode:
    """Return the autoreset mode that ``env`` declares.

    Raises:
        EnvironmentRefused: the vector does not declare a mode.
    """
    mode = getattr(env.unwrapped, "autoreset_mode", None)
    if mode is None:
        mode = (env.metadata or {}).get("autoreset_mode")
    if mode is None:
        raise EnvironmentRefused(
            f"{type(env.unwrapped).__name__} does not declare how it resets lanes: expected "
            "env.unwrapped.autoreset_mode or env.metadata['autoreset_mode'] (gymnasium "
            f"{gymnasium.__version__}: one of {[m.value for m in AutoresetMode]})"
        )
    return mode if isinstance(mode, AutoresetMode) else AutoresetMode(mode)


def rewards_of(env: VectorEnv) -> tuple[int, ...]:
    """Return the shape of a lane's reward: ``()``, unless MO-Gymnasium declares another one."""
    base: Any = env.unwrapped
    space = getattr(base, "reward_space", None)
    if space is None and isinstance(base, SyncVectorEnv):
        space = _reward_space(base.envs[0])
        if space is not None:
            widen_rewards(base, space.shape)
    return () if space is None else tuple(space.shape)


def _reward_space(env: Any) -> Any:
    while isinstance(env, gymnasium.Wrapper):
        if type(env).__name__ == "LinearReward":  # MO-Gymnasium's weighted sum, a scalar
            return None
        env = env.env
    return getattr(env, "reward_space", None)


def refuse_texts(env: VectorEnv) -> None:
    """Raise if a vector repeats the first texts of its environments in every step."""
    base: Any = env.unwrapped
    if isinstance(base, AsyncVectorEnv) and base.shared_memory:
        raise EnvironmentRefused(
            "AsyncVectorEnv reads strings from shared memory only once, so every row would repeat "
            "the first string. Pass shared_memory=False and autoreset_mode=AutoresetMode.DISABLED."
        )


def refuse_shared(env: VectorEnv) -> None:
    """Raise if lanes overwrite each other's observations because they share an array."""
    if pair := sharing(own_observations(env)):
        raise EnvironmentRefused(
            f"lanes {pair[0]} and {pair[1]} return their observations in the same array, so "
            "each overwrites those of the other. Give each lane its own array, or return copies."
        )
