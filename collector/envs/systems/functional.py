"""Environments that are pure functions of JAX, compiled whole: one call steps every lane.

It keeps the final observations, and begins the next episodes of the lanes that ended, each with a
key and a context of its own. Contexts are arguments of that call: other values compile nothing.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.envs.systems.functional_specs import (
    keyed,
    merged,
    placed,
    require_same,
    specs_of,
    strong,
)
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key

Context: TypeAlias = Mapping[str, Any]

_FEW = 8


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
        self._begun = jax.jit(self._begin_all)
        # JAX writes the next states where the last ones were. Keys stay: a reset needs them.
        self._turned = jax.jit(self._turn, donate_argnums=0)
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

    # --- of all lanes, compiled: a carry is the leaves of states, (keys, steps done, contexts) ----

    def _begin_all(self, keys: Any, context: Context) -> tuple[Any, list[Any]]:
        jax = self._jax
        pairs = jax.vmap(jax.random.split)(keys)
        state, observation = jax.vmap(self.begin)(pairs[:, 1], context)
        columns = keyed(jax, observation)
        leaves, self._tree = jax.tree_util.tree_flatten(state)
        self._names = tuple(columns)
        steps = jax.numpy.zeros(len(keys), np.int32)
        return (strong(jax, leaves), (pairs[:, 0], steps, context)), strong(jax, columns.values())

    def _restart(self, carry: Any, lanes: Any, context: Context) -> tuple[Any, list[Any]]:
        fresh, first = self._begun(carry[1][0], context)
        return merged(self._jax, lanes, fresh, carry), first

    def _turn(
        self, leaves: Any, rest: Any, action: Sequence[Any], drawn: Context
    ) -> tuple[Any, ...]:
        jax = self._jax
        keys, steps, context = rest
        state = jax.tree_util.tree_unflatten(self._tree, leaves)
        out = jax.vmap(self.advance)(
            jax.vmap(jax.random.fold_in)(keys, steps), state, action, context
        )
        seen = keyed(jax, out.observation)
        first = jax.eval_shape(self._begun, keys, context)[1]
        require_same(jax, state, out.state, f"{type(self).__name__}: its state")
        require_same(jax, dict(zip(self._names, first, strict=True)), seen, "its observation")
        after = strong(jax, jax.tree.leaves(out.state)), (keys, steps + 1, context)
        final = strong(jax, seen.values())
        carry, first = self._renew(after, final, out.terminated | out.truncated, drawn)
        ends = jax.numpy.stack([out.terminated, out.truncated])
        return carry, first, final, out.reward, ends, out.agents

    def _renew(self, carry: Any, final: Any, ended: Any, drawn: Context) -> tuple[Any, Any]:
        """Begin the next episodes of lanes that ended, a few at a time: mostly they are few."""
        jax, lanes = self._jax, self.declares.lanes
        few = max(_FEW, lanes // _FEW)

        def some(under_way: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            carry, seen, left = under_way
            at = jax.numpy.nonzero(left, size=min(few, lanes), fill_value=lanes)[0]
            begun = self._begin_all(carry[1][0][at], {name: x[at] for name, x in drawn.items()})
            carry, seen = placed(jax, at, lanes, begun, (carry, seen))
            return carry, seen, left.at[at].set(False, mode="drop")

        start = carry, final, ended
        return jax.lax.while_loop(lambda under_way: under_way[2].any(), some, start)[:2]

    # --- from outside -----------------------------------------------------------------------------

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Array]:
        """See `System.reset`."""
        if lanes is not None:
            self._carry, first = self._restarted(self._carry, lanes, self._context())
        elif seeds is None and self._carry is not None:
            self._carry, first = self._begun(self._carry[1][0], self._context())
        else:
            if seeds is None:
                seeds = np.random.SeedSequence().generate_state(self.declares.lanes).tolist()
            keys = self._keys(np.asarray(seeds, np.uint32))
            self._carry, first = self._begun(keys, self._context())
        return _views(first)

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, and begin the next episode of those that ended."""
        self._carry, first, final, reward, ends, agents = self._turned(
            *self._carry, (*action,), self._context()
        )
        over, cut = ends = np.asarray(ends)
        return Step(
            _views(first),
            _views(reward),
            over,
            cut,
            _views(final) if np.count_nonzero(ends) else None,
            agents={name: AgentFlags(*_views(each)) for name, each in agents.items()},
        )

    def _context(self) -> Context:
        # JAX may use the memory of NumPy's arrays itself, and the driver draws into these.
        names = self.declares.context
        return {name: self.next_context[name].copy() for name in names} if names else {}


def _views(arrays: Iterable[Any]) -> list[Array]:
    """As NumPy has them: on the CPU JAX's own memory, in a fifth of the time of from_dlpack."""
    return [np.asarray(each) for each in arrays]
