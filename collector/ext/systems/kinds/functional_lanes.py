"""Step all lanes of a pure JAX function, and begin their next episodes, in one call."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tallyroll.collector.envs.system import AgentFlags, System
from tallyroll.collector.ext.systems.kinds.functional_specs import (
    keyed,
    merged,
    placed,
    require_same,
    strong,
)

Context: TypeAlias = Mapping[str, Any]

_FEW = 8


class NextStarts(NamedTuple):
    """Initial values of the next episodes, ``[lane, ...]``."""

    context: Context
    seeds: Any
    """Seeds of the next episodes. None derives their keys from the keys of the last episodes."""


class StepOutcome(NamedTuple):
    """The result of a step of one lane, as JAX trees and arrays."""

    state: Any
    observation: Any
    reward: Sequence[Any]
    terminated: Any
    truncated: Any
    agents: Mapping[str, AgentFlags] = {}
    """Flags of each group, ``[agent]``."""


class FunctionalLanes(System):
    """Base of `Functional`. A subclass defines :meth:`begin` and :meth:`advance`."""

    _jax: Any
    _keys: Any
    """Compiled function from seeds to keys."""
    _begun: Any
    """:meth:`_begin_all`, compiled."""

    @abstractmethod
    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """Return the first state of an episode and its observation."""

    @abstractmethod
    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """Return the result of a step, without a reset."""

    # --- all lanes, compiled ----------------------------------------------------------------------
    # A carry is (leaves of states, (keys, steps done, contexts)).

    def _begin_all(self, keys: Any, context: Context) -> tuple[Any, list[Any]]:
        jax = self._jax
        pairs = jax.vmap(jax.random.split)(keys)
        state, observation = jax.vmap(self.begin)(pairs[:, 1], context)
        columns = keyed(jax, observation)
        leaves, self._tree = jax.tree_util.tree_flatten(state)
        self._names = tuple(columns)
        steps = jax.numpy.zeros(len(keys), np.int32)
        return (strong(jax, leaves), (pairs[:, 0], steps, context)), strong(jax, columns.values())

    def _restart(self, carry: Any, lanes: Any, drawn: NextStarts) -> tuple[Any, list[Any]]:
        keys = carry[1][0] if drawn.seeds is None else self._keys(drawn.seeds)
        fresh, first = self._begun(keys, drawn.context)
        return merged(self._jax, lanes, fresh, carry), first

    def _turn(
        self, leaves: Any, rest: Any, action: Sequence[Any], drawn: NextStarts
    ) -> tuple[Any, ...]:
        carry, final, reward, ends, agents = self._move(leaves, rest, action)
        carry, first = self._renew(carry[0], carry[1], final, ends, drawn)
        return carry, first, final, reward, ends, agents

    def _move(self, leaves: Any, rest: Any, action: Sequence[Any]) -> tuple[Any, ...]:
        """Step all lanes without beginning the next episodes."""
        jax = self._jax
        keys, steps, context = rest
        state = jax.tree_util.tree_unflatten(self._tree, leaves)
        out = jax.vmap(self.advance)(
            jax.vmap(jax.random.fold_in)(keys, steps), state, action, context
        )
        seen = keyed(jax, out.observation)
        first = jax.eval_shape(self._begun, keys, context)[1]
        require_same(jax, state, out.state, f"{type(self).__name__}: the state")
        require_same(jax, dict(zip(self._names, first, strict=True)), seen, "the observation")
        after = strong(jax, jax.tree.leaves(out.state)), (keys, steps + 1, context)
        ends = jax.numpy.stack([out.terminated, out.truncated])
        return after, strong(jax, seen.values()), out.reward, ends, out.agents

    def _renew(
        self, leaves: Any, rest: Any, final: Any, ends: Any, drawn: NextStarts
    ) -> tuple[Any, Any]:
        """Begin the next episodes of lanes that ended, a few lanes at a time.

        Few lanes end in most steps. ``ends`` holds terminated and truncated, bool ``[2, lane]``.
        """
        jax, lanes = self._jax, self.declares.lanes
        few, over, start = max(_FEW, lanes // _FEW), ends[0] | ends[1], ((leaves, rest), final)

        def all_at_once(before: tuple[Any, Any]) -> tuple[Any, Any]:
            keys = rest[0] if drawn.seeds is None else self._keys(drawn.seeds)
            found: tuple[Any, Any] = merged(jax, over, self._begin_all(keys, drawn.context), before)
            return found

        if lanes <= few:  # finding and gathering the lanes would take longer
            carry, first = jax.lax.cond(over.any(), all_at_once, lambda before: before, start)
            return carry, first

        def some(under_way: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            carry, seen, left = under_way
            at = jax.numpy.sort(jax.numpy.where(left, np.arange(lanes), lanes))[:few]
            keys = carry[1][0][at] if drawn.seeds is None else self._keys(drawn.seeds[at])
            begun = self._begin_all(keys, {name: x[at] for name, x in drawn.context.items()})
            carry, seen = placed(jax, at, lanes, begun, (carry, seen))
            return carry, seen, left.at[at].set(False, mode="drop")

        left = (*start, over)
        carry, first, _ = jax.lax.while_loop(lambda under_way: under_way[2].any(), some, left)
        return carry, first
