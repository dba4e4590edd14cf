"""Environments that are pure functions of JAX, compiled whole: one call steps every lane.

It keeps the final observations, and begins the next episodes of the lanes that ended, each with a
key and a context of its own. Contexts are arguments of that call: other values compile nothing.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.envs.systems.functional_specs import (
    keyed,
    merged,
    require_same,
    specs_of,
    strong,
)
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key

Context: TypeAlias = Mapping[str, Any]


class Outcome(NamedTuple):
    """What a step of one lane led to: trees and arrays of JAX."""

    state: Any
    observation: Any
    reward: Sequence[Any]
    terminated: Any
    truncated: Any
    agents: Mapping[str, AgentFlags] = {}
    """Of each group, ``[agent]``."""


class Functional(System):
    """Lanes of a pure function: a subclass writes :meth:`begin` and :meth:`advance` of one lane.

    The key of a lane is ``PRNGKey(seed)``. An episode splits it, ``key, own = split(key)``: it
    begins with ``own``, and its step t, from 0 on, has ``fold_in(key, t)``. Where JAX runs on an
    accelerator, what lanes return is copied to the host. Specs are as in `Declares`; ``known`` are
    those that the environment declares, and ``unbounded`` names columns that leave their bounds.

    Raises:
        ArgumentError, SpaceError: the declarations do not fit what the environment returns.
        EnvironmentRefused: a step changes what the state is made of.
    """

    def __init__(
        self,
        lanes: int,
        action: Mapping[Key, TensorSpec],
        *,
        known: Mapping[Key, TensorSpec] | None = None,
        reward: Mapping[Key, TensorSpec] | None = None,
        context: Mapping[str, TensorSpec] | None = None,
        groups: Mapping[str, int] | None = None,
        unbounded: Sequence[str] = (),
    ) -> None:
        self._jax = jax = needs("jax", self.extra)
        self._carry = None
        self._keys = jax.jit(jax.vmap(jax.random.PRNGKey))
        self._begun, self._turned = jax.jit(self._begin_all), jax.jit(self._turn)
        self._restarted = jax.jit(self._restart)
        drawn = {
            name: np.zeros((lanes, *spec.shape), NUMPY[spec.dtype])
            for name, spec in (context or {}).items()
        }
        keys = jax.eval_shape(self._keys, np.zeros(lanes, np.uint32))
        seen = jax.eval_shape(self._begun, keys, drawn)[1]
        self.declares = Declares(
            lanes=lanes,
            observation=specs_of(dict(zip(self._names, seen, strict=True)), known or {}, unbounded),
            action=action,
            reward=reward or {("reward",): Unbounded((1,))},
            at_end="first",
            finals="extra",
            context=context or {},
            groups=groups or {},
        )

    @abstractmethod
    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """The first state of an episode, and its observation."""

    @abstractmethod
    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> Outcome:
        """A step; nothing is reset in it."""

    # --- of all lanes, compiled: a carry is the leaves of states, keys, steps done and contexts ---

    def _begin_all(self, keys: Any, context: Context) -> tuple[Any, list[Any]]:
        jax = self._jax
        pairs = jax.vmap(jax.random.split)(keys)
        state, observation = jax.vmap(self.begin)(pairs[:, 1], context)
        columns = keyed(jax, observation)
        leaves, self._tree = jax.tree_util.tree_flatten(state)
        self._names = tuple(columns)
        steps = jax.numpy.zeros(len(keys), np.int32)
        return (strong(jax, leaves), pairs[:, 0], steps, context), strong(jax, columns.values())

    def _restart(self, carry: Any, lanes: Any, context: Context) -> tuple[Any, list[Any]]:
        fresh, first = self._begun(carry[1], context)
        return merged(self._jax, lanes, fresh, carry), first

    def _turn(self, carry: Any, action: Sequence[Any], drawn: Context) -> tuple[Any, ...]:
        jax = self._jax
        leaves, keys, steps, context = carry
        state = jax.tree_util.tree_unflatten(self._tree, leaves)
        out = jax.vmap(self.advance)(
            jax.vmap(jax.random.fold_in)(keys, steps), state, action, context
        )
        seen = keyed(jax, out.observation)
        first = jax.eval_shape(self._begun, keys, context)[1]
        require_same(jax, state, out.state, f"{type(self).__name__}: its state")
        require_same(jax, dict(zip(self._names, first, strict=True)), seen, "its observation")
        after = strong(jax, jax.tree.leaves(out.state)), keys, steps + 1, context
        final = strong(jax, seen.values())
        ended = out.terminated | out.truncated

        def anew() -> tuple[Any, list[Any]]:
            begun, first = self._restart(after, ended, drawn)
            return begun, merged(jax, ended, first, final)

        carry, first = jax.lax.cond(ended.any(), anew, lambda: (after, final))
        return carry, first, final, out.reward, out[3:5], out.agents

    # --- from outside -----------------------------------------------------------------------------

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Array]:
        """See `System.reset`."""
        if lanes is not None:
            self._carry, first = self._restarted(self._carry, lanes, self._context())
        elif seeds is None and self._carry is not None:
            self._carry, first = self._begun(self._carry[1], self._context())
        else:
            if seeds is None:
                seeds = np.random.SeedSequence().generate_state(self.declares.lanes).tolist()
            keys = self._keys(np.asarray(seeds, np.uint32))
            self._carry, first = self._begun(keys, self._context())
        return [np.asarray(each) for each in first]

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, and begin the next episode of those that ended."""
        self._carry, *columns, agents = self._turned(self._carry, (*action,), self._context())
        # NumPy views JAX's memory on the CPU, as from_dlpack would, in a fifth of the time.
        first, final, reward, (over, cut) = [[np.asarray(x) for x in each] for each in columns]
        flags = {name: AgentFlags(*map(np.asarray, each)) for name, each in agents.items()}
        return Step(first, reward, over, cut, final, agents=flags)

    def _context(self) -> Context:
        # JAX may use the memory of NumPy's arrays itself, and the driver draws into these.
        names = self.declares.context
        return {name: self.next_context[name].copy() for name in names} if names else {}
