"""TorchRL environment over any Gymnasium vector environment, with correct final observations."""

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
    """TorchRL environment over a ``gymnasium.vector.VectorEnv``, in any autoreset mode.

    Observation spaces may be Box, Discrete, MultiDiscrete, MultiBinary, Text, and Dict and Tuple of
    these. A plain space becomes ``"observation"``. The names of a Dict become root keys. A Tuple
    becomes ``"0"``, ``"1"``, … below ``"observation"``. A Text becomes its UTF-8 bytes, padded with
    zeros, uint8 ``[lanes, bytes]``.

    Action spaces may be Box, Discrete, MultiDiscrete or MultiBinary, under ``"action"``. Discrete
    actions are integers ``[lanes]``, not one-hot. The reward is float32 ``[lanes, 1]``, or
    ``[lanes, objectives]`` for MO-Gymnasium. ``done``, ``terminated`` and ``truncated`` are bool
    ``[lanes, 1]``.

    Args:
        env: the vector environment with ``num_envs`` lanes. Closing this environment closes it.
        reset_slots: how to treat the slots in which a NEXT_STEP environment resets itself.
            ``"mask"`` keeps the slots and marks them. ``"avoid"`` resets by mask right after the
            end, which saves a policy call (worthwhile for expensive policies).
        info_keys: entries of ``info`` that become observation columns: names, nested names as
            tuples or as ``"episode/r"``, or :class:`Info`. A plain name takes its dtype and shape
            from the first reset, and is a column from then on. Every step and reset must provide
            it.
        reset_masks: True if ``reset(options={"reset_mask": …})`` resets some of the lanes. None
            selects True for SyncVectorEnv, AsyncVectorEnv and Atari's vector, and False otherwise.
        rename: new names for columns, old name -> new name, for example
            ``{"action": "previous_action"}``. A name refers to an observation, or otherwise to an
            info. Write a nested name as a tuple or as ``"a/b"``.

    Raises:
        ArgumentError: an argument is invalid.
        NameRefused: names of columns collide. Use ``rename`` to resolve this.
        EnvironmentRefused: the environment cannot be driven without losing transitions.
        SpaceError: no column can hold a space.

    The semantics follow Gymnasium's ``AutoresetMode``, which is read from
    ``env.unwrapped.autoreset_mode``, or else from ``env.metadata``.
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
        """The wrapped Gymnasium environment."""
        return self.system.env

    @property
    def autoreset(self) -> AutoresetMode:
        """Autoreset mode of the vector environment."""
        return self.system.autoreset

    @property
    def info_names(self) -> tuple[str, ...]:
        """Names at the root of ``info`` from which columns are read."""
        return self.system.info_names
