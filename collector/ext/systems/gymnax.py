"""gymnax environments, whose parameters are arguments of their functions."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from torchrl.data import TensorSpec

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError
from tallyroll.collector.ext.systems.kinds.functional import Context, Functional, StepOutcome
from tallyroll.collector.ext.systems.kinds.functional_specs import (
    actions,
    contexts,
    made,
    observations,
    refuse_bare,
)

_LIMIT = "max_steps_in_episode"


class GymnaxSystem(Functional):
    """Lanes of a gymnax environment, stepped by ``reset_env`` and ``step_env``.

    gymnax reports every end as done. This system reports an end as truncated if the step would not
    have ended the episode without ``max_steps_in_episode``.

    Args:
        env: a ``gymnax.environments.environment.Environment``.
        lanes: number of lanes.
        params: parameters of the environment. None selects its default parameters.
        context: specs of the fields of ``params`` to draw at each reset (`SystemEnv`, ``draw``).
        unbounded: names of observations that exceed their declared bounds.
    """

    package, extra, names_contexts = "gymnax", "gymnax", True
    about = "its time limit truncates; finals kept, lanes reset by mask; a seed a lane"

    def __init__(
        self,
        env: Any,
        lanes: int,
        params: Any = None,
        *,
        context: Mapping[str, TensorSpec] | None = None,
        unbounded: Sequence[str] = (),
    ) -> None:
        convert = needs("gymnax.environments.spaces", self.extra).gymnax_space_to_gym_space
        self._env, self._params = env, env.default_params if params is None else params
        self._fields = vars(self._params)
        if unknown := {*(context or {})} - {*self._fields}:
            raise ArgumentError(
                f"context: expected some of the parameters {sorted(self._fields)}, got "
                f"{sorted(unknown)}"
            )
        super().__init__(
            lanes,
            actions(convert(env.action_space(self._params))),
            known=observations(convert(env.observation_space(self._params))),
            context=context,
            unbounded=unbounded,
        )

    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """See `Functional.begin`."""
        observation, state = self._env.reset_env(key, self._params.replace(**context))
        return state, observation

    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """See `Functional.advance`."""
        params = self._params.replace(**context)
        step = self._env.step_env
        observation, state_after, reward, done, _ = step(key, state, action[0], params)
        terminated = done
        if _LIMIT in self._fields:
            # After compilation, only the parts that differ from the first call are computed.
            terminated = (
                done & step(key, state, action[0], params.replace(**{_LIMIT: 2**31 - 1}))[3]
            )
        return StepOutcome(state_after, observation, [reward], terminated, done & ~terminated)

    def describe(self) -> dict[str, Any]:
        """Return the provenance, with the parameters."""
        return {
            "id": self._env.name,
            "type": type(self).__name__,
            "params": {name: repr(value) for name, value in self._fields.items()},
        }

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment of ``gymnax:name``.

        In ``kwargs``, ``params`` replaces parameters by name, ``context`` lists the parameters to
        draw at each reset, and ``unbounded`` is an argument of the class. The other arguments are
        the environment's own.
        """
        unbounded, changed = kwargs.pop("unbounded", ()), kwargs.pop("params", {})
        names = kwargs.pop("context", ())
        env, params = made(name, kwargs, needs("gymnax", cls.extra).make)
        if unknown := {*changed} - {*vars(params)}:
            raise ArgumentError(
                f"params: expected some of the parameters {sorted(vars(params))} of {name}, got "
                f"{sorted(unknown)}"
            )
        params = params.replace(**changed)
        context = contexts(names, vars(params), f"{name} ({', '.join(vars(params))})")
        return cls(env, lanes, params, context=context, unbounded=unbounded)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return None, or raise ArgumentError for a bare environment, which has no lane count."""
        env = made[0] if isinstance(made, tuple) and made else made
        refuse_bare(env, "gymnax.environments.environment", "Environment", cls.__name__)
        return None
