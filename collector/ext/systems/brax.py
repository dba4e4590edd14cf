"""Brax environments, which step a physics pipeline."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from torchrl.data import Bounded, TensorSpec

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError, EnvironmentRefused
from tallyroll.collector.ext.systems.kinds.functional import Context, Functional, StepOutcome
from tallyroll.collector.ext.systems.kinds.functional_specs import contexts, made, refuse_bare

Vary = Callable[[Any, Context], Any]


def _replaced(parameters: Any, context: Context) -> Any:
    return parameters.tree_replace(dict(context))


class BraxSystem(Functional):
    """Lanes of a Brax environment, without Brax's wrappers for training.

    Brax's own auto-reset loses final observations and begins each episode with the same state. In
    this system each episode has its own initial state and context. Actions are in [-1, 1], as in
    Brax's own training.

    Args:
        env: a ``brax.envs.Env``.
        lanes: number of lanes.
        episode_length: steps after which an episode is truncated. None never truncates.
        context: specs of the parameters to draw at each reset (`SystemEnv`, ``draw``), by the name
            of a field of the environment's ``sys``, such as ``"opt.gravity"``.
        vary: function ``vary(sys, context) -> sys`` that applies a context. By default it replaces
            fields.
    """

    package, extra, names_contexts = "brax", "brax", True
    about = "own time limit, truncated; finals kept, lanes reset by mask; a seed a lane"
    where: ClassVar[tuple[str, str]] = ("brax.envs.base", "Env")
    parameters: ClassVar[str] = "sys"

    def __init__(
        self,
        env: Any,
        lanes: int,
        *,
        episode_length: int | None = 1000,
        context: Mapping[str, TensorSpec] | None = None,
        vary: Vary = _replaced,
    ) -> None:
        wrappers = {type(each).__name__ for each in _chain(env)}
        if found := sorted(name for name in wrappers if "Vmap" in name or "AutoReset" in name):
            raise EnvironmentRefused(
                f"{type(self).__name__}: expected an environment without wrappers that make or "
                f"reset lanes, got {', '.join(found)}. Pass env.unwrapped."
            )
        if episode_length is not None and episode_length < 1:
            raise ArgumentError(f"episode_length: expected at least 1 step, got {episode_length}")
        self._env, self._vary, self._length = env, vary, episode_length
        action = Bounded(-1, 1, (int(env.action_size),))
        super().__init__(lanes, {("action",): action}, context=context)

    def begin(self, key: Any, context: Context) -> tuple[Any, Any]:
        """See `Functional.begin`."""
        state = self._varied(self._env, context).reset(key)
        return (state, 0), state.obs

    def advance(self, key: Any, state: Any, action: Sequence[Any], context: Context) -> StepOutcome:
        """See `Functional.advance`."""
        before, steps = state
        after = self._varied(self._env, context).step(before, action[0])
        steps, done = steps + 1, after.done > 0.5
        cut = done & (after.info.get("truncation", 0.0) > 0.5)  # set by an EpisodeWrapper
        terminated = done & ~cut
        if self._length is not None:
            cut |= ~terminated & (steps >= self._length)
        return StepOutcome((after, steps), after.obs, [after.reward], terminated, cut)

    def _varied(self, env: Any, context: Context) -> Any:
        """Return ``env`` with the parameters of ``context``, arguments of the compiled call."""
        if not context:
            return env
        env = copy.copy(env)
        if "env" in vars(env):
            env.env = self._varied(env.env, context)
        else:
            # If the parameters are a property, the field has an underscore.
            own = self.parameters if self.parameters in vars(env) else f"_{self.parameters}"
            setattr(env, own, self._vary(getattr(env, own), context))
        return env

    def describe(self) -> dict[str, Any]:
        """Return the provenance."""
        kind = type([*_chain(self._env)][-1]).__name__
        return {"id": kind, "type": type(self).__name__, "episode_length": self._length}

    @classmethod
    def make(cls, name: str, lanes: int, seeds: Sequence[int] | None, **kwargs: Any) -> Self:
        """Make the environment of ``brax:name``.

        ``kwargs`` are the environment's own arguments and ``episode_length``. ``context`` lists the
        fields of its ``sys`` to draw at each reset.
        """
        length, names = kwargs.pop("episode_length", 1000), kwargs.pop("context", ())
        envs = needs("brax.envs", cls.extra)
        env = made(name, kwargs, envs.get_environment)
        system = getattr([*_chain(env)][-1], cls.parameters)
        found = {each: _field(system, each) for each in names}
        context = contexts(
            names, found, f'{name} (fields of its {cls.parameters}, such as "opt.gravity")'
        )
        return cls(env, lanes, episode_length=length, context=context)

    @classmethod
    def adopt(cls, made: object) -> Self | None:
        """Return None, or raise ArgumentError for a bare environment, which has no lane count."""
        refuse_bare(made, *cls.where, cls.__name__)
        return None


def _field(parameters: Any, name: str) -> Any:
    """Return the field ``name``, such as ``"opt.gravity"``; None if the field is missing."""
    for part in name.split("."):
        parameters = getattr(parameters, part, None)
    return parameters


def _chain(env: Any) -> Iterator[Any]:
    """Yield ``env`` and the environments that it wraps, outermost first."""
    yield env
    while "env" in vars(env):
        env = env.env
        yield env
