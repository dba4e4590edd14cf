"""Steps and resets of a TorchRL environment, as two calls if possible."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from tallyroll.collector.compat import post_step_hook, splits, step_mdp
from tallyroll.collector.envs.probes.reuse import contents, share_memory
from tallyroll.collector.envs.setup.traits import loses_finals
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.policies.tensor_copies import own_tensors
from tallyroll.storage.rows.keys import NEXT

WATCHED = 8
"""Number of slots to watch. An environment that reuses memory does so from the start."""

Copy = Callable[[TensorDictBase], None]
"""Function that copies the result of a step."""

Values: TypeAlias = tuple[Any, ...]


class SplitStep:
    """Steps an environment, has the result copied, and then resets lanes that are done.

    The copy precedes the reset, so no final observation is lost. An environment that may write an
    observation to the memory of the previous one receives a copy of the previous one, because a
    transform may compare the two.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._hooks = post_step_hook(env)
        self._watched = WATCHED if isinstance(env, TransformedEnv) else 0
        self._reuses = False

    def begin(self, first: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict for the first step after a reset. The reset returned ``first``."""
        return self._own(first)

    def __call__(self, td: TensorDictBase, copy: Copy) -> tuple[TensorDictBase, TensorDictBase]:
        """Step and reset like ``step_and_maybe_reset``. ``copy`` receives the step's result."""
        env = self._env
        if td.device != env.device:
            td = td.to(env.device)
        td = env.step(td)
        following = step_mdp(env, td)
        if self._hooks is not None:
            td, following = self._hooks(td, following)
        if self._watched:
            self._watch(td)
        copy(td)
        ended = env.any_done(following)
        if isinstance(ended, torch.Tensor) and ended.device.type != "cpu":
            # TorchRL has already read the value. To read it again would be another wait.
            ended = "_reset" in following.keys()
        if ended:
            # A reset by mask merges the lanes that it resets into its argument.
            following = env.reset(own_tensors(following), select_reset_only=True)
        return td, self._own(following)

    def _own(self, td: TensorDictBase) -> TensorDictBase:
        """Return ``td`` or a copy of it. While watching, remember its contents."""
        if self._watched:
            self._raw, self._held = td, contents(td)
        return own_tensors(td) if self._watched or self._reuses else td

    def _watch(self, td: TensorDictBase) -> None:
        self._watched -= 1
        after = td.get(NEXT)
        self._reuses |= share_memory(self._raw, after) or contents(self._raw) != self._held
        if self._reuses or not self._watched:
            self._watched = 0
            del self._raw, self._held


class WholeStep:
    """Steps and resets an environment in its combined call, and watches its use of memory.

    Args:
        env: an environment whose step and reset cannot be separated.
        watch: True if its final observations are needed and come from memory of this process.

    Raises:
        EnvironmentRefused: the environment writes to the memory of an earlier observation, so a
            reset may have overwritten the final one.
    """

    def __init__(self, env: EnvBase, *, watch: bool) -> None:
        self._env = env
        self._watches, self._watched = watch, WATCHED
        self._observed = list(env.observation_spec.keys(True, True))
        self._flags = list(env.done_spec.keys(True, True))
        self._seen: list[tuple[Values, tuple[bytes, ...]]] = []
        self._last_flags: Values = ()

    def begin(self, first: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict for the first step after a reset. The reset returned ``first``."""
        if self._watches and self._watched:
            self._keep(self._observations(first))
        return first

    def __call__(self, td: TensorDictBase, copy: Copy) -> tuple[TensorDictBase, TensorDictBase]:
        """Call ``step_and_maybe_reset``, and pass the step's result to ``copy``."""
        td, following = self._env.step_and_maybe_reset(td)
        if self._watches:
            self._look(td.get(NEXT), following)
        copy(td)
        return td, following

    def _look(self, after: TensorDictBase, following: TensorDictBase) -> None:
        if self._watched:
            self._watched -= 1
            if any(contents(values) != before for values, before in self._seen):
                raise self._refused("a step overwrites an earlier observation")
            self._keep(self._observations(after))
            flags = self._values(after, self._flags)
            if share_memory(flags, self._last_flags) and share_memory(
                flags, self._values(following, self._flags)
            ):
                raise self._refused("a reset overwrites the flags of the step")
            self._last_flags = flags
            if not self._watched:
                self._seen.clear()
        if any(bool(after.get(key).any()) for key in self._flags) and share_memory(
            self._observations(after), self._observations(following)
        ):
            raise self._refused("the final observation shares memory with the next first one")

    def _keep(self, values: Values) -> None:
        self._seen = [*self._seen[-2:], (values, contents(values))]

    def _observations(self, td: TensorDictBase) -> Values:
        return self._values(td, self._observed)

    def _values(self, td: TensorDictBase, keys: Sequence[Any]) -> Values:
        return tuple(td.get(key, None) for key in keys)

    def _refused(self, what: str) -> EnvironmentRefused:
        return EnvironmentRefused(
            f"{type(self._env).__name__} steps and resets in one call of its own "
            f"(step_and_maybe_reset), and {what}, so final observations may be lost. Return "
            "copies from the environment, or implement _step and _reset only."
        )


def way_of(env: EnvBase) -> SplitStep | WholeStep:
    """Choose how to step and reset ``env`` so that lost final observations are detected."""
    if splits(env):
        return SplitStep(env)
    # A SystemEnv returns copies. So do the workers of a ParallelEnv; one of them was probed.
    copies = isinstance(env, SystemEnv | ParallelEnv)
    return WholeStep(env, watch=not copies and not loses_finals(env))
