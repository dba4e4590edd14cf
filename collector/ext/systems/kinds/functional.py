"""Environments that are pure JAX functions, compiled as a whole: one call steps every lane.

The call keeps the final observations. It also begins the next episodes of the lanes that ended,
each with its own key and context. Contexts are arguments of the call, so new
values do not trigger a compilation.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step, System
from tallyroll.collector.ext.systems.kinds.functional_specs import (
    keyed,
    merged,
    placed,
    require_same,
    specs_of,
    strong,
)
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key
from tallyroll.storage.rows.transfers import same_place

Context: TypeAlias = Mapping[str, Any]

_FEW = 8
_LARGE_NBYTES = 2**11
"""Bytes per lane above which a second call is faster than returning observations twice."""


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


class Functional(System):
    """Lanes of a pure function; a subclass defines :meth:`begin` and :meth:`advance` of one lane.

    The key of a lane is ``PRNGKey(seed)``, in each episode that has a seed. An episode splits it,
    ``key, own = split(key)``: the episode begins with ``own``, and its step t, counted from 0, uses
    ``fold_in(key, t)``. If JAX runs on an accelerator, the system copies the results of the lanes
    to the host, unless :meth:`keep_on` keeps them there. See `Declares` for the specs. ``known``
    holds the specs that the environment declares, and ``unbounded`` names columns that exceed their
    bounds.

    Raises:
        ArgumentError: ``unbounded`` names an unknown column.
        SpaceError: the declarations do not fit the values that the environment returns.
        EnvironmentRefused: a step changes the structure of the state or of the observation.
    """

    why_no_resets = "the system was made without context=, the specs of its reset parameters"
    _env: Any = None

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
        self._carry: Any = None
        self._renews = False
        self._kept_on: torch.device | None = None
        self._held: list[Any] = []
        """Arrays of the last call that torch may still be copying from."""
        self._keys = jax.jit(jax.vmap(jax.random.PRNGKey))
        self._begun = jax.jit(self._begin_all)
        # JAX reuses the memory of the last states. It does not reuse the keys, which a reset needs.
        self._moved = jax.jit(self._move, donate_argnums=0)
        self._renewed = jax.jit(self._renew, donate_argnums=0)
        self._restarted = jax.jit(self._restart)
        drawn = {
            name: np.zeros((lanes, *spec.shape), NUMPY[spec.dtype])
            for name, spec in (context or {}).items()
        }
        keys = jax.eval_shape(self._keys, np.zeros(lanes, np.uint32))
        seen = jax.eval_shape(self._begun, keys, drawn)[1]
        nbytes = sum(x.size * x.dtype.itemsize for x in seen)
        self._apart = nbytes >= lanes * _LARGE_NBYTES
        self._turned = jax.jit(self._turn, donate_argnums=0)
        self.declares = Declares(
            lanes=lanes,
            observation=specs_of(dict(zip(self._names, seen, strict=True)), known or {}, unbounded),
            action=action,
            reward=reward or {("reward",): Unbounded((1,))},
            at_end="first",
            finals="extra",
            context=context or {},
            reset_seeds=True,
            groups=groups or {},
        )

    @abstractmethod
    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """Return the first state of an episode and its observation."""

    @abstractmethod
    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """Return the result of a step, without a reset."""

    @property
    def ticks(self) -> int | None:
        """Ticks of a transition, from the environment in ``_env``; 1 without an environment."""
        return ticks_of_objects([self._env])

    def keep_on(self, device: torch.device) -> bool:
        """Return JAX's own arrays, which torch reads by dlpack, if JAX computes on ``device``.

        Only the flags of a step are then copied to the host.
        """
        try:
            found = torch.utils.dlpack.from_dlpack(self._jax.numpy.zeros(1)).device
        except Exception:  # noqa: BLE001 - torch has no such device, and the errors differ
            return False
        if not same_place(found, device):
            return False
        self._kept_on, self.declares = found, replace(self.declares, device=str(found))
        return True

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Array]:
        """See `System.reset`."""
        self._release()
        if lanes is not None:
            self._carry, first = self._restarted(self._carry, lanes, self._drawn())
        elif seeds is None and self._carry is not None:
            self._carry, first = self._begun(self._carry[1][0], self._drawn().context)
        else:
            if seeds is None:
                seeds = np.random.SeedSequence().generate_state(self.declares.lanes).tolist()
            keys = self._keys(np.asarray(seeds, np.uint32))
            self._carry, first = self._begun(keys, self._drawn().context)
        return self._results(first)

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, and begin the next episode of the lanes that ended."""
        self._release()
        taken = tuple(action) if self._kept_on is None else self._shared(action)
        if self._apart:
            self._carry, final, reward, told, agents = self._moved(*self._carry, taken)
            ends, first = np.asarray(told), final
            if np.count_nonzero(ends) or not self._renews:
                self._renews = True  # the first step compiles every function
                self._carry, first = self._renewed(*self._carry, final, told, self._drawn())
        else:
            self._carry, first, final, reward, told, agents = self._turned(
                *self._carry, taken, self._drawn()
            )
            ends = np.asarray(told)
        over, cut = ends
        return Step(
            self._results(first),
            self._results(reward),
            over,
            cut,
            self._results(final) if np.count_nonzero(ends) else None,
            agents={name: AgentFlags(*_views(each[:2])) for name, each in agents.items()},
        )

    def _shared(self, action: Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Return actions as JAX arrays that share the memory of the tensors."""
        return tuple(self._jax.dlpack.from_dlpack(each.contiguous()) for each in action)

    def _results(self, arrays: Sequence[Any]) -> list[Array]:
        """Return results for the caller: NumPy views, or JAX's own arrays if they are kept."""
        if self._kept_on is None:
            return _views(arrays)
        self._held = [*self._held, *arrays]
        return list(arrays)

    def _release(self) -> None:
        """Release the arrays of the last call, so that JAX may reuse their memory.

        JAX does not know of the copies that torch makes, so they have to be complete.
        """
        if self._held:
            if self._kept_on is not None and self._kept_on.type != "cpu":
                torch.accelerator.current_stream(self._kept_on).synchronize()
            self._held = []

    def _drawn(self) -> NextStarts:
        # JAX may share the memory of NumPy arrays, and the driver draws into these arrays.
        names, seeds = self.declares.context, self.next_seeds
        context = {name: self.next_context[name].copy() for name in names} if names else {}
        return NextStarts(context, None if seeds is None else seeds.astype(np.uint32))

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


def _views(arrays: Iterable[Any]) -> list[Array]:
    """Return NumPy views.

    On the CPU, the views share JAX's memory. Making them is five times faster than from_dlpack.
    """
    return [np.asarray(each) for each in arrays]
