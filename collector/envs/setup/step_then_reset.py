"""Steps and resets of a TorchRL environment, separate if possible, or else watched."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tensordict import TensorDictBase
from torchrl.envs import EnvBase, ParallelEnv, TransformedEnv

from tallyroll.collector.compat import hooks_behind_steps, splits, step_mdp
from tallyroll.collector.envs.probes.reuse import contents, share_memory
from tallyroll.collector.envs.setup.traits import loses_finals
from tallyroll.collector.envs.system_env import SystemEnv
from tallyroll.collector.errors import EnvironmentRefused
from tallyroll.collector.policies.tensor_copies import own_tensors
from tallyroll.storage.rows.keys import NEXT

WATCHED = 8
"""Slots in which an environment is watched; it reuses memory from the start or never."""

Copy = Callable[[TensorDictBase], None]
"""Copies the result of a step."""

Values: TypeAlias = tuple[Any, ...]


class SplitStep:
    """Step an environment, have the result copied, and reset what is done: nothing is lost.

    The environment gets a copy of its last observation while it might write its next observation
    to the same memory, because a transform may compare the two.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._hooks = hooks_behind_steps(env)
        self._watched = WATCHED if isinstance(env, TransformedEnv) else 0
        self._reuses = False

    def begin(self, first: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict for the first step after a reset, which returned ``first``."""
        return self._own(first)

    def __call__(self, td: TensorDictBase, copy: Copy) -> tuple[TensorDictBase, TensorDictBase]:
        """Step and reset as ``step_and_maybe_reset`` does; ``copy`` gets the step's result."""
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
        if env.any_done(following):
            # A reset by mask joins the lanes that it resets with the others of its argument.
            following = env.reset(own_tensors(following), select_reset_only=True)
        return td, self._own(following)

    def _own(self, td: TensorDictBase) -> TensorDictBase:
        """Return ``td``, or a copy of it; while the environment is watched, keep both contents."""
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
    """Step and reset an environment by its own combined call, and watch its use of memory.

    Args:
        env: an environment whose step and reset cannot be separated.
        watch: whether its final observations are wanted, and come from memory of this process.

    Raises:
        EnvironmentRefused: it writes to the memory of an observation that it returned before, so
            that a reset may have overwritten the final one.
    """

    def __init__(self, env: EnvBase, *, watch: bool) -> None:
        self._env = env
        self._watches, self._watched = watch, WATCHED
        self._observed = list(env.observation_spec.keys(True, True))
        self._flags = list(env.done_spec.keys(True, True))
        self._seen: list[tuple[Values, tuple[bytes, ...]]] = []
        self._last_flags: Values = ()

    def begin(self, first: TensorDictBase) -> TensorDictBase:
        """Return the TensorDict for the first step after a reset, which returned ``first``."""
        if self._watches and self._watched:
            self._keep(self._observations(first))
        return first

    def __call__(self, td: TensorDictBase, copy: Copy) -> tuple[TensorDictBase, TensorDictBase]:
        """Call ``step_and_maybe_reset``, and ``copy`` with the step's result."""
        td, following = self._env.step_and_maybe_reset(td)
        if self._watches:
            self._look(td.get(NEXT), following)
        copy(td)
        return td, following

    def _look(self, after: TensorDictBase, following: TensorDictBase) -> None:
        if self._watched:
            self._watched -= 1
            if any(contents(values) != before for values, before in self._seen):
                raise self._refused("a step writes where an earlier observation lies")
            self._keep(self._observations(after))
            flags = self._values(after, self._flags)
            if share_memory(flags, self._last_flags) and share_memory(
                flags, self._values(following, self._flags)
            ):
                raise self._refused("a reset writes where the flags of the step lie")
            self._last_flags = flags
            if not self._watched:
                self._seen.clear()
        if any(bool(after.get(key).any()) for key in self._flags) and share_memory(
            self._observations(after), self._observations(following)
        ):
            raise self._refused("the final observation lies where the next first one does")

    def _keep(self, values: Values) -> None:
        self._seen = [*self._seen[-2:], (values, contents(values))]

    def _observations(self, td: TensorDictBase) -> Values:
        return self._values(td, self._observed)

    def _values(self, td: TensorDictBase, keys: Sequence[Any]) -> Values:
        return tuple(td.get(key, None) for key in keys)

    def _refused(self, what: str) -> EnvironmentRefused:
        return EnvironmentRefused(
            f"{type(self._env).__name__} steps and resets in one call of its own "
            f"(step_and_maybe_reset), and {what}, so final observations may be lost; let it "
            "return copies, or implement _step and _reset only"
        )


def way_of(env: EnvBase) -> SplitStep | WholeStep:
    """Return the way to step and reset ``env`` that loses no final observation unnoticed."""
    if splits(env):
        return SplitStep(env)
    # A SystemEnv returns copies, and so do the workers of a ParallelEnv, of which one was checked.
    copies = isinstance(env, SystemEnv | ParallelEnv)
    return WholeStep(env, watch=not copies and not loses_finals(env))
