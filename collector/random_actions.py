"""Random actions, drawn in blocks where a spec allows it; action masks are honoured."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, TensorSpec, Unbounded
from torchrl.envs import EnvBase

from tallyroll.collector.keys import Key, as_key

Array = NDArray[Any]
Draw = Callable[[np.random.Generator, int], Array]

MASK_NAME = "action_mask"


def block_draw(spec: TensorSpec) -> Draw | None:
    """A function ``(generator, slots) -> [slots, *spec.shape]``, or None for other specs.

    Uniform over discrete and bounded specs; where bounds are infinite, the distributions of
    ``gymnasium.spaces.Box.sample``: exponential beyond one bound, normal without bounds.
    """
    shape = tuple(spec.shape)
    dtype = torch.zeros(0, dtype=spec.dtype).numpy().dtype
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
            return lambda rng, slots: rng.integers(
                low.astype(np.int64), high.astype(np.int64) + 1, size=(slots, *shape)
            ).astype(dtype)
        return lambda rng, slots: _box(rng, low, high, (slots, *shape)).astype(dtype)
    if isinstance(spec, Unbounded) and dtype.kind == "f":
        return lambda rng, slots: rng.standard_normal((slots, *shape)).astype(dtype)
    return None


def _box(rng: np.random.Generator, low: Array, high: Array, size: tuple[int, ...]) -> Array:
    below, above = np.isfinite(low), np.isfinite(high)
    if below.all() and above.all():
        return rng.uniform(low, high, size)
    drawn = rng.standard_normal(size)
    tail = rng.exponential(size=size)
    drawn = np.where(below & ~above, low + tail, drawn)
    drawn = np.where(above & ~below, high - tail, drawn)
    both = below & above
    uniform = rng.uniform(np.where(both, low, 0.0), np.where(both, high, 1.0), size)
    return np.where(both, uniform, drawn)


def action_keys(env: EnvBase) -> tuple[Key, ...]:
    """The keys of every action of ``env``, in the order of its spec."""
    return tuple(as_key(key) for key in env.full_action_spec.keys(True, True))


def mask_key(env: EnvBase, action: Key) -> Key | None:
    """The key of the mask of legal actions that belongs to ``action``, if the specs have one."""
    candidate = (*action[:-1], MASK_NAME)
    names = [as_key(key) for key in env.observation_spec.keys(True, True)]
    return candidate if candidate in names else None


class RandomActions:
    """Draws for an environment, as a policy: ``td`` in, ``td`` with actions out.

    The draws come from torch's generator; a mask of legal actions in the observation (a key
    named ``"action_mask"`` beside the action) is honoured.
    """

    def __init__(self, env: EnvBase) -> None:
        self._env = env
        self._keys = action_keys(env)
        self._masks = {key: mask_key(env, key) for key in self._keys}

    @property
    def masked(self) -> bool:
        """Some action has a mask."""
        return any(self._masks.values())

    def __call__(self, td: TensorDictBase) -> TensorDictBase:
        """Write a random action under every action key of ``td``."""
        spec = self._env.full_action_spec
        for key in self._keys:
            leaf = spec[key]
            mask = self._masks[key]
            if mask is not None:
                leaf = leaf.clone()
                allowed = td.get(mask).to(torch.bool)
                # A final observation may allow nothing; what follows it in a reset slot is ignored.
                leaf.update_mask(allowed | ~allowed.any(-1, keepdim=True))
            td.set(key, leaf.rand())
        return td
