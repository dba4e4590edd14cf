"""Jumanji environments, which return time steps."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from torchrl.data import Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.systems.kinds.functional import Context, Functional, StepOutcome
from tallyroll.collector.ext.systems.kinds.functional_specs import (
    actions,
    made,
    observations,
    refuse_bare,
)
from tallyroll.storage.rows.keys import Key


class JumanjiSystem(Functional):
    """Lanes of a Jumanji environment, without its auto-reset wrappers.

    A last step is terminated if its discount is 0. With several agents, all their discounts must be
    0. Any other last step is truncated. This follows Jumanji's own definition. Most of Jumanji's
    time limits have discount 0. Rewards are ``[agent]`` if the environment returns one per agent.
    Random actions respect ``action_mask``, which masks the choices of each agent or whole
    combinations.

    Args:
        env: a ``jumanji.env.Environment``.
        lanes: number of lanes.
        unbounded: names of observations that exceed their declared bounds, as Maze's ``step_count``
            does in the last step.
    """

    package, extra = "jumanji", "jumanji"
    about = "discount 0 is terminated; finals kept, lanes reset by mask; a seed a lane"
    why_no_resets = "its reset accepts only a key, which a seed determines"

    def __init__(self, env: Any, lanes: int, *, unbounded: Sequence[str] = ()) -> None:
        convert = needs("jumanji.specs", self.extra).jumanji_specs_to_gym_spaces
        self._env = env
        super().__init__(
            lanes,
            _of_agents(env) or actions(convert(env.action_spec)),
            known=observations(convert(env.observation_spec)),
            reward={("reward",): Unbounded(tuple(env.reward_spec.shape) or (1,))},
            unbounded=unbounded,
        )

    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """See `Functional.begin`."""
        state, step = self._env.reset(key)
        return state, step.observation

    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """See `Functional.advance`."""
        state, step = self._env.step(state, action[0])
        last, dead = step.last(), (step.discount == 0).all()
        return StepOutcome(state, step.observation, [step.reward], last & dead, last & ~dead)

    def describe(self) -> dict[str, Any]:
        """Return the provenance."""
        return {"id": type(self._env.unwrapped).__name__, "type": type(self).__name__}

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment of ``jumanji:name``.

        ``kwargs`` are the environment's own arguments and ``unbounded``.
        """
        unbounded = kwargs.pop("unbounded", ())
        env = made(name, kwargs, needs("jumanji", cls.extra).make)
        return cls(env, lanes, unbounded=unbounded)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return None, or raise ArgumentError for a bare environment, which has no lane count."""
        refuse_bare(made, "jumanji.env", "Environment", cls.__name__)
        return None


def _of_agents(env: Any) -> dict[Key, TensorSpec]:
    """Return the action spec if each agent has its own row in the action mask, otherwise {}."""
    spec, mask = env.action_spec, getattr(env.observation_spec, "action_mask", None)
    if mask is None or len(spec.shape) != 1 or len(mask.shape) != 2:
        return {}
    (agents,), (rows, choices) = spec.shape, mask.shape
    # The largest action of MultiCVRP may exceed the choices in its mask by one.
    has_all = np.all(spec.minimum == 0) and np.all(spec.maximum >= choices - 1)
    if agents != rows or not has_all or not np.issubdtype(spec.dtype, np.integer):
        return {}
    return {("action",): Categorical(choices, (agents,))}
