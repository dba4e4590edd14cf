"""Random actions that obey action masks, drawn in blocks if the spec allows it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.data import (
    Binary,
    Bounded,
    Categorical,
    MultiCategorical,
    OneHot,
    TensorSpec,
    Unbounded,
)
from torchrl.envs import ActionMask, Compose, EnvBase, TransformedEnv

from tallyroll.collector.errors import TransitionError
from tallyroll.collector.policies.masked_actions import Choices
from tallyroll.collector.policies.slot_rng import Draw, SlotRng, width_of
from tallyroll.collector.run_plan import masking
from tallyroll.collector.user_code import user_code
from tallyroll.storage.rows.keys import Key, as_key, format_key

Array = NDArray[Any]

MASK_NAME = "action_mask"


def block_draw(spec: TensorSpec) -> Draw | None:
    """Return a function ``(generator, slots) -> [slots, *spec.shape]``; None for other specs.

    The function draws uniformly for discrete and bounded specs. For infinite bounds, it uses the
    distributions of ``gymnasium.spaces.Box.sample``: exponential with one finite bound, normal
    without finite bounds.
    """
    shape = tuple(spec.shape)
    if spec.dtype in (None, torch.bfloat16) or getattr(spec, "mask", None) is not None:
        return None
    dtype = torch.zeros(0, dtype=spec.dtype).numpy().dtype
    if type(spec) is OneHot:
        n = int(spec.space.n)
        return lambda rng, slots: np.eye(n, dtype=dtype)[rng.integers(n, size=(slots, *shape[:-1]))]
    if type(spec) is Categorical:
        top = int(spec.n)
        return lambda rng, slots: rng.integers(top, size=(slots, *shape), dtype=np.int64).astype(
            dtype, copy=False
        )
    if type(spec) is MultiCategorical:
        tops = spec.nvec.cpu().numpy().reshape(-1, shape[-1])[0]
        return lambda rng, slots: rng.integers(tops, size=(slots, *shape)).astype(dtype)
    if isinstance(spec, Binary):
        return lambda rng, slots: rng.integers(2, size=(slots, *shape)).astype(dtype)
    if isinstance(spec, Bounded):
        low, high = spec.low.cpu().numpy(), spec.high.cpu().numpy()
        if dtype.kind in "iu":
            # The endpoint is included, because the largest int64 plus one does not exist.
            return lambda rng, slots: rng.integers(
                low.astype(np.int64), high.astype(np.int64), size=(slots, *shape), endpoint=True
            ).astype(dtype)
        return lambda rng, slots: _box(rng, low, high, (slots, *shape)).astype(dtype)
    if isinstance(spec, Unbounded) and dtype.kind == "f":
        return lambda rng, slots: rng.standard_normal((slots, *shape)).astype(dtype)
    return None


def _box(rng: np.random.Generator, low: Array, high: Array, size: tuple[int, ...]) -> Array:
    below, above = np.isfinite(low), np.isfinite(high)
    if below.all() and above.all():
        return _uniform(rng, low, high, size)
    drawn = rng.standard_normal(size)
    tail = rng.exponential(size=size)
    drawn = np.where(below & ~above, low + tail, drawn)
    drawn = np.where(above & ~below, high - tail, drawn)
    both = below & above
    uniform = _uniform(rng, np.where(both, low, 0.0), np.where(both, high, 1.0), size)
    return np.where(both, uniform, drawn)


def _uniform(rng: np.random.Generator, low: Array, high: Array, size: tuple[int, ...]) -> Array:
    with np.errstate(over="ignore"):
        span = high.astype(np.float64) - low
    if np.isfinite(span).all():
        return rng.uniform(low, high, size)
    share = rng.random(size)  # the span overflows
    return (1 - share) * low + share * high


def action_keys(env: EnvBase) -> tuple[Key, ...]:
    """Return the keys of all actions of ``env``, in the order of its spec."""
    return tuple(as_key(key) for key in env.full_action_spec.keys(True, True))


def mask_key(env: EnvBase, action: Key) -> Key | None:
    """Return the key of the mask that belongs to ``action``; None if the specs have none."""
    candidate = (*action[:-1], MASK_NAME)
    names = [as_key(key) for key in env.observation_spec.keys(True, True)]
    return candidate if candidate in names else None


def choices_of(env: EnvBase, action: Key) -> Choices | None:
    """Return the values that an action may have; None if a mask cannot list them."""
    spec, around = env.full_action_spec[action], env.full_action_spec
    for name in action[:-1]:
        around = around[name]
    return Choices.of(spec, len(spec.shape) - len(around.shape))


def lane_actions(env: EnvBase) -> dict[Key, TensorSpec]:
    """Return the specs of one lane's actions."""
    items = env.full_action_spec.items(True, True)
    return {as_key(key): spec[0] if env.batch_size else spec for key, spec in items}


def all_drawn(specs: Mapping[Key, TensorSpec], lanes: int) -> dict[Key, Draw] | None:
    """Return draws ``[slots, lanes, ...]`` of every action; None if a spec has no block draw.

    ``specs`` are the action specs of one lane.
    """
    draws = {key: block_draw(spec.expand(lanes, *spec.shape)) for key, spec in specs.items()}
    found = {key: draw for key, draw in draws.items() if draw is not None}
    return found if len(found) == len(draws) else None


