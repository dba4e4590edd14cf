"""The vector environment of the Arcade Learning Environment, in either of its autoreset modes."""

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

    It takes a seed a lane, and resets lanes by mask; with ``reset_slots="avoid"`` each reset of a
    lane takes a seed. Its mode is read once, from the environment
    itself: making another one changes what the class says. Its infos count frames:
    ``"episode_frame_number"`` those of the episode, no-ops and frame skips included.

    Args:
        env: closed with this.
        others: as `GymnasiumSystem`.

    Raises:
        EnvironmentRefused: an asynchronous one.
    """

    package = "ale_py"
    extra = "atari"
    about = "finals kept in either mode, lanes reset by mask; seeds at each reset"

    def __init__(self, env: VectorEnv, *, reset_masks: bool | None = None, **others: Any) -> None:
        base: Any = env.unwrapped
        if base.batch_size != base.num_envs:
            raise EnvironmentRefused(
                f"AtariVectorEnv with batch_size={base.batch_size} of num_envs={base.num_envs} is "
                "asynchronous: its lanes come back in any order; leave batch_size out"
            )
        masks = True if reset_masks is None else reset_masks
        super().__init__(env, reset_masks=masks, **others)
        if self._rules.at_end == "final" and masks:
            self._takes, self.why_no_resets = [True, False], "its resets take no options of a game"
        else:
            self.why_no_resets = (
                'it resets lanes within its step; in NEXT_STEP mode reset_slots="avoid" lets each '
                "reset take a seed, and none takes options of a game"
            )
        self.declares = self._declared()

    @property
    def ticks(self) -> int | None:
        """Ticks by the ``frameskip`` of its arguments, which it does not keep; None: unknown."""
        base: Any = self.env.unwrapped
        if "frameskip" not in vars(base):
            if self.env.spec is None:
                return None
            base.frameskip = _frameskip(type(base), self.env.spec.kwargs)
        return super().ticks

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """The game ``name``, as ``"ms_pacman"``; ``kwargs`` are those of ``AtariVectorEnv``."""
        games = needs("ale_py.roms", "atari").get_all_rom_ids()
        if name not in games:
            raise ArgumentError(
                f"ale: expected the name of a game, as 'pong' or 'ms_pacman', got {name!r}"
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
        """A system over an ``AtariVectorEnv``, or over wrappers of Gymnasium around one."""
        package = sys.modules.get("ale_py.vector_env")
        if package is None or not isinstance(made, VectorEnv):
            return None
        return cls(made) if isinstance(made.unwrapped, package.AtariVectorEnv) else None

    def _seed(self, seeds: Sequence[int], lanes: Mask | None = None) -> Any:
        every = np.asarray(seeds, np.int64)
        return every if lanes is None else every[lanes]


def _frameskip(kind: Any, kwargs: Mapping[str, Any]) -> int:
    """Return the frames of a step of a vector that ``kwargs`` made."""
    usual = signature(kind.__init__).parameters["frameskip"].default
    return int(kwargs.get("frameskip", usual))
