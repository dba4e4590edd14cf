"""Functional environments for tests: a toy with Brax's interface, manual replays, compilations."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from tensordict import TensorDictBase

from tallyroll.collector.counting.numbering import lane_seeds
from tallyroll.collector.envs.system import System
from tallyroll.collector.testing import SystemContract

# These settings halve the compile time, in this process and in workers.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# --- a toy with Brax's interface ------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ToyState:
    """A state class of its own, with the fields of Brax's and Playground's states."""

    position: Any
    obs: Any
    reward: Any
    done: Any
    metrics: dict[str, Any] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ToySys:
    """Parameters that are replaced by dotted names, as in Brax."""

    gravity: Any

    def tree_replace(self, values: Mapping[str, Any]) -> ToySys:
        return replace(self, **values)


class ToyEnv:
    """A ball that actions push, until it falls from its table."""

    action_size = 2

    def __init__(self, named: bool = False) -> None:
        self.sys = ToySys(jnp.float32(0.5))
        self.named = named

    def observed(self, position: Any) -> Any:
        whole = jnp.concatenate([position, self.sys.gravity[None]])
        return {"state": whole, "privileged_state": position} if self.named else whole

    def reset(self, key: Any) -> ToyState:
        position = jax.random.uniform(key, (2,), minval=-1.0)
        zero = jnp.zeros(())
        return ToyState(position, self.observed(position), zero, zero, {"far": zero}, {"n": 0})

    def step(self, state: ToyState, action: Any) -> ToyState:
        position = state.position + 0.3 * action
        position = position.at[1].add(-0.1 * self.sys.gravity)
        far = jnp.abs(position).max()
        done = (far > 1.2).astype(jnp.float32)
        info = {"n": state.info["n"] + 1}
        return ToyState(position, self.observed(position), far, done, {"far": far}, info)


class Forgetful(ToyEnv):
    """A toy whose state has another dtype after a step."""

    def step(self, state: ToyState, action: Any) -> ToyState:
        return replace(super().step(state, action), done=jnp.zeros((), bool))


class Wrapped:
    """A wrapper like Brax's."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":
            raise AttributeError(name)
        return getattr(self.env, name)


class AutoResetWrapper(Wrapped):
    pass


# --- shared compiled systems ----------------------------------------------------------------------

_shared: dict[Any, Any] = {}


def shared(make: Callable[[int], System], lanes: int) -> Any:
    """Return a system that shares compiled functions with others of its kind, and nothing else."""
    key = (make, lanes)
    if key not in _shared:
        _shared[key] = make(lanes)
    return copy.copy(_shared[key])


class SharedContract(SystemContract):
    """The contract for a system that is compiled only once."""

    system: ClassVar[Callable[[int], System]]
    """Factory of the system, which takes the number of lanes."""

    def make(self, lanes: int, seeds: Sequence[int] | None) -> System:
        """Make an instance. Resets seed it."""
        return shared(type(self).system, lanes)


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Collect the events of compilations within the context."""
    found: list[str] = []
    listening = True

    def listen(event: str, seconds: float, **kwargs: Any) -> None:
        if listening and "compile" in event:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        listening = False


# --- manual replay --------------------------------------------------------------------------------

Reset = Callable[[Any, int], tuple[Any, Mapping[Any, Any]]]
"""``(key, lane) -> (state, columns)``."""
Advance = Callable[..., tuple[Any, Mapping[Any, Any], Mapping[Any, Any]]]
"""``(key, state, *actions, lane) -> (state, columns, columns below "next")``."""


def replay(
    rows: TensorDictBase, seed: int, lanes: int, actions: Sequence[Any], reset: Reset, step: Advance
) -> tuple[int, int]:
    """Compare every row, lane by lane, with episodes made by the environment's own functions.

    Returns:
        The numbers of terminated and of truncated episodes.
    """
    arrays = {key: rows[key].numpy() for key in rows.keys(True, True)}
    lane_of, ids, steps = (arrays["collector", name] for name in ("lane", "traj_ids", "step"))
    ends = [0, 0]
    for lane, seeded in enumerate(lane_seeds(seed, lanes, 0)):
        key, state, seen = jax.random.PRNGKey(seeded), None, {}
        own = np.flatnonzero(lane_of == lane)
        for row in own[np.lexsort((steps[own], ids[own]))]:
            at = int(steps[row])
            if at == 0:
                key, first = jax.random.split(key)
                state, seen = reset(first, lane)
            _require(arrays, row, seen, ())
            taken = [arrays[name][row] for name in actions]
            state, seen, more = step(jax.random.fold_in(key, at), state, *taken, lane)
            _require(arrays, row, seen, ("next",))
            _require(arrays, row, more, ("next",))
            ends[0] += int(arrays["next", "terminated"][row, 0])
            ends[1] += int(arrays["next", "truncated"][row, 0])
    return ends[0], ends[1]


def _require(
    arrays: Mapping[Any, Any], row: int, columns: Mapping[Any, Any], lead: tuple[str, ...]
) -> None:
    for name, value in columns.items():
        names = (*lead, *(name.split("/") if isinstance(name, str) else name))
        got = arrays[names if len(names) > 1 else names[0]][row]
        wanted = np.asarray(value).reshape(got.shape)
        message = f"row {row}: {names}"
        if got.dtype.kind == "f":
            # Code compiled for a batch of lanes sums in another order than code for a single lane.
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=2e-5, err_msg=message)
        else:
            np.testing.assert_array_equal(got, wanted, err_msg=message)