Ahead = Mapping[Key, torch.Tensor]
"""Maps each action key to the actions of some slots, or the numbers that choose these actions.

The arrays are ``[slot, lane, ...]``.
"""


class RandomActions:
    """Draws random actions for an environment, which obey a mask of legal actions.

    The mask is an observation named ``"action_mask"`` at the level of the action, or an entry of
    that name in infos. Numbers are drawn for all ``lanes`` of the run, in the order of slots and
    lanes, and the numbers of lanes in other processes are dropped. Processes with equal generators
    therefore draw the same numbers for each lane as one process would. Specs without a block draw
    and without a known mask are drawn from torch's generator.

    Args:
        env: an environment of batch size ``[]`` or ``[lanes]``.
        rng: the generator of the numbers.
        lanes: number of lanes of the run; None to draw only for the lanes of ``env``.
        first: number in the run of the first lane of ``env``.
        columns: number of lanes that act per slot, if not all lanes of ``env`` act.
        acting: returns the lanes that act now, if lanes return in any order.
    """

    def __init__(
        self,
        env: EnvBase,
        rng: SlotRng,
        lanes: int | None = None,
        first: int = 0,
        columns: int | None = None,
        acting: Callable[[], Array] | None = None,
    ) -> None:
        self._env, self._rng, self._acting = env, rng, acting
        self._base = _bare(env)
        live = legal_of(env)
        keys = {key: mask_key(env, key) for key in action_keys(env)}
        self._masks = {key: None if key in live else mask for key, mask in keys.items()}
        masked = [key for key, mask in self._masks.items() if mask or key in live]
        self._choices = {key: choices_of(env, key) for key in masked}
        self._live = [key for key in self._masks if key in live]
        self.masking = masking(infos=bool(self._live), observations=any(self._masks.values()))
        """The decision of a `RunPlan` about masks."""
        own = env.batch_size.numel() if columns is None else columns
        self._lanes = own if lanes is None else lanes
        self._own = slice(first, first + own) if lanes is not None else None
        self._alike = lanes_alike(env) and not _masks_by_spec(env)
        specs = ((key, env.full_action_spec[key]) for key in self._masks)
        self._specs = {key: spec if columns is None else spec[:columns] for key, spec in specs}
        draws = {key: self._draw(key, spec) for key, spec in lane_actions(env).items()}
        self._draws = {key: draw for key, draw in draws.items() if draw is not None}
        self._drawers = list(self._draws.values())
        self._width = width_of(lane_actions(env).values(), self._lanes)
        self.block_drawn = not masked and len(self._draws) == len(draws)
        """True if no action depends on an observation, so that :func:`all_drawn` applies."""

    def _draw(self, key: Key, spec: TensorSpec) -> Draw | None:
        """Return the draw of actions, or of the numbers that choose actions from a mask."""
        if not self._alike:
            return None
        if key not in self._choices:
            return block_draw(spec.expand(self._lanes, *spec.shape))
        choices = self._choices[key]
        if choices is None:
            return None
        shape = choices.uniforms(tuple(spec.shape))
        return lambda rng, slots: rng.random((slots, self._lanes, *shape))

    @property
    def drawn_keys(self) -> Iterable[Key]:
        """Keys of the actions that :meth:`take` draws, or for which it draws numbers."""
        return self._draws

    def take(self, slots: int) -> list[Array]:
        """Return read-only draws ``[slot, lane, ...]`` of the next ``slots`` slots, by action."""
        drawn, own = self._rng.take(self._drawers, slots, self._width), self._own
        return drawn if own is None else [array[:, own] for array in drawn]

    @property
    def place(self) -> Mapping[str, Any]:
        """Position in the stream of random numbers; see :meth:`return_to`."""
        return self._rng.state

    def return_to(self, place: Mapping[str, Any], slots: int) -> None:
        """Continue with the numbers that come ``slots`` slots after an earlier :attr:`place`."""
        self._rng.return_to(place, self._drawers, slots, self._width)

    def masks_in(self, arrays: Mapping[Key, Array]) -> Mapping[Key, Array | None] | None:
        """Return the mask of each action from ``arrays`` ``[slot, lane, ...]`` of a slab, by key.

        The mask of an action without a mask in the slab is None. The whole result is None if an
        array or a block draw is missing that :meth:`put` needs.
        """
        wanted = [*self._masks, *(mask for mask in self._masks.values() if mask is not None)]
        if len(self._draws) < len(self._masks) or not all(key in arrays for key in wanted):
            return None
        return {key: None if mask is None else arrays[mask] for key, mask in self._masks.items()}

    def put(
        self, arrays: Mapping[Key, Array], masks: Mapping[Key, Array | None], start: int, stop: int
    ) -> Iterator[int]:
        """Write the actions of slots ``[start, stop)`` of a slab, one slot per iteration.

        ``masks`` is the result of :meth:`masks_in`.
        """
        drawn = [
            (key, arrays[key], masks[key], numbers, self._choices.get(key))
            for key, numbers in zip(self._draws, self.take(stop - start), strict=True)
        ]
        for at in range(start, stop):
            for key, actions, marks, numbers, choices in drawn:
                own = numbers[at - start]
                if choices is None:
                    actions[at] = own
                else:
                    actions[at] = choices.draw(self.legal(key) if marks is None else marks[at], own)
            yield at

    def legal(self, key: Key) -> Array:
        """Return the masks ``[lane, ...]`` of an action that come from infos.

        Raises:
            TransitionError: no action is legal in some lane.
        """
        marks, choices = legal_of(self._base)[key], self._choices[key]
        assert choices is not None
        acting = None if self._acting is None else self._acting()
        marks = marks if acting is None else marks[acting]
        batch = choices.batch(tuple(self._specs[key].shape))
        batch = batch if self._env.batch_size else (1, *batch)
        if not marks.all() and (nothing := choices.nothing(marks, batch)).any():
            at = int(np.argmax(nothing.reshape(len(marks), -1).any(-1)))
            lane = at if acting is None else int(acting[at])
            first = _system_of(self._base).first_lane
            raise TransitionError(
                f"{MASK_NAME} in the infos: expected at least one legal value of {format_key(key)} "
                f"for the random action, got none in lane {first + lane}. End the episode in such "
                "a state, or correct the mask."
            )
        return marks

    def draw_slots(self, slots: int) -> Ahead:
        """Draw the actions of ``slots`` slots; for masked actions, the numbers that choose them."""
        drawn = zip(self._draws, self.take(slots), strict=True)
        return self.of_lanes({key: torch.from_numpy(each.copy()) for key, each in drawn})

    def of_lanes(self, actions: Ahead) -> Ahead:
        """Return ``actions`` in the shape and on the device that the environment takes.

        The axis of lanes is dropped for a single environment.
        """
        squeeze, device = not self._env.batch_size, self._env.device
        placed = {key: column[:, 0] if squeeze else column for key, column in actions.items()}
        if device is None or device.type == "cpu":
            return placed
        # Numbers that choose from a mask are used on the CPU.
        return {key: c if key in self._choices else c.to(device) for key, c in placed.items()}

    def act(self, td: TensorDictBase, ahead: Ahead, slot: int) -> TensorDictBase:
        """Write the actions of slot ``slot`` of ``ahead`` to ``td``; see :meth:`draw_slots`."""
        for key, mask in self._masks.items():
            if key not in ahead:
                td.set(key, self._by_torch(key, None if mask is None else td.get(mask)))
            elif key not in self._choices:
                td.set(key, ahead[key][slot])
            else:
                spec, choices = self._specs[key], self._choices[key]
                assert choices is not None
                if mask is not None:
                    marks = td.get(mask).cpu().numpy()
                else:
                    marks = self.legal(key) if self._env.batch_size else self.legal(key)[0]
                drawn = choices.draw(marks, ahead[key][slot].numpy())
                action = torch.from_numpy(drawn).to(spec.dtype)
                td.set(key, action if spec.device is None else action.to(spec.device))
        return td

    def _by_torch(self, key: Key, mask: torch.Tensor | None) -> torch.Tensor:
        leaf = self._specs[key]
        if mask is not None:
            leaf = leaf.clone()
            allowed = mask.to(torch.bool)
            # A final observation may allow no action; the action in the reset slot after it is
            # ignored.
            leaf.update_mask(allowed | ~allowed.any(-1, keepdim=True))
        with user_code("the spec of a random action"):
            drawn: torch.Tensor = leaf.rand()
        return drawn

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action under every action key of ``td``."""
        return self.act(td, self.draw_slots(1), 0)


def legal_of(env: EnvBase) -> Mapping[Key, Array]:
    """Return masks of legal actions ``[lane, ...]``, by action, from an environment's infos.

    The masks are from the last step or reset of each lane; see `System.legal`.
    """
    system = _system_of(env)
    legal: Mapping[Key, Array] = {} if system is None else system.legal
    return legal


def _system_of(env: EnvBase) -> Any:
    """Return the system that an environment drives itself; None if there is none.

    Only the object's own attributes are read, because a `ParallelEnv` would look up other
    attributes in its processes.
    """
    stepper = vars(_bare(env)).get("stepper")
    return getattr(stepper, "system", None)


def _bare(env: EnvBase) -> EnvBase:
    while isinstance(env, TransformedEnv):
        env = env.base_env
    return env


def _masks_by_spec(env: EnvBase) -> bool:
    """Return True if a transform keeps the mask of the last observation in the action spec."""
    while isinstance(env, TransformedEnv):
        transforms = env.transform if isinstance(env.transform, Compose) else [env.transform]
        if any(isinstance(each, ActionMask) for each in transforms):
            return True
        env = env.base_env
    return False


def lanes_alike(env: EnvBase) -> bool:
    """Return True if all lanes of ``env`` have the same action specs."""
    if not env.batch_size:
        return True
    items = env.full_action_spec.items(True, True)
    return all(spec == spec[0].expand(spec.shape) for _, spec in items)
