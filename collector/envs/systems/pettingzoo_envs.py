"""PettingZoo's environments: by name, and AEC ones stepped as parallel ones are."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.envs.systems.agents import Spaces
from tallyroll.collector.errors import ArgumentError, MissingExtra

EXTRA = "pettingzoo"


def factory_of(name: str) -> Callable[..., Any]:
    """What makes the environments of a name: of PettingZoo's registry, or in a module.

    Raises:
        ArgumentError: there is none.
        MissingExtra: PettingZoo, or what the module imports, is not installed.
    """
    package: Any = needs("pettingzoo", EXTRA)
    registered = re.sub(r"_(v\d+)$", r"-\1", name)
    for kind in ("parallel", "aec"):
        if registered in getattr(package, f"{kind}_registry", ()):
            return partial(package.make, kind, registered)
    path, _, function = name.replace("/", ".").replace("-", "_").partition(":")
    for module in (path, f"pettingzoo.{path}"):  # before 1.27 there was no registry
        try:
            found = find_spec(module)
        except (ModuleNotFoundError, ValueError):
            continue
        loaded = needs(module, EXTRA) if found is not None else None
        for each in [function] if function else ["parallel_env", "env"]:
            if hasattr(loaded, each):
                made: Callable[..., Any] = getattr(loaded, each)
                return made
    raise ArgumentError(
        f"pettingzoo:{name}: neither PettingZoo's registry nor a module has it; examples are "
        "pettingzoo:sisl/pursuit-v5 and pettingzoo:mpe2.simple_tag_v3"
    )


def make_into(envs: list[Any], name: str, lanes: int, kwargs: Mapping[str, Any]) -> None:
    """Make an environment a lane; those that were made are in ``envs`` where one is not.

    Raises:
        ArgumentError: an unknown name, or arguments that it does not take.
        MissingExtra: a package that it needs is not installed.
    """
    factory = factory_of(name)
    try:
        while len(envs) < lanes:
            env = factory(**kwargs)
            if not hasattr(env, "action_space"):
                raise ArgumentError(
                    f"pettingzoo:{name}: expected it to make an environment, got a "
                    f"{type(env).__name__}"
                )
            envs.append(env)
    except (TypeError, AssertionError) as error:
        raise ArgumentError(f"pettingzoo:{name} with {dict(kwargs)}: {error}") from error
    except Exception as error:
        if isinstance(error.__cause__, ImportError):  # by PettingZoo's own make
            raise MissingExtra(str(error)) from error
        raise


def alike(envs: Sequence[Any]) -> tuple[list[Any], Spaces, Spaces]:
    """Parallel environments; observation and action spaces of all agents there may be.

    Raises:
        ArgumentError: environments do not say which, or not the same.
    """
    if unknown := [str(env) for env in envs if not getattr(env, "possible_agents", None)]:
        raise ArgumentError(f"{unknown[0]} names no possible_agents, so its columns are unknown")
    seen, acts = (
        [{a: getattr(env, kind)(a) for a in env.possible_agents} for env in envs]
        for kind in ("observation_space", "action_space")
    )
    if any(each != seen[0] for each in seen) or any(each != acts[0] for each in acts):
        raise ArgumentError(f"expected lanes of equal agents and spaces, got {list(envs)}")
    return [_parallel(env) for env in envs], seen[0], acts[0]


def _parallel(env: Any) -> Any:
    """``env``, or an AEC environment as something that is stepped in the same way."""
    if hasattr(env, "agent_iter"):
        if not env.metadata.get("is_parallelizable", False):
            return Turns(env)
        return needs("pettingzoo.utils.conversions", EXTRA).aec_to_parallel(env)
    return env


class Turns:
    """An AEC environment as a parallel one of which one agent acts a step."""

    def __init__(self, env: Any) -> None:
        self.env, self.possible_agents = env, getattr(env, "possible_agents", ())
        self.observation_space, self.action_space = env.observation_space, env.action_space
        self.close = env.close
        self.agents: list[str] = []
        """Whose turn it is."""

    def __str__(self) -> str:
        return str(self.env)

    def reset(self, seed: int | None, options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """First observations of all agents, and no infos."""
        self.env.reset(seed=seed, options=options)
        seen = {agent: self.env.observe(agent) for agent in self.env.agents}
        self._next_turn()
        return seen, {}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """The turn of the one of ``agents``; what it led to for all that lived."""
        env, (agent,) = self.env, self.agents
        env.step(actions[agent])
        # Wrappers take long to say what they have, so each is asked once.
        rewards, terminated, truncated = env.rewards, env.terminations, env.truncations
        seen = {agent: env.observe(agent) for agent in env.agents}
        if any(terminated.values()) or any(truncated.values()):
            # Dead agents are taken away by steps that forget what this one brought.
            rewards, terminated, truncated = dict(rewards), dict(terminated), dict(truncated)
            self._next_turn()
        else:
            self.agents = [env.agent_selection] if seen else []
        return seen, rewards, terminated, truncated, {}

    def _next_turn(self) -> None:
        env = self.env
        while env.agents and (
            env.terminations[env.agent_selection] or env.truncations[env.agent_selection]
        ):
            env.step(None)
        self.agents = [env.agent_selection] if env.agents else []
