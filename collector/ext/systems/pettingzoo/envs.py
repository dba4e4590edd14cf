"""Make PettingZoo environments by name, and adapt AEC environments to the parallel interface."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from tallyroll.collector.envs.extras import needs
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.ext.systems.kinds.agents import Spaces
from tallyroll.collector.ext.systems.pettingzoo.turns import AgentTurns

EXTRA = "pettingzoo"


def factory_of(name: str) -> Callable[..., Any]:
    """Return the factory of a name, from PettingZoo's registry or from a module.

    Raises:
        ArgumentError: there is no such environment.
        MissingExtra: PettingZoo, or a package that the module imports, is not installed.
    """
    if (known := registered(name)) is not None:
        return known
    path, _, function = name.replace("/", ".").replace("-", "_").partition(":")
    for module in (path, f"pettingzoo.{path}"):  # before version 1.27 PettingZoo had no registry
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
        f"pettingzoo:{name} is neither in PettingZoo's registry nor a module. Examples are "
        "pettingzoo:sisl/pursuit-v5 and pettingzoo:mpe2.simple_tag_v3."
    )


def registered(name: str) -> Callable[..., Any] | None:
    """Return the factory of a name in PettingZoo's registry; None if the registry lacks it.

    Raises:
        MissingExtra: PettingZoo is not installed.
    """
    package: Any = needs("pettingzoo", EXTRA)
    known = re.sub(r"_(v\d+)$", r"-\1", name)
    for kind in ("parallel", "aec"):
        if known in getattr(package, f"{kind}_registry", ()):
            return partial(package.make, kind, known)
    return None


def make_into(envs: list[Any], name: str, lanes: int, kwargs: Mapping[str, Any]) -> None:
    """Append one environment per lane to ``envs``.

    If an environment cannot be made, ``envs`` contains the environments made before it.

    Raises:
        ArgumentError: the name is unknown, or the environment does not accept the arguments.
        MissingExtra: a package that the environment needs is not installed.
    """
    factory = factory_of(name)
    try:
        while len(envs) < lanes:
            env = factory(**kwargs)
            if not hasattr(env, "action_space"):
                raise ArgumentError(
                    f"pettingzoo:{name}: expected a function that returns an environment, got one "
                    f"that returns a {type(env).__name__}"
                )
            envs.append(env)
    except (TypeError, AssertionError) as error:
        raise ArgumentError(f"pettingzoo:{name} with {dict(kwargs)}: {error}") from error
    except Exception as error:
        if isinstance(error.__cause__, ImportError):  # raised by PettingZoo's own make
            raise MissingExtra(str(error)) from error
        raise


def alike(envs: Sequence[Any]) -> tuple[list[Any], Spaces, Spaces]:
    """Return parallel environments, and the observation and action spaces of all possible agents.

    Raises:
        ArgumentError: an environment does not list its possible agents, or environments differ.
    """
    if unknown := [str(env) for env in envs if not getattr(env, "possible_agents", None)]:
        raise ArgumentError(
            f"{unknown[0]} has no possible_agents, so its columns are unknown. Let the environment "
            "list every agent in possible_agents."
        )
    seen, acts = (
        [{a: getattr(env, kind)(a) for a in env.possible_agents} for env in envs]
        for kind in ("observation_space", "action_space")
    )
    if any(each != seen[0] for each in seen) or any(each != acts[0] for each in acts):
        raise ArgumentError(f"expected environments with equal agents and spaces, got {list(envs)}")
    return [_parallel(env) for env in envs], seen[0], acts[0]


def _parallel(env: Any) -> Any:
    """Return ``env``, or an adapter that steps an AEC environment in the same way."""
    if hasattr(env, "agent_iter"):
        if not env.metadata.get("is_parallelizable", False):
            return AgentTurns(env)
        return needs("pettingzoo.utils.conversions", EXTRA).aec_to_parallel(env)
    return env
