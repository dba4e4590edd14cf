"""Resets of a vector's lanes with the seed and options that were drawn for each."""

from collections.abc import Sequence
from typing import Any, Self

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from tallyroll.collector.envs.gymnasium.vector_rules import VectorRules
from tallyroll.collector.envs.system import System

KEPT = frozenset({"reset_mask"})
"""Options that vectors reserve for themselves."""
_STEP, _RESET = SyncVectorEnv.step, SyncVectorEnv.reset


def takes_resets(env: VectorEnv, rules: VectorRules) -> tuple[bool, bool, str]:
    """Return whether a lane's reset accepts its own seed and its own options, and why not."""
    base = env.unwrapped
    by_mask = rules.at_end == "final" and rules.by_mask
    if isinstance(base, SyncVectorEnv):
        kind = type(base)
        if kind.reset is _RESET and (by_mask or kind.step is _STEP):
            return True, True, ""
        return False, False, f"{kind.__name__} overrides step or reset of SyncVectorEnv"
    if isinstance(base, AsyncVectorEnv):
        if by_mask and rules.takes_seeds:
            why = "AsyncVectorEnv passes the same options to all lanes"
            return True, False, f"{why}; use a SyncVectorEnv, or MultiprocessCollector"
        why = (
            "its processes reset lanes within a step, without seeds or options; use a "
            "SyncVectorEnv or MultiprocessCollector, or for seeds alone "
            'autoreset_mode=AutoresetMode.DISABLED, or reset_slots="avoid" in NEXT_STEP mode'
        )
        return False, False, why
    return False, False, "it resets lanes itself, without seeds or options"


class SeededLane:
    """Environment of a lane whose resets use the drawn seed and options."""

    __slots__ = ("_env", "_lane", "_options", "_reset", "_seeds", "step")

    def __init__(self, env: Any, lane: int, seeds: memoryview | None, options: Any) -> None:
        self._env, self._lane, self._seeds, self._options = env, lane, seeds, options
        self._reset, self.step = env.reset, env.step

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset the environment with the lane's seed and options, if there are any."""
        if self._seeds is not None:
            seed = self._seeds[self._lane]
        if self._options is not None:
            options = dict(self._options[self._lane])  # an environment may change it
        return self._reset(seed=seed, options=options)

    def __getattr__(self, name: str) -> Any:
        if name in SeededLane.__slots__:
            raise AttributeError(name)
        return getattr(self._env, name)


class SeededResets:
    """Context manager in which resets of a vector's lanes use the draws in ``system``.

    Args:
        system: the system that stores the seeds and options of the next resets, if any.
        base: a vector whose methods call the lanes in its list ``envs``.
    """

    def __init__(self, system: System, base: Any) -> None:
        self._system, self._base = system, base
        self.lanes: list[SeededLane] | None = None
        """The lanes whose resets use the draws, or None."""
        self._own: Any = None

    def __reduce__(self) -> Any:
        """Rebuild copies from the system and the vector alone."""
        return type(self), (self._system, self._base)

    def begin(self) -> Self:
        """Read the system's present draws, before a reset of all lanes."""
        seeds, options = self._system.next_seeds, self._system.next_options
        if seeds is None and options is None:
            self.lanes = None
            return self
        envs: Sequence[Any] = getattr(self._base, "envs", ())
        shared = None if seeds is None else seeds.data
        self.lanes = [SeededLane(env, lane, shared, options) for lane, env in enumerate(envs)]
        return self

    def __enter__(self) -> None:
        """Replace the vector's lanes by :attr:`lanes`, if there are draws."""
        if self.lanes:
            self._own, self._base.envs = self._base.envs, self.lanes

    def __exit__(self, *_: object) -> None:
        if self._own is not None:
            self._base.envs, self._own = self._own, None
