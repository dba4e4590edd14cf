"""Resets of a Gymnasium vector's lanes with the seed and options that each was drawn."""

from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv

from tallyroll.collector.envs.gymnasium.vector_rules import VectorRules
from tallyroll.collector.envs.system import System

KEPT = frozenset({"reset_mask"})
"""Options that vectors take for themselves."""


def takes_resets(env: VectorEnv, rules: VectorRules) -> tuple[bool, bool, str]:
    """Return whether each reset takes a seed, and options, of its own; and why not."""
    base = env.unwrapped
    if not (rules.at_end == "final" and rules.by_mask):
        if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
            return (
                False,
                False,
                (
                    "it resets lanes within its step, with neither; make it with "
                    'autoreset_mode=AutoresetMode.DISABLED, or add reset_slots="avoid" in NEXT_STEP'
                ),
            )
        return False, False, "it resets lanes itself, with neither"
    if type(base) is SyncVectorEnv or (
        isinstance(base, SyncVectorEnv) and type(base).reset is SyncVectorEnv.reset
    ):
        return True, True, ""
    if isinstance(base, AsyncVectorEnv) and rules.takes_seeds:
        return (
            True,
            False,
            (
                "an AsyncVectorEnv gives all lanes the same ones; use a SyncVectorEnv, or "
                "MultiprocessCollector"
            ),
        )
    return False, False, f"how {type(base).__name__} resets one lane is not known"


class _Lane:
    """A lane's environment for the time of a reset, which is given what was drawn."""

    __slots__ = ("_env", "_lane", "_system")

    def __init__(self, system: System, env: gymnasium.Env[Any, Any], lane: int) -> None:
        self._system, self._env, self._lane = system, env, lane

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Reset the environment with the lane's seed and options, where there are any."""
        seeds, given = self._system.next_seeds, self._system.next_options
        if seeds is not None:
            seed = seeds.item(self._lane)
        if given is not None:
            options = dict(given[self._lane])  # an environment may change it
        return self._env.reset(seed=seed, options=options)


class GivenResets:
    """A context of resets of a `SyncVectorEnv`: each lane takes what ``system`` has for it.

    Args:
        system: has seeds and options of next resets, or none.
        base: the vector, whose own ``reset`` calls that of its lanes; another one is left alone.
    """

    def __init__(self, system: System, base: Any) -> None:
        self._system, self._base = system, base
        self._envs: Any = None
        self._lanes: list[Any] = []

    def __enter__(self) -> None:
        """Let the vector call lanes that are given what was drawn, if anything was."""
        system, base = self._system, self._base
        if system.next_seeds is None and system.next_options is None:
            return
        if not isinstance(base, SyncVectorEnv):
            return
        own: Any = base.envs
        if len(self._lanes) != len(own):
            self._lanes = [_Lane(system, env, lane) for lane, env in enumerate(own)]
        self._envs, base.envs = own, self._lanes

    def __exit__(self, *_: object) -> None:
        if self._envs is not None:
            self._base.envs, self._envs = self._envs, None
