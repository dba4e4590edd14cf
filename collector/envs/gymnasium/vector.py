"""Any Gymnasium vector environment, in any autoreset mode, with every final observation true."""

from collections.abc import Sequence
from typing import ClassVar

from gymnasium.vector import AutoresetMode, VectorEnv

from tallyroll.collector.envs import registry
from tallyroll.collector.envs.gymnasium.system import GymnasiumSystem
from tallyroll.collector.envs.gymnasium.vector_rules import autoreset_mode
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.options.objects import ResetSlots
from tallyroll.collector.slab.info import Info, infos_of
from tallyroll.collector.slab.names import Rename

__all__ = ["GymnasiumVectorEnv", "autoreset_mode"]


class GymnasiumVectorEnv(SystemEnv):
    """A TorchRL environment over a ``gymnasium.vector.VectorEnv``.

    Observations: Box, Discrete, MultiDiscrete, MultiBinary, Text, Dict and Tuple of them; a plain
    space is ``"observation"``, a Dict's names are root keys, a Tuple stands under
    ``"observation"`` as ``"0"``, ``"1"``, …; a Text is uint8 ``[lanes, bytes]``, its UTF-8 with
    zeros behind it. Actions: Box, Discrete, MultiDiscrete or MultiBinary, under ``"action"``;
    discrete ones are integers ``[lanes]``, not one-hot. Reward is float32 ``[lanes, 1]``,
    MO-Gymnasium's ``[lanes, objectives]``; done, terminated, truncated are bool ``[lanes, 1]``.

    Args:
        env: the vector environment, its ``num_envs`` lanes. Closing this closes it.
        reset_slots: what to do with the slots in which a NEXT_STEP environment resets itself.
            ``"mask"`` lets them happen and marks them; ``"avoid"`` resets by mask right after
            the end, so that no policy call is wasted (worth it for costly policies).
        info_keys: entries of ``info`` that become observation columns: names, nested ones as
            tuples or ``"episode/r"``, or :class:`Info`. A name alone takes dtype and shape from
            the first reset, and is a column from then on; every step and reset has to give it.
        reset_masks: whether ``reset(options={"reset_mask": …})`` resets a part of the lanes;
            known for Sync, Async and Atari's, False otherwise unless you say so.
        rename: other names for columns, ``{"action": "previous_action"}``: old name -> new name,
            of an observation, or else of an info; nested ones as tuples or ``"a/b"``.

    Raises:
        ArgumentError: an argument that cannot be right.
        NameRefused: names of columns that collide; settled by ``rename``.
        EnvironmentRefused: an environment that cannot be driven without losing transitions.
        SpaceError: a space that no column can hold.

    Source of the semantics: Gymnasium's ``AutoresetMode``, read from
    ``env.unwrapped.autoreset_mode``, then from ``env.metadata``.
    """

    in_place: ClassVar[bool] = True
    system: GymnasiumSystem

    def __init__(
        self,
        env: VectorEnv,
        *,
        reset_slots: ResetSlots = "mask",
        info_keys: Sequence[str | tuple[str, ...] | Info] = (),
        reset_masks: bool | None = None,
        rename: Rename | None = None,
    ) -> None:
        adopted = registry.adopt(env)
        kind = type(adopted) if isinstance(adopted, GymnasiumSystem) else GymnasiumSystem
        system = kind(
            env, reset_slots=reset_slots, infos=infos_of(info_keys), reset_masks=reset_masks
        )
        super().__init__(system, rename=rename)

    @property
    def vector_env(self) -> VectorEnv:
        """The Gymnasium environment underneath."""
        return self.system.env

    @property
    def autoreset(self) -> AutoresetMode:
        """Its autoreset mode."""
        return self.system.autoreset

    @property
    def info_names(self) -> tuple[str, ...]:
        """Names at the root of ``info`` that columns are read from."""
        return self.system.info_names
