"""Vector environment of the Arcade Learning Environment, in either autoreset mode."""

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any, Self

import gymnasium
import numpy as np
from gymnasium.vector import VectorEnv

from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.gymnasium.system import GymnasiumSystem
from tallyroll.collector.envs.system import Mask
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused


class AleSystem(GymnasiumSystem):
    """An ``AtariVectorEnv``, or a wrapper around one.

    Each lane takes its own seed, and a mask selects the lanes to reset. With
    ``reset_slots="avoid"`` each reset of a lane takes a seed. The constructor reads the autoreset
    mode from the environment itself, because making another environment changes the mode that the
    class reports. The infos count frames: ``"episode_frame_number"`` is the number of frames of the
    episode, including no-ops and frame skips.

    Args:
        env: the environment. The system closes it.
        others: see `GymnasiumSystem`.

    Raises:
        EnvironmentRefused: the environment is asynchronous.
    """

    package = "ale_py"
    extra = "atari"
    about = "finals kept in either mode, lanes reset by mask; seeds at each reset"

    def __init__(self, env: VectorEnv, *, reset_masks: bool | None = None, **others: Any) -> None:
        base: Any = env.unwrapped
        if base.batch_size != base.num_envs:
            raise EnvironmentRefused(
                f"AtariVectorEnv with batch_size={base.batch_size} of num_envs={base.num_envs} is "
                "asynchronous and returns lanes in any order. Leave batch_size out."
            )
        masks = True if reset_masks is None else reset_masks
        super().__init__(env, reset_masks=masks, **others)
        if self._rules.at_end == "final" and masks:
            self._takes, self.why_no_resets = [True, False], "its resets accept no options"
        else:
            self.why_no_resets = (
                'it resets lanes within its step; in NEXT_STEP mode, reset_slots="avoid" lets each '
                "reset accept a seed, but not options"
            )
        self.declares = self._declared()

    @property
    def ticks(self) -> int | None:
        """Ticks of a transition, from the ``frameskip`` argument; None if unknown.

        The environment does not keep this argument, so the system restores it from the spec.
        """
        base: Any = self.env.unwrapped
        if "frameskip" not in vars(base):
            if self.env.spec is None:
                return None
            base.frameskip = _frameskip(type(base), self.env.spec.kwargs)
        return super().ticks

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the game ``name``, such as ``"ms_pacman"``.

        ``kwargs`` are passed to ``AtariVectorEnv``.
        """
        games = needs("ale_py.roms", "atari").get_all_rom_ids()
        if name not in games:
            raise ArgumentError(
                f"ale: expected the name of a game, such as 'pong' or 'ms_pacman', got {name!r}"
            )
        kind = needs("ale_py.vector_env", "atari").AtariVectorEnv
        try:
            env = kind(name, lanes, **kwargs)
        except (TypeError, ValueError, RuntimeError, gymnasium.error.Error) as error:
            raise ArgumentError(f"ale cannot make {name!r} with {kwargs}: {error}") from error
        with closing_on_error(env):
            env.frameskip = _frameskip(kind, kwargs)
            return cls(env)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Wrap an ``AtariVectorEnv`` or Gymnasium wrappers around one; None for other objects."""
        package = sys.modules.get("ale_py.vector_env")
        if package is None or not isinstance(made, VectorEnv):
            return None
        return cls(made) if isinstance(made.unwrapped, package.AtariVectorEnv) else None

    def _seed(self, seeds: Sequence[int], lanes: Mask | None = None) -> Any:
        every = np.asarray(seeds, np.int64)
        return every if lanes is None else every[lanes]


def _frameskip(kind: Any, kwargs: Mapping[str, Any]) -> int:
    """Return the frame skip of a vector environment made with ``kwargs``."""
    usual = signature(kind.__init__).parameters["frameskip"].default
    return int(kwargs.get("frameskip", usual))
