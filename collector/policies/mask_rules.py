"""Checks of action masks in a slab: that masks are valid, and that actions obey them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data import TensorSpec
from torchrl.envs import EnvBase

from tallyroll.collector.errors import SpaceError
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.collector.policies.random_actions import (
    MASK_NAME,
    action_keys,
    choices_of,
    legal_of,
    mask_key,
)
from tallyroll.storage.rows.keys import Key, as_key, format_key

Array = NDArray[Any]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class MaskRule:
    """An action, and the mask that marks its legal values.

    All arrays are ``[time, lane, ...]``.
    """

    action: Key
    mask: Key
    choices: Choices
    agents: tuple[int, ...]
    """Sizes of the dimensions between the lane and a single action."""
    live: Key | None
    """Key of the mask of the agents that act, if the group has one."""
    by_policy: ClassVar[bool] = False
    has_noise: ClassVar[bool] = False

    def wrong(self, marks: Array, live: Array | None) -> tuple[Mask, str]:
        """Find invalid masks.

        Returns:
            Marks ``[time, lane]`` of invalid masks, and a description of the expected values.
        """
        flat = marks.reshape(*marks.shape[:2], -1)
        other = np.zeros(flat.shape[:2], np.bool_)
        if marks.dtype != np.bool_:
            other = np.asarray(((flat != 0) & (flat != 1)).any(-1))
        if other.any():
            return other, "1 for each value that is legal and 0 for the others"
        nothing = self._by_lane(self.choices.nothing(marks, marks.shape[:2] + self.agents))
        # An agent that does not act may have no legal action, and some groups do not mark who acts.
        if live is not None:
            empty = (nothing & self._by_lane(live)).any(-1)
        else:
            empty = nothing.all(-1)
        return np.asarray(empty), "at least one value that is legal"

    def quick(
        self, marks: Array, live: Array | None, *, zeros_and_ones: bool
    ) -> Callable[[], bool]:
        """Return a fast check: True if all masks in ``marks`` are valid, whichever agents act.

        Args:
            marks: the memory of the masks.
            live: the memory of the marks of agents that act; None if all agents may act.
            zeros_and_ones: True if another check covers values other than 0 and 1.
        """
        if zeros_and_ones and marks.dtype.itemsize == 1:
            marks = marks.view(np.bool_)
        batch = marks.shape[:2] + self.agents
        parts = self.choices.parts(marks, batch)
        assert parts is not None
        if marks.dtype == np.bool_:
            every, some = np.logical_and.reduce, np.logical_or.reduce
            if live is not None:
                return lambda: all(every(some(p, -1) >= live, None) for p in parts)
            if len(parts) == 1:
                (only,) = parts
                return lambda: bool(every(some(only, -1), None))
            return lambda: all(every(some(part, -1), None) for part in parts)
        least = 1 if live is None else live
        if marks.dtype.kind in "iu":
            return lambda: all(
                (p.max(-1) >= least).all() and p.max() <= 1 and p.min() >= 0 for p in parts
            )
        return lambda: all(
            (p.max(-1) >= least).all() and ((p == 0) | (p == 1)).all() for p in parts
        )

    def forbids(self, actions: Array, marks: Array, live: Array | None) -> Mask:
        """Return marks ``[time, lane]``, True where the mask forbids an acting agent's action."""
        batch = marks.shape[:2] + self.agents
        found = self._by_lane(~self.choices.allowed(actions, marks, batch))
        return np.asarray((found if live is None else found & self._by_lane(live)).any(-1))

    def _by_lane(self, flags: Array) -> Mask:
        """Reshape ``flags`` to ``[time, lane, agent]``."""
        return flags.reshape(*flags.shape[:2], -1)


def rules_of(env: EnvBase) -> Iterator[MaskRule]:
    """Yield a rule for each action with a mask that lists its values."""
    for key in action_keys(env):
        choices, mask = choices_of(env, key), mask_key(env, key)
        if choices is None or mask is None or _unfit(env, key, mask, choices):
            continue
        live = (*key[:-1], "mask")
        spec = env.observation_spec[live] if live in _observed(env) else None
        agents = _agents(env, key, choices)
        known = spec is not None and spec.dtype is torch.bool and _inner(env, spec) == [*agents]
        known = known and agents != ()
        yield MaskRule(key, mask, choices, agents, live if known else None)


def require_masks(env: EnvBase) -> None:
    """Refuse masks that random actions cannot obey.

    Raises:
        SpaceError: a mask cannot list the values of the action, or has another number of values.
    """
    legal = legal_of(env)
    for key in action_keys(env):
        if key in legal:
            _require_legal(env, key, tuple(legal[key].shape))
            continue
        mask = mask_key(env, key)
        if mask is None:
            continue
        spec, choices = env.full_action_spec[key], choices_of(env, key)
        way_out = (
            f'give the mask another name (rename={{"{format_key(mask)}": …}}), or pass a policy'
        )
        if choices is None and not hasattr(spec, "update_mask"):
            raise SpaceError(
                f"{format_key(mask)}: expected an action whose values a mask can list, got "
                f"{type(spec).__name__} {_inner(env, spec)} for {format_key(key)}; {way_out}"
            )
        if choices is not None and _unfit(env, key, mask, choices):
            got = _inner(env, env.observation_spec[mask])
            agents = _agents(env, key, choices)
            each = f", for each of the agents {list(agents)}" if agents else ""
            raise SpaceError(
                f"{format_key(mask)}: expected the shape {choices.form}{each}, with a mark for "
                f"each value of {format_key(key)}, got {got}; correct the mask, {way_out}"
            )


def _require_legal(env: EnvBase, key: Key, shape: tuple[int, ...]) -> None:
    """Refuse masks in infos that random actions cannot obey."""
    choices, spec = choices_of(env, key), env.full_action_spec[key]
    lanes = env.batch_size.numel()
    if choices is not None:
        batch = choices.batch(tuple(spec.shape))
        batch = batch if env.batch_size else (lanes, *batch)
        if choices.parts(np.broadcast_to(np.False_, shape), batch) is not None:
            return
    wanted = "an action whose values a mask can list"
    if choices is not None:
        wanted = f"the shape {choices.form}, with a mark for each value of {format_key(key)}"
    raise SpaceError(
        f"{MASK_NAME} in the infos: expected {wanted}, got the shape {list(shape[1:])} for "
        f"{type(spec).__name__} {_inner(env, spec)}; correct the mask, pass a policy, or give it "
        f'another name: info_keys=["{MASK_NAME}"], rename={{"{MASK_NAME}": …}}'
    )


def _unfit(env: EnvBase, key: Key, mask: Key, choices: Choices) -> bool:
    spec = env.observation_spec[mask]
    marks = np.broadcast_to(np.False_, tuple(spec.shape))  # takes no memory
    return choices.parts(marks, choices.batch(tuple(env.full_action_spec[key].shape))) is None


def _agents(env: EnvBase, key: Key, choices: Choices) -> tuple[int, ...]:
    return choices.batch(tuple(env.full_action_spec[key].shape))[len(env.batch_size) :]


def _inner(env: EnvBase, spec: TensorSpec) -> list[int]:
    return list(spec.shape[len(env.batch_size) :])


def _observed(env: EnvBase) -> set[Key]:
    return {as_key(key) for key in env.observation_spec.keys(True, True)}
