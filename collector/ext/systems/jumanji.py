"""Jumanji: environments that return time steps."""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from torchrl.data import Categorical, TensorSpec, Unbounded

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.ext.systems.kinds.functional import Functional
from tallyroll.collector.ext.systems.kinds.functional_lanes import Context, StepOutcome
from tallyroll.collector.ext.systems.kinds.functional_specs import (
    actions,
    made,
    observations,
    refuse_bare,
)
from tallyroll.storage.rows.keys import Key


class JumanjiSystem(Functional):
    """Lanes of a Jumanji environment, without its auto-reset wrappers.

    A last step whose discount is 0, for all agents where there are several, is terminated, any
    other truncated: so Jumanji's own words. Most of its time limits have the discount 0. Rewards
    are ``[agent]`` where they are that. Random actions keep to ``action_mask``, of the choices of
    each agent or of whole combinations.

    Args:
        env: a ``jumanji.env.Environment``.
        lanes: how many there are.
        unbounded: names of observations that leave the bounds that they are declared with, as
            Maze's ``step_count`` does in the last step.
    """

    package, extra = "jumanji", "jumanji"
    about = "discount 0 is terminated; finals kept, lanes reset by mask; a seed a lane"
    why_no_resets = "its reset takes a key alone, which a seed gives"

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
        """Provenance."""
        return {"id": type(self._env.unwrapped).__name__, "type": type(self).__name__}

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """The environment of ``jumanji:name``; ``kwargs`` are its own, and ``unbounded``."""
        unbounded = kwargs.pop("unbounded", ())
        env = made(name, kwargs, needs("jumanji", cls.extra).make)
        return cls(env, lanes, unbounded=unbounded)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """None, or raises: an environment does not say how many lanes are wanted."""
        refuse_bare(made, "jumanji.env", "Environment", cls.__name__)
        return None


def _of_agents(env: Any) -> dict[Key, TensorSpec]:
    """The action of agents that have a row each in the action mask; empty where there are none."""
    spec, mask = env.action_spec, getattr(env.observation_spec, "action_mask", None)
    if mask is None or len(spec.shape) != 1 or len(mask.shape) != 2:
        return {}
    (agents,), (rows, choices) = spec.shape, mask.shape
    # MultiCVRP's action may be one more than its mask has choices.
    has_all = np.all(spec.minimum == 0) and np.all(spec.maximum >= choices - 1)
    if agents != rows or not has_all or not np.issubdtype(spec.dtype, np.integer):
        return {}
    return {("action",): Categorical(choices, (agents,))}
