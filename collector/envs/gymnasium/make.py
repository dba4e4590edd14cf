"""Make Gymnasium environments from an id, an instance or a factory."""

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from tallyroll.collector.compat import mend_joint_types
from tallyroll.collector.envs import registry
from tallyroll.collector.envs.close import closing_on_error
from tallyroll.collector.envs.gymnasium.infos import discovered
from tallyroll.collector.envs.gymnasium.vector import GymnasiumVectorEnv
from tallyroll.collector.errors import ArgumentError, MissingExtra
from tallyroll.collector.options import Options
from tallyroll.storage.package.near_names import did_you_mean


def from_id(env_id: str, options: Options) -> GymnasiumVectorEnv:
    """Make ``options.num_envs`` environments of one id.

    Raises:
        ArgumentError: Gymnasium cannot make the environment.
        MissingExtra: a package is missing that one of tallyroll's extras installs.
    """
    kwargs = options.env_kwargs or {}

    def make() -> gymnasium.Env[Any, Any]:
        return gymnasium.make(env_id, **kwargs)

    with making(env_id, kwargs):
        vector = _vector([make] * (options.num_envs or 1))
    with closing_on_error(vector):
        return over(vector, lambda: _vector([make]), options)


def vector_of(
    first: gymnasium.Env[Any, Any], make: Callable[[], Any], lanes: int
) -> tuple[VectorEnv, Callable[[], VectorEnv]]:
    """Return a vector of ``lanes`` environments, and a function that makes a vector of one lane.

    ``first`` is the first environment, and ``make`` makes the others.

    Raises:
        ArgumentError: ``make`` returns something else, or the same environment again.
    """
    made = [first]

    def another() -> gymnasium.Env[Any, Any]:
        env = make()
        again = any(env is each for each in made)
        if again or not isinstance(env, gymnasium.Env):
            raise ArgumentError(
                "create_env_fn: expected a new Gymnasium environment from each call of the "
                f"factory, got {'the same one again' if again else type(env).__name__}"
            )
        return env

    with ExitStack() as on_error:
        on_error.callback(first.close)
        for _ in range(lanes - 1):
            made.append(another())
            on_error.callback(made[-1].close)
        alike = all(each.observation_space == first.observation_space for each in made)
        makers = [partial(made.__getitem__, lane) for lane in range(lanes)]
        vector = _vector(makers, "same" if alike else "different")
        on_error.pop_all()
    return vector, lambda: _vector([another])


def _vector(makers: Sequence[Callable[[], Any]], mode: str = "same") -> SyncVectorEnv:
    # The slab copies observations, so the vector need not copy them before.
    return SyncVectorEnv(
        makers, copy=False, observation_mode=mode, autoreset_mode=AutoresetMode.DISABLED
    )


@contextmanager
def making(env_id: str, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context manager that explains Gymnasium's errors while ``env_id`` is being made.

    Raises:
        ArgumentError: Gymnasium cannot make the environment.
        MissingExtra: a package is missing that one of tallyroll's extras installs.
    """
    try:
        if env_id.startswith("ALE/") and find_spec("ale_py") is not None:
            import_module("ale_py")  # registers the ids
        if env_id.startswith("gymnasium_robotics:") or "gymnasium_robotics" in sys.modules:
            mend_joint_types()
        yield
    except (gymnasium.error.Error, ImportError) as error:
        _name_the_extra(env_id, error)
        hint = f"; {NOT_REGISTERED}" if _lacks_registration(error) else _system_meant(env_id)
        raise ArgumentError(f"gymnasium cannot make {env_id!r}: {error}{hint}") from error
    except (TypeError, ValueError, AssertionError) as error:  # for example a max_episode_steps of 0
        raise ArgumentError(f"gymnasium cannot make {env_id!r} with {kwargs}: {error}") from error


NOT_REGISTERED = (
    "a worker process knows the ids that imported modules register, but not those that code under "
    "the main guard or in a notebook registers. Register the id in a module that can be imported "
    'and pass "module:Id-v0", or pass a factory that makes the environment from its class.'
)


def _system_meant(env_id: str) -> str:
    """Suggest an environment system with a name similar to the part before the first colon."""
    system, colon, _ = env_id.partition(":")
    near = did_you_mean(system.replace("-", "_"), registry.names()) if colon else ""
    return f"{near} `tallyroll envs` lists the systems" if near else ""


def _lacks_registration(error: BaseException) -> bool:
    unregistered = isinstance(error, gymnasium.error.UnregisteredEnv)
    return unregistered and multiprocessing.parent_process() is not None


def over(env: VectorEnv, create: Any, options: Options) -> GymnasiumVectorEnv:
    """Return an environment over ``env``.

    ``create`` makes a second vector, which is used to find the dtypes of infos. If it is None, the
    first reset of ``env`` declares them.
    """
    infos = options.info_keys
    if create is not None:
        infos = discovered(infos, create, env)
    return GymnasiumVectorEnv(
        env, reset_slots=options.checks.reset_slots, info_keys=infos, rename=options.rename
    )


def _name_the_extra(env_id: str, error: Exception) -> None:
    """Raise :class:`MissingExtra` if one of tallyroll's extras contains the missing package."""
    extra = None
    if env_id.startswith(("ALE/", "ale_py:")) and find_spec("ale_py") is None:
        extra = "atari"
    elif env_id.startswith("mo_gymnasium:") and find_spec("mo_gymnasium") is None:
        extra = "mo-gymnasium"
    elif isinstance(error, gymnasium.error.DependencyNotInstalled) and "mujoco" in str(error):
        extra = "mujoco"
    if extra is not None:
        raise MissingExtra(
            f'{env_id} needs a package that is not installed: pip install "tallyroll[{extra}]"'
        ) from error
