"""Environments that are pure JAX functions, compiled as a whole: one call steps every lane.

The call keeps the final observations. It also begins the next episodes of the lanes that ended,
each with its own key and context (`functional_lanes`). Contexts are arguments of the call, so new
values do not trigger a compilation.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torchrl.data import TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.frame_skips import ticks_of_objects
from tallyroll.collector.envs.system import AgentFlags, Array, Declares, Mask, Step
from tallyroll.collector.ext.systems.kinds.functional_lanes import FunctionalLanes, NextStarts
from tallyroll.collector.ext.systems.kinds.functional_specs import specs_of
from tallyroll.storage.rows.dtypes import NUMPY
from tallyroll.storage.rows.keys import Key

_LARGE_NBYTES = 2**11
"""Bytes per lane above which a second call is faster than returning observations twice."""


class Functional(FunctionalLanes):
    """Lanes of a pure function; a subclass defines :meth:`begin` and :meth:`advance` of one lane.

    The key of a lane is ``PRNGKey(seed)``, in each episode that has a seed. An episode splits it,
    ``key, own = split(key)``: the episode begins with ``own``, and its step t, counted from 0, uses
    ``fold_in(key, t)``. If JAX runs on an accelerator, the system copies the results of the lanes
    to the host. See `Declares` for the specs. ``known`` holds the specs that the environment
    declares, and ``unbounded`` names columns that exceed their bounds.

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

    @property
    def ticks(self) -> int | None:
        """Ticks of a transition, from the environment in ``_env``; 1 without an environment."""
        return ticks_of_objects([self._env])

    def reset(self, lanes: Mask | None, seeds: Sequence[int] | None, **options: Any) -> list[Array]:
        """See `System.reset`."""
        if lanes is not None:
            self._carry, first = self._restarted(self._carry, lanes, self._drawn())
        elif seeds is None and self._carry is not None:
            self._carry, first = self._begun(self._carry[1][0], self._drawn().context)
        else:
            if seeds is None:
                seeds = np.random.SeedSequence().generate_state(self.declares.lanes).tolist()
            keys = self._keys(np.asarray(seeds, np.uint32))
            self._carry, first = self._begun(keys, self._drawn().context)
        return _views(first)

    def step(self, action: Sequence[Array], lanes: Mask | None = None) -> Step:
        """Step all lanes, and begin the next episode of the lanes that ended."""
        if self._apart:
            self._carry, final, reward, told, agents = self._moved(*self._carry, (*action,))
            ends, first = np.asarray(told), final
            if np.count_nonzero(ends) or not self._renews:
                self._renews = True  # the first step compiles every function
                self._carry, first = self._renewed(*self._carry, final, told, self._drawn())
        else:
            self._carry, first, final, reward, told, agents = self._turned(
                *self._carry, (*action,), self._drawn()
            )
            ends = np.asarray(told)
        over, cut = ends
        return Step(
            _views(first),
            _views(reward),
            over,
            cut,
            _views(final) if np.count_nonzero(ends) else None,
            agents={name: AgentFlags(*_views(each[:2])) for name, each in agents.items()},
        )

    def _drawn(self) -> NextStarts:
        # JAX may share the memory of NumPy arrays, and the driver draws into these arrays.
        names, seeds = self.declares.context, self.next_seeds
        context = {name: self.next_context[name].copy() for name in names} if names else {}
        return NextStarts(context, None if seeds is None else seeds.astype(np.uint32))


def _views(arrays: Iterable[Any]) -> list[Array]:
    """Return NumPy views.

    On the CPU, the views share JAX's memory. Making them is five times faster than from_dlpack.
    """
    return [np.asarray(each) for each in arrays]
